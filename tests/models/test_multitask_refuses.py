import re
from dataclasses import replace

import pytest

from models.multitask import Task, Tower, graph_of
from models.multitask_clip import multitask_clip
from models.ofasys import ofasys
from solver_plan.errors import InputError

TOWER = Tower(name="t", layers=2, hidden=8, tokens=4)
TASK = Task(name="a", batch=4, stages=((TOWER,),))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": 0}, "batch: found 0"),
        ({"batch": "4"}, "batch: found"),
        ({"batch": 4.5}, "batch: found 4.5"),
        ({"tokens": (0,)}, "sequence: found 0"),
        ({"tokens": (4, 5)}, "found 2 tokens"),
        ({"stages": ()}, "no stage"),
        ({"stages": ((TOWER,), ())}, "a stage without towers"),
        ({"stages": ((TOWER, TOWER),)}, "is in the graph twice"),
        ({"stages": ((replace(TOWER, hidden=0),),)}, "hidden: found 0"),
        ({"stages": ((replace(TOWER, hidden=10**200),),)}, "hidden: found 1"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        graph_of([replace(TASK, **change)])  # type: ignore[arg-type]


def test_no_task_and_a_task_twice_are_refused() -> None:
    with pytest.raises(InputError, match="the operator graph is empty"):
        graph_of([])
    with pytest.raises(InputError, match="is in the graph twice"):
        graph_of([TASK, TASK])
    assert len(graph_of([TASK, replace(TASK, name="b")])) == 4


def test_towers_without_layers_are_refused() -> None:
    for change in ({"layers": 0}, {"feed_forward": 0}):
        with pytest.raises(InputError, match="at least 1 each"):
            replace(TOWER, **change)


@pytest.mark.parametrize("family", [multitask_clip, ofasys])
@pytest.mark.parametrize("tasks", [0, -1, 11])
def test_a_number_of_tasks_that_a_family_has_not_is_refused(family: object, tasks: int) -> None:
    assert callable(family)
    with pytest.raises(InputError, match=f"found {tasks} tasks"):
        family(tasks)
