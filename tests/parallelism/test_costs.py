"""The `aceso` cost model: tiny cases counted by hand, and the plans of the reference data to the printed digit."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from solver_plan.errors import InputError
from solver_plan.kinds import read_plan
from solver_plan.parallelism.check import check
from solver_plan.parallelism.choices import micro_batch, micro_batch_sizes
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.costs.aceso import edge_links, iteration_ms
from solver_plan.parallelism.costs.links import MEGABYTE, transfer_ms
from solver_plan.parallelism.costs.recompute import saved_and_peak
from solver_plan.parallelism.costs.resharding import resharding_ms
from solver_plan.parallelism.heuristics.grid import grid_points
from solver_plan.parallelism.plan import Layout, ParallelismPlan
from solver_plan.parallelism.problem import CollectiveTimes, LatencyLink, Resharding, TableLink, TensorLayout
from solver_plan.profiles.aceso import import_aceso
from tests.parallelism.problems import ANY_SPACE, PER_MS, chain_of, plan_of, profile, stage

# -- links ------------------------------------------------------------------------------------------------------


def test_a_link_by_latency() -> None:
    link = LatencyLink(latency_ms=0.5, bytes_per_s=2000.0)
    assert transfer_ms(0, link) == 0.0
    assert transfer_ms(1, link) == pytest.approx(0.5 + 0.5)
    assert transfer_ms(4000, link) == pytest.approx(2000.5)


@pytest.mark.parametrize(
    ("megabytes", "entry"),
    [
        (1, 0),
        (1.9, 0),
        (2, 0),
        (3.9, 0),
        (4, 1),
        (8, 2),
        (15.9, 2),
        (16, 3),
        (2**20, 3),
        (0.51, 0),
        (0.5, -1),
        (0.25, -2),
        (2**-20, -4),
    ],
)
def test_a_link_by_table(megabytes: float, entry: int) -> None:
    """Entry trunc(log2 MB), one less from 2 MB on, at most the last; below 1 MB counted from the end."""
    rates = [1e9, 2e9, 3e9, 4e9]
    link = TableLink(table=tuple((MEGABYTE * 2**index, rate) for index, rate in enumerate(rates)))
    size = round(megabytes * MEGABYTE)
    assert transfer_ms(size, link) == pytest.approx(size / rates[entry] * 1e3)


def test_edges_lie_between_nodes_where_the_stages_do() -> None:
    cluster = chain_of([[profile()]], devices=2, nodes=2, intra=PER_MS).cluster
    intra, inter = cluster.intra_node, cluster.inter_node
    assert edge_links(cluster, [[0], [1], [2, 3]]) == [intra, intra, inter, inter]
    assert edge_links(cluster, [[0], [2], [1]]) == [intra, inter, inter, inter]
    assert edge_links(cluster, [[0, 2], [1]]) == [intra, inter, inter]


# -- resharding -------------------------------------------------------------------------------------------------

TABLES = Resharding(
    collectives=(
        CollectiveTimes(collective="all_gather", devices=2, table=((4, 3.0), (8, 5.0))),
        CollectiveTimes(collective="all_gather", devices=4, table=((4, 7.0),)),
        CollectiveTimes(collective="all_to_all", devices=2, table=((4, 11.0),)),
    )
)
MISSING = TABLES.missing_ms
Side = tuple[TensorLayout, int, int]


@pytest.mark.parametrize(
    ("produced", "received", "expected"),
    [
        (("replicated", 2, 1), ("replicated", 2, 1), 0.0),
        (("any", 2, 1), ("split_heads", 1, 2), 0.0),
        (("split_heads", 2, 1), ("any", 1, 2), 0.0),
        # (R=2; 1,1,1) to (R=1; 1,1,2): split forward, all_gather of R / R' = 2 backward
        (("replicated", 2, 1), ("split_heads", 2, 1), 3.0),
        # (R=1; 1,1,2) to (R=2; 1,1,1): all_gather of D / D' = 2 forward, split backward
        (("split_heads", 2, 1), ("replicated", 2, 1), 3.0),
        # (R=4; 1,1,1) to (R=1; 1,4,1) at t 4 -> d 4: all_gather on 4
        (("replicated", 4, 1), ("replicated", 1, 4), 7.0),
        # (R=1; 1,2,1) to (R=2; 1,1,1): less data parallel
        (("replicated", 1, 2), ("replicated", 2, 1), 3.0),
        # (R=1; 1,1,2) to (R=1; 1,2,1): one split shrinks, another grows: all_to_all both ways
        (("split_heads", 2, 1), ("split_heads", 1, 2), 22.0),
        (("batch_first", 2, 1), ("batch_first", 1, 2), 3.0),
        # fewer devices in all: no collective does it
        (("split_heads", 2, 1), ("split_heads", 1, 1), None),
        (("replicated", 2, 1), ("replicated", 1, 1), None),
    ],
)
def test_resharding(produced: Side, received: Side, expected: float | None) -> None:
    assert resharding_ms(TABLES, produced, received, 4 * MEGABYTE) == expected


def test_a_size_of_one_less_serves_and_a_missing_one_is_dear() -> None:
    gather = (("replicated", 2, 1), ("split_heads", 2, 1))
    assert resharding_ms(TABLES, *gather, 5 * MEGABYTE) == 3.0  # type: ignore[arg-type]
    assert resharding_ms(TABLES, *gather, 6 * MEGABYTE) == MISSING  # type: ignore[arg-type]
    assert resharding_ms(TABLES, ("split_heads", 4, 1), ("split_heads", 1, 4), 4 * MEGABYTE) == 2 * MISSING
    assert resharding_ms(None, *gather, 4 * MEGABYTE) == 0.0  # type: ignore[arg-type]


def test_a_layout_change_within_a_stage_is_paid_for() -> None:
    choices = [
        profile(
            tensor_parallel=t, batch=b, input_layout="replicated", output_layout="replicated", input_bytes=4 * MEGABYTE
        )
        for t, b in ((1, 1), (2, 2))
    ]
    problem = replace(
        chain_of([choices] * 2, devices=2, space=replace(ANY_SPACE, layout="operator")), resharding=TABLES
    )
    one = stage((0, 2), [0, 1])
    layouts = (
        Layout(operators=(0, 1), tensor_parallel=2, data_parallel=1, partition=0),
        Layout(operators=(1, 2), tensor_parallel=1, data_parallel=2, partition=0),
    )
    plan = plan_of(replace(one, layout=layouts), micro_batch_size=2, micro_batches=2)
    assert check(problem, plan) == ()
    assert evaluate(problem, plan).stages[0].stage_ms == pytest.approx(2 * 3 + 3.0)


# -- recomputation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marks", "starts", "shared", "expected"),
    [
        ("0000", "1000", "0000", (0, 0)),
        ("1111", "1000", "0000", (1 + 2 + 4, 1 + 2 + 4)),  # the last operator's is never saved
        ("1000", "1000", "0000", (0, 0)),  # alone: time for nothing
        ("0101", "1000", "0000", (0, 0)),
        ("1101", "1000", "0000", (1, 1)),
        ("0110", "1000", "0000", (2, 2)),
        ("0011", "1000", "0000", (4, 4)),
        ("1111", "1010", "0000", (1 + 4, 4)),  # across a block start: no saving, but brought back
        ("1110", "1010", "0000", (1, 1 + 2)),
        ("1111", "1010", "0100", (1 + 4, 1 + 2 + 4)),  # a shared buffer lets the segment run on
        ("1111", "1000", "0010", (1 + 2 + 4, 0)),  # and at the end it never closes
        ("1110", "1000", "0010", (1 + 2, 1 + 2)),
    ],
)
def test_saved_and_peak(marks: str, starts: str, shared: str, expected: tuple[float, float]) -> None:
    def flags(text: str) -> list[bool]:
        return [sign == "1" for sign in text]

    assert saved_and_peak(flags(marks), [1.0, 2.0, 4.0, 8.0], flags(starts), flags(shared)) == expected


# -- a stage ----------------------------------------------------------------------------------------------------


def _counted() -> tuple[list[float], list[float]]:
    """Return times and memory of two stages that differ in everything."""
    columns = (
        "forward_ms", "backward_ms", "input_bytes", "output_bytes", "weight_bytes", "activation_bytes",
        "forward_reserved_bytes", "backward_reserved_bytes",
    )  # fmt: skip
    rows = [
        (1, 3, 1, 2, 5, 10, 7, 1),
        (2, 4, 2, 4, 6, 20, 1, 90),
        (4, 8, 4, 8, 1, 40, 30, 2),
        (8, 9, 8, 16, 2, 80, 99, 99),
    ]  # fmt: skip
    problem = chain_of(
        [[profile(**dict(zip(columns, row, strict=True)))] for row in rows],
        blocks=(0, 2),
        devices=2,
        intra=PER_MS,
        inter=LatencyLink(bytes_per_s=500.0),
    )
    plan = plan_of(stage((0, 2), [0], recompute=[(0, 2)]), stage((2, 4), [1]))
    found = evaluate(problem, plan)
    return [one.stage_ms for one in found.stages], [one.memory_bytes for one in found.stages]


def test_a_stage_counted_by_hand() -> None:
    times, memory = _counted()
    # forward + backward + recomputed + input over intra + output over intra (behind the last stage: inter)
    assert times == pytest.approx([1 + 2 + 3 + 4 + (1 + 2) + 1 + 4, 4 + 8 + 8 + 9 + 4 + 16 * 2])
    # weights * state + in flight * (input + held - saved) + peak + reserved (the last operator's left out) or weights
    assert memory == [11 * 8 + 2 * (1 + 30 - 10) + 10 + max(7 + 1, 11), 3 * 8 + (4 + 120) + max(30 + 2, 3)]


def test_the_iteration() -> None:
    assert iteration_ms([2.0, 5.0, 3.0], 4) == 3 * 5 + 10
    assert iteration_ms([2.0, 5.0], 1) == 7


# -- the reference data -----------------------------------------------------------------------------------------

PLANS = ("gpt_1_3B_small", "gpt_1_3B_large", "gpt_2_6B_large", "resnet_2B_large")


@pytest.mark.parametrize("name", PLANS)
def test_plans_of_aceso_to_the_digit(data: Path, name: str) -> None:
    expected = json.loads((data / "aceso/plans/expected.json").read_text())
    assert sorted(key for key in expected if not key.startswith("_")) == sorted(PLANS), "a plan is not tested"
    case = expected[name]
    problem = import_aceso(
        data / "aceso" / case["database"],
        model=case["model"],
        size=case["size"],
        layers=case["layers"],
        nodes=case["nodes"],
        devices_per_node=case["devices_per_node"],
        memory_mb=case["memory_mb"],
        global_batch=case["global_batch"],
    )
    plan = read_plan(str(data / "aceso/plans" / case["plan"]))
    assert isinstance(plan, ParallelismPlan)
    assert check(problem, plan) == ()
    found = evaluate(problem, plan)
    assert f"{found.iteration_ms:.2f}" == f"{case['iteration_ms']:.2f}"
    memory = [round(one.memory_bytes / MEGABYTE, 2) for one in found.stages]
    assert memory == pytest.approx(case["stage_memory_mb"], abs=0.0051)
    assert plan.predicted is not None
    assert found.iteration_ms == pytest.approx(plan.predicted.iteration_ms, rel=1e-9)
    assert [one.stage_ms for one in found.stages] == pytest.approx(list(plan.predicted.stage_ms), rel=1e-9)


def _databases(folder: Path) -> list[tuple[str, str, str]]:
    found = set()
    for database in ("eurosys", "miniset"):
        for path in (folder / "aceso" / database).glob("*_mbs*_algo0.csv"):
            match = re.fullmatch(r"(gpt|t5|resnet)_(.+)_mbs\d+_tp\d+_algo0\.csv", path.name)
            assert match, path.name
            found.add((database, match.group(1), match.group(2)))
    return sorted(found)


def test_every_model_and_size_imports_and_evaluates(data: Path) -> None:
    """Operators as the database's README counts them, and a plan of the grid that can be evaluated."""
    layers = {"350M": 24, "1_3B": 24, "2_6B": 32, "6_7B": 32, "13B": 40, "scale-layer": 3}
    databases = _databases(data)
    assert len(databases) == 18
    for database, model, size in databases:
        problem = import_aceso(
            data / "aceso" / database,
            model=model,
            size=size,
            layers=layers["scale-layer"] if size == "scale-layer" else None,
            nodes=1,
            devices_per_node=4,
            memory_mb=10**6,
            global_batch=64,
        )
        count = len(problem.operators)
        if model == "gpt":
            assert count == 1 + 13 * layers[size] + 2
        elif model == "t5":
            assert count == 1 + 13 * 24 + 2 + 21 * 24 + 2
        assert problem.space.device_counts == (1, 2, 4)
        assert problem.space.partitions == (None if model == "resnet" else (0,))
        size_of = micro_batch_sizes(problem)[0]
        found = [point.plan(problem) for point in grid_points(problem, micro_batch(problem, size_of))]
        plans = [plan for plan in found if check(problem, plan) == ()]
        assert plans, (database, model, size)
        assert evaluate(problem, plans[0]).iteration_ms > 0


def test_a_size_without_published_layers_asks_for_them(data: Path) -> None:
    with pytest.raises(InputError, match="give --layers"):
        import_aceso(
            data / "aceso/eurosys",
            model="gpt",
            size="scale-layer",
            nodes=1,
            devices_per_node=1,
            memory_mb=1,
            global_batch=1,
        )
