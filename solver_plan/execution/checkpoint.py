"""Checkpoints of a run: saved under one plan, loaded under any other of the same model.

Weights and optimizer state are written by `torch.distributed.checkpoint`, each rank its part; step and data position
stand in the record. Random states of torch are kept for each rank: they are taken up under the same plan; under
another they cannot be, and every rank is seeded anew by step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from solver_plan.errors import CheckpointError, InputError, OutputError, SolverPlanError
from solver_plan.execution.checkpoint_folder import (
    CheckpointRecord,
    Checkpoints,
    begin,
    finish,
    last_whole,
    prune,
    read_record,
)
from solver_plan.execution.checkpoint_state import (
    State,
    Targets,
    TrainedPart,
    Weights,
    require_same_weights,
    state_to_save,
)

Result = TypeVar("Result")

_METADATA = ".metadata"


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    step: int = 0
    """Steps trained."""
    samples: int = 0
    """Samples of the data that were trained on."""


@dataclass(frozen=True)
class Identity:
    """What a checkpoint says of the run that wrote it, beside the weights."""

    seed: int
    plan_digest: str


def require_same_model(path: Path, record: CheckpointRecord, weights: Weights, seed: int) -> None:
    """Raise `CheckpointError` if a checkpoint is of another model, precision or seed; before any process starts."""
    require_same_weights(_metadata(path), weights, str(path))
    if record.seed != seed:
        raise CheckpointError(
            f"{path}: its run has seed {record.seed}, this one {seed}: data made on the fly would be other; "
            "use its seed, or choose another folder"
        )


def save(part: TrainedPart, checkpoints: Checkpoints, position: Position, identity: Identity) -> None:
    """Write a checkpoint, whole or not at all; all ranks of the world call this together.

    Raises
    ------
    OutputError
        If it cannot be written; on every rank.
    CheckpointError
        If the ranks do not see one folder.
    """
    folder = checkpoints.folder
    path = _on_first_rank(lambda: begin(folder, position.step))
    state = state_to_save(part) | _random_state(part.rank)
    optimizer = _optimizer_class(part)
    try:
        written = save_tensors(state, storage_writer=FileSystemWriter(path))
    except CheckpointException as error:
        raise OutputError(f"{path}: cannot write the checkpoint ({_cause(error)}); choose another place") from None
    files = frozenset({_METADATA} | {info.relative_path for info in (written.storage_data or {}).values()})
    record = CheckpointRecord(
        step=position.step,
        samples=position.samples,
        seed=identity.seed,
        optimizer=optimizer,
        plan_digest=identity.plan_digest,
        world_size=dist.get_world_size(),
    )

    def complete() -> None:
        finish(folder, path, record, files)
        prune(folder, checkpoints.keep)

    _on_first_rank(complete)


def resume(part: TrainedPart, checkpoints: Checkpoints, identity: Identity) -> Position:
    """Take up the last whole checkpoint, and return how far it had come; all ranks of the world call this together.

    Without one, the part is left as it is, at the start.
    """
    found = _on_first_rank(lambda: last_whole(checkpoints.folder))
    return Position() if found is None else load(part, found[0], identity)


def load(part: TrainedPart, path: Path, identity: Identity) -> Position:
    """Take up a checkpoint, whatever plan it was saved under; all ranks of the world call this together.

    Raises
    ------
    CheckpointError
        If it is not whole, or the optimizer is of another class.
    """
    record = read_record(path)
    saved = _metadata(path)
    optimizer = _optimizer_class(part)
    if optimizer is not None and record.optimizer is not None and optimizer != record.optimizer:
        raise CheckpointError(
            f"{path}: its run has the optimizer {record.optimizer}, this one {optimizer}; use its optimizer, "
            "or choose another folder"
        )
    targets = Targets(part, saved)
    passes: list[State] = list(targets.passes)
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(passes))
    for number in range(max(counts)):
        _read(path, passes[number] if number < len(passes) else {})
    targets.hand_over()
    position = Position(record.step, record.samples)
    if record.plan_digest == identity.plan_digest and record.world_size == dist.get_world_size():
        random = _random_state(part.rank)
        _read(path, random)
        _take_up(part.rank, random)
    else:
        part.seed_random(identity.seed, position.step)
    return position


def _read(path: Path, state: State) -> None:
    try:
        load_tensors(state, storage_reader=FileSystemReader(path))
    except CheckpointException as error:
        raise CheckpointError(f"{path}: cannot read the checkpoint ({_cause(error)}); delete it") from None


def _metadata(path: Path) -> Mapping[str, object]:
    try:
        found: Mapping[str, object] = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:
        # a pickle that something else wrote may raise anything
        raise CheckpointError(
            f"{path}: cannot read its {_METADATA} ({type(error).__name__}); delete the checkpoint"
        ) from None
    return found


def _cause(error: CheckpointException) -> str:
    """Return the first rank's complaint on one line."""
    rank, failure = min(error.failures.items())
    cause = failure[0]
    message = str(cause).splitlines()[0] if str(cause) else ""
    return f"rank {rank}: {type(cause).__name__}: {message}"


def _optimizer_class(part: TrainedPart) -> str | None:
    """Return the class of the optimizer that some rank has; ranks without parameters have none."""
    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, None if part.optimizer is None else type(part.optimizer).__name__)
    return next((name for name in names if name is not None), None)


def _random_state(rank: int) -> State:
    state = {f"random/{rank}/cpu": torch.get_rng_state()}
    if dist.get_backend() == "nccl":
        state[f"random/{rank}/cuda"] = torch.cuda.get_rng_state()
    return state


def _take_up(rank: int, state: State) -> None:
    torch.set_rng_state(state[f"random/{rank}/cpu"])
    if f"random/{rank}/cuda" in state:
        torch.cuda.set_rng_state(state[f"random/{rank}/cuda"])


def _on_first_rank(work: Callable[[], Result]) -> Result:
    """Do something on rank 0 and tell all ranks what came of it, or raise on all what it raised."""
    outcome: list[tuple[Result | None, SolverPlanError | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            outcome = [(work(), None)]
        except OSError as error:
            what = error.strerror or type(error).__name__
            outcome = [(None, OutputError(f"{error.filename}: cannot write ({what.lower()}); choose another place"))]
        except InputError as error:
            outcome = [(None, error)]
    dist.broadcast_object_list(outcome)
    result, failure = outcome[0]
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
