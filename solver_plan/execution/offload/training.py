"""Trains a model as an offload plan says, on one device, and compares the period with the plan's."""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from solver_plan.errors import InputError, NotExecutableError, RunFailedError, SolverPlanError
from solver_plan.execution.model import (
    Batch,
    Model,
    Values,
    as_tuple,
    boundary_shapes,
    build_layer,
    require_one_number,
)
from solver_plan.execution.offload.engine import default_workers
from solver_plan.execution.offload.optimizer import OffloadOptimizer
from solver_plan.execution.offload.rooms import planned_rooms
from solver_plan.execution.offload.steps import OffloadReport
from solver_plan.execution.stage import tie
from solver_plan.offload.plan import OffloadPlan
from solver_plan.offload.problem import OffloadProblem
from solver_plan.profiles.description import ModelDescription
from solver_plan.profiles.offload import layers_of


@dataclass(frozen=True, kw_only=True)
class OffloadTraining:
    """How a run trains."""

    steps: int
    micro_batch: int
    """Samples of a micro-step; the problem says how many make a step."""
    max_norm: float | None = None
    lr: float = 1e-4
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    """None: the current CUDA device, or the CPU in its place."""
    workers: int | None = None
    on_step: Callable[[int, float, float], None] | None = None
    """Told number, loss and seconds of each step."""


@dataclass(frozen=True, kw_only=True)
class OffloadRun:
    """What came of a run."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    """From the end of one `step` to the end of the next."""
    report: OffloadReport
    planned_ms: float
    planned_host_bytes: int

    @property
    def measured_ms(self) -> float:
        """The period: the middle one of the steps behind the first."""
        return statistics.median(self.seconds[1:] or self.seconds) * 1e3

    def table(self) -> str:
        """Return predicted beside measured, and what happened, as text for a terminal."""
        report = self.report
        waited_ms = report.exposed_s * 1e3 / report.steps
        return "\n".join(
            [
                "                     predicted      measured",
                f"period (ms)       {self.planned_ms:12.3f}  {self.measured_ms:12.3f}",
                f"host memory (MB)  {self.planned_host_bytes / 2**20:12.2f}  {report.host_bytes / 2**20:12.2f}",
                f"{report.steps} steps: {report.clipped} clipped, {report.skipped} skipped, {report.undone} undone, "
                f"{report.waited} waited for the norm; {waited_ms:.3f} ms a step waited for weights",
            ]
        )


class OperatorChain(nn.Module):
    """The operators of a model one after the other, and its layers as a plan names them."""

    def __init__(self, description: ModelDescription, model: Model, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        cpu = torch.device("cpu")
        operators = [build_layer(model, index, seed, dtype, cpu) for index in range(len(model.layers))]
        tie(model, (0, len(operators)), operators)
        self.operators = nn.ModuleList(operators)
        grouped = layers_of(description)
        names = [operator.name for _, run in grouped for operator in run]
        if names != [layer.name for layer in model.layers]:
            raise NotExecutableError(
                f"model: describes {len(names)} operators, its modules are {len(model.layers)} with other names; "
                "give one module for each operator, named like it"
            )
        ends = list(itertools.accumulate((len(run) for _, run in grouped), initial=0))
        self._layers = {
            name: operators[first:end]
            for (name, _), (first, end) in zip(grouped, itertools.pairwise(ends), strict=True)
        }

    def layers(self) -> dict[str, list[nn.Module]]:
        """Return the modules of each layer, in forward order."""
        return dict(self._layers)

    def forward(self, *values: torch.Tensor) -> Values:
        """Run the operators."""
        for operator in self.operators:
            values = as_tuple(operator(*values))
        return values


def train_offloaded(
    problem: OffloadProblem, plan: OffloadPlan, description: ModelDescription, model: Model, training: OffloadTraining
) -> OffloadRun:
    """Train a model on data made on the fly.

    Parameters
    ----------
    problem, plan
        The plan must have been made for this problem.
    description, model
        What is trained: names of its layers, and its modules.
    training
        Steps, sizes and options.

    Raises
    ------
    InputError
        If the plan is for another problem or model, or a number makes no sense.
    RunFailedError
        If an update, or the model's own code, fails.
    """
    for name, value in (("steps", training.steps), ("micro-batch", training.micro_batch)):
        if value < 1:
            raise InputError(f"{name}: found {value}; at least 1")
    device = training.device
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers = default_workers() if training.workers is None else training.workers
    if device.type == "cpu":  # in the place of a device, beside the threads that update
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - workers))
    boundary_shapes(model, training.dtype)
    chain = OperatorChain(description, model, training.seed, training.dtype).to(device)
    optimizer = OffloadOptimizer(
        chain.parameters(),
        problem=problem,
        plan=plan,
        layers=chain.layers(),
        lr=training.lr,
        max_norm=training.max_norm,
        workers=workers,
    )
    losses: list[float] = []
    seconds: list[float] = []
    samples = training.micro_batch * problem.accumulation_steps
    began = time.perf_counter()
    for number in range(training.steps):
        generator = torch.Generator().manual_seed(training.seed * 1_000_003 + number)
        total = torch.zeros((), device=device)
        with _failing_in(number + 1):
            for _ in range(problem.accumulation_steps):
                batch = _on(model.make_batch(training.micro_batch, generator), device, training.dtype)
                loss = require_one_number(model.loss(chain(*batch.inputs), batch.targets)) / samples
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        optimizer.step()
        losses.append(float(total))
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
        if training.on_step is not None:
            training.on_step(number, losses[-1], seconds[-1])
    optimizer.synchronize()
    report = optimizer.report()
    optimizer.close()
    return OffloadRun(
        losses=tuple(losses),
        seconds=tuple(seconds),
        report=report,
        planned_ms=plan.predicted.period_ms,
        planned_host_bytes=planned_host_bytes(problem, plan),
    )


@contextmanager
def _failing_in(step: int) -> Iterator[None]:
    """Let what a user's module raises name the step."""
    try:
        yield
    except SolverPlanError:
        raise
    except Exception as error:
        raise RunFailedError(f"step {step}: {type(error).__name__}: {error}; --verbose shows where") from error


def planned_host_bytes(problem: OffloadProblem, plan: OffloadPlan, *, speculate: bool = True) -> int:
    """Return the host memory that a plan takes, by its own bytes for each parameter; see `planned_rooms`."""
    each = problem.bytes_per_parameter
    return planned_rooms(problem, plan, speculate=speculate).bytes(
        gradient=each.gradient, weight=each.weight, state=each.optimizer_state
    )


def _on(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    def moved(values: Values) -> Values:
        return tuple(value.to(device, dtype if value.is_floating_point() else None) for value in values)

    return Batch(moved(batch.inputs), moved(batch.targets))
