"""Offload cases: tiny ones made here, the reference instances with their best known periods, and logged profiles with
other rooms, with and without clipping and streaming.

The logged figures (forward, backward, parameters per rank, CPU update rate) are those of the runs of Deep Optimizer
States (https://arxiv.org/abs/2410.21316), by way of the reference data's README.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.case import Case, Reference, data_folder
from solver_plan.documents import ProblemDocument
from solver_plan.kinds import read_problem
from solver_plan.offload.heuristics import RULES
from solver_plan.offload.layers import equal_layers, problem_from_layers
from solver_plan.offload.problem import OffloadProblem, Rates
from solver_plan.solving import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedProfile:
    """Totals of one rank, an iteration."""

    layers: int
    parameters: int
    forward_ms: float
    backward_ms: float
    rates: Rates


def _rates(cpu: float, gpu: float, link: float) -> Rates:
    return Rates(
        cpu_update_parameters_per_s=cpu, gpu_update_parameters_per_s=gpu, d2h_bytes_per_s=link, h2d_bytes_per_s=link
    )


PROFILES = {
    "20b_4xh100": LoggedProfile(
        layers=40,
        parameters=5_000_000_000,
        forward_ms=210.8,
        backward_ms=908.9,
        rates=_rates(2195486081.0, 60e9, 50e9),
    ),
    "7b_4xa100": LoggedProfile(
        layers=32,
        parameters=1_750_000_000,
        forward_ms=238.9,
        backward_ms=620.7,
        rates=_rates(852203555.0, 40e9, 22e9),
    ),
    "13b_1xa100": LoggedProfile(
        layers=40,
        parameters=13_000_000_000,
        forward_ms=1073.8,
        backward_ms=4340.2,
        rates=_rates(1661936540.0, 40e9, 22e9),
    ),
}


def logged(
    data: Path, *, profile: str, room: float, clip: bool, streamed_layers: int = 0, chunks: int = 8
) -> OffloadProblem:
    """Return a logged profile with room for a share of the state and staging for some layers' states."""
    totals = PROFILES[profile]
    state_bytes = 12 * totals.parameters
    return problem_from_layers(
        equal_layers(totals.layers, totals.parameters, totals.forward_ms, totals.backward_ms),
        totals.rates,
        gpu_state_bytes=round(room * state_bytes),
        staging_bytes=streamed_layers * (state_bytes // totals.layers),
        chunks_per_layer=chunks,
        clip_gradients=clip,
    )


def mixed(data: Path, *, layers: int, chunks: int, streamed: bool = False) -> OffloadProblem:
    """Return layers of very different sizes: an embedding, experts with much state and little work, a tied head."""
    parameters = [400_000_000] + [(50, 100, 300, 50)[layer % 4] * 1_000_000 for layer in range(layers - 2)] + [0]
    forward = [0.1] + [(4.0, 6.0, 3.0, 5.0)[layer % 4] for layer in range(layers - 2)] + [2.0]
    return problem_from_layers(
        [(f"l{layer}", parameters[layer], forward[layer], 2.5 * forward[layer]) for layer in range(layers)],
        _rates(4e9, 60e9, 22e9),
        gpu_state_bytes=3 * sum(parameters),
        staging_bytes=12 * 400_000_000 if streamed else 0,
        chunks_per_layer=chunks,
        clip_gradients=False,
    )


def _read(data: Path, name: str) -> ProblemDocument:
    return read_problem(data / "offload" / f"{name}.json")


def _reference_cases() -> list[Case]:
    """Every instance that has a best known period; none where the reference data is absent."""
    path = data_folder() / "offload" / "references.json"
    if not path.exists():
        return []
    known = json.loads(path.read_text())["instances"]
    return [
        Case(
            name=name,
            data=f"offload/{name}.json",
            build=partial(_read, name=name),
            budget=Budget(time_limit_s=_limit_s(name)),
            baselines=RULES,
            references=(Reference(source="best known", objective_ms=figures["best_known_ms"]),),
        )
        for name, figures in sorted(known.items())
    ]


def _limit_s(name: str) -> float:
    """Seconds that the figures are to be reached in."""
    if name.startswith("deep200"):
        return 15.0
    return 5.0 if name.split("_")[0] in ("20b", "7b", "13b") and "stream" not in name else 20.0


CASES = (
    Case(
        name="tiny-mixed",
        build=partial(mixed, layers=8, chunks=1),
        budget=Budget(time_limit_s=5.0, deterministic=True),
        baselines=RULES,
        smoke=True,
    ),
    Case(
        name="tiny-stream",
        build=partial(mixed, layers=6, chunks=1, streamed=True),
        budget=Budget(time_limit_s=0.3, deterministic=True),
        baselines=RULES,
        smoke=True,
    ),
    *(
        Case(
            name=f"{profile}-{share}-{'clip' if clip else 'free'}",
            build=partial(logged, profile=profile, room=share / 100, clip=clip),
            budget=Budget(time_limit_s=5.0),
            baselines=RULES,
        )
        for profile in PROFILES
        for share in (5, 15, 33, 45, 60, 80)
        for clip in (False, True)
    ),
    *(
        Case(
            name=f"{profile}-stream{streamed}{'-clip' if clip else ''}",
            build=partial(logged, profile=profile, room=0.1, clip=clip, streamed_layers=streamed, chunks=4),
            budget=Budget(time_limit_s=20.0),
            baselines=RULES,
        )
        for profile in PROFILES
        for streamed in (1, 3)
        for clip in (False, True)
    ),
    Case(
        name="mixed40-stream",
        build=partial(mixed, layers=40, chunks=2, streamed=True),
        budget=Budget(time_limit_s=20.0),
        baselines=RULES,
    ),
    *_reference_cases(),
)
