"""For each rule of the plan, one plan that keeps it and one that breaks it."""

import dataclasses

import pytest

from solver_plan.documents import certify
from solver_plan.errors import InvalidPlanError
from solver_plan.wavefront.check import check, evaluate, examine
from solver_plan.wavefront.plan import Predicted
from solver_plan.wavefront.problem import Component, Mode
from solver_plan.wavefront.simulate import simulate
from tests.wavefront.wavefront_problems import component, piece, plan, problem

CHAIN = problem([component("a"), component("b")], [("a", "b")])
GOOD = plan(piece("a", (0, 2), [0, 1], 0, 5), piece("b", (0, 2), [2], 5, 13))


def assert_only(found: tuple[str, ...], *words: str) -> None:
    assert len(found) == 1, found
    for word in words:
        assert word in found[0]


def test_a_good_plan_passes_and_is_evaluated() -> None:
    assert check(CHAIN, GOOD) == ()
    assert evaluate(CHAIN, GOOD) == 13
    assert simulate(CHAIN, GOOD).makespan_ms == 13


@pytest.mark.parametrize(
    ("slices", "words"),
    [
        ((piece("c", (0, 2), [0], 0, 8),), ("name of a component",)),
        ((piece("a", (0, 3), [0], 0, 12),), ("has 2 layers",)),
        ((piece("a", (0, 2), [0, 0], 0, 5),), ("each device once",)),
        ((piece("a", (0, 2), [4], 0, 8),), ("0 to 3",)),
        ((piece("a", (0, 2), [0, 1, 2], 0, 5),), ("3 devices",)),
        ((piece("a", (0, 2), [0], 0, 8, mode=0),), ("no modes",)),
        ((piece("a", (0, 2), [0], 0, 8, backward_start_ms=9, backward_end_ms=9),), ("no backward times",)),
        ((piece("a", (0, 1), [0], 0, 4),), ("no slice for layers [1, 2)",)),
        ((piece("a", (0, 2), [0], 0, 8), piece("a", (1, 2), [0], 8, 12)), ("again",)),
        ((piece("a", (1, 2), [0], 0, 4),), ("some layers before",)),
    ],
)
def test_slices_that_make_no_sense(slices: tuple, words: tuple[str, ...]) -> None:
    found = examine(CHAIN, plan(*slices, piece("b", (0, 2), [3], 20, 28)))
    assert_only(found.violations, *words)
    assert found.predicted is None
    with pytest.raises(InvalidPlanError):
        evaluate(CHAIN, plan(*slices, piece("b", (0, 2), [3], 20, 28)))


def test_duration() -> None:
    assert_only(check(CHAIN, plan(piece("a", (0, 2), [0, 1], 0, 4), GOOD.slices[1])), "takes 4", "take 5")


def test_precedence_and_order_of_slices() -> None:
    assert_only(check(CHAIN, plan(GOOD.slices[0], piece("b", (0, 2), [2], 4, 12))), "starts at 4", "ends at 5")
    swapped = plan(piece("a", (0, 1), [0], 4, 8), piece("a", (1, 2), [1], 0, 4), piece("b", (0, 2), [2], 8, 16))
    assert_only(check(CHAIN, swapped), "slices[1]", "ends at 8")
    fixed = plan(piece("a", (0, 1), [0], 0, 4), piece("a", (1, 2), [1], 4, 8), piece("b", (0, 2), [2], 8, 16))
    assert check(CHAIN, fixed) == ()


def test_one_slice_at_a_time() -> None:
    pair = problem([component("a"), component("b")])
    assert_only(
        check(pair, plan(piece("a", (0, 2), [0], 0, 8), piece("b", (0, 2), [0], 7, 15))), "device 0", "one slice"
    )
    assert check(pair, plan(piece("a", (0, 2), [0], 0, 8), piece("b", (0, 2), [0], 8, 16))) == ()


LINKED = problem([component("a", output_bytes=1000), component("b")], [("a", "b")], intra=1e6, inter=0.5e6)


@pytest.mark.parametrize(("devices", "delay"), [([0], 0.0), ([1], 1.0), ([2], 2.0)])
def test_transfers_wait_by_node(devices: list[int], delay: float) -> None:
    late = plan(piece("a", (0, 2), [0], 0, 8), piece("b", (0, 2), devices, 8 + delay, 16 + delay))
    found = examine(LINKED, late)
    assert found.violations == ()
    assert found.predicted is not None
    assert found.predicted.transfer_ms == delay
    assert simulate(LINKED, late).makespan_ms == pytest.approx(16 + delay)
    if delay:
        early = plan(piece("a", (0, 2), [0], 0, 8), piece("b", (0, 2), devices, 7.5 + delay, 15.5 + delay))
        assert_only(check(LINKED, early), "data arrives")


def test_transfers_between_slices_of_a_component() -> None:
    moved = plan(piece("a", (0, 1), [0], 0, 4), piece("a", (1, 2), [1], 4, 8), piece("b", (0, 2), [1], 8, 16))
    assert_only(check(LINKED, moved), "slices[1]", "data arrives 1 ms later")


def memory_problem(limit: int):
    shared = {"parameters": "w", "state_bytes_per_layer": 100, "activation_bytes_per_layer": 30}
    return problem([component("a", **shared), component("b", **shared)], memory=limit)


def test_memory_counts_shared_layers_once_and_activations_of_each_slice() -> None:
    # device 0: layers 0 and 1 of w, a's and b's activations; b runs on two devices and leaves half
    made = plan(piece("a", (0, 2), [0], 0, 8), piece("b", (0, 2), [0, 1], 8, 13))
    found = examine(memory_problem(290), made)
    assert found.violations == ()
    assert found.predicted is not None
    assert found.predicted.device_memory_bytes == (290, 230, 0, 0)
    # a byte for each slice is allowed for rounding
    assert_only(check(memory_problem(287), made), "device 0", "3 more")


def test_reductions_of_shared_layers() -> None:
    sizes = {"gradient_bytes_per_layer": 1000}
    made = problem([component("a", **sizes)], intra=1e6, inter=0.5e6)
    within = examine(made, plan(piece("a", (0, 2), [0, 1], 0, 5))).predicted
    across = examine(made, plan(piece("a", (0, 2), [1, 2], 0, 5))).predicted
    alone = examine(made, plan(piece("a", (0, 2), [0], 0, 8))).predicted
    assert within is not None
    assert across is not None
    assert alone is not None
    assert within.reduction_ms == pytest.approx(2)  # two layers, 2 (2 - 1) / 2 * 1000 bytes each at 1e6 bytes/s
    assert within.makespan_ms == pytest.approx(7)
    assert across.reduction_ms == pytest.approx(4)
    assert alone.reduction_ms == 0


TWO = problem(
    [component("a", times={"1": 3.0}), component("b", times={"1": 3.0})], [("a", "b")], phases="forward_backward"
)


def two_phases(**changes: float):
    b = {"backward_start_ms": 4.0, "backward_end_ms": 8.0}
    a = {"backward_start_ms": 8.0, "backward_end_ms": 12.0}
    a.update({key[2:]: value for key, value in changes.items() if key.startswith("a_")})
    return plan(piece("a", (0, 2), [0], 0, 2, **a), piece("b", (0, 2), [1], 2, 4, **b))


def test_backward_follows_forward_in_reverse() -> None:
    assert check(TWO, two_phases()) == ()
    assert simulate(TWO, two_phases()).makespan_ms == 12
    early = two_phases(a_backward_start_ms=7.0, a_backward_end_ms=11.0)
    assert_only(check(TWO, early), "backward starts at 7")
    missing = plan(piece("a", (0, 2), [0], 0, 2), *two_phases().slices[1:])
    assert_only(check(TWO, missing), "both backward times")


def test_backward_occupies_its_devices() -> None:
    same = plan(
        piece("a", (0, 2), [0], 0, 2, backward_start_ms=8, backward_end_ms=12),
        piece("b", (0, 2), [0], 2, 4, backward_start_ms=3, backward_end_ms=7),
    )
    assert any("one slice at a time" in each for each in check(TWO, same))


def test_frozen_components_have_a_backward_of_no_length() -> None:
    frozen = Component(name="a", task="t", layers=2, modes=(Mode(devices=1, forward_ms=1.0, backward_ms=0.0),))
    made = problem([frozen], phases="forward_backward")
    good = plan(piece("a", (0, 2), [0], 0, 2, mode=0, backward_start_ms=2, backward_end_ms=2))
    assert check(made, good) == ()
    assert_only(check(made, plan(dataclasses.replace(good.slices[0], mode=1))), "modes 0 to 0")


def test_claims_are_recomputed() -> None:
    predicted = Predicted(makespan_ms=13, transfer_ms=0, reduction_ms=0, device_memory_bytes=(0, 0, 0, 0))
    assert check(CHAIN, dataclasses.replace(GOOD, predicted=predicted)) == ()
    wrong = dataclasses.replace(predicted, makespan_ms=12.0)
    assert_only(check(CHAIN, dataclasses.replace(GOOD, predicted=wrong)), "predicted.makespan_ms", "it is 13")
    certificate = certify(
        objective=12.0, bound=None, bound_from=None, stopped_by="time", seconds=1, incumbent="me", solver="none"
    )
    assert_only(check(CHAIN, dataclasses.replace(GOOD, certificate=certificate)), "certificate.objective")
