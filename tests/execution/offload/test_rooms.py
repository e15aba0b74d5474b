"""Room on the host: what the timeline asks for, what is taken, and how pieces of it are given out."""

import dataclasses
import random

import pytest
import torch

from solver_plan.execution.offload.arena import Arena
from solver_plan.execution.offload.clipping import HISTORY, Speculation
from solver_plan.execution.offload.layers import LANES, bind, cut
from solver_plan.execution.offload.optimizer import OffloadOptimizer
from solver_plan.execution.offload.rooms import most_held, planned_rooms
from solver_plan.execution.offload.training import planned_host_bytes
from solver_plan.offload.plan import Place
from solver_plan.offload.problem import BytesPerParameter
from tests.execution.offload.offload_models import plan_of, problem_of, unequal


def test_the_most_that_is_held_is_counted_around_the_period() -> None:
    assert most_held([(0, 4, 1.0), (2, 6, 2.0), (6, 8, 5.0)], 10) == 5
    assert most_held([(0, 4, 1.0), (2, 6, 2.0), (5, 8, 5.0)], 10) == 7
    # from 8 to 13 is until 3 of the next period; from 0 to 25 is two of them always and a third until 5
    assert most_held([(8, 13, 1.0), (1, 2, 2.0)], 10) == 3
    assert most_held([(0, 25, 1.0)], 10) == 3
    assert most_held([], 10) == 0
    assert most_held([(0, 0, 4.0), (0, 0, 2.0)], 0) == 6


def test_rooms_are_those_of_the_timeline() -> None:
    layers = unequal().layers()
    speculative, clipped = problem_of(layers), problem_of(layers, clip=True)
    parameters = sum(layer.parameters for layer in speculative.layers)
    rooms = planned_rooms(speculative, plan_of(speculative, "cpu"))
    assert rooms.state == parameters
    # all but what is updated after the last backward, which is the embedding's
    assert 0 < rooms.undo < parameters
    assert planned_rooms(speculative, plan_of(speculative, "cpu"), speculate=False).undo == 0
    waiting = planned_rooms(clipped, plan_of(clipped, "cpu"))
    assert waiting.undo == 0
    # updates wait: gradients of nearly all layers are held
    assert waiting.gradients > parameters > rooms.gradients
    on_device = planned_rooms(speculative, plan_of(speculative, "gpu"))
    assert (on_device.state, on_device.gradients, on_device.weights, on_device.undo) == (0, 0, 0, 0)


def test_an_arena_gives_out_disjoint_pieces_and_joins_them_again() -> None:
    draws = random.Random(0)
    arena = Arena(torch.zeros(64 * 64, dtype=torch.uint8))
    held: list[torch.Tensor] = []
    refused = 0
    for _ in range(500):
        if held and draws.random() < 0.5:
            piece = held.pop(draws.randrange(len(held)))
            piece.fill_(0)
            arena.give_back(piece)
        else:
            piece = arena.take(draws.randrange(1, 700))
            if piece is None:
                refused += 1
                continue
            assert piece.numel() == 0 or int(piece.max()) == 0  # nobody else writes there
            piece.fill_(1)
            held.append(piece)
    assert refused > 0
    for piece in held:
        arena.give_back(piece)
    assert arena.take(64 * 64) is not None
    assert arena.take(1) is None
    assert arena.take(0) is not None


@pytest.mark.parametrize("count", [1, 3, 8, 1000])
def test_chunks_cover_every_parameter_and_cut_at_whole_vectors(count: int) -> None:
    model = unequal()
    problem = problem_of(model.layers())
    bound = bind(problem, plan_of(problem, "cpu"), model.layers(), [{"params": list(model.parameters())}])
    for layer in bound:
        chunks = cut(layer.slots, count)
        assert len(chunks) <= count
        assert [chunk.number for chunk in chunks] == sorted({chunk.number for chunk in chunks})
        covered = [0] * len(layer.slots)
        for chunk in chunks:
            for piece in chunk.pieces:
                assert piece.first == covered[piece.slot]
                covered[piece.slot] = piece.end
                assert piece.end % LANES == 0 or piece.end == layer.slots[piece.slot].count
        assert covered == [slot.count for slot in layer.slots]
        sizes = [sum(piece.end - piece.first for piece in chunk.pieces) for chunk in chunks]
        assert max(sizes) <= sum(sizes) / count + 2 * LANES * len(layer.slots) + 1


def test_speculation_stops_where_it_is_often_wrong_and_starts_again() -> None:
    speculation = Speculation(0.25)
    for number in range(HISTORY):
        speculation.record(number % 4 == 0)
    assert speculation.on  # a quarter is not more than a quarter
    speculation.record(True)
    assert speculation.on  # the oldest wrong one is out of sight
    speculation.record(True)
    assert not speculation.on
    for _ in range(HISTORY):
        speculation.record(False)
    assert speculation.on


@pytest.mark.parametrize("places", [("cpu",), ("gpu", "cpu", "gpu_streamed", "cpu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_memory_is_what_the_plan_says(places: tuple[Place, ...], dtype: torch.dtype) -> None:
    layers = {f"layer{index}": torch.nn.Linear(300, 700).to(dtype) for index in range(5)}
    parameters = [parameter for layer in layers.values() for parameter in layer.parameters()]
    described = problem_of(layers)
    width = parameters[0].element_size()
    problem = dataclasses.replace(
        described, bytes_per_parameter=BytesPerParameter(gradient=width, weight=width, optimizer_state=12)
    )
    plan = plan_of(problem, *places)
    optimizer = OffloadOptimizer(parameters, problem=problem, plan=plan, layers=layers)
    assert optimizer.report().host_bytes == pytest.approx(planned_host_bytes(problem, plan), rel=0.05)
    optimizer.close()
