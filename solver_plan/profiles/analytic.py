"""Analytic profiles: from the descriptions of a model and of a cluster to a parallelism problem, running nothing.

Roofline with launch overhead. For a micro-batch of b samples a replica on t tensor-parallel devices an operator takes

    max( sum of products FLOPs / (peak * efficiency(tokens, width per shard)) + bytes moved / memory rate,
         kernels * launch ) + collectives

where the backward does every product twice (gradients of both factors). A ring collective of s bytes on t devices takes
latency + c (t - 1) / t * s / bus rate, with c = 2 for all-reduce and 1 for the others: the alpha-beta model of Thakur,
Rabenseifner and Gropp (2005), with bus bandwidth as NCCL's tests define it. Collectives of tensor parallelism are
inside the times, as in a measured profile.

With sequence parallelism (Korthikanti et al., MLSys 2023) an all-reduce becomes a reduce-scatter and an all-gather of
together the same volume; the input that the backward gathers once more does so behind the product before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from solver_plan.documents import Bytes, computed_from
from solver_plan.errors import InputError
from solver_plan.parallelism.problem import Cluster, LatencyLink, Operator, Overlap, ParallelismProblem, Profile, Space
from solver_plan.profiles.cluster import ClusterDescription, NodeLink
from solver_plan.profiles.description import Collective, DataType, ModelDescription, Partition, Size

LARGEST_BATCH = 64
"""Larger batches of one replica gain nothing: products are at their best efficiency long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """Time of one operator for one micro-batch on one device."""

    forward_ms: float
    """Without collectives."""
    backward_ms: float
    forward_collective_ms: float
    """Of tensor parallelism."""
    backward_collective_ms: float


def profile(
    description: ModelDescription,
    cluster: ClusterDescription,
    global_batch: int,
    *,
    model: str | None = None,
    batches: Sequence[int] | None = None,
    space: Space | None = None,
    sequence_parallel: bool = False,
    cost_model: Literal["aceso", "full"] = "full",
    overlap: Overlap | None = None,
) -> ParallelismProblem:
    """Return the problem of training a model on a cluster, priced analytically.

    Parameters
    ----------
    description, cluster
        What is trained, and on what.
    global_batch
        Samples of one iteration.
    model
        Where the description comes from, as ``models/gpt.py:gpt3_1_3b``; kept in the problem for execution.
    batches
        Samples of a micro-batch on one replica; by default every divisor of the global batch up to `LARGEST_BATCH`.
    space
        Which plans are allowed; by default `default_space`.
    sequence_parallel
        Divide along the sequence what tensor parallelism leaves whole.
    cost_model
        `full` prices what `aceso` leaves out: gradient reduction, optimizer step, sharding.
    overlap
        Which communication the training program hides behind computation; by default the reduction of gradients.

    Raises
    ------
    InputError
        If the batch is not positive, or some operator fits the devices' memory in no layout.
    """
    if global_batch < 1:
        raise InputError(f"global batch: found {global_batch}; it is a positive number of samples")
    if batches is None:
        batches = [batch for batch in range(1, min(global_batch, LARGEST_BATCH) + 1) if global_batch % batch == 0]
    impossible = [batch for batch in batches if batch < 1 or global_batch % batch]
    if impossible or not batches:
        raise InputError(
            f"batches: found {impossible or 'none'}; each is positive and divides the global batch {global_batch}"
        )
    degrees = tensor_parallel_degrees(description, cluster)
    usable = int(cluster.device.memory_bytes * (1 - cluster.device.memory_margin))
    with computed_from(f"{description.name} on {cluster.name}"):
        profiles: dict[str, tuple[Profile, ...]] = {}
        input_kinds = _kinds_before(description)
        for kind, operator in description.kinds.items():
            entries = tuple(
                entry
                for index, partition in enumerate(operator.partitions)
                for entry in _profiles(
                    description, cluster, partition, index, input_kinds[kind], batches, degrees, sequence_parallel
                )
            )
            fitting = tuple(entry for entry in entries if _least_bytes(entry, description) <= usable)
            if not fitting:
                least = min(_least_bytes(entry, description) for entry in entries)
                raise InputError(
                    f"{description.name}: operator {operator.name} alone needs {least} bytes at batch {min(batches)} "
                    f"and tensor parallel degree {degrees[-1]}, a device of {cluster.name} has {usable} usable: "
                    "take larger devices"
                )
            profiles[kind] = fitting
        intra, inter = cluster.intra_node, cluster.inter_node
        return ParallelismProblem(
            cost_model=cost_model,
            global_batch=global_batch,
            model=model,
            cluster=Cluster(
                nodes=cluster.nodes,
                devices_per_node=cluster.devices_per_node,
                memory_bytes_per_device=cluster.device.memory_bytes,
                memory_margin=cluster.device.memory_margin,
                intra_node=LatencyLink(latency_ms=intra.latency_ms, bytes_per_s=intra.bytes_per_s),
                inter_node=LatencyLink(latency_ms=inter.latency_ms, bytes_per_s=inter.bytes_per_s),
                collectives=intra.collectives,
                node_bytes_per_s=inter.node_bytes_per_s,
                device_memory_bytes_per_s=cluster.device.memory_bytes_per_s * cluster.device.memory_efficiency,
            ),
            operators=tuple(
                Operator(
                    name=operator.name,
                    profile=operator.kind,
                    block_start=operator.block_start,
                    shares_weights_with=operator.shares_weights_with,
                )
                for operator in description.operators
            ),
            profiles=profiles,
            space=space or default_space(cluster, cost_model),
            state_bytes_per_weight_byte=description.bytes_per_parameter.per_weight_byte,
            bytes_per_parameter=description.bytes_per_parameter,
            sequence_parallel=sequence_parallel,
            overlap=overlap or Overlap(),
            provenance={"source": "analytic", "description": description.name, "cluster": cluster.name},
        )


def default_space(cluster: ClusterDescription, cost_model: Literal["aceso", "full"] = "full") -> Space:
    """Return the plans that are looked for by default.

    One layout for a stage, any number of devices, per-operator recomputation, all devices used; under `full` ZeRO 0, 1
    and 3, and stages of several nodes. On several nodes all stages have the same layout: that they differ gains little
    there, and takes a hundred times as long to search.
    """
    full = cost_model == "full"
    return Space(
        layout="stage",
        max_stages=None,
        device_counts=None,
        cross_node_stages=full and cluster.nodes > 1,
        micro_batch_sizes=None,
        use_all_devices=True,
        recompute="operator",
        sharding=(0, 1, 3) if full else (0,),
        device_order="rank",
        same_layout=full and cluster.nodes > 1,
    )


def tensor_parallel_degrees(description: ModelDescription, cluster: ClusterDescription) -> tuple[int, ...]:
    """Return the tensor parallel degrees that the model's shapes and a node of the cluster allow, ascending."""
    divided, node = description.tensor_parallel_divides, cluster.devices_per_node
    return tuple(degree for degree in range(1, node + 1) if divided % degree == 0 and node % degree == 0)


def operator_time(
    partition: Partition,
    cluster: ClusterDescription,
    data_type: DataType,
    batch: int,
    tensor_parallel: int,
    *,
    sequence_parallel: bool = False,
) -> OperatorTime:
    """Return the time of an operator for a micro-batch of `batch` samples on one replica.

    Raises `InputError` if the cluster's devices have no rates for the data type or for fused attention.
    """
    device = cluster.device
    forward = backward = 0.0
    for product in partition.products:
        time = cluster.arithmetic(product.data_type or data_type).matrix_ms(product, batch, tensor_parallel)
        forward += time
        backward += 2 * time
    if partition.attention is not None:
        once, again = cluster.attention_arithmetic().attention_ms(partition.attention, batch, tensor_parallel)
        forward += once
        backward += again
    passes = partition.passes
    forward += device.memory_ms(passes.forward.per_device(tensor_parallel, sequence_parallel) * batch)
    backward += device.memory_ms(
        passes.backward.per_device(tensor_parallel, sequence_parallel) * batch
        + passes.backward_once.per_device(tensor_parallel)
    )
    link = cluster.intra_node
    return OperatorTime(
        forward_ms=max(forward, partition.forward_kernels * device.launch_ms),
        backward_ms=max(backward, partition.backward_kernels * device.launch_ms),
        forward_collective_ms=sum(
            collective_ms(each, link, batch, tensor_parallel) for each in partition.forward_collectives
        ),
        backward_collective_ms=sum(
            collective_ms(each, link, batch, tensor_parallel) for each in partition.backward_collectives
        ),
    )


def collective_ms(collective: Collective, link: NodeLink, batch: int, devices: int) -> float:
    """Return the time of one collective over the tensor of `batch` samples on `devices` devices; 0 on one."""
    if devices == 1:
        return 0.0
    ring = link.ring(devices)
    rounds = 2 if collective.kind == "all_reduce" else 1
    moved = rounds * (devices - 1) / devices * collective.size * batch
    return ring.latency_ms + moved / ring.bus_bytes_per_s * 1000


def _profiles(
    description: ModelDescription,
    cluster: ClusterDescription,
    partition: Partition,
    index: int,
    before: Partition | None,
    batches: Sequence[int],
    degrees: Sequence[int],
    sequence_parallel: bool,
) -> Iterator[Profile]:
    def held(size: Size) -> int:
        return size.per_device(degree, sequence_parallel)

    for batch in batches:
        for degree in degrees:
            time = operator_time(
                partition, cluster, description.data_type, batch, degree, sequence_parallel=sequence_parallel
            )
            entering = description.input_bytes if before is None else held(before.output)
            yield Profile(
                batch=batch,
                tensor_parallel=degree,
                partition=index,
                forward_ms=time.forward_ms + time.forward_collective_ms,
                backward_ms=time.backward_ms + time.backward_collective_ms,
                input_bytes=entering * batch,
                output_bytes=held(partition.output) * batch,
                weight_bytes=partition.weights.per_device(degree),
                activation_bytes=held(partition.kept) * batch,
                forward_reserved_bytes=held(partition.forward_workspace) * batch,
                backward_reserved_bytes=held(partition.backward_workspace) * batch,
                forward_collective_ms=time.forward_collective_ms,
                backward_collective_ms=time.backward_collective_ms,
            )


def _kinds_before(description: ModelDescription) -> dict[str, Partition | None]:
    """Return what stands before the operators of each kind; before all of a kind the same must leave.

    Raises `InputError` where operators of one kind receive tensors of different sizes.
    """
    before: dict[str, Partition | None] = {}
    previous: Partition | None = None
    for operator in description.operators:
        known = before.setdefault(operator.kind, previous)
        if (known is None) != (previous is None) or (known and previous and known.output != previous.output):
            raise InputError(
                f"{description.name}: operator {operator.name} of kind {operator.kind} receives a tensor of another "
                "size than the first of its kind; give it a kind of its own"
            )
        previous = operator.partitions[0]
    return before


def _least_bytes(entry: Profile, description: ModelDescription) -> Bytes:
    """Return what a stage of this operator alone needs at least."""
    return round(entry.weight_bytes * description.bytes_per_parameter.per_weight_byte) + entry.activation_bytes
