"""The `full` cost model, as formulas over plain quantities of the stages of a pipeline.

Sets      stages i = 0..p-1, each on d replicas of t devices, each of v virtual stages; N micro-batches
Given     f_i, b_i: forward and backward of one micro-batch, all virtual stages together, tensor-parallel collectives
          inside, recomputation inside b_i; x_i: transfers that stay exposed; W, G, O: bytes of weights, gradients and
          optimizer state of one device before sharding

Collective  c (n - 1) / n * s / rate + latency, c = 2 for all-reduce, 1 for all-gather and reduce-scatter → Ring
Sharding    z = 0: all-reduce of G            z = 1: reduce-scatter of G, all-gather of W, once an iteration
            z = 2: reduce-scatter of G in every micro-batch, all-gather of W once an iteration
            z = 3: reduce-scatter of G and two all-gathers of W in every micro-batch                      → traffic
Overlap     communication C in k equal pieces behind computation B in k equal pieces:
            exposed = max(C / k, C - B (k - 1) / k); what is hidden slows the computation by a share      → exposed_ms
Pipeline    1F1B: max_i ( N t_i + sum_{j != i} t_j / v ), t_i = f_i + b_i + x_i                            → pipeline_ms
            (Narayanan et al., SC 2021, sections 2.2 and 4.1 for equal stages)
            of transfers that overlap, those of filling and draining stay in x_i                     → exposed_transfers
Bound       every schedule: max_i ( sum_{j < i} f_j / v + N (f_i + b_i) + sum_{j < i} b_j / v )           → bound_ms
Iteration   max_i (end of the last backward of i + exposed reduction_i) + shared weights + optimizer step
            + exposed all-gather of weights                                                               → iteration_ms
In flight   1F1B: min(N, p - i); interleaved: min(N, (2 (p - 1 - i) + (v - 1) p + 1) / v)                 → in_flight
Memory      W / (d if z = 3) + G / (d if z >= 2) + O / (d if z >= 1)                                      → state_bytes
            + in flight * kept + peak + workspace (Rajbhandari et al., ZeRO, SC 2020)                     → memory_bytes
"""

from collections.abc import Sequence
from dataclasses import dataclass

CONTENTION = 0.15
"""Share of hidden communication by which the computation before it takes longer: collectives occupy multiprocessors.
Isaev et al., Calculon (SC 2023), take 15 % for collectives over NVLink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The devices of a collective."""

    devices: int
    latency_ms: float
    bus_bytes_per_s: float
    """2 (n - 1) / n * s bytes pass at this rate in an all-reduce of s bytes."""

    def gather_ms(self, size_bytes: float) -> float:
        """Return the time to all-gather or reduce-scatter a tensor of this size as a whole; 0 on one device."""
        if self.devices == 1 or size_bytes == 0:
            return 0.0
        return self.latency_ms + (self.devices - 1) / self.devices * size_bytes / self.bus_bytes_per_s * 1e3

    def all_reduce_ms(self, size_bytes: float) -> float:
        """Return the time to all-reduce a tensor; 0 on one device."""
        return 2 * self.gather_ms(size_bytes)


def ring_between_nodes(
    devices: int, members_per_node: int, devices_per_node: int, inside: Ring, node_bytes_per_s: float, latency_ms: float
) -> Ring:
    """Return the ring over devices of several nodes, while every other device of the nodes runs a ring of its own.

    A ring has the adapters of its own members: the share members_per_node / devices_per_node of the node's rate. It
    never runs faster than inside a node.
    """
    nodes = -(-devices // members_per_node)
    if nodes <= 1:
        return inside
    rate = min(inside.bus_bytes_per_s, node_bytes_per_s * members_per_node / devices_per_node)
    return Ring(devices=devices, latency_ms=inside.latency_ms + nodes * latency_ms, bus_bytes_per_s=rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """One stage of a pipeline with all its virtual stages, on one of its devices; times are for one micro-batch."""

    forward_ms: float
    backward_ms: float
    """With recomputation."""
    transfer_ms: float = 0.0
    """Moving activations and gradients to neighbours, as far as it stays exposed."""
    weight_bytes: float
    """In training precision, all of the stage's, before sharding."""
    gradient_bytes: float
    optimizer_state_bytes: float
    replicas: Ring
    """Data-parallel group."""
    sharding: int = 0
    """ZeRO stage: 0 to 3."""
    pieces: int
    """Buckets in which weights and gradients travel: usually the stage's blocks."""

    @property
    def stage_ms(self) -> float:
        """Forward, backward and transfers."""
        return self.forward_ms + self.backward_ms + self.transfer_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Communication of one stage's data-parallel group, in ms."""

    forward_ms: float
    """In every micro-batch, behind its forward."""
    backward_ms: float
    """In every micro-batch, behind its backward."""
    reduction_ms: float
    """Once an iteration, behind the last backward."""
    gather_ms: float
    """Once an iteration, behind the first forward."""


def traffic(stage: StageWork) -> Traffic:
    """Return what the sharding of a stage makes its data-parallel group send."""
    ring = stage.replicas
    gather, scatter = ring.gather_ms(stage.weight_bytes), ring.gather_ms(stage.gradient_bytes)
    if stage.sharding == 0:
        reduction = ring.all_reduce_ms(stage.gradient_bytes)
        return Traffic(forward_ms=0, backward_ms=0, reduction_ms=reduction, gather_ms=0)
    if stage.sharding == 1:
        return Traffic(forward_ms=0, backward_ms=0, reduction_ms=scatter, gather_ms=gather)
    if stage.sharding == 2:
        return Traffic(forward_ms=0, backward_ms=scatter, reduction_ms=0, gather_ms=gather)
    return Traffic(forward_ms=gather, backward_ms=gather + scatter, reduction_ms=0, gather_ms=0)


def exposed_ms(communication_ms: float, computation_ms: float, pieces: int) -> float:
    """Return by how much communication in equal pieces makes the computation longer that it runs behind.

    Each piece may start when its share of the computation has ended, and pieces travel one after the other.
    """
    if communication_ms == 0:
        return 0.0
    share = 1 / max(1, pieces)
    left = max(communication_ms * share, communication_ms - computation_ms * (1 - share))
    return left + CONTENTION * (communication_ms - left)


def with_sharded_weights(stage: StageWork) -> tuple[float, float]:
    """Return forward and backward of one micro-batch with the traffic of ZeRO 2 and 3 inside, in ms."""
    sent = traffic(stage)
    return (
        stage.forward_ms + exposed_ms(sent.forward_ms, stage.forward_ms, stage.pieces),
        stage.backward_ms + exposed_ms(sent.backward_ms, stage.backward_ms, stage.pieces),
    )


def pipeline_ms(stage_ms: Sequence[float], micro_batches: int, virtual_stages: int = 1) -> float:
    """Return the time from the first forward to the last backward."""
    total = sum(stage_ms)
    return max(micro_batches * each + (total - each) / virtual_stages for each in stage_ms)


def bound_ms(
    forward_ms: Sequence[float], backward_ms: Sequence[float], micro_batches: int, virtual_stages: int = 1
) -> float:
    """Return a lower bound on the same time for every schedule, where virtual stages share a stage's work equally.

    Stage i waits for the first forward of all before it, works N times, and its last backward goes back through them.
    """
    before = bound = 0.0
    for forward, backward in zip(forward_ms, backward_ms, strict=True):
        bound = max(bound, before / virtual_stages + micro_batches * (forward + backward))
        before += forward + backward
    return bound


def exposed_transfers(stages: int, micro_batches: int, virtual_stages: int) -> float:
    """Return the share of a stage's transfers that overlap cannot hide: those while the pipeline fills and drains.

    A stage starts with up to 2 (p - 1) + (v - 1) p forwards of virtual stages before it alternates (Narayanan et al.,
    SC 2021, section 2.2), each waiting for what it needs; as many backwards end the iteration.
    """
    return min(1.0, (2 * (stages - 1) + (virtual_stages - 1) * stages) / (micro_batches * virtual_stages))


def optimizer_ms(stage: StageWork, memory_bytes_per_s: float) -> float:
    """Return the time of the optimizer step, bound by memory.

    Gradients are read twice (norm, step), the state is read and written, the weights are written.
    """
    shards = stage.replicas.devices if stage.sharding >= 1 else 1
    moved = (2 * stage.gradient_bytes + 2 * stage.optimizer_state_bytes + stage.weight_bytes) / shards
    return moved / memory_bytes_per_s * 1e3


def iteration_ms(
    stages: Sequence[StageWork],
    micro_batches: int,
    *,
    memory_bytes_per_s: float,
    virtual_stages: int = 1,
    overlapped: bool = True,
    shared_ms: float = 0.0,
) -> float:
    """Return the time of one iteration.

    Parameters
    ----------
    stages
        In the order of the pipeline.
    micro_batches
        N.
    memory_bytes_per_s
        Rate at which the optimizer reads and writes.
    virtual_stages
        v, of each stage.
    overlapped
        Whether reduction and gathering run behind computation; else all of it is exposed.
    shared_ms
        Summing the gradients of weights that the first and the last stage share.
    """
    loaded = [with_sharded_weights(stage) for stage in stages]
    whole = pipeline_ms(
        [forward + backward + stage.transfer_ms for (forward, backward), stage in zip(loaded, stages, strict=True)],
        micro_batches,
        virtual_stages,
    )
    end = gather = before = 0.0
    for (forward, backward), stage in zip(loaded, stages, strict=True):
        sent = traffic(stage)
        behind = 1 if overlapped else 0
        reduction = exposed_ms(sent.reduction_ms, behind * backward, stage.pieces if overlapped else 1)
        end = max(end, whole - before / virtual_stages + reduction)
        gather = max(gather, exposed_ms(sent.gather_ms, behind * forward, stage.pieces if overlapped else 1))
        before += backward
    return end + gather + shared_ms + max(optimizer_ms(stage, memory_bytes_per_s) for stage in stages)


def in_flight(stages: int, stage: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Return how many micro-batches' activations a stage holds at once."""
    if virtual_stages == 1:
        return min(micro_batches, stages - stage)
    ahead = 2 * (stages - 1 - stage) + (virtual_stages - 1) * stages + 1
    return min(micro_batches, ahead / virtual_stages)


def state_bytes(stage: StageWork) -> float:
    """Return the bytes of weights, gradients and optimizer state on one device.

    Of sharded weights two pieces are gathered at a time: the one in use and the next.
    """
    shards = stage.replicas.devices
    weights = (
        stage.weight_bytes / shards + 2 * stage.weight_bytes / stage.pieces
        if stage.sharding == 3
        else stage.weight_bytes
    )
    gradients = stage.gradient_bytes / (shards if stage.sharding >= 2 else 1)
    return weights + gradients + stage.optimizer_state_bytes / (shards if stage.sharding >= 1 else 1)


def memory_bytes(
    stage: StageWork, held_micro_batches: float, kept_bytes: float, peak_bytes: float, workspace_bytes: float
) -> float:
    """Return the memory of one device of a stage.

    Parameters
    ----------
    held_micro_batches
        See `in_flight`.
    kept_bytes
        Activations of one micro-batch.
    peak_bytes
        Brought back by recomputation at a time.
    workspace_bytes
        Taken beside while an operator runs.
    """
    return state_bytes(stage) + held_micro_batches * kept_bytes + peak_bytes + workspace_bytes
