"""`schema`: the JSON schema of a document."""

import argparse

from solver_plan.commands.verb import Verb, write_data
from solver_plan.errors import InputError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", help="such as parallelism")
    parser.add_argument("document", choices=("problem", "plan"))


def _run(arguments: argparse.Namespace) -> int:
    from solver_plan.documents.schema import schema_text
    from solver_plan.kinds import plan_types, problem_types

    kinds = problem_types() if arguments.document == "problem" else plan_types()
    if arguments.kind not in kinds:
        raise InputError(f"kind: found {arguments.kind!r}; one of {', '.join(kinds)}")
    write_data(schema_text(kinds[arguments.kind]))
    return 0


SCHEMA = Verb(name="schema", summary="print the JSON schema of a document", add_arguments=_add_arguments, run=_run)
