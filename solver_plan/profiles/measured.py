"""Offload problems measured on the machine at hand: the host's rates, and each layer's times. Imports torch.

The CPU update is measured as the executor does it (casts, and the copy that undoing needs, included), with its number
of threads. Copies are measured each way alone, and both ways at once; a problem is given the latter, since while
updates overlap with the backward both directions are busy.
"""

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from solver_plan.errors import InputError
from solver_plan.execution.offload.adamw import Hyperparameters
from solver_plan.execution.offload.device import ComputeDevice, compute_device
from solver_plan.execution.offload.engine import default_workers
from solver_plan.execution.offload.host_updates import update_in_blocks
from solver_plan.execution.offload.layers import LayerModules, contents
from solver_plan.execution.offload.state import FLOAT_BYTES, KEPT
from solver_plan.offload.problem import BytesPerParameter, Layer, OffloadProblem, Rates
from solver_plan.profiles.cluster import ClusterDescription, Host

UPDATED_PARAMETERS = 1 << 22
"""Of each thread: far more than caches hold."""
COPIED_BYTES = 1 << 26
_VALUES = Hyperparameters(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, maximize=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """What a machine was measured to do."""

    device: str
    emulated: bool
    """The CPU was in the place of the device."""
    workers: int
    """Threads that updated on the CPU."""
    cpu_update_parameters_per_s: float
    gpu_update_parameters_per_s: float
    d2h_bytes_per_s: float
    """Device to host, alone."""
    h2d_bytes_per_s: float
    both_d2h_bytes_per_s: float
    """Device to host, while the other direction is busy."""
    both_h2d_bytes_per_s: float

    @property
    def rates(self) -> Rates:
        """The rates that a problem is planned with."""
        return Rates(
            cpu_update_parameters_per_s=self.cpu_update_parameters_per_s,
            gpu_update_parameters_per_s=self.gpu_update_parameters_per_s,
            d2h_bytes_per_s=self.both_d2h_bytes_per_s,
            h2d_bytes_per_s=self.both_h2d_bytes_per_s,
        )

    def table(self) -> str:
        """Return the rates as text for a terminal."""
        return "\n".join(
            [
                f"CPU update      {self.cpu_update_parameters_per_s / 1e9:8.3f} G parameters/s, "
                f"{self.workers} thread{'s' if self.workers > 1 else ''}",
                f"device update   {self.gpu_update_parameters_per_s / 1e9:8.3f} G parameters/s, {self.device}",
                f"device to host  {self.d2h_bytes_per_s / 1e9:8.2f} GB/s alone, "
                f"{self.both_d2h_bytes_per_s / 1e9:.2f} with both directions busy",
                f"host to device  {self.h2d_bytes_per_s / 1e9:8.2f} GB/s alone, "
                f"{self.both_h2d_bytes_per_s / 1e9:.2f} with both directions busy",
            ]
        )


def measure_host(
    device: torch.device | None = None,
    *,
    workers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    speculate: bool = True,
    repetitions: int = 5,
    parameters: int = UPDATED_PARAMETERS,
    copied_bytes: int = COPIED_BYTES,
) -> HostRates:
    """Measure the rates of this machine.

    Parameters
    ----------
    device
        To copy from and to; None: the current CUDA device, or the CPU in its place.
    workers
        Threads that update on the CPU, as for `OffloadOptimizer`; None: all cores but one.
    dtype
        Of gradients and weights.
    speculate
        Whether the state of before is kept, as it is where updates start before gradients are known to be finite.
    repetitions
        Of each measurement; the middle one counts.
    parameters
        That each thread updates at once.
    copied_bytes
        Of one copy.

    Raises
    ------
    InputError
        If a number makes no sense.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers = default_workers() if workers is None else workers
    for name, value in (("workers", workers), ("repetitions", repetitions), ("parameters", parameters)):
        if value < 1:
            raise InputError(f"{name}: found {value}; at least 1")
    compute = compute_device(device)
    alone = [_copies_s(compute, copied_bytes, repetitions, (way,))[0] for way in (True, False)]
    both = _copies_s(compute, copied_bytes, repetitions, (True, False))
    return HostRates(
        device=_device_name(device),
        emulated=device.type == "cpu",
        workers=workers,
        cpu_update_parameters_per_s=workers
        * parameters
        / _updates_s(workers, parameters, dtype, speculate, repetitions),
        gpu_update_parameters_per_s=parameters / _device_update_s(compute, parameters, dtype, repetitions),
        d2h_bytes_per_s=copied_bytes / alone[0],
        h2d_bytes_per_s=copied_bytes / alone[1],
        both_d2h_bytes_per_s=copied_bytes / both[0],
        both_h2d_bytes_per_s=copied_bytes / both[1],
    )


def measure_layers(
    layers: LayerModules, micro_step: Callable[[], None], *, repetitions: int = 5
) -> dict[str, tuple[float, float]]:
    """Measure forward and backward of each layer.

    A layer's forward lasts until the next layer's starts, its backward from the completion of the gradients of the
    layer behind it to that of its own: what stands between the layers is counted too. Gradients are dropped afterwards.

    Parameters
    ----------
    layers
        Modules of each layer in forward order, as for `OffloadOptimizer`.
    micro_step
        Runs one forward and backward, such as ``lambda: loss(model(x), y).backward()``.
    repetitions
        Micro-steps that are measured, after two that are not; the middle one counts.

    Returns
    -------
    dict
        (forward ms, backward ms) of each layer.

    Raises
    ------
    InputError
        If a layer has no module that runs in the micro-step.
    """
    marks = _Marks(layers)
    times: list[dict[str, tuple[float, float]]] = []
    try:
        for number in range(repetitions + 2):
            marks.begin()
            micro_step()
            found = marks.end()
            if number >= 2:
                times.append(found)
    finally:
        marks.remove()
    return {
        name: (
            statistics.median(each[name][0] for each in times),
            statistics.median(each[name][1] for each in times),
        )
        for name in layers
    }


def measure_offload(
    layers: LayerModules,
    micro_step: Callable[[], None],
    *,
    gpu_state_bytes: int,
    staging_bytes: int = 0,
    chunks_per_layer: int = 8,
    accumulation_steps: int = 1,
    clip_gradients: bool = False,
    host: HostRates | None = None,
    repetitions: int = 5,
) -> OffloadProblem:
    """Return the offload problem of a model as it runs here.

    Parameters
    ----------
    layers, micro_step, repetitions
        As for `measure_layers`.
    gpu_state_bytes, staging_bytes, chunks_per_layer, accumulation_steps
        As in `OffloadProblem`.
    clip_gradients
        True: plan for updates that wait for the norm. False: for updates that speculate that gradients are not clipped,
        which are undone where they are; the state of before is kept for that, which costs the CPU about as much as the
        update. Plan both ways where the CPU is the bottleneck.
    host
        From `measure_host`; None: measured now.

    Raises
    ------
    InputError
        If a layer does not run, or a number makes no sense.
    """
    own = _own_parameters(layers)
    trained = {name: [p for p in found if p.requires_grad] for name, found in own.items()}
    everything = [parameter for found in trained.values() for parameter in found]
    if not everything:
        raise InputError("layers: found no parameter that requires a gradient; unfreeze some")
    times = measure_layers(layers, micro_step, repetitions=repetitions)
    width = max(parameter.element_size() for parameter in everything)
    if host is None:
        widest = max(everything, key=lambda parameter: parameter.element_size())
        host = measure_host(everything[0].device, dtype=widest.dtype, speculate=not clip_gradients)
    return OffloadProblem(
        layers=tuple(
            Layer(
                name=name,
                parameters=sum(parameter.numel() for parameter in trained[name]),
                forward_ms=times[name][0],
                backward_ms=times[name][1],
            )
            for name in layers
        ),
        rates=host.rates,
        bytes_per_parameter=BytesPerParameter(gradient=width, weight=width, optimizer_state=KEPT * FLOAT_BYTES),
        gpu_state_bytes=gpu_state_bytes,
        staging_bytes=staging_bytes,
        chunks_per_layer=chunks_per_layer,
        accumulation_steps=accumulation_steps,
        clip_gradients=clip_gradients,
        provenance={"source": "measured", "device": host.device, "workers": host.workers},
    )


def with_measured_host(cluster: ClusterDescription, host: HostRates) -> ClusterDescription:
    """Return a cluster whose host is this machine's."""
    rates = host.rates
    return replace(
        cluster,
        host=Host(
            cpu_update_parameters_per_s=rates.cpu_update_parameters_per_s,
            d2h_bytes_per_s=rates.d2h_bytes_per_s,
            h2d_bytes_per_s=rates.h2d_bytes_per_s,
        ),
    )


def with_measured_rates(problem: OffloadProblem, host: HostRates) -> OffloadProblem:
    """Return a problem with measured rates; the device's update stays as described where no device was there."""
    rates = host.rates
    if host.emulated:
        rates = replace(rates, gpu_update_parameters_per_s=problem.rates.gpu_update_parameters_per_s)
    provenance = {**(problem.provenance or {}), "rates": "measured", "device": host.device, "workers": host.workers}
    return replace(problem, rates=rates, provenance=provenance)


def _own_parameters(layers: LayerModules) -> Mapping[str, Sequence[nn.Parameter]]:
    """Return the parameters of each layer that no layer before it has."""
    seen: set[nn.Parameter] = set()
    found: dict[str, list[nn.Parameter]] = {}
    for name, given in layers.items():
        found[name] = [parameter for parameter in contents(name, given)[1].values() if parameter not in seen]
        seen.update(found[name])
    return found


class _Marks:
    """Moments of one micro-step: where each layer's forward starts, and where its last gradient is complete."""

    def __init__(self, layers: LayerModules) -> None:
        own = _own_parameters(layers)
        parameters = [parameter for found in own.values() for parameter in found]
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._names = list(layers)
        self._starts: dict[str, float | torch.cuda.Event] = {}
        self._ends: dict[str, float | torch.cuda.Event] = {}
        self._began: float | torch.cuda.Event = 0.0
        self._turn: float | torch.cuda.Event = 0.0
        self._parameters = parameters
        self._handles: list[RemovableHandle] = []
        for name, given in layers.items():
            for module in contents(name, given)[0]:
                self._handles.append(module.register_forward_pre_hook(self._starting(name)))
                self._handles.append(module.register_forward_hook(self._turning))
            for parameter in own[name]:
                if parameter.requires_grad:
                    register = parameter.register_post_accumulate_grad_hook
                    self._handles.append(register(self._complete(name)))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._starts.clear()
        self._ends.clear()
        self._began = self._now()

    def end(self) -> dict[str, tuple[float, float]]:
        """Return (forward ms, backward ms) of each layer, and drop the gradients."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for parameter in self._parameters:
            parameter.grad = None
        missing = [name for name in self._names if name not in self._starts]
        if missing:
            raise InputError(f"layers: {missing[0]!r} has no module that ran in the micro-step; give the one that runs")
        starts = [self._ms(self._starts[name]) for name in self._names] + [self._ms(self._turn)]
        forward = [max(0.0, after - before) for before, after in itertools.pairwise(starts)]
        backward = [0.0] * len(self._names)
        reached = self._ms(self._turn)
        for index in reversed(range(len(self._names))):
            mark = self._ends.get(self._names[index])
            if mark is not None:
                now = max(reached, self._ms(mark))
                backward[index], reached = now - reached, now
        return {name: (forward[index], backward[index]) for index, name in enumerate(self._names)}

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _starting(self, name: str) -> Callable[[nn.Module, object], None]:
        def note(module: nn.Module, inputs: object) -> None:
            del module, inputs
            self._starts.setdefault(name, self._now())

        return note

    def _turning(self, module: nn.Module, inputs: object, outputs: object) -> None:
        del module, inputs, outputs
        self._turn = self._now()

    def _complete(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            del parameter
            self._ends[name] = self._now()

        return note

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _ms(self, mark: float | torch.cuda.Event) -> float:
        if isinstance(mark, float):
            assert isinstance(self._began, float)
            return (mark - self._began) * 1e3
        assert not isinstance(self._began, float)
        return float(self._began.elapsed_time(mark))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU in the place of a device"


def _updates_s(workers: int, parameters: int, dtype: torch.dtype, speculate: bool, repetitions: int) -> float:
    """Return the seconds in which each thread updates so many parameters, all at once; the slowest counts."""

    def prepare() -> Callable[[], None]:
        state = torch.zeros(KEPT, parameters)
        gradients, weights = torch.full((parameters,), 1e-3, dtype=dtype), torch.zeros(parameters, dtype=dtype)
        kept = torch.zeros(KEPT, parameters) if speculate else None
        return lambda: update_in_blocks(state, gradients, weights, kept, 1.0, _VALUES, ())

    return max(_together([prepare] * workers, repetitions))


def _device_update_s(device: ComputeDevice, parameters: int, dtype: torch.dtype, repetitions: int) -> float:
    def prepare() -> Callable[[], None]:
        device.enter_lane()
        state = torch.zeros(KEPT, parameters, device=device.device)
        gradients = torch.full((parameters,), 1e-3, dtype=dtype, device=device.device)
        weights = torch.zeros(parameters, dtype=dtype, device=device.device)

        def run() -> None:
            with device.after(None):
                # the blocks of a CPU cache are no help to a device, whose kernels are launched one by one
                update_in_blocks(state, gradients, weights, None, 1.0, _VALUES, (), block=parameters)

        return run

    return _together([prepare], repetitions)[0]


def _copies_s(device: ComputeDevice, size: int, repetitions: int, ways: Sequence[bool]) -> list[float]:
    """Return the seconds of a copy in each direction (True: to the host), all at once."""

    def copier(to_host: bool) -> Callable[[], Callable[[], None]]:
        def prepare() -> Callable[[], None]:
            device.enter_lane()
            there, here = device.device_memory(size).fill_(1), device.host_memory(size).fill_(1)
            source, goal = (there, here) if to_host else (here, there)

            def run() -> None:
                with device.after(None):
                    goal.copy_(source, non_blocking=True)

            return run

        return prepare

    return _together([copier(way) for way in ways], repetitions)


def _together(prepared: Sequence[Callable[[], Callable[[], None]]], repetitions: int) -> list[float]:
    """Run each in a thread of its own, all at once, and return the middle seconds of each.

    Every thread goes on until all have had their repetitions, so that none is measured alone.
    """
    times: list[list[float]] = [[] for _ in prepared]
    start = threading.Barrier(len(prepared))
    busy = [len(prepared)]
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        torch.set_num_threads(1)
        try:
            run = prepared[number]()
            run()
            start.wait()
            while len(times[number]) < repetitions or busy[0]:
                began = time.perf_counter()
                run()
                times[number].append(time.perf_counter() - began)
                if len(times[number]) == repetitions:
                    with lock:
                        busy[0] -= 1
        except BaseException as error:
            failures.append(error)
            start.abort()
            with lock:
                busy[0] = 0

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(prepared))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [statistics.median(each[:repetitions]) for each in times]
