"""Parallelism cases: tiny chains made here, and Aceso's measured profiles with its own predictions beside them."""

from functools import partial
from pathlib import Path

from benchmarks.case import Case, Reference
from solver_plan.parallelism.problem import (
    Cluster,
    LatencyLink,
    Operator,
    ParallelismProblem,
    Profile,
    Space,
)
from solver_plan.profiles.aceso import import_aceso
from solver_plan.solving import Budget

MEBIBYTE = 2**20


def chain(data: Path, *, blocks: int, devices: int, memory_bytes: int, global_batch: int) -> ParallelismProblem:
    """Return a made-up chain of an embedding, equal blocks of two operators, and a head."""
    link = LatencyLink(latency_ms=0.02, bytes_per_s=10e9)
    names = ["embedding", *(f"{part} {block}" for block in range(blocks) for part in ("attention", "mlp")), "head"]
    work_ms = {"embedding": 0.4, "attention": 2.0, "mlp": 3.0, "head": 1.5}
    weight_bytes = {"embedding": 60, "attention": 16, "mlp": 32, "head": 60}
    activation_bytes = {"embedding": 4, "attention": 40, "mlp": 24, "head": 20}
    return ParallelismProblem(
        cost_model="aceso",
        global_batch=global_batch,
        cluster=Cluster(
            nodes=1,
            devices_per_node=devices,
            memory_bytes_per_device=memory_bytes,
            intra_node=link,
            inter_node=link,
        ),
        operators=tuple(
            Operator(name=name, profile=name.split()[0], block_start=name.startswith("attention")) for name in names
        ),
        profiles={
            kind: tuple(
                Profile(
                    batch=batch,
                    tensor_parallel=degree,
                    partition=0,
                    forward_ms=work * batch / degree**0.8 + 0.1,
                    backward_ms=2 * work * batch / degree**0.8 + 0.1,
                    input_bytes=4 * MEBIBYTE * batch,
                    output_bytes=4 * MEBIBYTE * batch,
                    weight_bytes=weight_bytes[kind] * MEBIBYTE // degree,
                    activation_bytes=activation_bytes[kind] * MEBIBYTE * batch // degree,
                )
                for batch in (1, 2, 4)
                for degree in (1, 2)
            )
            for kind, work in work_ms.items()
        },
        space=Space(
            layout="stage",
            max_stages=None,
            device_counts=None,
            cross_node_stages=False,
            micro_batch_sizes=None,
            use_all_devices=True,
            recompute="operator",
        ),
        provenance={"source": "made up for the benchmarks"},
    )


def _aceso(
    name: str,
    size: str,
    *,
    nodes: int,
    devices_per_node: int,
    predicted_s: float | None,
    time_limit_s: float,
    layers: int | None = None,
    source: str = "Aceso, predicted",
    model: str = "gpt",
    database: str = "eurosys",
    memory_mb: int = 28000,
    global_batch: int = 1024,
) -> Case:
    return Case(
        name=name,
        data=f"aceso/{database}",
        build=lambda data: import_aceso(
            data / "aceso" / database,
            model=model,
            size=size,
            layers=layers,
            nodes=nodes,
            devices_per_node=devices_per_node,
            memory_mb=memory_mb,
            global_batch=global_batch,
        ),
        budget=Budget(time_limit_s=time_limit_s),
        baselines=("grid", "aceso"),
        references=() if predicted_s is None else (Reference(source=source, objective_ms=predicted_s * 1000),),
    )


def _wide_resnet(name: str, size: str, *, nodes: int, devices_per_node: int, predicted_s: float) -> Case:
    return _aceso(
        name,
        size,
        model="resnet",
        nodes=nodes,
        devices_per_node=devices_per_node,
        predicted_s=predicted_s,
        time_limit_s=200,
        global_batch=1536,
    )


CASES = (
    Case(
        name="tiny-2",
        build=partial(chain, blocks=2, devices=2, memory_bytes=1500 * MEBIBYTE, global_batch=8),
        budget=Budget(time_limit_s=10.0, deterministic=True),
        baselines=("grid",),
        smoke=True,
    ),
    Case(
        name="tiny-4",
        build=partial(chain, blocks=4, devices=4, memory_bytes=1200 * MEBIBYTE, global_batch=16),
        budget=Budget(time_limit_s=10.0, deterministic=True),
        baselines=("grid",),
        smoke=True,
    ),
    _aceso(
        "gpt-1.3b-small",
        "1_3B",
        nodes=1,
        devices_per_node=4,
        predicted_s=58.761,
        time_limit_s=30,
        database="miniset",
        memory_mb=12000,
        global_batch=512,
    ),
    _aceso("gpt-1.3b", "1_3B", nodes=1, devices_per_node=4, predicted_s=101.18, time_limit_s=30),
    _aceso("gpt-2.6b", "2_6B", nodes=1, devices_per_node=8, predicted_s=87.13, time_limit_s=30),
    _aceso("gpt-6.7b", "6_7B", nodes=2, devices_per_node=8, predicted_s=87.32, time_limit_s=90),
    _aceso("gpt-13b", "13B", nodes=4, devices_per_node=8, predicted_s=84.61, time_limit_s=90),
    _aceso(
        "gpt-1024-layers",
        "scale-layer",
        layers=1024,
        nodes=1,
        devices_per_node=8,
        predicted_s=462.6,
        source="uniform grid",
        time_limit_s=200,
    ),
    _aceso(
        "t5-770m-small",
        "770M",
        model="t5",
        nodes=1,
        devices_per_node=4,
        predicted_s=33.66,
        time_limit_s=60,
        database="miniset",
        memory_mb=12000,
        global_batch=512,
    ),
    _aceso("t5-3b", "3B", model="t5", nodes=1, devices_per_node=4, predicted_s=None, time_limit_s=200),
    _aceso("t5-6b", "6B", model="t5", nodes=1, devices_per_node=8, predicted_s=None, time_limit_s=200),
    _aceso("t5-11b", "11B", model="t5", nodes=2, devices_per_node=8, predicted_s=None, time_limit_s=200),
    _wide_resnet("wide-resnet-2b", "2B", nodes=1, devices_per_node=4, predicted_s=49.32),
    _wide_resnet("wide-resnet-4b", "4B", nodes=1, devices_per_node=8, predicted_s=56.52),
    _wide_resnet("wide-resnet-6.8b", "6_8B", nodes=2, devices_per_node=8, predicted_s=45.67),
    _wide_resnet("wide-resnet-13b", "13B", nodes=4, devices_per_node=8, predicted_s=47.60),
)
