"""What cannot be told is named, refused by default, and priced where it is allowed."""

import csv
import io
from dataclasses import replace

import pytest

from solver_plan import export_plan
from solver_plan.errors import InputError, InvalidPlanError, NotExportableError, PlanMismatchError
from solver_plan.export.configuration import Configuration, Recomputation, plan_of
from solver_plan.export.layers import layer_chain
from solver_plan.export.losses import losses_of, recomputations
from solver_plan.export.target import MEGATRON, TARGETS
from solver_plan.parallelism.check import check, evaluate_checked
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from tests.export.export_cases import EACH, LAYERS, OPERATORS, cores, pipeline, small_problem, start_of, whole
from tests.export.readers import of_plan, read
from tests.wavefront.wavefront_problems import component, piece
from tests.wavefront.wavefront_problems import plan as wavefront_plan
from tests.wavefront.wavefront_problems import problem as wavefront_problem

ALL_FIRST = [["0F0", "0F1", "0F2", "0F3", "0B0", "0B1", "0B2", "0B3"], ["1F0", "1F1", "1F2", "1F3"]]
ALL_FIRST[1] += ["1B3", "1B2", "1B1", "1B0"]
ALL_FIRST[0][4:] = ["0B3", "0B2", "0B1", "0B0"]
"""GPipe, backwards in reverse: neither 1F1B nor interleaved."""
HALVES = {"degrees": [(2, 2)]}

# (system, what is lost, a plan that loses it, one like it that loses nothing)
CASES: list[tuple[str, str, ParallelismPlan, ParallelismPlan]] = [
    *(
        (to, "layout", pipeline([4, 4], degrees=[(2, 2), (1, 4)]), pipeline([4, 4], degrees=[(1, 4), (1, 4)]))
        for to in TARGETS
    ),
    *((to, "layout", pipeline([2, 5, 1], degrees=[(2, 2), (2, 1)]), pipeline([2, 5, 1, 0])) for to in TARGETS),
    *((to, "cuts", pipeline([3, 5], degrees=[(2, 2)], shift=4), pipeline([3, 5], degrees=[(2, 2)])) for to in TARGETS),
    *(
        (
            to,
            "recomputation",
            pipeline([3, 5], degrees=[(2, 2)], recomputed=[(start_of(0) + 2, start_of(0) + 6)]),
            pipeline([3, 5], degrees=[(2, 2)], recomputed=whole(*range(LAYERS))),
        )
        for to in TARGETS
    ),
    (
        "megatron",
        "recomputation",
        pipeline([3, 5], degrees=[(2, 2)], recomputed=whole(0, 1, 3)),
        pipeline([3, 5], degrees=[(2, 2)], recomputed=whole(0, 1, 3, 4)),
    ),
    (
        "megatron",
        "recomputation",
        pipeline([3, 5], degrees=[(2, 2)], recomputed=[(OPERATORS - 1, OPERATORS)]),
        pipeline([3, 5], degrees=[(2, 2)]),
    ),
    (
        "deepspeed",
        "recomputation",
        pipeline([3, 5], degrees=[(2, 2)], recomputed=cores(small_problem())),
        pipeline([3, 5], degrees=[(2, 2)]),
    ),
    ("deepspeed", "order", pipeline([2, 2, 2, 2], degrees=[(1, 4)], virtual=2), pipeline([2, 2, 2, 2])),
    *(
        (
            to,
            "sharding",
            pipeline([4, 4], degrees=[(1, 4)], sharding=[0, 3]),
            pipeline([4, 4], degrees=[(1, 4)], sharding=[0]),
        )
        for to in TARGETS
    ),
    *(
        (
            to,
            "sharding",
            pipeline([4, 4], degrees=[(1, 4)], sharding=[3]),
            pipeline([8], degrees=[(1, 8)], micro_batch=8, sharding=[3]),
        )
        for to in ("megatron", "deepspeed")
    ),
    (
        "torchtitan",
        "sharding",
        pipeline([4, 4], degrees=[(1, 4)], sharding=[1]),
        pipeline([4, 4], degrees=[(4, 1)], sharding=[1]),
    ),
]


@pytest.mark.parametrize(
    ("to", "about", "plan", "like"), CASES, ids=[f"{number}-{case[0]}-{case[1]}" for number, case in enumerate(CASES)]
)
def test_a_loss_is_refused_then_priced(to: str, about: str, plan: ParallelismPlan, like: ParallelismPlan) -> None:
    problem = small_problem()
    alike = export_plan(problem, like, to)
    assert (alike.losses, alike.exported_ms) == ((), alike.plan_ms)
    with pytest.raises(NotExportableError, match=rf"\(1\) .*{about}: .*--allow-losses"):
        export_plan(problem, plan, to)
    export = export_plan(problem, plan, to, allow_losses=True)
    assert about in {loss.about for loss in export.losses}
    assert isinstance(export.exported, ParallelismPlan)
    # what is written is what is priced, and a valid plan where nothing is said to be broken
    assert read(to, export.text) == of_plan(problem, export.exported)
    assert check(problem, export.exported) == export.violations == ()
    assert export.exported_ms == evaluate_checked(problem, export.exported).iteration_ms
    assert export.plan_ms == evaluate_checked(problem, plan).iteration_ms
    chain = layer_chain(problem)
    assert losses_of(problem, export.exported, chain, TARGETS[to])[0] == []
    for loss in export.losses:
        assert f"lost: {loss}" in export.text.replace('\\"', '"')
    assert f"{export.exported_ms:.3f} ms" in export.text
    assert f"{export.plan_ms:.3f} ms" in export.text


def test_what_can_be_told_is_kept() -> None:
    problem = small_problem()
    plan = pipeline([3, 5], degrees=[(2, 2)], sharding=[1], recomputed=[(5, 9), (60, 64)])
    export = export_plan(problem, plan, "megatron", allow_losses=True)
    assert [loss.about for loss in export.losses] == ["recomputation"]
    kept = of_plan(problem, export.exported)
    assert replace(kept, recomputed=frozenset()) == replace(of_plan(problem, plan), recomputed=frozenset())


def test_cuts_move_to_the_nearest_layers_or_better() -> None:
    problem = small_problem()
    plan = pipeline([3, 5], degrees=[(2, 2)], shift=EACH - 1)
    export = export_plan(problem, plan, "megatron", allow_losses=True)
    chain = layer_chain(problem)
    times = {}
    for cut in chain.cuts:
        cuts = (0, cut, OPERATORS)
        times[cut] = evaluate(problem, plan_of(problem, chain, _halves(cuts, Recomputation("nothing")))).iteration_ms
    assert export.exported_ms == min(times.values())


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_the_recomputation_is_the_best_that_fits(share: float) -> None:
    problem = small_problem()
    plan = pipeline([3, 5], degrees=[(2, 2)], recomputed=[(start_of(0), start_of(3) - 1), *whole(3, 4, 5, 6, 7)])
    chain = layer_chain(problem)
    cuts = (0, start_of(3), OPERATORS)
    ways = recomputations(chain, MEGATRON, cuts)
    assert len(ways) == 3 + 4
    prices = [evaluate(problem, plan_of(problem, chain, _halves(cuts, way))) for way in ways]
    peaks = [max(stage.memory_bytes for stage in price.stages) for price in prices]
    limit = int(max(min(peaks), *(stage.memory_bytes for stage in evaluate(problem, plan).stages)))
    limit += int(share * (max(peaks) - limit)) + 1
    tight = _with_memory(problem, limit)
    export = export_plan(tight, plan, "megatron", allow_losses=True)
    best = min(price.iteration_ms for price, peak in zip(prices, peaks, strict=True) if peak <= tight_limit(tight))
    assert export.exported_ms == best
    assert (export.fits, export.violations) == (True, ())


def tight_limit(problem: ParallelismProblem) -> int:
    return problem.cluster.usable_bytes_per_device


def _with_memory(problem: ParallelismProblem, usable_bytes: int) -> ParallelismProblem:
    cluster = replace(problem.cluster, memory_bytes_per_device=usable_bytes, memory_margin=0.0)
    return replace(problem, cluster=cluster)


def _halves(cuts: tuple[int, ...], way: Recomputation) -> Configuration:
    return Configuration(
        groups=2,
        tensor_parallel=2,
        data_parallel=2,
        partition=0,
        sharding=0,
        micro_batch_size=4,
        micro_batches=4,
        cuts=cuts,
        recomputation=way,
    )


def test_what_breaks_the_memory_is_said() -> None:
    plan = pipeline([4, 4], degrees=[(1, 4)], sharding=[3], recomputed=whole(*range(LAYERS)))
    peak = max(stage.memory_bytes for stage in evaluate(small_problem(), plan).stages)
    tight = _with_memory(small_problem(), int(peak) + 1)
    export = export_plan(tight, plan, "deepspeed", allow_losses=True)
    assert any("too many" in line for line in export.violations)
    assert not export.fits
    assert "does NOT fit" in export.text
    assert export.violations == check(tight, export.exported)  # type: ignore[arg-type]


def test_what_the_space_leaves_out_comes_last() -> None:
    problem = small_problem()
    plan = pipeline([4, 4], degrees=[(1, 4)], sharding=[1])
    for allowed, chosen in (((1, 0), 0), ((1, 2), 2), ((1, 3), 3)):
        inside = replace(problem, space=replace(problem.space, sharding=allowed))
        export = export_plan(inside, plan, "torchtitan", allow_losses=True)
        assert of_plan(inside, export.exported).sharding == chosen  # type: ignore[arg-type]
        assert export.violations == ()
    outside = replace(problem, space=replace(problem.space, sharding=(1,)))
    export = export_plan(outside, plan, "torchtitan", allow_losses=True)
    assert export.fits
    assert any("sharding" in line for line in export.violations)


def test_a_baseline_that_is_faster_is_named() -> None:
    plan = pipeline([1, 7], degrees=[(2, 2)], recomputed=[(5, 9)])
    export = export_plan(small_problem(), plan, "megatron", allow_losses=True)
    assert any(remark.startswith("better: the uniform grid") for remark in export.remarks)


def test_other_ranks_than_those_of_the_stages() -> None:
    problem = small_problem(nodes=2)
    seats = [(0, 1), (4, 5), (2, 3), (6, 7)]
    plan = pipeline([2, 2, 2, 2], devices=seats)
    with pytest.raises(NotExportableError, match=r"placement: rank 2 would be device 4, on node 1"):
        export_plan(problem, plan, "megatron")
    export = export_plan(problem, plan, "megatron", allow_losses=True)
    assert export.exported_ms != export.plan_ms
    swapped = pipeline([2, 2, 2, 2], devices=[(6, 7), (4, 5), (2, 3), (1, 0)])
    other = export_plan(problem, swapped, "megatron")
    assert (other.losses, other.exported_ms) == ((), other.plan_ms)


def test_a_custom_order_goes_to_torchtitan_as_a_second_file() -> None:
    problem = small_problem(cost_model="aceso")
    plan = pipeline([3, 5], degrees=[(2, 2)], orders=ALL_FIRST)
    with pytest.raises(NotExportableError, match="order: actions run in an order of their own; megatron runs 1F1B"):
        export_plan(problem, plan, "megatron")
    assert read("megatron", export_plan(problem, plan, "megatron", allow_losses=True).text).groups == 2
    with pytest.raises(InputError, match="name a file, not -"):
        export_plan(problem, plan, "torchtitan")
    export = export_plan(problem, plan, "torchtitan", schedule_file="there.csv")
    assert export.losses == ()
    assert "pipeline_parallel_schedule_csv = 'there.csv'" in export.text
    assert export.schedule is not None
    assert list(csv.reader(io.StringIO(export.schedule))) == ALL_FIRST
    usual = export_plan(problem, pipeline([3, 5], degrees=[(2, 2)]), "torchtitan", schedule_file="there.csv")
    assert (usual.schedule, "there.csv" in usual.text) == (None, False)


def test_pytorch_reads_the_order() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    plan = pipeline([3, 5], degrees=[(2, 2)], orders=ALL_FIRST)
    export = export_plan(small_problem(cost_model="aceso"), plan, "torchtitan", schedule_file="there.csv")
    for row, order in zip(csv.reader(io.StringIO(export.schedule or "")), ALL_FIRST, strict=True):
        assert [repr(schedules._Action.from_str(cell)) for cell in row] == order


def test_sequence_parallelism_that_deepspeed_lacks() -> None:
    problem = small_problem(sequence_parallel=True)
    with pytest.raises(NotExportableError, match="sequence: priced with sequence parallelism"):
        export_plan(problem, pipeline([8], degrees=[(2, 4)]), "deepspeed")
    assert export_plan(problem, pipeline([8], degrees=[(1, 8)], micro_batch=8), "deepspeed").losses == ()
    assert export_plan(problem, pipeline([3, 5], degrees=[(2, 2)]), "deepspeed").losses == ()


def test_layers_that_are_not_alike() -> None:
    problem = small_problem()
    operators = list(problem.operators)
    operators[start_of(2) + 1] = replace(operators[start_of(2) + 1], profile="mlp_out")
    odd = replace(problem, operators=tuple(operators))
    with pytest.raises(NotExportableError, match="layers are not all alike"):
        export_plan(odd, pipeline([3, 5], degrees=[(2, 2)]), "torchtitan")
    assert export_plan(odd, pipeline([3, 5], degrees=[(2, 2)]), "deepspeed").losses == ()
    bare = replace(problem, operators=tuple(replace(one, block_start=False) for one in problem.operators))
    with pytest.raises(NotExportableError, match="found no block_start"):
        export_plan(bare, pipeline([3, 5], degrees=[(2, 2)]), "deepspeed")


def test_no_configuration_at_all() -> None:
    plan = pipeline([3, 5], degrees=[(2, 1), (1, 1)], micro_batch=1)
    problem = replace(small_problem(), space=replace(small_problem().space, use_all_devices=False))
    with pytest.raises(NotExportableError, match="no configuration with one layout for all stages on 3 devices"):
        export_plan(_without_single(problem), plan, "megatron", allow_losses=True)


def _without_single(problem: ParallelismProblem) -> ParallelismProblem:
    """Return the problem whose first operator was not profiled on one device."""
    entries = tuple(entry for entry in problem.profiles["embedding"] if entry.tensor_parallel > 1)
    return replace(problem, profiles={**problem.profiles, "embedding": entries})


def test_wrong_words_and_plans() -> None:
    problem, plan = small_problem(), pipeline([8], degrees=[(1, 4)])
    with pytest.raises(InputError, match="to: found 'alpa'; one of megatron, torchtitan, deepspeed"):
        export_plan(problem, plan, "alpa")
    with pytest.raises(InvalidPlanError):
        export_plan(problem, replace(plan, micro_batches=99), "megatron")
    with pytest.raises(PlanMismatchError):
        export_plan(problem, replace(plan, problem_digest="sha256:" + "0" * 64), "megatron")
    waves = wavefront_problem([component("a")])
    with pytest.raises(NotExportableError, match="kind wavefront; megatron trains one task on a fixed mesh"):
        export_plan(waves, wavefront_plan(piece("a", (0, 2), [0], 0, 8)), "megatron")
    with pytest.raises(InputError, match="give two that match"):
        export_plan(waves, plan, "megatron")
