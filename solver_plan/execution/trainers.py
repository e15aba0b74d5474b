"""Model, executor and batches of a program of either kind."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from solver_plan.errors import InputError, NotExecutableError
from solver_plan.execution.checkpoint_state import Weights, weights_of
from solver_plan.execution.comparison import Step
from solver_plan.execution.executor import Executor, MakeOptimizer
from solver_plan.execution.model import Batch, Model, Values, require_same_operators
from solver_plan.execution.program import Program
from solver_plan.execution.programs import AnyProgram
from solver_plan.execution.waves.executor import WaveExecutor
from solver_plan.execution.waves.model import MultitaskBatch, MultitaskModel, TaskBatch, require_same_components
from solver_plan.execution.waves.program import WaveProgram
from solver_plan.execution.waves.weights import multitask_weights

AnyModel = Model | MultitaskModel
AnyBatch = Batch | MultitaskBatch
AnyExecutor = Executor | WaveExecutor

Data = Iterable[AnyBatch | Sequence[torch.Tensor | Values]]
"""Global batches. Of a pipeline: a `Batch`, or (inputs, targets), each a tensor or several, as a `DataLoader` gives
them. Of several tasks: the `TaskBatch` of each task that takes part."""


def require_model(program: AnyProgram, model: AnyModel) -> None:
    """Raise `NotExecutableError` if the model cannot run the program, before anything is built."""
    if isinstance(program, WaveProgram) and isinstance(model, MultitaskModel):
        require_same_components(program, model)
    elif isinstance(program, Program) and isinstance(model, Model):
        require_same_operators(program, model)
    else:
        right = MultitaskModel if isinstance(program, WaveProgram) else Model
        raise NotExecutableError(
            f"model: found a {type(model).__name__} for a {program.kind} plan; it runs a {right.__name__}"
        )


def make_executor(
    program: AnyProgram,
    model: AnyModel,
    *,
    optimizer: MakeOptimizer | None,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | None,
    timeout_s: float,
) -> AnyExecutor:
    """Make this rank's executor of a program; see `Executor` and `WaveExecutor`."""
    require_model(program, model)
    if isinstance(program, WaveProgram):
        assert isinstance(model, MultitaskModel)
        return WaveExecutor(
            program, model, optimizer=optimizer, seed=seed, dtype=dtype, device=device, timeout_s=timeout_s
        )
    assert isinstance(model, Model)
    return Executor(program, model, optimizer=optimizer, seed=seed, dtype=dtype, device=device, timeout_s=timeout_s)


def weights_of_model(model: AnyModel, dtype: torch.dtype) -> Weights:
    """Return shape and type of every weight and persistent buffer of a model, by name, without any storage."""
    return multitask_weights(model, dtype) if isinstance(model, MultitaskModel) else weights_of(model, dtype)


def train_step(executor: AnyExecutor, batch: AnyBatch) -> Step:
    """Train on one batch."""
    if isinstance(executor, WaveExecutor) and not isinstance(batch, Batch):
        return executor.step(batch)
    if isinstance(executor, Executor) and isinstance(batch, Batch):
        return executor.step(batch)
    raise InputError(
        f"data: found a {type(batch).__name__} for a {executor.program.kind} plan; "
        "pipelines take a Batch, several tasks a TaskBatch by the name of each"
    )


def make_batch(program: AnyProgram, model: AnyModel, generator: torch.Generator) -> AnyBatch:
    """Return a global batch that the model makes on the fly, of all tasks."""
    if isinstance(program, WaveProgram):
        assert isinstance(model, MultitaskModel)
        return model.make_batch(program.task_samples, generator)
    assert isinstance(model, Model)
    return model.make_batch(program.global_batch, generator)


def as_batch(item: AnyBatch | Sequence[torch.Tensor | Values], dtype: torch.dtype) -> AnyBatch:
    """Return what data gives as a batch whose floating-point tensors have the type that the model computes in."""

    def cast(values: Values) -> Values:
        return tuple(value.to(dtype) if value.is_floating_point() else value for value in values)

    if isinstance(item, Mapping):
        return {
            task: TaskBatch({name: cast(values) for name, values in batch.inputs.items()}, cast(batch.targets))
            for task, batch in item.items()
        }
    batch = item if isinstance(item, Batch) else Batch(*map(_values, item))
    return replace(batch, inputs=cast(batch.inputs), targets=cast(batch.targets))


def _values(part: torch.Tensor | Values) -> Values:
    return (part,) if isinstance(part, torch.Tensor) else tuple(part)
