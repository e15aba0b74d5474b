"""Memory that a rank holds while it trains.

On CUDA the allocator tells. On the CPU nothing does, so the tensors are counted: weights, gradients and optimizer state
where they are largest, and the activations kept for the backward (each storage once), at their peak over the stages and
micro-batches in flight.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solver_plan.execution.torch_pipelining import settled


class MemoryMeter:
    """Counts what this rank holds; see the module."""

    def __init__(self, device: torch.device, sharded_stages: Collection[int]) -> None:
        self.device = device
        self.sharded_stages = sharded_stages
        self.state_bytes = 0
        """Weights, gradients and optimizer state at their most, between computations."""
        self.activation_bytes = 0
        """Activations kept for the backward at their most."""
        self.counting = device.type != "cuda"
        self._held: dict[tuple[int, int], dict[int, int]] = {}
        self._forward: dict[int, int] | None = None
        self._state: set[int] = set()
        self._gathered: dict[tuple[int, str], int] = {}

    @property
    def peak_bytes(self) -> int:
        """The most that was held."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return self.state_bytes + self.activation_bytes + self.gathered_bytes

    @property
    def gathered_bytes(self) -> int:
        """Whole weights and gradients of sharded stages, held while they compute."""
        return sum(self._gathered.values())

    @contextmanager
    def forward(self, stage: int, micro_batch: int, module: nn.Module) -> Iterator[None]:
        """Count what a forward keeps for its backward."""
        if not self.counting:
            yield
            return
        weights = dict(_storage(tensor) for tensor in (*module.parameters(), *module.buffers()))
        self._gather(stage, "weights", weights)
        held = self._forward = self._held[stage, micro_batch] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key, size = _storage(tensor)
            if key not in weights:
                held[key] = size
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self._forward = None
        self.activation_bytes = max(self.activation_bytes, sum(sum(kept.values()) for kept in self._held.values()))

    def keep(self, values: Iterable[torch.Tensor]) -> None:
        """Count the inputs of a recomputed run of the forward that goes on: no operator saves them."""
        if self._forward is not None:
            self._forward.update(map(_storage, values))

    def backward(self, stage: int, micro_batch: int, module: nn.Module) -> None:
        """Forget what a backward has used up, and count the gradients that it has left."""
        self._held.pop((stage, micro_batch), None)
        if self.counting:
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            self._gather(stage, "gradients", dict(map(_storage, gradients)))

    def _gather(self, stage: int, what: str, found: dict[int, int]) -> None:
        if stage not in self.sharded_stages:
            return
        beside = sum(size for key, size in found.items() if key not in self._state)
        self._gathered[stage, what] = max(self._gathered.get((stage, what), 0), beside)

    def sample_state(self, modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
        """Count weights, gradients and optimizer state as they are now."""
        if not self.counting:
            return
        held: dict[int, int] = {}
        for module in modules:
            for parameter in module.parameters():
                held.update([_storage(parameter)])
                if parameter.grad is not None:
                    held.update([_storage(parameter.grad)])
        for state in optimizer.state.values() if optimizer is not None else ():
            held.update(_storage(value) for value in state.values() if isinstance(value, torch.Tensor))
        self.state_bytes = max(self.state_bytes, sum(held.values()))
        self._state = set(held)


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    assert isinstance(part, torch.Tensor)
    storage = settled(part).untyped_storage()
    return storage.data_ptr(), storage.nbytes()
