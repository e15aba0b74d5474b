"""The operations of one iteration for a placement, and what must come before what.

An operation o of iteration i starts at ``start[o] + i * period``. A precedence (u, v, lag, n) says

    start[v] + n * period >= start[u] + duration[u] + lag
"""

from collections.abc import Sequence
from typing import NamedTuple

from solver_plan.offload.plan import OperationName, Place, ResourceName
from solver_plan.offload.problem import OffloadProblem

Placement = tuple[Place, ...]
"""Where each layer is updated, in forward order."""


class Operation(NamedTuple):
    """One operation of an iteration."""

    resource: ResourceName
    operation: OperationName
    layer: int
    chunk: int
    duration_ms: float


class Precedence(NamedTuple):
    """`after`, `iterations` later, starts no earlier than `lag_ms` after the end of `before`."""

    before: int
    after: int
    lag_ms: float = 0.0
    iterations: int = 0


class Iteration(NamedTuple):
    """All operations of one iteration; the rest gives their indices."""

    operations: tuple[Operation, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    gpu_update: dict[int, int]
    """Of the layers updated on the GPU, streamed or not."""
    gradient_copy: dict[int, tuple[int, ...]]
    """Of the layers updated on the CPU, chunk by chunk; so are the next two."""
    cpu_update: dict[int, tuple[int, ...]]
    weight_copy: dict[int, tuple[int, ...]]
    state_copy_in: dict[int, int]
    state_copy_out: dict[int, int]


def iteration_of(problem: OffloadProblem, placement: Placement) -> Iteration:
    """Return every operation that a placement needs."""
    made: list[Operation] = []

    def add(resource: ResourceName, operation: OperationName, layer: int, duration_ms: float, chunk: int = 0) -> int:
        made.append(Operation(resource, operation, layer, chunk, duration_ms))
        return len(made) - 1

    chunks = problem.chunks_per_layer
    count = len(problem.layers)
    forward = tuple(add("gpu", "forward", layer, problem.layers[layer].forward_ms) for layer in range(count))
    backward = {
        layer: add("gpu", "backward", layer, problem.layers[layer].backward_ms) for layer in reversed(range(count))
    }
    found = Iteration((), forward, tuple(backward[layer] for layer in range(count)), {}, {}, {}, {}, {}, {})
    for layer, place in enumerate(placement):
        if place == "cpu":
            for operations, resource, name, duration_ms in (
                (found.gradient_copy, "d2h", "gradient_copy", problem.gradient_copy_ms(layer)),
                (found.cpu_update, "cpu", "update", problem.cpu_update_ms(layer)),
                (found.weight_copy, "h2d", "weight_copy", problem.weight_copy_ms(layer)),
            ):
                operations[layer] = tuple(
                    add(resource, name, layer, duration_ms / chunks, chunk)  # type: ignore[arg-type]
                    for chunk in range(chunks)
                )
        else:
            if place == "gpu_streamed":
                found.state_copy_in[layer] = add("h2d", "state_copy_in", layer, problem.state_copy_in_ms(layer))
                found.state_copy_out[layer] = add("d2h", "state_copy_out", layer, problem.state_copy_out_ms(layer))
            found.gpu_update[layer] = add("gpu", "update", layer, problem.gpu_update_ms(layer))
    return found._replace(operations=tuple(made))


def precedences_of(problem: OffloadProblem, iteration: Iteration) -> list[Precedence]:
    """Return all precedences between the operations of a placement; the resources and rooms are not among them."""
    found: list[Precedence] = []
    forward, backward = iteration.forward, iteration.backward
    count = len(forward)
    for layer in range(count - 1):
        found.append(Precedence(forward[layer], forward[layer + 1]))
        found.append(Precedence(backward[layer + 1], backward[layer]))
    found.append(Precedence(forward[-1], backward[-1], problem.other_micro_steps_ms))
    for layer, update in iteration.gpu_update.items():
        found.append(Precedence(backward[0] if problem.clip_gradients else backward[layer], update))
        found.append(Precedence(update, forward[layer], 0.0, 1))
    for layer, copy_in in iteration.state_copy_in.items():
        copy_out = iteration.state_copy_out[layer]
        found.append(Precedence(copy_in, iteration.gpu_update[layer]))
        found.append(Precedence(iteration.gpu_update[layer], copy_out))
        found.append(Precedence(copy_out, copy_in, 0.0, 1))
    for layer, copies in iteration.gradient_copy.items():
        for copy, update, weight in zip(copies, iteration.cpu_update[layer], iteration.weight_copy[layer], strict=True):
            found.append(Precedence(backward[layer], copy))
            found.append(Precedence(copy, update))
            if problem.clip_gradients:
                found.append(Precedence(backward[0], update))
            found.append(Precedence(update, weight))
            found.append(Precedence(weight, forward[layer], 0.0, 1))
    return found


def all_on(place: Place, layers: int) -> Placement:
    """Return the placement that has every layer in one place."""
    return (place,) * layers


def resident_bytes(problem: OffloadProblem, placement: Sequence[Place]) -> int:
    """Bytes of the optimizer states that stay on the device."""
    return sum(problem.state_bytes(layer) for layer, place in enumerate(placement) if place == "gpu")
