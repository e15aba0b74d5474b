"""Faults: a rank that dies, stalls or fails ends the run on all, is named, and a restart trains as if undisturbed."""

import dataclasses
import errno
import logging
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from solver_plan.errors import InputError, OutputError, RunFailedError
from solver_plan.execution import checkpoint
from solver_plan.execution import watchdog as watchdog_module
from solver_plan.execution.activity import Activity
from solver_plan.execution.checkpoint_folder import Checkpoints, last_whole
from solver_plan.execution.comparison import Step
from solver_plan.execution.model import Batch, Layer, Model
from solver_plan.execution.run import RunReport, Training, run
from solver_plan.execution.watchdog import Watchdog
from tests.execution.cases import plan, problem, stage
from tests.execution.small_models import names

STALL_TIMEOUT_S = 4.0
"""Where a rank stalls; no other step takes so long, however busy the machine is."""


class Troubled(nn.Module):
    """A layer in which something happens at a certain forward, once, in the backward or forward."""

    def __init__(self, trouble: Callable[[], None] | None, at: int, backward: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.trouble, self.at, self.backward, self.forwards = trouble, at, backward, 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(values)
        if not values.is_meta:
            self.forwards += 1
            if self.trouble is not None and self.forwards == self.at:
                trouble = self.trouble
                if self.backward:
                    outputs.register_hook(lambda gradient: trouble())
                else:
                    trouble()
        return outputs


def model(trouble: Callable[[], None] | None = None, at: int = 0, *, layer: int = 2, backward: bool = False) -> Model:
    layers = tuple(
        Layer(f"layer{index}", lambda index=index: Troubled(trouble if index == layer else None, at, backward))  # type: ignore[misc]
        for index in range(4)
    )

    def batch(samples: int, generator: torch.Generator) -> Batch:
        return Batch(*(((torch.randn(samples, 8, generator=generator),)) for _ in range(2)))

    return Model(layers, lambda outputs, targets: ((outputs[0] - targets[0]) ** 2).sum(), batch)


TWO = problem(names(model()), 2)
TWO_STAGES = plan(TWO, [stage((0, 2), [0]), stage((2, 4), [1])], 4)
"""Two micro-batches a step: forwards 1 and 2 are those of step 1."""
FOUR = problem(names(model()), 4)
TEAMS = plan(FOUR, [stage((0, 2), [0, 1], sharding=3), stage((2, 4), [2, 3], sharding=3)], 4)


def train(
    modules: Model, steps: int = 4, folder: Path | None = None, *, restarts: int = 0, **changed: object
) -> RunReport:
    """Train on two ranks, saving every step."""
    checkpoints = None if folder is None else Checkpoints(folder, every=1)
    training = Training(steps=steps, timeout_s=60, checkpoints=checkpoints)
    training = dataclasses.replace(training, **changed)  # type: ignore[arg-type]
    return run(TWO, TWO_STAGES, training, model=modules, local=2, restarts=restarts)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stalled() -> None:
    time.sleep(100)


def failed() -> None:
    raise ArithmeticError("this layer is broken")


@pytest.mark.parametrize(
    ("trouble", "layer", "backward", "message", "timeout_s"),
    [
        (killed, 2, False, r"rank 1 was killed or crashed \(SIGKILL\) at step 2, 1F1; all were ended", 300.0),
        (killed, 0, True, r"rank 0 was killed or crashed \(SIGKILL\) at step 2, 0B1; all were ended", 300.0),
        (
            failed,
            2,
            True,
            r"rank 1 failed at step 2, 1B1: ArithmeticError: this layer is broken; all were ended",
            300.0,
        ),
        (stalled, 2, False, r"rank 1 stalled: for \d+ s at step 2, 1F1, timeout 4 s", STALL_TIMEOUT_S),
        (stalled, 0, True, r"rank 0 stalled: for \d+ s at step 2, 0B1, timeout 4 s", STALL_TIMEOUT_S),
        (stopped, 2, False, r"rank 1 does not answer: it died, is stopped or .* last seen at ", STALL_TIMEOUT_S),
    ],
)
def test_a_rank_that_ends_or_stalls_ends_all_and_is_named(
    trouble: Callable[[], None], layer: int, backward: bool, message: str, timeout_s: float
) -> None:
    began = time.monotonic()
    with pytest.raises(RunFailedError, match=message) as caught:
        train(model(trouble, 4, layer=layer, backward=backward), timeout_s=timeout_s)
    # long before the stall ends, or the timeout of those that need none
    assert time.monotonic() - began < 60
    assert "\n" not in str(caught.value)


def test_a_stalled_replica_is_told_from_those_that_wait_for_it_in_a_collective() -> None:
    def stalled_on_three() -> None:
        if torch.distributed.get_rank() == 3:
            stalled()

    training = Training(steps=4, timeout_s=STALL_TIMEOUT_S)
    with pytest.raises(RunFailedError, match=r"rank 3 stalled: for \d+ s at step 2, 1F0, timeout 4 s"):
        run(FOUR, TEAMS, training, model=model(stalled_on_three, 3), local=4)


def test_a_rank_that_nobody_waits_for_stalls(tmp_path: Path) -> None:
    def rows() -> Iterator[Batch]:
        yield model().make_batch(8, torch.Generator().manual_seed(0))
        stalled()

    alone = problem(names(model()), 1)
    training = Training(steps=4, timeout_s=1, data=rows())
    with pytest.raises(RunFailedError, match=r"rank 0 stalled: for \d+ s at step 2, reading data, timeout 1 s"):
        run(alone, plan(alone, [stage((0, 4), [0])], 4), training, model=model(), local=1)


@pytest.mark.parametrize(
    ("beats", "message"),
    [
        (("waits 8", "computes 9"), "rank 2 stalled: for 9 s at step 1, B, timeout 10 s; all were ended"),
        (("computes 9", "backward 9"), "rank 1 stalled: for 9 s at step 1, A, timeout 10 s; all were ended"),
        (("backward 7", "waits 9"), "rank 1 stalled: for 7 s at step 1, A, timeout 10 s; all were ended"),
        (("waits 9", "computes 1"), "rank 0 waited at step 1, C for others that work; raise the timeout: timeout 10 s"),
        (("waits 9", "waits 8"), "the ranks wait for each other (rank 0 at step 1, C; rank 1 at step 1, A; rank 2 at "),
        (
            ("waits 9", "silent 8"),
            "rank 2 does not answer: it died, is stopped or cannot be reached; last seen at step",
        ),
        (
            ("silent 9", "silent 8"),
            "rank 1 does not answer (nor do 1 others): it died, is stopped or cannot be ",
        ),
        (("left 9", "waits 8"), None),
    ],
)
def test_the_verdict_on_a_timeout(monkeypatch: pytest.MonkeyPatch, beats: tuple[str, str], message: str | None) -> None:
    """As rank 0 of three finds it, whose peers say the same at every beat."""
    watchdog = Watchdog(torch.distributed.HashStore(), 0, 3, 10.0, lambda: None)
    watchdog.beat_s, watchdog.patience_s = 0.05, 0.5
    number = 0

    def beat_of_others() -> None:
        nonlocal number
        number += 1
        for rank, (beat, activity) in enumerate(zip(beats, "AB", strict=True), 1):
            state, _, lasts_s = beat.partition(" ")
            stays = state in ("silent", "left")
            watchdog.store.set(f"beat/{rank}", f"{0 if stays else number} {state} {lasts_s}.0 step 1, {activity}")
            if state == "left":
                watchdog.store.set(f"left/{rank}", "1")

    monkeypatch.setattr(watchdog, "_beat", beat_of_others)
    monkeypatch.setattr(watchdog_module, "ACTIVITY", Activity())
    watchdog_module.ACTIVITY.begins("C", step=1)
    beat_of_others()
    found = watchdog.verdict(RuntimeError("[gloo] Timed out waiting 10000ms for recv operation to complete"))
    assert found is None if message is None else found is not None and found.message.startswith(message)
    assert watchdog.is_speaker == (message is not None)


class Losses:
    """The loss of each step, written by the rank that is told; what is trained twice must come out the same."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.file.touch()

    def tell(self, number: int, step: Step) -> None:
        with self.file.open("a") as stream:
            print(number, step.loss.hex(), file=stream, flush=True)

    def read(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for line in self.file.read_text().splitlines():
            number, loss = line.split()
            assert found.setdefault(int(number), loss) == loss, number
        return found


def once(trouble: Callable[[], None], flag: Path) -> Callable[[], None]:
    """Trouble at the first attempt."""

    def at_first() -> None:
        if not flag.exists():
            flag.touch()
            trouble()

    return at_first


@pytest.mark.parametrize("trouble", [killed, stalled, failed])
def test_a_restart_trains_as_if_undisturbed(
    tmp_path: Path, trouble: Callable[[], None], undisturbed: dict[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    disturbed = Losses(tmp_path / "disturbed")
    troubled = model(once(trouble, tmp_path / "flag"), 6)
    timeout_s = STALL_TIMEOUT_S if trouble is stalled else 60.0
    report = train(troubled, folder=tmp_path / "saved", restarts=1, on_step=disturbed.tell, timeout_s=timeout_s)
    assert report.first_step == 2
    assert disturbed.read() == undisturbed
    assert len(report.losses) == 2
    assert "; restart 1 of 1" in caplog.text


def on_rank(rank: int, trouble: Callable[[], None], flag: Path, at: int = 1) -> Callable[..., None]:
    """Trouble at the so manyth call on a rank, once."""
    calls = 0
    strike = once(trouble, flag)

    def count(*arguments: object, **named: object) -> None:
        nonlocal calls
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == rank:
            calls += 1
            if calls == at:
                strike()

    return count


def before(patch: pytest.MonkeyPatch, owner: object, name: str, first: Callable[..., None]) -> None:
    """Let something happen before each call of a function; in the processes forked from here too."""
    original = getattr(owner, name)

    def both(*arguments: object, **named: object) -> object:
        first()
        return original(*arguments, **named)

    patch.setattr(owner, name, both)


CHANCE = random.Random(11)
MOMENTS = [(CHANCE.randrange(2), CHANCE.randrange(1, 48)) for _ in range(4)]
"""(rank, how many activities it has begun): of some 50 in four steps."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    losses = Losses(tmp_path_factory.mktemp("undisturbed") / "losses")
    train(model(), folder=losses.file.parent / "saved", on_step=losses.tell)
    return losses.read()


@pytest.mark.parametrize(("rank", "moment"), MOMENTS)
def test_a_rank_killed_at_any_moment_costs_no_more_than_the_steps_since_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[int, str], rank: int, moment: int
) -> None:
    before(monkeypatch, Activity, "begins", on_rank(rank, killed, tmp_path / "flag", moment))
    losses = Losses(tmp_path / "losses")
    train(model(), folder=tmp_path / "saved", restarts=1, on_step=losses.tell)
    assert (tmp_path / "flag").exists()
    assert losses.read() == undisturbed


@pytest.mark.parametrize(
    ("owner", "name", "rank", "at"),
    [
        (os, "fsync", 1, 1),  # its own file, in the first checkpoint
        (os, "fsync", 0, 2),  # the metadata, or the record
        (Path, "rename", 0, 2),  # the second checkpoint is complete and has no name yet
        (checkpoint, "prune", 0, 3),  # the third has its name, the first is not deleted
    ],
)
def test_a_checkpoint_is_whole_or_absent_wherever_a_rank_is_killed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[int, str],
    owner: object,
    name: str,
    rank: int,
    at: int,
) -> None:
    saved, losses = tmp_path / "saved", Losses(tmp_path / "losses")
    with monkeypatch.context() as patch:
        before(patch, owner, name, on_rank(rank, killed, tmp_path / "flag", at))
        with pytest.raises(
            RunFailedError, match=rf"rank {rank} was killed or crashed \(SIGKILL\) at step ., saving a che"
        ):
            train(model(), folder=saved, on_step=losses.tell)
    assert [path.name for path in saved.iterdir() if not path.name.startswith("step-")] == []
    last = last_whole(saved)
    begun = 0 if last is None else last[1].step
    assert train(model(), folder=saved, on_step=losses.tell).first_step == begun
    assert losses.read() == undisturbed


def test_a_disk_that_is_full_is_told_once_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before(monkeypatch, os, "fsync", on_rank(1, full, tmp_path / "flag"))
    with pytest.raises(
        OutputError, match=r"cannot write the checkpoint \(rank 1: OSError: .*No space left on device\)"
    ) as caught:
        train(model(), folder=tmp_path / "saved")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "saved").iterdir()) == []


def test_restarts_are_counted_and_those_of_torchrun_are_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunFailedError, match="rank 1 failed at step 1, 1F1: ArithmeticError"):
        train(model(failed, 2), folder=tmp_path, restarts=2)
    assert "restart 2 of 2" in caplog.text
    with pytest.raises(InputError, match="give it its own --max-restarts"):
        run(TWO, TWO_STAGES, Training(steps=1), model=model(), restarts=1)


def test_a_loss_that_is_not_finite_is_told_and_not_saved(tmp_path: Path) -> None:
    rows = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0))
    rows[2, 5] = math.inf
    # the rank that tells it is another process
    handler = logging.FileHandler(tmp_path / "log")
    logger = logging.getLogger("solver_plan.execution.run")
    logger.addHandler(handler)
    try:
        report = train(model(), folder=tmp_path / "saved", data=[(row, row) for row in rows], optimizer=None)
    finally:
        logger.removeHandler(handler)
    assert math.isnan(report.losses[2])
    told = (tmp_path / "log").read_text()
    assert told == "step 3: the loss is nan; nothing is saved until it is finite again\n"
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-00000002", "step-00000004"]
