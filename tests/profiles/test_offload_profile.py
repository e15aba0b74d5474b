"""Offload problems from descriptions: layers, parameters, times and room, against what they are made of."""

from dataclasses import replace

import pytest

from models import gpt, llama
from models.transformer import Transformer
from solver_plan.errors import InputError
from solver_plan.profiles.analytic import operator_time
from solver_plan.profiles.cluster import read_cluster, ready_clusters
from solver_plan.profiles.offload import layers_of, offload_menu, profile_offload

A100 = read_cluster("a100_8x80gb")
SMALL = gpt.gpt("small", layers=3, hidden=64, heads=4, sequence=32, vocabulary=128)


def tied(shape: Transformer) -> Transformer:
    return replace(shape, tied_head=True)


def test_layers_are_embedding_blocks_and_head() -> None:
    description = gpt.describe(SMALL)
    layers = layers_of(description)
    assert [name for name, _ in layers] == ["embedding", "layer0", "layer1", "layer2", "head"]
    assert [operator.name for operator in layers[-1][1]] == ["final_norm", "head"]
    assert sum((operators for _, operators in layers), ()) == description.operators


def test_one_block_takes_what_follows_it() -> None:
    layers = layers_of(gpt.describe(replace(SMALL, layers=1)))
    assert [name for name, _ in layers] == ["embedding", "layer0"]
    assert layers[-1][1][-1].name == "head"


def test_parameters_and_times_are_those_of_the_operators() -> None:
    description = gpt.describe(SMALL)
    problem = profile_offload(description, A100, 6, micro_batch=2)
    assert sum(layer.parameters for layer in problem.layers) * 2 == description.weight_bytes
    block = layers_of(description)[1][1]
    times = [operator_time(each.partitions[0], A100, description.data_type, 2, 1) for each in block]
    assert problem.layers[1].forward_ms == pytest.approx(sum(time.forward_ms for time in times))
    assert problem.layers[1].backward_ms == pytest.approx(sum(time.backward_ms for time in times))
    assert problem.accumulation_steps == 3
    assert problem.bytes_per_parameter.optimizer_state == 12


def test_recomputation_lengthens_the_backward_of_blocks_and_leaves_room() -> None:
    description = gpt.gpt3_1_3b()
    plain = profile_offload(description, A100, 4, micro_batch=2)
    again = profile_offload(description, A100, 4, micro_batch=2, recomputation="block")
    assert again.gpu_state_bytes > plain.gpu_state_bytes
    assert again.layers[0] == plain.layers[0]
    for one, other in zip(plain.layers[1:-1], again.layers[1:-1], strict=True):
        assert other.backward_ms == pytest.approx(one.backward_ms + one.forward_ms)


def test_a_tied_head_has_only_its_normalisation() -> None:
    own = profile_offload(gpt.describe(SMALL), A100, 1, micro_batch=1)
    shared = profile_offload(gpt.describe(tied(SMALL)), A100, 1, micro_batch=1)
    assert own.layers[-1].parameters == 64 * 128 + 2 * 64
    assert shared.layers[-1].parameters == 2 * 64
    assert shared.layers[:-1] == own.layers[:-1]


def test_room_is_what_the_memory_leaves() -> None:
    problem = profile_offload(llama.llama3_8b(), A100, 1, micro_batch=1, recomputation="block", staging_bytes=10**10)
    parameters = sum(layer.parameters for layer in problem.layers)
    usable = A100.device.memory_bytes * (1 - A100.device.memory_margin)
    # 2 bytes of weight and 4 of gradient; the rest are activations
    assert 0 < usable - 10**10 - 6 * parameters - problem.gpu_state_bytes < 20e9


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(InputError, match=r"gpt3-175B.*more than A100-SXM4-80GB has"):
        profile_offload(gpt.gpt3_175b(), A100, 1, micro_batch=1)
    with pytest.raises(InputError, match=r"no micro-batch of 1 fits"):
        offload_menu(gpt.gpt3_175b(), A100, 1, micro_batches=[1])
    given = profile_offload(gpt.gpt3_175b(), A100, 1, micro_batch=1, gpu_state_bytes=5)
    assert given.gpu_state_bytes == 5


def test_the_menu_has_what_fits() -> None:
    entries = offload_menu(gpt.gpt3_13b(), A100, 8, micro_batches=[1, 4])
    assert [(entry.micro_batch, entry.recomputation, entry.accumulation_steps) for entry in entries] == [
        (1, "block", 8),
        (4, "block", 2),
    ]
    assert entries[0].gpu_state_bytes > entries[1].gpu_state_bytes
    one = profile_offload(gpt.gpt3_13b(), A100, 8, micro_batch=4, recomputation="block")
    assert entries[1].gpu_state_bytes == one.gpu_state_bytes
    assert entries[1].backward_ms == tuple(layer.backward_ms for layer in one.layers)


def test_hosts_of_ready_clusters() -> None:
    hosts = {name: read_cluster(name).host for name in ready_clusters()}
    assert {name for name, host in hosts.items() if host is not None} == {
        "a100_8x80gb",
        "a100_8nodes_8x80gb",
        "h100_8x80gb",
        "h100_128nodes_8x80gb",
        "h200_8x141gb",
    }
    # the device's update is bound by its memory: 28 bytes a parameter
    rates = profile_offload(gpt.describe(SMALL), A100, 1, micro_batch=1).rates
    assert rates.gpu_update_parameters_per_s == pytest.approx(0.85 * 2039e9 / 28)
