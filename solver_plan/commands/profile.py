"""`profile`: price a described model on a described cluster, from shapes alone."""

import argparse
from typing import TYPE_CHECKING

from solver_plan.commands.verb import (
    STANDARD_OUTPUT,
    Verb,
    add_out,
    people,
    positive,
    positives,
    require_writable,
    whole,
    write_out,
    write_text_out,
)
from solver_plan.errors import InputError

if TYPE_CHECKING:
    from solver_plan.profiles.cluster import ClusterDescription
    from solver_plan.profiles.description import ModelDescription

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


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FILE:FUNCTION", help="as models/gpt.py:gpt3_1_3b or package.module:function")
    parser.add_argument("--cluster", required=True, help="a TOML file, or the name of a machine that comes along")
    parser.add_argument("--global-batch", type=positive, required=True, help="samples of one iteration")
    parser.add_argument("--kind", choices=("parallelism", "offload"), default="parallelism", help="of the problem")
    add_out(parser, "problem")
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


def _run(arguments: argparse.Namespace) -> int:
    given = [name for name in OFFLOAD_OPTIONS if getattr(arguments, name) is not None]
    if given and arguments.kind != "offload":
        raise InputError(
            f"--{given[0].replace('_', '-')} is for offload problems; give --kind offload, or leave it out"
        )
    require_writable(arguments.out)
    if arguments.menu is not None:
        require_writable(arguments.menu)
    elif arguments.menu_micro_batches is not None:
        raise InputError("--menu-micro-batches belongs to --menu; give --menu FILE too, or leave it out")
    from solver_plan.profiles.cluster import read_cluster
    from solver_plan.profiles.loading import load_description

    cluster = read_cluster(arguments.cluster)
    description = load_description(arguments.model)
    if arguments.kind == "offload":
        return _offload(arguments, description, cluster)
    from solver_plan.profiles.analytic import profile

    problem = profile(description, cluster, arguments.global_batch, model=arguments.model)
    write_out(problem, arguments.out)
    what = f"{description.name}: {len(problem.operators)} operators, {problem.cluster.devices} devices"
    print(what, file=people(arguments.out == STANDARD_OUTPUT))
    return 0


def _offload(arguments: argparse.Namespace, description: "ModelDescription", cluster: "ClusterDescription") -> int:
    from solver_plan.offload.curve import menu_text
    from solver_plan.profiles.offload import offload_menu, profile_offload

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
        sizes = arguments.menu_micro_batches or tuple(size for size in range(1, batch + 1) if batch % size == 0)
        entries = offload_menu(description, cluster, batch, micro_batches=sizes, staging_bytes=staging)
        write_text_out(menu_text(entries), arguments.menu)
    write_out(problem, arguments.out)
    state_bytes = sum(problem.state_bytes(layer) for layer in range(len(problem.layers)))
    what = (
        f"{description.name}: {len(problem.layers)} layers, room for {problem.gpu_state_bytes / 1e9:.2f} of "
        f"{state_bytes / 1e9:.2f} GB of optimizer state on {cluster.device.name}"
    )
    print(what, file=people(STANDARD_OUTPUT in (arguments.out, arguments.menu)))
    return 0


PROFILE = Verb(
    name="profile", summary="price a model on a cluster, from shapes alone", add_arguments=_add_arguments, run=_run
)
