"""`plan` for offload problems, asked the other way round: the period over the room, the least room, a menu.

Each needs the problem to be of kind offload and takes the whole budget for all that it plans.
"""

import argparse
import json
from typing import TYPE_CHECKING

from solver_plan.commands.verb import (
    STANDARD_OUTPUT,
    number,
    people,
    positive,
    require_writable,
    wholes,
    write_data,
    write_out,
    write_text_out,
)
from solver_plan.errors import InputError

if TYPE_CHECKING:
    from solver_plan.offload.plan import OffloadPlan
    from solver_plan.offload.problem import OffloadProblem
    from solver_plan.solving.budget import Budget

Facts = dict[str, str | int | float | None]
"""What `--json` writes."""


def add_offload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, in a group of their own."""
    group = parser.add_argument_group("offload problems only")
    group.add_argument("--sweep", metavar="FILE", help="period over gpu_state_bytes as CSV, no plan; - for output")
    group.add_argument("--points", type=positive, metavar="N", help="of the sweep (default 11), evenly to all states")
    group.add_argument("--rooms", type=wholes, metavar="A,B", help="of the sweep, in bytes, instead of N points")
    group.add_argument("--plot", metavar="FILE", help="the sweep as SVG")
    group.add_argument("--period", type=number, metavar="MS", help="plan for the least gpu_state_bytes that allows it")
    group.add_argument("--menu", metavar="FILE", help="choose micro-batch and recomputation from this file too")
    group.add_argument("--problem-out", metavar="FILE", help="the problem with the room, or entry, that was chosen")


def is_offload_question(arguments: argparse.Namespace) -> bool:
    """True if one of the questions of this module is asked. Raises `InputError` if options do not go together."""
    asked = [name for name in ("sweep", "period", "menu") if getattr(arguments, name) is not None]
    if len(asked) > 1:
        raise InputError(f"found {' and '.join('--' + name for name in asked)}; choose one")
    for name in ("points", "rooms", "plot"):
        if getattr(arguments, name) is not None and asked != ["sweep"]:
            raise InputError(f"--{name} belongs to --sweep; give --sweep FILE too, or leave it out")
    if arguments.problem_out is not None and asked not in (["period"], ["menu"]):
        raise InputError("--problem-out belongs to --period and --menu; give one of them too, or leave it out")
    if not asked:
        return False
    if arguments.heuristic is not None:
        raise InputError(f"--{asked[0]} takes the planner, not one heuristic; leave --heuristic out")
    if asked == ["sweep"]:
        if arguments.out is not None or arguments.json:
            raise InputError("--sweep writes a table, no plan; leave --out and --json out")
    elif arguments.problem_out is None:
        raise InputError(
            f"--{asked[0]}: the plan is for a changed problem; say where that goes with --problem-out FILE"
        )
    return True


def run_offload_question(arguments: argparse.Namespace, budget: "Budget") -> int:
    """Answer it and return the exit code."""
    for out in (arguments.sweep, arguments.plot, arguments.out, arguments.problem_out):
        if out is not None:
            require_writable(out)
    if arguments.problem_out == STANDARD_OUTPUT:
        raise InputError("--problem-out: found '-'; name a file")
    from solver_plan.kinds import read_problem
    from solver_plan.offload.problem import OffloadProblem

    problem = read_problem(arguments.problem)
    if not isinstance(problem, OffloadProblem):
        option = next(name for name in ("sweep", "period", "menu") if getattr(arguments, name) is not None)
        raise InputError(f"--{option}: found a problem of kind {problem.kind}; only offload problems have a room")
    if arguments.sweep is not None:
        return _sweep(arguments, problem, budget)
    if arguments.period is not None:
        return _least_room(arguments, problem, budget)
    return _menu(arguments, problem, budget)


def _sweep(arguments: argparse.Namespace, problem: "OffloadProblem", budget: "Budget") -> int:
    from solver_plan.offload.curve import period_over_room
    from solver_plan.report.offload_curve import curve_csv, curve_svg, curve_table

    points = period_over_room(problem, budget, rooms=arguments.rooms, points=arguments.points or 11)
    write_text_out(curve_csv(points), arguments.sweep)
    if arguments.plot is not None:
        write_text_out(curve_svg(points), arguments.plot)
    print(curve_table(points), file=people(STANDARD_OUTPUT in (arguments.sweep, arguments.plot)))
    return 0


def _least_room(arguments: argparse.Namespace, problem: "OffloadProblem", budget: "Budget") -> int:
    from solver_plan.offload.curve import least_room
    from solver_plan.offload.layers import with_room

    found = least_room(problem, arguments.period, budget)
    facts: Facts = {
        "gpu_state_bytes": found.gpu_state_bytes,
        "bound_bytes": found.bound_bytes,
        "period_ms": found.plan.predicted.period_ms,
    }
    words = (
        f"{found.gpu_state_bytes} bytes of resident optimizer state give {found.plan.predicted.period_ms:.3f} ms; "
        f"no plan of at most {arguments.period:g} ms needs less than {found.bound_bytes} bytes"
    )
    return _write(arguments, with_room(problem, found.gpu_state_bytes), found.plan, facts, words)


def _menu(arguments: argparse.Namespace, problem: "OffloadProblem", budget: "Budget") -> int:
    from solver_plan.offload.curve import best_of_menu, read_menu

    found = best_of_menu(problem, read_menu(arguments.menu), budget)
    facts: Facts = {
        "micro_batch": found.entry.micro_batch,
        "recomputation": found.entry.recomputation,
        "accumulation_steps": found.entry.accumulation_steps,
        "ms_per_sample": found.ms_per_sample,
        "bound_ms_per_sample": found.bound_ms_per_sample,
    }
    bound = "nothing proven" if found.bound_ms_per_sample is None else f"bound {found.bound_ms_per_sample:.3f} ms"
    words = (
        f"micro-batch {found.entry.micro_batch}, {found.entry.accumulation_steps} accumulation steps, recomputation "
        f"{found.entry.recomputation}: {found.ms_per_sample:.3f} ms a sample, {bound} over all entries"
    )
    return _write(arguments, found.problem, found.plan, facts, words)


def _write(
    arguments: argparse.Namespace,
    problem: "OffloadProblem",
    plan: "OffloadPlan",
    facts: Facts,
    words: str,
) -> int:
    from solver_plan.report.printable import printable
    from solver_plan.report.tables import certificate_table

    write_out(problem, arguments.problem_out)
    write_out(plan, arguments.out)
    out = people(arguments.json or arguments.out == STANDARD_OUTPUT)
    print(printable(words), file=out)
    if plan.certificate is not None:
        print(certificate_table(plan.certificate), file=out)
    if arguments.json:
        write_data(json.dumps(facts, ensure_ascii=False) + "\n")
    return 0
