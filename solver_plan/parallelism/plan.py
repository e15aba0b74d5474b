"""The parallelism plan: stages, their devices, layouts and recomputed operators. Field names follow `documents.md`."""

from typing import Annotated, Literal

from annotated_types import Ge, Le, Len
from pydantic import StringConstraints

from solver_plan.documents import Bytes, Count, Index, Milliseconds, PlanDocument, Range, document

Action = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})[FBIW](0|[1-9][0-9]{0,8})$")]
"""Stage, F|B|I|W, micro-batch: ``2F5`` is the forward of micro-batch 5 on stage 2."""


@document
class Layout:
    """How consecutive operators are spread over the devices of their stage."""

    operators: Range
    tensor_parallel: Count
    data_parallel: Count
    partition: Index

    @property
    def devices(self) -> int:
        """Number of devices that the degrees need."""
        return self.tensor_parallel * self.data_parallel


@document
class Stage:
    """Consecutive operators on a group of devices."""

    operators: Range
    devices: Annotated[tuple[Index, ...], Len(1)]
    """Replica j, tensor rank k is ``devices[j * tensor_parallel + k]``."""
    layout: Annotated[tuple[Layout, ...], Len(1)]
    recompute: tuple[Range, ...]
    sharding: Annotated[int, Ge(0), Le(3)] = 0
    """ZeRO stage of the data-parallel group."""


@document
class Schedule:
    """The order of the actions of each group of devices, where it is not 1F1B."""

    orders: tuple[tuple[Action, ...], ...]


@document
class Predicted:
    """What the plan is predicted to cost."""

    iteration_ms: Milliseconds
    stage_ms: tuple[Milliseconds, ...]
    """Forward and backward of one micro-batch, with recomputation and communication that is not hidden."""
    stage_memory_bytes: tuple[Bytes, ...]


@document
class ParallelismPlan(PlanDocument):
    """How one model is trained on one cluster."""

    kind: Literal["parallelism"] = "parallelism"
    micro_batch_size: Count
    """Samples of one micro-batch, all data-parallel replicas of a stage together."""
    micro_batches: Count
    stages: Annotated[tuple[Stage, ...], Len(1)]
    schedule: Schedule | None = None
    predicted: Predicted | None = None
    """None: written by hand; `check` says what it would be."""
