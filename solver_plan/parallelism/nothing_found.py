"""A search that ended without a plan: what binds, and which single change brings a plan.

`explain` (`infeasible`) speaks first, of memory alone: it looks at more pipelines than there are, with devices in any
order and recomputation without rounding. Where those would fit and the search ends with nothing all the same, each
restriction of the space is lifted alone, and a plan looked for: one that is found says what binds.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from solver_plan.documents.fields import LARGEST_NUMBER
from solver_plan.errors import InfeasibleProblemError, NoPlanFoundError, SolverPlanError
from solver_plan.parallelism.problem import ParallelismProblem

MEMORY_FACTORS = (1.05, 1.2, 1.5, 2.0)
"""More memory that is tried, smallest first."""
MOST_CHANGES = 3
"""Changes that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The problem with one restriction less."""

    restriction: str
    """What binds, if this has a plan."""
    change: str
    problem: ParallelismProblem


def why_nothing(
    problem: ParallelismProblem,
    least_ms: float,
    not_searched: list[str],
    has_plan: Callable[[ParallelismProblem], bool],
) -> SolverPlanError:
    """Return the error that says why a search without a heuristic ended, within its limit, with no plan.

    Parameters
    ----------
    problem
        What was searched.
    least_ms
        Lower bound on every valid plan that the search proved; infinite: there is none.
    not_searched
        Parts of the space that were left out, as words.
    has_plan
        Looks for any plan of a problem, for as long as the limit of the search allows.
    """
    if LARGEST_NUMBER < least_ms < float("inf"):
        return InfeasibleProblemError(
            f"no plan exists: every iteration takes at least {least_ms:.3g} ms, times go up to {LARGEST_NUMBER:g} ms; "
            "correct the times, latencies and rates of the problem"
        )
    active = list(relaxations(problem))
    helpful = [one for one in active if has_plan(one.problem)][:MOST_CHANGES]
    memory = None if helpful else next((one for one in _more_memory(problem) if has_plan(one.problem)), None)
    binding = helpful or (active if memory is None else [memory])
    restrictions = ", ".join(one.restriction for one in binding) or "these devices"
    changes = [one.change for one in (helpful if memory is None else [memory])]
    if changes:
        remedy = f"there is one with {' or with '.join(changes)}"
    else:
        remedy = ("lift more than one of these restrictions, or " if len(active) > 1 else "") + "take larger devices"
    if least_ms == float("inf"):
        return InfeasibleProblemError(
            f"no plan exists with {restrictions}: every pipeline was looked at, and none fits; {remedy}"
        )
    left_out = f" ({'; '.join(not_searched)})" if not_searched else ""
    return NoPlanFoundError(
        f"no plan found with {restrictions}: the search ended by itself, more time would not help{left_out}; {remedy}"
    )


def relaxations(problem: ParallelismProblem) -> Iterator[Relaxation]:
    """Yield the problem with each restriction of its space lifted alone; not those that lift nothing."""
    space, cluster = problem.space, problem.cluster
    found = [
        (space.use_all_devices and cluster.devices > 1, "no idle device", "space.use_all_devices false"),
        (space.same_layout, "one layout for all stages", "space.same_layout false"),
        (space.max_stages is not None, f"at most {space.max_stages} stages", "space.max_stages null"),
        (
            space.device_counts is not None,
            f"stages of {_either(space.device_counts)} devices",
            "space.device_counts null",
        ),
        (
            not space.cross_node_stages and cluster.nodes > 1,
            "stages within a node",
            "space.cross_node_stages true",
        ),
        (
            space.recompute != "operator",
            "no recomputation" if space.recompute == "none" else "whole blocks recomputed",
            'space.recompute "operator"',
        ),
        (
            space.micro_batch_sizes is not None,
            f"micro-batches of {_either(space.micro_batch_sizes)}",
            "space.micro_batch_sizes null",
        ),
        (
            space.partitions is not None,
            f"tensor partitions {_either(space.partitions)}",
            "space.partitions null",
        ),
    ]
    wider = (
        replace(space, use_all_devices=False),
        replace(space, same_layout=False),
        replace(space, max_stages=None),
        replace(space, device_counts=None),
        replace(space, cross_node_stages=True),
        replace(space, recompute="operator"),
        replace(space, micro_batch_sizes=None),
        replace(space, partitions=None),
    )
    for (binds, restriction, change), one in zip(found, wider, strict=True):
        if binds:
            yield Relaxation(restriction=restriction, change=change, problem=replace(problem, space=one))


def _either(numbers: tuple[int, ...] | None) -> str:
    shown = [str(number) for number in numbers or ()]
    return " or ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _more_memory(problem: ParallelismProblem) -> Iterator[Relaxation]:
    for factor in MEMORY_FACTORS:
        memory_bytes = math.ceil(problem.cluster.memory_bytes_per_device * factor)
        cluster = replace(problem.cluster, memory_bytes_per_device=memory_bytes)
        change = f"cluster.memory_bytes_per_device {memory_bytes}"
        yield Relaxation(restriction="this memory", change=change, problem=replace(problem, cluster=cluster))
