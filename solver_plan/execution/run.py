"""Run a plan: everything is checked before any process or group is made, then the model is trained step by step."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from solver_plan.errors import InputError, PlanMismatchError, SolverPlanError
from solver_plan.execution.comparison import RankReport, StageComparison, Step, compare, write_trace
from solver_plan.execution.compile import compile_plan
from solver_plan.execution.executor import Executor, MakeOptimizer, adamw
from solver_plan.execution.launch import joined, require_world_size, run_local, torchrun_world_size
from solver_plan.execution.model import Batch, Model, Values, require_same_operators
from solver_plan.execution.program import Program
from solver_plan.execution.torch_pipelining import require_tested_version
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.profiles.loading import load_description

Data = Iterable[Batch | Sequence[torch.Tensor | Values]]
"""Global batches: a `Batch`, or (inputs, targets), each a tensor or several, as a `DataLoader` gives them."""


@dataclass(frozen=True)
class RunReport:
    """What came of a run. Under torchrun rank 0 has the reports of all ranks, the others their own."""

    program: Program
    losses: tuple[float, ...]
    """Of each step."""
    reports: tuple[RankReport, ...]

    @property
    def comparison(self) -> tuple[StageComparison, ...]:
        """Predicted beside measured for each stage; empty where the reports of all ranks are not here."""
        return compare(self.program, self.reports) if len(self.reports) == self.program.world_size else ()


@dataclass(frozen=True)
class Training:
    """How a run trains."""

    steps: int
    data: Data | None = None
    """None: made on the fly by the model."""
    optimizer: MakeOptimizer | None = adamw
    seed: int = 0
    dtype: torch.dtype = torch.float32
    timeout_s: float = 600.0
    """After which a collective gives up."""
    on_step: Callable[[int, Step], None] | None = None
    """Told each step on rank 0."""


def run(
    problem: ParallelismProblem,
    plan: ParallelismPlan,
    training: Training,
    *,
    model: Model | None = None,
    local: int | None = None,
    trace: str | Path | None = None,
) -> RunReport:
    """Train a model as planned, under torchrun or in processes started here.

    Parameters
    ----------
    problem, plan
        The plan must have been made for this problem.
    training
        Steps, data, optimizer.
    model
        The modules; None: of the model that the problem names.
    local
        Number of gloo processes to start here; None: this process is one that torchrun started.
    trace
        File for one trace of all ranks, with planned and executed order.

    Raises
    ------
    InputError
        Another world size, problem, or model; a plan without a problem. Before any process or group is made.
    InvalidPlanError
        If `check` finds violations.
    RunFailedError
        If a process ends early.
    """
    if training.steps < 1:
        raise InputError(f"steps: found {training.steps}; at least 1")
    program, modules = prepare(problem, plan, model=model, local=local)
    if local is not None:
        reports = run_local(
            lambda rank: _train(program, modules, training, torch.device("cpu")),
            local,
            timeout_s=training.timeout_s * training.steps + 60,
            group_timeout_s=training.timeout_s,
        )
    else:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        with joined("nccl" if cuda else "gloo", training.timeout_s):
            reports = _gathered(_train(program, modules, training, None))
    report = RunReport(program, tuple(step.loss for step in reports[0].steps), tuple(reports))
    if trace is not None and len(reports) == program.world_size:
        write_trace(trace, program, reports)
    return report


def prepare(
    problem: ParallelismProblem, plan: ParallelismPlan, *, model: Model | None, local: int | None
) -> tuple[Program, Model]:
    """Check everything that can be checked before a process or group is made; see `run`."""
    require_tested_version()
    if plan.problem_digest is None:
        raise PlanMismatchError(
            "problem_digest: found null, a plan that was written by hand; write its problem's digest, or plan again"
        )
    program = compile_plan(problem, plan)
    found = torchrun_world_size() if local is None else local
    if found is None:
        raise InputError(
            f"run: no processes; start {program.world_size} under torchrun, or --local {program.world_size}"
        )
    require_world_size(program.world_size, found)
    modules = _named_model(problem) if model is None else model
    require_same_operators(program, modules)
    return program, modules


def _named_model(problem: ParallelismProblem) -> Model:
    if problem.model is None:
        raise InputError("model: the problem names none; give one, as models/gpt.py:gpt3_1_3b")
    return load_model(problem.model)


def load_model(source: str) -> Model:
    """Return the modules of a model named as ``models/gpt.py:gpt3_1_3b``. Raises `InputError`."""
    description = load_description(source)
    if description.modules is None:
        raise InputError(f"model: {source!r} describes no torch modules (`modules`); it can be planned, not run")
    try:
        found = description.modules()
    except SolverPlanError:
        raise
    except Exception as error:
        raise InputError(
            f"model: `modules` of {source!r} raised {type(error).__name__}: {error}; correct the model file"
        ) from error
    if not isinstance(found, Model):
        raise InputError(f"model: {source!r} builds a {type(found).__name__}; `modules` returns a Model")
    return found


def _train(program: Program, model: Model, training: Training, device: torch.device | None) -> RankReport:
    executor = Executor(
        program,
        model,
        optimizer=training.optimizer,
        seed=training.seed,
        dtype=training.dtype,
        device=device,
        timeout_s=training.timeout_s,
    )
    for number, batch in zip(range(training.steps), batches(program, model, training), strict=False):
        step = executor.step(batch)
        if training.on_step is not None and executor.rank == 0:
            training.on_step(number, step)
    if len(executor.steps) < training.steps:
        raise InputError(
            f"data: {len(executor.steps)} batches for {training.steps} steps; give data that can be read again"
        )
    return executor.report()


def batches(program: Program, model: Model, training: Training) -> Iterator[Batch]:
    """Yield a global batch for each step, the same on every rank; data is read again from its start when it ends."""
    if training.data is None:
        for number in range(training.steps):
            generator = torch.Generator().manual_seed(training.seed * 1_000_003 + number)
            yield _in_type(model.make_batch(program.global_batch, generator), training.dtype)
        return
    while True:
        count = 0
        for item in training.data:
            count += 1
            yield _in_type(item if isinstance(item, Batch) else Batch(*map(_values, item)), training.dtype)
        if not count:
            return


def _values(part: torch.Tensor | Values) -> Values:
    return (part,) if isinstance(part, torch.Tensor) else tuple(part)


def _in_type(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return a batch whose floating-point tensors have the type that the model computes in."""

    def cast(values: Values) -> Values:
        return tuple(value.to(dtype) if value.is_floating_point() else value for value in values)

    return dataclasses.replace(batch, inputs=cast(batch.inputs), targets=cast(batch.targets))


def _gathered(report: RankReport) -> list[RankReport]:
    gathered: list[RankReport | None] = [None] * dist.get_world_size()
    dist.gather_object(report, gathered if dist.get_rank() == 0 else None)
    return [found for found in gathered if found is not None] or [report]
