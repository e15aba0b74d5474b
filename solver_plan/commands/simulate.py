"""`simulate`: play a plan event by event."""

import argparse

from solver_plan.commands.verb import Verb, write_data


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", help="problem file")
    parser.add_argument("plan", help="plan file")


def _run(arguments: argparse.Namespace) -> int:
    from solver_plan.api import simulate
    from solver_plan.kinds import read_plan, read_problem

    text = simulate(read_problem(arguments.problem), read_plan(arguments.plan))
    write_data(text.rstrip("\n") + "\n")
    return 0


SIMULATE = Verb(name="simulate", summary="play a plan event by event", add_arguments=_add_arguments, run=_run)
