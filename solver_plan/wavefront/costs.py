"""What slices cost: time of a layer, bytes on a device, milliseconds of a transfer. The formulas of `documents.md`."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from solver_plan.wavefront.plan import Slice
from solver_plan.wavefront.problem import Cluster, Component, Mode, WavefrontProblem

FORWARD_SHARE = 1 / 3
"""Of the time of a layer, where only the sum is given (`documents.md`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to run the layers of a component; bytes are of one device."""

    devices: int
    mode: int | None
    """Index into `modes`, None with `layer_ms`."""
    forward_ms: float
    """Of one layer."""
    backward_ms: float
    layer_ms: float
    """Forward and backward."""
    state_bytes: int
    """Of one layer, on each device."""
    activation_bytes: float
    """Of one layer, on each device."""
    gradient_bytes: int
    """Of one layer, on each device."""


def choices_of(component: Component, devices: int) -> tuple[Choice, ...]:
    """Return the modes of a component that fit a cluster, fewest devices first."""
    if component.modes is not None:
        found = [_of_mode(component, index, mode) for index, mode in enumerate(component.modes)]
    else:
        assert component.layer_ms is not None
        found = [_of_count(component, int(count), time_ms) for count, time_ms in component.layer_ms.items()]
    fitting = [choice for choice in found if choice.devices <= devices]
    return tuple(sorted(fitting, key=lambda choice: (choice.devices, choice.mode or 0)))


def choice_of(component: Component, piece: Slice) -> Choice | None:
    """Return how a slice runs its layers; None if the component knows no such mode."""
    devices = len(piece.devices)
    if component.modes is not None:
        if piece.mode is None or piece.mode >= len(component.modes):
            return None
        mode = component.modes[piece.mode]
        return _of_mode(component, piece.mode, mode) if mode.devices == devices else None
    assert component.layer_ms is not None
    time_ms = component.layer_ms.get(str(devices))
    return None if time_ms is None or piece.mode is not None else _of_count(component, devices, time_ms)


def _of_mode(component: Component, index: int, mode: Mode) -> Choice:
    return Choice(
        devices=mode.devices,
        mode=index,
        forward_ms=mode.forward_ms,
        backward_ms=mode.backward_ms,
        layer_ms=mode.forward_ms + mode.backward_ms,
        state_bytes=mode.state_bytes_per_layer,
        activation_bytes=mode.activation_bytes_per_layer,
        gradient_bytes=(
            component.gradient_bytes_per_layer
            if mode.gradient_bytes_per_layer is None
            else mode.gradient_bytes_per_layer
        ),
    )


def _of_count(component: Component, devices: int, time_ms: float) -> Choice:
    return Choice(
        devices=devices,
        mode=None,
        forward_ms=time_ms * FORWARD_SHARE,
        backward_ms=time_ms * (1 - FORWARD_SHARE),
        layer_ms=time_ms,
        state_bytes=component.state_bytes_per_layer,
        activation_bytes=component.activation_bytes_per_layer / devices,
        gradient_bytes=component.gradient_bytes_per_layer,
    )


def transfer_ms(cluster: Cluster, size_bytes: int, source: Sequence[int], target: Sequence[int]) -> float:
    """Return how long data takes from the devices that have it to the devices that need it."""
    if size_bytes == 0 or set(source) == set(target):
        return 0.0
    return cluster.ms_to_move(size_bytes, cluster.in_one_node([*source, *target]))


def reduction_ms(cluster: Cluster, size_bytes: float, holders: Sequence[int]) -> float:
    """Return how long each of some devices takes to reduce what all of them hold (ring all-reduce)."""
    k = len(holders)
    return 0.0 if k < 2 else cluster.ms_to_move(2 * (k - 1) / k * size_bytes, cluster.in_one_node(holders))


def parameters_of(component: Component) -> tuple[str, str]:
    """Return the key of a component's weights, unlike every other key where it shares them with none."""
    return ("", component.name) if component.parameters is None else ("shared", component.parameters)


def device_memory_bytes(problem: WavefrontProblem, slices: Iterable[Slice]) -> list[int]:
    """Return the bytes on each device: state of the distinct layers that it touches, and activations of its slices.

    A layer touched in modes that hold different shares of its state counts with the largest.
    """
    total = [0] * problem.cluster.devices
    held: dict[tuple[str, str], list[_Span]] = {}
    for piece in slices:
        component = problem.component_of[piece.component]
        choice = choice_of(component, piece)
        assert choice is not None
        first, end = piece.layers
        activations = -int(-choice.activation_bytes * (end - first) // 1)
        for device in piece.devices:
            total[device] += activations
        if choice.state_bytes:
            span = _Span(first, end, piece.devices, choice.state_bytes)
            held.setdefault(parameters_of(component), []).append(span)
    for spans in held.values():
        for layers, largest in _alike(spans):
            for device, size in largest.items():
                total[device] += layers * size
    return total


def device_reduction_ms(problem: WavefrontProblem, slices: Iterable[Slice]) -> list[float]:
    """Return how long each device reduces the gradients of layers that it shares with other devices."""
    cluster = problem.cluster
    total = [0.0] * cluster.devices
    reduced: dict[tuple[str, str], list[_Span]] = {}
    for piece in slices:
        component = problem.component_of[piece.component]
        choice = choice_of(component, piece)
        assert choice is not None
        if choice.gradient_bytes:
            span = _Span(*piece.layers, piece.devices, choice.gradient_bytes)
            reduced.setdefault(parameters_of(component), []).append(span)
    for spans in reduced.values():
        for layers, largest in _alike(spans):
            holders = list(largest)
            ms = {size: layers * reduction_ms(cluster, size, holders) for size in set(largest.values())}
            for device, size in largest.items():
                total[device] += ms[size]
    return total


@dataclass(frozen=True, slots=True)
class _Span:
    """Layers of one set of weights on devices, with bytes of a layer on each."""

    first: int
    end: int
    devices: tuple[int, ...]
    size_bytes: int


def _alike(spans: Sequence[_Span]) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield, for layers in a row that the same spans cover, their number and the largest size on each device."""
    waiting = sorted(spans, key=lambda span: span.first, reverse=True)
    here: list[_Span] = []
    for first, end in itertools.pairwise(sorted({edge for span in spans for edge in (span.first, span.end)})):
        here = [span for span in here if span.end > first]
        while waiting and waiting[-1].first == first:
            here.append(waiting.pop())
        largest: dict[int, int] = {}
        for span in here:
            for device in span.devices:
                largest[device] = max(largest.get(device, 0), span.size_bytes)
        yield end - first, largest
