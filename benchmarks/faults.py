"""`python -m benchmarks faults`: runs in which a rank is killed at a random moment, and what becomes of them.

A small GPT in two stages of two replicas each, ZeRO 1, with dropout, saved every second step. In each run one rank is
killed (or stopped) at a random moment behind the making of its optimizer. The run must end on all ranks within the
timeout and 5 s, name that rank, and leave no process and no half of a checkpoint; started anew it must come to the
losses of an undisturbed one, to the last bit. Moments are drawn with a seed; where they fall depends on the machine.
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from models.gpt import describe, gpt
from models.transformer import chain, decoder_layer
from models.transformer_modules import decoder
from solver_plan.documents import digest_of
from solver_plan.errors import RunFailedError
from solver_plan.execution.checkpoint_folder import Checkpoints
from solver_plan.execution.comparison import Step
from solver_plan.execution.model import Model
from solver_plan.execution.run import Training, run
from solver_plan.parallelism.plan import Layout, ParallelismPlan, Stage
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.profiles.analytic import profile
from solver_plan.profiles.cluster import read_cluster

RANKS, STEPS, SAMPLES, MICRO_BATCH = 4, 10, 8, 4
GRACE_S = 5.0
"""How long behind the timeout a run may take to end."""


@dataclass(frozen=True)
class Fault:
    """What is done to a run."""

    rank: int
    delay_s: float
    """Behind the making of the rank's optimizer."""
    signal: signal.Signals


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    fault: Fault
    ended_s: float
    """From the fault to the end of the run."""
    message: str
    resumed_at: int
    """Steps that the checkpoint had."""
    is_equal: bool
    """Whether the losses are those of the undisturbed run."""
    is_clean: bool
    """Whether no process and no half of a checkpoint was left."""

    def is_good(self, timeout_s: float) -> bool:
        """Whether all is as it must be."""
        named = f"rank {self.fault.rank} " in self.message
        return named and self.is_equal and self.is_clean and self.ended_s <= timeout_s + GRACE_S


class Trial:
    """Runs of one model under one plan, in a folder."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder = folder
        self.timeout_s = timeout_s
        self.problem, self.plan, self.model = _case()

    def train(self, name: str, fault: Fault | None = None) -> int:
        """Train, from the last checkpoint of that name; return the step it began at. Raises `RunFailedError`."""
        losses, began = self.folder / f"{name}.losses", self.folder / f"{name}.began"

        def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            rank = dist.get_rank()
            if rank == 0:
                began.write_text(repr(time.monotonic()))
            if fault is not None and rank == fault.rank:
                timer = threading.Timer(fault.delay_s, self._strike, (name, fault))
                timer.daemon = True
                timer.start()
            return torch.optim.AdamW(parameters, lr=1e-3)

        def tell(number: int, step: Step) -> None:
            with losses.open("a") as stream:
                print(number, step.loss.hex(), file=stream, flush=True)

        training = Training(
            steps=STEPS,
            optimizer=optimizer,
            timeout_s=self.timeout_s,
            on_step=tell,
            checkpoints=Checkpoints(self.folder / name, every=2),
        )
        return run(self.problem, self.plan, training, model=self.model, local=RANKS).first_step

    def _strike(self, name: str, fault: Fault) -> None:
        (self.folder / f"{name}.struck").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), fault.signal)

    def losses(self, name: str) -> list[tuple[int, str]]:
        """Return the losses of all attempts, each that came out the same more than once only once."""
        lines = (self.folder / f"{name}.losses").read_text().splitlines()
        return sorted({(int(number), loss) for number, loss in (line.split() for line in lines)})

    def seconds_since(self, name: str, event: str) -> float:
        """Return the seconds since a run of that name began or was struck."""
        return time.monotonic() - float((self.folder / f"{name}.{event}").read_text())


def outcome(trial: Trial, name: str, fault: Fault, expected: list[tuple[int, str]]) -> Outcome | None:
    """Return what becomes of a run with a fault; None: it ended before."""
    try:
        trial.train(name, fault)
    except RunFailedError as error:
        ended_s, message = trial.seconds_since(name, "struck"), str(error)
    else:
        return None
    whole = [path.name for path in (trial.folder / name).iterdir()]
    is_clean = not multiprocessing.active_children() and all(each.startswith("step-") for each in whole)
    resumed_at = trial.train(name)
    return Outcome(fault, ended_s, message, resumed_at, trial.losses(name) == expected, is_clean)


def trials(runs: int, seed: int, timeout_s: float, kind: signal.Signals) -> list[Outcome]:
    """Return the outcomes of so many runs, and print each."""
    chance = random.Random(seed)
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), timeout_s)
        trial.train("undisturbed")
        longest_s = trial.seconds_since("undisturbed", "began")
        expected = trial.losses("undisturbed")
        number = 0
        while len(found) < runs:
            number += 1
            fault = Fault(chance.randrange(RANKS), chance.uniform(0, 0.9 * longest_s), kind)
            result = outcome(trial, f"run{number}", fault, expected)
            if result is None:
                continue
            found.append(result)
            print(_line(result, timeout_s), flush=True)
    return found


def _line(result: Outcome, timeout_s: float) -> str:
    good = "good" if result.is_good(timeout_s) else "BAD"
    equal = "equal" if result.is_equal else "OTHER"
    when = f"rank {result.fault.rank} at {result.fault.delay_s:5.2f} s"
    return (
        f"{when}  ended in {result.ended_s:5.2f} s  from step {result.resumed_at:2d}  {equal}  {good}: {result.message}"
    )


def _case() -> tuple[ParallelismProblem, ParallelismPlan, Model]:
    shape = gpt("gpt-faults", layers=2, hidden=32, heads=4, sequence=16, vocabulary=64)
    problem = profile(describe(shape), read_cluster("v100_4x32gb"), SAMPLES)
    problem = replace(problem, space=replace(problem.space, use_all_devices=False, sharding=(0, 1)))
    cut, end = 14, 29
    stages = tuple(
        Stage(
            operators=bounds,
            devices=devices,
            layout=(Layout(operators=bounds, tensor_parallel=1, data_parallel=2, partition=0),),
            recompute=(),
            sharding=1,
        )
        for bounds, devices in (((0, cut), (0, 1)), ((cut, end), (2, 3)))
    )
    plan = ParallelismPlan(
        problem_digest=digest_of(problem),
        micro_batch_size=MICRO_BATCH,
        micro_batches=SAMPLES // MICRO_BATCH,
        stages=stages,
    )
    return problem, plan, decoder(shape, chain(shape, decoder_layer(shape)), dropout=0.1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what became of each run; 1 if one did not end, or did not resume, as it must."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of ranks and moments")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL", help="STOP: the rank stalls")
    options = parser.parse_args(arguments)
    found = trials(options.runs, options.seed, options.timeout, signal.Signals[f"SIG{options.signal}"])
    good = sum(result.is_good(options.timeout) for result in found)
    longest_s = max(result.ended_s for result in found)
    print(f"{good} of {len(found)} runs ended and resumed as they must; the slowest ended {longest_s:.2f} s behind")
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
