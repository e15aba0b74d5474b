"""`import`: turn a published profile database into a problem."""

import argparse

from solver_plan.commands.verb import (
    STANDARD_OUTPUT,
    Verb,
    add_out,
    people,
    positive,
    positives,
    require_writable,
    write_out,
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_subparsers(title="sources", metavar="SOURCE", required=True)
    aceso = sources.add_parser("aceso", help="the profile database of Aceso (EuroSys 2024)")
    aceso.add_argument("directory", metavar="DIR", help="folder of the CSV files")
    aceso.add_argument("--model", required=True, help="gpt, t5 or resnet")
    aceso.add_argument("--size", required=True, help="such as 1_3B")
    aceso.add_argument("--layers", type=positive, help="number of layers, for the size scale-layer")
    aceso.add_argument("--nodes", type=positive, default=1)
    aceso.add_argument("--devices-per-node", type=positive, required=True)
    aceso.add_argument("--memory-mb", type=positive, required=True, help="of a device, in MB of 2^20 bytes")
    aceso.add_argument("--global-batch", type=positive, required=True, help="samples of one iteration")
    aceso.add_argument("--micro-batches", type=positives, help="micro-batch sizes to allow; default: all profiled")
    add_out(aceso, "problem")
    aceso.add_argument("--verbose", action="store_true", help="log each step, and show tracebacks")


def _run(arguments: argparse.Namespace) -> int:
    require_writable(arguments.out)
    from solver_plan.profiles.aceso import import_aceso

    problem = import_aceso(
        arguments.directory,
        model=arguments.model,
        size=arguments.size,
        layers=arguments.layers,
        nodes=arguments.nodes,
        devices_per_node=arguments.devices_per_node,
        memory_mb=arguments.memory_mb,
        global_batch=arguments.global_batch,
        micro_batches=arguments.micro_batches,
    )
    write_out(problem, arguments.out)
    what = f"{arguments.model} {arguments.size}: {len(problem.operators)} operators, {problem.cluster.devices} devices"
    print(what, file=people(arguments.out == STANDARD_OUTPUT))
    return 0


IMPORT = Verb(
    name="import", summary="turn a published profile database into a problem", add_arguments=_add_arguments, run=_run
)
