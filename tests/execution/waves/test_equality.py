"""Losses and gradients of three steps equal those of one process, for every way to lay out several tasks."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

pytest.importorskip("torch")

from solver_plan.execution.launch import run_local
from solver_plan.execution.waves.compile import compile_waves
from solver_plan.execution.waves.model import MultitaskModel
from solver_plan.execution.waves.program import WaveProgram
from solver_plan.wavefront.problem import Phases
from tests.execution.equality import Trained, difference
from tests.execution.waves.cases import Piece, component, plan, problem
from tests.execution.waves.equality import alone, together
from tests.execution.waves.small_models import WEIGHTS, model

TOLERANCE = 1e-12
RANKS = 4


@dataclass(frozen=True)
class Case:
    """Components with the names of their weights, edges, and slices: component, layers, devices, mode."""

    components: Mapping[str, str]
    slices: Sequence[Piece]
    edges: Sequence[tuple[str, str]] = ()
    frozen: Sequence[str] = ()
    absent: Sequence[str] = ()
    phases: Phases = "fused"
    backwards: Sequence[int] = field(default=())

    def model(self) -> MultitaskModel:
        return model(self.components, self.frozen)

    def program(self) -> WaveProgram:
        components = [
            component(name, len(WEIGHTS[weights]), weights=weights, frozen=name in self.frozen)
            for name, weights in self.components.items()
        ]
        made_for = problem(components, self.edges, phases=self.phases)
        compiled = compile_waves(made_for, plan(made_for, self.slices, self.backwards))
        # ranks that a small plan leaves idle join the world all the same
        return dataclasses.replace(compiled, world_size=RANKS)


CAPTION = {"caption/image": "image", "caption/text": "text"}
CAPTION_EDGES = [("caption/image", "caption/text")]
BOTH = {"both/image": "image", "both/sound": "sound", "both/text": "text"}
BOTH_EDGES = [("both/image", "both/text"), ("both/sound", "both/text")]
PAIR = {"pair/image": "image-pair", "pair/sound": "sound-pair"}
THREE = {
    "a/image": "image-pair",
    "a/sound": "sound-pair",
    "b/sound": "sound-pair",
    "b/depth": "depth-pair",
    "c/image": "image",
    "c/text": "text",
}
THREE_SLICES: list[Piece] = [
    ("a/image", (0, 2), [0], 0),
    ("b/sound", (0, 2), [1], 0),
    ("c/image", (0, 3), [2, 3], 1),
    ("a/sound", (0, 1), [0, 1], 1),
    ("c/text", (0, 3), [2], 0),
    ("a/sound", (1, 2), [3], 0),
    ("b/depth", (0, 2), [0, 1], 1),
]
FOUR = {
    "three tasks with shared encoders": Case(THREE, THREE_SLICES, [("c/image", "c/text")]),
    "one of three tasks absent": Case(THREE, THREE_SLICES, [("c/image", "c/text")], absent=["a", "c"]),
    "a slice that grows from 1 to 2 devices": Case(
        {"t/text": "text"}, [("t/text", (0, 1), [0], 0), ("t/text", (1, 3), [0, 1], 1)]
    ),
    "a slice that grows from 1 to 4 and shrinks to 2 others": Case(
        {"t/text": "text"}, [("t/text", (0, 1), [3], 0), ("t/text", (1, 2), range(4), 2), ("t/text", (2, 3), [1, 2], 1)]
    ),
    "fan-in of two encoders into a text model": Case(
        BOTH,
        [("both/image", (0, 3), [0, 1], 1), ("both/sound", (0, 3), [2], 0), ("both/text", (0, 3), [1, 3], 1)],
        BOTH_EDGES,
    ),
    "fan-in in place": Case(
        BOTH,
        [("both/image", (0, 3), [0, 1], 1), ("both/sound", (0, 3), [0, 1], 1), ("both/text", (0, 3), [0, 1], 1)],
        BOTH_EDGES,
    ),
    "frozen encoder": Case(
        BOTH,
        [("both/image", (0, 3), [0, 1], 1), ("both/sound", (0, 3), [2], 0), ("both/text", (0, 3), [1, 3], 1)],
        BOTH_EDGES,
        frozen=["both/image"],
    ),
    "weights frozen in one task and trained in another": Case(
        {
            **CAPTION,
            "pair/image": "image-pair",
            "pair/sound": "sound-pair",
            "other/image": "image",
            "other/text": "text",
        },
        [
            ("caption/image", (0, 3), [0], 0),
            ("other/image", (0, 3), [1], 0),
            ("pair/image", (0, 2), [2], 0),
            ("pair/sound", (0, 2), [3], 0),
            ("caption/text", (0, 3), [0, 2], 1),
            ("other/text", (0, 3), [1, 3], 1),
        ],
        [*CAPTION_EDGES, ("other/image", "other/text")],
        frozen=["caption/image"],
        absent=["other"],
    ),
    "fan-out of an encoder to two text models": Case(
        {"t/image": "image", "t/text": "text", "t/words": "text"},
        [("t/image", (0, 3), [0, 1], 1), ("t/text", (0, 3), [1], 0), ("t/words", (0, 3), [2, 3], 1)],
        [("t/image", "t/text"), ("t/image", "t/words")],
    ),
    "a contrastive loss over replicas": Case(
        PAIR, [("pair/image", (0, 2), [0], 0), ("pair/sound", (0, 2), range(4), 2)]
    ),
    "a contrastive loss on one rank": Case(PAIR, [("pair/image", (0, 2), [0, 1], 1), ("pair/sound", (0, 2), [3], 0)]),
    "phases of their own": Case(
        {**CAPTION, **PAIR},
        [
            ("caption/image", (0, 3), [0], 0),
            ("pair/image", (0, 2), [1, 2], 1),
            ("caption/text", (0, 2), [0, 1], 1),
            ("pair/sound", (0, 2), [2, 3], 1),
            ("caption/text", (2, 3), [3], 0),
        ],
        CAPTION_EDGES,
        phases="forward_backward",
        backwards=[3, 4, 1, 2, 0],
    ),
    "tensor parallel": Case(
        CAPTION,
        [
            ("caption/image", (0, 3), [0, 1], 3),
            ("caption/text", (0, 2), range(4), 4),
            ("caption/text", (2, 3), [2, 3], 3),
        ],
        CAPTION_EDGES,
    ),
    "the same weights in tensor ranks here and replicas there": Case(
        {"a/text": "text", "b/text": "text", "c/text": "text"},
        [("a/text", (0, 3), [0, 1], 3), ("b/text", (0, 3), [2, 3], 1), ("c/text", (0, 3), [1, 2], 3)],
        absent=["b"],
    ),
    "the same weights in tensor ranks that overlap": Case(
        {"a/text": "text", "b/text": "text", "c/text": "text"},
        [("a/text", (0, 3), [0, 1], 3), ("b/text", (0, 3), [0, 2], 3), ("c/text", (0, 3), [1, 2], 3)],
        absent=["b", "a"],
    ),
    "weights used twice on one rank": Case(
        {"a/text": "text", "b/text": "text"}, [("a/text", (0, 3), [0], 0), ("b/text", (0, 3), [0, 1], 1)]
    ),
}


def _train(programs: Mapping[str, WaveProgram], rank: int) -> dict[str, Trained]:
    return {name: together(program, FOUR[name].model(), FOUR[name].absent) for name, program in programs.items()}


def _references(programs: Mapping[str, WaveProgram], rank: int) -> dict[str, Trained]:
    return {name: alone(FOUR[name].model(), program, FOUR[name].absent) for name, program in programs.items()}


@pytest.fixture(scope="module")
def on_four() -> dict[str, float]:
    programs = {name: case.program() for name, case in FOUR.items()}
    ranks = run_local(partial(_train, programs), RANKS, timeout_s=240, group_timeout_s=60)
    (references,) = run_local(partial(_references, programs), 1)
    return {name: difference(references[name], [rank[name] for rank in ranks]) for name in FOUR}


@pytest.mark.parametrize("name", FOUR)
def test_on_four_ranks(name: str, on_four: dict[str, float]) -> None:
    assert on_four[name] <= TOLERANCE


def test_the_comparison_can_fail() -> None:
    case = FOUR["frozen encoder"]
    program = case.program()
    reference = alone(case.model(), program)
    assert difference(reference, [reference]) == 0
    other = alone(model(case.components), program)
    assert any(tensors for name, tensors in other.gradients[0].items() if name.startswith("image"))
    assert not any(tensors for name, tensors in reference.gradients[0].items() if name.startswith("image"))
    spoilt = dataclasses.replace(reference, losses=[loss * (1 + 1e-9) for loss in reference.losses])
    assert difference(reference, [spoilt]) > TOLERANCE
