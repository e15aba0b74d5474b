"""Offload plans for other systems: what part of the optimizer is updated on the CPU.

Megatron-LM  the first parameters are updated on the CPU until their number reaches a fraction of all
             (`core/optimizer/cpu_offloading/hybrid_optimizer.py`, d98e8a64)
DeepSpeed    ZeRO 3 keeps the last sub-groups of parameters on the CPU, a ratio of their number
             (`runtime/zero/stage3.py`, 0.19.8)

Both update after the last backward, and the next forward waits for all. So the nearest plan has the layers of one end
on the CPU, as few as hold the parameters that the plan does not keep on the device, and is timed with that rule.
"""

import json
from dataclasses import dataclass

from pydantic import JsonValue

from solver_plan.errors import NotExportableError
from solver_plan.export.losses import Loss
from solver_plan.export.target import DEEPSPEED, MEGATRON, TORCHTITAN, Target
from solver_plan.offload.assemble import Candidate, candidate_of, plan_document
from solver_plan.offload.flow import run_rule
from solver_plan.offload.heuristics import SERIAL
from solver_plan.offload.operations import Placement
from solver_plan.offload.plan import OffloadPlan, Place
from solver_plan.offload.problem import OffloadProblem

DIGITS = 6
"""Of a fraction."""
SAME = 1e-9
"""Relative difference of periods below which they are equal."""


@dataclass(frozen=True, slots=True)
class OffloadExport:
    """What another system is told of an offload plan."""

    losses: list[Loss]
    nearest: OffloadPlan
    cpu_parameters: int
    parameters: int
    notes: list[str]

    @property
    def fraction(self) -> float:
        """Of the parameters, updated on the CPU; rounded down, for a parameter more would not be the nearest."""
        steps: int = 10**DIGITS
        return self.cpu_parameters * steps // max(1, self.parameters) / steps


def export_offload(problem: OffloadProblem, plan: OffloadPlan, target: Target) -> OffloadExport:
    """Return the nearest offload that a target can be told.

    Raises
    ------
    NotExportableError
        If the target moves all optimizer state to the host or none, and the plan does neither.
    """
    placement = candidate_of(problem, plan).placement
    moved = [place != "gpu" for place in placement]
    if target is TORCHTITAN and any(moved):
        raise NotExportableError(
            "plan: torchtitan offloads weights, gradients and optimizer state together (training.enable_cpu_offload), "
            "which is no plan of this kind; export to megatron or deepspeed"
        )
    parameters = [layer.parameters for layer in problem.layers]
    if not any(moved):
        return OffloadExport([], plan, 0, sum(parameters), [])
    wanted = sum(count for count, away in zip(parameters, moved, strict=True) if away)
    order = range(len(parameters)) if target is MEGATRON else range(len(parameters) - 1, -1, -1)
    chosen: set[int] = set()
    for layer in order:
        if sum(parameters[each] for each in chosen) >= wanted:
            break
        chosen.add(layer)
    places: list[Place] = ["cpu" if layer in chosen else "gpu" for layer in range(len(parameters))]
    nearest_placement: Placement = tuple(places)
    timing = run_rule(problem, nearest_placement, SERIAL)[1]
    nearest = plan_document(problem, Candidate(nearest_placement, timing))
    on_cpu = sum(parameters[layer] for layer in chosen)
    notes = []
    if target is DEEPSPEED:
        notes.append("DeepSpeed counts sub-groups, not parameters: sub_group_size is that of the largest layer")
    losses = _losses(problem, placement, nearest_placement, target)
    if abs(timing.period_ms - plan.predicted.period_ms) > SAME * plan.predicted.period_ms:
        losses.append(
            Loss("timeline", f"updates run beside the passes; {target.name} updates between backward and next forward")
        )
    return OffloadExport(losses, nearest, on_cpu, sum(parameters), notes)


def _losses(problem: OffloadProblem, placement: Placement, nearest: Placement, target: Target) -> list[Loss]:
    losses = []
    streamed = [layer.name for layer, place in zip(problem.layers, placement, strict=True) if place == "gpu_streamed"]
    if streamed:
        losses.append(
            Loss("streaming", f"state of {len(streamed)} layers is streamed; {target.name} updates them on the CPU")
        )
    if [place == "gpu" for place in placement] != [place == "gpu" for place in nearest]:
        end = "first" if target is MEGATRON else "last"
        losses.append(
            Loss(
                "updates",
                f"the CPU updates layers {_names(problem, placement)}; {target.name} has it update the {end} ones, "
                f"{_names(problem, nearest)}",
            )
        )
    return losses


def _names(problem: OffloadProblem, placement: Placement) -> str:
    names = [layer.name for layer, place in zip(problem.layers, placement, strict=True) if place == "cpu"]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, …, {names[-1]} ({len(names)})"


def megatron_offload(export: OffloadExport) -> list[str]:
    """Return Megatron-LM's arguments."""
    if not export.cpu_parameters:
        return []
    return [
        "--use-distributed-optimizer",
        "--use-precision-aware-optimizer",
        "--optimizer-cpu-offload",
        f"--optimizer-offload-fraction {export.fraction}",
        "--overlap-cpu-optimizer-d2h-h2d",
    ]


def deepspeed_offload(problem: OffloadProblem, export: OffloadExport, remarks: list[str]) -> str:
    """Return the text of DeepSpeed's configuration file; `remarks` stand in it."""
    zero: dict[str, JsonValue] = {"stage": 3}
    if export.cpu_parameters:
        zero["sub_group_size"] = max(layer.parameters for layer in problem.layers)
        zero["offload_optimizer"] = {
            "device": "cpu",
            "pin_memory": True,
            "ratio": export.fraction,
        }
    config: dict[str, JsonValue] = {
        "gradient_accumulation_steps": problem.accumulation_steps,
        "zero_optimization": zero,
        "solver_plan": {"remarks": [*remarks]},
    }
    return json.dumps(config, ensure_ascii=False, indent=1) + "\n"
