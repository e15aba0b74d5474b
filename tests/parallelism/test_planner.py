"""The planner against exhaustive search, a second formulation, its own bounds, limits and repetition."""

import logging
from dataclasses import dataclass, replace

import numpy as np
import pytest

from solver_plan.documents import certify, document_text
from solver_plan.errors import InfeasibleProblemError, InputError, NoPlanFoundError
from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.bounds import no_pipeline_below, work_bound_ms
from solver_plan.parallelism.check import check
from solver_plan.parallelism.choices import micro_batch, micro_batch_sizes
from solver_plan.parallelism.flat_model import flat_optimum
from solver_plan.parallelism.model import SizedArcs, build, hint_of
from solver_plan.parallelism.paths import best_path
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.planner import Planner
from solver_plan.parallelism.problem import LatencyLink, Overlap, ParallelismProblem, Space
from solver_plan.parallelism.recomputation.shape import chain_shape
from solver_plan.parallelism.sources import stage_source
from solver_plan.parallelism.stage_graph import StageGraph
from solver_plan.solving import Budget, Clock, solve_cp_sat
from tests.parallelism.exhaustive import best_plan
from tests.parallelism.problems import ANY_SPACE, chain_of, profile, random_problem


def _plan(problem: ParallelismProblem, **budget: float | bool) -> ParallelismPlan:
    return Planner(problem, Budget(**{"deterministic": True, **budget})).run(None).plan  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    space: Space
    seeds: range
    nodes: int = 1


CASES = {
    "any": Case(ANY_SPACE, range(12)),
    # blocks that interact, shared buffers at the end of stages, problems that are infeasible by a hair
    "found by search": Case(ANY_SPACE, range(114, 119)),
    "more found by search": Case(ANY_SPACE, range(158, 162)),
    "idle devices": Case(replace(ANY_SPACE, use_all_devices=False), range(20, 28)),
    "two stages at most": Case(replace(ANY_SPACE, max_stages=2), range(30, 36)),
    "whole blocks": Case(replace(ANY_SPACE, recompute="block"), range(40, 48)),
    "no recomputation": Case(replace(ANY_SPACE, recompute="none"), range(50, 55)),
    "counts of devices": Case(replace(ANY_SPACE, device_counts=(1, 2)), range(60, 66)),
    "one micro-batch size": Case(replace(ANY_SPACE, micro_batch_sizes=(2,)), range(70, 75)),
    "one partition": Case(replace(ANY_SPACE, partitions=(0,)), range(80, 84)),
    "two nodes": Case(replace(ANY_SPACE, device_counts=(1, 2), device_order="rank"), range(0, 6), nodes=2),
    "three nodes": Case(replace(ANY_SPACE, device_counts=(1, 2), device_order="rank"), range(10, 13), nodes=3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_optimum_is_that_of_exhaustive_search(case: Case) -> None:
    """Equal and proven; on several nodes among the plans whose devices are in rank order."""
    planned = 0
    for seed in case.seeds:
        problem = random_problem(seed, space=case.space, nodes=case.nodes)
        best = best_plan(problem, rank_order=case.nodes > 1)
        if best is None:
            with pytest.raises((InfeasibleProblemError, InputError)):
                _plan(problem)
            continue
        plan = _plan(problem)
        certificate = plan.certificate
        assert certificate is not None
        assert check(problem, plan) == ()
        assert certificate.objective == pytest.approx(best.iteration_ms, rel=1e-6), seed
        assert certificate.bound is not None
        assert certificate.bound <= best.iteration_ms * (1 + 1e-9), seed
        assert (certificate.status, certificate.stopped_by) == ("optimal", "proof"), seed
        planned += 1
    assert planned >= len(case.seeds) / 4


WIDER = {
    "idle devices": replace(ANY_SPACE, use_all_devices=False),
    "stages across nodes": replace(ANY_SPACE, cross_node_stages=True),
    "both": replace(ANY_SPACE, cross_node_stages=True, use_all_devices=False),
}


@pytest.mark.parametrize("space", WIDER.values(), ids=WIDER)
def test_wider_spaces_on_two_nodes_have_valid_plans_and_bounds(space: Space) -> None:
    """The links of devices in any order, or of stages that cross nodes, are bounded, not exact."""
    for seed in (1, 3, 5, 14, 19, 26):
        problem = random_problem(seed, space=space, nodes=2)
        best = best_plan(problem)
        if best is None:
            continue
        plan = _plan(problem)
        certificate = plan.certificate
        assert certificate is not None
        assert check(problem, plan) == ()
        assert certificate.bound is not None
        assert certificate.bound <= best.iteration_ms * (1 + 1e-9) <= certificate.objective * (1 + 2e-9), seed


def test_the_bound_holds_for_stages_out_of_rank_order() -> None:
    problem = random_problem(1, space=replace(ANY_SPACE, device_counts=(1, 2)), nodes=2)
    best = best_plan(problem)
    assert best is not None
    certificate = _plan(problem).certificate
    assert certificate is not None
    assert certificate.bound is not None
    assert certificate.bound <= best.iteration_ms * (1 + 1e-9)


@pytest.mark.parametrize("space", [ANY_SPACE, replace(ANY_SPACE, use_all_devices=False)], ids=["all devices", "idle"])
def test_a_second_formulation_agrees(space: Space) -> None:
    for seed in (1, 3, 4, 7):
        problem = random_problem(seed, most_operators=5, space=space)
        flat = flat_optimum(problem, Clock(Budget(time_limit_s=300, workers=1)))
        if flat is None:
            with pytest.raises(InfeasibleProblemError):
                _plan(problem)
            continue
        plan = _plan(problem)
        assert plan.certificate is not None
        assert plan.certificate.objective == pytest.approx(flat.objective_ms, rel=1e-5)
        assert plan.certificate.bound is not None
        assert plan.certificate.bound <= flat.objective_ms * (1 + 1e-5)


# -- bounds that are computed again -----------------------------------------------------------------------------


def _with_bound(plan: ParallelismPlan, bound: float, source: str) -> ParallelismPlan:
    assert plan.certificate is not None
    certificate = certify(
        objective=plan.certificate.objective,
        bound=bound,
        bound_from=source,
        stopped_by="time",
        seconds=0.0,
        incumbent="heuristic:grid",
        solver="none",
    )
    return replace(plan, certificate=certificate)


def test_the_work_bound_is_one_and_counted_by_hand() -> None:
    space = replace(ANY_SPACE, micro_batch_sizes=(1,))
    problem = chain_of([[profile()]] * 4, devices=2, global_batch=4, space=space)
    assert work_bound_ms(problem) == pytest.approx(3 * 4 * 3 / 2 + 4 * 3)
    for seed in range(30):
        problem = random_problem(seed)
        best, bound = best_plan(problem), work_bound_ms(problem)
        assert best is None or (bound is not None and bound <= best.iteration_ms * (1 + 1e-9))
        assert bound is None or no_pipeline_below(problem, bound)


def test_bounds_are_confirmed_up_to_the_optimum_and_not_above() -> None:
    confirmed = 0
    for seed in (*range(12), 115, 159):
        problem = random_problem(seed)
        best = best_plan(problem)
        if best is None:
            continue
        # maximum and sum are bounded separately: what is below the optimum may, what is above must not be confirmed
        assert not no_pipeline_below(problem, best.iteration_ms * (1 + 1e-6))
        confirmed += no_pipeline_below(problem, best.iteration_ms * 0.99)
    assert confirmed >= 8


def test_check_computes_a_closed_form_again() -> None:
    for seed in range(20):
        problem = random_problem(seed)
        try:
            plan, slower = _plan(problem), Planner(problem, Budget()).run("grid").plan
        except (InfeasibleProblemError, NoPlanFoundError):
            continue
        assert plan.certificate is not None
        assert slower.certificate is not None
        optimum = plan.certificate.objective
        if slower.certificate.objective > 1.01 * optimum:
            break
    work = work_bound_ms(problem)
    assert work is not None
    assert check(problem, _with_bound(plan, work, "closed-form:work")) == ()
    too_high = _with_bound(slower, optimum * 1.005, "closed-form:stage-graph")
    (violation,) = check(problem, too_high)
    assert violation.startswith("certificate.bound: ")
    assert violation.endswith("by closed-form:stage-graph is not confirmed")


# -- stage graph and constraint program -------------------------------------------------------------------------


def _sized(problem: ParallelismProblem, size: int, cutoff: float) -> SizedArcs:
    """Return the arcs below a cutoff with their least recomputation."""
    shape = chain_shape(problem, block_ranges(problem))
    batch = micro_batch(problem, size)
    source = stage_source(problem, shape, batch, lambda deterministic_seconds: None)
    everywhere = np.ones(len(problem.operators) + 1, dtype=np.bool_)
    graph = StageGraph(problem, shape, source.batch, source.bound, cutoff, everywhere)
    arcs = graph.arcs()
    keys = zip(arcs.choice.tolist(), arcs.first.tolist(), arcs.end.tolist(), arcs.behind.tolist(), strict=True)
    least = [source.least(key, graph.need_bytes(arcs, index)) for index, key in enumerate(keys)]
    exact = arcs.with_recompute(np.array(least))
    return SizedArcs(graph, exact.select(np.flatnonzero(np.isfinite(exact.time_ms))))


def _paths(sized: SizedArcs) -> list[list[int]]:
    """Return every pipeline over the arcs, all devices used."""
    arcs, graph = sized.arcs, sized.graph
    counts = graph.device_counts[arcs.choice]
    found: list[list[int]] = []

    def extend(path: list[int], s: int, x: int, u: int) -> None:
        if s == 0 and x == len(graph.problem.operators):
            found.append(path)
            return
        for i in np.flatnonzero((arcs.behind == s - 1) & (arcs.first == x) & (arcs.devices_behind + counts == u)):
            extend([*path, int(i)], s - 1, int(arcs.end[i]), int(arcs.devices_behind[i]))

    for s in range(1, graph.problem.cluster.devices + 1):
        extend([], s, 0, graph.problem.cluster.devices)
    return found


SMALL = [seed for seed in range(40) if random_problem(seed).cluster.devices > 1][:8]


def _objectives(sized: SizedArcs) -> list[float]:
    return sorted(sized.graph.objective(sized.arcs, path) for path in _paths(sized))


def test_no_pruned_stage_lies_on_a_pipeline_below_the_cutoff() -> None:
    pruned = 0
    for seed in SMALL:
        problem = random_problem(seed)
        for size in micro_batch_sizes(problem):
            if not micro_batch(problem, size).choices:
                continue
            everything = _sized(problem, size, np.inf)
            objectives = _objectives(everything)
            if not objectives:
                continue
            cutoff = objectives[len(objectives) // 3] * (1 + 1e-9)
            below = _sized(problem, size, cutoff)
            again = below.graph.prune(below.arcs, cutoff)
            pruned += len(everything.arcs) - len(again)
            expected = [value for value in objectives if value <= cutoff]
            left = _objectives(SizedArcs(below.graph, again))
            assert [value for value in left if value <= cutoff] == pytest.approx(expected)
            through = everything.graph.through(everything.arcs)
            for path in _paths(everything):
                assert through[path].max() <= everything.graph.objective(everything.arcs, path) * (1 + 1e-9)
    assert pruned > 20


def test_the_program_is_optimal_and_its_hint_complete_and_feasible() -> None:
    solved = 0
    for seed in SMALL:
        problem = random_problem(seed)
        sizes = [_sized(problem, s, np.inf) for s in micro_batch_sizes(problem) if micro_batch(problem, s).choices]
        sizes = [one for one in sizes if _paths(one)]
        if not sizes:
            continue
        optimum = min(_objectives(one)[0] for one in sizes)
        program = build(sizes, optimum)
        path = best_path(sizes[-1].graph, sizes[-1].arcs)
        hint = hint_of(program, len(sizes) - 1, path)
        assert len(hint) == len(program.model.proto.variables)
        fixed = solve_cp_sat(program.model, Clock(Budget(workers=1)), hint=hint, fix_to_hint=True)
        hinted = sizes[-1].graph.objective(sizes[-1].arcs, path)
        assert fixed.objective is not None
        assert fixed.objective * program.tick_ms == pytest.approx(hinted, rel=1e-7)
        outcome = solve_cp_sat(program.model, Clock(Budget(workers=1)), hint=hint)
        assert outcome.hint_was_feasible
        assert outcome.status == "optimal"
        assert outcome.objective is not None
        assert outcome.objective * program.tick_ms == pytest.approx(optimum, rel=1e-7)
        assert outcome.objective * program.tick_ms <= optimum * (1 + 1e-12)
        solved += 1
    assert solved >= 4


def test_each_constraint_of_the_program_refuses() -> None:
    problem = chain_of([[profile()]] * 3, devices=2)
    sized = _sized(problem, 1, np.inf)
    (path, *_) = _paths(sized)

    def solve(chosen: list[int], slowest: int | None = None) -> str:
        program = build([sized], 100.0)
        hint = hint_of(program, 0, path)
        for index, variable in enumerate(program.chosen[0]):
            hint[variable] = int(index in chosen)
        if slowest is not None:
            hint[program.slowest[0]] = slowest
        return solve_cp_sat(program.model, Clock(Budget(workers=1)), hint=hint, fix_to_hint=True).status

    assert solve(path) == "optimal"
    assert solve([]) == "infeasible"  # one pipeline
    assert solve(path[:1]) == "infeasible"  # flow: something must follow
    assert solve(path[1:]) == "infeasible"  # flow: something must come before
    assert solve(path, slowest=1) == "infeasible"  # slowest


# -- limits, repetition, words ----------------------------------------------------------------------------------


def _without_seconds(plan: ParallelismPlan) -> str:
    certificate = plan.certificate
    assert certificate is not None
    trace = tuple(replace(step, seconds=0.0) for step in certificate.trace)
    return document_text(replace(plan, certificate=replace(certificate, seconds=0.0, trace=trace)))


def test_the_same_plan_twice() -> None:
    for seed in (0, 3, 115):
        problem = random_problem(seed)
        assert _without_seconds(_plan(problem)) == _without_seconds(_plan(problem))
        assert _without_seconds(_plan(problem, workers=2)) == _without_seconds(_plan(problem, workers=2))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("limit", [1e-9, 0.003, 0.05])
def test_a_tiny_limit_gives_a_valid_plan_or_none(limit: float, deterministic: bool) -> None:
    for seed in (0, 3, 115):
        problem = random_problem(seed)
        best = best_plan(problem)
        assert best is not None
        try:
            plan = _plan(problem, time_limit_s=limit, deterministic=deterministic)
        except NoPlanFoundError:
            continue
        assert check(problem, plan) == ()
        assert plan.certificate is not None
        assert plan.certificate.objective >= best.iteration_ms * (1 - 1e-9)
        assert (plan.certificate.bound or 0.0) <= best.iteration_ms * (1 + 1e-9)


def test_the_grid_alone() -> None:
    problem = random_problem(3)
    plan = Planner(problem, Budget()).run("grid").plan
    assert plan.certificate is not None
    assert (plan.certificate.stopped_by, plan.certificate.incumbent) == ("completed", "heuristic:grid")
    assert plan.certificate.objective >= _plan(problem).certificate.objective  # type: ignore[union-attr]
    assert check(problem, plan) == ()


def test_no_plan_of_the_solver_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for seed in (115, 159, 230, 236):
            _plan(random_problem(seed))
    assert caplog.text == ""


def test_a_batch_that_no_micro_batch_divides() -> None:
    problem = chain_of([[profile(batch=2)]] * 2, devices=1, global_batch=7)
    with pytest.raises(InputError, match=r"global_batch: no micro-batch size .* divides 7"):
        _plan(problem)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"virtual_stages": (1, 2)}, r"space.virtual_stages: found \[1, 2\]; .* give \[1\]"),
        ({"sharding": (1, 3)}, r"space.sharding: found \[1, 3\]; .* add 0"),
    ],
)
def test_spaces_that_are_not_searched_are_refused(changes: dict[str, tuple[int, ...]], line: str) -> None:
    space = replace(ANY_SPACE, **changes)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=line):
        _plan(chain_of([[profile()]] * 2, space=space))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"sequence_parallel": True}, r"sequence_parallel: found true; the aceso cost model knows no .* give false"),
        ({"overlap": Overlap(transfers=True)}, r"overlap.transfers: found true; the aceso cost model hides nothing"),
    ],
)
def test_what_the_aceso_cost_model_does_not_know_is_refused(changes: dict[str, bool | Overlap], line: str) -> None:
    with pytest.raises(InputError, match=line):
        _plan(replace(chain_of([[profile()]] * 2), **changes))  # type: ignore[arg-type]


def test_one_layout_for_all_stages_holds_under_aceso_too() -> None:
    operators = [[profile(tensor_parallel=1, forward_ms=8.0), profile(tensor_parallel=2, forward_ms=1.0)]] * 4
    for same_layout, degrees in ((False, {1, 2}), (True, {1})):
        space = replace(ANY_SPACE, same_layout=same_layout, device_counts=(1, 2))
        plan = _plan(chain_of(operators, devices=3, space=space))
        assert {one.tensor_parallel for stage in plan.stages for one in stage.layout} == degrees


def test_sizes_and_rates_beyond_all_measure_end_in_one_of_our_errors() -> None:
    heavy = chain_of([[profile(weight_bytes=10**18)]] * 4)
    with pytest.raises(InfeasibleProblemError, match="a plan exists from"):
        _plan(heavy)
    crawling = chain_of([[profile(input_bytes=10**18)]] * 4, intra=LatencyLink(bytes_per_s=1e-6), memory_bytes=10**18)
    with pytest.raises(InfeasibleProblemError, match=r"every iteration takes at least 4e\+27 ms"):
        _plan(crawling)
