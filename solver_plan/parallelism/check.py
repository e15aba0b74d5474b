"""Check of a plan against its problem, independent of every solver.

Each rule of `documents.md` is one function that yields a line for each violation: place, value found, rule.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

from solver_plan.documents.fields import LARGEST_NUMBER
from solver_plan.errors import InvalidPlanError
from solver_plan.parallelism import check_full
from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.costs import Evaluation, evaluate
from solver_plan.parallelism.plan import ParallelismPlan, Stage
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.parallelism.schedule import group_ends, orders_of, require_few_actions

RELATIVE_TOLERANCE = 1e-6
"""To which times of a plan must agree with the recomputed ones."""
RECOMPUTED = ("closed-form:", "lp:", "milp:")
"""Sources of a bound that can be confirmed without the solver that gave it."""
ROUNDING_BYTES = 0.01
"""Sizes are whole bytes or fractions that the problem states: less than this is floating-point error."""


def check(problem: ParallelismProblem, plan: ParallelismPlan) -> tuple[str, ...]:
    """Return every violation of a plan, one line each; nothing for a valid plan."""
    return _checked(problem, plan)[0]


def evaluate_checked(problem: ParallelismProblem, plan: ParallelismPlan) -> Evaluation:
    """Return what a valid plan costs. Raises `InvalidPlanError` with every violation otherwise."""
    violations, evaluation = _checked(problem, plan)
    if evaluation is None or violations:
        raise InvalidPlanError(violations)
    return evaluation


def check_structure(problem: ParallelismProblem, plan: ParallelismPlan) -> tuple[str, ...]:
    """Return the violations that leave a plan without a price: it is no division of this model on this cluster."""
    structure = (
        *_micro_batches(problem, plan),
        *_operators(problem, plan),
        *_devices(problem, plan),
        *_layouts(problem, plan),
        *_recompute(problem, plan),
        *_actions(problem, plan),
        *_schedule(problem, plan),
        *check_full.same_layout(problem, plan.stages),
    )
    if not structure and problem.cost_model == "full":
        structure = (*check_full.placement(problem, plan), *check_full.schedule(problem, plan))
    return structure


def _checked(problem: ParallelismProblem, plan: ParallelismPlan) -> tuple[tuple[str, ...], Evaluation | None]:
    structure = check_structure(problem, plan)
    if structure:
        return structure, None
    try:
        evaluation = evaluate(problem, plan)
    except InvalidPlanError as error:
        return error.violations, None
    if not evaluation.iteration_ms <= LARGEST_NUMBER:
        return (f"iteration_ms: {evaluation.iteration_ms:.3g} ms, times go up to {LARGEST_NUMBER:g}",), None
    violations = (
        *(_playable(plan, evaluation) if problem.cost_model == "aceso" else ()),  # full has played it already
        *_memory(problem, plan, evaluation),
        *_predicted(problem, plan, evaluation),
        *_bound(problem, plan, evaluation),
    )
    return violations, evaluation


def _micro_batches(problem: ParallelismProblem, plan: ParallelismPlan) -> Iterator[str]:
    if plan.micro_batch_size * plan.micro_batches != problem.global_batch:
        yield (
            f"micro_batches: {plan.micro_batches} micro-batches of {plan.micro_batch_size} are not the global batch "
            f"of {problem.global_batch}"
        )
    allowed = problem.space.micro_batch_sizes
    if allowed is not None and plan.micro_batch_size not in allowed:
        yield f"micro_batch_size: {plan.micro_batch_size} is not one of {list(allowed)}"


def _operators(problem: ParallelismProblem, plan: ParallelismPlan) -> Iterator[str]:
    expected = 0
    for index, stage in enumerate(plan.stages):
        if stage.operators[0] != expected:
            yield f"stages[{index}].operators: starts at {stage.operators[0]}, the stage before ended at {expected}"
        expected = stage.operators[1]
    if expected != len(problem.operators):
        yield f"stages[{len(plan.stages) - 1}].operators: ends at {expected}, the chain has {len(problem.operators)}"
    limit = problem.space.max_stages
    if limit is not None and len(plan.stages) > limit:
        yield f"stages: {len(plan.stages)} stages, at most {limit} are allowed"


def _devices(problem: ParallelismProblem, plan: ParallelismPlan) -> Iterator[str]:
    cluster, space = problem.cluster, problem.space
    uses = Counter(device for stage in plan.stages for device in stage.devices)
    shared = plan.schedule is not None
    for index, stage in enumerate(plan.stages):
        place = f"stages[{index}].devices"
        outside = [device for device in stage.devices if device >= cluster.devices]
        if outside:
            yield f"{place}: device {outside[0]} does not exist, the cluster has {cluster.devices}"
            continue
        if len(set(stage.devices)) < len(stage.devices):
            yield f"{place}: a device stands twice"
        elif not shared and any(uses[device] > 1 for device in stage.devices):
            yield f"{place}: shares a device with another stage, which needs a schedule"
        if space.device_counts is not None and len(stage.devices) not in space.device_counts:
            yield f"{place}: {len(stage.devices)} devices, a stage has one of {list(space.device_counts)}"
        nodes = {device // cluster.devices_per_node for device in stage.devices}
        if len(nodes) > 1 and not space.cross_node_stages:
            yield f"{place}: lies in nodes {sorted(nodes)}, a stage must stay within one"
    if space.device_order == "rank":
        # stages that share devices lie where the first of them does
        groups = dict.fromkeys(stage.devices for stage in plan.stages) if shared else [s.devices for s in plan.stages]
        order = [device for devices in groups for device in devices]
        broken = next((at for at, (one, two) in enumerate(itertools.pairwise(order)) if one >= two), None)
        if broken is not None:
            yield f"stages: device {order[broken]} comes before {order[broken + 1]}, devices are in rank order"
        for index, stage in enumerate(plan.stages):
            if stage.devices != tuple(range(stage.devices[0], stage.devices[0] + len(stage.devices))):
                yield f"stages[{index}].devices: {list(stage.devices)} are not in one piece"
    if space.use_all_devices and len([d for d in uses if d < cluster.devices]) < cluster.devices:
        unused = next(device for device in range(cluster.devices) if device not in uses)
        yield f"stages: device {unused} is not used, all must be"


def _layouts(problem: ParallelismProblem, plan: ParallelismPlan) -> Iterator[str]:
    for index, stage in enumerate(plan.stages):
        place = f"stages[{index}].layout"
        expected = stage.operators[0]
        for layout in stage.layout:
            if layout.operators[0] != expected:
                yield f"{place}: starts at operator {layout.operators[0]}, expected {expected}"
            expected = layout.operators[1]
            if layout.devices != len(stage.devices):
                yield (
                    f"{place}: tensor parallel {layout.tensor_parallel} x data parallel {layout.data_parallel} need "
                    f"{layout.devices} devices, the stage has {len(stage.devices)}"
                )
            if plan.micro_batch_size % layout.data_parallel:
                yield (
                    f"{place}: data parallel degree {layout.data_parallel} does not divide the micro-batch of "
                    f"{plan.micro_batch_size}"
                )
            if problem.space.partitions is not None and layout.partition not in problem.space.partitions:
                yield f"{place}: partition {layout.partition} is not one of {list(problem.space.partitions)}"
        if expected != stage.operators[1]:
            yield f"{place}: ends at operator {expected}, the stage at {stage.operators[1]}"
        choices = {(layout.tensor_parallel, layout.data_parallel, layout.partition) for layout in stage.layout}
        if problem.space.layout == "stage" and len(choices) > 1:
            yield f"{place}: {len(choices)} layouts, a stage has one"
        if stage.sharding not in problem.space.sharding:
            yield f"stages[{index}].sharding: {stage.sharding} is not one of {list(problem.space.sharding)}"


def _recompute(problem: ParallelismProblem, plan: ParallelismPlan) -> Iterator[str]:
    for index, stage in enumerate(plan.stages):
        place = f"stages[{index}].recompute"
        before = stage.operators[0]
        for first, end in stage.recompute:
            if first < before or end > stage.operators[1]:
                yield f"{place}: [{first}, {end}) overlaps, is out of order or lies outside the stage"
            before = end
        if problem.space.recompute == "none" and stage.recompute:
            yield f"{place}: recomputation is not allowed"
        if problem.space.recompute == "block":
            yield from _whole_blocks(problem, place, stage)


def _whole_blocks(problem: ParallelismProblem, place: str, stage: Stage) -> Iterator[str]:
    first_of_stage, end_of_stage = stage.operators
    recomputed = {
        operator
        for first, end in stage.recompute
        for operator in range(max(first, first_of_stage), min(end, end_of_stage, len(problem.operators)))
    }
    for first, end in block_ranges(problem):
        part = range(max(first, stage.operators[0]), min(end, stage.operators[1]))
        marked = [operator for operator in part if operator in recomputed]
        if marked and len(marked) < len(part):
            yield f"{place}: only {len(marked)} operators of the block [{first}, {end}), whole blocks are recomputed"


def _actions(problem: ParallelismProblem, plan: ParallelismPlan) -> Iterator[str]:
    """An iteration can be played, where it must be: under `aceso` 1F1B is priced by a formula."""
    if problem.cost_model == "full" or plan.schedule is not None:
        try:
            require_few_actions(plan)
        except InvalidPlanError as error:
            yield from error.violations


def _schedule(problem: ParallelismProblem, plan: ParallelismPlan) -> Iterator[str]:
    """Every stage runs each micro-batch forward and backward once, on the devices of one group."""
    if plan.schedule is None:
        return
    allowed = problem.space.virtual_stages
    sharing = Counter(stage.devices for stage in plan.stages)
    groups = sorted(sharing)
    for group in groups:
        if sharing[group] not in allowed:
            yield (
                f"stages: {sharing[group]} of them share devices {list(group)}, the number of stages of a group is one "
                f"of {list(allowed)} (space.virtual_stages)"
            )
    for group, other in itertools.combinations(groups, 2):
        if set(group) & set(other):
            yield f"schedule.orders: devices {list(group)} and {list(other)} overlap, groups are equal or apart"
            return
    orders = plan.schedule.orders
    if len(orders) != len(groups):
        yield f"schedule.orders: {len(orders)} lists, the stages have {len(groups)} groups of devices"
        return
    home: dict[int, int] = {}
    seen: Counter[tuple[int, str, int]] = Counter()
    for number, order in enumerate(orders):
        for action in order:
            kind = next(letter for letter in "FBIW" if letter in action)
            stage, micro_batch = (int(part) for part in action.split(kind))
            if stage >= len(plan.stages) or micro_batch >= plan.micro_batches:
                yield f"schedule.orders[{number}]: {action} names a stage or micro-batch that does not exist"
                return
            if home.setdefault(stage, number) != number:
                yield f"schedule.orders[{number}]: stage {stage} stands in two lists"
                return
            seen[stage, kind, micro_batch] += 1
    for stage, micro_batch in itertools.product(range(len(plan.stages)), range(plan.micro_batches)):
        counts = tuple(seen[stage, kind, micro_batch] for kind in "FBIW")
        if counts not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            yield (
                f"schedule.orders: stage {stage}, micro-batch {micro_batch} has {counts} of F, B, I, W; "
                "one F and either one B or one I and one W are needed"
            )
            return
    if len({stage.devices for stage in plan.stages}) < len(plan.stages):
        for first, second in itertools.combinations(range(len(plan.stages)), 2):
            together = plan.stages[first].devices == plan.stages[second].devices
            if together != (home[first] == home[second]):
                yield f"schedule.orders: stages {first} and {second} share a list if and only if they share devices"


def _playable(plan: ParallelismPlan, evaluation: Evaluation) -> Iterator[str]:
    """The lists of actions can be worked through: nothing waits for what stands behind it."""
    if plan.schedule is None:
        return
    try:
        group_ends([stage.durations for stage in evaluation.stages], orders_of(plan)[1])
    except InvalidPlanError as error:
        yield from error.violations


def _memory(problem: ParallelismProblem, plan: ParallelismPlan, evaluation: Evaluation) -> Iterator[str]:
    limit = problem.cluster.usable_bytes_per_device
    for index, cost in enumerate(evaluation.stages):
        if cost.memory_bytes > limit + ROUNDING_BYTES:
            yield (
                f"stages[{index}]: needs {cost.memory_bytes:.0f} bytes on each device, {limit} are there: "
                f"{(cost.memory_bytes - limit) / 2**20:.2f} MB too many"
            )


def _predicted(problem: ParallelismProblem, plan: ParallelismPlan, evaluation: Evaluation) -> Iterator[str]:
    if plan.certificate is not None and _differ(plan.certificate.objective, evaluation.iteration_ms):
        yield f"certificate.objective: {plan.certificate.objective!r}, recomputed {evaluation.iteration_ms!r}"
    predicted = plan.predicted
    if predicted is None:
        return
    if _differ(predicted.iteration_ms, evaluation.iteration_ms):
        yield f"predicted.iteration_ms: {predicted.iteration_ms!r}, recomputed {evaluation.iteration_ms!r}"
    if len(predicted.stage_ms) != len(plan.stages) or len(predicted.stage_memory_bytes) != len(plan.stages):
        yield f"predicted: numbers for {len(predicted.stage_ms)} stages, the plan has {len(plan.stages)}"
        return
    for index, (stage, cost) in enumerate(zip(plan.stages, evaluation.stages, strict=True)):
        if _differ(predicted.stage_ms[index], cost.stage_ms):
            yield f"predicted.stage_ms[{index}]: {predicted.stage_ms[index]!r}, recomputed {cost.stage_ms!r}"
        # every size of an operator is rounded to a byte, and counted once for each micro-batch in flight or state
        copies = len(plan.stages) - index + problem.state_bytes_per_weight_byte
        copies = max(copies, plan.micro_batches) if problem.cost_model == "full" else copies
        tolerance = (stage.operators[1] - stage.operators[0] + 1) * copies
        stated = predicted.stage_memory_bytes[index]
        if abs(stated - cost.memory_bytes) > tolerance:
            yield f"predicted.stage_memory_bytes[{index}]: {stated}, recomputed {cost.memory_bytes:.0f}"


def _bound(problem: ParallelismProblem, plan: ParallelismPlan, evaluation: Evaluation) -> Iterator[str]:
    """The bound is one: not above the plan, and computed again where it is said to come from a closed form or an LP."""
    certificate = plan.certificate
    if certificate is None or certificate.bound is None:
        return
    if certificate.bound > evaluation.iteration_ms * (1 + RELATIVE_TOLERANCE):
        yield f"certificate.bound: {certificate.bound!r}, but this plan takes {evaluation.iteration_ms!r}"
    elif (certificate.bound_from or "").startswith(RECOMPUTED):
        # numpy is slow to load, and most plans need none
        from solver_plan.parallelism.bounds import MARGIN, no_pipeline_below, work_bound_ms

        work_bound = work_bound_ms(problem)
        if work_bound is not None and certificate.bound <= work_bound * (1 + MARGIN):
            return
        if not no_pipeline_below(problem, certificate.bound):
            yield f"certificate.bound: {certificate.bound!r} by {certificate.bound_from} is not confirmed"


def _differ(stated: float, recomputed: float) -> bool:
    return abs(stated - recomputed) > RELATIVE_TOLERANCE * max(abs(recomputed), 1e-9)
