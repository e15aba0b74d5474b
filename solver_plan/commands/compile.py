"""`compile`: a plan becomes a program."""

import argparse
import sys

from solver_plan.commands.verb import Verb, add_out, require_writable, write_out


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", help="problem file")
    parser.add_argument("plan", help="plan file")
    add_out(parser, "program")
    parser.add_argument(
        "--dry-run",
        nargs="?",
        const="0",
        metavar="RANKS",
        help="also build the process groups of these ranks (comma list, default 0) with PyTorch's fake backend",
    )


def _run(arguments: argparse.Namespace) -> int:
    from solver_plan.execution.extra import require_torch
    from solver_plan.execution.programs import compile_plan, describe_program, read_problem_and_plan

    require_writable(arguments.out)
    program = compile_plan(*read_problem_and_plan(arguments.problem, arguments.plan))
    ranks: tuple[int, ...] = ()
    if arguments.dry_run is not None:
        require_torch()
        from solver_plan.execution.dry_run import dry_run, parse_ranks

        ranks = parse_ranks(arguments.dry_run, program.world_size)
    write_out(program, arguments.out)
    print(describe_program(program), file=sys.stderr)
    if ranks:
        for found in dry_run(program, ranks):
            print(
                f"rank {found.rank}: created {found.groups_created} groups, member of {len(found.groups_joined)}, "
                f"{len(found.meshes)} meshes, {found.seconds:.2f} s",
                file=sys.stderr,
            )
    return 0


COMPILE = Verb(
    name="compile",
    summary="compile a parallelism or wavefront plan into a program",
    add_arguments=_add_arguments,
    run=_run,
)
