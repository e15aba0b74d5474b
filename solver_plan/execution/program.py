"""The program: what every rank does to carry out a parallelism plan, as data.

A program names each process group once, in the one order in which every rank creates them; says for each stage which
operators it runs and how they lie on its devices; lists which rows go from which rank to which wherever two layouts
meet; and gives each team (the ranks that run the same stages) its actions in order. It is made by `compile_plan`,
checked by `verify`, printed, saved, compared, and run by `Executor`.
"""

from functools import cached_property
from typing import Annotated, Literal

from annotated_types import Ge, Le, Len

from solver_plan.documents import (
    Bytes,
    Count,
    Index,
    Milliseconds,
    Name,
    ProgramDocument,
    Range,
    document,
    document_text,
)
from solver_plan.execution.actions import Action, ActionText, parse_action
from solver_plan.execution.transfers import Side, Transfer


@document
class Group:
    """Ranks that communicate; each set of ranks is one group, whatever it serves."""

    ranks: Annotated[tuple[Index, ...], Len(2)]
    serves: tuple[str, ...]
    """What for, such as ``stage 0 tensor parallel``."""


@document
class Segment:
    """Consecutive operators of a stage with one layout."""

    operators: Range
    tensor_parallel: Count
    data_parallel: Count
    partition: Index
    tensor_groups: tuple[Index | None, ...]
    """Group of each replica's tensor ranks; None: of one rank."""
    data_groups: tuple[Index | None, ...]
    """Group of the replicas of each tensor rank; None: of one rank."""


@document
class StageProgram:
    """One stage: its operators, devices and layouts."""

    operators: Range
    devices: Annotated[tuple[Index, ...], Len(1)]
    """Replica j, tensor rank k is ``devices[j * tensor_parallel + k]``, in each segment."""
    team: Index
    segments: Annotated[tuple[Segment, ...], Len(1)]
    recompute: tuple[Range, ...]
    """Operators whose activations are computed again in the backward; each range keeps its input alone."""
    sharding: Annotated[int, Ge(0), Le(3)]
    """ZeRO stage; 0 where no operator has replicas."""
    forward_ms: Milliseconds
    """Of one micro-batch, as profiled, without communication."""
    backward_ms: Milliseconds
    """The same, recomputation included."""

    def side(self, segment: int) -> Side:
        """Return where the tensors of a segment lie."""
        layout = self.segments[segment]
        return Side(self.devices, layout.data_parallel, layout.tensor_parallel)


@document
class Boundary:
    """What moves where two layouts meet: between stages, or between segments of a stage."""

    before: tuple[Index, Index]
    """(stage, segment) that makes the activations."""
    after: tuple[Index, Index]
    """(stage, segment) that takes them."""
    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]


@document
class Team:
    """Ranks that run the same stages, action by action."""

    devices: Annotated[tuple[Index, ...], Len(1)]
    stages: Annotated[tuple[Index, ...], Len(1)]
    actions: tuple[ActionText, ...]


@document
class SharedWeights:
    """Weights that operators of several stages (or segments) hold a copy of."""

    name: Name
    """The first operator that has them."""
    operators: Annotated[tuple[Index, ...], Len(2)]
    stages: Annotated[tuple[Index, ...], Len(1)]
    group: Index | None
    """All ranks of those stages; None: a single rank."""


@document
class Program(ProgramDocument):
    """What every rank does in one iteration."""

    kind: Literal["parallelism"] = "parallelism"
    model: Name | None
    world_size: Count
    global_batch: Count
    micro_batch_size: Count
    micro_batches: Count
    operators: Annotated[tuple[Name, ...], Len(1)]
    groups: tuple[Group, ...]
    stages: Annotated[tuple[StageProgram, ...], Len(1)]
    boundaries: tuple[Boundary, ...]
    shared_weights: tuple[SharedWeights, ...]
    teams: Annotated[tuple[Team, ...], Len(1)]
    predicted_stage_ms: tuple[Milliseconds, ...] | None = None
    """Forward and backward of one micro-batch, as the plan says."""
    predicted_memory_bytes: tuple[Bytes, ...] | None = None
    """Of each stage, as the plan says."""

    @cached_property
    def team_of_rank(self) -> dict[int, int]:
        """Index of each busy rank's team."""
        return {rank: index for index, team in enumerate(self.teams) for rank in team.devices}

    @cached_property
    def team_actions(self) -> tuple[tuple[Action, ...], ...]:
        """Actions of each team, parsed."""
        return tuple(tuple(parse_action(text) for text in team.actions) for team in self.teams)

    def actions_of(self, rank: int) -> tuple[Action, ...]:
        """Return what a rank does in one iteration, in order; nothing for a rank that the plan leaves idle."""
        team = self.team_of_rank.get(rank)
        return () if team is None else self.team_actions[team]

    def stage_of_operator(self, operator: int) -> int:
        """Return the stage that runs an operator."""
        return next(index for index, stage in enumerate(self.stages) if operator < stage.operators[1])

    def boundary_after(self, stage: int, segment: int) -> Boundary | None:
        """Return the boundary behind a segment; None behind the last."""
        return next((boundary for boundary in self.boundaries if boundary.before == (stage, segment)), None)


def program_text(program: Program) -> str:
    """Return the program as JSON text."""
    return document_text(program)


def describe(program: Program) -> str:
    """Return the program as text for a terminal: groups, stages, and the first and last actions of each team."""
    lines = [
        f"{program.world_size} ranks, {len(program.groups)} process groups, {len(program.stages)} stages; "
        f"{program.micro_batches} micro-batches of {program.micro_batch_size}"
    ]
    for index, stage in enumerate(program.stages):
        first, end = stage.operators
        lines.append(
            f"stage {index}: {program.operators[first]} … {program.operators[end - 1]} ({end - first}), "
            f"ranks {ranges(stage.devices)}, team {stage.team}, ZeRO {stage.sharding}"
        )
        for segment in stage.segments:
            lines.append(
                f"  operators {segment.operators[0]}-{segment.operators[1] - 1}: tensor {segment.tensor_parallel} "
                f"x data {segment.data_parallel}, partition {segment.partition}"
            )
        for begin, stop in stage.recompute:
            lines.append(f"  recomputed: {begin}-{stop - 1}")
    for shared in program.shared_weights:
        lines.append(f"shared weights {shared.name}: stages {', '.join(map(str, shared.stages))}")
    for index, team in enumerate(program.teams):
        shown = team.actions if len(team.actions) <= 24 else (*team.actions[:16], "…", *team.actions[-8:])
        lines.append(f"team {index}, {len(team.actions)} actions: {' '.join(shown)}")
    return "\n".join(lines)


def difference(before: Program, after: Program) -> str:
    """Return what changed between two programs, as a unified diff of their texts; empty if nothing did."""
    import difflib

    old, new = (program_text(program).splitlines(keepends=True) for program in (before, after))
    return "".join(difflib.unified_diff(old, new, "before", "after"))


def ranges(ranks: tuple[int, ...]) -> str:
    """Return ranks as text, such as ``0-3``."""
    if len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
