"""Everything a plan can do wrong, found without any solver and without the code that makes plans.

Times are compared to `TOLERANCE_MS`; an operation of length 0 occupies nothing.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from solver_plan.documents import require_same_problem
from solver_plan.errors import InvalidPlanError
from solver_plan.offload.plan import OffloadPlan, OperationName, Place, ResourceName, TimedOperation
from solver_plan.offload.problem import OffloadProblem

TOLERANCE_MS = 1e-6
AGREEMENT = 1e-6

_Key = tuple[OperationName, str, int]


def violations(problem: OffloadProblem, plan: OffloadPlan) -> tuple[str, ...]:
    """Return every violation of the plan, one line each: rule, place and values.

    Raises
    ------
    PlanMismatchError
        If the plan names another problem.
    """
    require_same_problem(problem, plan)
    found = [*_placement(problem, plan)]
    if found:
        return tuple(found)  # nothing else can be judged
    found += _operations(problem, plan)
    if found:
        return tuple(found)
    timed = {(item.operation, item.layer, item.chunk): item for item in plan.timeline}
    period_ms = plan.predicted.period_ms
    found += _origin(plan)
    found += _compute_order(problem, timed)
    for place, layer in ((item.update_on, item.layer) for item in plan.placement):
        found += _layer(problem, timed, place, layer, period_ms)
    found += _one_at_a_time(plan)
    found += _rooms(problem, plan, timed)
    found += _certificate(plan)
    return tuple(found)


def period_of(problem: OffloadProblem, plan: OffloadPlan) -> float:
    """Return the period in milliseconds, the objective. Raises `InvalidPlanError` if the plan is not valid."""
    found = violations(problem, plan)
    if found:
        raise InvalidPlanError(found)
    return plan.predicted.period_ms


def _placement(problem: OffloadProblem, plan: OffloadPlan) -> Iterator[str]:
    known = {layer.name for layer in problem.layers}
    counts = Counter(item.layer for item in plan.placement)
    for name in counts:
        if name not in known:
            yield f"placement: layer {name!r} is not in the problem"
        elif counts[name] > 1:
            yield f"placement: layer {name!r} is placed {counts[name]} times; once is right"
    for layer in problem.layers:
        if layer.name not in counts:
            yield f"placement: layer {layer.name!r} has no placement"
    states = {layer.name: problem.state_bytes(index) for index, layer in enumerate(problem.layers)}
    for item in plan.placement:
        if item.update_on != "gpu_streamed":
            continue
        if problem.staging_bytes == 0 and item.layer in states:
            yield f"placement: layer {item.layer!r} is streamed; staging_bytes is 0, which means no streaming"
        elif states.get(item.layer, 0) > problem.staging_bytes:
            yield (
                f"placement: layer {item.layer!r} is streamed; its state of {states[item.layer]} bytes exceeds "
                f"staging_bytes {problem.staging_bytes}"
            )


def _expected(problem: OffloadProblem, plan: OffloadPlan) -> dict[_Key, tuple[ResourceName, float]]:
    """Resource and duration of every operation that the placement needs."""
    place_of = {item.layer: item.update_on for item in plan.placement}
    rates, each, chunks = problem.rates, problem.bytes_per_parameter, problem.chunks_per_layer
    wanted: dict[_Key, tuple[ResourceName, float]] = {}
    for layer in problem.layers:
        name, parameters = layer.name, layer.parameters
        wanted["forward", name, 0] = ("gpu", layer.forward_ms)
        wanted["backward", name, 0] = ("gpu", layer.backward_ms)
        if place_of[name] == "cpu":
            for chunk in range(chunks):
                gradient_ms = 1e3 * parameters * each.gradient / rates.d2h_bytes_per_s / chunks
                wanted["gradient_copy", name, chunk] = ("d2h", gradient_ms)
                wanted["update", name, chunk] = ("cpu", 1e3 * parameters / rates.cpu_update_parameters_per_s / chunks)
                weight_ms = 1e3 * parameters * each.weight / rates.h2d_bytes_per_s / chunks
                wanted["weight_copy", name, chunk] = ("h2d", weight_ms)
            continue
        wanted["update", name, 0] = ("gpu", 1e3 * parameters / rates.gpu_update_parameters_per_s)
        if place_of[name] == "gpu_streamed":
            state_bytes = parameters * each.optimizer_state
            wanted["state_copy_in", name, 0] = ("h2d", 1e3 * state_bytes / rates.h2d_bytes_per_s)
            wanted["state_copy_out", name, 0] = ("d2h", 1e3 * state_bytes / rates.d2h_bytes_per_s)
    return wanted


def _operations(problem: OffloadProblem, plan: OffloadPlan) -> Iterator[str]:
    wanted = _expected(problem, plan)
    seen: set[_Key] = set()
    for index, item in enumerate(plan.timeline):
        key = (item.operation, item.layer, item.chunk)
        at = f"timeline[{index}]: {_label(item)}"
        if key not in wanted:
            yield f"{at} does not belong to the placement of layer {item.layer!r}"
            continue
        if key in seen:
            yield f"{at} is there twice"
            continue
        seen.add(key)
        resource, duration_ms = wanted[key]
        if item.resource != resource:
            yield f"{at} runs on {item.resource}; it runs on {resource}"
        length_ms = item.end_ms - item.start_ms
        if abs(length_ms - duration_ms) > TOLERANCE_MS + 1e-12 * duration_ms:
            yield f"{at} lasts {length_ms:.9g} ms; it takes {duration_ms:.9g} ms"
    for operation, layer, chunk in wanted:
        if (operation, layer, chunk) not in seen:
            yield f"timeline: {operation} of layer {layer!r}, chunk {chunk}, is missing"


def _origin(plan: OffloadPlan) -> Iterator[str]:
    first = min(plan.timeline, key=lambda item: item.start_ms)
    if abs(first.start_ms) > TOLERANCE_MS:
        yield f"timeline: the earliest operation, {_label(first)}, starts at {first.start_ms:.9g} ms; it starts at 0"


def _compute_order(problem: OffloadProblem, timed: dict[_Key, TimedOperation]) -> Iterator[str]:
    chain = [timed["forward", layer.name, 0] for layer in problem.layers]
    chain += [timed["backward", layer.name, 0] for layer in reversed(problem.layers)]
    for position, (before, after) in enumerate(pairwise(chain)):
        turn = position == len(problem.layers) - 1
        lag_ms = problem.other_micro_steps_ms if turn else 0.0
        why = f" and the other micro-steps ({lag_ms:.9g} ms)" if lag_ms else ""
        yield from _after(before, after, why, lag_ms=lag_ms)


def _layer(
    problem: OffloadProblem, timed: dict[_Key, TimedOperation], place: Place, layer: str, period_ms: float
) -> Iterator[str]:
    """Check the chain from a layer's backward to its next forward."""
    forward, backward = timed["forward", layer, 0], timed["backward", layer, 0]
    last_backward = timed["backward", problem.layers[0].name, 0]
    chunks = problem.chunks_per_layer if place == "cpu" else 1
    for chunk in range(chunks):
        update = timed["update", layer, chunk]
        if problem.clip_gradients:
            yield from _after(last_backward, update, ": gradients are clipped")
        if place == "cpu":
            copy, weight = timed["gradient_copy", layer, chunk], timed["weight_copy", layer, chunk]
            yield from _after(backward, copy)
            yield from _after(copy, update)
            yield from _after(update, weight)
            yield from _after(weight, forward, " of the next iteration", later_ms=period_ms)
            continue
        yield from _after(backward, update)
        yield from _after(update, forward, " of the next iteration", later_ms=period_ms)
        if place == "gpu_streamed":
            copy_in, copy_out = timed["state_copy_in", layer, 0], timed["state_copy_out", layer, 0]
            yield from _after(copy_in, update)
            yield from _after(update, copy_out)
            yield from _after(copy_out, copy_in, " of the next iteration", later_ms=period_ms)


def _after(
    before: TimedOperation, after: TimedOperation, why: str = "", *, lag_ms: float = 0.0, later_ms: float = 0.0
) -> Iterator[str]:
    starts_ms, ready_ms = after.start_ms + later_ms, before.end_ms + lag_ms
    if starts_ms < ready_ms - TOLERANCE_MS:
        yield f"{_label(after)} starts at {starts_ms:.9g} ms, before {_label(before)} ends at {ready_ms:.9g} ms{why}"


def _one_at_a_time(plan: OffloadPlan) -> Iterator[str]:
    """Check each resource around the cycle: sorted by start modulo the period, each ends before the next starts."""
    period_ms = plan.predicted.period_ms
    for resource in ("gpu", "cpu", "d2h", "h2d"):
        busy = [item for item in plan.timeline if item.resource == resource and item.end_ms > item.start_ms]
        total_ms = sum(item.end_ms - item.start_ms for item in busy)
        if total_ms > period_ms + TOLERANCE_MS * (1 + len(busy)):
            yield f"{resource}: {total_ms:.9g} ms of work in a period of {period_ms:.9g} ms"
            continue
        if not busy or period_ms == 0:
            continue
        at = sorted((item.start_ms % period_ms, index) for index, item in enumerate(busy))
        for (start_ms, index), (next_ms, following) in zip(
            at, [*at[1:], (at[0][0] + period_ms, at[0][1])], strict=True
        ):
            item, other = busy[index], busy[following]
            end_ms = start_ms + (item.end_ms - item.start_ms)
            if end_ms > next_ms + TOLERANCE_MS:
                yield (
                    f"{resource}: {_label(item)} and {_label(other)} overlap by {end_ms - next_ms:.9g} ms "
                    f"(modulo the period of {period_ms:.9g} ms)"
                )


def _rooms(problem: OffloadProblem, plan: OffloadPlan, timed: dict[_Key, TimedOperation]) -> Iterator[str]:
    states = {layer.name: problem.state_bytes(index) for index, layer in enumerate(problem.layers)}
    resident = sum(states[item.layer] for item in plan.placement if item.update_on == "gpu")
    if resident > problem.gpu_state_bytes:
        yield (
            f"resident optimizer state: {resident} bytes, {resident - problem.gpu_state_bytes} more than "
            f"gpu_state_bytes {problem.gpu_state_bytes}"
        )
    if plan.predicted.gpu_state_bytes != resident:
        yield f"predicted.gpu_state_bytes: found {plan.predicted.gpu_state_bytes}; the placement keeps {resident}"
    streamed = [item.layer for item in plan.placement if item.update_on == "gpu_streamed"]
    period_ms = plan.predicted.period_ms
    if period_ms == 0:
        return
    stays = {
        name: (timed["state_copy_in", name, 0].start_ms, timed["state_copy_out", name, 0].end_ms) for name in streamed
    }
    for name, (moment_ms, _) in stays.items():
        held = [
            other
            for other, (start_ms, end_ms) in stays.items()
            if other == name or _held(moment_ms, start_ms, end_ms, period_ms)
        ]
        total = sum(states[other] for other in held)
        if total > problem.staging_bytes:
            yield (
                f"staging: {total} bytes at {moment_ms:.9g} ms ({', '.join(map(repr, held))}), "
                f"{total - problem.staging_bytes} more than staging_bytes {problem.staging_bytes}"
            )


def _held(moment_ms: float, start_ms: float, end_ms: float, period_ms: float) -> bool:
    """True if a state that comes at start and goes at end, every period, is held at the moment."""
    since_ms = (moment_ms - start_ms) % period_ms
    if period_ms - since_ms <= TOLERANCE_MS:
        since_ms = 0.0  # the same moment up to rounding
    return since_ms < end_ms - start_ms - TOLERANCE_MS


def _certificate(plan: OffloadPlan) -> Iterator[str]:
    claimed = plan.certificate
    period_ms = plan.predicted.period_ms
    if claimed is None:
        return
    if abs(claimed.objective - period_ms) > AGREEMENT * period_ms:
        yield f"certificate.objective: found {claimed.objective!r}; the period is {period_ms!r} ms"
    if claimed.bound is not None and claimed.bound > period_ms * (1 + AGREEMENT):
        yield f"certificate.bound: found {claimed.bound!r}, above the period of {period_ms!r} ms of a valid plan"
    if claimed.status == "optimal" and (claimed.bound is None or claimed.bound < period_ms * (1 - 2 * AGREEMENT)):
        yield f"certificate.status: found optimal with bound {claimed.bound!r} and period {period_ms!r} ms"


def _label(item: TimedOperation) -> str:
    return f"{item.operation} of {item.layer!r}" + (f" chunk {item.chunk}" if item.chunk else "")
