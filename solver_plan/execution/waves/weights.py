"""The weights on one rank: a copy of each layer for each way in which its slices split it, built alike everywhere."""

from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from solver_plan.execution.checkpoint_state import Held, Weights, tensors_of
from solver_plan.execution.groups import TENSOR
from solver_plan.execution.model import build_module, without_storage
from solver_plan.execution.sharding import local, sum_gradients, sum_shared_gradients
from solver_plan.execution.stage import SegmentModule, Splits, parallelize, place_behind, whole_again
from solver_plan.execution.waves.model import MultitaskModel
from solver_plan.execution.waves.program import Reduction, WaveProgram, copies_of

Ranks = tuple[int, ...]


class RankWeights:
    """The copies of layers that this rank holds."""

    def __init__(
        self,
        program: WaveProgram,
        model: MultitaskModel,
        groups: Sequence[dist.ProcessGroup],
        *,
        rank: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.program = program
        self.model = model
        self.rank = rank
        self.copies: dict[tuple[int, int], dict[Ranks, nn.Module]] = {}
        """(component that has the weights, layer) -> ranks over which the copy is split -> its module."""
        self._groups = groups
        self._seed, self._dtype, self._device = seed, dtype, device
        self._meshes: dict[Ranks, DeviceMesh] = {}
        self._trained = {component.weights for component in program.components if component.trained}
        self.slices: dict[int, SegmentModule] = {
            index: self._slice(index) for index, piece in enumerate(program.slices) if rank in piece.devices
        }
        """Modules of this rank's slices."""

    def _slice(self, index: int) -> SegmentModule:
        piece = self.program.slices[index]
        component = self.program.components[piece.component]
        layers = self.model.weights[self.model.components[component.name].weights]
        replica, _ = piece.side.place(self.rank)
        ranks = tuple(piece.side.rank(replica, k) for k in range(piece.tensor_parallel))
        group = piece.tensor_groups[replica]
        mesh = None if group is None else self._mesh(ranks, self._groups[group])
        placed = []
        left: Splits = ()
        for layer in range(*piece.layers):
            module = self._copy(component.weights, layer, ranks, mesh)
            choice = None if mesh is None else layers[layer].tensor_parallel(piece.tensor_parallel, 0)
            operator, left = place_behind(left, module, mesh, choice)
            placed.append(operator)
        return SegmentModule(placed, [(0, len(placed), False)], whole_again(left, mesh))

    def _mesh(self, ranks: Ranks, group: dist.ProcessGroup) -> DeviceMesh:
        if ranks not in self._meshes:
            self._meshes[ranks] = DeviceMesh.from_group(group, self._device.type, mesh_dim_names=(TENSOR,))
        return self._meshes[ranks]

    def _copy(self, weights: int, layer: int, ranks: Ranks, mesh: DeviceMesh | None) -> nn.Module:
        copies = self.copies.setdefault((weights, layer), {})
        if ranks not in copies:
            name = self.name_of(weights)
            described = self.model.weights[name][layer]
            number = self.model.layer_number(name, layer)
            module = build_module(described, number, self._seed, self._dtype, self._device)
            if weights not in self._trained:
                module.requires_grad_(False)
            if mesh is not None:
                choice = described.tensor_parallel(len(ranks), 0)
                assert choice is not None
                parallelize(module, mesh, choice)
            copies[ranks] = module
        return copies[ranks]

    def name_of(self, weights: int) -> str:
        """Return the name that the model gives to weights."""
        return self.model.components[self.program.components[weights].name].weights

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the name and module of each copy of a layer on this rank.

        Copies stand in one order on all ranks, so that those which split one can gather it together.
        """
        for (weights, layer), copies in sorted(self.copies.items(), key=lambda each: each[0]):
            for ranks in sorted(copies):
                yield f"{self.name_of(weights)}.{layer}", copies[ranks]

    def held(self) -> list[Held]:
        """Return the weights and persistent buffers of all copies on this rank.

        Of the copies of a weight, those that are split as the first one speak for it; of a buffer, which each copy has
        its own of, the first one alone.
        """
        found: list[Held] = []
        for (weights, layer), copies in self.copies.items():
            first = min(copies_of(self.program, weights, layer))
            for ranks, module in copies.items():
                for key, tensor in tensors_of(module).items():
                    speaks = ranks == first or (len(ranks) == len(first) and isinstance(tensor, nn.Parameter))
                    found.append(Held(f"{self.name_of(weights)}.{layer}/{key}", tensor, speaks))
        return found

    def modules(self) -> list[nn.Module]:
        """Return all copies."""
        return [module for copies in self.copies.values() for module in copies.values()]

    def parameters(self) -> list[nn.Parameter]:
        """Return what is trained of all copies."""
        return [p for module in self.modules() for p in module.parameters() if p.requires_grad]

    def reduce(self, reduction: Reduction, present: Collection[str]) -> None:
        """Sum the gradients of a reduction's layers that any task of the step has used; the other layers have none."""
        layers = [each for each in reduction.layers if self._is_used(each, present)]
        group = None if reduction.group is None else self._groups[reduction.group]
        if reduction.tensor_rank is None:
            for each in layers:
                self._sum_whole(each, group)
            return
        # a rank that splits a layer in several ways may hold a part several times
        alike = [copies for each in layers for copies in self._parameters(each, reduction.tensor_rank)]
        with torch.no_grad():
            for first, *others in alike:
                for other in others:
                    if other.grad is not None:
                        first.grad = torch.zeros_like(first) if first.grad is None else first.grad
                        local(first.grad).add_(local(other.grad))
            if group is not None:
                sum_gradients([copies[0] for copies in alike], group)
            for first, *others in alike:
                for other in others:
                    other.grad = None if first.grad is None else torch.zeros_like(other)
                    if first.grad is not None and other.grad is not None:
                        local(other.grad).copy_(local(first.grad))

    def _parameters(self, layer: tuple[int, int], tensor_rank: int) -> list[tuple[nn.Parameter, ...]]:
        """Return the trained parameters of a layer, each with those of its copies here that are the same part."""
        modules = [module for ranks, module in self.copies[layer].items() if ranks[tensor_rank] == self.rank]
        found = zip(*(module.parameters() for module in modules), strict=True)
        return [copies for copies in found if copies[0].requires_grad]

    def _is_used(self, layer: tuple[int, int], present: Collection[str]) -> bool:
        program = self.program
        users = (program.components[program.slices[index].component] for index in program.holders(*layer))
        return any(user.task in present and user.trained for user in users)

    def _sum_whole(self, layer: tuple[int, int], group: dist.ProcessGroup | None) -> None:
        copies = self.copies[layer]
        # the same order on all ranks of a copy, which gather it together
        ordered = sorted(copies)
        for parameters in zip(*(copies[ranks].parameters() for ranks in ordered), strict=True):
            if parameters[0].requires_grad:
                sum_shared_gradients(parameters, [ranks[0] == self.rank for ranks in ordered], group)


def multitask_weights(model: MultitaskModel, dtype: torch.dtype) -> Weights:
    """Return shape and type of every weight and persistent buffer of a model, by name, without any storage."""
    return {
        f"{name}.{number}/{key}": (tuple(tensor.shape), tensor.dtype)
        for name, layers in model.weights.items()
        for number, layer in enumerate(layers)
        for key, tensor in tensors_of(without_storage(layer, dtype)).items()
    }
