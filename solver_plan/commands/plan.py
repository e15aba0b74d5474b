"""`plan`: find the best plan of a problem within a budget."""

import argparse
import os

from solver_plan.commands.plan_offload import add_offload_arguments, is_offload_question, run_offload_question
from solver_plan.commands.verb import (
    STANDARD_OUTPUT,
    Verb,
    add_json,
    add_out,
    number,
    people,
    require_writable,
    write_data,
    write_out,
)
from solver_plan.errors import InputError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", help="problem file")
    add_out(parser, "plan", required=False)
    parser.add_argument("--time-limit", type=number, default=60.0, metavar="S", help="seconds (default 60)")
    parser.add_argument(
        "--gap", type=number, default=0.0, metavar="G", help="stop at this gap, a fraction such as 0.01 (default 0)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="solver workers (default: the machine's cores)")
    parser.add_argument("--deterministic", action="store_true", help="the same plan every time; S is then solver time")
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="of random choices (default 0)")
    parser.add_argument("--heuristic", metavar="NAME", help="only this heuristic, no solver")
    add_json(parser, "the certificate")
    add_offload_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    data_out = arguments.out == STANDARD_OUTPUT
    if data_out and arguments.json:
        raise InputError("--out - and --json both write to standard output; choose one")
    question = is_offload_question(arguments)
    if arguments.out is None and arguments.sweep is None:
        raise InputError("solver-plan plan: found no --out; say where the plan goes, - for standard output")
    if arguments.out is not None:
        if os.path.realpath(arguments.out) == os.path.realpath(arguments.problem):
            raise InputError(f"--out {arguments.out}: is the problem file, which the plan would replace; name another")
        require_writable(arguments.out)
    from solver_plan.documents.writing import certificate_text
    from solver_plan.kinds import kind_of, read_problem
    from solver_plan.report.tables import certificate_table
    from solver_plan.solving.budget import Budget
    from solver_plan.solving.progress import terminal_progress

    budget = Budget(
        time_limit_s=arguments.time_limit,
        gap_limit=arguments.gap,
        workers=arguments.workers,
        deterministic=arguments.deterministic,
        seed=arguments.seed,
    )
    if question:
        return run_offload_question(arguments, budget)
    problem = read_problem(arguments.problem)
    found = kind_of(problem).plan(problem, budget, heuristic=arguments.heuristic, on_progress=terminal_progress())
    write_out(found.plan, arguments.out)
    certificate = found.plan.certificate
    if certificate is not None:
        print(certificate_table(certificate), file=people(data_out or arguments.json))
        if arguments.json:
            write_data(certificate_text(certificate))
    return 0


PLAN = Verb(name="plan", summary="find the best plan of a problem", add_arguments=_add_arguments, run=_run)
