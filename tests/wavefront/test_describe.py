import pytest

from solver_plan.wavefront.describe import describe, describe_simulation
from solver_plan.wavefront.plan import WavefrontPlan
from tests.wavefront.wavefront_problems import component, piece, plan, problem

MADE = problem([component("a"), component("b")], [("a", "b")])


def test_a_valid_plan_is_shown_with_its_idle_time() -> None:
    text = describe(plan(piece("a", (0, 2), [0], 0, 8), piece("b", (0, 2), [0], 8, 16)), MADE)
    assert "idle: no mode that fits" not in text
    assert "busy" in text


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (plan(piece("x", (0, 2), [0], 0, 8)), "found 'x'; it is the name of a component"),
        (plan(piece("a", (0, 2), [0], 0, 8)), "b: found no slice for layers [0, 2)"),
        (plan(piece("a", (0, 2), [9], 0, 8)), "devices are 0 to 3"),
        (plan(piece("a", (0, 2), [0], 0, 0), piece("b", (0, 2), [0], 0, 0)), "it takes 0 ms"),
    ],
)
def test_a_plan_that_is_not_valid_is_shown_as_far_as_it_goes(made: WavefrontPlan, says: str) -> None:
    text = describe(made, MADE)
    assert "start (ms)" in text
    assert says in text
    assert "busy" not in text


def test_names_cannot_reach_the_terminal() -> None:
    odd = "a\n\x1b[31m"
    named = problem([component(odd)])
    made = plan(piece(odd, (0, 2), [0], 0, 8))
    assert "\x1b" not in describe(made, named) + describe_simulation(named, made)
    assert "\x1b" not in describe(made, MADE)
