"""Wavefront cases: tiny ones made here, the three model families, and reference instances with the best known plans."""

import json
import random
from functools import partial
from pathlib import Path

from benchmarks.case import Case, Reference, data_folder
from models import multitask_clip, ofasys, qwen_val
from solver_plan.kinds import read_problem
from solver_plan.profiles.multitask import MultitaskDescription
from solver_plan.solving import Budget
from solver_plan.wavefront.from_operators import problem_from_operators
from solver_plan.wavefront.problem import Cluster, Component, Phases, WavefrontProblem

BASELINES = ("sequential", "task-groups", "spindle")
INTRA_NODE_BYTES_PER_S = 400e9
"""NVLink of an A800 (data sheet)."""
INTER_NODE_BYTES_PER_S = 50e9
"""400 Gb/s InfiniBand."""


def reference_problem(data: Path, *, name: str) -> WavefrontProblem:
    """Return a reference instance."""
    found = read_problem(str(data / "wavefront" / f"{name}.json"))
    assert isinstance(found, WavefrontProblem)
    return found


def tiny(data: Path, *, components: int, devices: int) -> WavefrontProblem:
    """Return a made-up problem of components of three layers."""
    draw = random.Random(components)
    made = []
    for index in range(components):
        floor, work = draw.uniform(0.3, 1), draw.uniform(2, 12)
        times = {str(n): round(floor + work / n, 3) for n in (1, 2, 4) if n <= devices}
        made.append(Component(name=f"c{index}", task=f"t{index % 2}", layers=3, layer_ms=times))
    return WavefrontProblem(
        cluster=Cluster(devices=devices, devices_per_node=devices),
        components=tuple(made),
        edges=(("c0", "c2"),),
        provenance={"source": "made up for the benchmarks"},
    )


def small_with_everything(data: Path, *, seed: int) -> WavefrontProblem:
    """Return a made-up problem of 12 to 15 layers on two nodes of two devices: small enough to prove a plan optimal.

    Two tasks share weights, data moves between nodes at a quarter of the speed, gradients are reduced, the memory of a
    device holds from 40 % of everything up to all of it, and every third problem has a backward of its own.
    """
    draw = random.Random(seed)
    shared = draw.randint(2, 4)
    layers = [shared, shared]
    while sum(layers) < 12:
        layers.append(draw.randint(1, min(5, 15 - sum(layers))))
    mega = 10**6
    made = []
    for index, count in enumerate(layers):
        floor, work = draw.uniform(0.3, 1), draw.uniform(2, 12)
        made.append(
            Component(
                name=f"c{index}",
                task=f"t{index % 2}",
                layers=count,
                layer_ms={str(n): round(floor + work / n, 3) for n in (1, 2, 4)},
                parameters="shared" if index < 2 else None,
                state_bytes_per_layer=(12 if index < 2 else draw.randint(5, 20)) * mega,
                activation_bytes_per_layer=draw.randint(5, 30) * mega,
                gradient_bytes_per_layer=(3 if index < 2 else draw.randint(0, 6)) * mega,
                output_bytes=draw.randint(5, 30) * mega,
            )
        )
    everything = sum(c.layers * (c.state_bytes_per_layer + c.activation_bytes_per_layer) for c in made)
    edges = [("c0", "c2"), *([("c1", "c3")] if len(made) > 3 else [])]
    return WavefrontProblem(
        cluster=Cluster(
            devices=4,
            devices_per_node=2,
            memory_bytes_per_device=round(everything * draw.uniform(0.4, 1)),
            intra_node_bytes_per_s=20e9,
            inter_node_bytes_per_s=5e9,
        ),
        phases="forward_backward" if seed % 3 == 2 else "fused",
        components=tuple(made),
        edges=tuple(edges),
        provenance={"source": "made up for the benchmarks"},
    )


def random_graph(data: Path, *, components: int, devices: int) -> WavefrontProblem:
    """Return a made-up graph of tasks: encoders into a trunk into heads, with curves of many slopes."""
    draw = random.Random(components)
    made: list[Component] = []
    edges: list[tuple[str, str]] = []
    task = 0
    while len(made) < components:
        stages = [("encoder", draw.randint(1, 3)), ("trunk", 1), ("head", draw.randint(1, 4))]
        before: list[str] = []
        for stage, count in stages:
            names = [f"t{task}/{stage}{index}" for index in range(count)]
            for name in names:
                floor, work = draw.uniform(0.2, 0.8), draw.uniform(1, 40 if stage == "trunk" else 15)
                times = {str(2**k): round(floor + work / 2**k, 3) for k in range(7) if 2**k <= devices}
                layers = draw.choice((4, 6, 12, 16, 24))
                made.append(Component(name=name, task=f"t{task}", layers=layers, layer_ms=times))
                edges += [(each, name) for each in before]
            before = names
        task += 1
    kept = made[:components]
    names_kept = {component.name for component in kept}
    return WavefrontProblem(
        cluster=Cluster(devices=devices, devices_per_node=8),
        components=tuple(kept),
        edges=tuple(edge for edge in edges if set(edge) <= names_kept),
        provenance={"source": "made up for the benchmarks"},
    )


def family(
    data: Path, *, model: MultitaskDescription, devices: int, phases: Phases = "fused", whole: bool = False
) -> WavefrontProblem:
    """Return a model family on nodes of eight devices; `whole` with transfers, reductions and 80 GB of memory."""
    cluster = Cluster(
        devices=devices,
        devices_per_node=8,
        memory_bytes_per_device=80 * 10**9 if whole else None,
        intra_node_bytes_per_s=INTRA_NODE_BYTES_PER_S if whole else None,
        inter_node_bytes_per_s=INTER_NODE_BYTES_PER_S if whole else None,
    )
    return problem_from_operators(model.operators, cluster, phases=phases)


def _reference_case(name: str, time_limit_s: float) -> Case:
    file = data_folder() / "wavefront" / "references.json"
    known = json.loads(file.read_text(encoding="utf-8"))[name] if file.is_file() else None
    references = () if known is None else (
        Reference(source="best known", objective_ms=known["best_known_ms"]),
        Reference(source="Spindle's own planner", objective_ms=known["spindle_ms"]),
    )  # fmt: skip
    return Case(
        name=name,
        build=partial(reference_problem, name=name),
        data=f"wavefront/{name}.json",
        budget=Budget(time_limit_s=time_limit_s),
        baselines=BASELINES,
        references=references,
    )


PUBLISHED_SPEED_UP = {
    ("clip4", 8): 1.21, ("clip4", 16): 1.22, ("clip4", 32): 1.52,
    ("clip7", 8): 1.31, ("clip7", 16): 1.26, ("clip7", 32): 1.54,
    ("clip10", 8): 1.37, ("clip10", 16): 1.33, ("clip10", 32): 1.71,
    ("ofasys4", 8): 1.53, ("ofasys4", 16): 1.42, ("ofasys4", 32): 1.51,
    ("ofasys7", 8): 1.71, ("ofasys7", 16): 1.43, ("ofasys7", 32): 1.33,
    ("qwen-val", 32): 1.16, ("qwen-val", 64): 1.63,
}  # fmt: skip
"""Spindle over DeepSpeed, ASPLOS 2025, figure 8: measured, to be read beside the planned speed-up over `sequential`."""

TWO_PHASES = "-two-phases"
"""Ends the name of a case with phases of their own for the backward, transfers, reductions and 80 GB of memory."""
FROZEN = (("qwen-val-frozen", 32), ("qwen-val-frozen", 64))
FAMILIES = {
    "clip4": multitask_clip.clip4,
    "clip7": multitask_clip.clip7,
    "clip10": multitask_clip.clip10,
    "ofasys4": ofasys.ofasys4,
    "ofasys7": ofasys.ofasys7,
    "qwen-val": qwen_val.qwen_val_7b,
    "qwen-val-frozen": qwen_val.qwen_val_7b_frozen,
}

CASES = (
    Case(
        name="tiny-3",
        build=partial(tiny, components=3, devices=4),
        budget=Budget(time_limit_s=4.0, deterministic=True),
        baselines=BASELINES,
        smoke=True,
    ),
    _reference_case("clip4_16", 20.0),
    _reference_case("clip10_16", 20.0),
    _reference_case("qwen3_32", 20.0),
    _reference_case("ofasys4_16", 30.0),
    _reference_case("random60_64", 90.0),
    _reference_case("small_shared_8", 60.0),
    Case(
        name="random200_256",
        build=partial(random_graph, components=200, devices=256),
        budget=Budget(time_limit_s=90.0),
        baselines=BASELINES,
    ),
    *(
        Case(
            name=f"{name}-{devices}",
            build=partial(family, model=FAMILIES[name](), devices=devices),
            budget=Budget(time_limit_s=20.0),
            baselines=BASELINES,
        )
        for name, devices in PUBLISHED_SPEED_UP
    ),
    *(
        Case(
            name=f"{name}-{devices}{TWO_PHASES}",
            build=partial(family, model=FAMILIES[name](), devices=devices, phases="forward_backward", whole=True),
            budget=Budget(time_limit_s=30.0),
            baselines=BASELINES,
        )
        for name, devices in (*PUBLISHED_SPEED_UP, *FROZEN)
    ),
    *(
        Case(
            name=f"qwen-val-{size}-256",
            build=partial(family, model=model(), devices=256),
            budget=Budget(time_limit_s=30.0),
            baselines=BASELINES,
        )
        for size, model in (("30b", qwen_val.qwen_val_30b), ("70b", qwen_val.qwen_val_70b))
    ),
    *(
        Case(
            name=f"small-{seed}",
            build=partial(small_with_everything, seed=seed),
            budget=Budget(time_limit_s=60.0),
        )
        for seed in range(12)
    ),
    Case(
        name="qwen-val-frozen-32",
        build=partial(family, model=qwen_val.qwen_val_7b_frozen(), devices=32, phases="forward_backward"),
        budget=Budget(time_limit_s=30.0),
        baselines=BASELINES,
    ),
)
