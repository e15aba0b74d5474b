"""Process groups and meshes of a program."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from solver_plan.execution.program import Group, Program

DATA, TENSOR = "data", "tensor"
"""Names of the mesh axes."""


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of a program as one rank sees them."""

    program: Program
    rank: int
    device_type: str
    groups: tuple[dist.ProcessGroup, ...]
    alone: dist.ProcessGroup
    """Of this rank only."""
    _meshes: dict[tuple[int, int], DeviceMesh] = field(default_factory=dict)

    def group(self, index: int | None) -> dist.ProcessGroup:
        """Return a group of the program by its index; None: of this rank alone."""
        return self.alone if index is None else self.groups[index]

    def mesh(self, stage: int, segment: int) -> DeviceMesh:
        """Return the mesh of a segment of one of this rank's stages, with axes `DATA` and `TENSOR`."""
        known = self._meshes.get((stage, segment))
        if known is not None:
            # weights split over both axes need slices of one and the same mesh
            return known
        described = self.program.stages[stage]
        layout = described.segments[segment]
        replica, tensor_rank = described.side(segment).place(self.rank)
        mesh = self._meshes[stage, segment] = DeviceMesh.from_group(
            [self.group(layout.data_groups[tensor_rank]), self.group(layout.tensor_groups[replica])],
            self.device_type,
            mesh=torch.tensor(described.devices).view(layout.data_parallel, layout.tensor_parallel),
            mesh_dim_names=(DATA, TENSOR),
        )
        return mesh


def create_groups(program: Program, device_type: str, timeout_s: float) -> ProcessGroups:
    """Create every process group of a program; each rank creates all of them, in the program's order.

    `use_local_synchronization` would hang where ranks hold different numbers of groups, except for a group of one.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    rank = dist.get_rank()
    created = new_groups(program.groups, timeout_s)
    alone = dist.new_group([rank], timeout=timeout, use_local_synchronization=True)
    return ProcessGroups(program, rank, device_type, created, alone)


def new_groups(groups: Sequence[Group], timeout_s: float) -> tuple[dist.ProcessGroup, ...]:
    """Create process groups; all ranks call this together, with the same groups in the same order."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return tuple(dist.new_group(list(group.ranks), timeout=timeout) for group in groups)
