"""Infeasible problems are explained, and what the explanation promises is true."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from solver_plan.errors import InfeasibleProblemError, NoPlanFoundError
from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.check import check
from solver_plan.parallelism.choices import micro_batch, micro_batch_sizes
from solver_plan.parallelism.infeasible import explain
from solver_plan.parallelism.nothing_found import why_nothing
from solver_plan.parallelism.planner import Planner
from solver_plan.parallelism.problem import LatencyLink, ParallelismProblem
from solver_plan.parallelism.recomputation.shape import chain_shape
from solver_plan.profiles.aceso import import_aceso
from solver_plan.solving import Budget
from tests.parallelism.exhaustive import best_plan
from tests.parallelism.problems import ANY_SPACE, SCALE, chain_of, profile, random_problem

MEGABYTE = 2**20


def _explained(problem: ParallelismProblem) -> str | None:
    batches = [micro_batch(problem, size) for size in micro_batch_sizes(problem)]
    shape = chain_shape(problem, block_ranges(problem))
    return explain(problem, [batch for batch in batches if batch.choices], shape)


def _with_memory(problem: ParallelismProblem, memory_bytes: int) -> ParallelismProblem:
    return replace(problem, cluster=replace(problem.cluster, memory_bytes_per_device=memory_bytes))


def _in_megabytes(problem: ParallelismProblem) -> ParallelismProblem:
    """Return the problem with sizes that matter to a MB: what was SCALE bytes is a MB."""
    sizes = ("weight_bytes", "activation_bytes", "input_bytes", "forward_reserved_bytes", "backward_reserved_bytes")
    profiles = {
        key: tuple(
            replace(entry, **{name: getattr(entry, name) * MEGABYTE // SCALE for name in sizes}) for entry in entries
        )
        for key, entries in problem.profiles.items()
    }
    return replace(problem, profiles=profiles)


def test_a_plan_exists_from_the_memory_that_is_named_and_not_below() -> None:
    explained = 0
    for seed in (*range(6), 66, 114, 118, 187):
        problem = _with_memory(_in_megabytes(random_problem(seed)), MEGABYTE)
        line = _explained(problem)
        assert line is not None
        found = re.search(r"(\d+) bytes short on stage .*a plan exists from (\d+) MB per device", line)
        assert found, line
        enough, short = int(found.group(2)) * MEGABYTE, int(found.group(1))
        assert (short + MEGABYTE + MEGABYTE - 1) // MEGABYTE * MEGABYTE == enough
        assert best_plan(_with_memory(problem, enough)) is not None
        assert best_plan(_with_memory(problem, enough - MEGABYTE)) is None
        plan = Planner(_with_memory(problem, enough), Budget(deterministic=True)).run(None).plan
        assert check(_with_memory(problem, enough), plan) == ()
        with pytest.raises(InfeasibleProblemError):
            Planner(_with_memory(problem, enough - MEGABYTE), Budget(deterministic=True)).run(None)
        explained += 1
    assert explained == 10


def test_the_margin_counts() -> None:
    problem = chain_of([[profile(activation_bytes=10 * MEGABYTE)]], memory_bytes=MEGABYTE)
    half = replace(problem, cluster=replace(problem.cluster, memory_margin=0.5))
    assert "a plan exists from 10 MB" in (_explained(problem) or "")
    assert "a plan exists from 20 MB" in (_explained(half) or "")


def test_more_nodes_are_named_where_they_help() -> None:
    operators = [[profile(weight_bytes=MEGABYTE)]] * 4
    problem = chain_of(operators, blocks=(0, 1, 2, 3), memory_bytes=20 * MEGABYTE)
    line = _explained(problem)
    assert line is not None
    assert line.endswith("or on 2 devices (2 nodes)")


def test_a_cluster_that_cannot_be_filled_is_told_apart_from_memory() -> None:
    space = replace(ANY_SPACE, device_counts=(2,))
    problem = chain_of([[profile(), profile(tensor_parallel=2)]] * 4, devices=3, space=space)
    with pytest.raises(InfeasibleProblemError, match="no pipeline of whole stages covers 4 operators on 3 devices"):
        Planner(problem, Budget(deterministic=True)).run(None)


def _three_stages_on_two_nodes_of_three() -> ParallelismProblem:
    """Return a problem of 6 devices in 3 stages of 2: counted they fit, but one would lie in both nodes."""
    space = replace(ANY_SPACE, device_counts=(1, 2), max_stages=3)
    return chain_of([[profile(), profile(tensor_parallel=2)]] * 4, devices=3, nodes=2, space=space)


def test_a_search_that_ends_with_nothing_names_what_binds_and_what_helps() -> None:
    problem = _three_stages_on_two_nodes_of_three()
    with pytest.raises(NoPlanFoundError) as caught:
        Planner(problem, Budget(deterministic=True)).run(None)
    assert str(caught.value) == (
        "no plan found with no idle device, at most 3 stages, stages within a node: the search ended by itself, more "
        "time would not help (plans with devices out of rank order were not looked at); there is one with "
        "space.use_all_devices false or with space.max_stages null or with space.cross_node_stages true"
    )
    changes: list[dict[str, bool | int | None]] = [
        {"use_all_devices": False},
        {"max_stages": None},
        {"cross_node_stages": True},
    ]
    for change in changes:
        wider = replace(problem, space=replace(problem.space, **change))  # type: ignore[arg-type]
        assert check(wider, Planner(wider, Budget(deterministic=True)).run(None).plan) == ()


def test_only_a_search_that_was_cut_short_asks_for_time() -> None:
    planner = Planner(_three_stages_on_two_nodes_of_three(), Budget(deterministic=True))
    with pytest.raises(NoPlanFoundError, match="more time would not help"):
        planner.run(None)
    half = planner.clock.deterministic_seconds / 100
    with pytest.raises(NoPlanFoundError, match="give more time"):
        Planner(planner.problem, Budget(deterministic=True, time_limit_s=half)).run(None)


@pytest.mark.parametrize("heuristic", ["grid", "aceso"])
def test_a_heuristic_that_ends_with_nothing_asks_for_no_time(heuristic: str) -> None:
    with pytest.raises(NoPlanFoundError, match="more time would not help; search without --heuristic"):
        Planner(_three_stages_on_two_nodes_of_three(), Budget(deterministic=True)).run(heuristic)


def test_what_is_proven_is_called_infeasible_and_memory_is_tried_last() -> None:
    problem = replace(_three_stages_on_two_nodes_of_three(), space=ANY_SPACE)
    proven = why_nothing(problem, math.inf, [], lambda other: other.cluster.memory_bytes_per_device > 1.1 * 10**12)
    assert isinstance(proven, InfeasibleProblemError)
    assert str(proven) == (
        "no plan exists with this memory: every pipeline was looked at, and none fits; there is one with "
        "cluster.memory_bytes_per_device 1200000000000"
    )
    nothing_helps = why_nothing(problem, 1.0, [], lambda other: False)
    assert isinstance(nothing_helps, NoPlanFoundError)
    assert "no idle device, stages within a node" in str(nothing_helps)
    assert "lift more than one of these restrictions, or take larger devices" in str(nothing_helps)


def test_iterations_beyond_all_measure_are_told_apart() -> None:
    endless = LatencyLink(latency_ms=1e18, bytes_per_s=1.0)
    operators = [[profile(input_bytes=1, output_bytes=1, tensor_parallel=1)]] * 2
    problem = chain_of(operators, devices=1, nodes=2, inter=endless, intra=endless)
    with pytest.raises(InfeasibleProblemError, match=r"every iteration takes at least \S+ ms, times go up to 1e\+18"):
        Planner(problem, Budget(deterministic=True)).run(None)


def test_the_explanation_ends_with_the_limit() -> None:
    """What is not proven within the limit is not called infeasible."""
    problem = chain_of([[profile(weight_bytes=MEGABYTE)]] * 12, devices=4, memory_bytes=1)
    planner = Planner(problem, Budget(deterministic=True))
    with pytest.raises(InfeasibleProblemError):
        planner.run(None)
    just_too_little = planner.clock.deterministic_seconds * (1 - 1e-9)
    with pytest.raises(NoPlanFoundError):
        Planner(problem, Budget(deterministic=True, time_limit_s=just_too_little)).run(None)


def test_gpt_13b_on_four_small_devices_is_explained(data: Path) -> None:
    problem = import_aceso(
        data / "aceso/eurosys",
        model="gpt",
        size="13B",
        nodes=1,
        devices_per_node=4,
        memory_mb=12000,
        global_batch=1024,
    )
    with pytest.raises(InfeasibleProblemError, match=r"bytes short on stage .*a plan exists from \d+ MB per device"):
        Planner(problem, Budget(time_limit_s=600)).run(None)
