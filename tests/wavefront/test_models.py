import pytest

from models import multitask_clip, ofasys, qwen_val
from solver_plan.errors import InputError
from solver_plan.profiles.multitask import MultitaskDescription
from solver_plan.wavefront.contraction import OperatorNode, contract, operator_graph
from solver_plan.wavefront.from_operators import problem_from_operators
from solver_plan.wavefront.instance import instance_of
from solver_plan.wavefront.problem import Cluster
from solver_plan.wavefront.scalability import fit_curve


def cluster(devices: int) -> Cluster:
    return Cluster(devices=devices, devices_per_node=8)


@pytest.mark.parametrize(
    ("model", "components", "edges"),
    [
        (multitask_clip.clip4(), 8, 0),
        (multitask_clip.clip7(), 14, 0),
        (multitask_clip.clip10(), 20, 0),
        (ofasys.ofasys4(), 11, 7),
        (ofasys.ofasys7(), 20, 13),
        (qwen_val.qwen_val_7b(), 7, 4),
    ],
)
def test_families_contract_into_chains(model: MultitaskDescription, components: int, edges: int) -> None:
    made = problem_from_operators(model.operators, cluster(16))
    assert (len(made.components), len(made.edges)) == (components, edges)
    assert sum(component.layers for component in made.components) == model.operators.number_of_nodes()


def test_parameters_are_as_published() -> None:
    def billions(model: MultitaskDescription) -> float:
        return sum({operator.weights: operator.parameters for operator in model.operators}.values()) / 1e9

    assert billions(multitask_clip.clip10()) == pytest.approx(1.20, rel=0.2)
    assert billions(ofasys.ofasys7()) == pytest.approx(0.66, rel=0.35)  # without embeddings; adaptors are a guess
    assert billions(qwen_val.qwen_val_7b()) == pytest.approx(9.25, rel=0.1)
    assert billions(qwen_val.qwen_val_30b()) == pytest.approx(30, rel=0.15)
    assert billions(qwen_val.qwen_val_70b()) == pytest.approx(70, rel=0.15)


def test_tasks_share_weights_layer_by_layer() -> None:
    instance = instance_of(problem_from_operators(ofasys.ofasys4().operators, cluster(16)))
    names = [component.name for component in instance.problem.components]
    encoders = {instance.parameters[at] for at, name in enumerate(names) if name.endswith("/encoder")}
    decoders = {instance.parameters[at] for at, name in enumerate(names) if name.endswith("/decoder")}
    assert len(encoders) == len(decoders) == 1
    assert encoders != decoders


def test_tensor_parallel_modes_shard_the_state() -> None:
    made = problem_from_operators(qwen_val.qwen_val_70b().operators, cluster(64), tensor_parallel=(4, 8))
    language = made.component_of["VL/llm"]
    assert language.modes is not None
    by_degree = {mode.degrees["tensor_parallel"]: mode for mode in language.modes if mode.degrees is not None}
    assert by_degree[4].state_bytes_per_layer == 2 * by_degree[8].state_bytes_per_layer


def test_frozen_encoders_have_no_backward() -> None:
    made = problem_from_operators(qwen_val.qwen_val_7b_frozen().operators, cluster(32), phases="forward_backward")
    modes = made.component_of["VL/vit"].modes
    assert modes is not None
    assert {mode.backward_ms for mode in modes} == {0.0}
    assert made.component_of["VL/llm"].modes is None


def node(name: str, **changes: object) -> OperatorNode:
    fields: dict[str, object] = {
        "task": "t", "kind": "layer", "batch": 8, "sequence": 16, "hidden": 32, "weights": name, "parameters": 10,
        "forward_flops": 1e9, "output_bytes": 4, "activation_bytes": 4,
    }  # fmt: skip
    return OperatorNode(name=name, **{**fields, **changes})  # type: ignore[arg-type]


def test_only_equal_operators_in_a_line_merge() -> None:
    a, b, c, d, e = node("a"), node("b"), node("c", sequence=8), node("d"), node("e")
    chains, edges = contract(operator_graph([a, b, c, d, e], [(a, b), (b, c), (c, d), (c, e)]))
    assert [[operator.name for operator in chain.operators] for chain in chains] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert len(edges) == 3


def test_graphs_with_cycles_or_names_twice_are_refused() -> None:
    a, b = node("a"), node("b")
    with pytest.raises(InputError, match="cycle"):
        operator_graph([a, b], [(a, b), (b, a)])
    with pytest.raises(InputError, match="twice"):
        operator_graph([a, node("a", hidden=64)], [])


def test_a_curve_of_enough_pieces_goes_through_its_points() -> None:
    points = [(1, 10.0), (2, 6.0), (4, 5.0), (8, 2.0)]
    curve = fit_curve(points, 3)
    assert [curve.at(n) for n, _ in points] == pytest.approx([10, 6, 5, 2], rel=0.25)
    exact = fit_curve([(n, 0.5 + 8 / n) for n in (1, 2, 4, 8)], 1)
    assert exact.at(3) == pytest.approx(0.5 + 8 / 3)
    two = fit_curve([(n, 0.5 + 8 / n if n <= 4 else 2.0 + 2 / n) for n in (1, 2, 4, 8, 16)], 2)
    assert two.at(16) == pytest.approx(2.125, rel=0.02)
    assert fit_curve([(2, 3.0)], 2).at(4) == 3.0


@pytest.mark.parametrize("points", [[], [(1, 0.0)], [(1, -1.0)], [(1, float("inf"))], [(1, 1.0), (1, 2.0)]])
def test_bad_points_are_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(InputError):
        fit_curve(points, 2)
