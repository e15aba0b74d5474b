"""A parallelism plan, and its simulation, as tables for a terminal."""

import contextlib

from solver_plan.errors import InvalidPlanError
from solver_plan.parallelism.check import check_structure
from solver_plan.parallelism.costs import Evaluation, evaluate
from solver_plan.parallelism.plan import ParallelismPlan, Stage
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.simulate import Simulation
from solver_plan.report.tables import Cell, table

MEGABYTE = 2**20


def describe(plan: ParallelismPlan, problem: ParallelismProblem | None) -> str:
    """Return the stages of a plan as a table; with the problem, operator names, limits and what binds."""
    evaluation = None
    if problem is not None and not check_structure(problem, plan):  # otherwise `check` says what is wrong
        with contextlib.suppress(InvalidPlanError):
            evaluation = evaluate(problem, plan)
    sharded = any(stage.sharding for stage in plan.stages)
    headers = ["stage", "operators", "devices", "tp", "dp", *(["zero"] if sharded else [])]
    headers += ["recomputed", "ms", "memory (MB)"]
    if problem is not None:
        headers += ["of limit", "first operator"]
    rows = [_row(plan, problem, evaluation, index) for index in range(len(plan.stages))]
    groups = {stage.devices for stage in plan.stages}
    schedule = f", interleaved 1F1B with {len(plan.stages) // len(groups)} stages each" if plan.schedule else ""
    lines = [
        f"micro-batch {plan.micro_batch_size}, {plan.micro_batches} micro-batches, {len(plan.stages)} stages on "
        f"{len({device for group in groups for device in group})} devices{schedule}",
        "",
        table(headers, rows),
    ]
    if evaluation is not None and problem is not None:
        lines += ["", _what_binds(problem, evaluation)]
    return "\n".join(lines)


def _row(
    plan: ParallelismPlan, problem: ParallelismProblem | None, evaluation: Evaluation | None, index: int
) -> list[Cell]:
    stage = plan.stages[index]
    first, end = stage.operators
    recomputed = sum(stop - begin for begin, stop in stage.recompute)
    milliseconds: float | None = None
    memory: float | None = None
    if evaluation is not None:
        milliseconds, memory = evaluation.stages[index].stage_ms, evaluation.stages[index].memory_bytes
    elif plan.predicted is not None and index < len(plan.predicted.stage_ms):
        milliseconds, memory = plan.predicted.stage_ms[index], plan.predicted.stage_memory_bytes[index]
    row: list[Cell] = [
        index,
        f"{first}-{end - 1}",
        _devices(stage),
        _degrees([layout.tensor_parallel for layout in stage.layout]),
        _degrees([layout.data_parallel for layout in stage.layout]),
        *([stage.sharding] if any(one.sharding for one in plan.stages) else []),
        f"{recomputed} of {end - first}",
        milliseconds,
        None if memory is None else f"{memory / MEGABYTE:.1f}",
    ]
    if problem is not None:
        limit = problem.cluster.usable_bytes_per_device
        name = problem.operators[first].name if first < len(problem.operators) else None
        row += [None if memory is None or not limit else f"{memory / limit:.1%}", name]
    return row


def _devices(stage: Stage) -> str:
    first, last = stage.devices[0], stage.devices[-1]
    if stage.devices == tuple(range(first, first + len(stage.devices))):
        return str(first) if first == last else f"{first}-{last}"
    return ",".join(str(device) for device in stage.devices)


def _degrees(degrees: list[int]) -> str:
    distinct = sorted(set(degrees))
    return "/".join(str(degree) for degree in distinct)


def _what_binds(problem: ParallelismProblem, evaluation: Evaluation) -> str:
    times = [stage.stage_ms for stage in evaluation.stages]
    memory = [stage.memory_bytes for stage in evaluation.stages]
    slowest = max(range(len(times)), key=times.__getitem__)
    fullest = max(range(len(memory)), key=memory.__getitem__)
    recompute = sum(stage.recompute_ms for stage in evaluation.stages)
    communication = sum(stage.communication_ms for stage in evaluation.stages)
    limit = problem.cluster.usable_bytes_per_device
    above = _share(times[slowest] * len(times) - sum(times), sum(times))
    free = (limit - memory[fullest]) / MEGABYTE
    margin = problem.cluster.memory_margin
    kept = f", beside {margin:.0%} of the memory that is kept free" if margin else ""
    return (
        f"slowest: stage {slowest}, {times[slowest]:.3f} ms ({above:.1%} above the mean); "
        f"fullest: stage {fullest}, {free:.1f} MB free{kept}\n"
        f"of the stages' time, recomputation {_share(recompute, sum(times)):.1%}, "
        f"communication {_share(communication, sum(times)):.1%}"
    )


def _share(part: float, whole: float) -> float:
    """Return part / whole; 0 where all that is measured takes no time."""
    return part / whole if whole else 0.0


def describe_simulation(simulation: Simulation) -> str:
    """Return what happened when a plan was played."""
    rows: list[list[Cell]] = []
    for number, (devices, busy) in enumerate(zip(simulation.groups, simulation.busy_ms, strict=True)):
        idle = _share(simulation.iteration_ms - busy, simulation.iteration_ms)
        rows.append([number, ",".join(map(str, devices)), busy, f"{idle:.2%}"])
    difference = _share(simulation.formula_ms - simulation.iteration_ms, simulation.iteration_ms)
    once = f", of these {simulation.once_ms:.3f} ms once an iteration" if simulation.once_ms else ""
    return "\n".join(
        [
            f"simulated iteration {simulation.iteration_ms:.3f} ms{once}; formula (N - 1) * slowest + sum "
            f"{simulation.formula_ms:.3f} ms ({difference:+.3%})",
            "",
            table(["group", "devices", "busy (ms)", "idle"], rows),
        ]
    )
