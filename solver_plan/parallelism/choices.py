"""The choices of a stage's layout at one micro-batch size, with the cost of every operator as arrays.

A choice is (tensor parallel degree t, data parallel degree d, partition K) on t * d devices. These arrays are what the
heuristics, bounds and the constraint program work on; `costs` evaluates single plans independently of them.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from solver_plan.parallelism.costs.full_plan import operator_times, received_ms
from solver_plan.parallelism.costs.links import transfer_ms
from solver_plan.parallelism.problem import Link, ParallelismProblem, Profile

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """One layout for all operators of a stage."""

    tensor_parallel: int
    data_parallel: int
    partition: int
    sharding: int = 0
    """ZeRO stage of the data-parallel group."""

    @property
    def devices(self) -> int:
        """Devices of the stage."""
        return self.tensor_parallel * self.data_parallel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoiceCosts:
    """Cost of each operator under one choice at one micro-batch size; all arrays have shape (operators,).

    Operators that were not profiled cost infinite time.
    """

    choice: Choice
    forward_ms: Floats
    backward_ms: Floats
    input_bytes: Floats
    weight_bytes: Floats
    held_bytes: Floats
    forward_reserved_bytes: Floats
    backward_reserved_bytes: Floats
    receive_ms: Floats
    """(2, operators): transfer of the input over the intra- and the inter-node link."""
    send_ms: Floats
    """(2, operators): transfer of the output over both links."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """All choices at one micro-batch size."""

    size: int
    count: int
    """Micro-batches of an iteration."""
    choices: tuple[ChoiceCosts, ...]


def device_counts(problem: ParallelismProblem) -> tuple[int, ...]:
    """Return the numbers of devices that a stage may have, increasing."""
    cluster, space = problem.cluster, problem.space
    largest = cluster.devices if space.cross_node_stages else cluster.devices_per_node
    allowed = space.device_counts if space.device_counts is not None else range(1, largest + 1)
    counts = sorted(count for count in allowed if count <= largest)
    if problem.cost_model == "full":  # a stage of several nodes has whole ones
        counts = [
            count for count in counts if count <= cluster.devices_per_node or count % cluster.devices_per_node == 0
        ]
    return tuple(counts)


def micro_batch_sizes(problem: ParallelismProblem) -> tuple[int, ...]:
    """Return the micro-batch sizes that the space allows, that divide the global batch and that profiles allow."""
    if problem.space.micro_batch_sizes is not None:
        sizes = set(problem.space.micro_batch_sizes)
    else:
        counts = set(device_counts(problem))
        sizes = {
            entry.batch * (count // entry.tensor_parallel)
            for entries in problem.profiles.values()
            for entry in entries
            for count in counts
            if count % entry.tensor_parallel == 0
        }
    return tuple(sorted(size for size in sizes if size <= problem.global_batch and problem.global_batch % size == 0))


def micro_batches(problem: ParallelismProblem) -> list[MicroBatch]:
    """Return the searches of a problem: every micro-batch size with its choices, of which a pipeline's stages take any.

    Where all stages have the same layout, one for each choice.
    """
    found = [micro_batch(problem, size) for size in micro_batch_sizes(problem)]
    if not problem.space.same_layout:
        return [batch for batch in found if batch.choices]
    devices, idle = problem.cluster.devices, not problem.space.use_all_devices
    return [
        replace(batch, choices=(costs,))
        for batch in found
        for costs in batch.choices
        if idle or devices % costs.choice.devices == 0
    ]


def micro_batch(problem: ParallelismProblem, size: int) -> MicroBatch:
    """Return every choice at a micro-batch size; a choice that no operator was profiled for is left out."""
    choices = tuple(_costs(problem, size, choice) for choice in _possible_choices(problem, size))
    return MicroBatch(
        size=size,
        count=problem.global_batch // size,
        choices=tuple(costs for costs in choices if np.isfinite(costs.forward_ms).any()),
    )


def _possible_choices(problem: ParallelismProblem, size: int) -> Iterator[Choice]:
    entries = [entry.key for profile in problem.profiles.values() for entry in profile]
    degrees = sorted({degree for _, degree, _ in entries})
    partitions = sorted({partition for _, _, partition in entries})
    if problem.space.partitions is not None:
        partitions = [partition for partition in partitions if partition in problem.space.partitions]
    for count in device_counts(problem):
        for degree in degrees:
            if count % degree == 0 and size % (count // degree) == 0 and _can_lie(problem, count, degree):
                for partition, sharding in itertools.product(partitions, _shardings(problem, count // degree)):
                    yield Choice(degree, count // degree, partition, sharding)


def _can_lie(problem: ParallelismProblem, devices: int, degree: int) -> bool:
    """Return whether `full` lets a stage lie anywhere: over whole nodes, tensor-parallel groups within one."""
    per_node = problem.cluster.devices_per_node
    return problem.cost_model != "full" or devices <= per_node or (devices % per_node == 0 and per_node % degree == 0)


def _shardings(problem: ParallelismProblem, replicas: int) -> tuple[int, ...]:
    """Return the ZeRO stages that differ: one replica shards nothing, whatever it is called; `aceso` prices none."""
    allowed = sorted(problem.space.sharding)
    return tuple(allowed) if problem.cost_model == "full" and replicas > 1 else (allowed[0],)


_MISSING = Profile(
    batch=1,
    tensor_parallel=1,
    partition=0,
    forward_ms=0.0,
    backward_ms=0.0,
    input_bytes=0,
    output_bytes=0,
    weight_bytes=0,
    activation_bytes=0,
)


def _costs(problem: ParallelismProblem, size: int, choice: Choice) -> ChoiceCosts:
    key = (size // choice.data_parallel, choice.tensor_parallel, choice.partition)
    links: tuple[Link, Link] = (problem.cluster.intra_node, problem.cluster.inter_node)
    # operators of repeated blocks share profiles: look up each profile once, then spread
    names = list(problem.profile_table)
    number_of = {name: number for number, name in enumerate(names)}
    index = np.array([number_of[operator.profile] for operator in problem.operators])
    found = [problem.profile_table[name].get(key) for name in names]
    profiles = [profile or _MISSING for profile in found]

    def column(values: list[float]) -> Floats:
        spread: Floats = np.array(values, dtype=np.float64)[index]
        return spread

    full = problem.cost_model == "full"

    def transfers(sizes: list[int]) -> Floats:
        if full:
            degree, devices = choice.tensor_parallel, choice.devices
            times = [[received_ms(problem, one, link, degree, devices) for one in sizes] for link in links]
        else:
            times = [[transfer_ms(one, link) for one in sizes] for link in links]
        spread: Floats = np.array(times)[:, index]
        return spread

    forward_ms, backward_ms = [profile.forward_ms for profile in profiles], [one.backward_ms for one in profiles]
    if full:
        loaded = [operator_times(problem, profile) for profile in profiles]
        forward_ms, backward_ms = [forward for forward, _ in loaded], [backward for _, backward in loaded]

    factors = np.array([operator.activation_factor for operator in problem.operators])
    return ChoiceCosts(
        choice=choice,
        forward_ms=column([np.inf if one is None else time for one, time in zip(found, forward_ms, strict=True)]),
        backward_ms=column(backward_ms),
        input_bytes=column([float(profile.input_bytes) for profile in profiles]),
        weight_bytes=column([float(profile.weight_bytes) for profile in profiles]),
        held_bytes=column([float(profile.activation_bytes) for profile in profiles]) * factors,
        forward_reserved_bytes=column([float(profile.forward_reserved_bytes) for profile in profiles]),
        backward_reserved_bytes=column([float(profile.backward_reserved_bytes) for profile in profiles]),
        receive_ms=transfers([profile.input_bytes for profile in profiles]),
        send_ms=transfers([profile.output_bytes for profile in profiles]),
    )
