"""How much host memory carrying out an offload plan takes, read off its timeline. No torch.

State of the layers updated on the CPU or streamed lies on the host. A gradient chunk is held from the start of its copy
to the end of its update, a weight chunk from the start of its update to the end of its copy back: the most that is held
at once gives the rings. What the plan updates before the last backward has ended may have to be undone when gradients
turn out to be clipped or not finite, so its state before the update is kept until then.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from solver_plan.offload.plan import OffloadPlan
from solver_plan.offload.problem import OffloadProblem

Stay = tuple[float, float, float]
"""Start and end in milliseconds, and how many parameters are held in between, every period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """Parameters that the host has room for; multiply by what each takes."""

    state: int
    """Whose optimizer state stays on the host."""
    gradients: int
    """In the ring from device to host."""
    weights: int
    """In the ring from host to device."""
    undo: int
    """Whose state before a speculative update is kept."""

    def bytes(self, *, gradient: int, weight: int, state: int) -> int:
        """Return the bytes of all, given those of one parameter's gradient, weight and state."""
        return self.state * state + self.gradients * gradient + self.weights * weight + self.undo * state


def planned_rooms(problem: OffloadProblem, plan: OffloadPlan, *, speculate: bool = True) -> Rooms:
    """Return the room that a plan needs on the host.

    Parameters
    ----------
    problem, plan
        A plan that `check` lets through.
    speculate
        Whether updates before the last backward's end may have to be undone.
    """
    parameters = {layer.name: layer.parameters for layer in problem.layers}
    place_of = {item.layer: item.update_on for item in plan.placement}
    chunk_of = {name: count / problem.chunks_per_layer for name, count in parameters.items()}
    timed = {(item.operation, item.layer, item.chunk): item for item in plan.timeline}
    decided_ms = timed["backward", problem.layers[0].name, 0].end_ms
    gradients: list[Stay] = []
    weights: list[Stay] = []
    undo = 0.0
    for item in plan.timeline:
        if item.operation != "update" or place_of[item.layer] == "gpu":
            continue
        on_cpu = place_of[item.layer] == "cpu"
        held = chunk_of[item.layer] if on_cpu else float(parameters[item.layer])
        if item.start_ms < decided_ms:
            undo += held
        if on_cpu:
            copied = timed["gradient_copy", item.layer, item.chunk]
            returned = timed["weight_copy", item.layer, item.chunk]
            gradients.append((copied.start_ms, item.end_ms, held))
            weights.append((item.start_ms, returned.end_ms, held))
    return Rooms(
        state=sum(parameters[name] for name, place in place_of.items() if place != "gpu"),
        gradients=_with_slack(gradients, plan.predicted.period_ms),
        weights=_with_slack(weights, plan.predicted.period_ms),
        undo=-int(-undo // 1) if speculate else 0,
    )


def _with_slack(stays: list[Stay], period_ms: float) -> int:
    """Return the most that is held at once, and one largest chunk more: real durations vary, and room is in pieces."""
    return -int(-(most_held(stays, period_ms) + max((held for *_, held in stays), default=0.0)) // 1)


def most_held(stays: Iterable[Stay], period_ms: float) -> float:
    """Return the most that is held at any moment when every stay is repeated each period."""
    stays = tuple(stays)
    if period_ms <= 0:
        return sum(held for *_, held in stays)
    changes: list[tuple[float, float]] = []
    always = 0.0
    for start_ms, end_ms, held in stays:
        rounds, rest_ms = divmod(end_ms - start_ms, period_ms)
        always += held * rounds
        begin_ms = start_ms % period_ms
        changes.append((begin_ms, held))
        changes.append((begin_ms + rest_ms, -held))
        if begin_ms + rest_ms > period_ms:  # goes on at the start of the next period
            changes += [(0.0, held), (begin_ms + rest_ms - period_ms, -held)]
    now = most = 0.0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return always + most
