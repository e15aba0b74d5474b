"""Checks a wavefront plan against its problem, rule by rule, and recomputes what it costs. Knows no solver.

The rules are those of `documents.md`: every layer in exactly one slice, modes that exist, durations, order and
transfers, one slice at a time on a device, memory, and the numbers that the plan claims.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from solver_plan.errors import InvalidPlanError
from solver_plan.wavefront.costs import Choice, choice_of, device_memory_bytes, device_reduction_ms, transfer_ms
from solver_plan.wavefront.plan import Predicted, Slice, WavefrontPlan
from solver_plan.wavefront.problem import WavefrontProblem

TIME_TOLERANCE_MS = 1e-6
RELATIVE_TOLERANCE = 1e-9
"""Sums of large times round: a tolerance that grows with them."""
CLAIM_TOLERANCE = 1e-6
"""Relative, for the numbers that a plan claims."""
MOST_REPORTED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What an examination of a plan found."""

    violations: tuple[str, ...]
    predicted: Predicted | None
    """What the plan costs; None where its slices make no sense."""


@dataclass(frozen=True, slots=True)
class Dependency:
    """One slice must not start before another has ended and its data has arrived."""

    before: int
    after: int
    delay_ms: float


def check(problem: WavefrontProblem, plan: WavefrontPlan) -> tuple[str, ...]:
    """Return every violation of the plan, one line each; none: the plan is valid and costs what it claims."""
    return examine(problem, plan).violations


def evaluate(problem: WavefrontProblem, plan: WavefrontPlan) -> float:
    """Return the objective of a plan in ms. Raises `InvalidPlanError` with every violation."""
    found = examine(problem, plan)
    if found.violations or found.predicted is None:
        raise InvalidPlanError(found.violations)
    return found.predicted.makespan_ms


def examine(problem: WavefrontProblem, plan: WavefrontPlan) -> Examination:
    """Check a plan and compute its cost."""
    broken = _slices_alone(problem, plan.slices)
    if not broken:
        broken = _coverage(problem, plan.slices)
    if broken:
        return Examination(violations=_limited(broken), predicted=None)
    dependencies = dependencies_of(problem, plan.slices)
    reduction_ms = max(device_reduction_ms(problem, plan.slices))
    both = problem.phases == "forward_backward"
    latest = max(max(piece.end_ms, piece.backward_end_ms or 0.0) for piece in plan.slices)
    predicted = Predicted(
        makespan_ms=latest + reduction_ms,
        transfer_ms=sum(link.delay_ms for link in dependencies) * (2 if both else 1),
        reduction_ms=reduction_ms,
        device_memory_bytes=tuple(device_memory_bytes(problem, plan.slices)),
    )
    violations = [
        *_durations(problem, plan.slices),
        *_order(problem, plan.slices, dependencies),
        *_one_at_a_time(problem, plan.slices),
        *_memory(problem, plan.slices, predicted),
        *_claims(plan, predicted),
    ]
    return Examination(violations=_limited(violations), predicted=predicted)


def slices_of(slices: Iterable[Slice]) -> dict[str, list[int]]:
    """Return the indices of each component's slices, in the order of their layers."""
    found: dict[str, list[int]] = {}
    numbered = list(slices)
    for index in sorted(range(len(numbered)), key=lambda index: numbered[index].layers):
        found.setdefault(numbered[index].component, []).append(index)
    return found


def dependencies_of(problem: WavefrontProblem, slices: tuple[Slice, ...]) -> list[Dependency]:
    """Return which slice waits for which in the forward, with transfer delays; the backward is the reverse."""
    of = slices_of(slices)
    pairs = [pair for indices in of.values() for pair in itertools.pairwise(indices)]
    pairs += [(of[before][-1], of[after][0]) for before, after in problem.edges]
    return [
        Dependency(
            before,
            after,
            transfer_ms(
                problem.cluster,
                problem.component_of[slices[before].component].output_bytes,
                slices[before].devices,
                slices[after].devices,
            ),
        )
        for before, after in pairs
    ]


def _slices_alone(problem: WavefrontProblem, slices: tuple[Slice, ...]) -> list[str]:
    """Names, modes, devices and times of each slice by itself."""
    found = []
    for index, piece in enumerate(slices):
        at = f"slices[{index}]"
        component = problem.component_of.get(piece.component)
        if component is None:
            found.append(f"{at}.component: found {piece.component!r}; it is the name of a component of the problem")
            continue
        if piece.layers[1] > component.layers:
            found.append(f"{at}.layers: found {list(piece.layers)}; {component.name} has {component.layers} layers")
        if len(set(piece.devices)) < len(piece.devices):
            found.append(f"{at}.devices: found {list(piece.devices)}; each device once")
        if max(piece.devices) >= problem.cluster.devices:
            found.append(f"{at}.devices: found {max(piece.devices)}; devices are 0 to {problem.cluster.devices - 1}")
        elif component.modes is None and piece.mode is not None:
            found.append(f"{at}.mode: found {piece.mode}; {component.name} has layer_ms and no modes: leave it out")
        elif component.modes is not None and (piece.mode is None or piece.mode >= len(component.modes)):
            found.append(f"{at}.mode: found {piece.mode}; {component.name} has modes 0 to {len(component.modes) - 1}")
        elif choice_of(component, piece) is None:
            rule = "a number of devices that its mode or layer_ms has"
            found.append(f"{at}.devices: found {len(piece.devices)} devices; {component.name} needs {rule}")
        given = piece.backward_start_ms is not None, piece.backward_end_ms is not None
        both = problem.phases == "forward_backward"
        if given != (both, both):
            rule = "both backward times" if both else "no backward times"
            found.append(f"{at}: phases {problem.phases} need {rule}")
    return found


def _coverage(problem: WavefrontProblem, slices: tuple[Slice, ...]) -> list[str]:
    """Each layer of each component in exactly one slice."""
    found = []
    of = slices_of(slices)
    for component in problem.components:
        at = 0
        for index in of.get(component.name, []):
            first, end = slices[index].layers
            if first != at:
                what = "again" if first < at else "no slice for some layers before it"
                found.append(
                    f"slices[{index}].layers: found [{first}, {end}), {what}; {component.name} goes on at {at}"
                )
            at = max(at, end)
        if at < component.layers:
            found.append(
                f"{component.name}: found no slice for layers [{at}, {component.layers}); each layer runs once"
            )
    return found


def _durations(problem: WavefrontProblem, slices: tuple[Slice, ...]) -> list[str]:
    found = []
    for index, piece in enumerate(slices):
        choice = choice_of(problem.component_of[piece.component], piece)
        assert choice is not None
        for what, start_ms, end_ms, layer_ms in _spans(piece, choice):
            right = layer_ms * (piece.layers[1] - piece.layers[0])
            if abs(end_ms - start_ms - right) > _tolerance(end_ms):
                found.append(
                    f"slices[{index}]: {what} takes {end_ms - start_ms:.9g} ms; its layers take {right:.9g} ms"
                )
    return found


def _spans(piece: Slice, choice: Choice) -> list[tuple[str, float, float, float]]:
    """Return (phase, start, end, time of a layer) of the one or two spans of a slice."""
    if piece.backward_start_ms is None or piece.backward_end_ms is None:
        return [("it", piece.start_ms, piece.end_ms, choice.layer_ms)]
    return [
        ("its forward", piece.start_ms, piece.end_ms, choice.forward_ms),
        ("its backward", piece.backward_start_ms, piece.backward_end_ms, choice.backward_ms),
    ]


def _order(problem: WavefrontProblem, slices: tuple[Slice, ...], dependencies: list[Dependency]) -> list[str]:
    """Precedence with transfers, forward and backward."""
    found = []

    def wait(after: int, start_ms: float, before: int, end_ms: float, delay_ms: float, what: str) -> None:
        if start_ms < end_ms + delay_ms - _tolerance(end_ms + delay_ms):
            transfer = f" and its data arrives {delay_ms:.9g} ms later" if delay_ms > 0 else ""
            found.append(
                f"slices[{after}]: its {what}starts at {start_ms:.9g} ms; "
                f"slices[{before}] ends at {end_ms:.9g} ms{transfer}"
            )

    both = problem.phases == "forward_backward"
    for link in dependencies:
        before, after = slices[link.before], slices[link.after]
        wait(link.after, after.start_ms, link.before, before.end_ms, link.delay_ms, "forward " if both else "work ")
        if both:
            assert before.backward_start_ms is not None
            assert after.backward_end_ms is not None
            start_ms, end_ms = before.backward_start_ms, after.backward_end_ms
            wait(link.before, start_ms, link.after, end_ms, link.delay_ms, "backward ")
    if both:
        for index, piece in enumerate(slices):
            assert piece.backward_start_ms is not None
            wait(index, piece.backward_start_ms, index, piece.end_ms, 0.0, "backward ")
    return found


def _one_at_a_time(problem: WavefrontProblem, slices: tuple[Slice, ...]) -> list[str]:
    busy: dict[int, list[tuple[float, float, int]]] = {}
    for index, piece in enumerate(slices):
        for device in piece.devices:
            spans = busy.setdefault(device, [])
            spans.append((piece.start_ms, piece.end_ms, index))
            if piece.backward_start_ms is not None and piece.backward_end_ms is not None:
                spans.append((piece.backward_start_ms, piece.backward_end_ms, index))
    found = []
    for device, spans in sorted(busy.items()):
        # what takes no time occupies nothing
        ordered = sorted(span for span in spans if span[1] > span[0])
        latest = ordered[0] if ordered else (0.0, 0.0, 0)
        for span in ordered[1:]:
            if span[0] < latest[1] - _tolerance(latest[1]):
                found.append(
                    f"device {device}: slices[{span[2]}] starts at {span[0]:.9g} ms while slices[{latest[2]}] runs "
                    f"until {latest[1]:.9g} ms; a device runs one slice at a time"
                )
            latest = max(latest, span, key=lambda each: each[1])
    return found


def _memory(problem: WavefrontProblem, slices: tuple[Slice, ...], predicted: Predicted) -> list[str]:
    limit = problem.cluster.memory_bytes_per_device
    if limit is None:
        return []
    on_device = [0] * problem.cluster.devices
    for piece in slices:
        for device in piece.devices:
            on_device[device] += 1  # activations are rounded up: one byte for each slice
    return [
        f"device {device}: holds {held} bytes, {held - limit} more than its {limit}; move slices elsewhere"
        for device, (held, count) in enumerate(zip(predicted.device_memory_bytes, on_device, strict=True))
        if held > limit + count
    ]


def _claims(plan: WavefrontPlan, predicted: Predicted) -> list[str]:
    """The numbers that the plan and its certificate claim."""
    found = []

    def claim(place: str, claimed: float, right: float) -> None:
        if abs(claimed - right) > max(TIME_TOLERANCE_MS, CLAIM_TOLERANCE * abs(right)):
            found.append(f"{place}: found {claimed:.9g}; it is {right:.9g}")

    if plan.predicted is not None:
        claim("predicted.makespan_ms", plan.predicted.makespan_ms, predicted.makespan_ms)
        claim("predicted.transfer_ms", plan.predicted.transfer_ms, predicted.transfer_ms)
        claim("predicted.reduction_ms", plan.predicted.reduction_ms, predicted.reduction_ms)
        claimed_bytes, right_bytes = plan.predicted.device_memory_bytes, predicted.device_memory_bytes
        if len(claimed_bytes) != len(right_bytes):
            found.append(
                f"predicted.device_memory_bytes: found {len(claimed_bytes)} devices; the cluster has {len(right_bytes)}"
            )
        else:
            for device, (claimed, right) in enumerate(zip(claimed_bytes, right_bytes, strict=True)):
                if abs(claimed - right) > len(plan.slices):
                    found.append(f"predicted.device_memory_bytes[{device}]: found {claimed}; it is {right}")
    if plan.certificate is not None:
        claim("certificate.objective", plan.certificate.objective, predicted.makespan_ms)
        bound = plan.certificate.bound
        if bound is not None and bound > predicted.makespan_ms * (1 + CLAIM_TOLERANCE):
            found.append(
                f"certificate.bound: found {bound:.9g}; no bound is above the plan's {predicted.makespan_ms:.9g}"
            )
    return found


def _tolerance(time_ms: float) -> float:
    return TIME_TOLERANCE_MS + RELATIVE_TOLERANCE * abs(time_ms)


def _limited(violations: list[str]) -> tuple[str, ...]:
    if len(violations) <= MOST_REPORTED:
        return tuple(violations)
    return (*violations[:MOST_REPORTED], f"and {len(violations) - MOST_REPORTED} more")
