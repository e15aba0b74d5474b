"""Plans compile into programs that hold together, without torch; programs that do not are refused."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from solver_plan.errors import InvalidPlanError, NotExecutableError, PlanMismatchError
from solver_plan.execution.actions import parse_action
from solver_plan.execution.compile import compile_plan
from solver_plan.execution.orders import Durations, play
from solver_plan.execution.program import Program, describe, difference, program_text
from solver_plan.execution.programs import read_program
from solver_plan.execution.transfers import Side, transfers
from solver_plan.execution.verify import verify
from solver_plan.parallelism.plan import Layout
from tests.execution.cases import plan, problem, stage

NAMES = tuple(f"op{index}" for index in range(8))


def uneven() -> Program:
    four = problem(NAMES, 4)
    return compile_plan(four, plan(four, [stage((0, 1), [0]), stage((1, 5), [1, 2], 2), stage((5, 8), [3])], 2))


def test_one_forward_one_backward_by_hand() -> None:
    two = problem(NAMES, 2, global_batch=3)
    program = compile_plan(two, plan(two, [stage((0, 4), [0]), stage((4, 8), [1])], 1))
    assert [" ".join(team.actions) for team in program.teams] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0RECV_B1 0SEND_F2 0B1 0RECV_B2 0B2 0UPDATE",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1UPDATE",
    ]


def test_each_set_of_ranks_is_one_group() -> None:
    four = problem(NAMES, 4)
    layout = (
        Layout(operators=(0, 3), tensor_parallel=2, data_parallel=2, partition=0),
        Layout(operators=(3, 6), tensor_parallel=4, data_parallel=1, partition=0),
        Layout(operators=(6, 8), tensor_parallel=1, data_parallel=4, partition=0),
    )
    program = compile_plan(four, plan(four, [stage((0, 8), range(4), layout=layout)], 4))
    assert [group.ranks for group in program.groups] == [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)]
    assert program.groups[4].serves == ("stage 0 tensor parallel", "stage 0 data parallel")
    assert [(boundary.before, boundary.after) for boundary in program.boundaries] == [
        ((0, 0), (0, 1)),
        ((0, 1), (0, 2)),
    ]


def test_transfers_by_hand() -> None:
    two_by_two, three = Side((0, 1, 2, 3), 2, 2), Side((4, 5, 6), 3, 1)
    found = [(x.source, x.destination, x.source_rows, x.destination_rows) for x in transfers(two_by_two, three, 6)]
    assert found == [
        (0, 4, (0, 2), (0, 2)),
        (0, 5, (2, 3), (0, 1)),
        (2, 5, (0, 1), (1, 2)),
        (2, 6, (1, 3), (0, 2)),
    ]
    back = [(x.source, x.destination) for x in transfers(three, two_by_two, 6)]
    assert back == [(4, 0), (4, 1), (5, 0), (5, 1), (5, 2), (5, 3), (6, 2), (6, 3)]


def test_sharding_places_its_collectives() -> None:
    two = problem(NAMES, 2, global_batch=4)

    def collectives(level: int) -> str:
        program = compile_plan(two, plan(two, [stage((0, 8), [0, 1], sharding=level)], 2))
        return " ".join(program.teams[0].actions)

    assert collectives(0) == "0F0 0B0 0F1 0B1 0REDUCE_GRAD 0UPDATE"
    assert collectives(1) == "0UNSHARD 0F0 0B0 0F1 0B1 0REDUCE_GRAD 0RESHARD 0UPDATE"
    assert collectives(2) == "0UNSHARD 0F0 0B0 0REDUCE_GRAD 0F1 0B1 0REDUCE_GRAD 0RESHARD 0UPDATE"
    assert collectives(3) == (
        "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD "
        "0UNSHARD 0F1 0RESHARD 0UNSHARD 0B1 0REDUCE_GRAD 0RESHARD 0UPDATE"
    )


def test_recomputed_ranges_start_anew_at_blocks() -> None:
    one = problem(NAMES, 1, block_starts=(0, 3, 6))
    program = compile_plan(one, plan(one, [stage((0, 8), [0], recompute=[(1, 7)])], 2))
    assert program.stages[0].recompute == ((1, 3), (3, 6), (6, 7))


def test_shared_weights_join_the_ranks_of_their_stages() -> None:
    three = problem(NAMES, 3, shared={7: "op0"})
    program = compile_plan(three, plan(three, [stage((0, 3), [0]), stage((3, 5), [1]), stage((5, 8), [2])], 2))
    (shared,) = program.shared_weights
    assert (shared.operators, shared.stages) == ((0, 7), (0, 2))
    assert shared.group is not None
    assert program.groups[shared.group].ranks == (0, 2)
    assert [team.actions[-2:] for team in program.teams] == [
        ("0REDUCE_SHARED0", "0UPDATE"),
        ("1SEND_B3", "1UPDATE"),
        ("2REDUCE_SHARED0", "2UPDATE"),
    ]


def test_shared_weights_in_one_segment_need_nothing() -> None:
    one = problem(NAMES, 1, shared={7: "op0"})
    assert compile_plan(one, plan(one, [stage((0, 8), [0])], 2)).shared_weights == ()


def test_program_is_data(tmp_path: Path) -> None:
    program = uneven()
    path = tmp_path / "program.json"
    path.write_text(program_text(program))
    assert read_program(path) == program
    assert "team 1" in describe(program)
    assert difference(program, program) == ""
    changed = difference(program, dataclasses.replace(program, global_batch=16))
    assert '+ "global_batch": 16,' in changed.splitlines()
    assert [str(action) for action in program.actions_of(2)][:2] == ["1RECV_F0", "1F0"]
    assert program.actions_of(7) == ()


def test_orders_that_wait_for_each_other_are_refused() -> None:
    two = problem(NAMES, 2, global_batch=2)
    stages = [stage((0, 4), [0]), stage((4, 8), [1])]
    waiting = ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"]
    with pytest.raises(InvalidPlanError, match="0B0, 1F1 wait for each other"):
        compile_plan(two, plan(two, stages, 1, waiting))
    with pytest.raises(NotExecutableError, match=r"wait for each other \(team 0 at 0B0, team 1 at 1F1"):
        play([[parse_action(word) for word in order.split()] for order in waiting], [Durations(1.0, 2.0)] * 2)
    compile_plan(two, plan(two, stages, 1, ["0F1 0F0 0B1 0B0", "1F1 1B1 1F0 1B0"]))


def test_refusals_name_the_place() -> None:
    four = problem(NAMES, 4)
    other = problem(NAMES, 4, global_batch=16)
    two = [stage((0, 4), [0, 1]), stage((4, 8), [2, 3])]
    with pytest.raises(PlanMismatchError):
        compile_plan(other, plan(four, two, 2))
    with pytest.raises(InvalidPlanError, match="ends at 6"):
        compile_plan(four, plan(four, [two[0], stage((4, 6), [2, 3])], 2))
    with pytest.raises(NotExecutableError, match=r"stages\[1\].devices: found \[3, 2\]"):
        compile_plan(four, plan(four, [two[0], stage((4, 8), [3, 2])], 2))
    with pytest.raises(InvalidPlanError, match="overlap"):
        compile_plan(four, plan(four, [two[0], stage((4, 8), [1, 2])], 8, ["0F0 0B0", "1F0 1B0"]))
    with pytest.raises(NotExecutableError, match=r"stages\[1\]: shares its devices with the stage before"):
        compile_plan(four, plan(four, [two[0], stage((4, 8), [0, 1], 2)], 8, ["0F0 1F0 1B0 0B0"]))


@pytest.mark.parametrize(
    ("team", "before", "after", "message"),
    [
        (0, "0SEND_F0", "", "wait for each other"),
        (1, "1RECV_F1", "", "wait for each other"),
        (0, "0B1", "0B0", "runs micro-batch 0"),
        (1, "1SEND_B0", "1SEND_B1", "wait for each other"),
        (2, "2UPDATE", "", "does not update"),
        (2, "2F0", "1F0", "of a stage that it does not run"),
    ],
)
def test_verify_refuses_a_spoilt_program(team: int, before: str, after: str, message: str) -> None:
    program = uneven()
    words = list(program.teams[team].actions)
    place = words.index(before)
    words[place : place + 1] = [after] if after else []
    teams = list(program.teams)
    teams[team] = dataclasses.replace(teams[team], actions=tuple(words))
    with pytest.raises(NotExecutableError, match=message):
        verify(dataclasses.replace(program, teams=tuple(teams)))


def test_verify_refuses_reduction_before_the_last_backward() -> None:
    two = problem(NAMES, 2, global_batch=4)
    program = compile_plan(two, plan(two, [stage((0, 8), [0, 1])], 2))
    words = ("0F0", "0B0", "0F1", "0REDUCE_GRAD", "0B1", "0UPDATE")
    spoilt = dataclasses.replace(program, teams=(dataclasses.replace(program.teams[0], actions=words),))
    with pytest.raises(NotExecutableError, match="does not sum its gradients"):
        verify(spoilt)


def test_verify_refuses_a_rank_in_two_teams() -> None:
    program = uneven()
    teams = (program.teams[0], program.teams[1], dataclasses.replace(program.teams[2], devices=(2,)))
    with pytest.raises(NotExecutableError, match="rank 2 belongs to two groups"):
        verify(dataclasses.replace(program, teams=teams))


def test_verify_refuses_wrong_rows_and_groups() -> None:
    four = problem(NAMES, 4)
    program = compile_plan(four, plan(four, [stage((0, 4), [0, 1]), stage((4, 8), [2, 3], 2)], 4))
    boundary = program.boundaries[0]
    wrong = dataclasses.replace(boundary.forward[0], source_rows=(1, 2), destination_rows=(0, 1))
    spoilt = dataclasses.replace(boundary, forward=(wrong, *boundary.forward[1:]))
    with pytest.raises(NotExecutableError, match="moves the wrong rows"):
        verify(dataclasses.replace(program, boundaries=(spoilt,)))
    short = dataclasses.replace(boundary, backward=boundary.backward[1:])
    with pytest.raises(NotExecutableError, match="misses or repeats"):
        verify(dataclasses.replace(program, boundaries=(short,)))
    with pytest.raises(NotExecutableError, match="nothing says what moves"):
        verify(dataclasses.replace(program, boundaries=()))
    groups = (dataclasses.replace(program.groups[0], ranks=(0, 2)), *program.groups[1:])
    with pytest.raises(NotExecutableError, match="needs the group"):
        verify(dataclasses.replace(program, groups=groups))


def test_interleaved_agrees_with_pytorch_on_what_is_sent() -> None:
    """PyTorch's own lowering sends and receives the same, in the same order between each pair of teams."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    orders = ["0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1", "1F0 1F1 3F0 3B0 3F1 1B0 3B1 1B1"]
    two = problem(NAMES, 2, global_batch=2)
    stages = [stage((2 * index, 2 * index + 2), [index % 2]) for index in range(4)]
    program = compile_plan(two, plan(two, stages, 1, orders))
    parsed = {team: [schedules._Action.from_str(word) for word in order.split()] for team, order in enumerate(orders)}
    theirs = schedules._add_send_recv(parsed, stage_to_rank=lambda s: s % 2, num_stages=4)
    for team in (0, 1):
        for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
            ours = [str(action) for action in program.team_actions[team] if action.kind == kind]
            assert ours == [str(action) for action in theirs[team] if kind in str(action)]


def test_large_plan_compiles() -> None:
    names = tuple(f"op{index}" for index in range(128))
    large = problem(names, 1024, global_batch=64)
    stages = [
        stage((8 * index, 8 * index + 8), range(4 * index, 4 * index + 4), t=4 if index % 2 else 2)
        for index in range(16)
    ]
    program = compile_plan(large, plan(large, stages, 2))
    assert len(program.groups) == 8 * 4 + 8 * 1
    assert len(program.actions_of(63)) > 64


def test_notation() -> None:
    for text in ("0F0", "12SEND_B3", "3REDUCE_GRAD", "0REDUCE_SHARED1", "7UPDATE"):
        assert str(parse_action(text)) == text


def test_compiling_imports_no_torch() -> None:
    code = "import solver_plan.execution.compile, sys; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
