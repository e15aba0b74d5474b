"""Running wavefront plans: refusals before anything starts, absent tasks, measurements, trace, failures."""

import dataclasses
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from solver_plan.cli import main
from solver_plan.documents import write_document
from solver_plan.errors import InputError, NotExecutableError, PlanMismatchError, RunFailedError
from solver_plan.execution import run as running
from solver_plan.execution.dry_run import dry_run
from solver_plan.execution.launch import run_local
from solver_plan.execution.model import Batch, Layer, Values
from solver_plan.execution.run import RunReport, Training, load_model, run
from solver_plan.execution.waves.compile import compile_waves
from solver_plan.execution.waves.executor import WaveExecutor
from solver_plan.execution.waves.model import ComponentModel, MultitaskBatch, MultitaskModel, TaskBatch
from solver_plan.execution.waves.program import WaveProgram
from tests.execution.small_models import transformer
from tests.execution.waves.cases import SAMPLES, Piece, component, plan, problem
from tests.execution.waves.small_models import WEIGHTS, model

ROOT = Path(__file__).parents[3]
COMPONENTS = {"caption/image": "image", "caption/text": "text", "pair/image": "image-pair", "pair/sound": "sound-pair"}
MODEL = model(COMPONENTS)
EDGES = [("caption/image", "caption/text")]
FOUR = problem([component(name, len(WEIGHTS[w]), weights=w) for name, w in COMPONENTS.items()], EDGES)
SLICES: list[Piece] = [
    ("caption/image", (0, 3), [0, 1], 1),
    ("pair/image", (0, 2), [2], 0),
    ("pair/sound", (0, 2), [3], 0),
    ("caption/text", (0, 2), [1, 2], 1),
    ("caption/text", (2, 3), [0], 0),
]
PLAN = plan(FOUR, SLICES)
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


def with_component(name: str, **changed: object) -> MultitaskModel:
    components = {**MODEL.components, name: dataclasses.replace(MODEL.components[name], **changed)}  # type: ignore[arg-type]
    return dataclasses.replace(MODEL, components=components)


def test_refusals_before_anything_starts() -> None:
    refused(NotExecutableError, "the plan has 4 ranks, found 3 processes", local=3)
    refused(InputError, "no processes; start 4 under torchrun", local=None)
    refused(PlanMismatchError, "written by hand", plan=dataclasses.replace(PLAN, problem_digest=None))
    refused(InputError, "the problem names none", model=None)
    refused(NotExecutableError, "found a Model for a wavefront plan; it runs a MultitaskModel", model=transformer(1))
    fewer = {name: found for name, found in MODEL.components.items() if name != "pair/sound"}
    refused(
        NotExecutableError,
        r"components\[3\]: planned 'pair/sound', the model has none",
        model=dataclasses.replace(MODEL, components=fewer),
    )
    refused(
        NotExecutableError,
        "the model has 'more', the plan does not",
        model=dataclasses.replace(MODEL, components={**MODEL.components, "more": ComponentModel("text")}),
    )
    refused(
        NotExecutableError,
        "is planned trained, in the model it is frozen",
        model=with_component("pair/image", trained=False),
    )
    refused(
        NotExecutableError,
        "planned 2 layers of 'pair/image', the model has 3",
        model=with_component("pair/image", weights="text"),
    )
    refused(NotExecutableError, "the model has no such weights", model=with_component("pair/image", weights="no"))
    refused(
        NotExecutableError,
        "share their weights in the model, the problem does not say so",
        model=with_component("pair/image", weights="sound-pair"),
    )
    shared = problem(
        [component(name, len(WEIGHTS[w]), weights=w.replace("sound", "image")) for name, w in COMPONENTS.items()], EDGES
    )
    refused(
        NotExecutableError,
        "is planned with the weights of 'pair/image', the model gives it its own",
        problem=shared,
        plan=plan(shared, SLICES),
    )
    refused(
        NotExecutableError,
        "task pair: the model has no loss for it",
        model=dataclasses.replace(MODEL, objectives={"caption": MODEL.objectives["caption"]}),
    )
    whole = {
        name: [dataclasses.replace(layer, tensor_parallel=lambda t, p: None) for layer in layers]
        for name, layers in MODEL.weights.items()
    }
    refused(
        NotExecutableError,
        r"slices\[0\]: layer 0 of 'caption/image' is not built for tensor parallel degree 2",
        plan=plan(FOUR, [("caption/image", (0, 3), [0, 1], 3), *SLICES[1:]]),
        model=dataclasses.replace(MODEL, weights=whole),
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunReport, Path]:
    trace = tmp_path_factory.mktemp("run") / "trace.json"
    whole = MODEL.make_batch({"caption": SAMPLES, "pair": SAMPLES}, torch.Generator())
    caption = {"caption": whole["caption"]}
    return run(FOUR, PLAN, Training(steps=3, data=[whole, caption, whole]), model=MODEL, local=4, trace=trace), trace


def test_each_task_has_its_loss(report: tuple[RunReport, Path]) -> None:
    steps = report[0].reports[0].steps
    assert [sorted(step.losses or ()) for step in steps] == [["caption", "pair"], ["caption"], ["caption", "pair"]]
    for step in steps:
        assert step.loss == pytest.approx(sum((step.losses or {}).values()))


def test_actions_of_an_absent_task_do_not_run(report: tuple[RunReport, Path]) -> None:
    ran = [{executed.action for rank in report[0].reports for executed in rank.steps[step].actions} for step in (0, 1)]
    assert {"1F", "1B", "2F", "2B"} <= ran[0]
    assert not {"1F", "1B", "2F", "2B"} & ran[1]
    assert {"0F", "0B", "3F", "4B", "0LOSS"} <= ran[1]


def test_measurements_beside_predictions(report: tuple[RunReport, Path]) -> None:
    found = report[0]
    assert [row.predicted_ms for row in found.comparison] == [9.0, 6.0, 6.0, 6.0, 3.0]
    assert all(row.measured_ms is not None and row.measured_ms > 0 for row in found.comparison)
    assert all(row.measured_bytes > 0 for row in found.comparison)
    lines = found.table.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["0", "caption/image", "0-2"], ["1", "pair/image", "0-1"]]
    assert lines[-1].startswith("iteration")


def test_trace_has_planned_and_executed_order(report: tuple[RunReport, Path]) -> None:
    found, path = report
    events = json.loads(path.read_text())["traceEvents"]
    for rank in range(4):
        lanes: dict[int, list[str]] = {0: [], 1: []}
        for event in sorted((e for e in events if e["ph"] == "X" and e["pid"] == rank), key=lambda e: e["ts"]):
            lanes[event["tid"]].append(event["name"])
        assert isinstance(found.program, WaveProgram)
        work = [str(action) for action in found.program.actions_of(rank) if action.kind in "FB"]
        assert lanes[0][: len(work)] == work
        assert [name for name in lanes[1] if name in work][: len(work)] == work
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names >= {"rank 0: slices 0, 4", "rank 3: slices 2"}


def attempts(program: WaveProgram, modules: MultitaskModel, given: MultitaskBatch, ranks: int = 4) -> set[str]:
    """Errors of all ranks that step on a batch."""

    def attempt(rank: int) -> str:
        executor = WaveExecutor(program, modules)
        try:
            executor.step(given)
        except InputError as error:
            return str(error)
        return "accepted"

    return set(run_local(attempt, ranks, timeout_s=60, group_timeout_s=20))


def test_batches_that_do_not_fit_are_refused_by_all_ranks() -> None:
    program = compile_waves(FOUR, PLAN)
    whole = MODEL.make_batch({"caption": SAMPLES, "pair": SAMPLES}, torch.Generator())

    def told(given: MultitaskBatch) -> str:
        (found,) = attempts(program, MODEL, given)
        return found

    assert told({}) == "batch: found no task; name at least one"
    assert told({"other": whole["pair"]}) == "batch: found task 'other'; the plan has caption, pair"
    short = TaskBatch({name: tuple(v[:4] for v in values) for name, values in whole["pair"].inputs.items()})
    assert told({"pair": short}).startswith("batch: 4 samples of task 'pair', the plan's batch is 8; ")
    assert "has tensors of shape nothing for 'pair/image', which takes [8, 3, 7]" in told({"pair": TaskBatch({})})
    wide = TaskBatch(
        {name: tuple(torch.cat([v, v], dim=1) for v in values) for name, values in whole["pair"].inputs.items()}
    )
    assert "has tensors of shape [8, 6, 7] for 'pair/image'" in told({"pair": wide})


def test_ranks_with_different_tasks_are_refused_instead_of_waiting() -> None:
    program = compile_waves(FOUR, PLAN)
    whole = MODEL.make_batch({"caption": SAMPLES, "pair": SAMPLES}, torch.Generator())

    def attempt(rank: int) -> str:
        executor = WaveExecutor(program, MODEL)
        try:
            executor.step(whole if rank else {"caption": whole["caption"]})
        except InputError as error:
            return str(error)
        return "accepted"

    (found,) = set(run_local(attempt, 4, timeout_s=60, group_timeout_s=20))
    assert found.startswith("batch: task 'pair' is there on 3 of 4 ranks; give every rank the same batches")


class Broken(nn.Module):
    """Raises on tensors that have storage."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.inner = layer.build()

    def forward(self, *values: torch.Tensor) -> Values:
        if not values[0].is_meta:
            raise ArithmeticError("this module is broken")
        return tuple(self.inner(*values))


def test_a_module_that_raises_is_named_by_its_action() -> None:
    first, last = MODEL.weights["sound-pair"]
    weights = {**MODEL.weights, "sound-pair": [first, Layer("sound-pair.1", lambda: Broken(last))]}
    with pytest.raises(RunFailedError) as caught:
        run(FOUR, PLAN, ONE_STEP, model=dataclasses.replace(MODEL, weights=weights), local=4)
    assert "rank 3 failed at step 1, 2F: ArithmeticError: this module is broken; all" in str(caught.value)


def test_what_a_model_raises_is_told_before_a_group_is_made() -> None:
    def fail(samples: object, generator: object) -> MultitaskBatch:
        raise ArithmeticError("no data")

    def enter(given: object, data: object) -> Values:
        raise ArithmeticError("no way in")

    program = compile_waves(FOUR, PLAN)

    def attempt(rank: int) -> list[str]:
        found = []
        for wrong in (
            dataclasses.replace(MODEL, make_batch=fail),
            dataclasses.replace(MODEL, make_batch=lambda samples, generator: {}),
            with_component("caption/text", enter=enter),
        ):
            try:
                WaveExecutor(program, wrong)
            except InputError as error:
                found.append(str(error))
        return found

    first, *others = run_local(attempt, 4, timeout_s=60)
    assert all(other == first for other in others)
    assert first[0].startswith("model: `make_batch` raised ArithmeticError: no data; ")
    assert first[1].startswith("model: `make_batch` made no samples of task 'caption'")
    assert first[2].startswith("component 'caption/text': its `enter` raised ArithmeticError: no way in; it is given")


def test_data_of_the_wrong_kind_is_refused() -> None:
    pipeline = [Batch((torch.randn(8, 3),), (torch.randn(8, 3),))]
    with pytest.raises(InputError, match="data: found a Batch for a wavefront plan"):
        run(FOUR, PLAN, Training(steps=1, data=pipeline), model=MODEL, local=4)


def test_tasks_joined_by_an_edge_come_together() -> None:
    joined = problem(
        [component("a/image", 3, weights="image"), component("b/text", 3, weights="text")], [("a/image", "b/text")]
    )
    program = compile_waves(joined, plan(joined, [("a/image", (0, 3), [0], 0), ("b/text", (0, 3), [1], 0)]))
    modules = model({"a/image": "image", "b/text": "text"})
    whole = modules.make_batch({"a": SAMPLES, "b": SAMPLES}, torch.Generator())
    assert attempts(program, modules, whole, 2) == {"accepted"}
    (found,) = attempts(program, modules, {"b": whole["b"]}, 2)
    assert found.startswith("batch: found one of the tasks 'a' and 'b'; ")


def test_groups_are_built_dry() -> None:
    program = compile_waves(FOUR, PLAN)
    first, last = dry_run(program, (0, 3))
    assert first.groups_created == last.groups_created == len(program.groups)
    assert first.groups_joined == ((0, 1),)
    assert last.groups_joined == ()


def test_weights_start_alike_under_every_plan() -> None:
    one = plan(FOUR, [(name, (0, len(WEIGHTS[w])), [0], 0) for name, w in COMPONENTS.items()])
    (alone,) = run_local(lambda rank: WaveExecutor(compile_waves(FOUR, one), MODEL).weights(), 1, timeout_s=60)
    for found in run_local(lambda rank: WaveExecutor(compile_waves(FOUR, PLAN), MODEL).weights(), 4, timeout_s=60):
        for name, tensors in found.items():
            for key, tensor in tensors.items():
                assert torch.equal(tensor, alone[name][key])
    assert set(alone) == {f"{name}.{n}" for name in COMPONENTS.values() for n in range(len(WEIGHTS[name]))}


def test_compile_dry_and_run_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    files = [str(tmp_path / "problem.json"), str(tmp_path / "plan.json")]
    write_document(FOUR, files[0])
    write_document(PLAN, files[1])
    out = str(tmp_path / "program.json")
    assert main(["compile", *files, "--out", out, "--dry-run", "1"]) == 0
    assert "rank 1: created" in capfd.readouterr().err
    assert main(["run", *files, "--steps", "1", "--local", "4", "--model", "models/gpt.py:tiny"]) == 2
    assert "model: found a Model for a wavefront plan" in capfd.readouterr().err
    assert isinstance(load_model("models/ofasys.py:tiny"), MultitaskModel)
