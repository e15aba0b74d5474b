"""`run`: train a model as planned.

A parallelism plan runs under torchrun or in processes started here, an offload plan in this process.
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from solver_plan.commands.verb import STANDARD_OUTPUT, Verb, number, positive, require_writable
from solver_plan.errors import InputError, RunFailedError, SolverPlanError

if TYPE_CHECKING:
    from solver_plan.execution.comparison import Step
    from solver_plan.offload.plan import OffloadPlan
    from solver_plan.offload.problem import OffloadProblem

OFFLOAD_OPTIONS = ("micro_batch", "max_norm", "update_threads")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", help="problem file")
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--steps", type=positive, required=True, help="how many steps to train")
    parser.add_argument("--local", type=positive, metavar="PROCESSES", help="start so many gloo processes here")
    parser.add_argument("--model", help="modules to train, as models/gpt.py:tiny; by default the problem's")
    parser.add_argument("--trace", metavar="FILE", help="write one Chrome trace of all ranks, planned and executed")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument(
        "--timeout", type=positive, default=600, metavar="S", help="seconds until a collective gives up"
    )
    group = parser.add_argument_group("offload plans only")
    group.add_argument("--micro-batch", type=positive, metavar="M", help="samples of a micro-step (default 1)")
    group.add_argument("--max-norm", type=number, metavar="NORM", help="clip gradients to this norm (default: no)")
    group.add_argument("--update-threads", type=positive, metavar="N", help="on the CPU (default: all cores but one)")


def _run(arguments: argparse.Namespace) -> int:
    try:
        return _train(arguments)
    except RunFailedError:
        raise
    except SolverPlanError as error:
        # all ranks refuse the same: one message for all; the others end with the same exit code
        if os.environ.get("RANK", "0") != "0":
            return error.exit_code
        raise


def _train(arguments: argparse.Namespace) -> int:
    from solver_plan.execution.extra import require_torch

    require_torch()
    import torch

    from solver_plan.execution.comparison import comparison_table
    from solver_plan.execution.compile import read_problem_and_plan
    from solver_plan.execution.run import Training, load_model, run
    from solver_plan.kinds import read_plan, read_problem
    from solver_plan.offload.plan import OffloadPlan
    from solver_plan.offload.problem import OffloadProblem

    problem, plan = read_problem(arguments.problem), read_plan(arguments.plan)
    if isinstance(problem, OffloadProblem) and isinstance(plan, OffloadPlan):
        return _train_offloaded(arguments, problem, plan)
    for option in OFFLOAD_OPTIONS:
        if getattr(arguments, option) is not None:
            raise InputError(f"--{option.replace('_', '-')} is for offload plans; leave it out")
    if arguments.trace == STANDARD_OUTPUT:
        raise InputError("--trace: found '-'; name a file, standard output has the comparison")
    if arguments.trace is not None:
        require_writable(arguments.trace)

    def tell(number: int, step: "Step") -> None:
        print(f"step {number + 1}: loss {step.loss:.6f}, {step.seconds * 1e3:.1f} ms", file=sys.stderr, flush=True)

    report = run(
        *read_problem_and_plan(arguments.problem, arguments.plan),
        Training(
            steps=arguments.steps,
            seed=arguments.seed,
            dtype=getattr(torch, arguments.dtype),
            timeout_s=arguments.timeout,
            on_step=tell,
        ),
        model=None if arguments.model is None else load_model(arguments.model),
        local=arguments.local,
        trace=arguments.trace,
    )
    if report.comparison:
        print(comparison_table(report.comparison))
    return 0


def _train_offloaded(arguments: argparse.Namespace, problem: "OffloadProblem", plan: "OffloadPlan") -> int:
    import torch

    from solver_plan.execution.offload.training import OffloadTraining, train_offloaded
    from solver_plan.execution.run import load_model
    from solver_plan.profiles.loading import load_description

    for option in ("local", "trace"):
        if getattr(arguments, option) is not None:
            raise InputError(f"--{option} is for parallelism plans; an offload plan runs in this process: leave it out")
    if arguments.dtype == "float64":
        raise InputError("--dtype: found float64; offload plans train in float32 or bfloat16")
    if arguments.model is None:
        raise InputError("model: an offload problem names none; give one, as --model models/gpt.py:tiny")

    def tell(number: int, loss: float, seconds: float) -> None:
        print(f"step {number + 1}: loss {loss:.6f}, {seconds * 1e3:.1f} ms", file=sys.stderr, flush=True)

    ran = train_offloaded(
        problem,
        plan,
        load_description(arguments.model),
        load_model(arguments.model),
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
