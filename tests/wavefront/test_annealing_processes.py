from solver_plan.solving import Budget, Clock
from solver_plan.wavefront.heuristics.annealing_processes import AnnealingProcesses, Round
from solver_plan.wavefront.heuristics.baselines import sequential
from solver_plan.wavefront.instance import instance_of
from solver_plan.wavefront.schedule import Schedule, Segment, earliest_times, plan_of, segments_of
from tests.wavefront.wavefront_problems import random_problem

CLOCK = Clock(Budget(time_limit_s=600.0))


def test_rounds_of_both_kinds_come_back() -> None:
    instance = instance_of(random_problem(0, components=4, bandwidth=True))
    schedule = sequential(instance)
    segments = segments_of(schedule, earliest_times(instance, schedule))
    with AnnealingProcesses(instance, 2) as processes:
        processes.begin([Round(schedule, 0.2, 1, 1.0, 0.3), Round(segments, 0.2, 2, 1.0, 0.9)])
        found = processes.results(CLOCK)
    before = plan_of(instance, schedule).predicted
    assert before is not None
    assert len(found) == 2
    assert {type(each.best) for each in found} == {Schedule, list}
    assert all(each.objective <= before.makespan_ms for each in found)
    for each in found:
        if not isinstance(each.best, Schedule):
            assert all(isinstance(segment, Segment) for segment in each.best)


def test_a_process_that_fails_is_left_out() -> None:
    instance = instance_of(random_problem(0, components=4))
    with AnnealingProcesses(instance, 1) as processes:
        for process in processes._processes:
            process.kill()
            process.wait()
        processes.begin([Round(sequential(instance), 0.2, 1, 1.0, 0.3)])
        assert processes.results(CLOCK) == []
