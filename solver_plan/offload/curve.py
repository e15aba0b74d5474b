"""What memory buys: the period over the device's room, the least room for a period, and a menu of rooms and times."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from annotated_types import Len
from pydantic import TypeAdapter

from solver_plan.documents import Bytes, Count, Milliseconds, Name, document, parse_document
from solver_plan.errors import InfeasibleProblemError, InputError, NoPlanFoundError
from solver_plan.offload.bounds import memory_bound, placement_bound
from solver_plan.offload.layers import with_room
from solver_plan.offload.plan import OffloadPlan
from solver_plan.offload.planner import plan_offload
from solver_plan.offload.problem import OffloadProblem
from solver_plan.solving.budget import Budget, Clock

AGREEMENT = 1e-9
BISECTIONS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One room and what it gives."""

    gpu_state_bytes: int
    period_ms: float
    bound_ms: float | None
    plan: OffloadPlan


def period_over_room(
    problem: OffloadProblem, budget: Budget, *, rooms: Sequence[int] | None = None, points: int = 11
) -> tuple[CurvePoint, ...]:
    """Plan the problem for several rooms, each with an even share of the time.

    A plan for a room is one for every larger room, so the periods never rise.

    Parameters
    ----------
    problem
        Its own room does not count.
    budget
        For all points together.
    rooms
        `gpu_state_bytes` of each point; None: `points` of them, evenly from 0 to all states resident.

    Raises
    ------
    InputError
        If a room is negative or there are too few points.
    """
    if rooms is None:
        if points < 2:
            raise InputError(f"points: found {points}; at least 2")
        total = _total_bytes(problem)
        rooms = sorted({total * step // (points - 1) for step in range(points)})
    for room in rooms:
        if room < 0:
            raise InputError(f"room: found {room} bytes; at least 0")
    found: list[CurvePoint] = []
    share = replace(budget, time_limit_s=budget.time_limit_s / max(1, len(rooms)))
    for room in sorted(rooms):
        plan = plan_offload(with_room(problem, room), share).plan
        assert plan.certificate is not None
        point = CurvePoint(
            gpu_state_bytes=room,
            period_ms=plan.predicted.period_ms,
            bound_ms=plan.certificate.bound,
            plan=plan,
        )
        if found and found[-1].period_ms < point.period_ms:
            point = replace(point, period_ms=found[-1].period_ms, plan=found[-1].plan)
        found.append(point)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastRoom:
    """The least room found for a period."""

    gpu_state_bytes: int
    bound_bytes: int
    """No plan of that period needs less."""
    plan: OffloadPlan
    """For the problem with this room."""


def least_room(problem: OffloadProblem, period_ms: float, budget: Budget) -> LeastRoom:
    """Return the least `gpu_state_bytes` with which a plan of at most `period_ms` was found, and a proven bound on it.

    A program bounds the room from below; planning with that room, or bisecting between it and the least known, shows
    how close a plan comes.

    Raises
    ------
    InfeasibleProblemError
        If no room is enough, with the least period there is.
    NoPlanFoundError
        If none was found with any room, but may exist.
    InputError
        If the period makes no sense.
    """
    if not 0 < period_ms < float("inf"):
        raise InputError(f"period: found {period_ms:g} ms; greater than 0 and finite")
    clock = Clock(budget)
    everything = _total_bytes(problem)
    lowest = memory_bound(problem, period_ms, clock, limit=0.3 * clock.remaining)
    if lowest is None:
        unlimited = placement_bound(with_room(problem, everything), clock)
        raise _no_room_is_enough(period_ms, unlimited.bound_ms or period_ms)
    share = replace(budget, time_limit_s=max(1e-3, 0.7 * budget.time_limit_s / (BISECTIONS + 2)))

    def planned(room: int) -> OffloadPlan:
        return plan_offload(with_room(problem, room), share).plan

    def short_enough(plan: OffloadPlan) -> bool:
        return plan.predicted.period_ms <= period_ms * (1 + AGREEMENT)

    at_bound = planned(lowest.bound_bytes)
    if short_enough(at_bound):
        return _least(at_bound, lowest.bound_bytes)
    best = planned(everything)
    if not short_enough(best):
        raise NoPlanFoundError(
            f"period: no plan of at most {period_ms:g} ms found; with room for every state the best takes "
            f"{best.predicted.period_ms:.3f} ms: give more time (one may exist), or ask for a longer period"
        )
    low, high = lowest.bound_bytes, best.predicted.gpu_state_bytes
    for _ in range(BISECTIONS):
        middle = (low + high) // 2
        if middle <= low or middle >= high:
            break
        plan = planned(middle)
        if short_enough(plan):
            best, high = plan, plan.predicted.gpu_state_bytes
        else:
            low = middle
    return _least(best, lowest.bound_bytes)


def _least(plan: OffloadPlan, bound_bytes: int) -> LeastRoom:
    return LeastRoom(
        gpu_state_bytes=plan.predicted.gpu_state_bytes,
        bound_bytes=min(bound_bytes, plan.predicted.gpu_state_bytes),
        plan=plan,
    )


def _no_room_is_enough(period_ms: float, least_ms: float) -> InfeasibleProblemError:
    return InfeasibleProblemError(
        f"period: no plan takes at most {period_ms:g} ms, whatever the room on the device; none takes less than "
        f"{least_ms:.3f} ms, {least_ms - period_ms:.3f} ms more: ask for a longer period, or speed up what it waits for"
    )


def _total_bytes(problem: OffloadProblem) -> int:
    return sum(problem.state_bytes(layer) for layer in range(len(problem.layers)))


@document
class MenuEntry:
    """One way to compute: what it takes, and what it leaves for optimizer state.

    A larger micro-batch computes more efficiently and recomputation saves activations at the price of time; both
    change the room that is left for resident state.
    """

    micro_batch: Count
    recomputation: Name
    """Words for people, such as "none" or "block"."""
    gpu_state_bytes: Bytes
    forward_ms: tuple[Milliseconds, ...]
    """Of each layer."""
    backward_ms: tuple[Milliseconds, ...]
    accumulation_steps: Count = 1

    @property
    def samples(self) -> int:
        """Samples of an iteration."""
        return self.micro_batch * self.accumulation_steps


@document
class Menu:
    """The entries to choose from, as a JSON file."""

    entries: Annotated[tuple[MenuEntry, ...], Len(1)]


def read_menu(path: str | Path) -> tuple[MenuEntry, ...]:
    """Read the entries of a menu file. Raises `InputError`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise InputError(f"{path}: cannot read a menu ({reason}); name a JSON file of entries") from None
    return parse_document(text, str(path), Menu).entries


def menu_text(entries: Sequence[MenuEntry]) -> str:
    """Return the menu as JSON text, an entry a line."""
    adapter = TypeAdapter(MenuEntry)
    lines = ",\n".join("  " + adapter.dump_json(entry).decode() for entry in entries)
    return f'{{"entries": [\n{lines}\n]}}\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuChoice:
    """The best entry of a menu, with its plan."""

    entry: MenuEntry
    problem: OffloadProblem
    plan: OffloadPlan
    ms_per_sample: float
    bound_ms_per_sample: float | None
    """No entry's plan takes less a sample."""


def problem_of(problem: OffloadProblem, entry: MenuEntry) -> OffloadProblem:
    """Return the problem with an entry's times and room. Raises `InputError` if the numbers of layers differ."""
    count = len(problem.layers)
    if not len(entry.forward_ms) == len(entry.backward_ms) == count:
        raise InputError(
            f"menu: found {len(entry.forward_ms)} forward and {len(entry.backward_ms)} backward times; the model has "
            f"{count} layers"
        )
    layers = tuple(
        replace(layer, forward_ms=forward, backward_ms=backward)
        for layer, forward, backward in zip(problem.layers, entry.forward_ms, entry.backward_ms, strict=True)
    )
    return replace(
        problem,
        layers=layers,
        gpu_state_bytes=entry.gpu_state_bytes,
        accumulation_steps=entry.accumulation_steps,
        provenance=None,
    )


def best_of_menu(problem: OffloadProblem, menu: Sequence[MenuEntry], budget: Budget) -> MenuChoice:
    """Choose entry, placement and timeline together, for the least time a sample.

    Every entry is first bounded and planned for a moment; then the time goes to the entries whose bound does not yet
    rule them out, most promising first. The bound is the least over all entries.

    Raises
    ------
    InputError
        If the menu is empty or an entry does not fit the model.
    """
    if not menu:
        raise InputError("menu: found no entry; give at least one")
    problems = [problem_of(problem, entry) for entry in menu]
    first = replace(budget, time_limit_s=0.4 * budget.time_limit_s / len(menu))
    plans = [plan_offload(item, first).plan for item in problems]

    def bound_of(index: int) -> float:
        certificate = plans[index].certificate
        bound = None if certificate is None else certificate.bound
        return 0.0 if bound is None else bound / menu[index].samples

    def value_of(index: int) -> float:
        return plans[index].predicted.period_ms / menu[index].samples

    best = min(range(len(menu)), key=value_of)
    open_entries = [index for index in range(len(menu)) if bound_of(index) < value_of(best) * (1 - 1e-6)]
    for index in sorted(open_entries, key=bound_of):
        longer = replace(budget, time_limit_s=0.6 * budget.time_limit_s / len(open_entries))
        bound_before = plans[index].certificate
        plan = plan_offload(problems[index], longer).plan
        if plan.predicted.period_ms < plans[index].predicted.period_ms or (
            bound_before is not None and bound_before.bound is None
        ):
            plans[index] = plan
    best = min(range(len(menu)), key=value_of)
    lowest = min(map(bound_of, range(len(menu))))
    return MenuChoice(
        entry=menu[best],
        problem=problems[best],
        plan=plans[best],
        ms_per_sample=value_of(best),
        bound_ms_per_sample=lowest if lowest > 0 else None,
    )
