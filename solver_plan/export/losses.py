"""What of a plan another system cannot be told, and what it can.

A loss is something that changes what the plan costs: the layout of a stage, a cut inside a layer, a set of recomputed
operators, an order of actions, a ZeRO stage, a placement on nodes.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

from solver_plan.export.configuration import Recomputation
from solver_plan.export.layers import LayerChain
from solver_plan.export.target import Target
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.schedule import StageAction, interleaved, one_forward_one_backward, orders_of

About = Literal[
    "layout", "cuts", "recomputation", "order", "sharding", "placement", "sequence", "updates", "streaming", "timeline"
]
MOST_NAMED = 3
"""Stages or operators that one line names."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One thing that another system cannot be told."""

    about: About
    meaning: str
    """What the plan has, and what the other system has instead."""

    def __str__(self) -> str:
        return f"{self.about}: {self.meaning}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What of a plan another system can be told; None or False: it cannot."""

    layout: tuple[int, int, int] | None
    """(tensor parallel, data parallel, partition) of all stages."""
    sharding: int | None
    cuts: bool
    recomputation: Recomputation | None
    groups: int
    virtual_stages: int
    """1 where the order is lost."""
    orders: tuple[tuple[str, ...], ...] | None
    """Of a custom order that is kept."""


def losses_of(
    problem: ParallelismProblem, plan: ParallelismPlan, chain: LayerChain, target: Target
) -> tuple[list[Loss], Kept]:
    """Return what a target cannot be told of a valid plan, and what it can."""
    found: list[Loss] = []
    groups, virtual, orders = _order(plan, target, found)
    layout = _layout(problem, plan, target, found)
    cuts = _cuts(problem, plan, chain, target, found)
    kept = Kept(
        layout=layout,
        sharding=_sharding(plan, target, groups, found),
        cuts=cuts,
        recomputation=_recomputation(plan, chain, target, cuts, found),
        groups=groups,
        virtual_stages=virtual,
        orders=orders,
    )
    _placement(problem, plan, found)
    return found, kept


def plan_cuts(plan: ParallelismPlan) -> tuple[int, ...]:
    """Return where the stages begin, and where the last one ends."""
    return (*(stage.operators[0] for stage in plan.stages), plan.stages[-1].operators[1])


def _layout(
    problem: ParallelismProblem, plan: ParallelismPlan, target: Target, found: list[Loss]
) -> tuple[int, int, int] | None:
    layouts = dict.fromkeys(
        (one.tensor_parallel, one.data_parallel, one.partition) for stage in plan.stages for one in stage.layout
    )
    degrees = {(t, d) for t, d, _ in layouts}
    several = {entry.partition for entries in problem.profiles.values() for entry in entries} != {0}
    if len(degrees) > 1:
        shown = ", ".join(
            f"stage {number}: " + " then ".join(f"tp {t} dp {d}" for t, d in degrees_of)
            for number, stage in enumerate(plan.stages[: MOST_NAMED + 1])
            for degrees_of in [dict.fromkeys((one.tensor_parallel, one.data_parallel) for one in stage.layout)]
        )
        more = ", …" if len(plan.stages) > MOST_NAMED + 1 else ""
        found.append(Loss("layout", f"{shown}{more}; {target.name} has one layout for all (space.same_layout)"))
        return None
    odd = [(t, d, k) for t, d, k in layouts if k and t > 1 and several]
    if odd:
        found.append(
            Loss("layout", f"tensors are partitioned another way (partition {odd[0][2]}); {target.name} has one way")
        )
        return (*odd[0][:2], 0)
    return next(iter(layouts))


def _cuts(
    problem: ParallelismProblem, plan: ParallelismPlan, chain: LayerChain, target: Target, found: list[Loss]
) -> bool:
    inside = [cut for cut in plan_cuts(plan)[1:-1] if cut not in chain.cuts]
    if inside:
        named = ", ".join(problem.operators[cut].name for cut in inside[:MOST_NAMED])
        more = f" and {len(inside) - MOST_NAMED} more" if len(inside) > MOST_NAMED else ""
        found.append(
            Loss("cuts", f"{len(inside)} inside a layer, before {named}{more}; {target.name} cuts between layers")
        )
    return not inside


def _recomputation(
    plan: ParallelismPlan, chain: LayerChain, target: Target, cuts_kept: bool, found: list[Loss]
) -> Recomputation | None:
    recomputed = frozenset(
        index for stage in plan.stages for first, end in stage.recompute for index in range(first, end)
    )
    cuts = plan_cuts(plan)
    for rule in recomputations(chain, target, cuts if cuts_kept else None):
        if rule.operators(chain, cuts if cuts_kept else (0, chain.operators)) == recomputed:
            return rule
    parts = []
    for number, stage in enumerate(plan.stages):
        first, end = stage.operators
        count = sum(index in recomputed for index in range(first, end))
        if count:
            parts.append(f"{count} of {end - first} operators of stage {number}")
    more = f" and others of {len(parts) - MOST_NAMED} more stages" if len(parts) > MOST_NAMED else ""
    can = {
        "nothing": "nothing",
        "core_attention": "the core of the attention",
        "first_layers": "the same number of layers of each stage",
        "every_layer": "every layer",
    }
    rules = [can[rule] for rule in target.rules]
    found.append(
        Loss(
            "recomputation",
            f"{', '.join(parts[:MOST_NAMED])}{more}; {target.name} recomputes {', '.join(rules[:-1])} or {rules[-1]}",
        )
    )
    return None


def recomputations(chain: LayerChain, target: Target, cuts: tuple[int, ...] | None) -> list[Recomputation]:
    """Return what a target can be told to recompute of stages with these cuts, the least time first.

    None for the cuts: only what does not depend on them.
    """
    ways: list[Recomputation] = []
    for rule in target.rules:
        if rule == "first_layers":
            if cuts is not None:
                most = max(len(chain.within(first, end)) for first, end in itertools.pairwise(cuts))
                ways += [Recomputation("first_layers", number) for number in range(1, most)]
        elif rule != "core_attention" or chain.core_attention:
            ways.append(Recomputation(rule))
    return ways


def _sharding(plan: ParallelismPlan, target: Target, groups: int, found: list[Loss]) -> int | None:
    values = {
        stage.sharding
        for stage in plan.stages
        if any(one.data_parallel > 1 for one in stage.layout)  # nothing is sharded on one replica
    }
    if not values:
        return 0
    if len(values) > 1:
        shown = ", ".join(str(value) for value in sorted(values))
        found.append(
            Loss("sharding", f"stages of ZeRO {shown}; {target.name} has one ZeRO stage for all (space.same_layout)")
        )
        return None
    value = values.pop()
    allowed = target.shardings(groups)
    if value not in allowed:
        pipeline = " in a pipeline" if groups > 1 else ""
        shown = ", ".join(map(str, allowed))
        found.append(Loss("sharding", f"ZeRO {value}; {target.name} has {shown}{pipeline} (space.sharding)"))
        return None
    return value


def _order(
    plan: ParallelismPlan, target: Target, found: list[Loss]
) -> tuple[int, int, tuple[tuple[str, ...], ...] | None]:
    """Return the groups of devices, the stages of each, and a custom order that is kept."""
    if plan.schedule is None:
        return len(plan.stages), 1, None
    lists = sorted(orders_of(plan)[1], key=lambda order: min(stage for stage, _, _ in order))
    groups = len(lists)
    virtual, rest = divmod(len(plan.stages), groups)
    looped = not rest and all(
        {stage for stage, _, _ in order} == set(range(group, len(plan.stages), groups))
        for group, order in enumerate(lists)
    )
    if looped and _regular(lists, virtual, plan.micro_batches):
        if virtual == 1 or target.interleaves:
            return groups, virtual, None
        found.append(
            Loss("order", f"{virtual} virtual stages on each group of devices; {target.name} has no interleaved 1F1B")
        )
        return groups, 1, None
    if looped and target.custom_orders:
        return groups, virtual, tuple(tuple(f"{s}{kind}{m}" for s, kind, m in order) for order in lists)
    if not looped:
        found.append(
            Loss("order", f"stages are dealt out to devices in an order of their own; {target.name} deals them in turn")
        )
    else:
        found.append(Loss("order", f"actions run in an order of their own; {target.name} runs 1F1B"))
    return groups, 1, None


def _regular(lists: list[list[StageAction]], virtual: int, micro_batches: int) -> bool:
    """Return whether the orders are 1F1B or interleaved 1F1B."""
    groups = len(lists)
    if virtual > 1 and micro_batches % groups:
        return False
    for group, order in enumerate(lists):
        if virtual > 1:
            regular = interleaved(groups, group, virtual, micro_batches)
        else:
            regular = [(group, kind, number) for kind, number in one_forward_one_backward(groups, group, micro_batches)]
        if order != regular:
            return False
    return True


def _placement(problem: ParallelismProblem, plan: ParallelismPlan, found: list[Loss]) -> None:
    """Other systems number ranks by stage: the nodes must be met in the same pattern, whatever they are called."""
    per_node = problem.cluster.devices_per_node
    seats = [device for stage in _first_stages(plan) for device in stage]
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    for rank, device in enumerate(seats):
        node, own = rank // per_node, device // per_node
        if there.setdefault(node, own) != own or back.setdefault(own, node) != node:
            found.append(
                Loss(
                    "placement",
                    f"rank {rank} would be device {device}, on node {own}; ranks go by stage, and {per_node} of them "
                    f"share a node",
                )
            )
            return


def _first_stages(plan: ParallelismPlan) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(stage.devices for stage in plan.stages))
