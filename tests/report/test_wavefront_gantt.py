import xml.etree.ElementTree as ElementTree

from solver_plan.kinds import kind_named
from solver_plan.report.wavefront_gantt import gantt_svg, wavefront_page
from tests.wavefront.wavefront_problems import component, piece, plan, problem

MADE = problem([component("a", task="<caption>"), component("b", task="speech")])
PLAN = plan(piece("a", (0, 2), [0, 1, 3, 2], 0, 3), piece("b", (0, 2), [0, 2], 3, 8))


def test_the_chart_is_well_formed_and_shows_every_slice_and_task() -> None:
    root = ElementTree.fromstring(gantt_svg(PLAN, MADE))
    titles = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3  # a on devices 0 to 3 in one, b on 0 and 2 in two
    assert sum(text.startswith("b, layers 0 to 2") for text in titles) == 2
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<caption>" in words
    assert "speech" in words


def test_the_page_names_idle_time() -> None:
    assert "idle for" in wavefront_page(PLAN, MADE)
    assert "idle for" not in wavefront_page(PLAN)


def test_the_kind_draws_it() -> None:
    drawn = kind_named("wavefront").picture(PLAN, MADE)
    assert drawn is not None
    assert drawn.startswith("<svg")
