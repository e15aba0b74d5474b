import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from solver_plan.errors import InputError
from solver_plan.profiles.loading import load_description

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _modules_as_before() -> Iterator[None]:
    modules, path = dict(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]


def project(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").touch()
    (folder / "zoo").mkdir()
    file = folder / "zoo" / "net.py"
    file.write_text(text)
    return file


def test_a_file_is_loaded_under_its_name_below_the_project() -> None:
    described = load_description(f"{ROOT}/models/gpt.py:tiny")
    assert described.name == "gpt-tiny"
    assert "models.gpt" in sys.modules


def test_a_module_is_loaded_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    assert load_description("models.gpt:tiny").name == "gpt-tiny"


def test_a_file_imports_its_neighbours(tmp_path: Path) -> None:
    file = project(tmp_path, f"import sys\nsys.path.append({str(ROOT)!r})\nfrom zoo.shapes import net\n")
    (tmp_path / "zoo" / "shapes.py").write_text("from models.gpt import tiny as net\n")
    assert load_description(f"{file}:net").name == "gpt-tiny"


def test_a_file_of_the_same_name_elsewhere_is_another_module(tmp_path: Path) -> None:
    load_description(f"{ROOT}/models/gpt.py:tiny")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "gpt.py").write_text("def other():\n    return 1\n")
    with pytest.raises(InputError, match="found int returned"):
        load_description(f"{tmp_path}/models/gpt.py:other")


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        ("", "net", r"found no function 'net' in .*; its functions: none"),
        ("net = 3\n", "net", r"found a int; name a function"),
        ("def net(layers): ...\n", "net", r"found a function that needs layers; give every parameter a default"),
        ("def net(): return 3\n", "net", r"found int returned; the function returns a ModelDescription"),
        ("def net(): raise KeyError('x')\n", "net", r"the function raised KeyError: 'x'; correct the model file"),
        ("import nothing_of_that_name\n", "net", r"the file imports 'nothing_of_that_name', which is not installed"),
        ("import sys\ndef net(): sys.exit(3)\n", "net", r"the function raised SystemExit: 3; correct the model file"),
        ("import sys\nsys.exit(3)\n", "net", r"importing it raised SystemExit"),
        ("def net(:\n", "net", r"importing it raised SyntaxError"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path: Path, text: str, function: str, message: str) -> None:
    file = project(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        load_description(f"{file}:{function}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("models/gpt.py", "write file.py:function"),
        ("models/gpt.py:1", "write file.py:function"),
        (":tiny", "write file.py:function"),
        ("models/none.py:tiny", "found no such file"),
        ("no_such_package.models:tiny", "found no module 'no_such_package'"),
    ],
)
def test_a_source_that_names_nothing_is_refused(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_description(source)
