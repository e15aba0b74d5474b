"""The `full` cost model of a plan: operators summed into stages, the schedule played, and what comes once an iteration.

Operator    forward and backward as profiled; of collectives that overlap (`overlap.tensor_parallel`) one of t pieces
            stays exposed                                                                      → `operator_times`
Stage       forward + receiving the input, backward + recomputed forwards + receiving the output's gradient, both with
            the traffic of sharded weights; transfers that overlap are delays between actions instead    → `stage_costs`
Iteration   max over groups (end of its last backward + exposed reduction) + exposed gathering of weights
            + shared weights + optimizer step                                                  → `evaluate_full`
Memory      state + activations of all micro-batches in flight as the schedule has them, on all stages of the group
            + peak of recomputation + largest workspace of an operator                         → `stage_costs`

Formulas: `costs.full`. A tensor-parallel group lies in one node; a data-parallel group may span nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from solver_plan.errors import InvalidPlanError
from solver_plan.parallelism.costs.full import (
    Ring,
    StageWork,
    exposed_ms,
    optimizer_ms,
    ring_between_nodes,
    state_bytes,
    traffic,
    with_sharded_weights,
)
from solver_plan.parallelism.costs.links import transfer_ms
from solver_plan.parallelism.costs.recompute import saved_and_peak
from solver_plan.parallelism.costs.stage import StageCost
from solver_plan.parallelism.plan import ParallelismPlan, Stage
from solver_plan.parallelism.problem import (
    BytesPerParameter,
    Cluster,
    LatencyLink,
    Link,
    ParallelismProblem,
    Profile,
)
from solver_plan.parallelism.schedule import StageAction, group_ends, orders_of


@dataclass(frozen=True, slots=True)
class _Sums:
    """A stage before its schedule is known."""

    work: StageWork
    recompute_ms: float
    receive_ms: float
    """Of the input."""
    send_ms: float
    """Of the output's gradient."""
    kept_bytes: float
    """One micro-batch."""
    peak_bytes: float
    workspace_bytes: float


def evaluate_full(problem: ParallelismProblem, plan: ParallelismPlan) -> tuple[float, tuple[StageCost, ...]]:
    """Return iteration time in ms and stages of a well-formed plan.

    Raises `InvalidPlanError` for what was not profiled, or a deadlock.
    """
    groups, orders = orders_of(plan)
    sums = [_sums(problem, plan, index) for index in range(len(plan.stages))]
    group_of = {stage: number for number, order in enumerate(orders) for stage in {action[0] for action in order}}
    stages = stage_costs(problem, sums, orders)
    ends = group_ends([stage.durations for stage in stages], orders)
    overlapped = problem.overlap.reduction
    end = gather = step = 0.0
    for number in range(len(groups)):
        work = group_work([sums[index].work for index in range(len(sums)) if group_of[index] == number])
        forward, backward = with_sharded_weights(work)
        sent = traffic(work)
        pieces = work.pieces if overlapped else 1
        end = max(end, ends[number] + exposed_ms(sent.reduction_ms, backward if overlapped else 0.0, pieces))
        gather = max(gather, exposed_ms(sent.gather_ms, forward if overlapped else 0.0, pieces))
        rate = problem.cluster.device_memory_bytes_per_s
        step = max(step, optimizer_ms(work, rate) if rate is not None else 0.0)
    return end + gather + shared_weights_ms(problem, plan) + step, tuple(stages)


def group_work(works: Sequence[StageWork]) -> StageWork:
    """Return the work of all stages of one group of devices."""
    if len(works) == 1:
        return works[0]
    return replace(
        works[0],
        forward_ms=sum(one.forward_ms for one in works),
        backward_ms=sum(one.backward_ms for one in works),
        weight_bytes=sum(one.weight_bytes for one in works),
        gradient_bytes=sum(one.gradient_bytes for one in works),
        optimizer_state_bytes=sum(one.optimizer_state_bytes for one in works),
        pieces=sum(one.pieces for one in works),
    )


def stage_costs(
    problem: ParallelismProblem, sums: Sequence[_Sums], orders: Sequence[Sequence[StageAction]]
) -> list[StageCost]:
    """Return the cost of each stage; memory is that of a device with all stages that it shares."""
    costs: list[StageCost | None] = [None] * len(sums)
    for order in orders:
        mine = sorted({action[0] for action in order})
        activations = most_held(order, {index: sums[index].kept_bytes for index in mine})
        state = state_bytes(group_work([sums[index].work for index in mine]))
        peak = max(sums[index].peak_bytes for index in mine)
        workspace = max(sums[index].workspace_bytes for index in mine)
        for index in mine:
            own = sums[index]
            forward, backward = with_sharded_weights(own.work)
            hidden = problem.overlap.transfers
            costs[index] = StageCost(
                forward_ms=forward + (0.0 if hidden else own.receive_ms),
                backward_ms=backward + (0.0 if hidden else own.send_ms),
                recompute_ms=own.recompute_ms,
                communication_ms=forward
                - own.work.forward_ms
                + backward
                - own.work.backward_ms
                + (0.0 if hidden else own.receive_ms + own.send_ms),
                weight_state_bytes=state,
                activation_bytes=activations,
                peak_bytes=peak,
                reserved_bytes=workspace,
                input_arrival_ms=own.receive_ms if hidden else 0.0,
                gradient_arrival_ms=own.send_ms if hidden else 0.0,
            )
    return [cost for cost in costs if cost is not None]


def most_held(order: Sequence[StageAction], kept_bytes: dict[int, float]) -> float:
    """Return the most bytes of activations that a group holds at once; a backward or its W frees a micro-batch's."""
    held = largest = 0.0
    for stage, kind, _ in order:
        if kind == "F":
            held += kept_bytes[stage]
            largest = max(largest, held)
        elif kind != "I":
            held -= kept_bytes[stage]
    return largest


# -- prices of operators, links and rings ---------------------------------------------------------------------------


def operator_times(problem: ParallelismProblem, profile: Profile) -> tuple[float, float]:
    """Return forward and backward of an operator, in ms, less the collectives that run behind its products."""
    if not problem.overlap.tensor_parallel:
        return profile.forward_ms, profile.backward_ms
    hidden = 1 - 1 / profile.tensor_parallel
    return (
        profile.forward_ms - hidden * profile.forward_collective_ms,
        profile.backward_ms - hidden * profile.backward_collective_ms,
    )


def received_ms(problem: ParallelismProblem, size_bytes: int, link: Link, tensor_parallel: int, devices: int) -> float:
    """Return the time for a device to receive its part of a tensor from a neighbouring stage.

    Each tensor-parallel device of the sender sends its part and the receivers gather it (Narayanan et al., SC 2021,
    section 4.1). Devices of one node share its adapters.

    Parameters
    ----------
    size_bytes
        As the profile of the receiving or sending operator has it on one device.
    link
        Between the stages.
    tensor_parallel, devices
        Of the stage that receives.
    """
    whole = problem.sequence_parallel and tensor_parallel > 1
    part = size_bytes if whole else -(-size_bytes // tensor_parallel)
    cluster = problem.cluster
    if link is cluster.inter_node and isinstance(link, LatencyLink) and cluster.node_bytes_per_s is not None:
        share = cluster.node_bytes_per_s / min(devices, cluster.devices_per_node)
        return 0.0 if part == 0 else link.latency_ms + part / min(link.bytes_per_s, share) * 1e3
    return transfer_ms(part, link)


def link_rate(link: Link) -> tuple[float, float]:
    """Return latency in ms and bytes per second of large transfers."""
    if isinstance(link, LatencyLink):
        return link.latency_ms, link.bytes_per_s
    return 0.0, max(rate for _, rate in link.table)


def ring_inside(cluster: Cluster, devices: int) -> Ring:
    """Return the ring over devices of one node."""
    latency, rate = link_rate(cluster.intra_node)
    for row in cluster.collectives:
        if row.devices <= devices:
            latency, rate = row.latency_ms, row.bus_bytes_per_s
    return Ring(devices=devices, latency_ms=latency, bus_bytes_per_s=rate)


def replica_ring(cluster: Cluster, replicas: int, members_per_node: int) -> Ring:
    """Return the ring of a data-parallel group, so many of whose members lie together in a node."""
    inside = replace(ring_inside(cluster, min(replicas, cluster.devices_per_node)), devices=replicas)
    latency, rate = link_rate(cluster.inter_node)
    return ring_between_nodes(
        replicas,
        min(members_per_node, replicas),
        cluster.devices_per_node,
        inside,
        cluster.node_bytes_per_s or rate,
        latency,
    )


def bytes_per_parameter(problem: ParallelismProblem) -> BytesPerParameter:
    """Return what training holds of a parameter; `full` problems say it."""
    assert problem.bytes_per_parameter is not None
    return problem.bytes_per_parameter


def stage_work(
    problem: ParallelismProblem,
    *,
    forward_ms: float,
    backward_ms: float,
    weight_bytes: float,
    replicas: Ring,
    sharding: int,
    blocks: int,
) -> StageWork:
    """Return a stage from its sums; `blocks` begin in it."""
    each = bytes_per_parameter(problem)
    return StageWork(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes / each.weight * each.gradient,
        optimizer_state_bytes=weight_bytes / each.weight * each.optimizer_state,
        replicas=replicas,
        sharding=sharding if replicas.devices > 1 else 0,
        pieces=max(1, blocks),
    )


# -- one stage of a plan --------------------------------------------------------------------------------------------


def _sums(problem: ParallelismProblem, plan: ParallelismPlan, index: int) -> _Sums:
    stage = plan.stages[index]
    first, end = stage.operators
    (layout,) = stage.layout
    batch = plan.micro_batch_size // layout.data_parallel
    profiles: list[Profile] = []
    for operator in range(first, end):
        profile = problem.profile_of(operator, batch, layout.tensor_parallel, layout.partition)
        if profile is None:
            raise InvalidPlanError(
                (
                    f"stages[{index}]: operator {problem.operators[operator].name} was not profiled at batch {batch}, "
                    f"tensor parallel {layout.tensor_parallel}, partition {layout.partition}; choose a profiled one",
                )
            )
        profiles.append(profile)
    operators = problem.operators[first:end]
    flags = [False] * (end - first)
    for begin, stop in stage.recompute:
        flags[begin - first : stop - first] = [True] * (stop - begin)
    held = [each.activation_bytes * one.activation_factor for each, one in zip(profiles, operators, strict=True)]
    saved, peak = saved_and_peak(
        flags, held, [one.block_start for one in operators], [one.activation_factor != 1 for one in operators]
    )
    times = [operator_times(problem, each) for each in profiles]
    recompute = sum(forward for (forward, _), flag in zip(times, flags, strict=True) if flag)
    names = {one.name for one in operators}
    weights = sum(
        each.weight_bytes for each, one in zip(profiles, operators, strict=True) if one.shares_weights_with not in names
    )
    degree, devices = layout.tensor_parallel, len(stage.devices)
    receive = send = 0.0
    if index > 0:
        link = _edge(problem.cluster, plan.stages[index - 1], stage)
        receive = received_ms(problem, profiles[0].input_bytes, link, degree, devices)
    if index + 1 < len(plan.stages):
        link = _edge(problem.cluster, stage, plan.stages[index + 1])
        send = received_ms(problem, profiles[-1].output_bytes, link, degree, devices)
    return _Sums(
        work=stage_work(
            problem,
            forward_ms=sum(forward for forward, _ in times),
            backward_ms=sum(backward for _, backward in times) + recompute,
            weight_bytes=weights,
            replicas=_stage_ring(problem.cluster, stage),
            sharding=stage.sharding,
            blocks=sum(one.block_start for one in operators),
        ),
        recompute_ms=recompute,
        receive_ms=receive,
        send_ms=send,
        kept_bytes=profiles[0].input_bytes + sum(held) - saved,
        peak_bytes=peak,
        workspace_bytes=max(each.forward_reserved_bytes + each.backward_reserved_bytes for each in profiles),
    )


def _edge(cluster: Cluster, before: Stage, after: Stage) -> Link:
    nodes = {device // cluster.devices_per_node for device in (*before.devices, *after.devices)}
    return cluster.intra_node if len(nodes) == 1 else cluster.inter_node


def _stage_ring(cluster: Cluster, stage: Stage) -> Ring:
    """Return the data-parallel ring of a stage: the one that has fewest members in each node."""
    layout = stage.layout[0]
    members = layout.data_parallel
    for rank in range(layout.tensor_parallel):
        nodes = {device // cluster.devices_per_node for device in stage.devices[rank :: layout.tensor_parallel]}
        members = min(members, -(-layout.data_parallel // len(nodes)))
    return replica_ring(cluster, layout.data_parallel, members)


def shared_weights_ms(problem: ParallelismProblem, plan: ParallelismPlan) -> float:
    """Return the time to sum the gradients of weights that operators on different stages share."""
    home = {
        problem.operators[operator].name: index
        for index, stage in enumerate(plan.stages)
        for operator in range(*stage.operators)
    }
    total = 0.0
    for number, operator in enumerate(problem.operators):
        if operator.shares_weights_with is None:
            continue
        here, there = home[operator.name], home[operator.shares_weights_with]
        if here == there:
            continue
        layout = plan.stages[here].layout[0]
        batch = plan.micro_batch_size // layout.data_parallel
        profile = problem.profile_of(number, batch, layout.tensor_parallel, layout.partition)
        assert profile is not None
        link = _edge(problem.cluster, plan.stages[there], plan.stages[here])
        total += shared_ms(problem, profile.weight_bytes, link)
    return total


def shared_ms(problem: ParallelismProblem, weight_bytes: float, link: Link) -> float:
    """Return the time to all-reduce the gradients of some weights between two devices."""
    each = bytes_per_parameter(problem)
    latency, rate = link_rate(link)
    pair = Ring(devices=2, latency_ms=latency, bus_bytes_per_s=rate)
    return pair.all_reduce_ms(weight_bytes / each.weight * each.gradient)
