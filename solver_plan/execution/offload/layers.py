"""The layers of a plan bound to the parameters of a model, and how each layer's state is laid out and cut.

A layer's trainable parameters lie one behind the other in flat 32-bit tensors (master weights and both moments), each
from a multiple of `LANES` elements. Parameters of one data type and one group are neighbours. A layer updated on the
CPU is cut into the plan's number of chunks, at multiples of `LANES` within each parameter: PyTorch's fused AdamW
handles the last elements of a tensor that do not fill a vector with other instructions than the rest, whose results may
differ in the last bit, so a cut elsewhere would change results.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solver_plan.errors import NotExecutableError
from solver_plan.execution.offload.arena import aligned
from solver_plan.offload.plan import OffloadPlan, Place
from solver_plan.offload.problem import OffloadProblem

LANES = 16
"""Elements in the widest vector of 32-bit numbers that PyTorch's kernels use (AVX-512)."""

LayerModules = Mapping[str, nn.Module | Iterable[nn.Module | nn.Parameter]]
"""Modules or parameters of each layer by the layer's name in the plan, in forward order."""

TRAINABLE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Slot:
    """One trainable parameter in its layer."""

    parameter: nn.Parameter
    label: str
    group: int
    start: int
    """Of its elements in the layer's flat state."""
    weights: torch.Tensor
    """The parameter's memory, flat; writing to it does not count as a change by the user."""
    version: int
    """Of the parameter, as last seen."""

    @property
    def count(self) -> int:
        """Elements."""
        return self.weights.numel()


@dataclass(frozen=True)
class Piece:
    """A part of a parameter in a chunk."""

    slot: int
    """Index in the layer."""
    first: int
    """[first, end) of the parameter's elements."""
    end: int
    offset: int
    """Byte at which its gradient, or its weights, start in a ring's piece."""


@dataclass(frozen=True)
class Chunk:
    """A part of a layer that is copied and updated at once."""

    number: int
    pieces: tuple[Piece, ...]
    size_bytes: int
    """Of its gradients in a ring, and of its weights."""


@dataclass(eq=False)
class BoundLayer:
    """A layer of the plan with its parameters."""

    index: int
    name: str
    place: Place
    slots: tuple[Slot, ...]
    elements: int
    """Of the flat state, padding included."""
    chunks: tuple[Chunk, ...]
    modules: tuple[nn.Module, ...]
    order: tuple[int, ...]
    """Slots in the order of the modules' parameters."""
    bare: bool
    """Some parameters were given without a module."""


def bind(
    problem: OffloadProblem,
    plan: OffloadPlan,
    layers: LayerModules,
    param_groups: Sequence[Mapping[str, object]],
) -> tuple[BoundLayer, ...]:
    """Return the plan's layers with the model's parameters.

    Parameters
    ----------
    problem, plan
        What was planned.
    layers
        Modules or parameters of each layer; a parameter in several belongs to the first.
    param_groups
        Of the optimizer.

    Raises
    ------
    NotExecutableError
        If names or sizes differ from the plan's, a parameter is in no layer, or of a kind that is not built.
    """
    planned = [layer.name for layer in problem.layers]
    _require_same_names(planned, list(layers))
    group_of = _groups(param_groups)
    place_of = {item.layer: item.update_on for item in plan.placement}
    owners: dict[nn.Parameter, str] = {}
    bound: list[BoundLayer] = []
    for index, described in enumerate(problem.layers):
        modules, own = contents(described.name, layers[described.name])
        new = {label: parameter for label, parameter in own.items() if parameter not in owners}
        owners.update(dict.fromkeys(new.values(), described.name))
        _require_same_size(index, described.name, described.parameters, new)
        slots = _slots(described.name, new, group_of)
        place = place_of[described.name]
        by_label = {slot.label: number for number, slot in enumerate(slots)}
        bound.append(
            BoundLayer(
                index=index,
                name=described.name,
                place=place,
                slots=slots,
                elements=_padded(slots[-1].start + slots[-1].count) if slots else 0,
                chunks=cut(slots, problem.chunks_per_layer) if place == "cpu" else (),
                modules=modules,
                order=tuple(by_label[label] for label in new if label in by_label),
                bare=any(slot.label.endswith("]") for slot in slots),
            )
        )
    for parameter, (group, number) in group_of.items():
        if parameter.requires_grad and parameter not in owners:
            raise NotExecutableError(
                f"param_groups[{group}], parameter {number} of shape {tuple(parameter.shape)}: is in no layer of the "
                "plan; add its module to `layers`, or set requires_grad to False"
            )
    devices = {slot.parameter.device for layer in bound for slot in layer.slots}
    if len(devices) > 1:
        raise NotExecutableError(
            f"parameters: found on {', '.join(sorted(map(str, devices)))}; a plan is for one device: move the model "
            "to one before making the optimizer"
        )
    return tuple(bound)


def cut(slots: Sequence[Slot], count: int) -> tuple[Chunk, ...]:
    """Return a layer's parameters in so many nearly equal chunks; fewer where there is too little to cut."""
    total = sum(slot.count for slot in slots)
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    number = offset = passed = 0
    for index, slot in enumerate(slots):
        first = 0
        while first < slot.count:
            chunk_end = -(-total * (number + 1) // count)
            end = min(slot.count, first + _padded(chunk_end - passed))
            pieces.append(Piece(index, first, end, offset))
            offset = aligned(offset + (end - first) * slot.weights.element_size())
            passed += end - first
            first = end
            if passed >= chunk_end:
                chunks.append(Chunk(number, tuple(pieces), offset))
                pieces, offset = [], 0
                number = passed * count // total
    return tuple(chunks)


def _padded(elements: int) -> int:
    return -(-elements // LANES) * LANES


def _require_same_names(planned: list[str], found: list[str]) -> None:
    for name in found:
        if name not in planned:
            raise NotExecutableError(
                f"layers: found {name!r}, which the plan does not have; its layers: {_listed(planned)}"
            )
    for name in planned:
        if name not in found:
            raise NotExecutableError(f"layers: the plan's {name!r} is missing; give its modules, or none: {name!r}: []")


def _listed(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 8 else [*names[:4], "…", *names[-2:]])


def _groups(param_groups: Sequence[Mapping[str, object]]) -> dict[nn.Parameter, tuple[int, int]]:
    """Return group and place in the group of each parameter."""
    found: dict[nn.Parameter, tuple[int, int]] = {}
    for group, described in enumerate(param_groups):
        parameters = described["params"]
        assert isinstance(parameters, list)
        for number, parameter in enumerate(parameters):
            found[parameter] = (group, number)
    return found


def contents(
    layer: str, given: nn.Module | Iterable[nn.Module | nn.Parameter]
) -> tuple[tuple[nn.Module, ...], dict[str, nn.Parameter]]:
    """Return the modules of a layer, and its parameters by a name for messages, each once."""
    items = (given,) if isinstance(given, nn.Module) else tuple(given)
    modules: list[nn.Module] = []
    parameters: dict[str, nn.Parameter] = {}
    for number, item in enumerate(items):
        if isinstance(item, nn.Parameter):
            parameters[f"{layer}[{number}]"] = item
            continue
        if not isinstance(item, nn.Module):
            raise NotExecutableError(f"layers[{layer!r}]: found a {type(item).__name__}; give modules or parameters")
        modules.append(item)
        prefix = layer if len(items) == 1 else f"{layer}[{number}]"
        parameters |= {f"{prefix}.{name}": parameter for name, parameter in item.named_parameters()}
    once: dict[nn.Parameter, str] = {}
    for label, parameter in parameters.items():
        once.setdefault(parameter, label)
    return tuple(modules), {label: parameter for parameter, label in once.items()}


def _require_same_size(index: int, name: str, planned: int, own: Mapping[str, nn.Parameter]) -> None:
    trained = sum(parameter.numel() for parameter in own.values() if parameter.requires_grad)
    all_of_them = sum(parameter.numel() for parameter in own.values())
    if planned not in (trained, all_of_them):
        raise NotExecutableError(
            f"layers[{index}].parameters: planned {planned} for {name!r}, the model's layer trains {trained} of "
            f"{all_of_them}; run the plan with the model it is for, or plan again"
        )


def _slots(
    layer: str, own: Mapping[str, nn.Parameter], group_of: Mapping[nn.Parameter, tuple[int, int]]
) -> tuple[Slot, ...]:
    trained = [(label, parameter) for label, parameter in own.items() if parameter.requires_grad]
    for label, parameter in trained:
        if parameter not in group_of:
            raise NotExecutableError(
                f"{label}: is trained in layer {layer!r}, but in no param_group; give it to the optimizer, or set "
                "requires_grad to False"
            )
        if isinstance(parameter, DTensor) or parameter.dtype not in TRAINABLE_TYPES or not parameter.is_contiguous():
            kind = "a DTensor" if isinstance(parameter, DTensor) else f"{parameter.dtype}, strides {parameter.stride()}"
            raise NotExecutableError(
                f"{label}: found {kind}; parameters are contiguous tensors of float32, bfloat16 or float16"
            )
    trained.sort(key=lambda item: (str(item[1].dtype), group_of[item[1]][0]))
    slots: list[Slot] = []
    start = 0
    for label, parameter in trained:
        flat = parameter.data.view(-1)
        slots.append(
            Slot(parameter, label, group_of[parameter][0], start, flat, parameter._version)  # noqa: SLF001
        )
        start = _padded(start + parameter.numel())
    return tuple(slots)
