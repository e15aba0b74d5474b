"""Compile a wavefront plan into a program. No torch: a plan for 1024 accelerators compiles on a laptop."""

import dataclasses
import itertools
from collections.abc import Sequence

from solver_plan.documents import digest_of, require_same_problem
from solver_plan.errors import InvalidPlanError, NotExecutableError
from solver_plan.execution.distinct_groups import DistinctGroups
from solver_plan.execution.transfers import Side, transfers
from solver_plan.execution.waves.order import planned_order
from solver_plan.execution.waves.program import (
    ComponentProgram,
    Link,
    LossProgram,
    Reduction,
    SliceProgram,
    WaveProgram,
    reduced_parts,
)
from solver_plan.execution.waves.verify import verify_waves
from solver_plan.wavefront.check import check
from solver_plan.wavefront.costs import choice_of, parameters_of, transfer_ms
from solver_plan.wavefront.plan import Slice, WavefrontPlan
from solver_plan.wavefront.problem import Component, WavefrontProblem

DEGREES = ("tensor_parallel", "data_parallel")


def compile_waves(problem: WavefrontProblem, plan: WavefrontPlan) -> WaveProgram:
    """Return the program that carries out a plan.

    Raises
    ------
    PlanMismatchError
        If the plan names another problem.
    InvalidPlanError
        If `check` finds violations.
    NotExecutableError
        If the problem does not say what running needs, or the plan asks for what execution does not build.
    """
    require_same_problem(problem, plan)
    violations = check(problem, plan)
    if violations:
        raise InvalidPlanError(violations)
    number = {component.name: index for index, component in enumerate(problem.components)}
    components = _components(problem)
    edges = tuple((number[before], number[after]) for before, after in problem.edges)
    _require_equal_batches(components, edges)
    _require_gradients_to_arrive(components, edges)
    groups = DistinctGroups()
    slices = tuple(
        _slice(problem.component_of[piece.component], number[piece.component], index, piece, groups)
        for index, piece in enumerate(plan.slices)
    )
    unlinked = WaveProgram(
        problem_digest=digest_of(problem),
        plan_digest=digest_of(plan),
        model=problem.model,
        world_size=1 + max(max(piece.devices) for piece in slices),
        components=components,
        edges=edges,
        groups=(),
        slices=slices,
        losses=(),
        links=(),
        reductions=(),
        actions=(),
        predicted_makespan_ms=None if plan.predicted is None else plan.predicted.makespan_ms,
        predicted_memory_bytes=None if plan.predicted is None else plan.predicted.device_memory_bytes,
    )
    losses = _losses(unlinked, plan.slices, groups)
    unordered = dataclasses.replace(
        unlinked,
        losses=losses,
        links=_links(problem, dataclasses.replace(unlinked, losses=losses)),
        reductions=_reductions(unlinked, groups),
        groups=groups.documents(),
    )
    order = planned_order(unordered, plan.slices)
    program = dataclasses.replace(unordered, actions=tuple(map(str, order)))
    verify_waves(program)
    return program


def _components(problem: WavefrontProblem) -> tuple[ComponentProgram, ...]:
    first_of: dict[tuple[str, str], int] = {}
    found: list[ComponentProgram] = []
    for index, component in enumerate(problem.components):
        if component.batch is None:
            raise NotExecutableError(
                f"components[{index}].batch: found none; running needs the samples that {component.name} takes in one "
                "iteration: add them to the problem and plan again"
            )
        found.append(
            ComponentProgram(
                name=component.name,
                task=component.task,
                layers=component.layers,
                batch=component.batch,
                weights=first_of.setdefault(parameters_of(component), index),
                trained=_is_trained(index, component),
            )
        )
    return tuple(found)


def _is_trained(index: int, component: Component) -> bool:
    backward = {mode.backward_ms > 0 for mode in component.modes or ()}
    if len(backward) > 1:
        raise NotExecutableError(
            f"components[{index}].modes: found a backward_ms of 0 in some only; a component is frozen in all of its "
            "modes or in none"
        )
    return backward != {False}


def _require_equal_batches(components: Sequence[ComponentProgram], edges: Sequence[tuple[int, int]]) -> None:
    for place, (before, after) in enumerate(edges):
        one, other = components[before], components[after]
        if one.batch != other.batch:
            raise NotExecutableError(
                f"edges[{place}]: {one.name} takes {one.batch} samples and {other.name} {other.batch}; samples pass an "
                "edge one by one: give both the same batch"
            )


def _require_gradients_to_arrive(components: Sequence[ComponentProgram], edges: Sequence[tuple[int, int]]) -> None:
    for place, (before, after) in enumerate(edges):
        one, other = components[before], components[after]
        if one.trained and not other.trained:
            raise NotExecutableError(
                f"edges[{place}]: {one.name} is trained but {other.name} behind it has no backward (backward_ms 0), so "
                f"no gradient comes back; give {other.name} the time of its backward, or freeze {one.name} too"
            )


def _slice(component: Component, number: int, index: int, piece: Slice, groups: DistinctGroups) -> SliceProgram:
    choice = choice_of(component, piece)
    assert choice is not None
    assert component.batch is not None
    tensor_parallel, data_parallel = _degrees(component, index, piece)
    if component.batch % data_parallel:
        raise NotExecutableError(
            f"slices[{index}]: the {component.batch} samples of {component.name} do not divide over {data_parallel} "
            "replicas; leave that number of devices out of the problem, or change the batch, and plan again"
        )
    side = Side(tuple(sorted(piece.devices)), data_parallel, tensor_parallel)
    layers = piece.layers[1] - piece.layers[0]
    return SliceProgram(
        component=number,
        layers=piece.layers,
        devices=side.devices,
        tensor_parallel=tensor_parallel,
        data_parallel=data_parallel,
        tensor_groups=tuple(
            groups.index((side.rank(replica, k) for k in range(tensor_parallel)), "tensor parallel")
            for replica in range(data_parallel)
        ),
        forward_ms=choice.forward_ms * layers,
        backward_ms=choice.backward_ms * layers,
    )


def _degrees(component: Component, index: int, piece: Slice) -> tuple[int, int]:
    """Return tensor and data parallel degree of a slice; without degrees its devices are replicas."""
    mode = None if component.modes is None or piece.mode is None else component.modes[piece.mode]
    degrees = None if mode is None else mode.degrees
    if degrees is None:
        return 1, len(piece.devices)
    for name, degree in degrees.items():
        if degree > 1 and name not in DEGREES:
            raise NotExecutableError(
                f"slices[{index}]: mode {piece.mode} of {component.name} has {name} {degree}, which is not built; "
                f"use modes of {' and '.join(DEGREES)} alone"
            )
    return degrees.get("tensor_parallel", 1), degrees.get("data_parallel", 1)


def _losses(program: WaveProgram, planned: Sequence[Slice], groups: DistinctGroups) -> tuple[LossProgram, ...]:
    """Return a loss for each task that has a component which nothing follows."""
    followed = {before for before, _ in program.edges}
    ends: dict[str, list[int]] = {}
    for index, component in enumerate(program.components):
        if index not in followed:
            ends.setdefault(component.task, []).append(program.slices_of_component[index][-1])
    found: list[LossProgram] = []
    for task, slices in ends.items():
        last = max(slices, key=lambda index: (planned[index].end_ms, index))
        _require_one_batch(program, task, slices)
        side = program.slices[last].side
        found.append(
            LossProgram(
                task=task,
                slices=tuple(slices),
                slice=last,
                data_groups=tuple(
                    groups.index((side.rank(replica, k) for replica in range(side.data_parallel)), f"loss of {task}")
                    for k in range(side.tensor_parallel)
                ),
            )
        )
    return tuple(found)


def _require_one_batch(program: WaveProgram, task: str, slices: Sequence[int]) -> None:
    ends = [program.components[program.slices[index].component] for index in slices]
    for component in ends:
        if component.batch != ends[0].batch:
            raise NotExecutableError(
                f"task {task}: its loss takes {ends[0].batch} samples of {ends[0].name} and {component.batch} of "
                f"{component.name}; give both the same batch"
            )


def _links(problem: WavefrontProblem, program: WaveProgram) -> tuple[Link, ...]:
    """Return the links within components, along edges, and into the losses."""
    of = program.slices_of_component
    pairs = [pair for indices in of for pair in itertools.pairwise(indices)]
    pairs += [(of[before][-1], of[after][0]) for before, after in program.edges]
    pairs += [
        (index, len(program.slices) + number) for number, loss in enumerate(program.losses) for index in loss.slices
    ]
    found: list[Link] = []
    for before, after in pairs:
        sender, receiver, rows = program.side(before), program.side(after), program.batch_of(before)
        bare = Link(before=before, after=after, forward=(), backward=(), ms=0.0)
        if sender == receiver:
            found.append(bare)
            continue
        size = problem.components[program.slices[before].component].output_bytes
        found.append(
            dataclasses.replace(
                bare,
                forward=transfers(sender, receiver, rows),
                backward=transfers(receiver, sender, rows) if program.needs_gradient(bare) else (),
                ms=transfer_ms(problem.cluster, size, sender.devices, receiver.devices),
            )
        )
    return tuple(found)


def _reductions(program: WaveProgram, groups: DistinctGroups) -> tuple[Reduction, ...]:
    """Return what is summed where: the layers that the same ranks share are summed in one go (Spindle, 3.6)."""
    shared: dict[tuple[tuple[int, ...], int | None], list[tuple[int, int]]] = {}
    for index, component in enumerate(program.components):
        users = [other for other in program.components if other.weights == index]
        if component.weights != index or not any(user.trained for user in users):
            continue
        for layer in range(component.layers):
            for ranks, tensor_rank in reduced_parts(program, index, layer):
                shared.setdefault((ranks, tensor_rank), []).append((index, layer))
    return tuple(
        Reduction(
            group=groups.index(ranks, "gradients"),
            layers=tuple(layers),
            tensor_rank=tensor_rank,
        )
        for (ranks, tensor_rank), layers in shared.items()
    )
