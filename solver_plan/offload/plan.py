"""The offload plan: a placement and one iteration's timeline, repeated every period.

Field names follow `documents.md`.
"""

from typing import Annotated, Literal

from annotated_types import Ge, Le, Len

from solver_plan.documents import Bytes, Index, Milliseconds, Name, PlanDocument, document

Place = Literal["cpu", "gpu", "gpu_streamed"]
"""Where a layer's optimizer update runs; `gpu_streamed`: with state that is copied in and out."""
PLACES: tuple[Place, ...] = ("cpu", "gpu", "gpu_streamed")
ResourceName = Literal["gpu", "cpu", "d2h", "h2d"]
"""The GPU's stream, the CPU, and the two directions of the link: device to host, host to device."""
OperationName = Literal[
    "forward", "backward", "update", "gradient_copy", "weight_copy", "state_copy_in", "state_copy_out"
]
RESOURCES: tuple[ResourceName, ...] = ("gpu", "cpu", "d2h", "h2d")


@document
class LayerPlacement:
    """Where one layer is updated."""

    layer: Name
    update_on: Place


@document
class TimedOperation:
    """One operation of the timeline; it may start or end after the period, then it runs during the next iteration."""

    resource: ResourceName
    operation: OperationName
    layer: Name
    chunk: Index
    """0 for all that is not chunked."""
    start_ms: Annotated[float, Ge(-1e-6), Le(1e18)]
    end_ms: Annotated[float, Ge(-1e-6), Le(1e18)]


@document
class Predicted:
    """What the plan is predicted to cost."""

    period_ms: Milliseconds
    gpu_state_bytes: Bytes
    """Sum of the resident optimizer states."""


@document
class OffloadPlan(PlanDocument):
    """Where each layer is updated, and when everything runs."""

    kind: Literal["offload"] = "offload"
    placement: Annotated[tuple[LayerPlacement, ...], Len(1)]
    timeline: Annotated[tuple[TimedOperation, ...], Len(1)]
    predicted: Predicted
