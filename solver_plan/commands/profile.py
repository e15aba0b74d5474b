"""`profile`: price a described model on a described cluster, from shapes alone."""

import argparse
import math
from typing import TYPE_CHECKING, Literal

from solver_plan.commands.verb import (
    STANDARD_OUTPUT,
    Verb,
    add_out,
    people,
    positive,
    positives,
    require_writable,
    whole,
    wholes,
    write_out,
    write_text_out,
)
from solver_plan.errors import InputError

if TYPE_CHECKING:
    from solver_plan.parallelism.problem import ParallelismProblem
    from solver_plan.profiles.cluster import ClusterDescription
    from solver_plan.profiles.description import ModelDescription

WAVEFRONT_OPTIONS = ("phases", "tensor_parallel")
OFFLOAD_OPTIONS = (
    "micro_batch",
    "recompute",
    "gpu_state_bytes",
    "staging_bytes",
    "chunks",
    "clip",
    "menu",
    "menu_micro_batches",
    "measure_host",
)
PARALLELISM_OPTIONS = ("cost_model", "sequence_parallel", "sharding", "virtual_stages", "overlap", "same_layout")
NOT_OF_ACESO = {
    "sequence_parallel": "knows no sequence parallelism",
    "sharding": "shards nothing",
    "virtual_stages": "knows one stage on each group of devices",
    "overlap": "hides nothing",
}
"""Options that Aceso's cost model has no terms for, and why."""
OVERLAPS = ("tensor_parallel", "transfers", "reduction")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FILE:FUNCTION", help="as models/gpt.py:gpt3_1_3b or package.module:function")
    parser.add_argument("--cluster", required=True, help="a TOML file, or the name of a machine that comes along")
    parser.add_argument("--global-batch", type=positive, help="samples of one iteration; not for wavefront problems")
    parser.add_argument(
        "--kind", choices=("parallelism", "wavefront", "offload"), default="parallelism", help="of the problem"
    )
    add_out(parser, "problem")
    tasks = parser.add_argument_group("wavefront problems only, of several tasks, whose batches the model says")
    tasks.add_argument("--phases", choices=("fused", "forward_backward"), help="plan the backward for itself, too")
    tasks.add_argument("--tensor-parallel", type=positives, metavar="A,B", help="degrees to offer (default 1)")
    parallel = parser.add_argument_group("parallelism problems only")
    parallel.add_argument(
        "--cost-model",
        choices=("full", "aceso"),
        help="full (default): gradients, optimizer step and sharding too; aceso: as Aceso's planner sees it",
    )
    parallel.add_argument(
        "--sequence-parallel",
        action="store_true",
        default=None,
        help="divide along the sequence what tensor parallelism leaves whole",
    )
    parallel.add_argument(
        "--sharding", type=_shardings, metavar="A,B", help="ZeRO stages that a plan may use, 0 to 3 (default 0,1,3)"
    )
    parallel.add_argument(
        "--virtual-stages",
        type=_virtual_stages,
        metavar="A,B",
        help="stages of a group of devices (default 1: none interleave)",
    )
    parallel.add_argument(
        "--overlap",
        type=_overlaps,
        metavar="A,B",
        help="what hides behind computation, of tensor_parallel, transfers, reduction; none (default reduction)",
    )
    parallel.add_argument(
        "--same-layout",
        action=argparse.BooleanOptionalAction,
        help="all stages have one layout (default: on several nodes)",
    )
    group = parser.add_argument_group("offload problems only, of one device and its host")
    group.add_argument("--micro-batch", type=positive, metavar="M", help="samples of a micro-step (default: all)")
    group.add_argument("--recompute", choices=("none", "block"), help="run each block's forward again (default none)")
    group.add_argument(
        "--gpu-state-bytes", type=whole, metavar="B", help="room for state (default: what memory leaves)"
    )
    group.add_argument("--staging-bytes", type=whole, metavar="B", help="room for streamed state (default 0: none)")
    group.add_argument("--chunks", type=positive, metavar="N", help="of a layer updated on the CPU (default 8)")
    group.add_argument(
        "--clip", action=argparse.BooleanOptionalAction, help="gradients are clipped (default: they are)"
    )
    group.add_argument(
        "--measure-host", action="store_true", default=None, help="take the rates of this machine, measured now"
    )
    group.add_argument("--menu", metavar="FILE", help="write every micro-batch and recomputation that fits, too")
    group.add_argument(
        "--menu-micro-batches", type=positives, metavar="A,B", help="of the menu (default: all that divide)"
    )


def _shardings(text: str) -> tuple[int, ...]:
    stages = wholes(text)
    if max(stages) > 3 or len(set(stages)) < len(stages):
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}; ZeRO stages from 0 to 3, each once")
    return stages


def _virtual_stages(text: str) -> tuple[int, ...]:
    numbers = positives(text)
    if 1 not in numbers or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}; 1, and others beside it, each once: as 1,2")
    return numbers


def _overlaps(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    if not set(names) <= set(OVERLAPS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}; of {', '.join(OVERLAPS)} each once, or none alone")
    return names


def _run(arguments: argparse.Namespace) -> int:
    for kind, options in (
        ("offload", OFFLOAD_OPTIONS),
        ("wavefront", WAVEFRONT_OPTIONS),
        ("parallelism", PARALLELISM_OPTIONS),
    ):
        given = [name for name in options if getattr(arguments, name) is not None]
        if given and arguments.kind != kind:
            raise InputError(
                f"--{given[0].replace('_', '-')} is for {kind} problems; give --kind {kind}, or leave it out"
            )
    for name, reason in NOT_OF_ACESO.items():
        if arguments.cost_model == "aceso" and getattr(arguments, name) is not None:
            raise InputError(
                f"--{name.replace('_', '-')}: found --cost-model aceso, which {reason}; take full, or leave it out"
            )
    if (arguments.global_batch is None) != (arguments.kind == "wavefront"):
        rule = "the model says the batch of each task; leave it out" if arguments.global_batch else "give it"
        raise InputError(f"--global-batch: found {arguments.global_batch or 'none'}; {rule} with kind {arguments.kind}")
    require_writable(arguments.out)
    if arguments.menu is not None:
        require_writable(arguments.menu)
    elif arguments.menu_micro_batches is not None:
        raise InputError("--menu-micro-batches belongs to --menu; give --menu FILE too, or leave it out")
    from solver_plan.profiles.cluster import read_cluster
    from solver_plan.profiles.loading import load_description

    cluster = read_cluster(arguments.cluster)
    if arguments.kind == "wavefront":
        return _wavefront(arguments, cluster)
    description = load_description(arguments.model)
    if arguments.kind == "offload":
        return _offload(arguments, description, cluster)
    problem = _parallelism(arguments, description, cluster)
    write_out(problem, arguments.out)
    what = f"{description.name}: {len(problem.operators)} operators, {problem.cluster.devices} devices"
    print(what, file=people(arguments.out == STANDARD_OUTPUT))
    return 0


def _wavefront(arguments: argparse.Namespace, cluster: "ClusterDescription") -> int:
    from solver_plan.profiles.loading import load_multitask_description
    from solver_plan.profiles.wavefront import profile_wavefront

    description = load_multitask_description(arguments.model)
    problem = profile_wavefront(
        description,
        cluster,
        phases=arguments.phases or "fused",
        tensor_parallel=arguments.tensor_parallel or (1,),
        model=arguments.model,
    )
    write_out(problem, arguments.out)
    tasks = len({component.task for component in problem.components})
    what = f"{description.name}: {tasks} tasks, {len(problem.components)} components, {problem.cluster.devices} devices"
    print(what, file=people(arguments.out == STANDARD_OUTPUT))
    return 0


def _parallelism(
    arguments: argparse.Namespace, description: "ModelDescription", cluster: "ClusterDescription"
) -> "ParallelismProblem":
    from dataclasses import replace

    from solver_plan.parallelism.problem import Overlap
    from solver_plan.profiles.analytic import default_space, profile

    cost_model: Literal["aceso", "full"] = arguments.cost_model or "full"
    blocks = sum(operator.block_start for operator in description.operators)
    if max(arguments.virtual_stages or (1,)) > max(1, blocks):
        raise InputError(
            f"--virtual-stages: found {max(arguments.virtual_stages)}; each has at least one whole block, and "
            f"{description.name} has {blocks}: give at most that"
        )
    space = default_space(cluster, cost_model)
    for name in ("sharding", "virtual_stages", "same_layout"):
        if getattr(arguments, name) is not None:
            space = replace(space, **{name: getattr(arguments, name)})
    overlap = None
    if arguments.overlap is not None:
        overlap = Overlap(**{name: name in arguments.overlap for name in OVERLAPS})
    return profile(
        description,
        cluster,
        arguments.global_batch,
        model=arguments.model,
        space=space,
        sequence_parallel=bool(arguments.sequence_parallel),
        cost_model=cost_model,
        overlap=overlap,
    )


def _offload(arguments: argparse.Namespace, description: "ModelDescription", cluster: "ClusterDescription") -> int:
    from solver_plan.offload.curve import menu_text
    from solver_plan.profiles.offload import offload_menu, profile_offload
    from solver_plan.report.units import size_text

    batch: int = arguments.global_batch
    staging: int = arguments.staging_bytes or 0
    clip = arguments.clip is not False
    host = None
    if arguments.measure_host:
        from solver_plan.execution.extra import require_torch

        require_torch()
        from solver_plan.profiles.measured import measure_host, with_measured_host, with_measured_rates

        host = measure_host(speculate=not clip)
        print(host.table(), file=people(STANDARD_OUTPUT in (arguments.out, arguments.menu)))
        cluster = with_measured_host(cluster, host)
    problem = profile_offload(
        description,
        cluster,
        batch,
        micro_batch=arguments.micro_batch or batch,
        recomputation=arguments.recompute or "none",
        gpu_state_bytes=arguments.gpu_state_bytes,
        staging_bytes=staging,
        chunks_per_layer=arguments.chunks or 8,
        clip_gradients=clip,
    )
    if host is not None:
        problem = with_measured_rates(problem, host)
    if arguments.menu is not None:
        sizes = arguments.menu_micro_batches or _divisors(batch)
        entries = offload_menu(description, cluster, batch, micro_batches=sizes, staging_bytes=staging)
        write_text_out(menu_text(entries), arguments.menu)
    write_out(problem, arguments.out)
    state_bytes = sum(problem.state_bytes(layer) for layer in range(len(problem.layers)))
    room_bytes = problem.gpu_state_bytes
    room = f"{size_text(room_bytes)} of the" if room_bytes < state_bytes else "all"
    what = (
        f"{description.name}: {len(problem.layers)} layers, room for {room} {size_text(state_bytes)} of optimizer "
        f"state on {cluster.device.name}"
    )
    print(what, file=people(STANDARD_OUTPUT in (arguments.out, arguments.menu)))
    return 0


def _divisors(number: int) -> tuple[int, ...]:
    """Return what divides a number, ascending."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


PROFILE = Verb(
    name="profile", summary="price a model on a cluster, from shapes alone", add_arguments=_add_arguments, run=_run
)
