"""`show`: a plan as tables for a terminal, or as a page with its picture."""

import argparse

from solver_plan.commands.verb import STANDARD_OUTPUT, Verb, require_writable, write_data, write_text_out


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--problem", metavar="FILE", help="problem file, for names and limits")
    parser.add_argument(
        "--html", metavar="FILE", help="write a page with picture and tables instead; - for standard output"
    )


def _run(arguments: argparse.Namespace) -> int:
    if arguments.html is not None:
        require_writable(arguments.html)
    from solver_plan.api import show, show_html
    from solver_plan.kinds import read_plan, read_problem

    problem = None if arguments.problem is None else read_problem(arguments.problem)
    plan = read_plan(arguments.plan)
    if arguments.html is None:
        write_data(show(plan, problem))
        return 0
    write_text_out(show_html(plan, problem), arguments.html)
    if arguments.html != STANDARD_OUTPUT:
        print(f"{arguments.html}: open it in a browser")
    return 0


SHOW = Verb(name="show", summary="print a plan as tables", add_arguments=_add_arguments, run=_run)
