"""`run`: train a model as planned.

A plan of parallelism or wavefront runs under torchrun or in processes started here, one of offload in this process.
"""

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from solver_plan.commands.verb import STANDARD_OUTPUT, Verb, number, positive, require_writable, whole
from solver_plan.errors import InputError

if TYPE_CHECKING:
    from solver_plan.execution.comparison import Step
    from solver_plan.offload.plan import OffloadPlan
    from solver_plan.offload.problem import OffloadProblem

OFFLOAD_OPTIONS = ("micro_batch", "max_norm", "update_threads")
PROCESS_OPTIONS = ("local", "trace", "checkpoint", "checkpoint_every", "max_restarts", "timeout")
"""For plans that run in several processes."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", help="problem file")
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--steps", type=positive, required=True, help="how many steps to train in all")
    parser.add_argument("--local", type=positive, metavar="PROCESSES", help="start so many gloo processes here")
    parser.add_argument("--model", help="modules to train, as models/gpt.py:tiny; by default the problem's")
    parser.add_argument("--trace", metavar="FILE", help="write one Chrome trace of all ranks, planned and executed")
    parser.add_argument("--checkpoint", metavar="DIR", help="save the run there, and go on from what is saved there")
    parser.add_argument(
        "--checkpoint-every", type=positive, metavar="K", help="steps between checkpoints (default 100)"
    )
    parser.add_argument(
        "--max-restarts",
        type=whole,
        metavar="R",
        help="with --local: how often to start anew, from the last checkpoint, when a process fails",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument(
        "--timeout", type=positive, metavar="S", help="seconds until a rank is taken for stalled (default 600)"
    )
    group = parser.add_argument_group("offload plans only")
    group.add_argument("--micro-batch", type=positive, metavar="M", help="samples of a micro-step (default 1)")
    group.add_argument("--max-norm", type=number, metavar="NORM", help="clip gradients to this norm (default: no)")
    group.add_argument("--update-threads", type=positive, metavar="N", help="on the CPU (default: all cores but one)")


def _run(arguments: argparse.Namespace) -> int:
    from solver_plan.execution.extra import require_torch

    require_torch()
    import logging

    import torch

    from solver_plan.execution.checkpoint_folder import Checkpoints
    from solver_plan.execution.launch import told_once
    from solver_plan.execution.programs import require_runnable
    from solver_plan.execution.run import Training, load_model, run
    from solver_plan.kinds import read_problem_and_plan
    from solver_plan.offload.plan import OffloadPlan
    from solver_plan.offload.problem import OffloadProblem

    if not arguments.verbose:
        # a loss that is not finite, a restart, a damaged checkpoint
        logging.getLogger("solver_plan.execution").setLevel(logging.WARNING)
    with told_once() if arguments.local is None else nullcontext():
        found, made = read_problem_and_plan(arguments.problem, arguments.plan)
        if isinstance(found, OffloadProblem) and isinstance(made, OffloadPlan):
            return _train_offloaded(arguments, found, made)
        problem, plan = require_runnable(found, made, (arguments.problem, arguments.plan))
        for option in OFFLOAD_OPTIONS:
            if getattr(arguments, option) is not None:
                raise InputError(f"--{option.replace('_', '-')} is for offload plans; leave it out")
        if arguments.checkpoint == "":
            raise InputError("--checkpoint: found ''; name a folder")
        if arguments.checkpoint_every is not None and arguments.checkpoint is None:
            raise InputError("--checkpoint-every: found no --checkpoint; name the folder, or leave it out")
        if arguments.trace == STANDARD_OUTPUT:
            raise InputError("--trace: found '-'; name a file, standard output has the comparison")
        if arguments.trace is not None:
            require_writable(arguments.trace)
        model = None if arguments.model is None else load_model(arguments.model)
    checkpoints = None
    if arguments.checkpoint is not None:
        checkpoints = Checkpoints(Path(arguments.checkpoint), every=arguments.checkpoint_every or 100)

    def tell(number: int, step: "Step") -> None:
        tasks = ", ".join(f"{task} {loss:.6f}" for task, loss in (step.losses or {}).items())
        of_tasks = f" ({tasks})" if tasks else ""
        told = f"step {number + 1}: loss {step.loss:.6f}{of_tasks}, {step.seconds * 1e3:.1f} ms"
        print(told, file=sys.stderr, flush=True)

    report = run(
        problem,
        plan,
        Training(
            steps=arguments.steps,
            seed=arguments.seed,
            dtype=getattr(torch, arguments.dtype),
            timeout_s=arguments.timeout or 600,
            on_step=tell,
            checkpoints=checkpoints,
        ),
        model=model,
        local=arguments.local,
        restarts=arguments.max_restarts or 0,
        trace=arguments.trace,
    )
    if report.table:
        print(report.table)
    elif not report.losses and os.environ.get("RANK", "0") == "0":
        told = f"{arguments.checkpoint}: has step {report.first_step} already, none was left to train; raise --steps"
        print(told, file=sys.stderr)
    return 0


def _train_offloaded(arguments: argparse.Namespace, problem: "OffloadProblem", plan: "OffloadPlan") -> int:
    import torch

    from solver_plan.execution.model import Model
    from solver_plan.execution.offload.training import OffloadTraining, train_offloaded
    from solver_plan.execution.run import load_model
    from solver_plan.profiles.loading import load_description

    for option in PROCESS_OPTIONS:
        if getattr(arguments, option) is not None:
            raise InputError(
                f"--{option.replace('_', '-')} is not for offload plans, which run in this process: leave it out"
            )
    if arguments.dtype == "float64":
        raise InputError("--dtype: found float64; offload plans train in float32 or bfloat16")
    if arguments.model is None:
        raise InputError("model: an offload problem names none; give one, as --model models/gpt.py:tiny")

    model = load_model(arguments.model)
    if not isinstance(model, Model):
        raise InputError(f"model: {arguments.model!r} has several tasks; an offload plan is for one model")

    def tell(number: int, loss: float, seconds: float) -> None:
        print(f"step {number + 1}: loss {loss:.6f}, {seconds * 1e3:.1f} ms", file=sys.stderr, flush=True)

    ran = train_offloaded(
        problem,
        plan,
        load_description(arguments.model),
        model,
        OffloadTraining(
            steps=arguments.steps,
            micro_batch=arguments.micro_batch or 1,
            max_norm=arguments.max_norm,
            seed=arguments.seed,
            dtype=getattr(torch, arguments.dtype),
            workers=arguments.update_threads,
            on_step=tell,
        ),
    )
    print(ran.table())
    return 0


RUN = Verb(name="run", summary="train a model as planned", add_arguments=_add_arguments, run=_run)
