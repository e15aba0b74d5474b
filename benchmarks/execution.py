"""`python -m benchmarks.execution`: what running a program costs over a pipeline written by hand with PyTorch.

The same two stages of a GPT, the same micro-batches, the same optimizer, in the same two processes, in turn: one step
of the executor, one step of `PipelineStage` and `Schedule1F1B`. Losses of both must agree. Wall time is that of the
slower rank; CPU time, of both ranks together, is what a busy machine does not disturb.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from models.gpt import describe, gpt
from models.transformer import chain, decoder_layer
from models.transformer_modules import decoder
from solver_plan.documents import digest_of
from solver_plan.execution.compile import compile_plan
from solver_plan.execution.executor import Executor
from solver_plan.execution.launch import run_local
from solver_plan.execution.model import Model, Values, build_layer
from solver_plan.execution.program import Program
from solver_plan.parallelism.plan import Layout, ParallelismPlan, Stage
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.profiles.analytic import profile
from solver_plan.profiles.cluster import read_cluster

STAGES, SAMPLES, MICRO_BATCH = 2, 16, 2


@dataclass(frozen=True)
class Timing:
    """(wall, CPU) seconds of each step of both, and their last losses."""

    executor_s: tuple[tuple[float, float], ...]
    by_hand_s: tuple[tuple[float, float], ...]
    losses: tuple[float, float]


@dataclass(frozen=True)
class Overhead:
    """Middle step of both, in ms."""

    executor_wall_ms: float
    by_hand_wall_ms: float
    executor_cpu_ms: float
    by_hand_cpu_ms: float


class Chain(nn.Module):
    """Operators one after the other."""

    def __init__(self, operators: Sequence[nn.Module]) -> None:
        super().__init__()
        self.operators = nn.ModuleList(operators)

    def forward(self, *values: torch.Tensor) -> Values:
        """Run them."""
        for operator in self.operators:
            values = operator(*values)
        return values


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return plain gradient descent."""
    return torch.optim.SGD(parameters, lr=1e-3)


def case(hidden: int, layers: int) -> tuple[Program, Model]:
    """Return a GPT cut into two stages at a layer."""
    shape = gpt("gpt-bench", layers=layers, hidden=hidden, heads=8, sequence=64, vocabulary=512)
    problem = profile(describe(shape), read_cluster("v100_4x32gb"), SAMPLES)
    cut, end = 1 + 13 * (layers // 2), 3 + 13 * layers
    problem = _on_two_devices(problem)
    plan = ParallelismPlan(
        problem_digest=digest_of(problem),
        micro_batch_size=MICRO_BATCH,
        micro_batches=SAMPLES // MICRO_BATCH,
        stages=tuple(
            Stage(
                operators=bounds,
                devices=(device,),
                layout=(Layout(operators=bounds, tensor_parallel=1, data_parallel=1, partition=0),),
                recompute=(),
            )
            for device, bounds in enumerate(((0, cut), (cut, end)))
        ),
    )
    return compile_plan(problem, plan), decoder(shape, chain(shape, decoder_layer(shape)), dropout=0.0)


def measure(program: Program, model: Model, steps: int, rank: int) -> Timing:
    """Run both in turn on this rank."""
    cpu = torch.device("cpu")
    executor = Executor(program, model, optimizer=sgd, device=cpu)
    operators = [build_layer(model, index, 0, torch.float32, cpu) for index in range(*program.stages[rank].operators)]
    module = Chain(operators)
    optimizer = sgd(list(module.parameters()))

    def loss(outputs: Values | torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        whole = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        return model.loss(whole, (targets,)) / SAMPLES

    schedule = Schedule1F1B(
        PipelineStage(module, rank, STAGES, cpu), program.micro_batches, loss_fn=loss, scale_grads=False
    )
    batch = model.make_batch(SAMPLES, torch.Generator().manual_seed(0))
    losses: list[torch.Tensor] = []
    last: list[float] = [0.0, 0.0]

    def ours() -> None:
        last[0] = executor.step(batch).loss

    def by_hand() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(*batch.inputs)
        else:
            schedule.step(target=batch.targets[0], losses=losses)
        optimizer.step()
        # the executor tells every rank the loss: so does this
        total = torch.stack(losses).detach().sum() if losses else torch.zeros(())
        dist.all_reduce(total)
        last[1] = float(total)

    times: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for number in range(steps + 2):
        for kept, step in zip(times, (ours, by_hand), strict=True):
            seconds = _timed(step)
            if number >= 2:
                kept.append(seconds)
    return Timing(tuple(times[0]), tuple(times[1]), (last[0], last[1]))


def _timed(step: Callable[[], None]) -> tuple[float, float]:
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - began, time.process_time() - busy


def _on_two_devices(problem: ParallelismProblem) -> ParallelismProblem:
    return replace(problem, space=replace(problem.space, use_all_devices=False))


def overhead(steps: int, hidden: int, layers: int) -> Overhead:
    """Measure both at one size."""
    program, model = case(hidden, layers)
    ranks = run_local(lambda rank: measure(program, model, steps, rank), STAGES, timeout_s=600)
    for timing in ranks:
        if abs(timing.losses[0] - timing.losses[1]) > 1e-4 * abs(timing.losses[0]):
            raise AssertionError(f"the two train differently: losses {timing.losses}")
    found: list[float] = []
    for each in ([timing.executor_s for timing in ranks], [timing.by_hand_s for timing in ranks]):
        together = list(zip(*each, strict=True))
        found.append(statistics.median(max(wall for wall, _ in step) for step in together) * 1e3)
        found.append(statistics.median(sum(busy for _, busy in step) for step in together) * 1e3)
    return Overhead(found[0], found[2], found[1], found[3])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the overhead at some sizes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.execution", description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="one small size, few steps")
    options = parser.parse_args(arguments)
    sizes = [(64, 2)] if options.smoke else [(64, 2), (256, 2), (512, 2)]
    steps = 3 if options.smoke else options.steps
    print("                   executor            by hand            overhead")
    print("hidden  layers     wall      CPU       wall      CPU      wall    CPU")
    for hidden, layers in sizes:
        found = overhead(steps, hidden, layers)
        wall, cpu = found.executor_wall_ms / found.by_hand_wall_ms, found.executor_cpu_ms / found.by_hand_cpu_ms
        ours = f"{found.executor_wall_ms:7.1f}  {found.executor_cpu_ms:7.1f}"
        theirs = f"{found.by_hand_wall_ms:7.1f}  {found.by_hand_cpu_ms:7.1f}"
        print(
            f"{hidden:6d}  {layers:6d}  {ours}    {theirs}   {100 * (wall - 1):6.1f}% {100 * (cpu - 1):5.1f}%",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
