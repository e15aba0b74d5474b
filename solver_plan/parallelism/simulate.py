"""Plays a plan micro-batch by micro-batch, independently of any objective formula.

Each group of devices works through its list of actions in order; an action starts when the group is free and what it
needs has arrived. Transfers take part in the times of forward (its input) and backward (the gradient of its output), as
the cost model charges them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from solver_plan.errors import InvalidPlanError
from solver_plan.parallelism.costs import StageCost, evaluate
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem

ActionKind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Played:
    """One action as it ran."""

    group: int
    stage: int
    kind: ActionKind
    micro_batch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What happened in one iteration."""

    iteration_ms: float
    formula_ms: float
    """(micro_batches - 1) * slowest stage + sum of the stages."""
    actions: tuple[Played, ...]
    groups: tuple[tuple[int, ...], ...]
    """Devices of each group."""

    @property
    def busy_ms(self) -> tuple[float, ...]:
        """Time each group works."""
        busy = [0.0] * len(self.groups)
        for action in self.actions:
            busy[action.group] += action.end_ms - action.start_ms
        return tuple(busy)


def one_forward_one_backward(stages: int, stage: int, micro_batches: int) -> list[tuple[ActionKind, int]]:
    """Return the actions of a stage under 1F1B: stages - 1 - stage forwards ahead, then one and one, then the rest."""
    ahead = min(stages - 1 - stage, micro_batches)
    order: list[tuple[ActionKind, int]] = [("F", micro_batch) for micro_batch in range(ahead)]
    for micro_batch in range(micro_batches):
        if micro_batch + ahead < micro_batches:
            order.append(("F", micro_batch + ahead))
        order.append(("B", micro_batch))
    return order


def simulate(problem: ParallelismProblem, plan: ParallelismPlan) -> Simulation:
    """Play one iteration of a valid plan.

    Raises
    ------
    InvalidPlanError
        If the plan's own schedule stops in a deadlock, with the actions that wait.
    """
    evaluation = evaluate(problem, plan)
    groups, orders = orders_of(plan)
    played = play(evaluation.stages, orders)
    return Simulation(
        iteration_ms=max(action.end_ms for action in played),
        formula_ms=evaluation.iteration_ms,
        actions=tuple(played),
        groups=groups,
    )


def orders_of(
    plan: ParallelismPlan,
) -> tuple[tuple[tuple[int, ...], ...], list[list[tuple[int, ActionKind, int]]]]:
    """Return the groups of devices and the actions (stage, kind, micro-batch) of each."""
    count = len(plan.stages)
    if plan.schedule is None:
        orders = [
            [(stage, kind, number) for kind, number in one_forward_one_backward(count, stage, plan.micro_batches)]
            for stage in range(count)
        ]
        return tuple(stage.devices for stage in plan.stages), orders
    parsed: list[list[tuple[int, ActionKind, int]]] = []
    for order in plan.schedule.orders:
        parsed.append([_parse(action) for action in order])
    groups = tuple(plan.stages[order[0][0]].devices for order in parsed if order)
    return groups, [order for order in parsed if order]


def _parse(action: str) -> tuple[int, ActionKind, int]:
    kinds: tuple[ActionKind, ...] = ("F", "B", "I", "W")
    kind = next(letter for letter in kinds if letter in action)
    stage, micro_batch = action.split(kind)
    return int(stage), kind, int(micro_batch)


def play(costs: Sequence[StageCost], orders: Sequence[Sequence[tuple[int, ActionKind, int]]]) -> list[Played]:
    """Run the lists of actions against each other; the time of I and W is half of the backward each.

    Raises
    ------
    InvalidPlanError
        If no list can go on.
    """
    last = len(costs) - 1
    done: dict[tuple[int, str, int], float] = {}
    position = [0] * len(orders)
    free = [0.0] * len(orders)
    played: list[Played] = []
    total = sum(len(order) for order in orders)
    while len(played) < total:
        advanced = False
        for group, order in enumerate(orders):
            while position[group] < len(order):
                stage, kind, micro_batch = order[position[group]]
                ready = _ready(done, last, stage, kind, micro_batch)
                if ready is None:
                    break
                start = max(free[group], ready)
                end = start + _duration(costs[stage], kind)
                # a later stage waits for the gradient of I or B, whichever there is
                done[stage, "G" if kind in "BI" else kind, micro_batch] = end
                free[group] = end
                played.append(Played(group, stage, kind, micro_batch, start, end))
                position[group] += 1
                advanced = True
        if not advanced:
            waiting = [
                f"{stage}{kind}{micro_batch}"
                for order, at in zip(orders, position, strict=True)
                for stage, kind, micro_batch in order[at : at + 1]
            ]
            raise InvalidPlanError((f"schedule.orders: deadlock, {', '.join(waiting)} wait for each other",))
    return played


def _ready(
    done: dict[tuple[int, str, int], float], last: int, stage: int, kind: ActionKind, micro_batch: int
) -> float | None:
    """Return when the inputs of an action are there; None if they have not been produced yet."""
    if kind == "F":
        return 0.0 if stage == 0 else done.get((stage - 1, "F", micro_batch))
    if kind == "W":
        return done.get((stage, "G", micro_batch))
    forward = done.get((stage, "F", micro_batch))
    if forward is None or stage == last:
        return forward
    gradient = done.get((stage + 1, "G", micro_batch))
    return None if gradient is None else max(forward, gradient)


def _duration(cost: StageCost, kind: ActionKind) -> float:
    if kind == "F":
        return cost.forward_ms
    return cost.backward_ms if kind == "B" else cost.backward_ms / 2
