"""Training with `OffloadOptimizer` gives, bit for bit, the parameters of `torch.optim.AdamW` and `clip_grad_norm_`."""

import functools
from collections.abc import Callable

import pytest

from solver_plan.execution.offload.optimizer import OffloadOptimizer
from solver_plan.offload.plan import Place
from tests.execution.offload.offload_models import (
    MIXED,
    Gpt,
    Reference,
    assert_same_weights,
    gpt,
    plan_of,
    problem_of,
    train,
    unequal,
)

STEPS = 20
CPU: tuple[Place, ...] = ("cpu",)


def optimizer_of(
    model: Gpt, places: tuple[Place, ...], *, accumulation: int = 1, clip: bool = False, **options: float | None
) -> OffloadOptimizer:
    problem = problem_of(model.layers(), accumulation=accumulation, clip=clip)
    return OffloadOptimizer(
        model.parameters(),
        problem=problem,
        plan=plan_of(problem, *places),
        layers=model.layers(),
        workers=2,
        **options,  # type: ignore[arg-type]
    )


@functools.cache
def norm_quantile(make: Callable[[], Gpt], accumulation: int, share: float) -> float:
    """Return a norm that this share of the steps exceeds when nothing is clipped."""
    unclipped = Reference(make(), max_norm=1e9, accumulation=accumulation, lr=3e-2)
    norms = []
    for number in range(STEPS):
        unclipped.step(number)
        norms.append(float(unclipped.norm))
    return sorted(norms)[round(STEPS * (1 - share)) - 1] * 1.001


CLIPPING = {"off": None, "rare": 0.15, "always": 1.0}
"""Share of the steps that is clipped."""


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("places", [CPU, MIXED], ids=["cpu", "mixed"])
@pytest.mark.parametrize("make", [gpt, unequal])
def test_parameters_after_20_steps_are_the_same(
    make: Callable[[], Gpt], places: tuple[Place, ...], accumulation: int, clipping: str
) -> None:
    model, share = make(), CLIPPING[clipping]
    max_norm = None if share is None else 0.5 if share == 1.0 else norm_quantile(make, accumulation, share)
    reference = Reference(model, max_norm=max_norm, accumulation=accumulation, lr=3e-2)
    optimizer = optimizer_of(model, places, accumulation=accumulation, max_norm=max_norm, lr=3e-2)
    train(model, optimizer, range(STEPS), accumulation=accumulation, speculated=True)
    clipped = 0
    for number in range(STEPS):
        reference.step(number)
        clipped += max_norm is not None and bool(reference.norm > max_norm)
    assert_same_weights(model, reference.model)
    report = optimizer.report()
    assert (report.steps, report.clipped, report.skipped) == (STEPS, clipped, 0)
    if clipping == "rare":
        assert 0 < clipped == report.undone < 6
    assert (report.waited > 0) == (clipping == "always")
    optimizer.close()
