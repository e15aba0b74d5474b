"""A DeepSpeed configuration file, with what `PipelineModule` is to be told beside it, under ``solver_plan``.

Names as in DeepSpeed 0.19.8 (2026-10-20): `runtime/config.py`, `runtime/zero/config.py`, `runtime/pipe/module.py`,
`runtime/tensor_parallel/config.py`. DeepSpeed reads only the keys that it knows.
"""

import itertools
import json

from pydantic import JsonValue

from solver_plan.export.configuration import Configuration
from solver_plan.export.layers import LayerChain
from solver_plan.parallelism.problem import ParallelismProblem

LEFT_OUT = "precision (bf16 or fp16), optimizer, data, and the model: a list of layers for PipelineModule"


def deepspeed_config(
    problem: ParallelismProblem, chain: LayerChain, configuration: Configuration, remarks: list[str]
) -> str:
    """Return the text of the configuration file; `remarks` stand in it."""
    zero: dict[str, JsonValue] = {"stage": configuration.sharding if configuration.data_parallel > 1 else 0}
    if problem.cost_model == "full":
        zero["overlap_comm"] = problem.overlap.reduction
    config: dict[str, JsonValue] = {
        "train_batch_size": configuration.micro_batch_size * configuration.micro_batches,
        "train_micro_batch_size_per_gpu": configuration.replica_batch,
        "gradient_accumulation_steps": configuration.micro_batches,
        "zero_optimization": zero,
    }
    parameter = problem.bytes_per_parameter
    if problem.cost_model == "full" and parameter is not None and parameter.weight < parameter.gradient == 4:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if configuration.groups == 1 and configuration.tensor_parallel > 1:
        config["tensor_parallel"] = {"autotp_size": configuration.tensor_parallel}
    own: dict[str, JsonValue] = {"remarks": [*remarks]}
    every_layer = configuration.recomputation.rule == "every_layer"
    if configuration.groups > 1:
        parts = pipeline_parts(chain, configuration)
        own["PipelineModule"] = {
            "topology": {
                "pipe": configuration.groups,
                "data": configuration.data_parallel,
                "model": configuration.tensor_parallel,
            },
            "partition_method": "uniform" if _uniform(parts) else "given",
            "parts": [*parts],
            "activation_checkpoint_interval": int(every_layer),
        }
    else:
        own["recompute_every_layer"] = every_layer
    config["solver_plan"] = own
    return json.dumps(config, ensure_ascii=False, indent=1) + "\n"


def pipeline_parts(chain: LayerChain, configuration: Configuration) -> list[int]:
    """Return where the stages begin, and where the last one ends, in the list of layers.

    The list has an entry for each operator before the first layer, each layer, and each operator behind the last.
    """
    starts = [*range(chain.front), *(first for first, _ in chain.layers), *range(chain.tail, chain.operators)]
    place = {operator: number for number, operator in enumerate(starts)}
    return [*(place[cut] for cut in configuration.cuts[:-1]), len(starts)]


def _uniform(parts: list[int]) -> bool:
    return len({end - first for first, end in itertools.pairwise(parts)}) == 1


def deepspeed_notes(problem: ParallelismProblem, chain: LayerChain, configuration: Configuration) -> list[str]:
    """Return what a reader of the configuration must know beside it."""
    notes = [f"left to you: {LEFT_OUT}"]
    every_layer = configuration.recomputation.rule == "every_layer"
    if configuration.groups > 1:
        behind = chain.operators - chain.tail
        notes.append(
            f"parts count entries of the list of layers: {chain.front} before the layers, {len(chain.layers)} layers, "
            f"{behind} behind them"
        )
        if not _uniform(pipeline_parts(chain, configuration)):
            notes.append(
                "parts need a subclass of PipelineModule whose _partition_layers sets self.parts and calls "
                "self._set_bounds(start, stop) with those of its stage: no partition_method says them"
            )
        if configuration.tensor_parallel > 1:
            notes.append("the model splits its tensors along the axis model of the topology: DeepSpeed does not")
        if every_layer:
            notes.append("name the class of the layers in checkpointable_layers, so that nothing else is recomputed")
    elif every_layer:
        notes.append("the model calls deepspeed.checkpointing.checkpoint for every layer: no key says so")
    return notes
