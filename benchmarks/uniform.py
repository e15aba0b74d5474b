"""Predicts a uniform configuration under the `full` cost model: equal degrees for every stage, as published runs have.

The planner's own evaluation takes the same formulas from `solver_plan.parallelism.costs.full`; what stands here only
sums the operators of a description into stages.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from solver_plan.parallelism.costs.full import (
    Ring,
    StageWork,
    exposed_transfers,
    in_flight,
    iteration_ms,
    memory_bytes,
    ring_between_nodes,
)
from solver_plan.profiles.analytic import operator_time
from solver_plan.profiles.cluster import ClusterDescription
from solver_plan.profiles.description import ModelDescription, OperatorDescription

Recompute = Literal["none", "attention", "mlp", "every_other_product", "blocks"]
"""Nothing; the attention core; the MLP; all but attention and every other product (torchtitan's selective
checkpointing); whole blocks."""

CORE = ("attention_core", "attention_score", "attention_softmax", "attention_dropout", "attention_context")
MLP = ("mlp_in", "mlp_activation", "mlp_out")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """How every stage of a run is parallelised."""

    tensor_parallel: int
    pipeline: int
    virtual_stages: int
    data_parallel: int
    micro_batch: int
    """Samples of one replica."""
    micro_batches: int
    sequence_parallel: bool
    tensor_parallel_overlap: bool
    """Collectives run behind the products beside them, in as many pieces as devices (Transformer Engine)."""
    transfer_overlap: bool
    """Sending to the next stage runs behind computation."""
    reduction_overlap: bool
    sharding: int
    recompute: Recompute
    recomputed_share: float
    """Of the blocks, where whole blocks are recomputed."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a configuration is predicted to cost."""

    step_ms: float
    memory_bytes: float
    """Of the fullest device."""


@dataclass(frozen=True, slots=True)
class _Totals:
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    kept_bytes: float = 0.0
    output_bytes: float = 0.0
    """What leaves the last of the operators."""
    peak_bytes: float = 0.0
    workspace_bytes: float = 0.0
    weight_bytes: float = 0.0

    def __add__(self, other: "_Totals") -> "_Totals":
        return _Totals(
            forward_ms=self.forward_ms + other.forward_ms,
            backward_ms=self.backward_ms + other.backward_ms,
            kept_bytes=self.kept_bytes + other.kept_bytes,
            output_bytes=other.output_bytes,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
            workspace_bytes=max(self.workspace_bytes, other.workspace_bytes),
            weight_bytes=self.weight_bytes + other.weight_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class UniformPipeline:
    """A uniform configuration with its operators summed into stages."""

    configuration: Configuration
    stages: tuple[StageWork, ...]
    memory_bytes: float
    """Of the fullest device."""
    held_bytes: float
    """States and activations of the fullest device, without what is brought back or taken beside."""
    memory_bytes_per_s: float
    shared_ms: float

    def predict(self, speed: float = 1.0) -> Prediction:
        """Return step time and memory; forward and backward run `speed` times as fast as the tables say."""
        step = iteration_ms(
            [
                replace(stage, forward_ms=stage.forward_ms / speed, backward_ms=stage.backward_ms / speed)
                for stage in self.stages
            ],
            self.configuration.micro_batches,
            memory_bytes_per_s=self.memory_bytes_per_s,
            virtual_stages=self.configuration.virtual_stages,
            overlapped=self.configuration.reduction_overlap,
            shared_ms=self.shared_ms,
        )
        return Prediction(step_ms=step, memory_bytes=self.memory_bytes)


def uniform_pipeline(
    description: ModelDescription, cluster: ClusterDescription, configuration: Configuration
) -> UniformPipeline:
    """Sum the operators of a description into the stages of a uniform configuration."""
    pipeline, virtual = configuration.pipeline, configuration.virtual_stages
    parts = list(_parts(description, pipeline * virtual))
    prices: dict[str, _Totals] = {}
    totals: list[_Totals] = []
    for device in range(pipeline):
        total = _Totals()
        for part in parts[device::pipeline]:
            total += _part_totals(description, cluster, configuration, part, prices)
        totals.append(total)
    per_parameter = description.bytes_per_parameter
    device_rate = cluster.device.memory_bytes_per_s * cluster.device.memory_efficiency
    replicas = _replica_ring(cluster, configuration)
    stages = tuple(
        StageWork(
            forward_ms=total.forward_ms,
            backward_ms=total.backward_ms,
            transfer_ms=_transfer_ms(description, cluster, configuration),
            weight_bytes=total.weight_bytes,
            gradient_bytes=total.weight_bytes / per_parameter.weight * per_parameter.gradient,
            optimizer_state_bytes=total.weight_bytes / per_parameter.weight * per_parameter.optimizer_state,
            replicas=replicas,
            sharding=configuration.sharding,
            pieces=max(1, sum(operator.block_start for part in parts[device::pipeline] for operator in part)),
        )
        for device, total in enumerate(totals)
    )
    flights = [in_flight(pipeline, index, configuration.micro_batches, virtual) for index in range(pipeline)]
    devices = list(zip(stages, flights, totals, strict=True))
    held = max(memory_bytes(stage, flight, total.kept_bytes, 0, 0) for stage, flight, total in devices)
    memory = max(
        memory_bytes(stage, flight, total.kept_bytes, total.peak_bytes, total.workspace_bytes)
        for stage, flight, total in devices
    )
    return UniformPipeline(
        configuration=configuration,
        stages=stages,
        memory_bytes=memory,
        held_bytes=held,
        memory_bytes_per_s=device_rate,
        shared_ms=_shared_ms(description, cluster, configuration),
    )


def _parts(description: ModelDescription, count: int) -> Iterator[tuple[OperatorDescription, ...]]:
    """Cut the chain at block starts into parts of equally many blocks.

    Where blocks do not divide, what stands before and behind them counts as a block each, and earlier parts take one
    more.
    """
    blocks: list[list[OperatorDescription]] = []
    for operator in description.operators:
        if operator.block_start or not blocks:
            blocks.append([])
        blocks[-1].append(operator)
    tail = [operator for operator in description.operators if operator.kind in ("final_norm", "head")]
    first, middle = blocks[0], blocks[1:]
    middle[-1] = middle[-1][: -len(tail)]
    if len(middle) % count == 0:
        units = middle
        sizes = [len(middle) // count] * count
        head_and_tail = True
    else:
        units = [first, *middle, tail]
        sizes = [len(units) // count + (index < len(units) % count) for index in range(count)]
        head_and_tail = False
    start = 0
    for index, size in enumerate(sizes):
        part = [operator for unit in units[start : start + size] for operator in unit]
        if head_and_tail and index == 0:
            part = [*first, *part]
        if head_and_tail and index == count - 1:
            part = [*part, *tail]
        yield tuple(part)
        start += size


def _part_totals(
    description: ModelDescription,
    cluster: ClusterDescription,
    configuration: Configuration,
    part: Iterable[OperatorDescription],
    prices: dict[str, _Totals],
) -> _Totals:
    total = _Totals()
    blocks: list[list[OperatorDescription]] = [[]]
    for operator in part:
        if operator.block_start or operator.kind in ("final_norm", "head"):
            blocks.append([])
        blocks[-1].append(operator)
    for block in blocks:
        for operator in block:
            if operator.kind not in prices:
                prices[operator.kind] = _operator_totals(description, cluster, configuration, operator)
        if block and block[0].block_start:
            total += _block_totals(configuration, [(each.kind, prices[each.kind]) for each in block], description)
        else:
            for operator in block:
                total += prices[operator.kind]
    return total


def _operator_totals(
    description: ModelDescription,
    cluster: ClusterDescription,
    configuration: Configuration,
    operator: OperatorDescription,
) -> _Totals:
    batch, degree = configuration.micro_batch, configuration.tensor_parallel
    sequence_parallel = configuration.sequence_parallel and degree > 1
    partition = operator.partitions[0]
    time = operator_time(partition, cluster, description.data_type, batch, degree, sequence_parallel=sequence_parallel)
    exposed = (
        1 / degree if configuration.tensor_parallel_overlap and operator.kind not in ("embedding", "head") else 1.0
    )
    return _Totals(
        forward_ms=time.forward_ms + exposed * time.forward_collective_ms,
        backward_ms=time.backward_ms + exposed * time.backward_collective_ms,
        kept_bytes=partition.kept.per_device(degree, sequence_parallel) * batch,
        output_bytes=partition.output.per_device(degree, sequence_parallel) * batch,
        workspace_bytes=batch
        * (
            partition.forward_workspace.per_device(degree, sequence_parallel)
            + partition.backward_workspace.per_device(degree, sequence_parallel)
        ),
        weight_bytes=0
        if operator.shares_weights_with is not None and configuration.pipeline == 1
        else partition.weights.per_device(degree),
    )


def _block_totals(
    configuration: Configuration, block: list[tuple[str, _Totals]], description: ModelDescription
) -> _Totals:
    total = sum((price for _, price in block), _Totals())
    kept = total.kept_bytes
    recomputed_ms = saved = 0.0
    if configuration.recompute == "blocks":
        share = configuration.recomputed_share
        recomputed_ms, saved = share * total.forward_ms, share * (kept - total.output_bytes)
    elif configuration.recompute in ("attention", "mlp"):
        names = CORE if configuration.recompute == "attention" else MLP
        chosen = [price for kind, price in block if kind in names]
        recomputed_ms = sum(price.forward_ms for price in chosen)
        saved = sum(price.kept_bytes for price in chosen[:-1])
    elif configuration.recompute == "every_other_product":
        for kind, price in block:
            if kind in ("attention_core", "mlp_dropout_add"):
                continue
            share = 0.5 if kind in ("attention_qkv", "attention_dense", "mlp_in", "mlp_out") else 1.0
            recomputed_ms += share * price.forward_ms
            saved += share * price.kept_bytes
    return _Totals(
        forward_ms=total.forward_ms,
        backward_ms=total.backward_ms + recomputed_ms,
        kept_bytes=kept - saved,
        output_bytes=total.output_bytes,
        peak_bytes=saved,
        workspace_bytes=total.workspace_bytes,
        weight_bytes=total.weight_bytes,
    )


def _replica_ring(cluster: ClusterDescription, configuration: Configuration) -> Ring:
    row = cluster.intra_node.ring(cluster.devices_per_node)
    inside = Ring(devices=configuration.data_parallel, latency_ms=row.latency_ms, bus_bytes_per_s=row.bus_bytes_per_s)
    members = max(1, cluster.devices_per_node // configuration.tensor_parallel)
    return ring_between_nodes(
        configuration.data_parallel,
        min(members, configuration.data_parallel),
        cluster.devices_per_node,
        inside,
        cluster.inter_node.node_bytes_per_s or cluster.inter_node.bytes_per_s,
        cluster.inter_node.latency_ms,
    )


def _transfer_ms(description: ModelDescription, cluster: ClusterDescription, configuration: Configuration) -> float:
    """Return the exposed transfers of one micro-batch: activations forward and gradients back, for each virtual stage.

    Each tensor-parallel device sends its share and the receivers gather it (Narayanan et al., SC 2021, section 4.1).
    """
    pipeline, virtual = configuration.pipeline, configuration.virtual_stages
    if pipeline == 1:
        return 0.0
    hidden = configuration.transfer_overlap
    share = exposed_transfers(pipeline, configuration.micro_batches, virtual) if hidden else 1.0
    residual = next(operator for operator in description.operators if operator.kind == "mlp_dropout_add")
    payload = residual.partitions[0].output.per_device(1) * configuration.micro_batch / configuration.tensor_parallel
    link = cluster.inter_node
    return share * 2 * virtual * (link.latency_ms + payload / link.bytes_per_s * 1e3)


def _shared_ms(description: ModelDescription, cluster: ClusterDescription, configuration: Configuration) -> float:
    shared = [operator for operator in description.operators if operator.shares_weights_with is not None]
    if configuration.pipeline == 1 or not shared:
        return 0.0
    per_parameter = description.bytes_per_parameter
    weights = sum(operator.partitions[0].weights.per_device(configuration.tensor_parallel) for operator in shared)
    link = cluster.inter_node
    pair = Ring(devices=2, latency_ms=link.latency_ms, bus_bytes_per_s=link.bytes_per_s)
    return pair.all_reduce_ms(weights / per_parameter.weight * per_parameter.gradient)
