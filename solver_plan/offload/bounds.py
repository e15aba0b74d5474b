"""A lower bound on the period of every valid plan, by a mixed-integer program over placements.

Sets: layers l = 1..L in forward order. Given: F_l, B_l forward and backward; u_l update on the GPU; o_l, c_l, h_l
gradient copy, CPU update and weight copy; in_l, out_l copies of the state; q chunks; N accumulation steps;
S = sum (F_l + B_l).

Variables: x_l = 1 if l is updated on the CPU, y_l = 1 if on the GPU with streamed state (else resident); period T.

    min T
    device    T >= N S + sum u_l (1 - x_l)                                                       `_device`
    room      sum state_l (1 - x_l - y_l) <= gpu_state_bytes                                     `_device`
    windows   for every k, every queue m in {d2h, cpu, h2d} with work p_l:                       `_windows`
              T >= outside_k + sum_{j in J_k} p_j x_j + (head_k + tail_k) x_k
    chain     T >= outside_k + (the q chunks of k through the three queues) x_k                  `_windows`
    link      T >= sum o_l x_l + out_l y_l;   T >= sum h_l x_l + in_l y_l                        `_streaming`
    staging   sum f(state_l / staging) (in_l + u_l + out_l) y_l <= T, f dual feasible            `_streaming`
    turnover  for every k:  T >= outside_k + sum_{j<=k} h_j x_j + in_j y_j - staging / h2d rate           `_turnover`
                            T >= outside_k + sum_{j<=k} o_j x_j + out_j y_j - staging / d2h rate          `_turnover`
    stay      T >= (in_l + u_l + out_l) y_l                                                      `_streaming`

Windows: the work of the CPU layers j <= k lies between the backward of k and the next forward of k, since windows
between a layer's backward and its next forward are nested. outside_k is the device's work outside: forward and
backward of j >= k and the other micro-steps (updates on the GPU may all lie inside); with clipping the updates and all
that follows lie after every backward. head_k is what must pass before queue m can work on k's first chunk, tail_k what
must follow its last; J_k holds k and those j < k whose own head (waiting for the backwards down to j) and tail (ending
before the earlier forward of j) are no shorter, so the terms are valid for whichever comes first or last. This is the
corrected closed form of the reuse-distance argument (CoTrain, ICPP 2023): unlike the plain one it holds for every plan.

Turnover: of the states streamed for j <= k, those that are not in the staging room when the window of k opens are
copied in within it, and those not in it when the window closes have been copied out within it.

Staging: a streamed state stays at least in + u + out; for a dual feasible function f (Fekete, Schepers 2001) the
states held at any moment have f-sum at most 1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import pulp

from solver_plan.offload.operations import Placement, all_on, resident_bytes
from solver_plan.offload.plan import Place
from solver_plan.offload.problem import OffloadProblem
from solver_plan.solving.budget import Clock
from solver_plan.solving.milp import solve_milp

SAFETY = 3e-7
"""Relative; taken off the solver's bound for its feasibility tolerance of 1e-7 on scaled rows."""
BOUND_NAME = "milp:nested_windows"
DUAL_FEASIBLE_ORDERS = range(1, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementBound:
    """What the program says."""

    bound_ms: float | None
    """Lower bound on the period of every valid plan; None if none was found."""
    placement: Placement | None
    """The best placement found."""
    relaxed_ms: float | None
    """Value of that placement in the program: its period is at least this."""
    optimal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Inequality:
    """T >= constant + sum cpu[l] x_l + sum streamed[l] y_l."""

    name: str
    constant_ms: float
    cpu_ms: tuple[float, ...]
    streamed_ms: tuple[float, ...] | None = None
    window: int | None = None
    """The layer whose window it is."""

    def value_ms(self, placement: Placement) -> float:
        """Return the right side at a placement."""
        total_ms = self.constant_ms
        for layer, place in enumerate(placement):
            if place == "cpu":
                total_ms += self.cpu_ms[layer]
            elif place == "gpu_streamed" and self.streamed_ms is not None:
                total_ms += self.streamed_ms[layer]
        return total_ms


def inequalities(problem: OffloadProblem) -> list[Inequality]:
    """Return every inequality of the program but the room; those that others imply are left out."""
    found = [_device(problem), *_undominated(_windows(problem), problem.compute_ms + problem.other_micro_steps_ms)]
    if any(problem.may_stream(layer) for layer in range(len(problem.layers))):
        found += _streaming(problem)
    return found


def relaxed_period_ms(rows: Sequence[Inequality], placement: Placement) -> float:
    """Return a lower bound on the period of a placement: the largest right side."""
    return max(row.value_ms(placement) for row in rows)


def binding(problem: OffloadProblem, placement: Placement) -> Inequality:
    """Return the inequality that sets the lower bound of a placement."""
    return max(inequalities(problem), key=lambda row: row.value_ms(placement))


def placement_bound(
    problem: OffloadProblem,
    clock: Clock,
    *,
    limit: float | None = None,
    gap_limit: float | None = None,
    window_margin_ms: float = 0.0,
) -> PlacementBound:
    """Solve the program.

    Parameters
    ----------
    problem
        The problem.
    clock
        Budget; spent.
    limit
        Use at most this much of it.
    gap_limit
        Relative gap to stop at; None: the budget's.
    window_margin_ms
        Widen every window's work by this: placements that survive some waiting for the link. With a margin the
        program gives no bound.
    """
    rows = inequalities(problem)
    program = _Program(problem, [_with_margin(row, window_margin_ms) for row in rows] if window_margin_ms else rows)
    period = pulp.LpVariable("period", lowBound=0)
    program.lp.setObjective(period + 0)
    for side in program.right_sides():
        program.lp.addConstraint(period >= side)
    _keep_to_room(problem, program)
    outcome = solve_milp(program.lp, clock, limit=limit, gap_limit=gap_limit)
    bound_ms: float | None = None
    if outcome.bound is not None and not window_margin_ms:
        bound_ms = outcome.bound * program.scale_ms * (1 - SAFETY)
    placement = None if outcome.objective is None else program.placement()
    if placement is None or resident_bytes(problem, placement) > problem.gpu_state_bytes:  # by rounding
        return PlacementBound(bound_ms=bound_ms, placement=None, relaxed_ms=None, optimal=False)
    return PlacementBound(
        bound_ms=bound_ms,
        placement=placement,
        relaxed_ms=relaxed_period_ms(rows, placement),
        optimal=outcome.status == "optimal",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """Lower bound on the resident bytes of every plan of at most some period, and a placement to try."""

    bound_bytes: int
    placement: Placement


def memory_bound(
    problem: OffloadProblem, period_ms: float, clock: Clock, *, limit: float | None = None
) -> MemoryBound | None:
    """Minimise the resident state instead, with the period given; the problem's own room does not count.

    None if no placement has a lower bound of at most `period_ms`: no plan is that short.
    """
    program = _Program(problem, inequalities(problem))
    total = sum(problem.state_bytes(layer) for layer in range(len(problem.layers)))
    program.lp.setObjective(total / program.unit_bytes - program.not_resident())
    allowed = period_ms * (1 + SAFETY) / program.scale_ms
    for side in program.right_sides():
        program.lp.addConstraint(allowed >= side)
    outcome = solve_milp(program.lp, clock, limit=limit, gap_limit=0.0)
    if outcome.objective is None:
        return None
    placement = program.placement()
    found = resident_bytes(problem, placement)
    proven = 0 if outcome.bound is None else math.ceil((outcome.bound - 1e-6) * program.unit_bytes)
    # sums of whole states: between the solver's bound and its solution nothing need exist
    bound_bytes = found if outcome.status == "optimal" else max(0, min(found, proven))
    return MemoryBound(bound_bytes=bound_bytes, placement=placement)


def placement_below(
    problem: OffloadProblem, rows: Sequence[Inequality], period_ms: float, clock: Clock
) -> Placement | None:
    """Return a placement whose value in the program is below `period_ms`; None if none exists or none was found."""
    program = _Program(problem, rows)
    program.lp.setObjective(pulp.LpAffineExpression())
    for side in program.right_sides():
        program.lp.addConstraint(side <= period_ms / program.scale_ms)
    _keep_to_room(problem, program)
    if solve_milp(program.lp, clock).objective is None:
        return None
    placement = program.placement()
    fits = resident_bytes(problem, placement) <= problem.gpu_state_bytes
    return placement if fits and relaxed_period_ms(rows, placement) < period_ms else None


def _keep_to_room(problem: OffloadProblem, program: "_Program") -> None:
    """Add the row of the room."""
    excess = sum(program.states) - problem.gpu_state_bytes
    if excess > 0:
        program.lp.addConstraint(program.not_resident() >= excess / program.unit_bytes - 1e-12)


class _Program:
    """Variables and right sides that both programs share; times in units of `scale_ms`, states of `unit_bytes`."""

    def __init__(self, problem: OffloadProblem, rows: Sequence[Inequality]) -> None:
        count = len(problem.layers)
        self.lp = pulp.LpProblem("placement", pulp.LpMinimize)
        # so that the solver's tolerances are relative to the period, which is at least this
        self.scale_ms = problem.compute_ms + problem.other_micro_steps_ms
        if self.scale_ms <= 0:
            self.scale_ms = max(relaxed_period_ms(rows, all_on("cpu", count)), 1e-300)
        self.states = [problem.state_bytes(layer) for layer in range(count)]
        self.unit_bytes = max(1, *self.states)
        self._rows = rows
        self._on_cpu = [pulp.LpVariable(f"cpu_{layer}", cat=pulp.LpBinary) for layer in range(count)]
        self._streamed = {
            layer: pulp.LpVariable(f"streamed_{layer}", cat=pulp.LpBinary)
            for layer in range(count)
            if problem.may_stream(layer)
        }
        for layer, variable in self._streamed.items():
            self.lp.addConstraint(self._on_cpu[layer] + variable <= 1)

    def right_sides(self) -> Iterator[pulp.LpAffineExpression]:
        """Return what the period is at least, row by row."""
        for row in self._rows:
            terms = [(self._on_cpu[layer], value / self.scale_ms) for layer, value in enumerate(row.cpu_ms) if value]
            if row.streamed_ms is not None:
                streamed = row.streamed_ms
                terms += [(variable, streamed[layer] / self.scale_ms) for layer, variable in self._streamed.items()]
            yield pulp.LpAffineExpression(terms, row.constant_ms / self.scale_ms)

    def not_resident(self) -> pulp.LpAffineExpression:
        """Return the states that are not resident, in units."""
        terms = [(variable, state / self.unit_bytes) for variable, state in zip(self._on_cpu, self.states, strict=True)]
        terms += [(variable, self.states[layer] / self.unit_bytes) for layer, variable in self._streamed.items()]
        return pulp.LpAffineExpression([(variable, value) for variable, value in terms if value])

    def placement(self) -> Placement:
        """Return the solution."""
        chosen: list[Place] = []
        for layer, variable in enumerate(self._on_cpu):
            if (variable.varValue or 0) > 0.5:
                chosen.append("cpu")
            elif layer in self._streamed and (self._streamed[layer].varValue or 0) > 0.5:
                chosen.append("gpu_streamed")
            else:
                chosen.append("gpu")
        return tuple(chosen)


def _with_margin(row: Inequality, margin_ms: float) -> Inequality:
    """Add a margin where the window's own layer is on the CPU."""
    if row.window is None:
        return row
    cpu_ms = list(row.cpu_ms)
    cpu_ms[row.window] += margin_ms
    return replace(row, cpu_ms=tuple(cpu_ms))


def _undominated(rows: Sequence[Inequality], least_ms: float) -> list[Inequality]:
    """Leave out rows that never exceed the device's least work, or that another row of the same window implies."""
    kept: list[Inequality] = []
    for _, window in groupby(rows, key=lambda row: row.window):
        here: list[Inequality] = []
        for row in window:
            if row.constant_ms + sum(row.cpu_ms) > least_ms and not any(_implies(other, row) for other in here):
                here = [*(other for other in here if not _implies(row, other)), row]
        kept += here
    return kept


def _implies(row: Inequality, other: Inequality) -> bool:
    return row.constant_ms >= other.constant_ms and all(
        one >= two for one, two in zip(row.cpu_ms, other.cpu_ms, strict=True)
    )


def _device(problem: OffloadProblem) -> Inequality:
    count = len(problem.layers)
    updates = [problem.gpu_update_ms(layer) for layer in range(count)]
    return Inequality(
        name="the device's work",
        constant_ms=problem.compute_ms + problem.other_micro_steps_ms + sum(updates),
        cpu_ms=tuple(-update for update in updates),
    )


def _windows(problem: OffloadProblem) -> list[Inequality]:
    layers, chunks, clip = problem.layers, problem.chunks_per_layer, problem.clip_gradients
    count = len(layers)
    gradient = [problem.gradient_copy_ms(layer) for layer in range(count)]
    update = [problem.cpu_update_ms(layer) for layer in range(count)]
    weight = [problem.weight_copy_ms(layer) for layer in range(count)]
    forward_before = [0.0, *accumulate(layer.forward_ms for layer in layers)]
    backward_before = [0.0, *accumulate(layer.backward_ms for layer in layers)]
    found: list[Inequality] = []
    for k in range(count):
        if layers[k].parameters == 0:
            continue

        def arrival(j: int, k: int = k) -> float:
            """From the end of k's backward to the end of j's."""
            return backward_before[k] - backward_before[j]

        def arrival_clipped(j: int) -> float:
            """When j's first gradient chunk is on the host, after the last backward."""
            return max(0.0, gradient[j] / chunks - backward_before[j])

        def lead(j: int, k: int = k) -> float:
            """From the next forward of j to that of k."""
            return forward_before[k] - forward_before[j]

        free_ms = (
            problem.compute_ms - backward_before[k] - forward_before[k] + problem.other_micro_steps_ms
        )  # outside of the window
        clipped_ms = problem.compute_ms - forward_before[k] + problem.other_micro_steps_ms
        queues: tuple[tuple[str, float, list[float], Callable[[int], float], Callable[[int], float]], ...] = (
            (
                "d2h",
                free_ms,
                gradient,
                arrival,
                lambda j: lead(j) + (update[j] + weight[j]) / chunks,
            ),
            (
                "cpu",
                clipped_ms if clip else free_ms,
                update,
                arrival_clipped if clip else lambda j: arrival(j) + gradient[j] / chunks,
                lambda j: lead(j) + weight[j] / chunks,
            ),
            (
                "h2d",
                clipped_ms if clip else free_ms,
                weight,
                (lambda j: arrival_clipped(j) + update[j] / chunks)
                if clip
                else lambda j: arrival(j) + (gradient[j] + update[j]) / chunks,
                lead,
            ),
        )
        for name, outside_ms, work, head, tail in queues:
            cpu_ms = [0.0] * count
            for j in range(k + 1):
                if j == k or (head(j) >= head(k) and tail(j) >= tail(k)):
                    cpu_ms[j] = work[j]
            whole = work[: k + 1] + [0.0] * (count - k - 1)
            cpu_ms[k] += head(k) + tail(k)
            found.append(Inequality(name=f"{name} {k}", constant_ms=outside_ms, cpu_ms=tuple(cpu_ms), window=k))
            if cpu_ms[:k] != whole[:k]:
                busy = [j for j in range(k + 1) if layers[j].parameters]
                whole[k] += min(map(head, busy)) + min(map(tail, busy))
                found.append(Inequality(name=f"{name} {k}", constant_ms=outside_ms, cpu_ms=tuple(whole), window=k))
        steps = (gradient[k], update[k], weight[k])
        chain = [0.0] * count
        chain[k] = sum(steps) / chunks + (chunks - 1) / chunks * max(steps)
        found.append(Inequality(name=f"chain {k}", constant_ms=free_ms, cpu_ms=tuple(chain), window=k))
        if clip:
            later = [0.0] * count
            later[k] = (update[k] + weight[k]) / chunks + (chunks - 1) / chunks * max(update[k], weight[k])
            found.append(Inequality(name=f"chain {k}", constant_ms=clipped_ms, cpu_ms=tuple(later), window=k))
    return found


def _streaming(problem: OffloadProblem) -> list[Inequality]:
    count = len(problem.layers)
    copy_in = [problem.state_copy_in_ms(layer) for layer in range(count)]
    copy_out = [problem.state_copy_out_ms(layer) for layer in range(count)]
    stay = [copy_in[layer] + problem.gpu_update_ms(layer) + copy_out[layer] for layer in range(count)]
    found = [
        Inequality(
            name="d2h",
            constant_ms=0.0,
            cpu_ms=tuple(problem.gradient_copy_ms(layer) for layer in range(count)),
            streamed_ms=tuple(copy_out),
        ),
        Inequality(
            name="h2d",
            constant_ms=0.0,
            cpu_ms=tuple(problem.weight_copy_ms(layer) for layer in range(count)),
            streamed_ms=tuple(copy_in),
        ),
    ]
    found += _turnover(problem)
    nothing = (0.0,) * count
    for layer in range(count):
        if problem.may_stream(layer) and problem.state_bytes(layer):
            own = tuple(stay[layer] if other == layer else 0.0 for other in range(count))
            found.append(Inequality(name=f"stay {layer}", constant_ms=0.0, cpu_ms=nothing, streamed_ms=own))
    seen: set[tuple[float, ...]] = set()
    for order in (0, *DUAL_FEASIBLE_ORDERS):
        share = tuple(
            stay[layer] * _dual_feasible(problem.state_bytes(layer), problem.staging_bytes, order)
            for layer in range(count)
        )
        if share not in seen:
            seen.add(share)
            found.append(Inequality(name="staging", constant_ms=0.0, cpu_ms=nothing, streamed_ms=share))
    return found


def _turnover(problem: OffloadProblem) -> list[Inequality]:
    """Streamed layers j <= k are updated within the window of k; when it opens and closes, staging holds so much."""
    count = len(problem.layers)
    forward_before = [0.0, *accumulate(layer.forward_ms for layer in problem.layers)]
    backward_before = [0.0, *accumulate(layer.backward_ms for layer in problem.layers)]
    staging_in_ms = 1e3 * problem.staging_bytes / problem.rates.h2d_bytes_per_s
    staging_out_ms = 1e3 * problem.staging_bytes / problem.rates.d2h_bytes_per_s
    found: list[Inequality] = []
    for k in range(count):
        if problem.layers[k].parameters == 0:
            continue
        free_ms = problem.compute_ms - backward_before[k] - forward_before[k] + problem.other_micro_steps_ms
        clipped_ms = problem.compute_ms - forward_before[k] + problem.other_micro_steps_ms
        inner = [layer <= k for layer in range(count)]
        # weights come back and states go out after updates; states come in and gradients go out at any time
        for name, outside_ms, staging_ms, cpu, streamed in (
            ("h2d", clipped_ms, staging_in_ms, problem.weight_copy_ms, problem.state_copy_in_ms),
            ("d2h", free_ms, staging_out_ms, problem.gradient_copy_ms, problem.state_copy_out_ms),
            ("d2h", clipped_ms, staging_out_ms, None, problem.state_copy_out_ms),
        ):
            opens_ms = outside_ms if problem.clip_gradients else free_ms
            cpu_ms = tuple(cpu(layer) if inside and cpu else 0.0 for layer, inside in enumerate(inner))
            streamed_ms = tuple(streamed(layer) if inside else 0.0 for layer, inside in enumerate(inner))
            if opens_ms - staging_ms + sum(streamed_ms) > problem.compute_ms:
                found.append(
                    Inequality(
                        name=f"{name} {k}",
                        constant_ms=opens_ms - staging_ms,
                        cpu_ms=cpu_ms,
                        streamed_ms=streamed_ms,
                        window=k,
                    )
                )
    return found


def _dual_feasible(state: int, staging: int, order: int) -> float:
    """f(state / staging): the identity for order 0, else u^(order) of Fekete and Schepers."""
    if order == 0 or (order + 1) * state % staging == 0:
        return state / staging
    return ((order + 1) * state // staging) / order
