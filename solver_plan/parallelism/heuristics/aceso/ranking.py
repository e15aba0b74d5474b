"""Heuristic-2: which primitives are tried first on a bottleneck (Aceso, section 4.3)."""

from dataclasses import dataclass

from solver_plan.parallelism.heuristics.aceso.pipeline import Evaluated
from solver_plan.parallelism.heuristics.aceso.primitives import PRIMITIVES, Primitive


@dataclass(frozen=True, slots=True)
class Shares:
    """What part of all stages' consumption falls to one stage."""

    compute: float
    """Of the work as it would be without loss of efficiency."""
    communication: float
    """Of the time lost against that: tensor-parallel collectives, small shards."""
    recompute: float


def shares(current: Evaluated, stage: int) -> Shares:
    """Return the shares of a stage."""

    def share(values: list[float]) -> float:
        total = sum(values)
        return values[stage] / total if total > 0 else 0.0

    return Shares(
        compute=share([trial.ideal_ms for trial in current.stages]),
        communication=share([max(0.0, trial.busy_ms - trial.ideal_ms) for trial in current.stages]),
        recompute=share([trial.recompute_ms for trial in current.stages]),
    )


def ordered_groups(current: Evaluated, stage: int) -> list[list[Primitive]]:
    """Return the primitives to try on a bottleneck, in groups; each primitive once.

    Where memory does not suffice: those that lower it. Otherwise, for each of the three consumptions in the order of
    the stage's share: first those that lower it and raise no other one of which the stage has more than the average
    (nor memory, if the stage recomputes), then the others that lower it; at last the rest.
    """
    if not current.fits:
        return [[primitive for primitive in PRIMITIVES if primitive.memory < 0]]
    share = shares(current, stage)
    average = 1 / len(current.stages)
    recomputes = current.stages[stage].recompute_ms > 0
    heavy = {
        "time": share.compute > average,
        "communication": share.communication > average,
        "memory": share.recompute > average or recomputes,
    }
    order = sorted(
        (("time", share.compute), ("communication", share.communication), ("memory", share.recompute)),
        key=lambda entry: -entry[1],
    )
    left = list(PRIMITIVES)
    groups = []
    for resource, _ in order:
        lowering = [primitive for primitive in left if _effect(primitive, resource) < 0]
        harmless = [
            primitive
            for primitive in lowering
            if not any(_effect(primitive, other) > 0 for other, is_heavy in heavy.items() if is_heavy)
        ]
        groups += [harmless, [primitive for primitive in lowering if primitive not in harmless]]
        left = [primitive for primitive in left if primitive not in lowering]
    return [group for group in (*groups, left) if group]


def _effect(primitive: Primitive, resource: str) -> int:
    return {"time": primitive.time, "communication": primitive.communication, "memory": primitive.memory}[resource]
