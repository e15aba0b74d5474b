"""Aceso's cost model (EuroSys 2024, `aceso_cost_model.py` of its artifact), to the digit.

Sets      stages i = 0..p-1 with operators a..e-1; N micro-batches; b = p-1-i stages behind
Time      t_i = sum of forward(op) + backward(op) + sum over recomputed op of forward(op)
                + P(input(a), edge before) + P(output(e-1), edge behind) + sum of resharding(op-1, op)   → stage_costs
          iteration = (N - 1) * max_i t_i + sum_i t_i                                                    → iteration_ms
Memory    memory_i = W * s + (b + 1) * (input(a) + held - saved) + peak
                     + max(max forward_reserved + max backward_reserved, W)                              → stage_costs
          W: weights of the stage, s: state bytes per weight byte; both maxima leave out the stage's last operator

There is no term for the gradient reduction of data parallelism or for the optimizer step.
"""

import itertools
from collections.abc import Sequence

from solver_plan.errors import InvalidPlanError
from solver_plan.parallelism.costs.links import transfer_ms
from solver_plan.parallelism.costs.recompute import saved_and_peak
from solver_plan.parallelism.costs.resharding import resharding_ms
from solver_plan.parallelism.costs.stage import StageCost
from solver_plan.parallelism.plan import Layout, ParallelismPlan, Stage
from solver_plan.parallelism.problem import Cluster, Link, ParallelismProblem, Profile


def iteration_ms(stage_ms: Sequence[float], micro_batches: int) -> float:
    """Return the time of an iteration from the stage times of one micro-batch."""
    return (micro_batches - 1) * max(stage_ms) + sum(stage_ms)


def stage_costs(problem: ParallelismProblem, plan: ParallelismPlan) -> list[StageCost]:
    """Return the cost of each stage of a plan. Raises `InvalidPlanError` for what was not profiled."""
    edges = edge_links(problem.cluster, [stage.devices for stage in plan.stages])
    last = len(plan.stages) - 1
    return [
        _stage_cost(problem, plan.micro_batch_size, stage, index, last - index, edges[index], edges[index + 1])
        for index, stage in enumerate(plan.stages)
    ]


def edge_links(cluster: Cluster, devices: Sequence[Sequence[int]]) -> list[Link]:
    """Return the link before each stage, and behind the last.

    An edge whose stages do not lie together in one node is inter-node. The edge before the first stage counts as
    intra-node, the one behind the last as inter-node (its payload is next to nothing).
    """
    links = [cluster.intra_node]
    for before, after in itertools.pairwise(devices):
        nodes = {device // cluster.devices_per_node for device in (*before, *after)}
        links.append(cluster.intra_node if len(nodes) == 1 else cluster.inter_node)
    return [*links, cluster.inter_node]


def _stage_cost(
    problem: ParallelismProblem, micro_batch: int, stage: Stage, index: int, behind: int, before: Link, after: Link
) -> StageCost:
    first, end = stage.operators
    layouts = [layout for layout in stage.layout for _ in range(*layout.operators)]
    profiles = [
        _profile(problem, index, operator, micro_batch, layout)
        for operator, layout in zip(range(first, end), layouts, strict=True)
    ]
    operators = problem.operators[first:end]
    flags = [False] * (end - first)
    for begin, stop in stage.recompute:
        flags[begin - first : stop - first] = [True] * (stop - begin)

    held = [
        profile.activation_bytes * operator.activation_factor
        for profile, operator in zip(profiles, operators, strict=True)
    ]
    saved, peak = saved_and_peak(
        flags,
        held,
        [operator.block_start for operator in operators],
        [operator.activation_factor != 1 for operator in operators],
    )
    weights = sum(profile.weight_bytes for profile in profiles)
    but_last = profiles[:-1]
    reserved = max((profile.forward_reserved_bytes for profile in but_last), default=0) + max(
        (profile.backward_reserved_bytes for profile in but_last), default=0
    )

    recompute = sum(profile.forward_ms for profile, flag in zip(profiles, flags, strict=True) if flag)
    resharding = 0.0
    for position in range(1, end - first):
        resharding += _resharding_ms(
            problem,
            index,
            first + position,
            profiles[position - 1 : position + 1],
            layouts[position - 1 : position + 1],
        )
    receive = transfer_ms(profiles[0].input_bytes, before)
    send = transfer_ms(_output_bytes(problem, stage, micro_batch, profiles[-1], layouts[-1]), after)
    return StageCost(
        forward_ms=sum(profile.forward_ms for profile in profiles) + receive + resharding / 2,
        backward_ms=sum(profile.backward_ms for profile in profiles) + recompute + send + resharding / 2,
        recompute_ms=recompute,
        communication_ms=receive + send + resharding,
        weight_state_bytes=weights * problem.state_bytes_per_weight_byte,
        activation_bytes=(behind + 1) * (profiles[0].input_bytes + sum(held) - saved),
        peak_bytes=peak,
        reserved_bytes=max(reserved, weights),
    )


def _profile(problem: ParallelismProblem, stage: int, operator: int, micro_batch: int, layout: Layout) -> Profile:
    batch = micro_batch // layout.data_parallel
    profile = problem.profile_of(operator, batch, layout.tensor_parallel, layout.partition)
    if profile is None:
        raise InvalidPlanError(
            (
                f"stages[{stage}]: operator {problem.operators[operator].name} was not profiled at batch {batch}, "
                f"tensor parallel {layout.tensor_parallel}, partition {layout.partition}; choose a profiled one",
            )
        )
    return profile


def _output_bytes(
    problem: ParallelismProblem, stage: Stage, micro_batch: int, last: Profile, last_layout: Layout
) -> int:
    """Return the size of the stage's output: Aceso reads it at the tensor parallel degree of the first operator."""
    degree = stage.layout[0].tensor_parallel
    if degree == last_layout.tensor_parallel:
        return last.output_bytes
    batch = micro_batch // last_layout.data_parallel
    other = problem.profile_of(stage.operators[1] - 1, batch, degree, last_layout.partition)
    return (other or last).output_bytes


def _resharding_ms(
    problem: ParallelismProblem, stage: int, operator: int, profiles: list[Profile], layouts: list[Layout]
) -> float:
    produced = (profiles[0].output_layout, layouts[0].tensor_parallel, layouts[0].data_parallel)
    received = (profiles[1].input_layout, layouts[1].tensor_parallel, layouts[1].data_parallel)
    time = resharding_ms(problem.resharding, produced, received, profiles[1].input_bytes)
    if time is None:
        raise InvalidPlanError(
            (
                f"stages[{stage}]: no collective turns {produced} into {received} before operator "
                f"{problem.operators[operator].name}; keep the layout or change it elsewhere",
            )
        )
    return time
