"""`check`: every violation of a plan, or its cost, recomputed."""

import argparse
import json
import sys

from solver_plan.commands.verb import Verb, add_json, people, write_data
from solver_plan.errors import InvalidPlanError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", help="problem file")
    parser.add_argument("plan", help="plan file")
    add_json(parser, "violations and cost")


def _run(arguments: argparse.Namespace) -> int:
    from solver_plan.documents import require_same_problem
    from solver_plan.kinds import kind_of, read_problem_and_plan
    from solver_plan.report.printable import printable

    problem, plan = read_problem_and_plan(arguments.problem, arguments.plan)
    require_same_problem(problem, plan)
    if plan.problem_digest is None:
        print(f"{arguments.plan}: names no problem (problem_digest is null): written by hand?", file=sys.stderr)
    kind = kind_of(problem)
    violations = kind.check(problem, plan)
    objective = None if violations else kind.objective(problem, plan)
    out = people(arguments.json)
    for violation in violations:
        print(printable(violation), file=out)
    if violations:
        print(f"{arguments.plan}: {len(violations)} violations", file=out)
    else:
        print(f"{arguments.plan}: valid, {objective:.6f} ms (recomputed)", file=out)
    if arguments.json:
        facts = {"valid": not violations, "violations": violations, "objective": objective}
        write_data(json.dumps(facts, ensure_ascii=False) + "\n")
    return InvalidPlanError.exit_code if violations else 0


CHECK = Verb(
    name="check",
    summary="print each violation of a plan, or its cost, recomputed",
    add_arguments=_add_arguments,
    run=_run,
)
