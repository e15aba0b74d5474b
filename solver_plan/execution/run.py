"""Run a plan: everything is checked before any process or group is made, then the model is trained step by step."""

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from solver_plan.errors import InputError, PlanMismatchError, RunFailedError, SolverPlanError
from solver_plan.execution import checkpoint
from solver_plan.execution.activity import ACTIVITY
from solver_plan.execution.checkpoint_folder import (
    Checkpoints,
    FolderLock,
    last_whole,
    prepare_folder,
    remove_unfinished,
)
from solver_plan.execution.comparison import RankReport, StageComparison, Step, compare, comparison_table, write_trace
from solver_plan.execution.executor import MakeOptimizer, adamw
from solver_plan.execution.launch import joined, require_world_size, run_local, told_once, torchrun_world_size
from solver_plan.execution.model import Values
from solver_plan.execution.programs import AnyProgram, RunnablePlan, RunnableProblem, compile_plan
from solver_plan.execution.torch_pipelining import require_tested_version
from solver_plan.execution.trainers import (
    AnyBatch,
    AnyModel,
    Data,
    as_batch,
    make_batch,
    make_executor,
    require_model,
    train_step,
    weights_of_model,
)
from solver_plan.execution.waves.comparison import SliceComparison, compare_slices, slice_table, write_wave_trace
from solver_plan.execution.waves.program import WaveProgram
from solver_plan.profiles.loading import load_any_description

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunReport:
    """What came of a run. Under torchrun rank 0 has the reports of all ranks, the others their own."""

    program: AnyProgram
    losses: tuple[float, ...]
    """Of each step that was trained here."""
    reports: tuple[RankReport, ...]
    first_step: int = 0
    """Steps that a checkpoint brought."""

    @property
    def is_complete(self) -> bool:
        """Whether the reports of all ranks are here, and they trained."""
        return len(self.reports) == self.program.world_size and bool(self.losses)

    @property
    def comparison(self) -> tuple[StageComparison, ...] | tuple[SliceComparison, ...]:
        """Predicted beside measured for each stage or slice; empty unless the run `is_complete`."""
        if not self.is_complete:
            return ()
        if isinstance(self.program, WaveProgram):
            return compare_slices(self.program, self.reports)
        return compare(self.program, self.reports)

    @property
    def table(self) -> str:
        """The comparison as a table for a terminal; empty unless the run `is_complete`."""
        if not self.is_complete:
            return ""
        if isinstance(self.program, WaveProgram):
            return slice_table(self.program, self.reports)
        return comparison_table(compare(self.program, self.reports))


@dataclass(frozen=True)
class Training:
    """How a run trains."""

    steps: int
    """In all: those that a checkpoint brings count."""
    data: Data | None = None
    """The same batches each time that it is read, whatever the random state; None: made on the fly by the model."""
    optimizer: MakeOptimizer | None = adamw
    seed: int = 0
    dtype: torch.dtype = torch.float32
    timeout_s: float = 600.0
    """After which a collective gives up, and a rank that does nothing new is taken for stalled."""
    on_step: Callable[[int, Step], None] | None = None
    """Told each step on rank 0, with its number from 0."""
    checkpoints: Checkpoints | None = None
    """Where the run is saved, and taken up from the last whole checkpoint if there is one; None: nowhere."""


def run(
    problem: RunnableProblem,
    plan: RunnablePlan,
    training: Training,
    *,
    model: AnyModel | None = None,
    local: int | None = None,
    restarts: int = 0,
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
    restarts
        How often processes started here are started anew, from the last checkpoint, when one fails; torchrun has an
        option of its own.
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
    if local is None and restarts:
        raise InputError("restarts: torchrun started the processes; give it its own --max-restarts")
    with told_once() if local is None else nullcontext():
        program, modules = prepare(problem, plan, model=model, local=local)
        if training.checkpoints is not None:
            _require_usable(training.checkpoints, modules, training)
    if local is not None:
        reports = _run_here(program, modules, training, local, restarts)
    else:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))

        folder = _Folder(training.checkpoints if os.environ["RANK"] == "0" else None)
        try:
            with joined("nccl" if cuda else "gloo", training.timeout_s, when_told_to_end=folder.leave):
                folder.enter()
                reports = _gathered(_train(program, modules, training, None))
        finally:
            folder.leave()
    losses = tuple(step.loss for step in reports[0].steps)
    report = RunReport(program, losses, tuple(reports), training.steps - len(losses))
    if trace is not None and report.is_complete:
        if isinstance(program, WaveProgram):
            write_wave_trace(trace, program, reports)
        else:
            write_trace(trace, program, reports)
    return report


def _run_here(
    program: AnyProgram, model: AnyModel, training: Training, processes: int, restarts: int
) -> list[RankReport]:
    folder = _Folder(training.checkpoints)
    try:
        for attempt in itertools.count(1):
            folder.enter()
            try:
                return run_local(
                    lambda rank: _train(program, model, training, torch.device("cpu")),
                    processes,
                    timeout_s=training.timeout_s * training.steps + 60,
                    group_timeout_s=training.timeout_s,
                )
            except RunFailedError as error:
                if attempt > restarts:
                    raise
                _logger.warning("%s; restart %d of %d", error, attempt, restarts)
    finally:
        # all processes have ended
        folder.leave()
    raise AssertionError("an attempt ends or raises")


class _Folder:
    """The folder of checkpoints of a run, in the process that keeps other runs out of it; None: it has none to keep."""

    def __init__(self, checkpoints: Checkpoints | None) -> None:
        self._folder = None if checkpoints is None else checkpoints.folder
        self._lock = None if checkpoints is None else FolderLock(checkpoints.folder)

    def enter(self) -> None:
        """Keep others out, and delete what was left of a checkpoint that was not finished."""
        if self._folder is not None and self._lock is not None:
            self._lock.take()
            remove_unfinished(self._folder)

    def leave(self) -> None:
        """Delete what is not finished, if others were kept out, and let them in."""
        if self._folder is not None and self._lock is not None and self._lock.is_held:
            remove_unfinished(self._folder)
            self._lock.release()


def prepare(
    problem: RunnableProblem, plan: RunnablePlan, *, model: AnyModel | None, local: int | None
) -> tuple[AnyProgram, AnyModel]:
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
    require_model(program, modules)
    return program, modules


def _require_usable(checkpoints: Checkpoints, model: AnyModel, training: Training) -> None:
    """Refuse a folder that cannot be written, and a checkpoint of another model, before any process starts."""
    prepare_folder(checkpoints.folder)
    found = last_whole(checkpoints.folder)
    if found is not None:
        path, record = found
        checkpoint.require_same_model(path, record, weights_of_model(model, training.dtype), training.seed)
        if record.step > training.steps:
            raise InputError(
                f"steps: found {training.steps}, {path} has {record.step} already; train more, or choose another folder"
            )


def _named_model(problem: RunnableProblem) -> AnyModel:
    if problem.model is None:
        raise InputError("model: the problem names none; give one, as --model models/gpt.py:tiny")
    return load_model(problem.model)


def load_model(source: str) -> AnyModel:
    """Return the modules of a model named as ``models/gpt.py:gpt3_1_3b``. Raises `InputError`."""
    description = load_any_description(source)
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
    if not isinstance(found, AnyModel):
        raise InputError(
            f"model: {source!r} builds a {type(found).__name__}; `modules` returns a Model or a MultitaskModel"
        )
    return found


def _train(program: AnyProgram, model: AnyModel, training: Training, device: torch.device | None) -> RankReport:
    ACTIVITY.begins("building the model")
    executor = make_executor(
        program,
        model,
        optimizer=training.optimizer,
        seed=training.seed,
        dtype=training.dtype,
        device=device,
        timeout_s=training.timeout_s,
    )
    checkpoints = training.checkpoints
    identity = checkpoint.Identity(training.seed, program.plan_digest)
    start = checkpoint.Position()
    if checkpoints is not None:
        ACTIVITY.begins("reading a checkpoint")
        start = checkpoint.resume(executor, checkpoints, identity)
    numbers = range(start.step, training.steps)
    stream = batches(program, model, training, whole_batches(start, program))
    was_finite = True
    for number in numbers:
        ACTIVITY.begins("reading data", step=number + 1)
        batch = next(stream, None)
        if batch is None:
            found = number - start.step
            raise InputError(f"data: {found} batches for {len(numbers)} steps; give data that can be read again")
        step = train_step(executor, batch)
        if training.on_step is not None and executor.rank == 0:
            training.on_step(number, step)
        is_finite = math.isfinite(step.loss)
        if was_finite and not is_finite and executor.rank == 0:
            _logger.warning("step %d: the loss is %s; nothing is saved until it is finite again", number + 1, step.loss)
        was_finite = is_finite
        done = number + 1
        if checkpoints is not None and is_finite and (done % checkpoints.every == 0 or done == training.steps):
            ACTIVITY.begins("saving a checkpoint")
            samples = start.samples + (done - start.step) * program.global_batch
            checkpoint.save(executor, checkpoints, checkpoint.Position(done, samples), identity)
    ACTIVITY.begins("ending")
    return executor.report()


def whole_batches(position: checkpoint.Position, program: AnyProgram) -> int:
    """Return how many global batches a position in the data is."""
    count, rest = divmod(position.samples, program.global_batch)
    if rest:
        raise InputError(
            f"data: the checkpoint has trained on {position.samples} samples, no multiple of the plan's global batch "
            f"{program.global_batch}; use a global batch that divides it"
        )
    return count


def batches(program: AnyProgram, model: AnyModel, training: Training, skipped: int = 0) -> Iterator[AnyBatch]:
    """Yield a global batch for each step, the same on every rank; data is read again from its start when it ends.

    The first batches are skipped: an earlier run has trained on them.
    """
    data = training.data
    if data is None:
        for number in itertools.count(skipped):
            generator = torch.Generator().manual_seed(training.seed * 1_000_003 + number)
            yield as_batch(make_batch(program, model, generator), training.dtype)
        return
    stream = _read_again(data)
    if isinstance(data, Sized) and len(data):
        skipped %= len(data)
    # a loader draws a random number when it is opened: what follows must find the state of the checkpoint
    with torch.random.fork_rng(devices=[]):
        for _ in itertools.islice(stream, skipped):
            pass
    for item in stream:
        yield as_batch(item, training.dtype)


def _read_again(data: Data) -> Iterator[AnyBatch | Sequence[torch.Tensor | Values]]:
    while True:
        count = 0
        for item in data:
            count += 1
            yield item
        if not count:
            return


def _gathered(report: RankReport) -> list[RankReport]:
    gathered: list[RankReport | None] = [None] * dist.get_world_size()
    dist.gather_object(report, gathered if dist.get_rank() == 0 else None)
    return [found for found in gathered if found is not None] or [report]
