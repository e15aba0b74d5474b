import dataclasses
import json
import re
from pathlib import Path

import pytest

from solver_plan.documents import computed_from, write_document
from solver_plan.errors import DocumentError
from solver_plan.kinds import read_plan, read_problem
from solver_plan.wavefront.problem import Component
from tests.wavefront.wavefront_problems import component, piece, plan, problem

GOOD = {
    "format": "solver-plan/problem",
    "version": 1,
    "kind": "wavefront",
    "cluster": {
        "devices": 4,
        "devices_per_node": 2,
        "memory_bytes_per_device": None,
        "intra_node_bytes_per_s": None,
        "inter_node_bytes_per_s": None,
    },
    "components": [
        {"name": "a", "task": "t", "layers": 2, "layer_ms": {"1": 4.0, "2": 2.5}, "parameters": "w"},
        {"name": "b", "task": "t", "layers": 2, "layer_ms": {"1": 4.0, "8": 1.0}, "parameters": "w"},
    ],
    "edges": [["a", "b"]],
}


def read(tmp_path: Path, document: object):
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(document))
    return read_problem(str(file))


def changed(place: str, value: object) -> dict[str, object]:
    document = json.loads(json.dumps(GOOD))
    at = document
    *path, last = place.split("/")
    for step in path:
        at = at[int(step)] if step.isdigit() else at[step]
    at[int(last) if last.isdigit() else last] = value
    return document


def test_a_good_problem_is_read_and_written_back(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD)
    write_document(found, tmp_path / "again.json")
    assert read_problem(str(tmp_path / "again.json")) == dataclasses.replace(found)


MODE = {"devices": 2, "forward_ms": 1.0, "backward_ms": 0.0}


@pytest.mark.parametrize(
    ("place", "value", "at", "says"),
    [
        ("edges", [["a", "b"], ["b", "a"]], "edges", "no cycle"),
        ("edges", [["a", "a"]], "edges", "no cycle"),
        ("edges", [["a", "c"]], "edges[0][1]", "by name"),
        ("edges", [["a", "b"], ["a", "b"]], "edges[1]", "once"),
        ("components/0/layers", 0, "components[0].layers", "greater than or equal to 1"),
        ("components/0/layer_ms", {}, "components[0].layer_ms", "at least one"),
        ("components/0/layer_ms", {"8": 1.0}, "components[0].layer_ms", "at most 4 devices"),
        ("components/0/layer_ms", {"1": 0.0}, "components[0].layer_ms.1", "equal to 0.000001"),
        ("components/0/layer_ms", {"1": -1.0}, "components[0].layer_ms.1", "equal to 0.000001"),
        ("components/0/layer_ms", {"1": 1e-9}, "components[0].layer_ms.1", "equal to 0.000001"),
        ("components/0/layer_ms", {"1": 1e18}, "components[0].layer_ms.1", "less than or equal to 1000000000000"),
        ("components/0/layer_ms", {"1": 6e11}, "components", "one layer after another they take at most 1e+12 ms"),
        ("components/0/layer_ms", {"one": 1.0}, "components[0].layer_ms.one", "pattern"),
        ("components/1/layers", 3, "components[1].layers", "numbers are equal"),
        ("components/1/state_bytes_per_layer", 5, "components[1].state_bytes_per_layer", "equal"),
        ("components/1/name", "a", "components[1].name", "unique"),
        ("components/0/modes", [MODE], "components[0].layer_ms", "either layer_ms or modes"),
        ("components", [], "components", "at least 1"),
        ("cluster/devices", 0, "cluster.devices", "greater than or equal to 1"),
        ("cluster/intra_node_bytes_per_s", 0, "cluster.intra_node_bytes_per_s", "equal to 0.000001"),
        ("colour", "red", "colour", "remove it"),
    ],
)
def test_a_bad_problem_is_refused_with_its_place(tmp_path: Path, place: str, value: object, at: str, says: str) -> None:
    with pytest.raises(DocumentError) as error:
        read(tmp_path, changed(place, value))
    assert error.value.place == at
    assert says in error.value.rule


TOO_LARGE = [
    ([component("a", 60_000), component("b", 60_000)], {}, "120000 layers"),
    ([component("a", state_bytes_per_layer=6 * 10**17)], {}, "1.2e+18 bytes"),
    ([component("a", output_bytes=10**12)], {"inter": 1.0}, "2e+15 ms"),  # between its layers, and back
    ([component("a", gradient_bytes_per_layer=10**12)], {"intra": 1.0}, "4e+15 ms"),
]


@pytest.mark.parametrize(("components", "links", "found"), TOO_LARGE)
def test_sums_that_no_plan_could_state_are_refused(
    components: list[Component], links: dict[str, float], found: str
) -> None:
    with pytest.raises(DocumentError, match=re.escape(found)), computed_from("sums"):
        problem(components, **links)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_times_are_finite(tmp_path: Path, text: str) -> None:
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(GOOD).replace("4.0", text, 1))
    with pytest.raises(DocumentError):
        read_problem(str(file))


def test_degrees_multiply_to_the_devices(tmp_path: Path) -> None:
    document = changed("components/0/modes", [{**MODE, "degrees": {"tensor_parallel": 3}}])
    document["components"][0].pop("layer_ms")  # type: ignore[index]
    with pytest.raises(DocumentError, match="product of the degrees"):
        read(tmp_path, document)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"forward_ms": 0.0}, "forward_ms"),
        ({"forward_ms": -1.0}, "forward_ms"),
        ({"backward_ms": -1.0}, "backward_ms"),
        ({"backward_ms": float("inf")}, "backward_ms"),
        ({"devices": 0}, "devices"),
    ],
)
def test_modes_that_make_no_sense_are_refused(tmp_path: Path, change: dict[str, float], place: str) -> None:
    document = changed("components/0/modes", [{**MODE, **change}])
    document["components"][0].pop("layer_ms")  # type: ignore[index]
    with pytest.raises(DocumentError) as error:
        read(tmp_path, document)
    assert error.value.place in (f"components[0].modes[0].{place}", "")  # infinity is refused as JSON already


def test_modes_without_a_fitting_one_are_refused(tmp_path: Path) -> None:
    document = changed("components/0/modes", [{**MODE, "devices": 8}])
    document["components"][0].pop("layer_ms")  # type: ignore[index]
    with pytest.raises(DocumentError, match="at least one mode"):
        read(tmp_path, document)


def test_plans_are_read_and_written_back(tmp_path: Path) -> None:
    made = plan(piece("a", (0, 2), [0], 0.0, 8.0))
    write_document(made, tmp_path / "plan.json")
    assert read_plan(str(tmp_path / "plan.json")) == made
    assert problem([component("a")]).component_of["a"].layers == 2
