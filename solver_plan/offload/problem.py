"""The offload problem: one device and its host; where each layer's optimizer update runs, and when.

Field names follow `documents.md`. Times are milliseconds, sizes bytes, rates per second.
"""

from typing import Annotated, Literal, Self

from annotated_types import Len
from pydantic import model_validator

from solver_plan.documents import Bytes, Count, Milliseconds, Name, PerSecond, ProblemDocument, document, fail

MOST_CHUNKS = 50_000
"""Of all layers together: each is three operations of the timeline, one after the other."""


@document
class Layer:
    """One layer, or one bucket of parameters, in forward order."""

    name: Name
    parameters: Bytes
    """Number of parameters; 0 is legal (a head tied to the embedding)."""
    forward_ms: Milliseconds
    backward_ms: Milliseconds


@document
class Rates:
    """How fast updates and copies run."""

    cpu_update_parameters_per_s: PerSecond
    gpu_update_parameters_per_s: PerSecond
    d2h_bytes_per_s: PerSecond
    h2d_bytes_per_s: PerSecond


@document
class BytesPerParameter:
    """What one parameter occupies or moves."""

    gradient: Bytes
    """Copied to the host for an update on the CPU."""
    weight: Bytes
    """Copied back after an update on the CPU."""
    optimizer_state: Bytes
    """Master weight and moments: resident for an update on the GPU, copied in and out for a streamed one."""


@document
class OffloadProblem(ProblemDocument):
    """Which layers are updated on the CPU, the GPU, or the GPU with streamed state, so that the period is least."""

    kind: Literal["offload"] = "offload"
    layers: Annotated[tuple[Layer, ...], Len(1)]
    rates: Rates
    bytes_per_parameter: BytesPerParameter
    gpu_state_bytes: Bytes
    """Room on the device for resident optimizer state."""
    staging_bytes: Bytes
    """Room on the device for streamed optimizer state; 0: no streaming."""
    chunks_per_layer: Count
    """A layer updated on the CPU is copied and updated in this many equal chunks."""
    accumulation_steps: Count = 1
    """Micro-steps of an iteration; only the first forward and the last backward are in the timeline."""
    clip_gradients: bool
    """No update may start before every backward of its iteration has ended; copies may."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names: set[str] = set()
        for index, layer in enumerate(self.layers):
            if layer.name in names:
                raise fail(f"layers[{index}].name", layer.name, "names are unique")
            names.add(layer.name)
        chunks = len(self.layers) * self.chunks_per_layer
        if chunks > MOST_CHUNKS:
            rule = (
                f"all layers together have at most {MOST_CHUNKS} chunks: of {len(self.layers)} layers each at most "
                f"{max(1, MOST_CHUNKS // len(self.layers))}"
            )
            raise fail("chunks_per_layer", self.chunks_per_layer, rule)
        smallest = min(
            (self.state_bytes(layer) for layer in range(len(self.layers)) if self.state_bytes(layer)), default=0
        )
        if 0 < self.staging_bytes < smallest:
            rule = (
                f"staging holds at least the smallest layer's optimizer state ({smallest} bytes), or is 0: no streaming"
            )
            raise fail("staging_bytes", self.staging_bytes, rule)
        return self

    @property
    def compute_ms(self) -> float:
        """Forward and backward of all layers, one micro-step."""
        return sum(layer.forward_ms + layer.backward_ms for layer in self.layers)

    @property
    def other_micro_steps_ms(self) -> float:
        """What the device computes between the first forward and the last backward of an iteration."""
        return (self.accumulation_steps - 1) * self.compute_ms

    def state_bytes(self, layer: int) -> int:
        """Bytes of a layer's optimizer state."""
        return self.layers[layer].parameters * self.bytes_per_parameter.optimizer_state

    def cpu_update_ms(self, layer: int) -> float:
        """Time of a whole layer's update on the CPU."""
        return 1e3 * self.layers[layer].parameters / self.rates.cpu_update_parameters_per_s

    def gpu_update_ms(self, layer: int) -> float:
        """Time of a layer's update on the GPU."""
        return 1e3 * self.layers[layer].parameters / self.rates.gpu_update_parameters_per_s

    def gradient_copy_ms(self, layer: int) -> float:
        """Time to copy a whole layer's gradient to the host."""
        return 1e3 * self.layers[layer].parameters * self.bytes_per_parameter.gradient / self.rates.d2h_bytes_per_s

    def weight_copy_ms(self, layer: int) -> float:
        """Time to copy a whole layer's weights to the device."""
        return 1e3 * self.layers[layer].parameters * self.bytes_per_parameter.weight / self.rates.h2d_bytes_per_s

    def state_copy_in_ms(self, layer: int) -> float:
        """Time to copy a layer's optimizer state to the device."""
        return 1e3 * self.state_bytes(layer) / self.rates.h2d_bytes_per_s

    def state_copy_out_ms(self, layer: int) -> float:
        """Time to copy a layer's optimizer state to the host."""
        return 1e3 * self.state_bytes(layer) / self.rates.d2h_bytes_per_s

    def may_stream(self, layer: int) -> bool:
        """True if the layer's state fits the staging room, where there is any."""
        return 0 < self.staging_bytes >= self.state_bytes(layer)
