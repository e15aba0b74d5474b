"""Checkpoints: saved under one plan, taken up under another; whole or absent; what does not fit is refused."""

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.distributed.checkpoint import load

from solver_plan.errors import CheckpointError, InputError, NotExecutableError, OutputError
from solver_plan.execution.checkpoint import Position
from solver_plan.execution.checkpoint_folder import Checkpoints, last_whole
from solver_plan.execution.checkpoint_state import Held, state_to_save
from solver_plan.execution.compile import compile_plan
from solver_plan.execution.model import Batch, Layer, Model
from solver_plan.execution.run import Training, run, whole_batches
from solver_plan.parallelism.plan import Layout, ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from tests.conftest import PROJECT
from tests.execution.cases import plan, problem, stage
from tests.execution.equality import sgd
from tests.execution.small_models import names, transformer

MODEL = transformer(2, tied=True)
SHARED = {7: "embed"}
PLANNED = tuple[ParallelismProblem, ParallelismPlan]


def on(devices: int, *stages: object, micro_batch_size: int = 2, orders: object = None) -> PLANNED:
    made_for = problem(names(MODEL), devices, shared=SHARED)
    return made_for, plan(made_for, stages, micro_batch_size, orders)  # type: ignore[arg-type]


def trained(
    planned: PLANNED, folder: Path | None, steps: int, *, model: Model = MODEL, **changed: object
) -> tuple[float, ...]:
    checkpoints = None if folder is None else Checkpoints(folder, every=1000)
    training = Training(steps=steps, dtype=torch.float64, timeout_s=60, checkpoints=checkpoints)
    training = dataclasses.replace(training, **changed)  # type: ignore[arg-type]
    return run(*planned, training, model=model, local=planned[0].cluster.devices_per_node).losses


ALONE = on(1, stage((0, 8), [0]))
PLANS = {
    "two stages of four ranks": on(4, stage((0, 3), [0, 1]), stage((3, 8), [2, 3], 2)),
    "two ranks": on(2, stage((0, 5), [0]), stage((5, 8), [1])),
    "ZeRO 1": on(4, stage((0, 8), range(4), sharding=1), micro_batch_size=4),
    "tensor parallel": on(2, stage((0, 8), [0, 1], 2)),
    "ZeRO 2 and 3": on(4, stage((0, 4), [0, 1], sharding=2), stage((4, 8), [2, 3], sharding=3)),
    "ZeRO 3 over tensor ranks": on(4, stage((0, 8), range(4), 2, sharding=3), micro_batch_size=4),
    "one rank": ALONE,
    "a layout that changes within the stage": on(
        2,
        stage(
            (0, 8),
            [0, 1],
            layout=[
                Layout(operators=(0, 4), tensor_parallel=2, data_parallel=1, partition=0),
                Layout(operators=(4, 8), tensor_parallel=1, data_parallel=2, partition=0),
            ],
        ),
    ),
    "both copies of shared weights on one rank": on(
        2,
        stage((0, 2), [0]),
        stage((2, 6), [1]),
        stage((6, 8), [0]),
        micro_batch_size=4,
        orders=["0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 1B0 1B1"],
    ),
}


def test_a_run_that_changes_its_plan_at_every_step_trains_as_if_undisturbed(tmp_path: Path) -> None:
    undisturbed = trained(ALONE, None, len(PLANS) + 1)
    found: list[float] = []
    for steps, planned in enumerate((*PLANS.values(), PLANS["two ranks"]), 1):
        found += trained(planned, tmp_path / "saved", steps)
        assert len(found) == steps
    assert found == pytest.approx(undisturbed, rel=1e-12)


class Scaled(nn.Module):
    """Weights of two rows and of none: on four ranks most hold an empty part. A buffer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)
        self.factor = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training and not values.is_meta:
            self.seen += 1
        return nn.functional.pad(self.linear(values), (0, 6)) * self.factor + values


SCALED = Model(
    tuple(Layer(f"layer{index}", Scaled) for index in range(2)),
    lambda outputs, targets: ((outputs[0] - targets[0]) ** 2).sum(),
    lambda samples, generator: Batch(
        (torch.randn(samples, 8, generator=generator),), (torch.randn(samples, 8, generator=generator),)
    ),
)


def test_parts_may_be_empty_and_buffers_are_kept(tmp_path: Path) -> None:
    def planned(devices: int, **sharding: int) -> PLANNED:
        made_for = problem(names(SCALED), devices)
        return made_for, plan(made_for, [stage((0, 2), range(devices), **sharding)], 4)

    undisturbed = trained(planned(1), None, 3, model=SCALED)
    found: list[float] = []
    for steps, made in enumerate((planned(4, sharding=3), planned(2, sharding=1), planned(1)), 1):
        found += trained(made, tmp_path, steps, model=SCALED)
    assert found == pytest.approx(undisturbed, rel=1e-12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    whole = last_whole(tmp_path)
    assert whole is not None
    seen = torch.zeros((), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load({"model/layer0/seen": seen}, checkpoint_id=whole[0], no_dist=True)
    # two micro-batches a step
    assert int(seen) == 6


def tiny(width: int = 8) -> tuple[PLANNED, Model]:
    """One rank that drops out, for what is no matter of plans."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5))

    def batch(samples: int, generator: torch.Generator) -> Batch:
        return Batch(*(((torch.randn(samples, width, generator=generator),)) for _ in range(2)))

    layers = (Layer("layer0", build), Layer("layer1", build))
    model = Model(layers, lambda outputs, targets: ((outputs[0] - targets[0]) ** 2).sum(), batch)
    made_for = problem(names(model), 1)
    return (made_for, plan(made_for, [stage((0, 2), [0])], 4)), model


def losses(folder: Path | None, steps: int, width: int = 8, every: int = 1, **changed: object) -> tuple[float, ...]:
    planned, model = tiny(width)
    checkpoints = None if folder is None else Checkpoints(folder, every=every)
    return run(
        *planned,
        dataclasses.replace(Training(steps=steps, timeout_s=30, checkpoints=checkpoints), **changed),  # type: ignore[arg-type]
        model=model,
        local=1,
    ).losses


def loader() -> torch.utils.data.DataLoader[tuple[torch.Tensor, ...]]:
    rows = torch.randn(24, 2, 8, generator=torch.Generator().manual_seed(5))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows[:, 0], rows[:, 1]), batch_size=8)


@pytest.mark.parametrize("data", [None, loader()])
def test_under_the_same_plan_dropout_and_data_go_on_as_they_were(tmp_path: Path, data: object) -> None:
    undisturbed = losses(None, 7, data=data)
    found = [loss for steps in (2, 3, 7) for loss in losses(tmp_path, steps, data=data)]
    assert tuple(found) == undisturbed
    assert losses(tmp_path, 7, data=data) == ()


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_old_checkpoints_and_remains_are_deleted(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.part").mkdir()
    (tmp_path / ".step-00000001.part" / "__0_0.distcp").write_text("half")
    (tmp_path / "notes.txt").write_text("not ours")
    losses(tmp_path, 5)
    assert saved(tmp_path) == ["notes.txt", "step-00000004", "step-00000005"]
    losses(tmp_path, 8, every=2)
    assert saved(tmp_path) == ["notes.txt", "step-00000006", "step-00000008"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damage", [lambda path: cut(path / "__0_0.distcp"), lambda path: cut(path / "checkpoint.json")]
)
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = losses(tmp_path, 3)
    damage(tmp_path / "step-00000003")
    assert losses(tmp_path, 3) == undisturbed[2:]
    assert "step-00000003" in caplog.text
    assert "going on from" in caplog.text
    assert saved(tmp_path) == ["step-00000002", "step-00000003"]


def refusal(expected: type[Exception], *arguments: object, **named: object) -> str:
    with pytest.raises(expected) as caught:
        losses(*arguments, **named)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_damaged_checkpoint_takes_no_place_of_a_whole_one(tmp_path: Path) -> None:
    planned, model = tiny()
    trained(planned, tmp_path, 1, model=model)
    (tmp_path / "step-00000009").mkdir()
    for steps in (2, 3):
        trained(planned, tmp_path, steps, model=model, checkpoints=Checkpoints(tmp_path, every=1, keep=1))
        assert saved(tmp_path) == [f"step-{steps:08d}", "step-00000009"]


def test_one_run_saves_in_a_folder_at_a_time(tmp_path: Path) -> None:
    planned, model = tiny()
    holds = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from solver_plan.execution.checkpoint_folder import FolderLock\n"
        "FolderLock(Path(sys.argv[1])).take()\n"
        "print('held', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", holds, str(tmp_path)], stdout=subprocess.PIPE, cwd=PROJECT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match=rf"another run saves there \(process {other.pid} on .+\); end it"):
            trained(planned, tmp_path, 1, model=model)
        other.kill()
    trained(planned, tmp_path, 1, model=model)
    assert saved(tmp_path) == ["step-00000001"]


def test_what_does_not_fit_is_refused_with_one_line(tmp_path: Path) -> None:
    losses(tmp_path, 2)
    one = f"{tmp_path}/step-00000002: "
    assert refusal(CheckpointError, tmp_path, 3, width=9) == (
        f"{one}a checkpoint of another model: its weight 'layer0/0.weight' has shape (8, 8), not (9, 9); "
        "choose another folder"
    )
    with pytest.raises(CheckpointError, match="of another model: it has no weight 'embed/positions'"):
        trained(ALONE, tmp_path, 3)
    assert refusal(CheckpointError, tmp_path, 3, dtype=torch.float64) == (
        f"{one}its weight 'layer0/0.weight' has type float32, this run trains in float64; "
        "run in the checkpoint's precision, or choose another folder"
    )
    assert "its run has seed 0, this one 1" in refusal(CheckpointError, tmp_path, 3, seed=1)
    assert "its run has the optimizer AdamW, this one SGD" in refusal(CheckpointError, tmp_path, 3, optimizer=sgd)
    assert f"steps: found 1, {tmp_path}/step-00000002 has 2 already" in refusal(InputError, tmp_path, 1)
    cut(tmp_path / "step-00000001" / "checkpoint.json")
    (tmp_path / "step-00000002" / ".metadata").unlink()
    assert refusal(CheckpointError, tmp_path, 3) == (
        f"{one}not a whole checkpoint, its file .metadata is missing; delete it"
    )
    with pytest.raises(InputError, match="found every 0; at least 1"):
        Checkpoints(tmp_path, every=0)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(OutputError, tmp_path / "file", 1) == (
        f"{tmp_path}/file: checkpoints need a folder, found a file; name a folder"
    )
    assert "make the folder first" in refusal(OutputError, tmp_path / "absent" / "inner", 1)


def test_a_folder_without_permission_is_refused(read_only_folder: Path) -> None:
    assert "cannot write (permission denied)" in refusal(OutputError, read_only_folder, 1)
    assert "cannot write (permission denied)" in refusal(OutputError, read_only_folder / "inner", 1)


def test_another_global_batch_takes_up_the_data_where_it_was() -> None:
    planned, _ = tiny()
    program = compile_plan(*planned)
    assert whole_batches(Position(step=3, samples=24), program) == 3
    with pytest.raises(InputError, match="trained on 20 samples, no multiple of the plan's global batch 8"):
        whole_batches(Position(step=5, samples=20), program)


def test_optimizer_state_that_cannot_be_split_is_refused() -> None:
    class Part:
        rank = 0

        def __init__(self, kept: object) -> None:
            weight = nn.Parameter(torch.zeros(2))
            self.optimizer = sgd([weight])
            self.optimizer.state[weight]["kept"] = kept
            self.tensors = [Held("layer/weight", weight)]

        def held(self) -> list[Held]:
            return self.tensors

        def seed_random(self, seed: int, step: int) -> None: ...

    assert state_to_save(Part(3))["optimizer/layer/weight/number:kept"] == 3
    with pytest.raises(NotExecutableError, match="state 'kept' of weight 'layer/weight' is a list"):
        state_to_save(Part([3]))
