"""Build the process groups of some ranks of a program, of any size, without the machines it is for."""

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch.distributed as dist

from solver_plan.errors import InputError, RunFailedError
from solver_plan.execution.groups import create_groups, new_groups
from solver_plan.execution.program import Program
from solver_plan.execution.programs import AnyProgram
from solver_plan.execution.torch_pipelining import join_fake_world, require_tested_version

TIMEOUT_S = 60.0
MeshShape = tuple[int, int, int, int]
"""(stage, segment, data parallel degree, tensor parallel degree)."""


@dataclass(frozen=True)
class DryRun:
    """The groups of one rank."""

    rank: int
    groups_created: int
    """By every rank, in the same order."""
    groups_joined: tuple[tuple[int, ...], ...]
    """Ranks of the groups that this rank is a member of."""
    meshes: tuple[MeshShape, ...]
    """Of the meshes of a pipeline."""
    seconds: float


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks of a comma list. Raises `InputError`."""
    ranks = text.split(",")
    if not all(rank.isdecimal() and int(rank) < world_size for rank in ranks):
        raise InputError(f"ranks: found {text[:40]!r}; a comma list of ranks below {world_size}")
    return tuple(map(int, ranks))


def dry_run(program: AnyProgram, ranks: Sequence[int] = (0,)) -> tuple[DryRun, ...]:
    """Build the groups and meshes of ranks with PyTorch's fake backend, one process after the other.

    Raises
    ------
    RunFailedError
        If a rank's groups cannot be built.
    """
    require_tested_version()
    return tuple(_in_a_process(program, rank) for rank in ranks)


def _in_a_process(program: AnyProgram, rank: int) -> DryRun:
    """Run in a process of its own: a process can be in one world only."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_build, args=(program, rank, theirs))
    worker.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(120.0) else None
    except EOFError:
        found = None
    finally:
        if worker.is_alive():
            worker.join(5.0)
        if worker.is_alive():
            worker.kill()
        worker.join()
        ours.close()
    if not isinstance(found, DryRun):
        raise RunFailedError(
            f"dry run: the groups of rank {rank} cannot be built: {found or 'the process ended early'}"
        )
    return found


def _build(program: AnyProgram, rank: int, answer: Connection) -> None:
    try:
        began = time.perf_counter()
        join_fake_world(rank, program.world_size)
        if isinstance(program, Program):
            created, meshes = _pipeline_groups(program, rank)
        else:
            created, meshes = new_groups(program.groups, TIMEOUT_S), ()
        joined = tuple(
            tuple(dist.get_process_group_ranks(group))
            for group, described in zip(created, program.groups, strict=True)
            if rank in described.ranks
        )
        answer.send(DryRun(rank, len(created), joined, meshes, time.perf_counter() - began))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")
    finally:
        answer.close()


def _pipeline_groups(program: Program, rank: int) -> tuple[tuple[dist.ProcessGroup, ...], tuple[MeshShape, ...]]:
    groups = create_groups(program, "cpu", TIMEOUT_S)
    team = program.team_of_rank.get(rank)
    meshes = []
    for stage in () if team is None else program.teams[team].stages:
        for segment in range(len(program.stages[stage].segments)):
            shape = groups.mesh(stage, segment).shape
            meshes.append((stage, segment, shape[0], shape[1]))
    return groups.groups, tuple(meshes)
