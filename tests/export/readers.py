"""Readers of exported configurations that share nothing with what writes them: from text back to stages."""

import ast
import itertools
import json
import re
from dataclasses import dataclass

from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from tests.export.export_cases import CORE, LAYERS


@dataclass(frozen=True)
class Read:
    """What a configuration says, and what a plan says, in the same words."""

    stages: tuple[tuple[str, ...], ...]
    """Of each stage in order of the micro-batch's way: embedding, layer numbers, head."""
    groups: int
    tensor_parallel: int
    data_parallel: int
    replica_batch: int
    global_batch: int
    sharding: int
    recomputed: frozenset[str]
    """Layer numbers, or `core`."""
    interleaved: bool


def of_plan(problem: ParallelismProblem, plan: ParallelismPlan) -> Read:
    """Read a plan whose cuts are between layers, by the names of its operators."""
    names = [operator.name for operator in problem.operators]
    stages, recomputed = [], set()
    for stage in plan.stages:
        inside = names[slice(*stage.operators)]
        layers = dict.fromkeys(name.split(".")[0].removeprefix("layer") for name in inside)
        stages.append(tuple(layer for layer in layers if layer != "final_norm"))
        recomputed |= {names[index] for first, end in stage.recompute for index in range(first, end)}
    layers_of = {name.split(".")[0].removeprefix("layer") for name in recomputed}
    core = bool(recomputed) and all(name.endswith(CORE) for name in recomputed)
    one = plan.stages[0].layout[0]
    groups = len({stage.devices for stage in plan.stages})
    return Read(
        stages=tuple(stages),
        groups=groups,
        tensor_parallel=one.tensor_parallel,
        data_parallel=one.data_parallel,
        replica_batch=plan.micro_batch_size // one.data_parallel,
        global_batch=plan.micro_batch_size * plan.micro_batches,
        sharding=plan.stages[0].sharding,
        recomputed=frozenset({"core"} if core else layers_of),
        interleaved=groups < len(plan.stages),
    )


def _unrolled(layout: str) -> list[str]:
    return re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), layout).split("|")


def of_megatron(text: str, devices: int) -> Read:
    """Read Megatron-LM's arguments."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    given = {line.split(" ")[0]: (line.split(" ", 1)[1:] or [""])[0] for line in lines}
    assert len(given) == len(lines)
    assert int(given["--num-layers"]) == LAYERS
    groups, tensor = int(given["--pipeline-model-parallel-size"]), int(given["--tensor-model-parallel-size"])
    virtual = int(given.get("--num-virtual-stages-per-pipeline-rank", 1))
    if "--pipeline-model-parallel-layout" in given:
        rows = _unrolled(given["--pipeline-model-parallel-layout"])
    else:
        each = LAYERS // (groups * virtual)
        rows = ["t" * each] * (groups * virtual)
        rows[0] = "E" + rows[0]
        rows[-1] += "L"
    stages: list[tuple[str, ...]] = []
    recomputed: set[str] = set()
    number = 0
    for row in rows:
        stage = []
        for letter in row:
            stage.append({"E": "embedding", "L": "head"}.get(letter, str(number)))
            number += letter == "t"
        stages.append(tuple(stage))
        layers = [layer for layer in stage if layer.isdigit()]
        if given.get("--recompute-granularity") == "full":
            count = int(given["--recompute-num-layers"])
            recomputed |= set(layers[:count] if given["--recompute-method"] == "block" else layers)
            assert given["--recompute-method"] == "block" or count == 1
    if given.get("--recompute-granularity") == "selective":
        assert given["--recompute-modules"] == "core_attn"
        recomputed = {"core"}
    strategy = given.get("--data-parallel-sharding-strategy", "optim")
    sharding = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}[strategy]
    return Read(
        stages=tuple(stages),
        groups=groups,
        tensor_parallel=tensor,
        data_parallel=devices // groups // tensor,
        replica_batch=int(given["--micro-batch-size"]),
        global_batch=int(given["--global-batch-size"]),
        sharding=sharding if "--use-distributed-optimizer" in given else 0,
        recomputed=frozenset(recomputed),
        interleaved=len(rows) > groups,
    )


def of_torchtitan(text: str) -> Read:
    """Read torchtitan's function, without running it: assignments of literals."""
    function = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    values: dict[str, object] = {}
    tokens: dict[str, int] = {}
    checkpoint = ""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            name = node.targets[0].attr
            if name == "activation_checkpoint":
                checkpoint = ast.unparse(node.value)
            elif isinstance(node.value, ast.BinOp):
                assert ast.unparse(node.value.right) == "training.max_context_length"
                tokens[name] = int(ast.literal_eval(node.value.left))
            else:
                values[name] = ast.literal_eval(node.value)
    groups = int(str(values["pipeline_parallel_degree"]))
    everything = [["tok_embeddings", *(f"layers.{number}" for number in range(LAYERS)), "norm", "lm_head"]]
    parts = values.get("module_fqns_per_model_part", everything)
    assert isinstance(parts, list)
    words = {"tok_embeddings": "embedding", "lm_head": "head"}
    stages = tuple(
        tuple(words.get(name, name.removeprefix("layers.")) for name in part if name != "norm") for part in parts
    )
    shard = int(str(values["data_parallel_shard_degree"]))
    replicas = shard * int(str(values["data_parallel_replicate_degree"]))
    batch, total = tokens["num_tokens_per_microbatch_per_dp_rank"], tokens["num_tokens_per_train_step"]
    steps = total // batch // replicas
    assert values["global_batch_size"] == total
    assert values["local_batch_size"] == (batch * steps if groups > 1 else batch)
    assert values.get("num_pp_microbatches") == (steps if groups > 1 else None)
    assert values.get("pipeline_parallel_microbatch_size") == (batch if groups > 1 else None)
    assert checkpoint in ("FullAC.Config()", "None")
    return Read(
        stages=stages,
        groups=groups,
        tensor_parallel=int(str(values["tensor_parallel_degree"])),
        data_parallel=replicas,
        replica_batch=batch,
        global_batch=total,
        sharding=0 if shard == 1 else {"always": 3, "never": 2}[str(values["fsdp_reshard_after_forward"])],
        recomputed=frozenset(map(str, range(LAYERS))) if checkpoint != "None" else frozenset(),
        interleaved=values.get("pipeline_parallel_schedule") == "Interleaved1F1B",
    )


def of_deepspeed(text: str, devices: int) -> Read:
    """Read DeepSpeed's configuration."""
    config = json.loads(text)
    pipe = config["solver_plan"].get("PipelineModule")
    entries = ["embedding", *map(str, range(LAYERS)), "final_norm", "head"]
    if pipe is None:
        tensor = config.get("tensor_parallel", {}).get("autotp_size", 1)
        groups, data, parts = 1, devices // tensor, [0, len(entries)]
        every_layer = config["solver_plan"]["recompute_every_layer"]
    else:
        axes = pipe["topology"]
        groups, data, tensor, parts = axes["pipe"], axes["data"], axes["model"], pipe["parts"]
        every_layer = pipe["activation_checkpoint_interval"] == 1
    batch, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == batch * steps * data
    return Read(
        stages=tuple(
            tuple(entry for entry in entries[first:end] if entry != "final_norm")
            for first, end in itertools.pairwise(parts)
        ),
        groups=groups,
        tensor_parallel=tensor,
        data_parallel=data,
        replica_batch=batch,
        global_batch=config["train_batch_size"],
        sharding=config["zero_optimization"]["stage"],
        recomputed=frozenset(map(str, range(LAYERS))) if every_layer else frozenset(),
        interleaved=False,
    )


def read(to: str, text: str, devices: int = 8) -> Read:
    """Read the configuration of a system for so many ranks."""
    if to == "megatron":
        return of_megatron(text, devices)
    return of_torchtitan(text) if to == "torchtitan" else of_deepspeed(text, devices)
