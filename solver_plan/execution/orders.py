"""The order of a team's computations, and where its sends and receives stand among them.

Sends and receives are placed by playing the computations once, in time: when a computation ends, its send joins its
own team's list and the receive joins the consumer's list at that same moment. So there is one moment for each pair, the
same for both teams, and the lists run to their end even if every send waited for its receive.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from solver_plan.errors import NotExecutableError
from solver_plan.execution.actions import COMPUTATIONS, Action, ActionKind

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def one_forward_one_backward(stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the 1F1B order of each stage on devices of its own (Narayanan et al., PipeDream-Flush, 2021).

    Stage s of p runs p - s - 1 forwards ahead, then one forward and one backward in turn.
    """
    orders: list[tuple[Action, ...]] = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, micro_batches)
        actions = [Action(stage, FORWARD, micro_batch) for micro_batch in range(ahead)]
        for micro_batch in range(micro_batches):
            if micro_batch + ahead < micro_batches:
                actions.append(Action(stage, FORWARD, micro_batch + ahead))
            actions.append(Action(stage, BACKWARD, micro_batch))
        orders.append(tuple(actions))
    return tuple(orders)


@dataclass(frozen=True)
class Durations:
    """How long the computations of a stage take, for the order in which things happen."""

    forward_ms: float
    backward_ms: float

    def of(self, kind: ActionKind) -> float:
        """Return the time of a computation; I and W take half of B each."""
        return {FORWARD: self.forward_ms, BACKWARD: self.backward_ms}.get(kind, self.backward_ms / 2)


@dataclass(frozen=True)
class Timed:
    """A computation with its planned time."""

    action: Action
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Played:
    """The result of playing orders: each team's actions with communication, and its computations in time."""

    actions: tuple[tuple[Action, ...], ...]
    timeline: tuple[tuple[Timed, ...], ...]


def play(orders: Sequence[Sequence[Action]], durations: Sequence[Durations]) -> Played:
    """Play the computations of all teams and place the communication between stages on different teams.

    Parameters
    ----------
    orders
        Computations of each team, in order.
    durations
        Of each stage.

    Raises
    ------
    NotExecutableError
        If the teams wait for each other: names the action at which each stands.
    """
    last_stage = len(durations) - 1
    team_of = {action.stage: team for team, order in enumerate(orders) for action in order}
    position = [0] * len(orders)
    clock = [0.0] * len(orders)
    actions: list[list[Action]] = [[] for _ in orders]
    timeline: list[list[Timed]] = [[] for _ in orders]
    arrived: dict[tuple[int, ActionKind, int], float] = {}
    """When the input of (stage, F or B, micro-batch) is there."""
    in_flight: list[tuple[float, int, Action]] = []
    counter = 0

    def ready_at(action: Action) -> float | None:
        assert action.micro_batch is not None
        if action.kind is FORWARD:
            return 0.0 if action.stage == 0 else arrived.get((action.stage, FORWARD, action.micro_batch))
        if action.kind is WEIGHT or action.stage == last_stage:
            return 0.0
        return arrived.get((action.stage, BACKWARD, action.micro_batch))

    # teams whose next computation has its input, by the time at which it starts; a team stands here once
    ready: list[tuple[float, int]] = []
    offered = [False] * len(orders)

    def offer(team: int) -> None:
        if not offered[team] and position[team] < len(orders[team]):
            at = ready_at(orders[team][position[team]])
            if at is not None:
                heapq.heappush(ready, (max(at, clock[team]), team))
                offered[team] = True

    for team in range(len(orders)):
        offer(team)
    while ready or in_flight:
        if in_flight and (not ready or in_flight[0][0] <= ready[0][0]):
            end, _, action = heapq.heappop(in_flight)
            offer(_deliver(action, end, team_of, actions, arrived))
            continue
        start, team = heapq.heappop(ready)
        offered[team] = False
        action = orders[team][position[team]]
        position[team] += 1
        clock[team] = start + durations[action.stage].of(action.kind)
        actions[team].append(action)
        timeline[team].append(Timed(action, start, clock[team]))
        if (action.kind is FORWARD and action.stage < last_stage) or (
            action.kind in (BACKWARD, INPUT) and action.stage > 0
        ):
            heapq.heappush(in_flight, (clock[team], counter, action))
            counter += 1
        offer(team)
    _require_finished(orders, position)
    return Played(tuple(map(tuple, actions)), tuple(map(tuple, timeline)))


def _deliver(
    action: Action,
    end: float,
    team_of: dict[int, int],
    actions: list[list[Action]],
    arrived: dict[tuple[int, ActionKind, int], float],
) -> int:
    """Let the consumer of an action have its output, and return the consumer's team."""
    assert action.micro_batch is not None
    forward = action.kind is FORWARD
    consumer = action.stage + 1 if forward else action.stage - 1
    arrived[consumer, FORWARD if forward else BACKWARD, action.micro_batch] = end
    if team_of[consumer] != team_of[action.stage]:
        send, receive = (
            (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
            if forward
            else (ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD)
        )
        actions[team_of[action.stage]].append(Action(action.stage, send, action.micro_batch))
        actions[team_of[consumer]].append(Action(consumer, receive, action.micro_batch))
    return team_of[consumer]


def _require_finished(orders: Sequence[Sequence[Action]], position: Sequence[int]) -> None:
    waiting = [
        f"team {team} at {order[at]}"
        for team, (order, at) in enumerate(zip(orders, position, strict=True))
        if at < len(order)
    ]
    if waiting:
        raise NotExecutableError(
            f"schedule.orders: the teams wait for each other ({', '.join(waiting[:4])}): "
            "each action must come after those that make its input"
        )


def with_sharding(
    actions: Sequence[Action], sharding: dict[int, int], reduced: set[int], micro_batches: int
) -> tuple[Action, ...]:
    """Add the collectives of each stage's replicas to a team's list.

    ZeRO 0 sums the gradients after the last backward. ZeRO 1 gathers the weights once and reduces the gradients once,
    each rank keeping its share; ZeRO 2 reduces after every backward, so that only shares of gradients are kept; ZeRO 3
    also gathers the weights for each computation and drops them behind it.

    Parameters
    ----------
    actions
        Computations and communication between stages.
    sharding
        ZeRO stage of each stage of the team.
    reduced
        Stages that have replicas.
    micro_batches
        Number of micro-batches, after which a stage's gradients are complete.
    """
    lists: list[Action] = []
    gathered: set[int] = set()
    backwards = dict.fromkeys(sharding, 0)
    for action in actions:
        stage = action.stage
        level = sharding[stage]
        computes = action.kind in COMPUTATIONS
        if computes and level and stage not in gathered:
            lists.append(Action(stage, ActionKind.UNSHARD))
            gathered.add(stage)
        lists.append(action)
        if action.kind in (BACKWARD, WEIGHT):
            backwards[stage] += 1
            if stage in reduced and (level >= 2 or backwards[stage] == micro_batches):
                lists.append(Action(stage, ActionKind.REDUCE))
        if computes and stage in gathered and (level == 3 or backwards[stage] == micro_batches):
            lists.append(Action(stage, ActionKind.RESHARD))
            gathered.remove(stage)
    return tuple(lists)
