"""`export`: the configuration of another system that carries a plan out."""

import argparse

from solver_plan.commands.verb import (
    STANDARD_OUTPUT,
    Verb,
    add_out,
    people,
    require_writable,
    write_text_out,
)
from solver_plan.errors import InputError, InvalidPlanError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", help="problem file")
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--to", required=True, metavar="SYSTEM", help="megatron, torchtitan or deepspeed")
    add_out(parser, "configuration (default)", required=False)
    parser.add_argument(
        "--allow-losses",
        action="store_true",
        help="where the system cannot be told all of the plan, write the nearest configuration, and what it costs",
    )


def _run(arguments: argparse.Namespace) -> int:
    import os
    from pathlib import Path

    from solver_plan.export.plans import export_plan
    from solver_plan.kinds import read_plan, read_problem

    out = STANDARD_OUTPUT if arguments.out is None else arguments.out
    for given in (arguments.problem, arguments.plan):
        if os.path.realpath(out) == os.path.realpath(given):
            raise InputError(f"--out {out}: is the file {given}, which would be replaced; name another")
    require_writable(out)
    schedule_file = None if out == STANDARD_OUTPUT else str(Path(out).with_suffix(".schedule.csv"))
    export = export_plan(
        read_problem(arguments.problem),
        read_plan(arguments.plan),
        arguments.to,
        allow_losses=arguments.allow_losses,
        schedule_file=schedule_file,
    )
    if export.schedule is not None and schedule_file is not None:
        write_text_out(export.schedule, schedule_file)
    write_text_out(export.text, out)
    for remark in export.remarks:
        print(remark, file=people(out == STANDARD_OUTPUT))
    return 0 if export.fits else InvalidPlanError.exit_code


EXPORT = Verb(
    name="export",
    summary="write a plan as configuration of Megatron-LM, torchtitan or DeepSpeed",
    add_arguments=_add_arguments,
    run=_run,
)
