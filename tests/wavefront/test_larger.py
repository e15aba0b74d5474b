import dataclasses

from solver_plan.documents.fields import MOST_DEVICES
from solver_plan.wavefront.kind import WAVEFRONT
from solver_plan.wavefront.problem import MOST_BYTES
from tests.wavefront.wavefront_problems import component, problem


def changes(devices: int, per_node: int, memory: int | None) -> list[str]:
    assert WAVEFRONT.larger is not None
    made = problem([component("a")], devices=devices, per_node=per_node, memory=memory)
    larger = WAVEFRONT.larger(made)
    assert all(dataclasses.replace(each.problem, cluster=made.cluster) == made for each in larger)
    return [each.change for each in larger]


def test_a_device_on_one_node_a_node_on_several_and_memory_where_it_limits() -> None:
    assert changes(4, 4, None) == ["1 device more (5)"]
    assert changes(4, 2, 1000) == ["1 GiB more on each device", "1 node more (6 devices)"]


def test_what_no_document_can_state_is_left_out() -> None:
    assert changes(MOST_DEVICES, 2, MOST_BYTES) == []
    assert changes(MOST_DEVICES, MOST_DEVICES, 1000) == ["1 GiB more on each device"]
