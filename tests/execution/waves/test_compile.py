"""Wavefront plans compile into programs that hold together, without torch; programs that do not are refused."""

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import solver_plan
from models import multitask_clip
from solver_plan.documents import document_text, write_document
from solver_plan.errors import InputError, InvalidPlanError, NotExecutableError, PlanMismatchError
from solver_plan.execution.programs import compile_plan, read_problem_and_plan, read_program
from solver_plan.execution.waves.actions import WaveAction, WaveActionKind, parse_wave_action
from solver_plan.execution.waves.compile import compile_waves
from solver_plan.execution.waves.order import needs, play_in_time
from solver_plan.execution.waves.program import Reduction, WaveProgram, describe_waves
from solver_plan.execution.waves.verify import verify_waves
from solver_plan.kinds import read_problem
from solver_plan.wavefront.from_operators import problem_from_operators
from solver_plan.wavefront.plan import WavefrontPlan
from solver_plan.wavefront.problem import Cluster, Component, Mode, WavefrontProblem
from tests.execution.waves.cases import Piece, component, plan, problem

ROOT = Path(__file__).parents[3]
CAPTION = [component("t/image", 2, weights="image"), component("t/text", 2)]
EDGE = [("t/image", "t/text")]
SLICES: list[Piece] = [("t/image", (0, 2), [0, 1], 1), ("t/text", (0, 1), [0, 1], 1), ("t/text", (1, 2), [2], 0)]


def caption() -> WaveProgram:
    made_for = problem(CAPTION, EDGE)
    return compile_waves(made_for, plan(made_for, SLICES))


def test_order_by_hand() -> None:
    assert " ".join(caption().actions) == ("0F 1F 0MOVE_F 2F 0LOSS 2B 0MOVE_B 1B 0B 0REDUCE 0UPDATE")
    program = caption()
    assert [" ".join(map(str, program.actions_of(rank))) for rank in range(3)] == [
        "0F 1F 0MOVE_F 0MOVE_B 1B 0B 0REDUCE 0UPDATE",
        "0F 1F 0MOVE_F 0MOVE_B 1B 0B 0REDUCE 0UPDATE",
        "0MOVE_F 2F 0LOSS 2B 0MOVE_B 0UPDATE",
    ]


def test_sets_of_ranks_and_what_they_sum() -> None:
    made_for = problem([component("a/x", 2, weights="x"), component("b/x", 2, weights="x"), component("c/y", 1)])
    slices: list[Piece] = [
        ("a/x", (0, 2), [0], 0),
        ("b/x", (0, 1), [1, 2], 1),
        ("b/x", (1, 2), [0], 0),
        ("c/y", (0, 1), [1, 2], 1),
    ]
    program = compile_waves(made_for, plan(made_for, slices))
    assert [(program.groups[r.group or 0].ranks, r.layers) for r in program.reductions] == [
        ((0, 1, 2), ((0, 0),)),
        ((1, 2), ((2, 0),)),
    ]
    assert [component.weights for component in program.components] == [0, 0, 2]


def test_frozen_weights_are_not_summed_and_have_no_backward() -> None:
    made_for = problem([component("t/image", 2, frozen=True), component("t/text", 1)], EDGE)
    slices: list[Piece] = [("t/image", (0, 2), [0, 1], 1), ("t/text", (0, 1), [2], 0)]
    program = compile_waves(made_for, plan(made_for, slices))
    assert program.reductions == ()
    assert "0B" not in program.actions
    assert all(not link.backward for link in program.links)


def test_the_backward_mirrors_the_forward_or_follows_its_own_times() -> None:
    pieces: list[Piece] = [("a/x", (0, 1), [0], 0), ("b/y", (0, 1), [0], 0), ("c/z", (0, 1), [0], 0)]
    components = [component("a/x", 1), component("b/y", 1), component("c/z", 1)]
    fused = problem(components)
    order = compile_waves(fused, plan(fused, pieces)).actions
    assert [action for action in order if action.endswith("B")] == ["2B", "1B", "0B"]
    own = problem(components, phases="forward_backward")
    order = compile_waves(own, plan(own, pieces, [1, 2, 0])).actions
    assert [action for action in order if action.endswith("B")] == ["1B", "2B", "0B"]


def test_planned_times_of_the_executed_order() -> None:
    made_for = problem(CAPTION, EDGE)
    timed = {str(work.action): (work.start_ms, work.end_ms) for work in play_in_time(caption())}
    assert timed == {"0F": (0, 2), "1F": (2, 3), "2F": (3, 4), "2B": (4, 6), "1B": (6, 8), "0B": (8, 12)}
    assert plan(made_for, SLICES).slices[-1].end_ms == 12


def test_a_program_is_a_document(tmp_path: Path) -> None:
    program = caption()
    write_document(program, tmp_path / "program.json")
    assert read_program(tmp_path / "program.json") == program
    told = describe_waves(program)
    assert "slice 2: t/text, layers 1-1, ranks 2, tensor 1 x data 1" in told
    assert "reduction 0: 3 layers over ranks 0-1" in told
    moved = [number for number, link in enumerate(program.links) if not program.in_place(link)]
    assert moved
    assert all(f"\nlink {number}: slice " in told for number in moved)


def test_a_plan_of_the_planner_compiles_in_any_phases_and_holds_together() -> None:
    for phases in ("fused", "forward_backward"):
        made_for = problem_from_operators(
            multitask_clip.clip4().operators,
            Cluster(devices=16, devices_per_node=8, intra_node_bytes_per_s=1e11, inter_node_bytes_per_s=1e10),
            phases=phases,  # type: ignore[arg-type]
        )
        made = solver_plan.plan(made_for, heuristic="spindle", deterministic=True, time_limit_s=1.0)
        assert isinstance(made, WavefrontPlan)
        program = compile_waves(made_for, made)
        # its own order, without waiting for a device that the plan gives to another, is no later than the plan
        latest = max(work.end_ms for work in play_in_time(program))
        if phases == "forward_backward":
            assert made.predicted is not None
            assert latest <= made.predicted.makespan_ms - made.predicted.reduction_ms + 1e-6
        assert strictly_played(program)


def strictly_played(program: WaveProgram) -> bool:
    """Play each rank's own list where an action runs only once all its ranks have come to it, and nothing else."""
    lists = [program.actions_of(rank) for rank in range(program.world_size)]
    at = [0] * len(lists)
    done: set[WaveAction] = set()
    before = needs(program)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(lists):
            if at[rank] == len(actions):
                continue
            action = actions[at[rank]]
            ranks = program.ranks_of(action)
            there = all(at[other] < len(lists[other]) and lists[other][at[other]] == action for other in ranks)
            if there and all(each in done for each in before.get(action, ())):
                done.add(action)
                for other in ranks:
                    at[other] += 1
                progress = True
    return all(place == len(actions) for place, actions in zip(at, lists, strict=True))


def test_the_strict_play_finds_a_deadlock() -> None:
    program = caption()
    assert strictly_played(program)
    swapped = list(program.actions)
    first, second = swapped.index("1B"), swapped.index("0MOVE_B")
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert not strictly_played(dataclasses.replace(program, actions=tuple(swapped)))


def refused(made_for: WavefrontProblem, slices: Sequence[Piece], match: str) -> None:
    with pytest.raises(NotExecutableError, match=match) as caught:
        compile_waves(made_for, plan(made_for, slices))
    assert "\n" not in str(caught.value)


def test_what_running_needs_and_cannot_do_is_said() -> None:
    text: list[Piece] = [("t/text", (0, 2), [0], 0)]
    refused(problem([component("t/text", 2, batch=None)]), text, r"components\[0\].batch: found none; running needs")
    refused(
        problem([component("t/text", 2, batch=3)]), [("t/text", (0, 2), [0, 1], 1)], "3 samples of t/text do not divide"
    )
    two = [component("t/image", 2, batch=4), component("t/text", 2)]
    refused(problem(two, EDGE), SLICES, r"edges\[0\]: t/image takes 4 samples and t/text 8")
    refused(problem(two), SLICES, "task t: its loss takes 4 samples of t/image and 8 of t/text")
    frozen = [component("t/image", 2), component("t/text", 2, frozen=True)]
    refused(problem(frozen, EDGE), SLICES, "t/image is trained but t/text behind it has no backward")
    modes = component("t/text", 2).modes
    assert modes is not None
    half = dataclasses.replace(CAPTION[1], modes=(dataclasses.replace(modes[0], backward_ms=0.0), *modes[1:]))
    refused(problem([half]), [("t/text", (0, 2), [0, 1], 1)], "a backward_ms of 0 in some only")
    expert = Mode(devices=2, forward_ms=1.0, backward_ms=2.0, degrees={"expert_parallel": 2})
    refused(
        problem([dataclasses.replace(CAPTION[1], modes=(expert,))]),
        [("t/text", (0, 2), [0, 1], 0)],
        "has expert_parallel 2, which is not built",
    )


def test_plans_that_do_not_belong_or_hold_are_refused() -> None:
    made_for = problem(CAPTION, EDGE)
    with pytest.raises(PlanMismatchError):
        compile_waves(problem(CAPTION, EDGE, devices=8), plan(made_for, SLICES))
    with pytest.raises(InvalidPlanError, match="t/text"):
        compile_waves(made_for, plan(made_for, SLICES[:2]))


def test_layer_times_without_modes_are_replicas() -> None:
    plain = Component(name="t/x", task="t", layers=2, layer_ms={"1": 3.0, "2": 3.0}, batch=8)
    made_for = problem([plain])
    program = compile_waves(made_for, plan(made_for, [("t/x", (0, 2), [1, 0], None)]))
    assert (program.slices[0].devices, program.slices[0].data_parallel) == ((0, 1), 2)
    assert (program.slices[0].forward_ms, program.slices[0].backward_ms) == pytest.approx((2.0, 4.0))


def changed(program: WaveProgram, **parts: object) -> str:
    with pytest.raises(NotExecutableError, match="the program cannot run: ") as caught:
        verify_waves(dataclasses.replace(program, **parts))  # type: ignore[arg-type]
    return str(caught.value)


def test_programs_that_do_not_hold_together_are_refused() -> None:
    program = caption()
    verify_waves(program)
    actions = program.actions
    assert "0F stands 0 times" in changed(program, actions=actions[1:])
    assert "0F stands 2 times" in changed(program, actions=("0F", *actions))
    assert "9F is no action" in changed(program, actions=("9F", *actions))
    assert "1F stands before 0F" in changed(program, actions=(actions[1], actions[0], *actions[2:]))
    late = (*actions[:-2], actions[-1], actions[-2])
    assert "weights updated before that" in changed(program, actions=late)
    assert "not summed once" in changed(program, reductions=(), actions=tuple(a for a in actions if "REDUCE" not in a))
    wrong = Reduction(group=None, layers=program.reductions[0].layers, tensor_rank=0)
    assert "not summed once over the ranks [0, 1]" in changed(program, reductions=(wrong,))
    assert "there are 0 links" in changed(program, links=program.links[1:])
    assert "there are 2 links" in changed(program, links=(*program.links, program.links[0]))
    short = dataclasses.replace(program.links[0], forward=program.links[0].forward[:1])
    assert "on link 0, rank 2 misses or repeats rows" in changed(program, links=(short, *program.links[1:]))
    assert "there is no rank 2" in changed(program, world_size=2)
    layers = dataclasses.replace(program.slices[0], layers=(0, 1))
    assert "no slice runs layer 1 of t/image" in changed(program, slices=(layers, *program.slices[1:]))
    backwards = dataclasses.replace(program.slices[0], devices=(1, 0))
    assert "not increasing" in changed(program, slices=(backwards, *program.slices[1:]))


def test_every_action_has_its_text() -> None:
    for kind, number in itertools.product(WaveActionKind, (0, 17)):
        assert parse_wave_action(str(WaveAction(kind, number))) == WaveAction(kind, number)


def test_kinds_that_do_not_match_or_run_are_refused(tmp_path: Path) -> None:
    from tests.execution import cases as pipelines

    chain = pipelines.problem(["a", "b"], 1)
    made = pipelines.plan(chain, [pipelines.stage((0, 2), [0])], 8)
    waves = problem(CAPTION, EDGE)
    with pytest.raises(PlanMismatchError):
        compile_plan(waves, made)
    with pytest.raises(InputError, match="the plan is of kind parallelism, the problem of kind wavefront"):
        compile_plan(waves, dataclasses.replace(made, problem_digest=None))
    offload = tmp_path / "offload.json"
    offload.write_text(
        '{"format": "solver-plan/problem", "version": 1, "kind": "offload", "layers": [{"name": "a", "parameters": 1, '
        '"forward_ms": 1.0, "backward_ms": 1.0}], "rates": {"cpu_update_parameters_per_s": 1.0, '
        '"gpu_update_parameters_per_s": 1.0, "d2h_bytes_per_s": 1.0, "h2d_bytes_per_s": 1.0}, "bytes_per_parameter": '
        '{"gradient": 2, "weight": 2, "optimizer_state": 12}, "gpu_state_bytes": 0, "staging_bytes": 0, '
        '"chunks_per_layer": 1, "clip_gradients": false}'
    )
    write_document(plan(waves, SLICES), tmp_path / "plan.json")
    with pytest.raises(
        InputError, match=r"found a plan of kind wavefront; .*offload\.json is a problem of kind offload"
    ):
        read_problem_and_plan(offload, tmp_path / "plan.json")
    updates = tmp_path / "updates.json"
    write_document(solver_plan.plan(read_problem(offload), heuristic="cpu_edf"), updates)
    with pytest.raises(InputError, match=r"offload\.json: found kind offload, which has no program; run it as it is"):
        read_problem_and_plan(offload, updates)


def test_compiling_imports_no_torch(tmp_path: Path) -> None:
    made_for = problem(CAPTION, EDGE)
    write_document(made_for, tmp_path / "problem.json")
    write_document(plan(made_for, SLICES), tmp_path / "plan.json")
    code = (
        "import sys; from solver_plan.cli import main; "
        f"code = main(['compile', {str(tmp_path / 'problem.json')!r}, {str(tmp_path / 'plan.json')!r}, '--out', '-']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == document_text(caption())
