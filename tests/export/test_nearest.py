"""On a small problem the nearest configuration is the best of all, counted one by one."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from solver_plan import export_plan
from solver_plan.export.configuration import Configuration, plan_of
from solver_plan.export.layers import LayerChain, layer_chain
from solver_plan.export.losses import recomputations
from solver_plan.export.target import MEGATRON
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from tests.export.export_cases import pipeline, small_problem


def every_configuration(problem: ParallelismProblem, plan: ParallelismPlan, chain: LayerChain) -> Iterator[float]:
    """Yield the iteration of all that fits with the tensor parallel degrees of the plan's stages."""
    limit = problem.cluster.usable_bytes_per_device
    degrees = {one.tensor_parallel for stage in plan.stages for one in stage.layout}
    for groups, degree in itertools.product((1, 2, 4, 8), degrees):
        replicas = 8 // groups // degree
        if not replicas or plan.micro_batch_size % replicas:
            continue
        for inner in itertools.combinations(chain.cuts, groups - 1):
            cuts = (0, *inner, chain.operators)
            for way in recomputations(chain, MEGATRON, cuts):
                configuration = Configuration(
                    groups=groups,
                    tensor_parallel=degree,
                    data_parallel=replicas,
                    partition=0,
                    sharding=0,
                    micro_batch_size=plan.micro_batch_size,
                    micro_batches=plan.micro_batches,
                    cuts=cuts,
                    recomputation=way,
                )
                priced = evaluate(problem, plan_of(problem, chain, configuration))
                if all(stage.memory_bytes <= limit for stage in priced.stages):
                    yield priced.iteration_ms
                    if way.rule == "nothing":
                        break  # whatever is recomputed takes longer


@pytest.mark.parametrize("share", [1.0, 0.05])
@pytest.mark.parametrize(
    "plan",
    [
        pipeline([4, 4], degrees=[(2, 2), (1, 4)]),
        pipeline([2, 5, 1], degrees=[(2, 2), (2, 1)]),
        pipeline([2, 4, 2], degrees=[(1, 4), (1, 2)]),
    ],
)
def test_with_another_layout_it_is_the_best_of_all(plan: ParallelismPlan, share: float) -> None:
    problem = small_problem()
    peak = max(stage.memory_bytes for stage in evaluate(problem, plan).stages)
    cluster = replace(problem.cluster, memory_bytes_per_device=int(peak * (1 + share)) + 1, memory_margin=0.0)
    tight = replace(problem, cluster=cluster)
    export = export_plan(tight, plan, "megatron", allow_losses=True)
    assert export.fits
    assert export.exported_ms == min(every_configuration(tight, plan, layer_chain(tight)))
