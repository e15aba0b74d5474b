"""Bad profile databases and arguments: one clear line each."""

from collections.abc import Callable
from pathlib import Path

import pytest

from solver_plan.errors import InputError
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.profiles.aceso import COLUMNS, import_aceso

GPT_ROWS = (
    "encoder-embedding",
    "enc-1st-layernorm",
    *(f"enc-operator-{number}" for number in range(12)),
    "final-layernorm",
    "gpt-post-process",
)
PROFILE = "gpt_tiny_mbs1_tp1_algo0.csv"


def _csv(rows: tuple[str, ...] = GPT_ROWS, columns: tuple[str, ...] = COLUMNS, value: str = "1.5") -> str:
    return "\n".join([",".join(columns), *(",".join([row, *[value] * (len(columns) - 1)]) for row in rows)]) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A database of one model with one layer, profiled at two batches."""
    for batch in (1, 2):
        (tmp_path / f"gpt_tiny_mbs{batch}_tp1_algo0.csv").write_text(_csv())
    (tmp_path / "p2p_intra_node.csv").write_text("1,2,4\n1.5,2.5,3.5\n")
    return tmp_path


def _import(folder: Path, **changes: object) -> ParallelismProblem:
    arguments: dict[str, object] = {
        "model": "gpt",
        "size": "tiny",
        "layers": 2,
        "nodes": 1,
        "devices_per_node": 2,
        "memory_mb": 100,
        "global_batch": 8,
        **changes,
    }
    return import_aceso(folder, **arguments)  # type: ignore[arg-type]


def test_a_good_database(folder: Path) -> None:
    problem = _import(folder)
    assert len(problem.operators) == 1 + 13 * 2 + 2
    assert [operator.block_start for operator in problem.operators].count(True) == 2
    assert problem.cluster.inter_node == problem.cluster.intra_node
    assert problem.profiles["enc-operator-0"][1].batch == 2
    assert problem.profiles["enc-operator-0"][0].forward_ms == pytest.approx(1.5e-3)
    assert problem.profiles["enc-operator-0"][0].weight_bytes == 3 * 2**19


def _replace(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / PROFILE
        path.write_text(path.read_text().replace(old, new, 1))

    return change


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no link table": (lambda f: (f / "p2p_intra_node.csv").unlink(), r"p2p_intra_node\.csv: cannot be read"),
    "link table of one row": (lambda f: (f / "p2p_intra_node.csv").write_text("1,2\n"), "needs a row of sizes"),
    "link table that is ragged": (lambda f: (f / "p2p_intra_node.csv").write_text("1,2\n1\n"), "needs a row of sizes"),
    "a rate of 0": (lambda f: (f / "p2p_intra_node.csv").write_text("1,2\n1,0\n"), "a size or rate is 0"),
    "no profile": (lambda f: [path.unlink() for path in f.glob("gpt_*")], "no file gpt_tiny_mbs"),
    "no first profile": (lambda f: (f / PROFILE).rename(f / "gpt_tiny_mbs1_tp2_algo0.csv"), "it gives the order"),
    "an empty profile": (lambda f: (f / PROFILE).write_text(""), "column op_name is missing"),
    "a header alone": (lambda f: (f / PROFILE).write_text(",".join(COLUMNS)), "no operators; the file is truncated"),
    "a column missing": (lambda f: (f / PROFILE).write_text(_csv(columns=COLUMNS[:-1])), "column bwd_reserved is"),
    "a line cut off": (lambda f: (f / PROFILE).write_text(_csv()[:-9]), r"line 17 has 7 of 9 columns"),
    "lines missing": (lambda f: (f / PROFILE).write_text(_csv(GPT_ROWS[:9])), "at least 16 are needed"),
    "an operator missing in another profile": (
        lambda f: (f / "gpt_tiny_mbs2_tp1_algo0.csv").write_text(_csv(GPT_ROWS[:-1])),
        "mbs2_tp1_algo0: operator gpt-post-process is missing",
    ),
    "an operator twice": (_replace("enc-operator-1,", "enc-operator-0,"), "stands twice"),
    "a word for a number": (_replace("1.5", "fast"), r"line 2: forward-compute is 'fast'"),
    "a negative number": (_replace("1.5", "-1"), "line 2: forward-compute is '-1'"),
    "NaN": (_replace("1.5", "nan"), "line 2: forward-compute is 'nan'"),
    "infinity": (_replace("1.5", "inf"), "line 2: forward-compute is 'inf'"),
    "a huge number": (_replace("1.5", "1e300"), "line 2: forward-compute is '1e300'"),
    "no text": (lambda f: (f / PROFILE).write_bytes(b"\xff\xfe\x00op_name"), "cannot be read"),
    "zero bytes": (lambda f: (f / PROFILE).write_bytes(_csv().encode().replace(b"1.5", b"\x00", 1)), "line|NUL"),
    "a folder for a file": (lambda f: ((f / PROFILE).unlink(), (f / PROFILE).mkdir()), "cannot be read"),
}


@pytest.mark.parametrize(("break_it", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_database(folder: Path, break_it: Callable[[Path], object], message: str) -> None:
    break_it(folder)
    with pytest.raises(InputError, match=message) as caught:
        _import(folder)
    assert "\n" not in str(caught.value)


def test_what_ran_out_of_memory_is_left_out(folder: Path) -> None:
    _replace("enc-operator-3,1.5", "enc-operator-3,10000000")(folder)
    assert [entry.batch for entry in _import(folder).profiles["enc-operator-3"]] == [2]
    other = folder / "gpt_tiny_mbs2_tp1_algo0.csv"
    other.write_text((folder / PROFILE).read_text())
    with pytest.raises(InputError, match="enc-operator-3 ran out of memory in every profile"):
        _import(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": 0},
        {"devices_per_node": 0},
        {"global_batch": 0},
        {"memory_mb": -1},
        {"layers": 0},
        {"layers": 10**9},
        {"layers": -3},
        {"model": "bert"},
        {"size": "gigantic", "layers": None},
        {"micro_batches": ()},
        {"micro_batches": (2, 2)},
        {"micro_batches": (0,)},
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(folder: Path, changes: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        _import(folder, **changes)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        _import(tmp_path / "nowhere")
