"""`python -m benchmarks.offload_execution`: how much of the optimizer's time a plan hides, and what was planned.

Each case is measured on the machine at hand, planned, checked against `torch.optim.AdamW` on the same gradients, and
then trained in four ways: without an optimizer, with all updates after the backward (serial), with each layer's update
inside its gradient hook (inline), and as planned. All three use the same kernel and the same threads.

    hidden share = (serial - planned way) / (serial - without an optimizer)

Cases, of equal layers and of an embedding eight times as large as a layer:

* `emulated`: a device that computes without the CPU, by sleeping; its memory is the host's. What a GPU would leave to
  the CPU is left to it here.
* `model`: embedding, MLP blocks and a tied head on `--device`. With `cuda` this is the check to run where a GPU is at
  hand. On the CPU the training loop has one thread, and the updates the others.
"""

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

import solver_plan
from solver_plan.execution.offload.adamw import Hyperparameters
from solver_plan.execution.offload.host_updates import update_in_blocks
from solver_plan.execution.offload.layers import LANES
from solver_plan.execution.offload.optimizer import OffloadOptimizer
from solver_plan.execution.offload.steps import OffloadReport
from solver_plan.execution.offload.training import planned_host_bytes
from solver_plan.offload.plan import OffloadPlan
from solver_plan.offload.problem import OffloadProblem
from solver_plan.profiles.measured import UPDATED_PARAMETERS, HostRates, measure_host, measure_offload

LR, MAX_NORM = 1e-4, 1e6
"""Clipping is on, and does not happen: the norm is computed, and updates speculate on it."""
VALUES = Hyperparameters(lr=LR, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, maximize=False)


@dataclass(frozen=True)
class Case:
    """A model with its layers, and one forward and backward of it."""

    name: str
    model: nn.Module
    layers: dict[str, nn.Module]
    micro_step: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was measured of a case; milliseconds an iteration, the middle one of some."""

    case: str
    parameters: int
    difference: float
    """From `torch.optim.AdamW` on the same gradients, the largest of all tensors, relative to the tensor's norm."""
    compute_ms: float
    serial_ms: float
    inline_ms: float
    offload_ms: float
    planned_ms: float
    planned_host_bytes: int
    report: OffloadReport

    @property
    def hidden(self) -> float:
        """Share of the optimizer's time that is hidden; inline stepping may hide some too, as gradients stay cached."""
        return (self.serial_ms - self.offload_ms) / (self.serial_ms - self.compute_ms)

    def row(self) -> str:
        """Return a line of the table."""
        host = self.report.host_bytes / self.planned_host_bytes - 1
        return (
            f"{self.case:20s} {self.parameters / 1e6:7.1f} {self.compute_ms:9.1f} {self.serial_ms:9.1f} "
            f"{self.inline_ms:9.1f} {self.offload_ms:9.1f} {self.planned_ms:9.1f} {self.hidden:8.1%} "
            f"{self.offload_ms / self.planned_ms - 1:+8.1%} {host:+7.2%} {self.difference:9.1e}"
        )


HEADER = (
    "case                 params   compute    serial    inline   offload   planned   hidden  measured    host"
    "     from\n                        (M)      (ms)      (ms)      (ms)      (ms)      (ms)    share  -planned"
    "  memory    AdamW"
)


class EmulatedLayer(nn.Module):
    """A layer of a device that needs no CPU to compute: it sleeps, and its gradient is there when it wakes."""

    def __init__(self, parameters: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(parameters) * 0.02)
        self.gradient = torch.randn(parameters) * 1e-3
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Sleep, and pass the stream on."""
        passed: torch.Tensor = _Emulated.apply(stream, self.weight, self)  # type: ignore[no-untyped-call]
        return passed


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, stream: torch.Tensor, weight: torch.Tensor, layer: EmulatedLayer
    ) -> torch.Tensor:
        del weight
        ctx.layer = layer  # type: ignore[attr-defined]
        time.sleep(layer.forward_s)
        return stream.clone()

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        layer: EmulatedLayer = ctx.layer  # type: ignore[attr-defined]
        time.sleep(layer.backward_s)
        return gradients[0], layer.gradient, None


class Mlp(nn.Module):
    """A block of a model: normalisation and two products, with a residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Run it."""
        out: torch.Tensor = stream + self.down(nn.functional.gelu(self.up(self.norm(stream))))
        return out


def emulated(name: str, sizes: Sequence[int], host: HostRates, *, ratio: float = 1.0) -> Case:
    """Return layers whose backward takes `ratio` times as long as their updates, their forward half as long."""
    update_s = sum(sizes) / host.cpu_update_parameters_per_s / len(sizes)
    blocks = [EmulatedLayer(size, ratio * update_s / 2, ratio * update_s) for size in sizes]
    model = nn.Sequential(*blocks)
    start = torch.zeros(1, requires_grad=True)

    def micro_step() -> None:
        model(start).sum().backward()

    return Case(name, model, {f"layer{index}": block for index, block in enumerate(blocks)}, micro_step)


def computed(name: str, hidden: int, layers: int, tokens: int, vocabulary: int, device: torch.device) -> Case:
    """Return an embedding, blocks and a head tied to the embedding, on a device; 16 bit on CUDA."""
    torch.manual_seed(0)
    embed, blocks = nn.Embedding(vocabulary, hidden), [Mlp(hidden) for _ in range(layers)]
    head = nn.Linear(hidden, vocabulary, bias=False)
    nn.init.normal_(embed.weight, std=0.02)
    head.weight = embed.weight
    model = nn.Sequential(embed, *blocks, head).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    inputs = torch.randint(vocabulary, (tokens,), device=device)

    def micro_step() -> None:
        nn.functional.cross_entropy(model(inputs).float(), inputs.roll(-1)).backward()  # type: ignore[no-untyped-call]

    parts = {"embed": embed, **{f"block{index}": block for index, block in enumerate(blocks)}, "head": head}
    return Case(name, model, parts, micro_step)


class HostAdamW:
    """AdamW on the CPU without overlap: a layer's gradients are copied, its state updated, its weights copied back."""

    def __init__(self, case: Case, workers: int) -> None:
        self.state = {
            parameter: torch.stack([parameter.detach().float().flatten().cpu()] + [torch.zeros(parameter.numel())] * 2)
            for parameter in case.model.parameters()
        }
        width = max(parameter.numel() for parameter in self.state)
        kind = next(case.model.parameters())
        pin = kind.device.type == "cuda"
        self.gradients = torch.empty(width, dtype=kind.dtype, pin_memory=pin)
        self.weights = torch.empty(width, dtype=kind.dtype, pin_memory=pin)
        self.workers = workers
        self.pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        self.steps = 0

    @torch.no_grad()
    def update(self, parameter: torch.Tensor) -> None:
        """Update one parameter with its gradient, and drop that."""
        assert parameter.grad is not None
        assert isinstance(parameter, nn.Parameter)
        count = parameter.numel()
        self.gradients[:count].copy_(parameter.grad.flatten())
        share = -(-count // self.workers // LANES) * LANES
        parts = [(first, min(first + share, count)) for first in range(0, count, share)]
        list(self.pool.map(lambda part: self._part(parameter, *part), parts))
        parameter.data.view(-1).copy_(self.weights[:count])
        parameter.grad = None

    def _part(self, parameter: nn.Parameter, first: int, end: int) -> None:
        update_in_blocks(
            self.state[parameter][:, first:end],
            self.gradients[first:end],
            self.weights[first:end],
            None,
            float(self.steps + 1),
            VALUES,
            (),
        )


def serial_ms(case: Case, workers: int, steps: int) -> float:
    """Return the period where all updates follow the backward."""
    optimizer = HostAdamW(case, workers)

    def step() -> None:
        case.micro_step()
        for parameter in reversed(optimizer.state):
            optimizer.update(parameter)
        optimizer.steps += 1

    return _period_ms(step, steps)


def inline_ms(case: Case, workers: int, steps: int) -> float:
    """Return the period where each update runs in the gradient's hook, and the backward waits for it."""
    optimizer = HostAdamW(case, workers)
    handles = [
        parameter.register_post_accumulate_grad_hook(optimizer.update)  # type: ignore[no-untyped-call]
        for parameter in optimizer.state
    ]

    def step() -> None:
        case.micro_step()
        optimizer.steps += 1

    try:
        return _period_ms(step, steps)
    finally:
        for handle in handles:
            handle.remove()


def compute_ms(case: Case, steps: int) -> float:
    """Return the period without an optimizer."""

    def step() -> None:
        case.micro_step()
        for parameter in case.model.parameters():
            parameter.grad = None
        if next(case.model.parameters()).device.type == "cuda":
            torch.cuda.synchronize()

    return _period_ms(step, steps)


@contextmanager
def planned_way(
    case: Case, problem: OffloadProblem, plan: OffloadPlan, workers: int, undo: bool
) -> Iterator[OffloadOptimizer]:
    """Give the optimizer that carries the plan out."""
    optimizer = OffloadOptimizer(
        case.model.parameters(),
        problem=problem,
        plan=plan,
        layers=case.layers,
        lr=LR,
        max_norm=MAX_NORM if undo else None,
        skip_nonfinite=undo,
        workers=workers,
    )
    try:
        yield optimizer
    finally:
        optimizer.close()


def difference(case: Case, problem: OffloadProblem, plan: OffloadPlan, workers: int, steps: int, undo: bool) -> float:
    """Train some steps and return the largest relative difference from `torch.optim.AdamW` on the same gradients."""
    before = copy.deepcopy(case.model.state_dict())
    parameters = list(case.model.parameters())
    masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in parameters]
    reference = torch.optim.AdamW(masters, lr=LR, fused=True)

    def keep(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            master.grad = parameter.grad.float().clone()

        return note

    handles = [
        parameter.register_post_accumulate_grad_hook(keep(master))  # type: ignore[no-untyped-call]
        for parameter, master in zip(parameters, masters, strict=True)
    ]
    with planned_way(case, problem, plan, workers, undo) as optimizer:
        for _ in range(steps):
            case.micro_step()
            nn.utils.clip_grad_norm_(masters, MAX_NORM)
            reference.step()
            optimizer.step()
        optimizer.synchronize()
        worst = 0.0
        for parameter, master in zip(parameters, masters, strict=True):
            rounded = master.detach().to(parameter.dtype).float()
            worst = max(worst, float((parameter.detach().float() - rounded).norm() / rounded.norm()))
    for handle in handles:
        handle.remove()
    case.model.load_state_dict(before)
    return worst


def offload_ms(case: Case, optimizer: OffloadOptimizer, steps: int) -> float:
    """Return the period as planned."""

    def step() -> None:
        case.micro_step()
        optimizer.step()

    return _period_ms(step, steps)


def _period_ms(step: Callable[[], None], steps: int) -> float:
    times = []
    for number in range(steps + 2):
        began = time.perf_counter()
        step()
        if number >= 2:
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def measured(case: Case, host: HostRates, steps: int, rounds: int, room: float, undo: bool) -> Found:
    """Measure, plan and train a case; rounds of all ways in turn, of which the fastest of each counts.

    Other work on the machine only ever adds time; so the least of a few medians is nearest to an idle machine.
    """
    parameters = sum(parameter.numel() for parameter in case.model.parameters())
    problem = measure_offload(
        case.layers, case.micro_step, gpu_state_bytes=round(12 * room * parameters), host=host, repetitions=steps
    )
    plan = solver_plan.plan(problem, time_limit_s=5.0)
    assert isinstance(plan, OffloadPlan)
    found = difference(case, problem, plan, host.workers, 3, undo)
    periods: list[tuple[float, float, float, float]] = []
    for _ in range(rounds):
        compute, serial = compute_ms(case, steps), serial_ms(case, host.workers, steps)
        inline = inline_ms(case, host.workers, steps)
        with planned_way(case, problem, plan, host.workers, undo) as optimizer:
            periods.append((compute, serial, inline, offload_ms(case, optimizer, steps)))
            report = optimizer.report()
    return Found(
        case=case.name,
        parameters=parameters,
        difference=found,
        compute_ms=min(each[0] for each in periods),
        serial_ms=min(each[1] for each in periods),
        inline_ms=min(each[2] for each in periods),
        offload_ms=min(each[3] for each in periods),
        planned_ms=plan.predicted.period_ms,
        planned_host_bytes=planned_host_bytes(problem, plan, speculate=undo),
        report=report,
    )


def cases(device: torch.device, host: HostRates, *, smoke: bool) -> Iterator[Case]:
    """Make the cases one after the other."""
    size, count = (20_000, 3) if smoke else (4_000_000, 8)
    if device.type == "cpu":
        yield emulated("emulated-equal", [size] * count, host)
        yield emulated("emulated-unequal", [8 * size, *[size] * (count - 2), 2 * size], host)
    if smoke:
        yield computed("model-smoke", 32, 2, 16, 64, device)
    elif device.type == "cuda":
        yield computed("model-1.3B", 4096, 8, 8192, 50304, device)
    else:
        # as many tokens as make the backward of a thread about as long as the updates
        yield computed("model", 1024, 4, 64, 4096, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a result differs from AdamW's by more than rounding."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload_execution", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--workers", type=int, help="threads that update (default: all cores but one)")
    parser.add_argument("--steps", type=int, default=7, help="of each way in a round (default 7)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--room", type=float, default=0.0, help="share of the state that fits the device (default 0)")
    parser.add_argument(
        "--undo",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="speculate on the norm (default); no: no clipping, nothing is kept for undoing",
    )
    parser.add_argument("--case", metavar="NAME", help="only this one")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, few steps")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    steps, rounds = (2, 1) if options.smoke else (options.steps, options.rounds)
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = 1 << 14 if options.smoke else UPDATED_PARAMETERS
        host = measure_host(
            device,
            workers=options.workers,
            dtype=dtype,
            speculate=options.undo,
            parameters=size,
            copied_bytes=16 * size,
        )
        print(host.table(), flush=True)
        print(f"load average {_load()}\n{HEADER}", flush=True)
        worst = 0.0
        for case in cases(device, host, smoke=options.smoke):
            if options.case not in (None, case.name):
                continue
            found = measured(case, host, steps, rounds, options.room, options.undo)
            worst = max(worst, found.difference)
            print(found.row(), flush=True)
        print(f"load average {_load()}, {time.process_time():.0f} CPU seconds")
    finally:
        torch.set_num_threads(before)
    return 1 if worst > (1e-6 if device.type == "cuda" else 0.0) else 0


def _load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


if __name__ == "__main__":
    sys.exit(main())
