"""Processes under torchrun, and signals: restarts, what is told once, and what is left behind."""

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from solver_plan.cli import main
from solver_plan.documents import write_document
from solver_plan.execution.checkpoint_folder import last_whole
from solver_plan.execution.launch import LOOPBACK
from solver_plan.profiles.loading import load_description
from tests.execution.cases import plan, problem, stage

ROOT = Path(__file__).parents[2]


MODEL_FILE = """
import dataclasses, os, pathlib, signal, time
from models.gpt import tiny
from torch import nn

HERE = pathlib.Path(__file__).parent


class Troubled(nn.Module):
    def __init__(self, inner, trouble):
        super().__init__()
        self.inner, self.trouble, self.forwards = inner, trouble, 0

    def forward(self, *values):
        if not values[0].is_meta:
            self.forwards += 1
            flag = HERE / "flag"
            if self.trouble == "slow":
                time.sleep(0.05)
            elif self.trouble != "nothing" and self.forwards == 5 and not flag.exists():
                flag.touch()
                if self.trouble == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ArithmeticError("this layer is broken")
        return self.inner(*values)


def describe(trouble):
    described = tiny()

    def modules():
        model = described.modules()
        last = model.layers[-1]
        troubled = dataclasses.replace(last, build=lambda: Troubled(last.build(), trouble))
        return dataclasses.replace(model, layers=(*model.layers[:-1], troubled))

    return dataclasses.replace(described, modules=modules)


def healthy():
    return describe("nothing")


def killed():
    return describe("killed")


def failed():
    return describe("failed")


def slow():
    return describe("slow")
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """What to type behind `solver-plan`, for two stages of a GPT in whose last operator something happens."""
    described = load_description(f"{ROOT}/models/gpt.py:tiny")
    made_for = problem([operator.name for operator in described.operators], 2)
    write_document(made_for, tmp_path / "problem.json")
    write_document(plan(made_for, [stage((0, 12), [0]), stage((12, 29), [1])], 4), tmp_path / "plan.json")
    (tmp_path / "mine.py").write_text(MODEL_FILE)

    def words(trouble: str, steps: int, *more: str) -> list[str]:
        files = ["run", str(tmp_path / "problem.json"), str(tmp_path / "plan.json"), "--steps", str(steps)]
        saved = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "1", "--timeout", "60"]
        return [*files, "--model", f"{tmp_path}/mine.py:{trouble}", *saved, *more]

    return words


def torchrun(restarts: int, *commands: list[str]) -> str | None:
    """Run commands in turn as torchrun does, in two processes forked here; return what it says of a failure."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="tests",
        max_restarts=restarts,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        monitor_interval=0.1,
        start_method="fork",
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        elastic_launch(config, run_in_turn)(*commands)
    except ChildFailedError as failure:
        return str(failure)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return None


def run_in_turn(*commands: list[str]) -> None:
    torch.set_num_threads(1)
    # those of pytest write elsewhere
    logging.getLogger().handlers.clear()
    for words in commands:
        code = main(words)
        if code:
            sys.exit(code)


def told_losses(text: str) -> list[str]:
    return re.findall(r"^step (\d+: loss \S+),", text, re.MULTILINE)


def test_torchrun_restarts_from_the_last_checkpoint(
    tmp_path: Path, command: Callable[..., list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed = command("healthy", 4, "--checkpoint", str(tmp_path / "undisturbed"))
    assert torchrun(1, undisturbed, command("killed", 4)) is None
    assert (tmp_path / "flag").exists()
    text = capfd.readouterr().err
    assert text.count("rank 1 does not answer: it died, is stopped or cannot be reached; last seen at ") == 1
    told = told_losses(text)
    assert len(told) == 8
    assert told[:4] == told[4:]


def test_what_one_rank_raises_is_told_once_under_torchrun(
    command: Callable[..., list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert torchrun(0, command("failed", 4, "--verbose")) is not None
    told = capfd.readouterr().err
    assert told.count("solver-plan: rank 1 failed at step 3, 1F0: ArithmeticError: this layer is broken") == 1
    assert told.count('raise ArithmeticError("this layer is broken")') == 1


def test_what_all_ranks_refuse_is_told_once_under_torchrun(
    tmp_path: Path, command: Callable[..., list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "saved").touch()
    assert torchrun(0, command("failed", 4)) is not None
    told = capfd.readouterr().err
    assert told.count("solver-plan: ") == 1
    assert "checkpoints need a folder, found a file; name a folder" in told


def processes_under(folder: Path) -> list[str]:
    """Processes that work in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cwd").readlink() == folder:
                found.append(entry.name)
    return found


@pytest.mark.parametrize(
    ("number", "by_torchrun", "code"),
    [(signal.SIGTERM, False, 143), (signal.SIGINT, False, 1), (signal.SIGTERM, True, 1), (signal.SIGINT, True, 1)],
)
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")
def test_a_signal_leaves_no_process_and_no_half_of_a_checkpoint(
    tmp_path: Path,
    command: Callable[..., list[str]],
    capfd: pytest.CaptureFixture[str],
    number: int,
    by_torchrun: bool,
    code: int,
) -> None:
    def train_on() -> None:
        os.chdir(tmp_path)
        if by_torchrun:
            torchrun(0, command("slow", 1000))
        sys.exit(main(command("slow", 1000, "--local", "2")))

    started = multiprocessing.get_context("fork").Process(target=train_on)
    started.start()
    assert started.pid is not None
    try:
        end = time.monotonic() + 60
        while not list(tmp_path.glob("saved/step-*")):
            assert started.is_alive()
            assert time.monotonic() < end
            time.sleep(0.05)
        os.kill(started.pid, number)
        started.join(30)
        assert started.exitcode == code
    finally:
        started.kill()
        started.join()
    assert processes_under(tmp_path) == []
    saved = tmp_path / "saved"
    assert [path.name for path in saved.iterdir() if not path.name.startswith("step-")] == []
    assert last_whole(saved) is not None
    told = capfd.readouterr().err
    assert "solver_plan/" not in told, "a traceback of ours"
    assert told.count("solver-plan: interrupted") == (number == signal.SIGINT and not by_torchrun)
