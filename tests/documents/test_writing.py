"""Documents are written whole or not at all, and come back as they were."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver_plan.documents import (
    digest_of,
    document_text,
    ensure_writable,
    parse_json,
    read_document,
    write_document,
    write_text,
)
from solver_plan.documents.writing import LINE_WIDTH
from solver_plan.errors import OutputError
from tests.shelf import Parcel, Rate, ShelfProblem

FORMAT = "solver-plan/problem"
SHELF = ShelfProblem(length=3, parcels=(Parcel(name="ä", wait_ms=0.1),))

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
milliseconds = st.floats(0, 1e18, allow_nan=False)
shelves = st.builds(
    ShelfProblem,
    length=st.integers(1, 10**9),
    parcels=st.lists(
        st.builds(Parcel, name=names, wait_ms=milliseconds), min_size=1, unique_by=lambda parcel: parcel.name
    ).map(tuple),
    rates=st.none() | st.dictionaries(names, st.builds(Rate, per_s=st.floats(1e-6, 1e18))),
    ordered=st.booleans(),
    provenance=st.none() | st.dictionaries(names, names | st.none()),
)


@given(shelves)
def test_a_document_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, problem: ShelfProblem) -> None:
    file = tmp_path_factory.mktemp("written") / "problem.json"
    write_document(problem, file)
    again = read_document(file, {"shelf": ShelfProblem}, FORMAT)
    assert again == problem
    assert digest_of(again) == digest_of(problem)
    assert document_text(again) == file.read_text()


def test_defaults_are_left_out_and_lines_are_short() -> None:
    parcels = tuple(Parcel(name=f"parcel {index}", wait_ms=index) for index in range(9))
    text = document_text(ShelfProblem(length=3, parcels=parcels))
    assert "ordered" not in text
    assert "provenance" not in text
    assert max(map(len, text.splitlines())) <= LINE_WIDTH
    assert parse_json(text, "text") == json.loads(text)


def test_a_file_is_replaced_only_when_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    file.write_text("the old one")

    def fail_half_way(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail_half_way)
    with pytest.raises(OutputError, match=r"plan\.json: cannot write \(no space left on device\); the disk is full"):
        write_text("the new one", file)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the old one"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text("text", tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_mode_and_link_of_an_existing_file_are_kept(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_text("new", link)
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_new_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text("new", tmp_path / "plan.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o640


def test_a_full_device_is_refused_and_stays_a_device() -> None:
    ensure_writable("/dev/full")
    with pytest.raises(OutputError, match="the disk is full"):
        write_text("x", "/dev/full")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_the_null_device_takes_everything() -> None:
    ensure_writable("/dev/null")
    write_text("x", "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("write", [ensure_writable, lambda path: write_text("x", path)])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing/plan.json", "make the folder first"),
        ("file.txt/plan.json", "name a file in a folder"),
        (".", "is a folder"),
        ("x" * 300, "choose a shorter name"),
    ],
)
def test_a_place_that_cannot_be_written(
    tmp_path: Path, write: Callable[[str | Path], None], name: str, message: str
) -> None:
    (tmp_path / "file.txt").touch()
    with pytest.raises(OutputError, match=message):
        write(str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("write", [ensure_writable, lambda path: write_text("x", path)])
def test_a_read_only_folder(read_only_folder: Path, write: Callable[[str | Path], None]) -> None:
    with pytest.raises(OutputError, match=r"permission denied\); choose a folder that may be written"):
        write(read_only_folder / "plan.json")


def test_no_name_is_refused() -> None:
    with pytest.raises(OutputError, match="no name given"):
        ensure_writable("")


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="half a character"):
        write_text("\ud800", tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []
