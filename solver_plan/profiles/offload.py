"""Offload problems from the descriptions of a model and of a cluster: one device and its host, running nothing.

A layer is a repeated block of the model, or what stands before the first or behind the last one. Times are those of
`analytic.py` on one device. An operator that shares weights with one before it (a head tied to the embedding) has no
parameters of its own. The update on the device is bound by its memory: the state is read and written, the gradient
read, the weight written.

Room for resident state is what the device's memory leaves beside weights, gradients, activations and staging:

    room = usable - staging - parameters (weight + gradient) - activations - largest workspace

All gradients are counted, as they stand when the last backward ends. With recomputation of blocks, each block keeps
what enters it, and one block's activations are there at a time; its forward runs again before its backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from solver_plan.documents import computed_from
from solver_plan.errors import InputError
from solver_plan.offload.curve import MenuEntry
from solver_plan.offload.problem import BytesPerParameter, Layer, OffloadProblem, Rates
from solver_plan.profiles.analytic import operator_time
from solver_plan.profiles.cluster import ClusterDescription
from solver_plan.profiles.description import ModelDescription, OperatorDescription

Recomputation = Literal["none", "block"]
RECOMPUTATIONS: tuple[Recomputation, ...] = ("none", "block")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """One way to compute a model: times of each layer, and what it holds."""

    layers: tuple[Layer, ...]
    held_bytes: int
    """Weights, gradients, activations and the largest workspace."""


def profile_offload(
    description: ModelDescription,
    cluster: ClusterDescription,
    global_batch: int,
    *,
    micro_batch: int,
    recomputation: Recomputation = "none",
    gpu_state_bytes: int | None = None,
    staging_bytes: int = 0,
    chunks_per_layer: int = 8,
    clip_gradients: bool = True,
) -> OffloadProblem:
    """Return the problem of training a model on one device of a cluster and its host.

    Parameters
    ----------
    description, cluster
        What is trained, and on what; only one device counts.
    global_batch, micro_batch
        Samples of an iteration and of a micro-step; the rest is accumulated.
    recomputation
        Whether each block's forward runs again before its backward.
    gpu_state_bytes
        Room for resident state; None: what the memory leaves.
    staging_bytes, chunks_per_layer, clip_gradients
        As in `OffloadProblem`.

    Raises
    ------
    InputError
        If the micro-batch does not divide the batch, the cluster says nothing of its host, or the model without any
        state does not fit the device.
    """
    if micro_batch < 1 or global_batch < 1 or global_batch % micro_batch:
        raise InputError(f"micro-batch: found {micro_batch}; it divides the global batch {global_batch}")
    with computed_from(f"{description.name} on {cluster.name}"):
        costs = _costs(description, cluster, micro_batch, recomputation)
    if gpu_state_bytes is None:
        gpu_state_bytes = _usable_bytes(cluster) - staging_bytes - costs.held_bytes
        if gpu_state_bytes < 0:
            raise InputError(
                f"{description.name}: weights, gradients and activations at micro-batch {micro_batch}, recomputation "
                f"{recomputation}, and staging take {costs.held_bytes + staging_bytes} bytes, "
                f"{-gpu_state_bytes} more than {cluster.device.name} has: take a smaller micro-batch, recompute "
                "blocks, or take a larger device"
            )
    smallest = min((layer.parameters for layer in costs.layers if layer.parameters), default=0)
    smallest *= description.bytes_per_parameter.optimizer_state
    if 0 < staging_bytes < smallest:
        raise InputError(
            f"staging: found {staging_bytes} bytes; at least the smallest layer's optimizer state ({smallest} bytes), "
            "or 0: no streaming"
        )
    with computed_from(f"{description.name} on {cluster.name}"):
        return OffloadProblem(
            layers=costs.layers,
            rates=_rates(description, cluster),
            bytes_per_parameter=_bytes_per_parameter(description),
            gpu_state_bytes=gpu_state_bytes,
            staging_bytes=staging_bytes,
            chunks_per_layer=chunks_per_layer,
            accumulation_steps=global_batch // micro_batch,
            clip_gradients=clip_gradients,
            provenance={
                "source": "analytic",
                "description": description.name,
                "cluster": cluster.name,
                "micro_batch": micro_batch,
                "recomputation": recomputation,
            },
        )


def offload_menu(
    description: ModelDescription,
    cluster: ClusterDescription,
    global_batch: int,
    *,
    micro_batches: Sequence[int],
    staging_bytes: int = 0,
) -> tuple[MenuEntry, ...]:
    """Return every micro-batch and recomputation that fits the device, for `offload.curve.best_of_menu`.

    Raises `InputError` if a micro-batch does not divide the batch, or nothing fits.
    """
    entries: list[MenuEntry] = []
    for micro_batch in micro_batches:
        if micro_batch < 1 or global_batch % micro_batch:
            raise InputError(f"menu: found micro-batch {micro_batch}; it divides the global batch {global_batch}")
        for recomputation in RECOMPUTATIONS:
            with computed_from(f"{description.name} on {cluster.name}"):
                costs = _costs(description, cluster, micro_batch, recomputation)
            room = _usable_bytes(cluster) - staging_bytes - costs.held_bytes
            if room >= 0:
                entries.append(
                    MenuEntry(
                        micro_batch=micro_batch,
                        recomputation=recomputation,
                        gpu_state_bytes=room,
                        forward_ms=tuple(layer.forward_ms for layer in costs.layers),
                        backward_ms=tuple(layer.backward_ms for layer in costs.layers),
                        accumulation_steps=global_batch // micro_batch,
                    )
                )
    if not entries:
        raise InputError(
            f"{description.name}: no micro-batch of {', '.join(map(str, micro_batches))} fits {cluster.device.name}: "
            "take smaller ones, or a larger device"
        )
    return tuple(entries)


def layers_of(description: ModelDescription) -> list[tuple[str, tuple[OperatorDescription, ...]]]:
    """Return the operators of each layer with its name: what precedes the blocks, each block, what follows them.

    The last block is as long as the one before it of the same kind; where there is none, it takes all that follows.
    """
    operators = description.operators
    starts = [index for index, operator in enumerate(operators) if operator.block_start]
    if not starts:
        return [(operator.name, (operator,)) for operator in operators]
    lengths: dict[str, int] = {}
    ends: list[int] = []
    for start, following in zip(starts, [*starts[1:], len(operators)], strict=True):
        length = lengths.get(operators[start].kind, following - start) if following == len(operators) else None
        ends.append(following if length is None else start + length)
        lengths[operators[start].kind] = ends[-1] - start
    found: list[tuple[str, tuple[OperatorDescription, ...]]] = []
    if starts[0]:
        found.append((operators[0].name, operators[: starts[0]]))
    for start, end in zip(starts, ends, strict=True):
        name, dot, _ = operators[start].name.partition(".")
        found.append((name if dot else operators[start].name, operators[start:end]))
    if ends[-1] < len(operators):
        found.append((operators[-1].name, operators[ends[-1] :]))
    names = [name for name, _ in found]
    if len(set(names)) < len(names):  # then the operators' own names, which are unique
        found = [(run[0].name, run) for _, run in found]
    return found


def _costs(
    description: ModelDescription, cluster: ClusterDescription, micro_batch: int, recomputation: Recomputation
) -> _Costs:
    weight, gradient = description.bytes_per_parameter.weight, description.bytes_per_parameter.gradient
    layers: list[Layer] = []
    kept: list[int] = []
    entering: list[int] = []
    workspace = 0
    before_bytes = description.input_bytes
    for name, operators in layers_of(description):
        partitions = [operator.partitions[0] for operator in operators]
        times = [operator_time(each, cluster, description.data_type, micro_batch, 1) for each in partitions]
        own = [
            each.weights.per_device(1) // weight
            for operator, each in zip(operators, partitions, strict=True)
            if operator.shares_weights_with is None
        ]
        forward_ms, backward_ms = sum(time.forward_ms for time in times), sum(time.backward_ms for time in times)
        again = recomputation == "block" and any(operator.block_start for operator in operators)
        layers.append(
            Layer(
                name=name,
                parameters=sum(own),
                forward_ms=forward_ms,
                backward_ms=backward_ms + (forward_ms if again else 0.0),
            )
        )
        layer_kept = sum(each.kept.per_device(1) for each in partitions) * micro_batch
        entering.append(before_bytes * micro_batch if again else layer_kept)
        kept.append(layer_kept if again else 0)
        for each in partitions:
            workspace = max(
                workspace,
                micro_batch * max(each.forward_workspace.per_device(1), each.backward_workspace.per_device(1)),
            )
        before_bytes = partitions[-1].output.per_device(1)
    parameters = sum(layer.parameters for layer in layers)
    held = parameters * (weight + gradient) + sum(entering) + max(kept) + workspace
    return _Costs(layers=tuple(layers), held_bytes=held)


def _usable_bytes(cluster: ClusterDescription) -> int:
    return int(cluster.device.memory_bytes * (1 - cluster.device.memory_margin))


def _bytes_per_parameter(description: ModelDescription) -> BytesPerParameter:
    each = description.bytes_per_parameter
    return BytesPerParameter(gradient=each.gradient, weight=each.weight, optimizer_state=each.optimizer_state)


def _rates(description: ModelDescription, cluster: ClusterDescription) -> Rates:
    host, each = cluster.host, description.bytes_per_parameter
    if host is None:
        raise InputError(
            f"cluster {cluster.name}: says nothing of its host; add a table [host] with cpu_update_parameters_per_s, "
            "d2h_bytes_per_s and h2d_bytes_per_s"
        )
    moved = 2 * each.optimizer_state + each.gradient + each.weight
    return Rates(
        cpu_update_parameters_per_s=host.cpu_update_parameters_per_s,
        gpu_update_parameters_per_s=1000.0 / cluster.device.memory_ms(moved),
        d2h_bytes_per_s=host.d2h_bytes_per_s,
        h2d_bytes_per_s=host.h2d_bytes_per_s,
    )
