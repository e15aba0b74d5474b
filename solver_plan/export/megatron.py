"""Arguments of Megatron-LM's training scripts: one ``--name value`` a line, remarks behind ``#``.

Names and meanings as in Megatron-LM d98e8a64 (2026-08-22): `megatron/training/arguments.py`,
`core/transformer/transformer_config.py`, `core/transformer/pipeline_parallel_layer_layout.py` (the letters of a layout:
E embedding, t layer, L loss; stages in the order in which a micro-batch passes them) and `core/recompute.py`
(`block`: the first layers of each virtual stage).
"""

from solver_plan.export.configuration import Configuration, layers_of_stages
from solver_plan.export.layers import LayerChain
from solver_plan.parallelism.problem import ParallelismProblem

LEFT_OUT = "hidden size, heads, feed-forward size, sequence length, vocabulary, precision, data, learning rate"
"""What training needs and a problem does not have."""


def megatron_arguments(problem: ParallelismProblem, chain: LayerChain, configuration: Configuration) -> list[str]:
    """Return the arguments, each with its value."""
    arguments = [
        f"--num-layers {len(chain.layers)}",
        f"--micro-batch-size {configuration.replica_batch}",
        f"--global-batch-size {configuration.micro_batch_size * configuration.micro_batches}",
        f"--tensor-model-parallel-size {configuration.tensor_parallel}",
        f"--pipeline-model-parallel-size {configuration.groups}",
    ]
    arguments += _pipeline(chain, configuration)
    if problem.sequence_parallel and configuration.tensor_parallel > 1:
        arguments.append("--sequence-parallel")
    arguments += _recomputation(configuration)
    arguments += _sharding(problem, configuration)
    if problem.cost_model == "full":
        arguments += _overlap(problem, configuration)
        parameter = problem.bytes_per_parameter
        if parameter is not None and parameter.weight == 2 and parameter.gradient == 4:
            arguments.append("--accumulate-allreduce-grads-in-fp32")
        if not any(operator.shares_weights_with for operator in problem.operators):
            arguments.append("--untie-embeddings-and-output-weights")
    return arguments


def layout_text(chain: LayerChain, configuration: Configuration) -> str:
    """Return the stages as Megatron-LM writes them, such as ``Et*9|t*10|t*5L``."""
    parts = [f"t*{count}" if count > 1 else "t" * count for count in layers_of_stages(configuration, chain)]
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return "|".join(parts)


def _pipeline(chain: LayerChain, configuration: Configuration) -> list[str]:
    if configuration.groups == 1:
        return []
    if len(set(layers_of_stages(configuration, chain))) > 1:
        return [f"--pipeline-model-parallel-layout {layout_text(chain, configuration)}"]
    if configuration.virtual_stages > 1:
        return [f"--num-virtual-stages-per-pipeline-rank {configuration.virtual_stages}"]
    return []  # equal stages are its own division


def _recomputation(configuration: Configuration) -> list[str]:
    rule, layers = configuration.recomputation.rule, configuration.recomputation.layers
    if rule == "nothing":
        return []
    if rule == "core_attention":
        return ["--recompute-granularity selective", "--recompute-modules core_attn"]
    method, number = ("block", layers) if rule == "first_layers" else ("uniform", 1)
    return ["--recompute-granularity full", f"--recompute-method {method}", f"--recompute-num-layers {number}"]


def _sharding(problem: ParallelismProblem, configuration: Configuration) -> list[str]:
    if configuration.sharding == 0 or configuration.data_parallel == 1:
        return []
    if configuration.sharding == 1:
        return ["--use-distributed-optimizer"]
    strategy = "optim_grads" if configuration.sharding == 2 else "optim_grads_params"
    return [
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        f"--data-parallel-sharding-strategy {strategy}",
        "--no-gradient-accumulation-fusion",
        "--ckpt-format fsdp_dtensor",
    ]


def _overlap(problem: ParallelismProblem, configuration: Configuration) -> list[str]:
    arguments = []
    if problem.overlap.reduction and configuration.data_parallel > 1:
        arguments.append("--overlap-grad-reduce")
        if configuration.sharding:
            arguments.append("--overlap-param-gather")
    if problem.overlap.tensor_parallel and problem.sequence_parallel and configuration.tensor_parallel > 1:
        arguments.append("--tp-comm-overlap")
    return arguments


def megatron_notes(problem: ParallelismProblem, configuration: Configuration) -> list[str]:
    """Return what a reader of the arguments must know beside them."""
    more = "" if problem.cost_model == "full" else ", whether the head has its own weights"
    notes = [f"left to you: {LEFT_OUT}{more}"]
    parameter = problem.bytes_per_parameter
    if problem.cost_model == "full" and parameter is not None and parameter.weight == parameter.gradient == 2:
        notes.append(
            "gradients were priced in 16 bit: with --bf16 give --grad-reduce-in-bf16, or they take 4 bytes each"
        )
    if problem.cost_model == "full" and configuration.sharding > 1 and configuration.data_parallel > 1:
        notes.append("Megatron-FSDP wants CUDA_DEVICE_MAX_CONNECTIONS unset")
    if problem.overlap.tensor_parallel and not problem.sequence_parallel and configuration.tensor_parallel > 1:
        notes.append(
            "tensor-parallel collectives were priced as overlapped; --tp-comm-overlap wants --sequence-parallel"
        )
    if problem.overlap.transfers and configuration.groups > 1 and configuration.virtual_stages == 1:
        notes.append(
            "transfers between stages were priced as overlapped; Megatron-LM overlaps them with virtual stages only"
        )
    return notes
