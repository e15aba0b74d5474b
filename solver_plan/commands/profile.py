"""`profile`: price a described model on a described cluster, from shapes alone."""

import argparse

from solver_plan.commands.verb import STANDARD_OUTPUT, Verb, add_out, people, positive, require_writable, write_out


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FILE:FUNCTION", help="as models/gpt.py:gpt3_1_3b or package.module:function")
    parser.add_argument("--cluster", required=True, help="a TOML file, or the name of a machine that comes along")
    parser.add_argument("--global-batch", type=positive, required=True, help="samples of one iteration")
    add_out(parser, "problem")


def _run(arguments: argparse.Namespace) -> int:
    require_writable(arguments.out)
    from solver_plan.profiles.analytic import profile
    from solver_plan.profiles.cluster import read_cluster
    from solver_plan.profiles.loading import load_description

    cluster = read_cluster(arguments.cluster)
    description = load_description(arguments.model)
    problem = profile(description, cluster, arguments.global_batch, model=arguments.model)
    write_out(problem, arguments.out)
    what = f"{description.name}: {len(problem.operators)} operators, {problem.cluster.devices} devices"
    print(what, file=people(arguments.out == STANDARD_OUTPUT))
    return 0


PROFILE = Verb(
    name="profile", summary="price a model on a cluster, from shapes alone", add_arguments=_add_arguments, run=_run
)
