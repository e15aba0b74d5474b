import xml.etree.ElementTree as ElementTree

from solver_plan.kinds import kind_named
from solver_plan.report.wavefront_gantt import MOST_ROWS, gantt_svg
from tests.wavefront.wavefront_problems import component, piece, plan, problem

MADE = problem([component("a", task="<caption>"), component("b", task="speech")])
PLAN = plan(piece("a", (0, 2), [0, 1, 3, 2], 0, 3), piece("b", (0, 2), [0, 2], 3, 8))


def test_the_chart_is_well_formed_and_shows_every_slice_and_task() -> None:
    root = ElementTree.fromstring(gantt_svg(PLAN, MADE))
    titles = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3  # a on devices 0 to 3 in one, b on 0 and 2 in two
    assert sum(text.startswith("b, layers 0 to 1") for text in titles) == 2
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<caption>" in words
    assert "speech" in words


def test_the_times_are_round_and_inside() -> None:
    root = ElementTree.fromstring(gantt_svg(PLAN, MADE))
    top = [each for each in root.iter("{http://www.w3.org/2000/svg}text") if each.get("y") == "20"]
    assert [each.text for each in top] == ["0 ms", "1", "2", "3", "4", "5", "6", "7", "8"]
    assert all(float(each.get("x", "nan")) <= float(root.get("width", "0")) - 20 for each in top)


def test_the_kind_draws_it() -> None:
    drawn = kind_named("wavefront").picture(PLAN, MADE)
    assert drawn is not None
    assert drawn.startswith("<svg")


def test_a_plan_that_takes_no_time_is_drawn() -> None:
    root = ElementTree.fromstring(gantt_svg(plan(piece("a", (0, 2), [0], 0, 0), piece("b", (0, 2), [1], 0, 5e-324))))
    assert "nan" not in ElementTree.tostring(root, encoding="unicode")
    assert len(list(root.iter("{http://www.w3.org/2000/svg}title"))) == 1  # b, however short


def test_devices_beyond_the_most_are_counted() -> None:
    drawn = gantt_svg(plan(piece("a", (0, 2), [0, 1, 10**9], 0, 3)))
    root = ElementTree.fromstring(drawn)
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert f"… and {10**9 + 1 - MOST_ROWS} more devices" in words
    assert float(root.get("height", "nan")) < 20 * MOST_ROWS
