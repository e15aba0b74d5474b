"""The parallelism problem: a chain of operators in repeated blocks, to be trained on a cluster.

Field names follow `documents.md`; what the cost models need beside the outline is marked *added*.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Literal, Self

from annotated_types import Ge, Le, Len
from pydantic import Discriminator, Tag, model_validator

from solver_plan.documents import (
    Bytes,
    Count,
    Index,
    Milliseconds,
    Name,
    PerSecond,
    ProblemDocument,
    document,
    fail,
    refuse_too_many_devices,
)

TensorLayout = Literal["any", "replicated", "split_heads", "split_scores", "batch_first"]
"""How a tensor lies on the t x d devices of an operator: see `costs/resharding.py`."""


@document
class LatencyLink:
    """A link by latency and bandwidth: moving s > 0 bytes takes latency + s / rate."""

    latency_ms: Milliseconds = 0.0
    bytes_per_s: PerSecond


@document
class TableLink:
    """A link by a table of measured rates: rows of (bytes, bytes_per_s), sizes increasing by powers of two."""

    table: Annotated[tuple[tuple[Annotated[int, Ge(1)], PerSecond], ...], Len(1)]

    @model_validator(mode="after")
    def _sizes_increase(self) -> Self:
        for row, (before, after) in enumerate(zip(self.table, self.table[1:], strict=False)):
            if before[0] >= after[0]:
                raise fail(f"table[{row + 1}]", list(after), "sizes increase from row to row")
        return self


def _which_link(value: object) -> str:
    has_table = "table" in value if isinstance(value, dict) else isinstance(value, TableLink)
    return "TableLink" if has_table else "LatencyLink"


Link = Annotated[
    Annotated[LatencyLink, Tag("LatencyLink")] | Annotated[TableLink, Tag("TableLink")], Discriminator(_which_link)
]


@document
class RingRate:
    """Collectives on a number of devices: latency of one call, and the rate of the ring."""

    devices: Count
    latency_ms: Milliseconds
    bus_bytes_per_s: PerSecond
    """Bus bandwidth of NCCL tests: all-reducing s bytes on n devices moves 2 (n - 1) / n * s at this rate."""


@document
class Cluster:
    """Equal nodes of equal devices; device r is on node r // devices_per_node."""

    nodes: Count
    devices_per_node: Count
    memory_bytes_per_device: Bytes
    memory_margin: Annotated[float, Ge(0), Le(0.999)] = 0.0
    """Fraction of the memory that is kept free."""
    intra_node: Link
    inter_node: Link
    collectives: tuple[RingRate, ...] = ()
    """*Added*, for `full`: inside a node, by number of devices, ascending; between two rows the smaller one counts.
    None: rings run as fast as `intra_node`."""
    node_bytes_per_s: PerSecond | None = None
    """*Added*, for `full`: rate of all network adapters of a node, which its devices share; None: as `inter_node`."""
    device_memory_bytes_per_s: PerSecond | None = None
    """*Added*, for `full`: rate at which the optimizer step reads and writes; None: the step takes no time."""

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        refuse_too_many_devices(self.nodes, self.devices_per_node)
        return self

    @property
    def devices(self) -> int:
        """Number of devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def usable_bytes_per_device(self) -> int:
        """Memory of a device that a plan may fill."""
        return int(self.memory_bytes_per_device * (1 - self.memory_margin))


@document
class Operator:
    """One operator of the chain."""

    name: Name
    profile: Name
    """Key of `profiles`."""
    block_start: bool = False
    """The first operator of a repeated block: recomputation starts anew here."""
    activation_factor: Annotated[float, Ge(0), Le(100)] = 1.0
    """*Added.* Share of the profiled activations that is really held (buffers shared with a neighbour); Aceso's cost
    model lets a recomputed segment run on past such an operator."""
    shares_weights_with: Name | None = None
    """*Added*, for `full`: an operator before it with the same weights (a head tied to the embedding). On one stage
    they exist once; on two, each holds a copy and their gradients are summed once an iteration."""


@document
class Profile:
    """What an operator costs for one choice of (batch per replica, tensor parallel degree, partition)."""

    batch: Count
    tensor_parallel: Count
    partition: Index
    forward_ms: Milliseconds
    backward_ms: Milliseconds
    input_bytes: Bytes
    output_bytes: Bytes
    weight_bytes: Bytes
    """Of one device, in training precision."""
    activation_bytes: Bytes
    """Kept for the backward, one micro-batch."""
    forward_reserved_bytes: Bytes = 0
    """*Added.* What the allocator takes beside while the forward runs."""
    backward_reserved_bytes: Bytes = 0
    """*Added.* The same for the backward."""
    forward_collective_ms: Milliseconds = 0.0
    """*Added*, for `full`: the part of `forward_ms` in collectives of tensor parallelism, which may be overlapped."""
    backward_collective_ms: Milliseconds = 0.0
    """*Added*, for `full`: the same of `backward_ms`."""
    input_layout: TensorLayout = "any"
    """*Added.*"""
    output_layout: TensorLayout = "any"
    """*Added.*"""

    @property
    def key(self) -> tuple[int, int, int]:
        """(batch, tensor_parallel, partition), unique within an operator."""
        return self.batch, self.tensor_parallel, self.partition


@document
class CollectiveTimes:
    """Measured times of a collective on a number of devices; *added*, for resharding within a stage."""

    collective: Literal["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]
    devices: Count
    table: tuple[tuple[Index, Milliseconds], ...]
    """(size in MB of 2^20 bytes, ms)."""


@document
class Resharding:
    """What changing the layout of a tensor within a stage costs; *added*."""

    collectives: tuple[CollectiveTimes, ...]
    missing_ms: Milliseconds = 100_000.0
    """Time of a size that no table has."""


@document
class BytesPerParameter:
    """What training holds of one parameter; *added*, for `full`."""

    weight: Count
    """In training precision."""
    gradient: Count
    """4 where gradients are summed and reduced in 32 bit."""
    optimizer_state: Bytes
    """Moments, and master weights where the training precision is 16 bit."""

    @property
    def per_weight_byte(self) -> float:
        """All of it for each byte of weights."""
        return (self.weight + self.gradient + self.optimizer_state) / self.weight


@document
class Overlap:
    """Which communication the training program hides behind computation; *added*, for `full`."""

    tensor_parallel: bool = False
    """Collectives of tensor parallelism run piecewise behind the products beside them."""
    transfers: bool = False
    """Activations and gradients travel between stages while these compute."""
    reduction: bool = True
    """Gradients are reduced behind the last backward, sharded weights gathered behind the first forward."""


@document
class Space:
    """Which plans are allowed."""

    layout: Literal["stage", "operator"]
    """One (t, d, partition) for a stage, or one per operator within it."""
    max_stages: Count | None
    device_counts: Annotated[tuple[Count, ...], Len(1)] | None
    """Devices a stage may have; None: any number."""
    cross_node_stages: bool
    micro_batch_sizes: Annotated[tuple[Count, ...], Len(1)] | None
    """Of a micro-batch over all replicas; None: all that the profiles allow."""
    use_all_devices: bool
    recompute: Literal["operator", "block", "none"]
    """Any set of operators, whole blocks (all of a stage or nothing), or nothing."""
    sharding: Annotated[tuple[Annotated[int, Ge(0), Le(3)], ...], Len(1)] = (0,)
    device_order: Literal["any", "rank"] = "any"
    """*Added.* ``rank``: the devices of a stage follow those of the stage before, in one piece each."""
    partitions: Annotated[tuple[Index, ...], Len(1)] | None = None
    """*Added.* Tensor partitions a plan may use; None: all that the profiles have."""
    virtual_stages: Annotated[tuple[Count, ...], Len(1)] = (1,)
    """*Added*, for `full`: parts of the chain that a group of devices may run in turn (interleaved 1F1B). More than one
    only with one layout and sharding for all, equally many blocks a stage, and the same recomputation in each block."""
    same_layout: bool = False
    """*Added.* All stages have one layout and sharding, as most frameworks demand; cuts and recomputation are free."""


@document
class ParallelismProblem(ProblemDocument):
    """One model on one cluster."""

    kind: Literal["parallelism"] = "parallelism"
    cost_model: Literal["aceso", "full"]
    global_batch: Count
    model: Name | None = None
    """What execution builds, as ``models/gpt.py:gpt3_1_3b``; planning never reads it."""
    cluster: Cluster
    operators: Annotated[tuple[Operator, ...], Len(1)]
    profiles: dict[Name, Annotated[tuple[Profile, ...], Len(1)]]
    space: Space
    state_bytes_per_weight_byte: Annotated[float, Ge(1), Le(100)] = 8.0
    """*Added.* Weights, gradients, master weights and moments for each byte of weights: 8 for 16-bit training with
    Adam, 4 for 32-bit."""
    resharding: Resharding | None = None
    """*Added.* None: layouts may not change within a stage, and changing would cost nothing."""
    bytes_per_parameter: BytesPerParameter | None = None
    """*Added*, for `full`, which shards gradients and optimizer state apart from weights."""
    sequence_parallel: bool = False
    """*Added*, for `full`: the profiles are those of sequence parallelism wherever tensor_parallel > 1 (Korthikanti et
    al., MLSys 2023): what no product divides is divided along the sequence."""
    overlap: Overlap = Overlap()
    """*Added*, for `full`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names: set[str] = set()
        for index, operator in enumerate(self.operators):
            if operator.name in names:
                raise fail(f"operators[{index}].name", operator.name, "names are unique")
            shared = operator.shares_weights_with
            if shared is not None and shared not in names:
                raise fail(f"operators[{index}].shares_weights_with", shared, "an operator before this one")
            names.add(operator.name)
            if operator.profile not in self.profiles:
                raise fail(f"operators[{index}].profile", operator.profile, "a profile is a key of profiles")
        for key, entries in self.profiles.items():
            repeated = _first_repeated(entry.key for entry in entries)
            if repeated is not None:
                rule = "each (batch, tensor_parallel, partition) is profiled once"
                raise fail(f"profiles.{key}[{repeated}]", list(entries[repeated].key), rule)
            self._collectives_are_parts(key, entries)
        if self.cost_model == "full":
            self._priced_in_full()
        for name, values in (
            ("device_counts", self.space.device_counts),
            ("micro_batch_sizes", self.space.micro_batch_sizes),
            ("partitions", self.space.partitions),
            ("sharding", self.space.sharding),
            ("virtual_stages", self.space.virtual_stages),
        ):
            repeated = _first_repeated(values or ())
            if values is not None and repeated is not None:
                raise fail(f"space.{name}[{repeated}]", values[repeated], "each value once")
        most = max(2, len(self.operators))  # [1, 2] may be written for a chain of any length
        for index, parts in enumerate(self.space.virtual_stages):
            if parts > most:
                rule = f"each part has at least one of the {len(self.operators)} operators: at most {most}"
                raise fail(f"space.virtual_stages[{index}]", parts, rule)
        return self

    def _collectives_are_parts(self, key: str, entries: Sequence[Profile]) -> None:
        """What is hidden is taken off the times: they contain it."""
        for index, entry in enumerate(entries):
            for name, part_ms, whole_ms in (
                ("forward", entry.forward_collective_ms, entry.forward_ms),
                ("backward", entry.backward_collective_ms, entry.backward_ms),
            ):
                if part_ms > whole_ms:
                    user = next((one.name for one in self.operators if one.profile == key), "no operator")
                    raise fail(
                        f"profiles.{key}[{index}].{name}_collective_ms",
                        part_ms,
                        f"it is a part of {name}_ms, which is {whole_ms:g} (profile of {user}, batch {entry.batch}, "
                        f"tensor parallel {entry.tensor_parallel}): at most that, or add it to {name}_ms",
                    )

    def _priced_in_full(self) -> None:
        if self.bytes_per_parameter is None:
            raise fail("bytes_per_parameter", None, "the full cost model needs what training holds of a parameter")
        if self.space.layout != "stage":
            raise fail("space.layout", self.space.layout, "the full cost model prices one layout for a stage")

    @property
    def in_rank_order(self) -> bool:
        """True where only plans with devices in rank order need to be looked at: one node, or the space says so."""
        return self.cluster.nodes == 1 or self.space.device_order == "rank"

    @cached_property
    def profile_table(self) -> dict[str, dict[tuple[int, int, int], Profile]]:
        """Profile of each operator profile key and (batch, tensor_parallel, partition)."""
        return {key: {entry.key: entry for entry in entries} for key, entries in self.profiles.items()}

    def profile_of(self, operator: int, batch: int, tensor_parallel: int, partition: int) -> Profile | None:
        """Return what an operator costs at a choice; None if that was not profiled."""
        key = self.operators[operator].profile
        return self.profile_table[key].get((batch, tensor_parallel, partition))


def _first_repeated(values: Iterable[object]) -> int | None:
    seen: set[object] = set()
    for index, value in enumerate(values):
        if value in seen:
            return index
        seen.add(value)
    return None
