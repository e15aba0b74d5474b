"""The wavefront plan: slices of components on devices. Field names follow `documents.md`."""

from typing import Annotated, Literal

from annotated_types import Len

from solver_plan.documents import Bytes, Index, Milliseconds, Name, PlanDocument, Range, document


@document
class Slice:
    """Consecutive layers of a component on a set of devices.

    With phases `forward_backward`, [start_ms, end_ms) is the forward, and the backward has its own two times.
    """

    component: Name
    layers: Range
    mode: Index | None = None
    """Index into the component's `modes`; None where it has `layer_ms`."""
    devices: Annotated[tuple[Index, ...], Len(1)]
    start_ms: Milliseconds
    end_ms: Milliseconds
    backward_start_ms: Milliseconds | None = None
    backward_end_ms: Milliseconds | None = None


@document
class Predicted:
    """What the plan is predicted to cost."""

    makespan_ms: Milliseconds
    """Latest end plus `reduction_ms`: the objective."""
    transfer_ms: Milliseconds
    """Sum of all transfers, forward and backward."""
    reduction_ms: Milliseconds
    device_memory_bytes: tuple[Bytes, ...]


@document
class WavefrontPlan(PlanDocument):
    """When and where each layer of each task runs."""

    kind: Literal["wavefront"] = "wavefront"
    slices: Annotated[tuple[Slice, ...], Len(1)]
    predicted: Predicted | None = None
    """None: written by hand; `check` says what it would be."""
