"""Small multi-task problems and plans written by hand, for the tests of their execution."""

from collections.abc import Mapping, Sequence

from solver_plan.documents import digest_of
from solver_plan.wavefront.costs import choice_of
from solver_plan.wavefront.plan import Slice, WavefrontPlan
from solver_plan.wavefront.problem import Cluster, Component, Mode, Phases, WavefrontProblem

SAMPLES = 8
FORWARD_MS, BACKWARD_MS = 1.0, 2.0


def component(
    name: str, layers: int, *, weights: str | None = None, frozen: bool = False, batch: int | None = SAMPLES
) -> Component:
    """A component whose layer takes 1 ms forward and 2 ms backward in every mode.

    Modes 0 to 3: 1, 2, 4 devices of data parallelism, and 2 of tensor parallelism; 4: 2 x 2.
    """
    degrees = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2))
    return Component(
        name=name,
        task=name.split("/")[0],
        layers=layers,
        modes=tuple(
            Mode(
                devices=t * d,
                forward_ms=FORWARD_MS,
                backward_ms=0.0 if frozen else BACKWARD_MS,
                degrees={"tensor_parallel": t, "data_parallel": d},
            )
            for t, d in degrees
        ),
        parameters=weights,
        output_bytes=8,
        batch=batch,
    )


def problem(
    components: Sequence[Component],
    edges: Sequence[tuple[str, str]] = (),
    *,
    devices: int = 4,
    phases: Phases = "fused",
    model: str | None = None,
) -> WavefrontProblem:
    return WavefrontProblem(
        cluster=Cluster(devices=devices, devices_per_node=devices),
        phases=phases,
        components=tuple(components),
        edges=tuple(edges),
        model=model,
    )


Piece = tuple[str, tuple[int, int], Sequence[int], int | None]
"""Component, layers, devices, mode."""


def plan(made_for: WavefrontProblem, pieces: Sequence[Piece], backwards: Sequence[int] = ()) -> WavefrontPlan:
    """A plan that starts its slices in the order given, each as early as it can.

    With phases of their own `backwards` are the slices in the order of their backwards; behind all forwards.
    """
    free = [0.0] * made_for.cluster.devices
    both = made_for.phases == "forward_backward"
    ended: dict[str, float] = {}
    forward: list[tuple[float, float]] = []
    lengths: list[tuple[float, float]] = []
    for name, layers, devices, mode in pieces:
        piece = Slice(component=name, layers=layers, mode=mode, devices=tuple(devices), start_ms=0.0, end_ms=0.0)
        choice = choice_of(made_for.component_of[name], piece)
        assert choice is not None
        count = layers[1] - layers[0]
        lengths.append((choice.forward_ms * count, choice.backward_ms * count))
        waits = [ended[before] for before, after in made_for.edges if after == name] + [ended.get(name, 0.0)]
        start = max(*waits, *(free[device] for device in devices))
        end = start + (lengths[-1][0] if both else sum(lengths[-1]))
        ended[name] = end
        for device in devices:
            free[device] = end
        forward.append((start, end))
    backward: Mapping[int, tuple[float, float]] = _one_by_one(lengths, backwards, max(free)) if both else {}
    return WavefrontPlan(
        problem_digest=digest_of(made_for),
        slices=tuple(
            Slice(
                component=name,
                layers=layers,
                mode=mode,
                devices=tuple(devices),
                start_ms=forward[index][0],
                end_ms=forward[index][1],
                backward_start_ms=backward[index][0] if both else None,
                backward_end_ms=backward[index][1] if both else None,
            )
            for index, (name, layers, devices, mode) in enumerate(pieces)
        ),
    )


def _one_by_one(
    lengths: Sequence[tuple[float, float]], order: Sequence[int], start: float
) -> dict[int, tuple[float, float]]:
    found = {}
    for index in order:
        found[index] = start, start + lengths[index][1]
        start = found[index][1]
    return found
