"""Running a plan: refusals before anything starts, data, measurements, trace, and failures of processes."""

import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from solver_plan.errors import InputError, InvalidPlanError, NotExecutableError, PlanMismatchError, RunFailedError
from solver_plan.execution import run as running
from solver_plan.execution.actions import COMPUTATIONS
from solver_plan.execution.comparison import comparison_table
from solver_plan.execution.compile import compile_plan
from solver_plan.execution.dry_run import dry_run
from solver_plan.execution.executor import Executor
from solver_plan.execution.launch import run_local
from solver_plan.execution.model import Batch, Model, Values, boundary_shapes, model_of_modules
from solver_plan.execution.run import RunReport, Training, run
from solver_plan.parallelism.plan import Layout, ParallelismPlan
from tests.execution.cases import plan, problem, stage
from tests.execution.small_models import names, transformer

MODEL = transformer(2)
FOUR = problem(names(MODEL), 4)
PLAN = plan(FOUR, [stage((0, 4), [0, 1]), stage((4, 8), [2, 3])], 2)
ONE_STEP = Training(steps=1)


def refused(expected: type[Exception], match: str, **changed: object) -> None:
    """Assert that a run is refused in this process, before one is started."""

    def started(*arguments: object, **named: object) -> list[object]:
        raise AssertionError("processes were started")

    given: dict[str, object] = {"problem": FOUR, "plan": PLAN, "model": MODEL, "local": 4, **changed}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "run_local", started)
        with pytest.raises(expected, match=match) as caught:
            run(given["problem"], given["plan"], ONE_STEP, model=given["model"], local=given["local"])  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_refusals_before_anything_starts() -> None:
    refused(NotExecutableError, "the plan has 4 ranks, found 3 processes", local=3)
    refused(InputError, "no processes; start 4 under torchrun", local=None)
    refused(PlanMismatchError, "was made for problem", problem=problem(names(MODEL), 4, global_batch=16))
    refused(PlanMismatchError, "written by hand", plan=dataclasses.replace(PLAN, problem_digest=None))
    refused(InvalidPlanError, "ends at 4", plan=plan(FOUR, [stage((0, 4), range(4))], 4))
    refused(NotExecutableError, r"operators\[7\]: planned 'head', the model has 'attention2'", model=transformer(3))
    shorter = dataclasses.replace(MODEL, layers=MODEL.layers[:-1])
    refused(NotExecutableError, "planned 8, the model has 7", model=shorter)
    split = plan(FOUR, [stage((0, 8), range(4), 4)], 4)
    narrow = dataclasses.replace(
        MODEL, layers=tuple(dataclasses.replace(layer, tensor_parallel=lambda t, p: None) for layer in MODEL.layers)
    )
    refused(NotExecutableError, "'embed' is not built for tensor parallel degree 4", plan=split, model=narrow)
    refused(NotExecutableError, "the model shares the weights of 'embed'", model=transformer(2, tied=True))
    tied = problem(names(MODEL), 4, shared={7: "embed"})
    refused(NotExecutableError, "operator 'embed' does not", problem=tied, plan=plan(tied, PLAN.stages, 2))
    refused(InputError, "the problem names none", model=None)


def test_world_size_of_torchrun_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    refused(NotExecutableError, "the plan has 4 ranks, found 8 processes", local=None)


def test_executor_refuses_on_every_rank_before_groups() -> None:
    program = compile_plan(FOUR, PLAN)

    def attempt(rank: int) -> str:
        try:
            Executor(program, MODEL)
        except NotExecutableError as error:
            return str(error)
        return "accepted"

    assert set(run_local(attempt, 2, timeout_s=60)) == {"world size: the plan has 4 ranks, found 2 processes; start 4"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunReport, Path]:
    trace = tmp_path_factory.mktemp("run") / "trace.json"
    recomputed = [stage((0, 4), [0, 1], recompute=[(1, 4)]), stage((4, 8), [2, 3])]
    return run(FOUR, plan(FOUR, recomputed, 2), Training(steps=2), model=MODEL, local=4, trace=trace), trace


def test_measurements_beside_predictions(report: tuple[RunReport, Path]) -> None:
    found = report[0]
    assert len(found.losses) == 2
    assert all(len({rank.steps[step].loss for rank in found.reports}) == 1 for step in range(2))
    first, second = found.comparison
    assert first.measured_ms > 0
    assert second.measured_bytes > 0
    assert comparison_table(found.comparison).count("\n") == 2


def test_recomputation_keeps_the_input_alone() -> None:
    model = own_model(2)
    made_for = problem(names(model), 1, global_batch=4)
    held = {}
    for recompute in ([], [(0, 2)]):
        made = plan(made_for, [stage((0, 2), [0], recompute=recompute)], 4)
        found = run(made_for, made, ONE_STEP, model=model, local=1)
        held[len(recompute)] = found.reports[0].activation_bytes
    # 4 samples of 8 numbers of 4 bytes: the input, and the output of each tanh (the first is the second layer's input)
    assert held == {0: 3 * 128, 1: 128}


def test_memory_counts_what_is_held(report: tuple[RunReport, Path]) -> None:
    found = report[0]
    parameters = sum(p.numel() for layer in MODEL.layers[:4] for p in layer.build().parameters())
    # weight, gradient, two moments, in 4 bytes each; and the step count of each parameter
    assert 16 * parameters <= found.reports[0].state_bytes <= 16 * parameters + 200
    whole = run(FOUR, PLAN, ONE_STEP, model=MODEL, local=4)
    assert found.reports[0].activation_bytes < whole.reports[0].activation_bytes
    assert found.reports[2].activation_bytes == whole.reports[2].activation_bytes


def test_sharding_shrinks_what_is_held() -> None:
    """In 32 bit, where FSDP reduces in another way than in 64; losses are those of replicas all the same."""
    held: list[tuple[int, int]] = []
    losses: list[tuple[float, ...]] = []
    for level in range(4):
        sharded = plan(FOUR, [stage((0, 8), range(4), sharding=level)], 4)
        found = run(FOUR, sharded, Training(steps=2), model=MODEL, local=4)
        held.append((found.reports[0].state_bytes, found.reports[0].peak_bytes))
        losses.append(found.losses)
    replicated, one, two, three = held
    assert one[0] == two[0] == three[0] < 0.3 * replicated[0]
    assert replicated[1] > one[1] >= two[1]
    assert three[1] > three[0]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def test_trace_has_planned_and_executed_order(report: tuple[RunReport, Path]) -> None:
    found, path = report
    events = json.loads(path.read_text())["traceEvents"]
    for rank in range(4):
        lanes: dict[int, list[str]] = {0: [], 1: []}
        for event in sorted((e for e in events if e["ph"] == "X" and e["pid"] == rank), key=lambda e: e["ts"]):
            lanes[event["tid"]].append(event["name"])
        planned = [str(action) for action in found.program.actions_of(rank) if action.kind in COMPUTATIONS]
        assert lanes[0] == planned * 2
        assert [name for name in lanes[1] if name in planned] == planned * 2
        assert lanes[1][-1].endswith("UPDATE")


class Counted(nn.Module):
    """Counts its forwards, and keeps something for the backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.runs = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.linear(values).tanh()


def own_model(count: int = 6) -> Model:
    """A user's own list of layers, each called with and returning one tensor."""
    torch.manual_seed(3)
    modules = {f"layer{index}": Counted(8) for index in range(count)}

    def loss(outputs: Values, targets: Values) -> torch.Tensor:
        return ((outputs[0] - targets[0]) ** 2).sum()

    example = Batch((torch.randn(4, 8),), (torch.randn(4, 8),))
    return model_of_modules(modules, loss, example)


def test_exactly_the_planned_operators_are_recomputed() -> None:
    model = own_model()
    made_for = problem(names(model), 2, block_starts=(0, 3))
    stages = [stage((0, 4), [0], recompute=[(1, 4)]), stage((4, 6), [1], recompute=[(5, 6)])]
    program = compile_plan(made_for, plan(made_for, stages, 2))

    def count(rank: int) -> dict[str, int]:
        executor = Executor(program, model)
        before = {name: module.runs for name, module in executor.operators().items()}
        executor.step(model.make_batch(8, torch.Generator()))
        return {name: module.runs - before[name] for name, module in executor.operators().items()}

    first, second = run_local(count, 2, timeout_s=60)
    assert first == {"layer0": 4, "layer1": 8, "layer2": 8, "layer3": 8}
    assert second == {"layer4": 4, "layer5": 8}


def test_recomputed_once_with_a_split_backward() -> None:
    model = own_model(4)
    made_for = problem(names(model), 2, global_batch=4)
    stages = [stage((0, 2), [0]), stage((2, 4), [1], recompute=[(2, 4)])]
    program = compile_plan(made_for, plan(made_for, stages, 2, ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1W0 1I1 1W1"]))

    def count(rank: int) -> dict[str, int]:
        executor = Executor(program, model)
        before = {name: module.runs for name, module in executor.operators().items()}
        executor.step(model.make_batch(4, torch.Generator()))
        return {name: module.runs - before[name] for name, module in executor.operators().items()}

    assert run_local(count, 2, timeout_s=60)[1] == {"layer2": 4, "layer3": 4}


def two_stages(model: Model) -> tuple[object, ParallelismPlan]:
    made_for = problem(names(model), 2)
    return made_for, plan(made_for, [stage((0, 3), [0]), stage((3, 6), [1])], 2)


def test_any_data_loader_gives_the_batches() -> None:
    made_for, made = two_stages(own_model())
    rows = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 8))
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    seen = run(made_for, made, Training(steps=4, data=loader, optimizer=None), model=own_model(), local=2)  # type: ignore[arg-type]
    # two batches, read twice, and no update between
    assert seen.losses[:2] == seen.losses[2:]
    assert seen.losses[0] != seen.losses[1]


def test_data_that_ends_or_does_not_fit_is_refused() -> None:
    made_for, made = two_stages(own_model())
    with pytest.raises(InputError, match="data: 0 batches for 1 steps"):
        run(made_for, made, Training(steps=1, data=[]), model=own_model(), local=2)  # type: ignore[arg-type]
    small = [Batch((torch.randn(4, 8),), (torch.randn(4, 8),))]
    with pytest.raises(InputError, match="batch: 4 samples, the plan's global batch is 8"):
        run(made_for, made, Training(steps=1, data=small), model=own_model(), local=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="steps: found 0"):
        run(made_for, made, Training(steps=0), model=own_model(), local=2)  # type: ignore[arg-type]


def test_a_process_that_ends_early_is_named() -> None:
    def leave(rank: int) -> None:
        if rank == 1:
            os._exit(3)
        torch.distributed.barrier()

    with pytest.raises(RunFailedError, match="rank 1 was killed or crashed"):
        run_local(leave, 2, timeout_s=30, group_timeout_s=20)


def test_a_process_that_fails_says_why() -> None:
    def fail(rank: int) -> None:
        raise ValueError(f"out of luck on {rank}")

    with pytest.raises(RunFailedError, match="ValueError: out of luck"):
        run_local(fail, 1, timeout_s=30)


class Broken(nn.Module):
    """Raises on tensors that have storage: in the forward, or in the backward."""

    def __init__(self, forward: bool) -> None:
        super().__init__()
        self.fails_forward = forward

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        def fail(gradient: torch.Tensor) -> None:
            raise ArithmeticError("this module is broken")

        if not values.is_meta:
            if self.fails_forward:
                fail(values)
            values.register_hook(fail)
        return values * 1


@pytest.mark.parametrize(("forward", "action"), [(True, "1F0"), (False, "1B0")])
def test_a_module_that_raises_is_named_by_its_action(forward: bool, action: str) -> None:
    model = own_model()
    layers = (*model.layers[:4], dataclasses.replace(model.layers[4], build=lambda: Broken(forward)), model.layers[5])
    made_for, made = two_stages(model)
    with pytest.raises(RunFailedError) as caught:
        run(made_for, made, ONE_STEP, model=dataclasses.replace(model, layers=layers), local=2)  # type: ignore[arg-type]
    assert f"rank 1 failed at step 1, {action}: ArithmeticError: this module is broken; all" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert any("Traceback" in note for note in caught.value.__notes__)


def test_a_module_that_cannot_be_built_is_refused_by_all_ranks() -> None:
    def build() -> nn.Module:
        raise ArithmeticError("no such width")

    model = own_model()
    layers = (*model.layers[:4], dataclasses.replace(model.layers[4], build=build), model.layers[5])
    program = compile_plan(*two_stages(model))  # type: ignore[arg-type]

    def attempt(rank: int) -> str:
        try:
            Executor(program, dataclasses.replace(model, layers=layers))
        except InputError as error:
            return str(error)
        return "accepted"

    first, second = run_local(attempt, 2, timeout_s=60)
    assert first == second
    assert first.startswith("operator 'layer4': its module raised ArithmeticError: no such width; ")


def test_data_that_cannot_be_made_is_refused_by_all_ranks() -> None:
    def make_batch(samples: int, generator: torch.Generator) -> Batch:
        raise ArithmeticError("no such data")

    model = dataclasses.replace(own_model(), make_batch=make_batch)
    with pytest.raises(InputError, match="`make_batch` raised ArithmeticError: no such data; correct"):
        boundary_shapes(model, torch.float32)


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    model = dataclasses.replace(own_model(), loss=lambda outputs, targets: outputs[0] - targets[0])
    with pytest.raises(InputError, match=r"^loss: found a tensor of shape \(.+\); return a tensor of one number"):
        run(*two_stages(model), Training(steps=1, timeout_s=60), model=model, local=2)  # type: ignore[arg-type]


def test_a_batch_of_another_size_is_refused_by_all_ranks() -> None:
    model = own_model()
    program = compile_plan(*two_stages(model))  # type: ignore[arg-type]

    def attempt(rank: int) -> str:
        executor = Executor(program, model)
        targets_are_short = Batch((torch.randn(8, 8),), (torch.randn(4, 8),))
        try:
            executor.step(targets_are_short)
        except InputError as error:
            return str(error)
        return "accepted"

    first, second = run_local(attempt, 2, timeout_s=60)
    assert first == second
    assert first.startswith("batch: 4 samples")


def test_time_of_many_steps_is_no_limit_of_the_system() -> None:
    assert run_local(lambda rank: rank, 1, timeout_s=1e9) == [0]


def test_processes_end_with_the_one_that_started_them() -> None:
    """Killed outright, it can end nobody itself."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)

    def stay(rank: int) -> None:
        theirs.send(os.getpid())
        time.sleep(120)

    parent = multiprocessing.get_context("fork").Process(target=run_local, args=(stay, 1))
    parent.start()
    theirs.close()
    assert ours.poll(60)
    ours.recv()
    parent.kill()
    parent.join()
    # the last holder of the other end is the process itself
    assert ours.poll(60)
    with pytest.raises(EOFError):
        ours.recv()


def test_processes_that_hang_are_ended() -> None:
    began = time.monotonic()
    with pytest.raises(RunFailedError, match=r"ranks \[0, 1\] did not end in time"):
        run_local(lambda rank: time.sleep(60), 2, timeout_s=2)
    assert time.monotonic() - began < 20


def test_dry_run_of_a_thousand_ranks() -> None:
    large = problem([f"op{index}" for index in range(128)], 1024, global_batch=64)
    degrees: Sequence[tuple[int, int]] = [(4, 16) if index % 2 else (8, 8) for index in range(16)]
    with_degrees = _with_degrees(large, degrees)
    program = compile_plan(*with_degrees)
    assert program.world_size == 1024
    assert len(program.groups) == 8 * (8 + 8) + 8 * (16 + 4)
    first, last = dry_run(program, (0, 1023))
    assert first.groups_joined == (tuple(range(8)), tuple(range(0, 64, 8)))
    assert first.meshes == ((0, 0, 8, 8),)
    assert last.groups_joined == (tuple(range(1020, 1024)), tuple(range(963, 1024, 4)))
    assert last.meshes == ((15, 0, 16, 4),)


def _with_degrees(large: object, degrees: Sequence[tuple[int, int]]) -> tuple[object, ParallelismPlan]:
    """Profile the degrees of a large plan, and write it."""
    assert isinstance(large, type(FOUR))
    some = large.profiles["any"][0]
    profiles = tuple(
        dataclasses.replace(some, batch=16 // d, tensor_parallel=t, partition=0) for t, d in dict.fromkeys(degrees)
    )
    wide = dataclasses.replace(large, profiles={"any": profiles})
    stages = [
        stage(
            (8 * index, 8 * index + 8),
            range(64 * index, 64 * index + 64),
            layout=[Layout(operators=(8 * index, 8 * index + 8), tensor_parallel=t, data_parallel=d, partition=0)],
        )
        for index, (t, d) in enumerate(degrees)
    ]
    return wide, plan(wide, stages, 16)
