"""`simulate`: play a plan event by event."""

import argparse
from typing import TYPE_CHECKING

from solver_plan.commands.verb import Verb, fraction, positive, whole, write_data
from solver_plan.errors import InputError

if TYPE_CHECKING:
    from solver_plan.documents import PlanDocument, ProblemDocument


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", help="problem file")
    parser.add_argument("plan", help="plan file")
    group = parser.add_argument_group("offload problems only")
    group.add_argument("--jitter", type=fraction, metavar="J", help="every duration times 1 - J to 1 + J (default 0.1)")
    group.add_argument("--iterations", type=positive, metavar="N", help="so many with jitter (default 200)")
    group.add_argument("--seed", type=whole, metavar="K", help="of the jitter (default 0)")


def _run(arguments: argparse.Namespace) -> int:
    from solver_plan.api import simulate
    from solver_plan.kinds import read_problem_and_plan

    problem, plan = read_problem_and_plan(arguments.problem, arguments.plan)
    given = [name for name in ("jitter", "iterations", "seed") if getattr(arguments, name) is not None]
    if given and problem.kind != "offload":
        raise InputError(f"--{given[0]}: found a problem of kind {problem.kind}; jitter is for offload problems")
    text = _with_jitter(problem, plan, arguments) if given else simulate(problem, plan)
    write_data(text.rstrip("\n") + "\n")
    return 0


def _with_jitter(problem: "ProblemDocument", plan: "PlanDocument", arguments: argparse.Namespace) -> str:
    from solver_plan.documents import require_same_problem
    from solver_plan.offload.plan import OffloadPlan
    from solver_plan.offload.problem import OffloadProblem
    from solver_plan.offload.simulate import simulate_text

    require_same_problem(problem, plan)
    assert isinstance(problem, OffloadProblem)
    assert isinstance(plan, OffloadPlan)
    return simulate_text(
        problem,
        plan,
        jitter=0.1 if arguments.jitter is None else arguments.jitter,
        iterations=arguments.iterations or 200,
        seed=arguments.seed or 0,
    )


SIMULATE = Verb(name="simulate", summary="play a plan event by event", add_arguments=_add_arguments, run=_run)
