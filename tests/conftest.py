"""Fixtures of all tests: where the reference data lies, and a made-up kind that needs no planner."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from solver_plan.cli import main
from tests.shelf import shelf

__all__ = ["shelf"]

# the same examples every time, and no matter how slow the machine is
settings.register_profile("project", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")

PROJECT = Path(__file__).parent.parent
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in an empty folder and return its exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run_command


def data_folder() -> Path:
    """Folder of the reference data: `SOLVER_PLAN_DATA`, by default `shared/data` beside the repository."""
    return Path(os.environ.get("SOLVER_PLAN_DATA", PROJECT.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder of the reference data; the test is skipped where it is absent."""
    folder = data_folder()
    if not folder.is_dir():
        pytest.skip(f"the reference data is not at {folder}; set SOLVER_PLAN_DATA")
    return folder


@pytest.fixture
def read_only_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that may be read but not written; root acts as somebody else meanwhile, for whom that holds too."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    folder.chmod(0o555)
    if os.geteuid() != 0:
        yield folder
        return
    opened = [parent for parent in folder.parents if parent.stat().st_mode & 0o055 != 0o055]
    modes = [parent.stat().st_mode for parent in opened]
    for parent, mode in zip(opened, modes, strict=True):
        parent.chmod(mode | 0o055)
    os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(0)
        for parent, mode in zip(opened, modes, strict=True):
            parent.chmod(mode)
