"""Check of a program before any process starts: complete work, matching communication, no deadlock.

The check plays the teams' lists under the strictest rules that a backend may have: a send ends only when its receive
stands at the head of the other list, and a collective blocks all its ranks. A program that runs to its end so runs
under weaker rules too.
"""

import itertools
from collections import Counter, defaultdict

from solver_plan.errors import NotExecutableError
from solver_plan.execution.actions import COMPUTATIONS, RECEIVES, SENDS, Action, ActionKind
from solver_plan.execution.program import Boundary, Group, Program
from solver_plan.execution.transfers import Side, Transfer


def verify(program: Program) -> None:
    """Raise `NotExecutableError` with the first fault found."""
    _teams_share_no_rank(program)
    _groups_are_distinct(program)
    for boundary in program.boundaries:
        _boundary_covers_rows(program, boundary)
    _boundaries_are_complete(program)
    _work_is_complete(program)
    _runs_to_its_end(program)


def fault(message: str) -> NotExecutableError:
    """Return the error of a program that was not compiled as it stands."""
    return NotExecutableError(f"the program cannot run: {message}; compile the plan again")


def _teams_share_no_rank(program: Program) -> None:
    homes: dict[int, int] = {}
    for index, team in enumerate(program.teams):
        for rank in team.devices:
            if homes.setdefault(rank, index) != index:
                raise NotExecutableError(
                    f"stages: rank {rank} belongs to two groups of devices; stages share all their devices or none"
                )
            if rank >= program.world_size:
                raise fault(f"team {index} has rank {rank}, the world has {program.world_size}")
        for stage in team.stages:
            if stage >= len(program.stages) or program.stages[stage].devices != team.devices:
                raise fault(f"team {index} and its stage {stage} have other ranks")
    missing = set(range(len(program.stages))) - {stage for team in program.teams for stage in team.stages}
    if missing:
        raise fault(f"no team runs stage {min(missing)}")


def _groups_are_distinct(program: Program) -> None:
    require_distinct(program.groups)
    for number, stage in enumerate(program.stages):
        for position, segment in enumerate(stage.segments):
            side = stage.side(position)
            for replica, tensor_group in enumerate(segment.tensor_groups):
                ranks = tuple(side.rank(replica, k) for k in range(segment.tensor_parallel))
                _group_is(program, tensor_group, ranks, number)
            for k, data_group in enumerate(segment.data_groups):
                ranks = tuple(side.rank(replica, k) for replica in range(segment.data_parallel))
                _group_is(program, data_group, ranks, number)


def _group_is(program: Program, group: int | None, ranks: tuple[int, ...], stage: int) -> None:
    require_group(program.groups, group, ranks, f"stage {stage}")


def require_distinct(groups: tuple[Group, ...]) -> None:
    """Raise if a group stands there twice, or a rank twice in a group."""
    counts = Counter(group.ranks for group in groups)
    for index, group in enumerate(groups):
        if counts[group.ranks] > 1 or len(set(group.ranks)) < len(group.ranks):
            raise fault(f"groups[{index}] repeats a rank or a group")


def require_group(groups: tuple[Group, ...], group: int | None, ranks: tuple[int, ...], who: str) -> None:
    """Raise if an entry (None: a single rank) does not name the group of these ranks."""
    found = ranks[:1] if group is None else groups[group].ranks if group < len(groups) else ()
    if found != ranks:
        raise fault(f"{who} needs the group {ranks}, its entry names {found}")


def _boundary_covers_rows(program: Program, boundary: Boundary) -> None:
    before = program.stages[boundary.before[0]].side(boundary.before[1])
    after = program.stages[boundary.after[0]].side(boundary.after[1])
    where = f"between {boundary.before} and {boundary.after}"
    require_all_rows(where, boundary.forward, before, after, program.micro_batch_size)
    require_all_rows(where, boundary.backward, after, before, program.micro_batch_size)


def require_all_rows(
    where: str, transfers: tuple[Transfer, ...], sender: Side, receiver: Side, batch_rows: int
) -> None:
    """Raise if a receiving rank does not get each of its rows once, from a rank that holds it."""
    rows = defaultdict[int, list[int]](list)
    for transfer in transfers:
        known = transfer.source in sender.devices and transfer.destination in receiver.devices
        if not known or _global_rows(sender, transfer.source, transfer.source_rows, batch_rows) != _global_rows(
            receiver, transfer.destination, transfer.destination_rows, batch_rows
        ):
            raise fault(f"{where}, {transfer} moves the wrong rows")
        rows[transfer.destination] += range(*transfer.destination_rows)
    for rank in receiver.devices:
        expected = list(range(batch_rows // receiver.data_parallel))
        if sorted(rows[rank]) != expected:
            raise fault(f"{where}, rank {rank} misses or repeats rows")


def _global_rows(side: Side, rank: int, rows: tuple[int, int], batch_rows: int) -> tuple[int, int]:
    start = side.place(rank)[0] * (batch_rows // side.data_parallel)
    return start + rows[0], start + rows[1]


def _boundaries_are_complete(program: Program) -> None:
    places = [(index, part) for index, stage in enumerate(program.stages) for part in range(len(stage.segments))]
    given = {(boundary.before, boundary.after) for boundary in program.boundaries}
    for before, after in itertools.pairwise(places):
        sides = [program.stages[stage].side(part) for stage, part in (before, after)]
        if (before, after) not in given and (before[0] != after[0] or sides[0] != sides[1]):
            raise fault(f"nothing says what moves between {before} and {after}")


def _work_is_complete(program: Program) -> None:
    """Each stage runs every micro-batch once in each direction, reduces behind its last backward and updates once."""
    for index, actions in enumerate(program.team_actions):
        counts = Counter(actions)
        stages = program.teams[index].stages
        strangers = [action for action in actions if action.stage not in stages]
        if strangers:
            raise fault(f"team {index} has {strangers[0]} of a stage that it does not run")
        for stage in stages:
            _stage_is_complete(program, stage, counts, actions)


def _stage_is_complete(program: Program, stage: int, counts: Counter[Action], actions: tuple[Action, ...]) -> None:
    for micro_batch in range(program.micro_batches):
        found = tuple(counts[Action(stage, kind, micro_batch)] for kind in COMPUTATIONS)
        if found not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            raise fault(f"stage {stage} runs micro-batch {micro_batch} {found} times as F, B, I, W")
    if counts[Action(stage, ActionKind.UPDATE)] != 1:
        raise fault(f"stage {stage} does not update its weights once")
    backwards = [
        place
        for place, action in enumerate(actions)
        if action.stage == stage and action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
    ]
    reductions = [place for place, action in enumerate(actions) if action == Action(stage, ActionKind.REDUCE)]
    replicated = any(segment.data_parallel > 1 for segment in program.stages[stage].segments)
    if replicated and (not reductions or reductions[-1] < backwards[-1]):
        raise fault(f"stage {stage} does not sum its gradients behind its last backward")
    if actions.index(Action(stage, ActionKind.UPDATE)) < max(backwards + reductions):
        raise fault(f"stage {stage} updates its weights before its gradients are complete")


def _runs_to_its_end(program: Program) -> None:
    lists = program.team_actions
    position = [0] * len(lists)
    done: set[Action] = set()
    last = len(program.stages) - 1
    team_of = {stage: index for index, team in enumerate(program.teams) for stage in team.stages}

    def partners(action: Action) -> list[tuple[int, Action]] | None:
        """Other teams and what must stand at the head of their lists; None while an input is missing."""
        if action.kind in COMPUTATIONS:
            return [] if all(done.intersection(needed) for needed in _needs(action, last, team_of)) else None
        if action.kind in SENDS + RECEIVES:
            peer = _peer(action)
            made = _maker(action)
            if action.kind in SENDS and not any(maker in done for maker in made):
                return None
            return [(team_of[peer.stage], peer)]
        if action.kind is ActionKind.REDUCE_SHARED:
            assert action.micro_batch is not None
            weights = program.shared_weights[action.micro_batch]
            teams = sorted({team_of[stage] for stage in weights.stages} - {team_of[action.stage]})
            return [
                (
                    team,
                    Action(min(set(weights.stages) & set(program.teams[team].stages)), action.kind, action.micro_batch),
                )
                for team in teams
            ]
        return []

    progress = True
    while progress:
        progress = False
        for team, actions in enumerate(lists):
            while position[team] < len(actions):
                action = actions[position[team]]
                others = partners(action)
                if others is None or any(
                    position[other] >= len(lists[other]) or lists[other][position[other]] != expected
                    for other, expected in others
                ):
                    break
                for other in (team, *(other for other, _ in others)):
                    done.add(lists[other][position[other]])
                    position[other] += 1
                progress = True
    stuck = [
        f"team {team} at {actions[at]}"
        for team, (actions, at) in enumerate(zip(lists, position, strict=True))
        if at < len(actions)
    ]
    if stuck:
        raise fault(f"the teams wait for each other ({', '.join(stuck[:4])})")


def _needs(action: Action, last: int, team_of: dict[int, int]) -> list[tuple[Action, ...]]:
    """What must have happened on this team before a computation: one action of each tuple."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is ActionKind.FORWARD:
        if stage == 0:
            return []
        local = team_of[stage - 1] == team_of[stage]
        place, kind = (stage - 1, ActionKind.FORWARD) if local else (stage, ActionKind.RECEIVE_FORWARD)
        return [(Action(place, kind, micro_batch),)]
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return [(Action(stage, ActionKind.BACKWARD_INPUT, micro_batch),)]
    needs: list[tuple[Action, ...]] = [(Action(stage, ActionKind.FORWARD, micro_batch),)]
    if stage < last and team_of[stage + 1] != team_of[stage]:
        needs.append((Action(stage, ActionKind.RECEIVE_BACKWARD, micro_batch),))
    elif stage < last:
        kinds = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
        needs.append(tuple(Action(stage + 1, kind, micro_batch) for kind in kinds))
    return needs


def _peer(action: Action) -> Action:
    """Return the other end of a send or receive."""
    ends = {
        ActionKind.SEND_FORWARD: (ActionKind.RECEIVE_FORWARD, 1),
        ActionKind.RECEIVE_FORWARD: (ActionKind.SEND_FORWARD, -1),
        ActionKind.SEND_BACKWARD: (ActionKind.RECEIVE_BACKWARD, -1),
        ActionKind.RECEIVE_BACKWARD: (ActionKind.SEND_BACKWARD, 1),
    }
    kind, step = ends[action.kind]
    return Action(action.stage + step, kind, action.micro_batch)


def _maker(action: Action) -> list[Action]:
    """Return the computations any of which makes what a send sends."""
    kinds = (
        (ActionKind.FORWARD,)
        if action.kind is ActionKind.SEND_FORWARD
        else (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    )
    return [Action(action.stage, kind, action.micro_batch) for kind in kinds]
