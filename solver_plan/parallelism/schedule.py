"""Schedules: the order of the actions of each group of devices, and their times when they are played.

Each group works through its list in order; an action starts when the group is free and what it needs has arrived:

    F(i, m) after F(i-1, m) + arrival      B(i, m) after F(i, m) and B(i+1, m) + arrival

A backward may be split: I gives the gradient of the input, W that of the weights, half of the time each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from solver_plan.errors import InvalidPlanError
from solver_plan.parallelism.plan import ParallelismPlan

ActionKind = Literal["F", "B", "I", "W"]
StageAction = tuple[int, ActionKind, int]
"""(stage, kind, micro-batch)."""
NOT_YET = -1.0
MOST_ACTIONS = 10_000_000
"""Of an iteration, on all stages: playing more takes longer than anyone waits, and more memory than a laptop has."""
PLAY_COST_S = 2e-6
"""Deterministic seconds of one action that is played."""
LISTED_COST_S = 1e-5
"""The same of an action of a plan that lists its actions: it is written, read and checked too."""


@dataclass(frozen=True, slots=True)
class Played:
    """One action as it ran."""

    group: int
    stage: int
    kind: ActionKind
    micro_batch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class StageDurations:
    """How long the actions of a stage take, and how long what they need travels while nothing waits but they."""

    forward_ms: float
    backward_ms: float
    input_arrival_ms: float = 0.0
    """From the end of the forward before to the start of this one at the earliest."""
    gradient_arrival_ms: float = 0.0
    """From the end of the backward behind to the start of this one at the earliest."""


def one_forward_one_backward(stages: int, stage: int, micro_batches: int) -> list[tuple[ActionKind, int]]:
    """Return the actions of a stage under 1F1B: stages - 1 - stage forwards ahead, then one and one, then the rest."""
    ahead = min(stages - 1 - stage, micro_batches)
    order: list[tuple[ActionKind, int]] = [("F", micro_batch) for micro_batch in range(ahead)]
    for micro_batch in range(micro_batches):
        if micro_batch + ahead < micro_batches:
            order.append(("F", micro_batch + ahead))
        order.append(("B", micro_batch))
    return order


def interleaved(groups: int, group: int, virtual_stages: int, micro_batches: int) -> list[StageAction]:
    """Return the actions of a group under interleaved 1F1B; stage j lies on group j modulo `groups`.

    Micro-batches go through in rounds of `groups`, which divides their number (Narayanan et al., SC 2021, section
    2.2): a group runs 2 (groups - 1 - group) + (virtual_stages - 1) groups forwards ahead.
    """
    assert micro_batches % groups == 0 or virtual_stages == 1
    total = virtual_stages * micro_batches
    ahead = min(total, 2 * (groups - 1 - group) + (virtual_stages - 1) * groups)

    def action(kind: ActionKind, number: int) -> StageAction:
        part = number // groups % virtual_stages
        chunk = part if kind == "F" else virtual_stages - 1 - part
        return chunk * groups + group, kind, number // (groups * virtual_stages) * groups + number % groups

    order = [action("F", number) for number in range(ahead)]
    for number in range(total):
        if number + ahead < total:
            order.append(action("F", number + ahead))
        order.append(action("B", number))
    return order


def orders_of(plan: ParallelismPlan) -> tuple[tuple[tuple[int, ...], ...], list[list[StageAction]]]:
    """Return the groups of devices and the actions of each: those that the plan states, else 1F1B.

    Raises `InvalidPlanError` if they are more than `MOST_ACTIONS`.
    """
    require_few_actions(plan)
    count = len(plan.stages)
    if plan.schedule is None:
        orders: list[list[StageAction]] = [
            [(stage, kind, number) for kind, number in one_forward_one_backward(count, stage, plan.micro_batches)]
            for stage in range(count)
        ]
        return tuple(stage.devices for stage in plan.stages), orders
    parsed = [[_parse(action) for action in order] for order in plan.schedule.orders]
    return tuple(plan.stages[order[0][0]].devices for order in parsed if order), [order for order in parsed if order]


def action_count(plan: ParallelismPlan) -> int:
    """Return how many actions an iteration of a plan has."""
    if plan.schedule is None:
        return 2 * plan.micro_batches * len(plan.stages)
    return sum(len(order) for order in plan.schedule.orders)


def require_few_actions(plan: ParallelismPlan) -> None:
    """Raise `InvalidPlanError` if an iteration has more than `MOST_ACTIONS` actions."""
    count = action_count(plan)
    if count > MOST_ACTIONS:
        line = (
            f"micro_batches: {plan.micro_batches} in {len(plan.stages)} stages are {count} actions of an iteration, at "
            f"most {MOST_ACTIONS} are played; take larger micro-batches"
        )
        raise InvalidPlanError((line,))


def play_cost_s(plan: ParallelismPlan) -> float:
    """Return the deterministic seconds of evaluating a plan whose schedule is played."""
    return (PLAY_COST_S if plan.schedule is None else LISTED_COST_S) * action_count(plan)


def _parse(action: str) -> StageAction:
    kinds: tuple[ActionKind, ...] = ("F", "B", "I", "W")
    kind = next(letter for letter in kinds if letter in action)
    stage, micro_batch = action.split(kind)
    return int(stage), kind, int(micro_batch)


def play(durations: Sequence[StageDurations], orders: Sequence[Sequence[StageAction]]) -> list[Played]:
    """Run the lists of actions against each other and return every action, in an order in which they can run.

    Raises
    ------
    InvalidPlanError
        If no list can go on.
    """
    ends, sequence = _run(durations, orders)
    position = [0] * len(orders)
    played: list[Played] = []
    for group in sequence:
        at = position[group]
        stage, kind, micro_batch = orders[group][at]
        start, end = ends[group][at]
        played.append(Played(group, stage, kind, micro_batch, start, end))
        position[group] += 1
    return played


def group_ends(durations: Sequence[StageDurations], orders: Sequence[Sequence[StageAction]]) -> tuple[float, ...]:
    """Return when each group ends its list. Raises `InvalidPlanError` as `play` does."""
    return tuple(times[-1][1] for times in _run(durations, orders)[0])


def _run(
    durations: Sequence[StageDurations], orders: Sequence[Sequence[StageAction]]
) -> tuple[list[list[tuple[float, float]]], list[int]]:
    """Return (start, end) of each action of each group, and the groups in the order in which their actions ran."""
    last = len(durations) - 1
    count = 1 + max((action[2] for order in orders for action in order), default=0)
    forward = [[NOT_YET] * count for _ in durations]
    gradient = [[NOT_YET] * count for _ in durations]
    lengths = [
        {"F": one.forward_ms, "B": one.backward_ms, "I": one.backward_ms / 2, "W": one.backward_ms / 2}
        for one in durations
    ]
    times: list[list[tuple[float, float]]] = [[] for _ in orders]
    free = [0.0] * len(orders)
    sequence: list[int] = []
    total = sum(len(order) for order in orders)
    while len(sequence) < total:
        before = len(sequence)
        for group, order in enumerate(orders):
            mine, now = times[group], free[group]
            for at in range(len(mine), len(order)):  # no slice: copies would take time quadratic in micro-batches
                stage, kind, micro_batch = order[at]
                if kind == "F":
                    ready = 0.0 if stage == 0 else forward[stage - 1][micro_batch]
                    arrival = durations[stage].input_arrival_ms if stage else 0.0
                elif kind == "W":
                    ready, arrival = gradient[stage][micro_batch], 0.0
                elif stage == last:
                    ready, arrival = forward[stage][micro_batch], 0.0
                else:
                    ready, arrival = gradient[stage + 1][micro_batch], durations[stage].gradient_arrival_ms
                    if forward[stage][micro_batch] == NOT_YET:
                        break
                if ready == NOT_YET:
                    break
                # a later action waits for the gradient of I or B, whichever there is
                start = max(now, ready + arrival)
                now = start + lengths[stage][kind]
                if kind == "F":
                    forward[stage][micro_batch] = now
                elif kind != "W":
                    gradient[stage][micro_batch] = now
                mine.append((start, now))
                sequence.append(group)
            free[group] = now
        if len(sequence) == before:
            waiting = [
                f"{stage}{kind}{micro_batch}"
                for order, mine in zip(orders, times, strict=True)
                for stage, kind, micro_batch in order[len(mine) : len(mine) + 1]
            ]
            raise InvalidPlanError((f"schedule.orders: deadlock, {', '.join(waiting)} wait for each other",))
    return times, sequence
