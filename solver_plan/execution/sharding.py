"""Replicas of a stage: their gradients summed, or their weights, gradients and optimizer state sharded (ZeRO)."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from solver_plan.execution.groups import DATA, ProcessGroups
from solver_plan.execution.program import Program, StageProgram
from solver_plan.execution.stage import StageModule
from solver_plan.execution.torch_pipelining import reduce_scatter_gradients, shard_over


class Replicas:
    """The replicas of one stage on this rank."""

    def __init__(self, program: Program, stage: int, module: StageModule, groups: ProcessGroups) -> None:
        described: StageProgram = program.stages[stage]
        self.module = module
        self.sharding = described.sharding
        self.groups: list[dist.ProcessGroup | None] = []
        for index, segment in enumerate(described.segments):
            _, tensor_rank = described.side(index).place(groups.rank)
            group = segment.data_groups[tensor_rank]
            self.groups.append(None if group is None else groups.group(group))
        if self.sharding:
            if len(described.segments) > 1:
                for index, part in enumerate(module.segments):
                    shard_over(part, groups.mesh(stage, index)[DATA])
            shard_over(module, groups.mesh(stage, 0)[DATA])

    def reduce(self) -> None:
        """Sum the gradients over the replicas; with ZeRO, each rank keeps its share."""
        if self.sharding:
            reduce_scatter_gradients(self.module, keep_weights=self.sharding == 2)
            return
        for segment, group in zip(self.module.segments, self.groups, strict=True):
            if group is not None:
                sum_gradients(segment.parameters(), group)


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum gradients over a group, as one tensor for each type of element."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_type.setdefault(parameter.dtype, []).append(local(parameter.grad))
    for gradients in by_type.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, summed in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(summed.view_as(gradient))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    part = tensor.to_local()
    assert isinstance(part, torch.Tensor)
    return part


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor; all ranks of its mesh call this together."""
    if not isinstance(tensor, DTensor):
        return tensor
    found = tensor.full_tensor()
    assert isinstance(found, torch.Tensor)
    return found


def sum_shared_gradients(
    copies: Sequence[nn.Parameter], contributes: Sequence[bool], group: dist.ProcessGroup | None
) -> None:
    """Sum the gradients of the copies of shared weights, whatever their layouts.

    Parameters
    ----------
    copies
        This rank's copies.
    contributes
        Whether this rank speaks for each copy: one rank of each copy's ranks does, the others add 0.
    group
        All ranks that have a copy; None: this rank alone.
    """
    with torch.no_grad():
        total: torch.Tensor | None = None
        for copy, speaks in zip(copies, contributes, strict=True):
            gradient = torch.zeros_like(copy) if copy.grad is None else copy.grad
            whole = full(gradient)
            part = whole if speaks else torch.zeros_like(whole)
            total = part.clone() if total is None else total + part
        assert total is not None
        if group is not None:
            dist.all_reduce(total, group=group)
        for copy in copies:
            if isinstance(copy, DTensor):
                copy.grad = distribute_tensor(total, copy.device_mesh, copy.placements, src_data_rank=None)
            else:
                copy.grad = total.clone()
