"""Export of plans: the configuration of another system, what it cannot be told, and what that costs.

Parallelism plans go to Megatron-LM, torchtitan and DeepSpeed, offload plans to Megatron-LM and DeepSpeed. A plan that a
system cannot carry out as it is is refused, or exported as the nearest configuration, which is priced as a plan of the
same problem: predicted time and memory of what is really run stand beside those of the plan.
"""

from dataclasses import dataclass, replace

from solver_plan.documents import PlanDocument, ProblemDocument, require_same_problem
from solver_plan.errors import InputError, NotExportableError, SolverPlanError
from solver_plan.export.configuration import Configuration
from solver_plan.export.deepspeed import deepspeed_config, deepspeed_notes
from solver_plan.export.layers import LayerChain, layer_chain
from solver_plan.export.losses import Loss, losses_of
from solver_plan.export.megatron import megatron_arguments, megatron_notes
from solver_plan.export.nearest import Priced, nearest
from solver_plan.export.offload import deepspeed_offload, export_offload, megatron_offload
from solver_plan.export.target import MEGATRON, TARGETS, TORCHTITAN, Target
from solver_plan.export.torchtitan import schedule_rows, torchtitan_function, torchtitan_notes
from solver_plan.offload.check import period_of
from solver_plan.offload.plan import OffloadPlan
from solver_plan.offload.problem import OffloadProblem
from solver_plan.parallelism.check import RELATIVE_TOLERANCE, check, evaluate_checked
from solver_plan.parallelism.plan import ParallelismPlan
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.report.printable import printable
from solver_plan.solving.budget import Budget

MEBIBYTE = 2**20
GRID_LIMIT_S = 10.0
"""Deterministic seconds for the uniform grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A configuration of another system, and how far it is the plan."""

    to: str
    text: str
    """The configuration."""
    schedule: str | None
    """The order of actions as a second file, where that is a custom one."""
    exported: PlanDocument
    """The plan that the configuration carries out, without certificate: the plan itself but for device numbers if
    `losses` is empty."""
    losses: tuple[Loss, ...]
    plan_ms: float
    """Predicted time of the plan."""
    exported_ms: float
    """Predicted time of what is exported."""
    fits: bool
    """What is exported fits the memory."""
    violations: tuple[str, ...]
    """Of the problem, by what is exported: memory, or a choice that its space leaves out."""
    remarks: tuple[str, ...]
    """For a reader: system and version, size, losses, what is left to do. They stand in the configuration, too."""


def export_plan(
    problem: ProblemDocument,
    plan: PlanDocument,
    to: str,
    *,
    allow_losses: bool = False,
    schedule_file: str | None = None,
) -> Export:
    """Return the configuration of another system that carries a plan out.

    Parameters
    ----------
    problem, plan
        A problem and a valid plan of it, of kind parallelism or offload.
    to
        ``megatron``, ``torchtitan`` or ``deepspeed``.
    allow_losses
        Export the nearest configuration where the system cannot be told all of the plan.
    schedule_file
        Where `Export.schedule` will lie, which the configuration names; needed for custom orders, which only
        torchtitan takes.

    Raises
    ------
    NotExportableError
        If the system cannot be told all of the plan and losses are not allowed, or has nothing near it.
    InputError
        If there is no such system, or the documents are of another kind or do not match.
    InvalidPlanError
        If the plan violates the problem.
    """
    target = TARGETS.get(to)
    if target is None:
        raise InputError(f"to: found {to!r}; one of {', '.join(TARGETS)}")
    require_same_problem(problem, plan)
    if isinstance(problem, ParallelismProblem) and isinstance(plan, ParallelismPlan):
        return _export_pipeline(problem, plan, target, allow_losses, schedule_file)
    if isinstance(problem, OffloadProblem) and isinstance(plan, OffloadPlan):
        return _export_offload(problem, plan, target, allow_losses)
    if problem.kind != plan.kind:
        raise InputError(f"the problem is of kind {problem.kind}, the plan of kind {plan.kind}: give two that match")
    raise NotExportableError(
        f"plan: found kind {plan.kind}; {target.name} trains one task on a fixed mesh, slices of several tasks on "
        "devices that change have no configuration there; run it with solver-plan run"
    )


def _export_pipeline(
    problem: ParallelismProblem,
    plan: ParallelismPlan,
    target: Target,
    allow_losses: bool,
    schedule_file: str | None,
) -> Export:
    own = evaluate_checked(problem, plan)
    chain = layer_chain(problem)
    if target.equal_layers and not chain.equal:
        raise NotExportableError(
            f"operators: the layers are not all alike; {target.name} divides a stack of equal transformer layers into "
            "stages; export to deepspeed"
        )
    losses, kept = losses_of(problem, plan, chain, target)
    _refuse(losses, target, allow_losses)
    found = nearest(problem, plan, chain, target, kept)
    unpriced = _sequence_loss(problem, found.configuration, target)
    _refuse([*losses, *unpriced], target, allow_losses)
    if kept.orders is not None and found.configuration.orders is not None and schedule_file is None:
        raise InputError("out: the order of actions is a second file beside the configuration; name a file, not -")
    losses += unpriced
    violations = () if not losses else check(problem, found.plan)
    remarks = _lines(_pipeline_remarks(problem, chain, target, losses, own.iteration_ms, found, violations))
    return Export(
        to=target.name,
        text=_pipeline_text(problem, chain, target, found.configuration, remarks, schedule_file),
        schedule=None if found.configuration.orders is None else schedule_rows(found.configuration),
        exported=replace(found.plan, problem_digest=plan.problem_digest),
        losses=tuple(losses),
        plan_ms=own.iteration_ms,
        exported_ms=found.evaluation.iteration_ms,
        fits=not found.excess_bytes,
        violations=violations,
        remarks=tuple(remarks),
    )


def _refuse(losses: list[Loss], target: Target, allow_losses: bool) -> None:
    if losses and not allow_losses:
        listed = "; ".join(f"({number}) {loss}" for number, loss in enumerate(losses, start=1))
        raise NotExportableError(
            f"plan: {target.title} cannot be told all of it: {listed}; allow losses (--allow-losses) for the nearest "
            "configuration and what it costs"
        )


def _sequence_loss(problem: ParallelismProblem, configuration: Configuration, target: Target) -> list[Loss]:
    if not problem.sequence_parallel or configuration.tensor_parallel == 1 or target.sequence_parallel(configuration):
        return []
    return [
        Loss(
            "sequence",
            f"priced with sequence parallelism, which {target.name} does not have: activations take more than is said",
        )
    ]


def _pipeline_text(
    problem: ParallelismProblem,
    chain: LayerChain,
    target: Target,
    configuration: Configuration,
    remarks: list[str],
    schedule_file: str | None,
) -> str:
    if target is MEGATRON:
        return _argument_file(remarks, megatron_arguments(problem, chain, configuration))
    if target is TORCHTITAN:
        file = schedule_file if configuration.orders is not None else None
        return torchtitan_function(problem, chain, configuration, remarks, file)
    return deepspeed_config(problem, chain, configuration, remarks)


def _lines(remarks: list[str]) -> list[str]:
    """Return the remarks with names that would break a line of comment escaped."""
    return [printable(remark) for remark in remarks]


def _argument_file(remarks: list[str], arguments: list[str]) -> str:
    return "".join(f"{line}\n" for line in [*(f"# {remark}" for remark in remarks), *arguments])


def _pipeline_remarks(
    problem: ParallelismProblem,
    chain: LayerChain,
    target: Target,
    losses: list[Loss],
    plan_ms: float,
    found: Priced,
    violations: tuple[str, ...],
) -> list[str]:
    configuration, evaluation = found.configuration, found.evaluation
    remarks = [f"for {target.title}, on {_ranks(problem, configuration)}"]
    remarks += [f"lost: {loss}" for loss in losses]
    remarks.append(_prediction("an iteration", plan_ms, evaluation.iteration_ms))
    limit = problem.cluster.usable_bytes_per_device
    fullest = max(range(configuration.stages), key=lambda stage: evaluation.stages[stage].memory_bytes)
    most = evaluation.stages[fullest].memory_bytes
    fits = "does NOT fit" if found.excess_bytes else "fits"
    remarks.append(
        f"memory: {fits}; stage {fullest} is fullest with {most / MEBIBYTE:.1f} of {limit / MEBIBYTE:.1f} MB"
    )
    if losses:
        remarks.append(
            f"exported: {_stages(configuration)}, tp {configuration.tensor_parallel}, dp "
            f"{configuration.data_parallel}, ZeRO {configuration.sharding}; {configuration.recomputation}"
        )
        remarks += _grid_remark(problem, chain, target, found)
    remarks += [f"outside the problem: {line}" for line in violations]
    if target is MEGATRON:
        notes = megatron_notes(problem, configuration)
    elif target is TORCHTITAN:
        notes = torchtitan_notes(problem, chain, configuration)
    else:
        notes = deepspeed_notes(problem, chain, configuration)
    return remarks + notes


def _stages(configuration: Configuration) -> str:
    virtual = configuration.virtual_stages
    return f"{configuration.groups} stages" + (f" of {virtual} virtual ones" if virtual > 1 else "")


def _grid_remark(problem: ParallelismProblem, chain: LayerChain, target: Target, found: Priced) -> list[str]:
    """Say so if the uniform grid, which planning always tries, is better and loses nothing."""
    from solver_plan.parallelism.planner import Planner  # slow to load, and only lossy exports need it

    budget = Budget(time_limit_s=GRID_LIMIT_S, deterministic=True)
    try:
        grid = Planner(problem, budget).run("grid").plan
    except SolverPlanError:
        return []
    grid_ms = evaluate_checked(problem, grid).iteration_ms
    better = found.excess_bytes or grid_ms < found.evaluation.iteration_ms
    if not better or losses_of(problem, grid, chain, target)[0]:
        return []
    return [f"better: the uniform grid (plan --heuristic grid) fits, takes {grid_ms:.3f} ms and loses nothing"]


def _ranks(problem: ParallelismProblem, configuration: Configuration) -> str:
    devices, per_node = configuration.devices, problem.cluster.devices_per_node
    if devices <= per_node:
        return f"{devices} ranks of one node"
    nodes, rest = divmod(devices, per_node)
    return f"{nodes} nodes of {per_node} ranks" + (f" and {rest} ranks of one more" if rest else "")


def _prediction(what: str, plan_ms: float, exported_ms: float) -> str:
    if abs(exported_ms - plan_ms) <= RELATIVE_TOLERANCE * plan_ms:
        return f"predicted: {what} takes {exported_ms:.3f} ms, as planned"
    change = f" ({(exported_ms / plan_ms - 1) * 100:+.2f} %)" if plan_ms else ""
    return f"predicted: {what} takes {exported_ms:.3f} ms{change}, the plan {plan_ms:.3f} ms"


def _export_offload(problem: OffloadProblem, plan: OffloadPlan, target: Target, allow_losses: bool) -> Export:
    plan_ms = period_of(problem, plan)
    found = export_offload(problem, plan, target)
    _refuse(found.losses, target, allow_losses)
    exported_ms = period_of(problem, found.nearest)
    remarks = [f"for {target.title}"]
    remarks += [f"lost: {loss}" for loss in found.losses]
    remarks.append(_prediction("a period", plan_ms, exported_ms))
    used, room = found.nearest.predicted.gpu_state_bytes, problem.gpu_state_bytes
    remarks.append(
        f"{found.cpu_parameters} of {found.parameters} parameters are updated on the CPU; optimizer state on the "
        f"device: {used / MEBIBYTE:.1f} of {room / MEBIBYTE:.1f} MB"
    )
    remarks += [*found.notes, "left to you: the model, batch sizes, precision, learning rate"]
    remarks = _lines(remarks)
    if target is MEGATRON:
        text = _argument_file(remarks, megatron_offload(found))
    elif target is TORCHTITAN:
        text = "".join(f"# {line}\n" for line in [*remarks, "training.enable_cpu_offload stays False"])
    else:
        text = deepspeed_offload(problem, found, remarks)
    return Export(
        to=target.name,
        text=text,
        schedule=None,
        exported=replace(found.nearest, problem_digest=plan.problem_digest, certificate=None),
        losses=tuple(found.losses),
        plan_ms=plan_ms,
        exported_ms=exported_ms,
        fits=True,
        violations=(),
        remarks=tuple(remarks),
    )
