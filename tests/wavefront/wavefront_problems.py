"""Small wavefront problems and plans, made here."""

import random
from collections.abc import Sequence

from solver_plan.wavefront.plan import Slice, WavefrontPlan
from solver_plan.wavefront.problem import Cluster, Component, Phases, WavefrontProblem

MEGA = 10**6


def component(name: str, layers: int = 2, *, task: str = "a", times: dict[str, float] | None = None, **sizes: int):
    return Component(name=name, task=task, layers=layers, layer_ms=times or {"1": 4.0, "2": 2.5, "4": 1.5}, **sizes)


def problem(
    components: Sequence[Component],
    edges: Sequence[tuple[str, str]] = (),
    *,
    devices: int = 4,
    per_node: int = 2,
    memory: int | None = None,
    intra: float | None = None,
    inter: float | None = None,
    phases: Phases = "fused",
) -> WavefrontProblem:
    return WavefrontProblem(
        cluster=Cluster(
            devices=devices,
            devices_per_node=per_node,
            memory_bytes_per_device=memory,
            intra_node_bytes_per_s=intra,
            inter_node_bytes_per_s=inter,
        ),
        phases=phases,
        components=tuple(components),
        edges=tuple(edges),
    )


def piece(name: str, layers: tuple[int, int], devices: Sequence[int], start: float, end: float, **more: float) -> Slice:
    return Slice(component=name, layers=layers, devices=tuple(devices), start_ms=start, end_ms=end, **more)


def plan(*slices: Slice) -> WavefrontPlan:
    return WavefrontPlan(problem_digest=None, slices=slices)


def random_problem(
    seed: int,
    *,
    components: int = 5,
    layers: int = 3,
    devices: int = 4,
    memory: int | None = None,
    bandwidth: bool = False,
    gradients: bool = False,
    phases: Phases = "fused",
) -> WavefrontProblem:
    draw = random.Random(seed)
    made = []
    for index in range(components):
        floor, work = draw.uniform(0.3, 1), draw.uniform(2, 12)
        made.append(
            Component(
                name=f"c{index}",
                task=f"t{index % 2}",
                layers=layers,
                layer_ms={str(n): round(floor + work / n, 3) for n in (1, 2, 4) if n <= devices},
                parameters="shared" if index < 2 else None,
                state_bytes_per_layer=(10 if index < 2 else draw.randint(5, 20)) * MEGA,
                activation_bytes_per_layer=draw.randint(5, 30) * MEGA,
                gradient_bytes_per_layer=draw.randint(1, 6) * MEGA if gradients else 0,
                output_bytes=draw.randint(5, 30) * MEGA,
            )
        )
    edges = [("c0", f"c{components // 2}")] if components > 2 else []
    return problem(
        made,
        edges,
        devices=devices,
        memory=memory,
        intra=20e9 if bandwidth else None,
        inter=5e9 if bandwidth else None,
        phases=phases,
    )
