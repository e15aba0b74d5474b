"""A Python function that sets a torchtitan configuration: its configurations are functions, not files.

Names as in torchtitan 0.3.0 (2026-09-03): `torchtitan/config/configs.py` (`ParallelismConfig`, `TrainingConfig`),
`distributed/activation_checkpoint.py` (`FullAC`), `distributed/pipeline_parallel.py` (module names). Its main branch
(b5bcd76c, 2026-08-21, and after) counts batches in tokens and has `num_pp_microbatches`: the function sees which it is
given. The schedule file is what `torch.distributed.pipelining` reads as ``compute_only``: a line for each rank of the
pipeline, actions by commas.
"""

from solver_plan.export.configuration import Configuration, layers_of_stages
from solver_plan.export.layers import LayerChain
from solver_plan.parallelism.problem import ParallelismProblem

LEFT_OUT = "the model, sequence length, precision, optimizer, data: set them in the configuration that is passed in"


def torchtitan_function(
    problem: ParallelismProblem,
    chain: LayerChain,
    configuration: Configuration,
    remarks: list[str],
    schedule_file: str | None,
) -> str:
    """Return the text of a Python module with the function `as_planned`.

    Parameters
    ----------
    problem, chain, configuration
        What is exported.
    remarks
        Lines for its head.
    schedule_file
        Where torchtitan finds the order of actions, if that is a custom one.
    """
    full = configuration.recomputation.rule == "every_layer"
    lines = [*(f"# {remark}" for remark in remarks), ""]
    if full:
        lines += ["from torchtitan.distributed.activation_checkpoint import FullAC", "", ""]
    lines += [
        "def as_planned(config):",
        '    """Set what the plan says in a torchtitan Trainer.Config and return it."""',
        "    parallelism, training = config.parallelism, config.training",
    ]
    for name, value in _parallelism(problem, chain, configuration, schedule_file):
        lines += _assignment(f"    parallelism.{name} = ", value)
    lines += _batches(configuration)
    lines += [f"    config.activation_checkpoint = {'FullAC.Config()' if full else 'None'}", "    return config"]
    return "\n".join(lines) + "\n"


def module_names(chain: LayerChain, configuration: Configuration) -> list[list[str]]:
    """Return the names of the modules of each stage, as torchtitan's decoders have them."""
    names: list[list[str]] = []
    first = 0
    for count in layers_of_stages(configuration, chain):
        names.append([f"layers.{number}" for number in range(first, first + count)])
        first += count
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "lm_head"]
    return names


def schedule_rows(configuration: Configuration) -> str:
    """Return the order of actions of each rank of the pipeline as CSV. Only for custom orders."""
    assert configuration.orders is not None
    return "".join(",".join(order) + "\n" for order in configuration.orders)


def _parallelism(
    problem: ParallelismProblem, chain: LayerChain, configuration: Configuration, schedule_file: str | None
) -> list[tuple[str, object]]:
    sharded = configuration.sharding > 0 and configuration.data_parallel > 1
    values: list[tuple[str, object]] = [
        ("data_parallel_replicate_degree", 1 if sharded else configuration.data_parallel),
        ("data_parallel_shard_degree", configuration.data_parallel if sharded else 1),
    ]
    if sharded:
        values.append(("fsdp_reshard_after_forward", "always" if configuration.sharding == 3 else "never"))
    values += [
        ("tensor_parallel_degree", configuration.tensor_parallel),
        ("enable_sequence_parallel", problem.sequence_parallel and configuration.tensor_parallel > 1),
        ("pipeline_parallel_degree", configuration.groups),
    ]
    if configuration.groups > 1:
        values.append(("module_fqns_per_model_part", module_names(chain, configuration)))
        if schedule_file is None:
            name = "1F1B" if configuration.virtual_stages == 1 else "Interleaved1F1B"
            values.append(("pipeline_parallel_schedule", name))
        else:
            values += [
                ("pipeline_parallel_schedule", "PipelineScheduleMulti"),
                ("pipeline_parallel_schedule_csv", schedule_file),
            ]
    return values


def _batches(configuration: Configuration) -> list[str]:
    """Return the lines that set batch sizes; without a pipeline micro-batches are steps of gradient accumulation."""
    batch, number = configuration.replica_batch, configuration.micro_batches
    total = configuration.micro_batch_size * number
    tokens = [
        f"training.num_tokens_per_microbatch_per_dp_rank = {batch} * training.max_context_length",
        f"training.num_tokens_per_train_step = {total} * training.max_context_length",
    ]
    samples = [
        f"training.local_batch_size = {batch * number if configuration.groups > 1 else batch}",
        f"training.global_batch_size = {total}",
    ]
    if configuration.groups > 1:
        tokens.append(f"parallelism.num_pp_microbatches = {number}")
        samples.append(f"parallelism.pipeline_parallel_microbatch_size = {batch}")
    return [
        '    if hasattr(parallelism, "num_pp_microbatches"):  # after 0.3.0',
        *(f"        {line}" for line in tokens),
        "    else:",
        *(f"        {line}" for line in samples),
    ]


def _assignment(left: str, value: object) -> list[str]:
    if not isinstance(value, list):
        return [f"{left}{value!r}"]
    return [f"{left}[", *(f"        {item!r}," for item in value), "    ]"]


def torchtitan_notes(problem: ParallelismProblem, chain: LayerChain, configuration: Configuration) -> list[str]:
    """Return what a reader of the function must know beside it."""
    notes = [f"left to you: {LEFT_OUT}"]
    if any(operator.shares_weights_with for operator in problem.operators) and configuration.groups > 1:
        notes.append(
            "the head shares its weights with the embedding: torchtitan does not split such models into stages"
        )
    if configuration.virtual_stages > 1 or configuration.orders is not None:
        notes.append("versions after 0.3.0 want training.disable_cuda_graphs = True for this schedule")
    if configuration.sharding == 2 and configuration.data_parallel > 1:
        notes.append(
            "FSDP gathers the weights for every step of gradient accumulation; they were priced as gathered once"
        )
    return notes
