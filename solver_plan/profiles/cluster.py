"""Cluster files: a TOML file that says how many devices there are, how fast they compute and how they are joined.

Ready files lie in `solver_plan/clusters`; a name without a path, such as ``v100_4x32gb``, means one of them. Every
number carries its source in a comment.
"""

import bisect
import json
import math
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Self

from annotated_types import Ge, Le, Len
from pydantic import model_validator

from solver_plan.documents import (
    Bytes,
    Count,
    Milliseconds,
    Name,
    PerSecond,
    document,
    fail,
    parse_document,
    refuse_too_many_devices,
)
from solver_plan.documents.fields import LEAST_RATE
from solver_plan.errors import DocumentError, InputError
from solver_plan.parallelism.problem import RingRate
from solver_plan.profiles.description import DataType, FusedAttention, MatrixProduct

Efficiency = Annotated[float, Ge(1e-6), Le(1)]
"""Share of a peak; no kernel that is worth running is slower by a million."""


@document
class EfficiencyTable:
    """Share of the peak that matrix products reach, over tokens (rows of the product) and width per shard.

    The width is the smaller of inner and columns on one device. Between the grid points the table is interpolated
    linearly in the logarithms of both; beyond the last point it is constant; below the first it falls in proportion, as
    tiles of a fixed size run empty.
    """

    tokens: Annotated[tuple[Count, ...], Len(1)]
    widths: Annotated[tuple[Count, ...], Len(1)]
    values: tuple[tuple[Efficiency, ...], ...]
    """values[i][j] at tokens[i], widths[j]."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, axis in (("tokens", self.tokens), ("widths", self.widths)):
            if list(axis) != sorted(set(axis)):
                raise fail(name, list(axis), "grid points increase")
        if len(self.values) != len(self.tokens):
            raise fail("values", len(self.values), f"one row for each of the {len(self.tokens)} tokens")
        for index, row in enumerate(self.values):
            if len(row) != len(self.widths):
                raise fail(f"values[{index}]", len(row), f"one value for each of the {len(self.widths)} widths")
        return self

    def at(self, tokens: float, width: float) -> float:
        """Return the efficiency of a product of `tokens` rows and `width` per shard."""
        low, high, share, scale = _between(self.tokens, tokens)
        left, right, part, narrow = _between(self.widths, width)
        top = self.values[low][left] * (1 - part) + self.values[low][right] * part
        bottom = self.values[high][left] * (1 - part) + self.values[high][right] * part
        return (top * (1 - share) + bottom * share) * scale * narrow


@document
class Arithmetic:
    """How fast a device multiplies matrices of one data type."""

    peak_flops_per_s: PerSecond
    matrix_efficiency: EfficiencyTable
    attention_forward: EfficiencyTable | None = None
    """Of fused attention, over sequence length and width of a head; None: no such kernel."""
    attention_backward: EfficiencyTable | None = None

    def matrix_ms(self, product: MatrixProduct, batch: int, tensor_parallel: int) -> float:
        """Return the time of one product of a micro-batch of `batch` samples on one of the tensor-parallel devices."""
        parts = tensor_parallel if product.split != "none" else 1
        columns = product.columns / (parts if product.split == "columns" else 1)
        inner = product.inner / (parts if product.split == "inner" else 1)
        rows = product.rows * batch if product.weight else product.rows
        efficiency = self.matrix_efficiency.at(rows, min(inner, columns))
        return product.flops * batch / parts / (self.peak_flops_per_s * efficiency) * 1000

    def attention_ms(self, attention: FusedAttention, batch: int, tensor_parallel: int) -> tuple[float, float]:
        """Return the time of forward and backward of fused attention on one of the tensor-parallel devices.

        The backward does 2.5 times the work: it computes the scores again (Dao, FlashAttention-2, 2023, section 4.1).
        """
        assert self.attention_forward is not None
        assert self.attention_backward is not None
        flops = attention.flops * batch / tensor_parallel
        forward = flops / (self.peak_flops_per_s * self.attention_forward.at(attention.keys, attention.head_dim))
        backward = (
            2.5 * flops / (self.peak_flops_per_s * self.attention_backward.at(attention.keys, attention.head_dim))
        )
        return forward * 1000, backward * 1000


@document
class Device:
    """One accelerator."""

    name: Name
    memory_bytes: Bytes
    memory_margin: Annotated[float, Ge(0), Le(0.999)] = 0.08
    """Fraction of the memory that is kept free: context of the driver, buffers of the collectives, fragmentation."""
    memory_bytes_per_s: PerSecond
    """Peak of the data sheet."""
    memory_efficiency: Efficiency
    """Share of it that element-wise kernels reach."""
    launch_ms: Milliseconds
    """What the host needs to launch one kernel: the time of an operator is at least this for each of its kernels."""
    arithmetic: dict[DataType, Arithmetic]

    @model_validator(mode="after")
    def _reads_and_writes(self) -> Self:
        if self.memory_bytes_per_s * self.memory_efficiency < LEAST_RATE:
            rule = f"times memory_bytes_per_s, {self.memory_bytes_per_s:g}, it is a rate of at least {LEAST_RATE:g}"
            raise fail("memory_efficiency", self.memory_efficiency, rule)
        return self

    def memory_ms(self, moved_bytes: float) -> float:
        """Return the time to read or write so many bytes of the device's memory."""
        return moved_bytes / (self.memory_bytes_per_s * self.memory_efficiency) * 1000


@document
class NodeLink:
    """What joins devices: inside a node, or between nodes."""

    latency_ms: Milliseconds
    """Of a message from one device to another."""
    bytes_per_s: PerSecond
    node_bytes_per_s: PerSecond | None = None
    """Between nodes: rate of all adapters of a node together, which its devices share; None: of one message."""
    collectives: tuple[RingRate, ...] = ()
    """By number of devices; between two rows the smaller one counts. None: the ring runs at `bytes_per_s`. Islands of
    devices that are joined more tightly show here: a larger number of devices has a slower ring."""

    @model_validator(mode="after")
    def _devices_increase(self) -> Self:
        counts = [row.devices for row in self.collectives]
        if counts != sorted(set(counts)):
            raise fail("collectives", counts, "numbers of devices increase")
        return self

    def ring(self, devices: int) -> RingRate:
        """Return latency and rate of a ring over so many devices."""
        index = bisect.bisect_right([row.devices for row in self.collectives], devices)
        if self.collectives:
            return self.collectives[max(0, index - 1)]
        return RingRate(devices=devices, latency_ms=self.latency_ms, bus_bytes_per_s=self.bytes_per_s)


@document
class Host:
    """What one device has of its host, while all devices of the node use theirs."""

    cpu_update_parameters_per_s: PerSecond
    """Adam's update on the CPU, of 32-bit states, by this device's share of the cores."""
    d2h_bytes_per_s: PerSecond
    """Copies from the device to pinned memory of the host."""
    h2d_bytes_per_s: PerSecond


@document
class ClusterDescription:
    """Equal nodes of equal devices."""

    name: Name
    nodes: Count
    devices_per_node: Count
    device: Device
    intra_node: NodeLink
    inter_node: NodeLink
    host: Host | None = None
    """None: nothing is known, and no update can be planned for the CPU."""

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        refuse_too_many_devices(self.nodes, self.devices_per_node)
        return self

    @property
    def devices(self) -> int:
        """Number of devices of all nodes."""
        return self.nodes * self.devices_per_node

    def arithmetic(self, data_type: DataType) -> Arithmetic:
        """Return how fast the devices multiply matrices of a data type. Raises `InputError` if they do not say."""
        found = self.device.arithmetic.get(data_type)
        if found is None:
            known = ", ".join(self.device.arithmetic)
            raise InputError(
                f"cluster {self.name}: found no rates for {data_type}; {self.device.name} has {known}: "
                f"add [device.arithmetic.{data_type}] or choose a model of another type"
            )
        return found

    def attention_arithmetic(self) -> Arithmetic:
        """Return the 16-bit arithmetic that has fused attention. Raises `InputError` if the devices have none."""
        for arithmetic in self.device.arithmetic.values():
            if arithmetic.attention_forward is not None and arithmetic.attention_backward is not None:
                return arithmetic
        raise InputError(
            f"cluster {self.name}: found no fused attention on {self.device.name}; "
            "add attention_forward and attention_backward to a 16-bit type, or choose a model with eager attention"
        )


def ready_clusters() -> tuple[str, ...]:
    """Return the names of the cluster files that come with the package."""
    folder = resources.files("solver_plan") / "clusters"
    return tuple(sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml")))


def read_cluster(source: str | Path) -> ClusterDescription:
    """Read and validate a cluster file, or one of the ready ones by its name.

    Raises
    ------
    InputError
        If there is no such file, or it breaks a rule; a `DocumentError` names the place.
    """
    text, file = _text_of(str(source))
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DocumentError(file, "", f"no TOML ({error})", "write a complete TOML file") from None
    except RecursionError:
        raise DocumentError(file, "", "nesting too deep", "cluster files nest fewer than ten levels") from None
    try:
        data = json.dumps(parsed)
    except (TypeError, ValueError):
        raise DocumentError(file, "", "a date or time", "cluster files hold numbers, text and tables") from None
    return parse_document(data, file, ClusterDescription)


def _text_of(source: str) -> tuple[str, str]:
    if not source:
        raise InputError(f"cluster: found an empty name; name a TOML file or one of {', '.join(ready_clusters())}")
    path = Path(source)
    ready = resources.files("solver_plan") / "clusters" / f"{source}.toml"
    if not path.is_file() and "/" not in source and ready.is_file():
        return ready.read_text(encoding="utf-8"), path.name
    try:
        return path.read_text(encoding="utf-8"), source
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise InputError(
            f"{source}: cannot read a cluster file ({reason}); name a TOML file or one of {', '.join(ready_clusters())}"
        ) from None


def _between(axis: tuple[int, ...], value: float) -> tuple[int, int, float, float]:
    """Return (index before, index behind, share of the latter, factor for values below the first point)."""
    if value <= axis[0]:
        return 0, 0, 0.0, value / axis[0]
    if value >= axis[-1]:
        return len(axis) - 1, len(axis) - 1, 0.0, 1.0
    high = bisect.bisect_right(axis, value)
    low = high - 1
    return low, high, math.log(value / axis[low]) / math.log(axis[high] / axis[low]), 1.0
