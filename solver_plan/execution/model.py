"""What execution needs of a model: one torch module for each operator, a loss, and data.

An operator's module is called with the tensors that the operator before it returned and returns a tuple of tensors; the
first dim of every tensor counts samples. Modules are written for one device; how an operator is split over tensor
ranks is said by PyTorch's parallel styles, in `TensorParallel`.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from solver_plan.errors import InputError, NotExecutableError
from solver_plan.execution.program import Program

Values = tuple[torch.Tensor, ...]
"""What passes from operator to operator."""


@dataclass(frozen=True)
class Batch:
    """Samples of one step, the same on every rank."""

    inputs: Values
    targets: Values


@dataclass(frozen=True)
class TensorParallel:
    """How an operator runs on several tensor ranks."""

    styles: Mapping[str, ParallelStyle] = field(default_factory=dict)
    """Style of each submodule by name; what has none is replicated."""
    inputs: tuple[int | None, ...] = ()
    """Dim over which each input is split among the tensor ranks; None, or not named: whole on each."""
    outputs: tuple[int | None, ...] = ()
    """The same for each output."""


def whole(tensor_parallel: int, partition: int) -> TensorParallel:
    """Return the choice of an operator that every tensor rank computes whole."""
    return TensorParallel()


@dataclass(frozen=True)
class Layer:
    """One operator."""

    name: str
    build: Callable[[], nn.Module]
    """Makes the module for one device, with the default dtype and device; random numbers are seeded by operator."""
    tensor_parallel: Callable[[int, int], TensorParallel | None] = whole
    """(tensor parallel degree, partition) -> how to split it; None: not built. Never asked for degree 1."""
    shared_weights: Mapping[str, str] = field(default_factory=dict)
    """First operator that has the same weights (this one, or one before) -> the module's parameter."""


@dataclass(frozen=True)
class Model:
    """A model as a chain of operators."""

    layers: tuple[Layer, ...]
    loss: Callable[[Values, Values], torch.Tensor]
    """(outputs, targets) -> sum of the losses of the samples given; execution divides by the global batch."""
    make_batch: Callable[[int, torch.Generator], Batch]
    """(samples, generator) -> data made on the fly."""


def model_of_modules(
    modules: Mapping[str, nn.Module],
    loss: Callable[[Values, Values], torch.Tensor],
    example: Batch,
) -> Model:
    """Return the model of a user's own modules, one an operator, in order.

    Parameters
    ----------
    modules
        Module of each operator by its name; on every rank with the same weights.
    loss
        Sum of the losses of the samples given.
    example
        A batch of any size, for shapes; `make_batch` repeats its samples.
    """

    def repeated(samples: int, generator: torch.Generator) -> Batch:
        del generator

        def rows(value: torch.Tensor) -> torch.Tensor:
            return value[torch.arange(samples) % value.shape[0]]

        return Batch(tuple(map(rows, example.inputs)), tuple(map(rows, example.targets)))

    layers = tuple(Layer(name, lambda module=module: module) for name, module in modules.items())  # type: ignore[misc]
    return Model(layers, loss, repeated)


@dataclass(frozen=True)
class TensorShape:
    """A tensor between two operators: shape of one sample, and whether a gradient comes back."""

    sample: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def meta(self, rows: int) -> torch.Tensor:
        """Return such a tensor of `rows` samples, without storage."""
        return torch.empty((rows, *self.sample), dtype=self.dtype, device="meta", requires_grad=self.requires_grad)


def require_same_operators(program: Program, model: Model) -> None:
    """Raise `NotExecutableError` if the model cannot run the program, before anything is built."""
    names = tuple(layer.name for layer in model.layers)
    for index, (planned, found) in enumerate(zip(program.operators, names, strict=False)):
        if planned != found:
            raise NotExecutableError(
                f"operators[{index}]: planned {planned!r}, the model has {found!r}; "
                "run the plan with the model it is for"
            )
    if len(names) != len(program.operators):
        raise NotExecutableError(
            f"operators: planned {len(program.operators)}, the model has {len(names)}; "
            "run the plan with the model it is for"
        )
    for number, stage in enumerate(program.stages):
        for segment in stage.segments:
            for operator in range(*segment.operators):
                _require_tensor_parallel(
                    model.layers[operator], segment.tensor_parallel, segment.partition, f"stage {number}"
                )
    for shared in program.shared_weights:
        for operator in shared.operators:
            if shared.name not in model.layers[operator].shared_weights:
                raise NotExecutableError(
                    f"operators[{operator}]: planned to share the weights of {shared.name!r}, the model's operator "
                    f"{names[operator]!r} does not"
                )
    planned_sharing = {shared.name for shared in program.shared_weights}
    for name, users in shared_users(model).items():
        if name not in planned_sharing and len({place(program, user) for user in users}) > 1:
            raise NotExecutableError(
                f"operators[{users[-1]}].shares_weights_with: the model shares the weights of {name!r}, which lies in "
                "another stage or layout, the problem does not say so; add it to the problem and plan again"
            )


def _require_tensor_parallel(layer: Layer, degree: int, partition: int, where: str) -> None:
    if degree > 1 and layer.tensor_parallel(degree, partition) is None:
        raise NotExecutableError(
            f"{where}: operator {layer.name!r} is not built for tensor parallel degree {degree}, partition "
            f"{partition}; plan with degrees that its module can be split into"
        )


def shared_users(model: Model) -> dict[str, list[int]]:
    """Return the operators that share each weight, in order."""
    users: dict[str, list[int]] = {}
    for index, layer in enumerate(model.layers):
        for name in layer.shared_weights:
            users.setdefault(name, []).append(index)
    return users


def place(program: Program, operator: int) -> tuple[int, int]:
    """Return (stage, segment) of an operator."""
    stage = program.stage_of_operator(operator)
    segments = program.stages[stage].segments
    return stage, next(index for index, segment in enumerate(segments) if operator < segment.operators[1])


def build_layer(model: Model, operator: int, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build an operator's module, with the same weights wherever and however often it is built."""
    return build_module(model.layers[operator], operator, seed, dtype, device)


def build_module(layer: Layer, number: int, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build the module of a layer; equal numbers and seeds give equal weights."""
    return _built(layer, number, seed, dtype, device).to(device)


def _built(layer: Layer, number: int, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    before = torch.get_default_dtype()
    cuda = [device] if device.type == "cuda" else []
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=cuda), device:
            torch.manual_seed(seed * 1_000_003 + number)
            return layer.build()
    finally:
        torch.set_default_dtype(before)


@contextmanager
def blaming_make_batch() -> Iterator[None]:
    """Within the block the model makes data: what it raises becomes an `InputError`."""
    try:
        yield
    except Exception as error:
        raise InputError(
            f"model: `make_batch` raised {type(error).__name__}: {error}; correct the model file"
        ) from error


def boundary_shapes(model: Model, dtype: torch.dtype) -> list[tuple[TensorShape, ...]]:
    """Return the tensors before each operator and behind the last, without any storage.

    Raises
    ------
    NotExecutableError
        If an operator does not keep the samples in the first dim.
    InputError
        If a module or `make_batch` raises.
    """
    with blaming_make_batch():
        batch = model.make_batch(META_ROWS, torch.Generator().manual_seed(0))
    values = values_without_storage(batch.inputs, dtype)
    shapes = [shapes_of(values)]
    for layer in model.layers:
        values = run_without_storage(layer, values, dtype)
        shapes.append(shapes_of(values))
    return shapes


META_ROWS = 2
"""Samples of the tensors without storage that shapes are taken from."""


def values_without_storage(values: Values, dtype: torch.dtype) -> Values:
    """Return tensors of a batch without storage, in the type that the model computes in."""
    return tuple(value.to(_floating(value, dtype)).to(torch.device("meta")) for value in values)


def shapes_of(values: Values) -> tuple[TensorShape, ...]:
    """Return the shapes of tensors."""
    return tuple(TensorShape(tuple(value.shape[1:]), value.dtype, value.requires_grad) for value in values)


def run_without_storage(layer: Layer, values: Values, dtype: torch.dtype) -> Values:
    """Run a layer on tensors of `META_ROWS` samples without storage; raises as `boundary_shapes`."""
    try:
        values = as_tuple(without_storage(layer, dtype)(*values))
    except Exception as error:
        raise InputError(
            f"operator {layer.name!r}: its module raised {type(error).__name__}: {error}; "
            "it must build and run on tensors without storage (device meta)"
        ) from error
    for value in values:
        if value.dim() == 0 or value.shape[0] != META_ROWS:
            raise NotExecutableError(
                f"operator {layer.name!r} returns a tensor of shape {tuple(value.shape)} for "
                f"{META_ROWS} samples: the first dim must count samples"
            )
    return values


def as_tuple(outputs: torch.Tensor | Sequence[torch.Tensor]) -> Values:
    """Return an operator's outputs as a tuple; a single tensor is taken as a tuple of one."""
    if type(outputs) is tuple:
        return outputs
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def require_one_number(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss. Raises `InputError` if it is not one number."""
    if not isinstance(loss, torch.Tensor) or loss.dim():
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InputError(f"loss: found {found}; return a tensor of one number, the sum over the samples given")
    return loss


def _floating(value: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if value.is_floating_point() else value.dtype


def without_storage(layer: Layer, dtype: torch.dtype) -> nn.Module:
    """Build an operator's module without storage."""
    return _on_meta(_built(layer, 0, 0, dtype, torch.device("meta")))


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module without storage."""
    tensors = [*module.parameters(), *module.buffers()]
    if all(tensor.is_meta for tensor in tensors):
        return module
    memo: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)
