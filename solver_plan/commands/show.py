"""`show`: a plan as tables for a terminal."""

import argparse

from solver_plan.commands.verb import Verb, write_data


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--problem", metavar="FILE", help="problem file, for names and limits")


def _run(arguments: argparse.Namespace) -> int:
    from solver_plan.api import show
    from solver_plan.kinds import read_plan, read_problem

    problem = None if arguments.problem is None else read_problem(arguments.problem)
    write_data(show(read_plan(arguments.plan), problem))
    return 0


SHOW = Verb(name="show", summary="print a plan as tables", add_arguments=_add_arguments, run=_run)
