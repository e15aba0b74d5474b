"""Cost of one stage for one micro-batch."""

from dataclasses import dataclass

from solver_plan.parallelism.schedule import StageDurations


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Time and memory of a stage; times are for one micro-batch."""

    forward_ms: float
    """Forward, with the transfer of its input."""
    backward_ms: float
    """Backward, with recomputation and the transfer of its output's gradient."""
    recompute_ms: float
    """Part of the backward that recomputes."""
    communication_ms: float
    """Part of both that moves data between stages or changes layouts."""
    weight_state_bytes: float
    """Weights, gradients, optimizer state."""
    activation_bytes: float
    """Held for all micro-batches in flight."""
    peak_bytes: float
    """Brought back by recomputation at a time."""
    reserved_bytes: float
    """Taken by the allocator beside."""
    input_arrival_ms: float = 0.0
    """`full`: transfer of the input, where it overlaps computation."""
    gradient_arrival_ms: float = 0.0
    """`full`: transfer of the output's gradient, where it overlaps computation."""

    @property
    def durations(self) -> StageDurations:
        """What playing a schedule needs."""
        return StageDurations(self.forward_ms, self.backward_ms, self.input_arrival_ms, self.gradient_arrival_ms)

    @property
    def stage_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms

    @property
    def memory_bytes(self) -> float:
        """All of it."""
        return self.weight_state_bytes + self.activation_bytes + self.peak_bytes + self.reserved_bytes
