"""The door of the offload problem: bad input is refused with the place and the rule; odd but legal input is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solver_plan.documents import document_text, write_document
from solver_plan.errors import DocumentError, InputError
from solver_plan.kinds import kind_of, read_problem
from solver_plan.offload.problem import OffloadProblem
from solver_plan.solving.budget import Budget
from tests.offload.offload_cases import make_problem


def written(path: Path, change: Callable[[dict[str, Any]], None]) -> str:
    document = json.loads(document_text(make_problem()))
    change(document)
    (path / "problem.json").write_text(json.dumps(document))
    return str(path / "problem.json")


def setting(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        at: Any = document
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (setting("rates", "cpu_update_parameters_per_s", value=0), "rates.cpu_update_parameters_per_s"),
        (setting("rates", "gpu_update_parameters_per_s", value=0), "rates.gpu_update_parameters_per_s"),
        (setting("rates", "d2h_bytes_per_s", value=0), "rates.d2h_bytes_per_s"),
        (setting("rates", "h2d_bytes_per_s", value=-1), "rates.h2d_bytes_per_s"),
        (setting("gpu_state_bytes", value=-1), "gpu_state_bytes"),
        (setting("staging_bytes", value=-1), "staging_bytes"),
        (setting("layers", value=[]), "layers"),
        (setting("layers", 1, "parameters", value=-1), "layers[1].parameters"),
        (setting("layers", 1, "parameters", value=1.5), "layers[1].parameters"),
        (setting("layers", 1, "forward_ms", value=-0.5), "layers[1].forward_ms"),
        (setting("layers", 1, "name", value="l0"), "layers[1].name"),
        (setting("chunks_per_layer", value=0), "chunks_per_layer"),
        (setting("chunks_per_layer", value=50_000 // 3 + 1), "chunks_per_layer"),
        (setting("accumulation_steps", value=0), "accumulation_steps"),
        (setting("staging_bytes", value=119), "staging_bytes"),
        (setting("clip_gradients", value=1), "clip_gradients"),
        (setting("unknown", value=1), "unknown"),
        (lambda document: document.pop("rates"), "rates"),
    ],
)
def test_bad_problems_are_refused_with_their_place(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], place: str
) -> None:
    with pytest.raises(DocumentError) as caught:
        read_problem(written(tmp_path, change))
    assert caught.value.place == place
    assert "\n" not in str(caught.value)


def test_staging_that_holds_the_smallest_layer_is_let_through(tmp_path: Path) -> None:
    problem = read_problem(written(tmp_path, setting("staging_bytes", value=120)))
    assert isinstance(problem, OffloadProblem)
    assert [problem.may_stream(layer) for layer in range(3)] == [True, False, False]


def test_accumulation_steps_is_optional_and_one(tmp_path: Path) -> None:
    problem = read_problem(written(tmp_path, lambda document: document.pop("accumulation_steps", None)))
    assert isinstance(problem, OffloadProblem)
    assert problem.accumulation_steps == 1


@pytest.mark.parametrize(
    "layers",
    [
        [(0, 10.0, 20.0), (20, 15.0, 30.0)],
        [(20, 10.0, 20.0), (0, 15.0, 30.0)],
        [(0, 10.0, 20.0)],
        [(5, 0.0, 0.0), (5, 0.0, 0.0)],
        [(0, 0.0, 0.0)],
    ],
)
@pytest.mark.parametrize("staging", [0, 300])
def test_layers_without_parameters_or_time_are_planned(layers: list[tuple[int, float, float]], staging: int) -> None:
    problem = make_problem(layers, staging=staging)
    found = kind_of(problem).plan(problem, Budget(time_limit_s=0.3, deterministic=True))
    assert kind_of(problem).check(problem, found.plan) == ()
    assert kind_of(problem).describe(found.plan, problem)
    assert kind_of(problem).simulate(problem, found.plan)


def test_documents_survive_writing_and_reading(tmp_path: Path) -> None:
    problem = make_problem(accumulation=3, clip=True)
    write_document(problem, tmp_path / "problem.json")
    assert document_text(read_problem(str(tmp_path / "problem.json"))) == document_text(problem)


@pytest.mark.parametrize("heuristic", [None, "prefix"])
@pytest.mark.parametrize(
    "change", [setting("layers", 2, "forward_ms", value=1e18), setting("staging_bytes", value=240)]
)
def test_times_that_hide_the_tolerance_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], heuristic: str | None
) -> None:
    def changed(document: dict[str, Any]) -> None:
        change(document)
        document["bytes_per_parameter"]["gradient"] = 10**18

    problem = read_problem(written(tmp_path, changed))
    with pytest.raises(InputError, match=r"found times of up to \S+ ms, beside which the 1e-6 ms to which plans hold"):
        kind_of(problem).plan(problem, Budget(deterministic=True), heuristic=heuristic)
