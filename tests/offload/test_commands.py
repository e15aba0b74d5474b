"""The commands for offload problems: from a model to a checked plan, and the questions asked the other way round."""

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.parallelism import MEBIBYTE, chain
from solver_plan.documents import write_document
from tests.conftest import PROJECT, Run
from tests.offload.offload_cases import make_problem

LAYERS = [(40, 1.0, 3.0), (10, 6.0, 14.0), (25, 3.0, 9.0), (30, 2.0, 3.0)]
QUICK = ("--deterministic", "--time-limit", "6")


def test_from_shapes_to_a_checked_plan_and_its_page(run: Run) -> None:
    source = f"{PROJECT}/models/gpt.py:tiny"
    options = (
        "--kind",
        "offload",
        "--global-batch",
        "4",
        "--micro-batch",
        "2",
        "--gpu-state-bytes",
        "0",
        "--chunks",
        "2",
    )
    code, out, err = run("profile", source, "--cluster", "a100_8x80gb", *options, "--no-clip", "--out", "problem.json")
    assert (code, err) == (0, "")
    assert out.startswith("gpt-tiny: 4 layers, room for 0 bytes of the 1.42 MB")
    problem = json.loads(Path("problem.json").read_text())
    assert (problem["accumulation_steps"], problem["chunks_per_layer"], problem["clip_gradients"]) == (2, 2, False)
    assert run("plan", "problem.json", "--out", "plan.json", *QUICK)[0] == 0
    code, out, _ = run("check", "problem.json", "plan.json")
    assert code == 0
    code, out, err = run("show", "plan.json", "--problem", "problem.json", "--html", "plan.html")
    assert (code, out, err) == (0, "plan.html: open it in a browser\n", "")
    page = Path("plan.html").read_text()
    assert "GPU" in page
    assert "other micro-steps" in page
    assert "bound" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert run("show", "plan.json", "--problem", "problem.json", "--html", "-")[1] == page


def test_a_page_has_the_tables_and_a_picture_where_one_can_be_drawn(run: Run) -> None:
    write_document(chain(Path(), blocks=2, devices=2, memory_bytes=1500 * MEBIBYTE, global_batch=8), "problem.json")
    assert run("plan", "problem.json", "--heuristic", "grid", "--out", "plan.json")[0] == 0
    assert run("show", "plan.json", "--html", "plan.html")[0] == 0
    page = Path("plan.html").read_text()
    assert "<pre>" in page
    assert "micro-batch" in page
    assert "<svg" not in page  # without the problem there are no prices to draw
    assert run("show", "plan.json", "--problem", "problem.json", "--html", "plan.html")[0] == 0
    assert Path("plan.html").read_text().count("<svg") == 1


def test_the_sweep_is_a_table_a_plot_and_csv(run: Run) -> None:
    write_document(make_problem(LAYERS), "problem.json")
    code, out, err = run("plan", "problem.json", "--sweep", "curve.csv", "--plot", "curve.svg", "--points", "4", *QUICK)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 2 + 4
    rows = list(csv.DictReader(io.StringIO(Path("curve.csv").read_text())))
    assert [int(row["gpu_state_bytes"]) for row in rows] == [0, 420, 840, 1260]
    assert all(float(row["bound_ms"]) <= float(row["period_ms"]) * (1 + 1e-6) for row in rows)
    ElementTree.fromstring(Path("curve.svg").read_text())
    code, out, err = run("plan", "problem.json", "--sweep", "-", "--rooms", "0,300", *QUICK)
    assert code == 0
    assert [line.split(",")[0] for line in out.splitlines()] == ["gpu_state_bytes", "0", "300"]
    assert "room (kB)" in err


def test_the_least_room_for_a_period(run: Run) -> None:
    write_document(make_problem(LAYERS), "problem.json")
    question = ("plan", "problem.json", "--period", "75", "--problem-out", "room.json", "--out", "plan.json", *QUICK)
    code, out, err = run(*question, "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["period_ms"] <= 75 * (1 + 1e-9)
    assert facts["bound_bytes"] <= facts["gpu_state_bytes"]
    assert "bytes of resident optimizer state give" in err
    assert json.loads(Path("room.json").read_text())["gpu_state_bytes"] == facts["gpu_state_bytes"]
    assert run("check", "room.json", "plan.json")[0] == 0
    code, out, err = run("plan", "problem.json", "--period", "41", "--problem-out", "a", "--out", "b", *QUICK)
    assert (code, out) == (3, "")
    assert "none takes less than" in err
    assert not Path("a").exists()


def test_a_menu_is_written_and_chosen_from(run: Run) -> None:
    source = f"{PROJECT}/models/gpt.py:tiny"
    options = ("--kind", "offload", "--global-batch", "4", "--menu", "menu.json", "--menu-micro-batches", "1,4")
    assert run("profile", source, "--cluster", "a100_8x80gb", *options, "--out", "problem.json")[0] == 0
    entries = json.loads(Path("menu.json").read_text())["entries"]
    assert [(each["micro_batch"], each["recomputation"]) for each in entries] == [
        (1, "none"),
        (1, "block"),
        (4, "none"),
        (4, "block"),
    ]
    chosen = ("--problem-out", "chosen.json", "--out", "plan.json")
    code, out, _ = run("plan", "problem.json", "--menu", "menu.json", *chosen, *QUICK, "--json")
    assert code == 0
    # everything fits: the largest micro-batch without recomputation is best
    assert (json.loads(out)["micro_batch"], json.loads(out)["recomputation"]) == (4, "none")
    assert run("check", "chosen.json", "plan.json")[0] == 0
    Path("menu.json").write_text('{"entries": [{"micro_batch": 0}]}')
    code, out, err = run("plan", "problem.json", "--menu", "menu.json", *chosen, *QUICK)
    assert code == 2
    assert err.startswith("solver-plan: menu.json: entries[0]")
    assert err.count("\n") == 1


def test_jitter_is_replayed(run: Run) -> None:
    write_document(make_problem(LAYERS, accumulation=2), "problem.json")
    assert run("plan", "problem.json", "--heuristic", "cpu_edf", "--out", "plan.json")[0] == 0
    jitter = ("--jitter", "0.2", "--iterations", "30", "--seed", "3")
    code, out, err = run("simulate", "problem.json", "plan.json", *jitter)
    assert (code, err) == (0, "")
    assert "with 0.2 jitter" in out
    assert "slowest of 30 iterations" in out
    assert run("simulate", "problem.json", "plan.json", *jitter)[1] == out
    assert run("simulate", "problem.json", "plan.json", "--jitter", "0.2", "--seed", "4")[1] != out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("plan p.json --period 5 --out x", "--problem-out FILE"),
        ("plan p.json --period 5 --problem-out - --out x", "name a file"),
        ("plan p.json --period 0 --problem-out y --out x", "greater than 0"),
        ("plan p.json --sweep - --period 5", "choose one"),
        ("plan p.json --sweep - --out x", "leave --out"),
        ("plan p.json --sweep - --heuristic prefix", "leave --heuristic out"),
        ("plan p.json --sweep - --points 1", "at least 2"),
        ("plan p.json --sweep - --rooms 0,-1", "at least 0"),
        ("plan p.json --points 5 --out x", "belongs to --sweep"),
        ("plan p.json --problem-out y --out x", "belongs to --period and --menu"),
        ("plan p.json --menu none.json --problem-out y --out x", "cannot read a menu"),
        ("plan p.json", "--out"),
        ("plan chain.json --sweep -", "only offload problems"),
        ("plan chain.json --period 5 --problem-out y --out x", "only offload problems"),
        ("simulate chain.json c.json --jitter 0.1", "jitter is for offload problems"),
        ("simulate p.json q.json --jitter 1", "below 1"),
        (
            "simulate p.json c.json --jitter 0.1",
            "c.json: found a plan of kind parallelism; p.json is a problem of kind",
        ),
        ("profile {gpt} --cluster a100_8x80gb --global-batch 4 --clip --out x", "give --kind offload"),
        ("profile {gpt} --cluster a100_8x80gb --global-batch 4 --kind offload --micro-batch 3 --out x", "divides"),
        ("profile {gpt} --cluster v100_4x32gb --global-batch 4 --kind offload --out x", "[host]"),
        (
            "profile {gpt} --cluster a100_8x80gb --global-batch 4 --kind offload --menu-micro-batches 1 --out x",
            "belongs to --menu",
        ),
        ("profile {gpt} --cluster a100_8x80gb --global-batch 4 --kind offload --staging-bytes 7 --out x", "staging"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(run: Run, arguments: str, part: str) -> None:
    write_document(make_problem(LAYERS), "p.json")
    write_document(chain(Path(), blocks=2, devices=2, memory_bytes=1500 * MEBIBYTE, global_batch=8), "chain.json")
    assert run("plan", "p.json", "--heuristic", "prefix", "--out", "q.json")[0] == 0
    assert run("plan", "chain.json", "--heuristic", "grid", "--out", "c.json")[0] == 0
    code, out, err = run(*arguments.format(gpt=f"{PROJECT}/models/gpt.py:tiny").split())
    assert (code, out) == (2, "")
    assert part in err
    assert err.count("\n") == 1
    assert not Path("x").exists()
