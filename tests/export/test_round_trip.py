"""What is written says what the plan says: read back by readers of their own."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from solver_plan import export_plan, import_aceso
from solver_plan.export.layers import layer_chain
from solver_plan.parallelism.check import evaluate_checked
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.planner import Planner
from solver_plan.solving import Budget
from tests.export.export_cases import LAYERS, cores, pipeline, small_problem, whole
from tests.export.readers import of_plan, read

ALL = whole(*range(LAYERS))
SYSTEMS = ("megatron", "torchtitan", "deepspeed")
PLANS: dict[str, tuple[ParallelismPlan, tuple[str, ...]]] = {
    "one stage": (pipeline([8], degrees=[(2, 4)]), SYSTEMS),
    "equal stages": (pipeline([2, 2, 2, 2]), SYSTEMS),
    "uneven stages": (pipeline([1, 3, 3, 1]), SYSTEMS),
    "embedding and head alone": (pipeline([0, 4, 4, 0]), SYSTEMS),
    "tensor parallel": (pipeline([3, 5], degrees=[(4, 1)]), SYSTEMS),
    "every layer": (pipeline([3, 5], degrees=[(2, 2)], recomputed=ALL), SYSTEMS),
    "first layers": (pipeline([3, 5], degrees=[(2, 2)], recomputed=whole(0, 1, 3, 4)), ("megatron",)),
    "more than some stages have": (pipeline([1, 3, 3, 1], recomputed=whole(0, 1, 2, 4, 5, 7)), ("megatron",)),
    "core": (pipeline([4, 4], degrees=[(2, 2)], recomputed=cores(small_problem())), ("megatron",)),
    "virtual": (pipeline([2, 2, 2, 2], degrees=[(1, 4)], virtual=2), ("megatron", "torchtitan")),
    "virtual, recomputed": (
        pipeline([2, 2, 2, 2], degrees=[(1, 4)], virtual=2, recomputed=ALL),
        ("megatron", "torchtitan"),
    ),
    "ZeRO 1": (pipeline([4, 4], degrees=[(1, 4)], sharding=[1]), ("megatron", "deepspeed")),
    "ZeRO 2": (pipeline([8], degrees=[(1, 8)], micro_batch=8, sharding=[2]), SYSTEMS),
    "ZeRO 3": (pipeline([8], degrees=[(1, 8)], micro_batch=8, sharding=[3]), SYSTEMS),
    "ZeRO 3 in a pipeline": (pipeline([5, 3], degrees=[(1, 4)], sharding=[3]), ("torchtitan",)),
}


@pytest.mark.parametrize(("name", "to"), [(name, to) for name, (_, systems) in PLANS.items() for to in systems])
def test_a_plan_that_can_be_told_comes_back(name: str, to: str) -> None:
    problem, plan = small_problem(), PLANS[name][0]
    export = export_plan(problem, plan, to)
    assert export.losses == ()
    assert read(to, export.text) == of_plan(problem, plan)
    assert export.exported_ms == export.plan_ms == evaluate_checked(problem, plan).iteration_ms
    assert isinstance(export.exported, ParallelismPlan)
    assert of_plan(problem, export.exported) == of_plan(problem, plan)


@pytest.mark.parametrize("to", SYSTEMS)
def test_the_uniform_grid_loses_nothing(to: str) -> None:
    problem = small_problem()
    if to == "torchtitan":  # it has no ZeRO 1
        problem = replace(problem, space=replace(problem.space, sharding=(0, 2, 3)))
    plan = Planner(problem, Budget(time_limit_s=5, deterministic=True)).run("grid").plan
    export = export_plan(problem, plan, to)
    assert read(to, export.text) == of_plan(problem, plan)


def test_layers_of_a_measured_database(data: Path) -> None:
    folder = data / "aceso" / "miniset"
    source = next(path.parent for path in sorted(folder.rglob("gpt_1_3B_mbs1_tp1_algo0.csv")))
    problem = import_aceso(
        source, model="gpt", size="1_3B", nodes=1, devices_per_node=4, memory_mb=12000, global_batch=512
    )
    chain = layer_chain(problem)
    assert len(chain.layers) == 24
    assert chain.equal
    assert (chain.front, chain.operators - chain.tail) == (1, 2)
    assert len(chain.core_attention) == 4 * 24
    plan = Planner(problem, Budget(time_limit_s=5, deterministic=True)).run("grid").plan
    text = export_plan(problem, plan, "megatron").text
    assert "--num-layers 24\n" in text
    assert f"--pipeline-model-parallel-size {len(plan.stages)}\n" in text


def test_options_that_follow_from_the_problem() -> None:
    plan = pipeline([3, 5], degrees=[(2, 2)], sharding=[1])
    text = export_plan(small_problem(), plan, "megatron").text
    assert "--sequence-parallel" not in text
    assert "--untie-embeddings-and-output-weights\n" in text
    assert "--overlap-grad-reduce\n--overlap-param-gather\n" in text
    text = export_plan(small_problem(sequence_parallel=True, tied=True), plan, "megatron").text
    assert "--sequence-parallel\n" in text
    assert "untie" not in text
    titan = export_plan(small_problem(sequence_parallel=True), pipeline([8], degrees=[(2, 4)]), "torchtitan").text
    assert "parallelism.enable_sequence_parallel = True\n" in titan
    assert '"overlap_comm": true' in export_plan(small_problem(), plan, "deepspeed").text


def test_a_file_of_arguments_survives_the_shell() -> None:
    text = export_plan(small_problem(), pipeline([1, 3, 3, 1]), "megatron").text
    assert "--pipeline-model-parallel-layout Et|t*3|t*3|tL\n" in text
    for line in text.splitlines():
        assert line.startswith("# ") or re.fullmatch(r"--[a-z0-9-]+( [\w.|*]+)?", line), line


@pytest.mark.parametrize("released", [True, False])
def test_what_torchtitan_is_given_is_python(released: bool) -> None:
    parallelism = SimpleNamespace() if released else SimpleNamespace(num_pp_microbatches=1)
    config = SimpleNamespace(parallelism=parallelism, training=SimpleNamespace(max_context_length=32))
    namespace: dict[str, object] = {}
    exec(export_plan(small_problem(), pipeline([3, 5], degrees=[(2, 2)]), "torchtitan").text, namespace)
    function = namespace["as_planned"]
    assert callable(function)
    assert function(config) is config
    assert parallelism.pipeline_parallel_degree == 2
    batch = {"num_pp_microbatches": 4} if not released else {"pipeline_parallel_microbatch_size": 2}
    assert {name: value for name, value in vars(parallelism).items() if "batch" in name} == batch
    batches = {"local_batch_size": 8, "global_batch_size": 16}
    tokens = {"num_tokens_per_microbatch_per_dp_rank": 2 * 32, "num_tokens_per_train_step": 16 * 32}
    assert vars(config.training) == {"max_context_length": 32, **(batches if released else tokens)}


def test_names_of_operators_do_not_leave_their_comment() -> None:
    problem = small_problem()
    operators = list(problem.operators)
    cut = 1 + 13 * 3 + 2
    operators[cut] = replace(operators[cut], name="x\n--load /etc")
    odd = replace(problem, operators=tuple(operators))
    text = export_plan(odd, pipeline([3, 5], degrees=[(2, 2)], shift=2), "megatron", allow_losses=True).text
    assert "\n--load" not in text
    assert "x\\n--load" in text
