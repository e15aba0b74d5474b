"""What the systems that plans are exported to can be told, and where their option names were read."""

from collections.abc import Callable
from dataclasses import dataclass

from solver_plan.export.configuration import Configuration, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Abilities of another system."""

    name: str
    title: str
    """Name and version whose options are written."""
    equal_layers: bool
    """Its pipelines consist of layers that are all alike."""
    interleaves: bool
    """It has interleaved 1F1B."""
    custom_orders: bool
    """It runs any order of forwards and backwards."""
    rules: tuple[Rule, ...]
    """Of recomputation."""
    shardings: Callable[[int], tuple[int, ...]]
    """ZeRO stages that it has with so many groups of devices."""
    sequence_parallel: Callable[[Configuration], bool]
    """It can divide along the sequence what tensor parallelism leaves whole."""


MEGATRON = Target(
    name="megatron",
    title="Megatron-LM d98e8a64 (2026-08-22)",
    equal_layers=True,
    interleaves=True,
    custom_orders=False,
    rules=("nothing", "core_attention", "first_layers", "every_layer"),
    shardings=lambda groups: (0, 1, 2, 3) if groups == 1 else (0, 1),
    sequence_parallel=lambda configuration: True,
)
"""Weights and gradients are sharded (ZeRO 2 and 3) by Megatron-FSDP, which is used without a pipeline."""

TORCHTITAN = Target(
    name="torchtitan",
    title="torchtitan 0.3.0 (2026-09-03)",
    equal_layers=True,
    interleaves=True,
    custom_orders=True,
    rules=("nothing", "every_layer"),
    shardings=lambda groups: (0, 2, 3),
    sequence_parallel=lambda configuration: True,
)
"""Replicas are equal (ZeRO 0) or sharded by FSDP, whose weights stay whole after the forward (2) or do not (3)."""

DEEPSPEED = Target(
    name="deepspeed",
    title="DeepSpeed 0.19.8 (2026-10-20)",
    equal_layers=False,
    interleaves=False,
    custom_orders=False,
    rules=("nothing", "every_layer"),
    shardings=lambda groups: (0, 1) if groups > 1 else (0, 1, 2, 3),
    sequence_parallel=lambda configuration: configuration.groups > 1,
)
"""`PipelineModule` refuses ZeRO 2 and 3. With a pipeline the model itself splits its tensors."""

TARGETS = {target.name: target for target in (MEGATRON, TORCHTITAN, DEEPSPEED)}
