"""What execution needs of a multi-task model: the layers of each set of weights, how components use them, and losses.

A layer is what it is for pipelines (`execution.model.Layer`): a module that is called with the tensors that the layer
before it returned, samples in the first dim. Components that share weights are chains of the same layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from solver_plan.errors import InputError, NotExecutableError
from solver_plan.execution.model import (
    META_ROWS,
    Layer,
    TensorShape,
    Values,
    blaming_make_batch,
    run_without_storage,
    shapes_of,
    values_without_storage,
)
from solver_plan.execution.waves.program import WaveProgram


@dataclass(frozen=True)
class TaskBatch:
    """Samples of one task, the same on every rank."""

    inputs: Mapping[str, Values]
    """Of each component that takes data of its own, by its name."""
    targets: Values = ()


MultitaskBatch = Mapping[str, TaskBatch]
"""Samples of one step, by task; a task that is not named is absent from the step."""


Given = Mapping[str, Values]
"""Outputs of components, by name, in the order of the problem."""


def chain_of(given: Given, data: Values) -> Values:
    """Return what a first layer is called with by default: what the predecessors give, in order, then the data."""
    return (*(value for values in given.values() for value in values), *data)


@dataclass(frozen=True)
class ComponentModel:
    """How a component uses its weights."""

    weights: str
    """Name of its layers in `MultitaskModel.weights`; components with the same name share them."""
    enter: Callable[[Given, Values], Values] = chain_of
    """(outputs of its predecessors, own data) -> what the first layer is called with; it has no weights."""
    trained: bool = True
    """False: frozen, as the problem says by a backward_ms of 0."""


@dataclass(frozen=True)
class Objective:
    """The loss of a task."""

    loss: Callable[[Given, Values], torch.Tensor]
    """(outputs of the components that nothing follows, targets) -> sum of the losses of the samples given; execution
    divides by the task's batch and adds the tasks up."""
    whole_batch: bool = False
    """Its samples depend on one another, as in a contrastive loss: it is given the whole batch."""


@dataclass(frozen=True)
class MultitaskModel:
    """A model of several tasks."""

    weights: Mapping[str, Sequence[Layer]]
    """The layers of each set of weights; names of parameters are ``NAME.LAYER/`` and the name in the layer's module."""
    components: Mapping[str, ComponentModel]
    """By the names that the problem has."""
    objectives: Mapping[str, Objective]
    """By task."""
    make_batch: Callable[[Mapping[str, int], torch.Generator], MultitaskBatch]
    """(samples of each task, generator) -> data made on the fly."""

    def layer_number(self, weights: str, layer: int) -> int:
        """Return the number of a layer among all, which seeds its weights whatever the plan."""
        before = list(self.weights)[: list(self.weights).index(weights)]
        return sum(len(self.weights[name]) for name in before) + layer


@dataclass(frozen=True)
class ModelShapes:
    """Tensors that pass between sites of a program, and data."""

    outputs: Mapping[int, tuple[TensorShape, ...]]
    """What leaves each slice."""
    data: Mapping[str, tuple[TensorShape, ...]]
    """What each component takes from the batch."""


def require_same_components(program: WaveProgram, model: MultitaskModel) -> None:
    """Raise `NotExecutableError` if the model cannot run the program, before anything is built."""
    remedy = "run the plan with the model it is for"
    for index, component in enumerate(program.components):
        found = model.components.get(component.name)
        if found is None:
            raise NotExecutableError(f"components[{index}]: planned {component.name!r}, the model has none; {remedy}")
        layers = model.weights.get(found.weights)
        if layers is None or len(layers) != component.layers:
            have = "no such weights" if layers is None else f"{len(layers)} layers"
            raise NotExecutableError(
                f"components[{index}]: planned {component.layers} layers of {component.name!r}, the model has {have} "
                f"({found.weights!r}); {remedy}"
            )
        if found.trained != component.trained:
            planned, has = ("trained" if each else "frozen" for each in (component.trained, found.trained))
            raise NotExecutableError(
                f"components[{index}]: {component.name!r} is planned {planned}, in the model it is {has}; {remedy}"
            )
        owner = program.components[component.weights]
        if model.components[owner.name].weights != found.weights:
            raise NotExecutableError(
                f"components[{index}].parameters: {component.name!r} is planned with the weights of {owner.name!r}, "
                f"the model gives it its own ({found.weights!r}); {remedy}"
            )
    _require_planned_sharing(program, model)
    extra = sorted(set(model.components) - {component.name for component in program.components})
    if extra:
        raise NotExecutableError(f"components: the model has {extra[0]!r}, the plan does not; {remedy}")
    for loss in program.losses:
        if loss.task not in model.objectives:
            raise NotExecutableError(f"task {loss.task}: the model has no loss for it; {remedy}")
    _require_tensor_parallel(program, model)


def _require_planned_sharing(program: WaveProgram, model: MultitaskModel) -> None:
    first_of: dict[str, int] = {}
    for index, component in enumerate(program.components):
        first = first_of.setdefault(model.components[component.name].weights, index)
        if program.components[first].weights != component.weights:
            raise NotExecutableError(
                f"components[{index}].parameters: {component.name!r} and {program.components[first].name!r} share "
                "their weights in the model, the problem does not say so; give both the same `parameters`"
            )


def _require_tensor_parallel(program: WaveProgram, model: MultitaskModel) -> None:
    for index, piece in enumerate(program.slices):
        component = program.components[piece.component]
        layers = model.weights[model.components[component.name].weights]
        for layer in range(*piece.layers) if piece.tensor_parallel > 1 else ():
            if layers[layer].tensor_parallel(piece.tensor_parallel, 0) is None:
                raise NotExecutableError(
                    f"slices[{index}]: layer {layer} of {component.name!r} is not built for tensor parallel degree "
                    f"{piece.tensor_parallel}; plan with degrees that its module can be split into"
                )


def shapes_between(program: WaveProgram, model: MultitaskModel, dtype: torch.dtype) -> ModelShapes:
    """Return the tensors that leave each slice, without any storage.

    Raises
    ------
    NotExecutableError
        If a layer does not keep the samples in the first dim.
    InputError
        If a module or `make_batch` raises.
    """
    batch = _example(program, model)
    outputs: dict[int, tuple[TensorShape, ...]] = {}
    left: dict[int, Values] = {}
    data: dict[str, tuple[TensorShape, ...]] = {}
    for index in _topological(program):
        component = program.components[index]
        described = model.components[component.name]
        given = {program.components[a].name: left[a] for a, b in program.edges if b == index}
        own = values_without_storage(batch[component.task].inputs.get(component.name, ()), dtype)
        data[component.name] = shapes_of(own)
        with torch.set_grad_enabled(component.trained):
            values = _entered(component.name, described, given, own)
            ends = {program.slices[number].layers[1]: number for number in program.slices_of_component[index]}
            for number, layer in enumerate(model.weights[described.weights]):
                values = run_without_storage(layer, values, dtype)
                if number + 1 in ends:
                    outputs[ends[number + 1]] = shapes_of(values)
        left[index] = values
    return ModelShapes(outputs, data)


def _example(program: WaveProgram, model: MultitaskModel) -> MultitaskBatch:
    samples = dict.fromkeys(program.tasks, META_ROWS)
    with blaming_make_batch():
        batch = model.make_batch(samples, torch.Generator().manual_seed(0))
    missing = [task for task in program.tasks if task not in batch]
    if missing:
        raise InputError(f"model: `make_batch` made no samples of task {missing[0]!r}, which it was asked for")
    return batch


def _entered(name: str, described: ComponentModel, given: Given, own: Values) -> Values:
    try:
        return described.enter(given, own)
    except Exception as error:
        raise InputError(
            f"component {name!r}: its `enter` raised {type(error).__name__}: {error}; it is given the outputs of its "
            f"{len(given)} predecessors and {len(own)} tensors of data"
        ) from error


def _topological(program: WaveProgram) -> list[int]:
    left = set(range(len(program.components)))
    order: list[int] = []
    while left:
        free = [index for index in sorted(left) if not any(a in left and b == index for a, b in program.edges)]
        order += free
        left -= set(free)
    return order
