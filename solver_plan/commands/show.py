"""`show`: a plan as tables for a terminal, or as a page with its picture."""

import argparse

from solver_plan.commands.verb import (
    STANDARD_OUTPUT,
    Verb,
    number,
    positive,
    require_writable,
    write_data,
    write_text_out,
)
from solver_plan.errors import InputError

WHAT_IF_TIME_LIMIT_S = 60.0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--problem", metavar="FILE", help="problem file, for names and limits")
    parser.add_argument(
        "--html", metavar="FILE", help="write a page with picture and tables instead; - for standard output"
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="what binds, and what more memory or devices would bring (needs time)",
    )
    group = parser.add_argument_group("with --what-if")
    group.add_argument(
        "--time-limit", type=number, metavar="S", help=f"seconds of all searches (default {WHAT_IF_TIME_LIMIT_S:g})"
    )
    group.add_argument("--workers", type=positive, metavar="N", help="solver workers (default: the machine's cores)")
    group.add_argument(
        "--deterministic", action="store_true", default=None, help="the same answer every time; S is then solver time"
    )


def _run(arguments: argparse.Namespace) -> int:
    given = [name for name in ("time_limit", "workers", "deterministic") if getattr(arguments, name) is not None]
    if given and not arguments.what_if:
        raise InputError(f"--{given[0].replace('_', '-')}: found no --what-if; only its searches have limits")
    if arguments.what_if and arguments.problem is None:
        raise InputError("--what-if: found no --problem; prices and limits stand there")
    if arguments.html is not None:
        require_writable(arguments.html)
    from solver_plan.api import show, show_html, what_if
    from solver_plan.kinds import read_plan, read_problem_and_plan

    problem = None
    if arguments.problem is None:
        plan = read_plan(arguments.plan)
    else:
        problem, plan = read_problem_and_plan(arguments.problem, arguments.plan)
    more = ""
    if arguments.what_if and problem is not None:
        more = what_if(
            problem,
            plan,
            time_limit_s=WHAT_IF_TIME_LIMIT_S if arguments.time_limit is None else arguments.time_limit,
            workers=arguments.workers,
            deterministic=bool(arguments.deterministic),
        )
    if arguments.html is None:
        write_data(show(plan, problem, more=more))
        return 0
    write_text_out(show_html(plan, problem, more=more), arguments.html)
    if arguments.html != STANDARD_OUTPUT:
        print(f"{arguments.html}: open it in a browser")
    return 0


SHOW = Verb(name="show", summary="print a plan as tables", add_arguments=_add_arguments, run=_run)
