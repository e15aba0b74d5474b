"""Playing a plan event by event, with or without jitter. A plan is an order, not a clock.

Every resource keeps the plan's order and starts its next operation as soon as what must come before has ended, in this
iteration or an earlier one; durations may vary from one time to the next.
"""

import random
from dataclasses import dataclass

from solver_plan.errors import InputError, InvalidPlanError
from solver_plan.offload.assemble import candidate_of
from solver_plan.offload.check import violations
from solver_plan.offload.operations import Iteration, iteration_of, precedences_of
from solver_plan.offload.plan import RESOURCES, OffloadPlan, ResourceName
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.retiming import Arc, arcs_of, topological_order

WARM_UP = 10
"""Iterations before the period is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What came of playing a plan."""

    iterations: int
    period_ms: float
    """Mean over the iterations after the warm-up."""
    slowest_ms: float
    """The longest of them."""
    planned_ms: float
    busy_ms: dict[ResourceName, float]
    """Mean work of each resource in an iteration."""

    @property
    def excess(self) -> float:
        """How much longer than planned, as a fraction; negative: shorter."""
        return self.period_ms / self.planned_ms - 1 if self.planned_ms else 0.0


def replay(
    problem: OffloadProblem, plan: OffloadPlan, *, jitter: float = 0.0, iterations: int = 200, seed: int = 0
) -> Replay:
    """Play a plan for some iterations.

    Parameters
    ----------
    problem, plan
        A plan that `check` lets through.
    jitter
        Every duration is multiplied by a number drawn evenly from [1 - jitter, 1 + jitter], anew each time.
    iterations
        How many are measured, after `WARM_UP` others.
    seed
        Of the draws.

    Raises
    ------
    InvalidPlanError
        If the plan violates the problem.
    InputError
        If jitter or iterations make no sense.
    """
    if not 0 <= jitter < 1:
        raise InputError(f"jitter: found {jitter:g}; a fraction, at least 0 and below 1")
    if iterations < 1:
        raise InputError(f"iterations: found {iterations}; at least 1")
    found = violations(problem, plan)
    if found:
        raise InvalidPlanError(found)
    placement, timing = candidate_of(problem, plan)
    iteration = iteration_of(problem, placement)
    busy_ms: dict[ResourceName, float] = dict.fromkeys(RESOURCES, 0.0)
    for item in iteration.operations:
        busy_ms[item.resource] += item.duration_ms
    busy_ms["gpu"] += problem.other_micro_steps_ms
    if timing.period_ms == 0:
        return Replay(iterations=iterations, period_ms=0.0, slowest_ms=0.0, planned_ms=0.0, busy_ms=busy_ms)
    arcs, _ = arcs_of(problem, iteration, precedences_of(problem, iteration), timing)
    forwards_ms = _play(iteration, arcs, jitter, iterations + WARM_UP + 1, random.Random(seed))
    steps = [later - earlier for earlier, later in zip(forwards_ms[WARM_UP:], forwards_ms[WARM_UP + 1 :], strict=False)]
    return Replay(
        iterations=iterations,
        period_ms=sum(steps) / len(steps),
        slowest_ms=max(steps),
        planned_ms=plan.predicted.period_ms,
        busy_ms=busy_ms,
    )


def _play(iteration: Iteration, arcs: list[Arc], jitter: float, count: int, draws: random.Random) -> list[float]:
    """Return when the last layer's backward starts in each iteration."""
    operations = iteration.operations
    order = topological_order(len(operations), arcs)
    entering: list[list[Arc]] = [[] for _ in operations]
    for arc in arcs:
        entering[arc.after].append(arc)
    deepest = max((arc.height for arc in arcs), default=0)
    starts: list[list[float]] = []
    stretches: list[list[float]] = []
    marks_ms: list[float] = []
    for number in range(count):
        stretches.append([1 + jitter * (2 * draws.random() - 1) for _ in operations])
        start_ms = [0.0] * len(operations)
        starts.append(start_ms)
        for node in order:
            for arc in entering[node]:
                if arc.height <= number:
                    earlier = number - arc.height
                    # what follows the operation by a lag stretches with it
                    reached = starts[earlier][arc.before] + arc.weight_ms * stretches[earlier][arc.before]
                    if reached > start_ms[node]:
                        start_ms[node] = reached
        marks_ms.append(start_ms[iteration.backward[-1]])
        if number > deepest:
            starts[number - deepest - 1] = []
            stretches[number - deepest - 1] = []
    return marks_ms


def simulate_text(
    problem: OffloadProblem, plan: OffloadPlan, *, jitter: float = 0.1, iterations: int = 200, seed: int = 0
) -> str:
    """Play the plan as it is and with jitter, as `replay` does, and return what happened, as text for a terminal."""
    exact = replay(problem, plan)
    noisy = replay(problem, plan, jitter=jitter, iterations=iterations, seed=seed)
    lines = [
        f"planned period      {exact.planned_ms:12.3f} ms",
        f"played              {exact.period_ms:12.3f} ms   mean of {exact.iterations} iterations, each operation as "
        "early as the plan's orders allow",
        f"{f'with {jitter:.4g} jitter':20s}{noisy.period_ms:12.3f} ms   {noisy.excess:+.2%}, slowest of "
        f"{noisy.iterations} iterations {noisy.slowest_ms:.3f} ms",
        "",
        "resource     busy ms    idle ms   share",
    ]
    for resource, busy_ms in exact.busy_ms.items():
        share = busy_ms / exact.period_ms if exact.period_ms else 0.0
        lines.append(f"{resource:8s}{busy_ms:12.3f}{exact.period_ms - busy_ms:11.3f}{share:8.1%}")
    return "\n".join(lines) + "\n"
