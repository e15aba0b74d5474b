"""What binds a plan: the memory of which stages, the links between which, and what each costs.

Stages     the same operators on the same devices with 1 GiB more: layouts and recomputation are chosen anew
Edges      the same plan if nothing had to be moved between two stages
Objective  the effect on the whole iteration, which is small where other stages are as slow
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from solver_plan.enlargement import Larger
from solver_plan.parallelism.blocks import block_ranges
from solver_plan.parallelism.choices import Choice, micro_batch
from solver_plan.parallelism.costs import evaluate
from solver_plan.parallelism.drafts import draft_plan
from solver_plan.parallelism.plan import ParallelismPlan, Stage
from solver_plan.parallelism.problem import ParallelismProblem, Profile
from solver_plan.parallelism.recomputation.shape import chain_shape
from solver_plan.parallelism.sources import StageSource, stage_source
from solver_plan.report.tables import Cell, table

GIBIBYTE = 2**30
MEGABYTE = 2**20
LEAST_SHARE = 1e-4
"""Of the iteration: what gains less does not bind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRelief:
    """What 1 GiB more on the devices of one stage, and of no other, saves."""

    stage: int
    free_bytes: float
    recompute_ms: float
    """Of one micro-batch, as planned."""
    saved_ms: float
    """Of one micro-batch."""
    iteration_ms: float
    """Of the whole plan then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeRelief:
    """What a link between two stages costs."""

    behind_stage: int
    """The edge leads from this stage to the next one."""
    between_nodes: bool
    transfer_ms: float
    """Of one micro-batch, on both stages together."""
    iteration_ms: float
    """Of the whole plan if the edge took no time."""


def larger_problems(problem: ParallelismProblem) -> list[Larger[ParallelismProblem]]:
    """Return the problem with 1 GiB more on each device, and with a device more, or a node where there are several.

    Devices may be idle in the latter, so that every plan stays one.
    """
    cluster = problem.cluster
    memory = replace(cluster, memory_bytes_per_device=cluster.memory_bytes_per_device + GIBIBYTE)
    free = replace(problem.space, use_all_devices=False)
    if cluster.nodes == 1:
        more = replace(cluster, devices_per_node=cluster.devices_per_node + 1)
        change = f"1 device more ({more.devices})"
    else:
        more = replace(cluster, nodes=cluster.nodes + 1)
        change = f"1 node more ({more.devices} devices)"
    return [
        Larger(change="1 GiB more on each device", problem=replace(problem, cluster=memory)),
        Larger(change=change, problem=replace(problem, cluster=more, space=free)),
    ]


def stage_reliefs(problem: ParallelismProblem, plan: ParallelismPlan) -> list[StageRelief]:
    """Return, for each stage of a valid plan, what 1 GiB more on its devices saves."""
    evaluation = evaluate(problem, plan)
    limit = problem.cluster.usable_bytes_per_device
    roomier = larger_problems(problem)[0].problem
    source: StageSource | None = None
    found: list[StageRelief] = []
    for index, cost in enumerate(evaluation.stages):
        iteration_ms, stage_ms = evaluation.iteration_ms, cost.stage_ms
        # stages that share devices share their memory, and recompute alike
        if plan.schedule is None and (cost.recompute_ms > 0 or len(plan.stages[index].layout) > 1):
            if source is None:
                source = _source(roomier, plan)
            stage = _with_room(roomier, plan, index, source)
            if stage is not None:
                changed = evaluate(roomier, _with_stage(plan, index, stage))
                if changed.stages[index].stage_ms < stage_ms:
                    iteration_ms, stage_ms = changed.iteration_ms, changed.stages[index].stage_ms
        found.append(
            StageRelief(
                stage=index,
                free_bytes=limit - cost.memory_bytes,
                recompute_ms=float(cost.recompute_ms),
                saved_ms=cost.stage_ms - stage_ms,
                iteration_ms=iteration_ms,
            )
        )
    return found


def _source(problem: ParallelismProblem, plan: ParallelismPlan) -> StageSource:
    shape = chain_shape(problem, block_ranges(problem))
    return stage_source(problem, shape, micro_batch(problem, plan.micro_batch_size), lambda deterministic_seconds: None)


def _with_room(problem: ParallelismProblem, plan: ParallelismPlan, index: int, source: StageSource) -> Stage | None:
    """Return the fastest stage with the operators and devices of one of the plan; None: none was found."""
    stage = plan.stages[index]
    layout = stage.layout[0]
    # one replica shards nothing, and is known by the first way of sharding alone
    sharding = stage.sharding if layout.data_parallel > 1 else min(problem.space.sharding)
    wanted = Choice(layout.tensor_parallel, layout.data_parallel, layout.partition, sharding)
    alike = [(number, one.choice) for number, one in enumerate(source.batch.choices)]
    same_devices = [number for number, choice in alike if choice.devices == wanted.devices]
    same = [number for number, choice in alike if choice == wanted]
    number = same_devices[0] if len(same_devices) == 1 else same[0]
    plain = evaluate(problem, _with_stage(plan, index, replace(stage, recompute=())))
    need_bytes = plain.stages[index].memory_bytes - problem.cluster.usable_bytes_per_device
    behind = len(plan.stages) - 1 - index
    if problem.cost_model == "full":
        behind = min(behind, plan.micro_batches - 1)
    key = (number, *stage.operators, behind)
    draft = source.real(key, need_bytes)[1]
    if draft is None:
        return None
    return replace(draft_plan(problem, plan.micro_batch_size, [draft]).stages[0], devices=stage.devices)


def _with_stage(plan: ParallelismPlan, index: int, stage: Stage) -> ParallelismPlan:
    return replace(plan, stages=(*plan.stages[:index], stage, *plan.stages[index + 1 :]))


def edge_reliefs(problem: ParallelismProblem, plan: ParallelismPlan) -> list[EdgeRelief]:
    """Return, for each pair of neighbouring stages of a valid plan, what moving data between them costs."""
    evaluation = evaluate(problem, plan)
    found: list[EdgeRelief] = []
    for index, (stage, following) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
        free = evaluate(_moving_nothing(problem, following.operators[0]), plan)
        nodes = {device // problem.cluster.devices_per_node for device in (*stage.devices, *following.devices)}
        found.append(
            EdgeRelief(
                behind_stage=index,
                between_nodes=len(nodes) > 1,
                transfer_ms=sum(one.stage_ms for one in evaluation.stages) - sum(one.stage_ms for one in free.stages),
                iteration_ms=free.iteration_ms,
            )
        )
    return found


def _moving_nothing(problem: ParallelismProblem, cut: int) -> ParallelismProblem:
    """Return the problem with nothing to be moved between the operators before and behind a cut."""

    def changed(operator: int, entries: Sequence[Profile]) -> None:
        name = f"operator {operator} at a free edge"
        assert name not in profiles
        profiles[name] = tuple(entries)
        operators[operator] = replace(operators[operator], profile=name)

    operators, profiles = list(problem.operators), dict(problem.profiles)
    before, behind = (problem.profiles[operators[operator].profile] for operator in (cut - 1, cut))
    changed(cut - 1, [replace(entry, output_bytes=0) for entry in before])
    changed(cut, [replace(entry, input_bytes=0) for entry in behind])
    return replace(problem, operators=tuple(operators), profiles=profiles)


def describe_what_binds(problem: ParallelismProblem, plan: ParallelismPlan) -> str:
    """Return what binds a valid plan, as a line and two tables for a terminal."""
    iteration_ms = evaluate(problem, plan).iteration_ms
    stages, edges = stage_reliefs(problem, plan), edge_reliefs(problem, plan)
    lines = [_binding(iteration_ms, stages, edges), "", "With 1 GiB more on the devices of one stage alone:", ""]
    rows: list[list[Cell]] = [
        [one.stage, f"{one.free_bytes / MEGABYTE:.1f}", one.recompute_ms, one.saved_ms, iteration_ms - one.iteration_ms]
        for one in stages
    ]
    lines.append(table(["stage", "free now (MB)", "recomputed (ms)", "saved (ms)", "off the iteration (ms)"], rows))
    if edges:
        lines += ["", "With a link that takes no time between two stages alone:", ""]
        rows = [
            [
                f"{one.behind_stage} and {one.behind_stage + 1}",
                "between nodes" if one.between_nodes else "within a node",
                one.transfer_ms,
                iteration_ms - one.iteration_ms,
            ]
            for one in edges
        ]
        lines.append(table(["stages", "link", "transfers (ms)", "off the iteration (ms)"], rows))
    return "\n".join(lines)


def _binding(iteration_ms: float, stages: Sequence[StageRelief], edges: Sequence[EdgeRelief]) -> str:
    """Return which memory and which link binds most: what the iteration gains from one alone, if anything."""
    memory = min(stages, key=lambda one: (one.iteration_ms, -one.saved_ms))
    words = []
    if iteration_ms - memory.iteration_ms > LEAST_SHARE * iteration_ms:
        words.append(f"memory of stage {memory.stage} (1 GiB: {1 - memory.iteration_ms / iteration_ms:.2%})")
    else:
        words.append("memory of no stage alone")
    if edges:
        link = min(edges, key=lambda one: one.iteration_ms)
        gain_ms = iteration_ms - link.iteration_ms
        if gain_ms > LEAST_SHARE * iteration_ms:
            share = gain_ms / iteration_ms
            words.append(f"link between {link.behind_stage} and {link.behind_stage + 1} ({share:.2%})")
        else:
            words.append("no link alone")
    return "What binds, by what the iteration would gain: " + "; ".join(words)
