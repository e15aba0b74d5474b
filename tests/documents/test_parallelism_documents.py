"""Bad parallelism problems and plans are refused at their place."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parallelism import MEBIBYTE, chain
from solver_plan.documents import digest_of, document_text, write_document
from solver_plan.errors import DocumentError
from solver_plan.kinds import read_plan, read_problem
from solver_plan.parallelism.plan import Layout, ParallelismPlan, Stage

PROBLEM = chain(Path(), blocks=1, devices=2, memory_bytes=1000 * MEBIBYTE, global_batch=4)
PLAN = ParallelismPlan(
    problem_digest=digest_of(PROBLEM),
    micro_batch_size=2,
    micro_batches=2,
    stages=(
        Stage(
            operators=(0, 4),
            devices=(0, 1),
            layout=(Layout(operators=(0, 4), tensor_parallel=2, data_parallel=1, partition=0),),
            recompute=((1, 3),),
        ),
    ),
)


def test_good_documents_come_back(tmp_path: Path) -> None:
    write_document(PROBLEM, tmp_path / "problem.json")
    write_document(PLAN, tmp_path / "plan.json")
    assert read_problem(str(tmp_path / "problem.json")) == PROBLEM
    assert read_plan(str(tmp_path / "plan.json")) == PLAN
    assert digest_of(read_problem(str(tmp_path / "problem.json"))) == PLAN.problem_digest


def _set(*path: str | int) -> Callable[[Any, Any], None]:
    def change(parsed: Any, value: Any) -> None:
        for step in path[:-1]:
            parsed = parsed[step]
        parsed[path[-1]] = value

    return change


PROBLEMS = [
    (_set("global_batch"), 0, "global_batch", "greater than or equal to 1"),
    (_set("cost_model"), "best", "cost_model", "input should be"),
    (_set("cluster", "nodes"), 0, "cluster.nodes", "greater than or equal to 1"),
    (_set("cluster", "memory_margin"), 1.0, "cluster.memory_margin", "less than or equal to 0.999"),
    (_set("cluster", "memory_bytes_per_device"), 1.5, "cluster.memory_bytes_per_device", "integer"),
    (_set("cluster", "intra_node"), {}, "cluster.intra_node.bytes_per_s", "required"),
    (_set("cluster", "intra_node"), 3, "cluster.intra_node", "input should be"),
    (_set("cluster", "intra_node", "bytes_per_s"), 0, "cluster.intra_node.bytes_per_s", "equal to 0.000001"),
    (_set("cluster", "intra_node"), {"table": []}, "cluster.intra_node.table", "at least 1 item"),
    (_set("cluster", "intra_node"), {"table": [[1, 2.0, 3]]}, "cluster.intra_node.table[0]", "at most 2 items"),
    (
        _set("cluster", "inter_node"),
        {"table": [[0, 2.0]]},
        "cluster.inter_node.table[0][0]",
        "greater than or equal to 1",
    ),
    (_set("cluster", "inter_node"), {"table": [[8, 2.0], [8, 3.0]]}, "cluster.inter_node.table[1]", "sizes increase"),
    (
        _set("cluster", "inter_node"),
        {"table": [[8, 2.0]], "latency_ms": 0.0},
        "cluster.inter_node.latency_ms",
        "remove it",
    ),
    (_set("cluster", "nodes"), 500_001, "cluster.nodes", "at most 1000000: 500001 x 2 are too many"),
    (_set("cluster", "intra_node", "bytes_per_s"), 1e-300, "cluster.intra_node.bytes_per_s", "equal to 0.000001"),
    (_set("cluster", "node_bytes_per_s"), 5e-324, "cluster.node_bytes_per_s", "equal to 0.000001"),
    (_set("cluster", "device_memory_bytes_per_s"), 1e-300, "cluster.device_memory_bytes_per_s", "equal to 0.000001"),
    (
        _set("cluster", "collectives"),
        [{"devices": 2, "latency_ms": 0.0, "bus_bytes_per_s": 1e-300}],
        "cluster.collectives[0].bus_bytes_per_s",
        "equal to 0.000001",
    ),
    (_set("operators"), [], "operators", "at least 1 item"),
    (_set("operators", 2, "name"), "embedding", "operators[2].name", "unique"),
    (_set("operators", 2, "profile"), "nothing", "operators[2].profile", "key of profiles"),
    (_set("operators", 2, "block_start"), 1, "operators[2].block_start", "boolean"),
    (_set("profiles", "mlp"), [], "profiles.mlp", "at least 1 item"),
    (_set("profiles", "mlp", 0, "forward_ms"), -1, "profiles.mlp[0].forward_ms", "greater than or equal to 0"),
    (_set("profiles", "mlp", 0, "tensor_parallel"), 2, "profiles.mlp[1]", "profiled once"),
    (
        _set("profiles", "mlp", 0, "forward_collective_ms"),
        3.2,
        "profiles.mlp[0].forward_collective_ms",
        "a part of forward_ms, which is 3.1 (profile of mlp 0, batch 1, tensor parallel 1): at most that",
    ),
    (
        _set("profiles", "head", 1, "backward_collective_ms"),
        50.0,
        "profiles.head[1].backward_collective_ms",
        "(profile of head, batch 1, tensor parallel 2)",
    ),
    (_set("profiles", "mlp", 0, "weight_bytes"), 10**19, "profiles.mlp[0].weight_bytes", "less than or equal"),
    (_set("profiles", "mlp", 0, "output_layout"), "diagonal", "profiles.mlp[0].output_layout", "input should be"),
    (_set("space", "device_counts"), [1, 2, 1], "space.device_counts[2]", "each value once"),
    (_set("space", "device_counts"), [], "space.device_counts", "at least 1 item"),
    (_set("space", "virtual_stages"), [1, 5], "space.virtual_stages[1]", "at least one of the 4 operators: at most 4"),
    (_set("space", "layout"), "any", "space.layout", "'stage' or 'operator'"),
    (_set("space", "sharding"), [4], "space.sharding[0]", "less than or equal to 3"),
]


@pytest.mark.parametrize(("change", "value", "place", "rule"), PROBLEMS, ids=[row[2] for row in PROBLEMS])
def test_a_bad_problem(tmp_path: Path, change: Callable[[Any, Any], None], value: Any, place: str, rule: str) -> None:
    parsed = copy.deepcopy(json.loads(document_text(PROBLEM)))
    change(parsed, value)
    (tmp_path / "problem.json").write_text(json.dumps(parsed))
    with pytest.raises(DocumentError) as caught:
        read_problem(str(tmp_path / "problem.json"))
    assert caught.value.place == place
    assert rule in caught.value.rule


PLANS = [
    (_set("problem_digest"), 5, "problem_digest", "string"),
    (_set("micro_batches"), 0, "micro_batches", "greater than or equal to 1"),
    (_set("stages"), [], "stages", "at least 1 item"),
    (_set("stages", 0, "operators"), [4, 4], "stages[0].operators", "first < end"),
    (_set("stages", 0, "operators"), [4], "stages[0].operators[1]", "required"),
    (_set("stages", 0, "operators"), [-1, 4], "stages[0].operators[0]", "greater than or equal to 0"),
    (_set("stages", 0, "devices"), [], "stages[0].devices", "at least 1 item"),
    (_set("stages", 0, "recompute", 0), [3, 1], "stages[0].recompute[0]", "first < end"),
    (_set("stages", 0, "sharding"), 4, "stages[0].sharding", "less than or equal to 3"),
    (_set("schedule"), {"orders": [["0F0", "0X0"]]}, "schedule.orders[0][1]", "match pattern"),
    (_set("certificate"), {"status": "perfect"}, "certificate.status", "'optimal' or 'feasible'"),
]


@pytest.mark.parametrize(("change", "value", "place", "rule"), PLANS, ids=[row[2] for row in PLANS])
def test_a_bad_plan(tmp_path: Path, change: Callable[[Any, Any], None], value: Any, place: str, rule: str) -> None:
    parsed = copy.deepcopy(json.loads(document_text(PLAN)))
    change(parsed, value)
    (tmp_path / "plan.json").write_text(json.dumps(parsed))
    with pytest.raises(DocumentError) as caught:
        read_plan(str(tmp_path / "plan.json"))
    assert caught.value.place == place
    assert rule in caught.value.rule
