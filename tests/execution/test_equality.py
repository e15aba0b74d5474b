"""Losses and gradients of three steps equal those of one process, to rounding, for every way to lay out a model."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest

pytest.importorskip("torch")

from solver_plan.execution.compile import compile_plan
from solver_plan.execution.launch import run_local
from solver_plan.execution.program import Program
from solver_plan.parallelism.plan import Layout, Stage
from tests.execution.cases import plan, problem, stage
from tests.execution.equality import Trained, alone, difference, together
from tests.execution.small_models import names, transformer

SAMPLES = 8
TOLERANCE = 1e-12
PLAIN, TIED = transformer(2), transformer(2, tied=True)
"""embed, then attention, wide, narrow twice, then head: operators 0 to 7."""


@dataclass(frozen=True)
class Case:
    stages: Sequence[Stage]
    micro_batch_size: int = 2
    orders: Sequence[str] | None = None
    tied: bool = False

    def program(self, devices: int) -> Program:
        shared = {7: "embed"} if self.tied else None
        made_for = problem(names(PLAIN), devices, shared=shared)
        compiled = compile_plan(made_for, plan(made_for, self.stages, self.micro_batch_size, self.orders))
        # ranks that a small plan leaves idle join the world all the same
        return dataclasses.replace(compiled, world_size=devices)


def layouts(*degrees: tuple[tuple[int, int], int]) -> list[Layout]:
    return [
        Layout(operators=operators, tensor_parallel=t, data_parallel=4 // t, partition=0) for operators, t in degrees
    ]


THREE_LAYOUTS = layouts(((0, 3), 2), ((3, 6), 4), ((6, 8), 1))
INTERLEAVED = ["0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1", "1F0 1F1 3F0 3B0 3F1 1B0 3B1 1B1"]
FOUR = {
    "four uneven stages": Case([stage((0, 1), [0]), stage((1, 2), [1]), stage((2, 6), [2]), stage((6, 8), [3])]),
    "dp2 to dp1": Case([stage((0, 4), [0, 1]), stage((4, 8), [2])]),
    "dp1 to dp2, one micro-batch": Case([stage((0, 4), [0]), stage((4, 8), [1, 2])], 8),
    "recomputation": Case([stage((0, 3), [0], recompute=[(1, 3)]), stage((3, 8), [1], recompute=[(3, 4), (5, 8)])]),
    **{
        f"ZeRO {level}": Case([stage((0, 4), [0, 1], sharding=level), stage((4, 8), [2, 3], sharding=level)])
        for level in range(4)
    },
    "ZeRO 3 with recomputation": Case([stage((0, 8), [0, 1], sharding=3, recompute=[(1, 7)])]),
    "interleaved": Case([stage((2 * i, 2 * i + 2), [i % 2]) for i in range(4)], 4, INTERLEAVED),
    "interleaved ZeRO 2": Case(
        [stage((2 * i, 2 * i + 2), [2 * (i % 2), 2 * (i % 2) + 1], sharding=2) for i in range(4)], 4, INTERLEAVED
    ),
    "zero bubble": Case(
        [stage((0, 4), [0]), stage((4, 8), [1])], 4, ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1W0 1I1 1W1"]
    ),
    "zero bubble with recomputation and ZeRO 3": Case(
        [stage((0, 4), [0, 1], sharding=3), stage((4, 8), [2, 3], recompute=[(4, 7)], sharding=3)],
        4,
        ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1W0 1I1 1W1"],
    ),
    "stages in a V": Case(
        [stage((0, 2), [0]), stage((2, 4), [1]), stage((4, 6), [1]), stage((6, 8), [0])],
        4,
        ["0F0 0F1 3F0 3I0 3F1 3W0 3B1 0I0 0B1 0W0", "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2B1 1B1"],
    ),
    "a cut beside a residual, zero bubble": Case(
        [stage((0, 3), [0]), stage((3, 5), [1]), stage((5, 8), [2])],
        8,
        ["0F0 0I0 0W0", "1F0 1I0 1W0", "2F0 2I0 2W0"],
    ),
    "micro-batches out of order": Case(
        [stage((0, 4), [0]), stage((4, 8), [1])], 4, ["0F1 0F0 0B1 0B0", "1F1 1B1 1F0 1B0"]
    ),
    "shared weights in one stage": Case([stage((0, 8), [0, 1], sharding=1)], tied=True),
    "shared weights": Case([stage((0, 4), [0]), stage((4, 8), [1])], tied=True),
    "shared weights, ZeRO 2 and 3": Case(
        [stage((0, 3), [0, 1], sharding=2), stage((3, 8), [2, 3], sharding=3)], tied=True
    ),
    "tp2, then tp2 cut between split operators": Case([stage((0, 3), [0, 1], 2), stage((3, 8), [2, 3], 2)]),
    "tp2, the other partition": Case([stage((0, 3), [0, 1], 2, partition=1), stage((3, 8), [2, 3], 2, partition=1)]),
    "tp4 with recomputation": Case([stage((0, 8), range(4), 4, recompute=[(0, 3), (5, 7)])]),
    "tp2 zero bubble": Case(
        [stage((0, 4), [0, 1], 2), stage((4, 8), [2, 3], 2)],
        4,
        ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1W0 1I1 1W1"],
    ),
    "dp2 x tp2, ZeRO 3": Case([stage((0, 8), range(4), 2, sharding=3)]),
    "three layouts in a stage": Case([stage((0, 8), range(4), layout=THREE_LAYOUTS)], 4),
    "three layouts in a stage, ZeRO 3": Case([stage((0, 8), range(4), layout=THREE_LAYOUTS, sharding=3)], 4),
    "shared weights of two layouts in a stage, ZeRO 2": Case(
        [stage((0, 8), range(4), layout=layouts(((0, 3), 2), ((3, 8), 1)), sharding=2)], 4, tied=True
    ),
    "shared weights, tp2 and dp2": Case([stage((0, 3), [0, 1], 2), stage((3, 8), [2, 3])], tied=True),
}
EIGHT = {
    "dp4 to dp2": Case([stage((0, 3), range(4)), stage((3, 8), [4, 5])], 4),
    "dp2 x tp2 to dp4": Case([stage((0, 3), range(4), 2), stage((3, 8), range(4, 8))], 4),
}


def _train(cases: dict[str, Case], programs: dict[str, Program], rank: int) -> dict[str, Trained]:
    return {name: together(programs[name], TIED if case.tied else PLAIN) for name, case in cases.items()}


def _references(cases: dict[str, Case], rank: int) -> dict[tuple[bool, int], Trained]:
    keys = {(case.tied, case.micro_batch_size) for case in cases.values()}
    return {(tied, size): alone(TIED if tied else PLAIN, SAMPLES, size) for tied, size in keys}


def _differences(cases: dict[str, Case], devices: int) -> dict[str, float]:
    programs = {name: case.program(devices) for name, case in cases.items()}
    ranks = run_local(partial(_train, cases, programs), devices, timeout_s=240, group_timeout_s=60)
    # in a process of its own, on one thread as the ranks
    (references,) = run_local(partial(_references, cases), 1)
    return {
        name: difference(references[case.tied, case.micro_batch_size], [rank[name] for rank in ranks])
        for name, case in cases.items()
    }


@pytest.fixture(scope="module")
def on_four() -> dict[str, float]:
    return _differences(FOUR, 4)


@pytest.fixture(scope="module")
def on_eight() -> dict[str, float]:
    return _differences(EIGHT, 8)


@pytest.mark.parametrize("name", FOUR)
def test_on_four_ranks(name: str, on_four: dict[str, float]) -> None:
    assert on_four[name] <= TOLERANCE


@pytest.mark.parametrize("name", EIGHT)
def test_on_eight_ranks(name: str, on_eight: dict[str, float]) -> None:
    assert on_eight[name] <= TOLERANCE


def test_bit_for_bit_where_the_order_of_summation_is_the_same(on_four: dict[str, float]) -> None:
    """A pipeline without replicas or tensor ranks sums as one process does."""
    for name in ("four uneven stages", "recomputation", "interleaved"):
        assert on_four[name] == 0.0, name


def test_the_comparison_can_fail() -> None:
    reference = alone(PLAIN, SAMPLES, 2)
    assert difference(reference, [alone(PLAIN, SAMPLES, 8)]) <= TOLERANCE
    spoilt = dataclasses.replace(reference, losses=[loss * (1 + 1e-9) for loss in reference.losses])
    assert difference(reference, [spoilt]) > TOLERANCE
