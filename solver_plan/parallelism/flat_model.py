"""A second formulation of the whole problem, flat: one mixed-integer program for each micro-batch size and stage count.

Nothing is precomputed about stages: cuts, layouts, recomputed operators and memory are variables of one program. It is
slow and meant for tiny problems, as a second opinion on the planner (PuLP with HiGHS).

Sets        stages s = 0..p-1 in order, operators j = 0..n-1, choices c (layouts on g_c devices), N micro-batches
Variables   z_sj = 1: operator j lies in stage s          y_sc = 1: stage s has choice c
            w_sjc = z_sj y_sc                             r_j = 1: operator j is recomputed
            first_sj, last_sj = 1: stage s begins, ends with j
            v_sjc, m_sjc = w_sjc and j recomputed (both j and j + 1 recomputed, both in the stage)
            T_s, M: time of a stage, of the slowest       R_s, F_s, B_s, P_s: reserved bytes, forward, backward, peak
Objective   min (N - 1) M + sum_s T_s
Constraints
  cover     each operator in one stage; z non-increasing in time: stages are consecutive and not empty   → _add_cuts
  devices   each stage has one choice; sum of g_c = devices (<= if some may stay idle)                 → _add_choices
  time      T_s >= sum_jc w busy + v forward + transfers of the first and the last operator             → _add_times
  memory    state W_s + (p - s) (input + held - saved) + P_s + R_s <= limit                             → _add_memory
  peak      P_s >= held of every run [i, k] of marked neighbours that closes at k (costs.recompute)     → _add_peaks

One node, recomputation per operator or none, layout `stage`. The optimum equals the planner's up to HiGHS's tolerance.
"""

from dataclasses import dataclass

import pulp

from solver_plan.parallelism.choices import MicroBatch, micro_batch, micro_batch_sizes
from solver_plan.parallelism.problem import ParallelismProblem
from solver_plan.solving import Clock
from solver_plan.solving.milp import solve_milp


@dataclass(frozen=True, slots=True)
class FlatOptimum:
    """The optimum of all programs, and a lower bound on it."""

    objective_ms: float
    bound_ms: float


class _Program:
    """The program of one micro-batch size and one number of stages."""

    def __init__(self, problem: ParallelismProblem, batch: MicroBatch, stages: int) -> None:
        assert problem.cluster.nodes == 1
        assert problem.space.layout == "stage"
        assert problem.space.recompute != "block"
        self.problem, self.batch, self.stages = problem, batch, stages
        self.operators = range(len(problem.operators))
        self.program = pulp.LpProblem("flat", pulp.LpMinimize)
        self.slots, self.choices = range(stages), range(len(batch.choices))
        self.lies = self._binaries("z", self.slots, self.operators)
        self.has = self._binaries("y", self.slots, self.choices)
        self.marked = [self._binary(f"r_{j}") for j in self.operators]
        if problem.space.recompute == "none":
            for variable in self.marked:
                self.program += variable == 0
        self.time = [pulp.LpVariable(f"T_{s}", lowBound=0) for s in self.slots]
        self.slowest = pulp.LpVariable("M", lowBound=0)
        self.program += (batch.count - 1) * self.slowest + pulp.lpSum(self.time)
        for s in self.slots:
            self.program += self.slowest >= self.time[s]
        self._add_cuts()
        self._add_choices()
        self._add_times()
        self._add_memory()

    def _binary(self, name: str) -> pulp.LpVariable:
        return pulp.LpVariable(name, cat="Binary")

    def _binaries(self, name: str, rows: range, columns: range) -> list[list[pulp.LpVariable]]:
        return [[self._binary(f"{name}_{row}_{column}") for column in columns] for row in rows]

    def _product(self, name: str, *factors: pulp.LpVariable) -> pulp.LpVariable:
        """Return a variable that is the product of binaries."""
        variable = pulp.LpVariable(name, lowBound=0, upBound=1)
        for factor in factors:
            self.program += variable <= factor
        self.program += variable >= pulp.lpSum(factors) - (len(factors) - 1)
        return variable

    def _add_cuts(self) -> None:
        last = self.operators[-1]
        for j in self.operators:
            self.program += pulp.lpSum(self.lies[s][j] for s in self.slots) == 1
        self.program += self.lies[0][0] == 1
        self.program += self.lies[-1][last] == 1
        for s in self.slots:
            self.program += pulp.lpSum(self.lies[s]) >= 1
            for j in self.operators[1:]:
                before = self.lies[s - 1][j - 1] if s else 0
                self.program += self.lies[s][j] <= self.lies[s][j - 1] + before
        self.first = self._binaries("first", self.slots, self.operators)
        self.last = self._binaries("last", self.slots, self.operators)
        for s in self.slots:
            self.program += pulp.lpSum(self.first[s]) == 1
            self.program += pulp.lpSum(self.last[s]) == 1
            for j in self.operators:
                self.program += self.first[s][j] >= self.lies[s][j] - (self.lies[s][j - 1] if j else 0)
                self.program += self.last[s][j] >= self.lies[s][j] - (self.lies[s][j + 1] if j < last else 0)

    def _add_choices(self) -> None:
        devices = self.problem.cluster.devices
        used = pulp.lpSum(
            self.batch.choices[c].choice.devices * self.has[s][c] for s in self.slots for c in self.choices
        )
        self.program += used == devices if self.problem.space.use_all_devices else used <= devices
        self.runs: dict[tuple[int, int, int], pulp.LpVariable] = {}
        for s in self.slots:
            self.program += pulp.lpSum(self.has[s]) == 1
            for c in self.choices:
                for j in self.operators:
                    if self.batch.choices[c].forward_ms[j] == float("inf"):
                        self.program += self.lies[s][j] + self.has[s][c] <= 1
                    else:
                        self.runs[s, j, c] = self._product(f"w_{s}_{j}_{c}", self.lies[s][j], self.has[s][c])

    def _add_times(self) -> None:
        for s in self.slots:
            terms = []
            for (slot, j, c), runs in self.runs.items():
                if slot != s:
                    continue
                costs = self.batch.choices[c]
                again = self._product(f"v_{s}_{j}_{c}", runs, self.marked[j])
                opens = self._product(f"fc_{s}_{j}_{c}", self.first[s][j], self.has[s][c])
                closes = self._product(f"lc_{s}_{j}_{c}", self.last[s][j], self.has[s][c])
                # the edge behind the last stage counts as between nodes
                link = 1 if s == self.stages - 1 else 0
                terms += [
                    float(costs.forward_ms[j] + costs.backward_ms[j]) * runs,
                    float(costs.forward_ms[j]) * again,
                    float(costs.receive_ms[0][j]) * opens,
                    float(costs.send_ms[link][j]) * closes,
                ]
            self.program += self.time[s] >= pulp.lpSum(terms)

    def _add_memory(self) -> None:
        limit, state = self.problem.cluster.usable_bytes_per_device, self.problem.state_bytes_per_weight_byte
        unit = max(limit, 1)
        for s in self.slots:
            in_flight = self.stages - s
            reserved, forward, backward = (pulp.LpVariable(f"{name}_{s}", lowBound=0) for name in "RFB")
            peak = pulp.LpVariable(f"P_{s}", lowBound=0)
            weights, terms = [], []
            for (slot, j, c), runs in self.runs.items():
                if slot != s:
                    continue
                costs = self.batch.choices[c]
                weights.append(costs.weight_bytes[j] / unit * runs)
                opens = self._product(f"fm_{s}_{j}_{c}", self.first[s][j], self.has[s][c])
                terms.append(in_flight * costs.input_bytes[j] / unit * opens)
                terms.append(in_flight * costs.held_bytes[j] / unit * runs)
                # the stage's last operator reserves nothing
                self.program += forward >= costs.forward_reserved_bytes[j] / unit * (runs - self.last[s][j])
                self.program += backward >= costs.backward_reserved_bytes[j] / unit * (runs - self.last[s][j])
                if j + 1 < len(self.operators) and not self.problem.operators[j + 1].block_start:
                    pair = self._product(
                        f"m_{s}_{j}_{c}", runs, self.lies[s][j + 1], self.marked[j], self.marked[j + 1]
                    )
                    terms.append(-in_flight * costs.held_bytes[j] / unit * pair)
            self.program += reserved >= forward + backward
            self.program += reserved >= pulp.lpSum(weights)
            self._add_peaks(s, peak, unit)
            self.program += state * pulp.lpSum(weights) + pulp.lpSum(terms) + peak + reserved <= limit / unit

    def _add_peaks(self, s: int, peak: pulp.LpVariable, unit: float) -> None:
        """A run of marked neighbours i..k, k + 1 marked too, counts where it closes.

        Counting a part of a run is harmless, so every i is allowed. It closes behind k if k + 2
        is not marked or not in the stage, or k + 1 starts a block and k shares no buffer.
        """
        operators = self.problem.operators
        count = len(operators)
        for i in range(count):
            for k in range(i, count - 1):
                inside = range(i, k + 2)
                # a block start within closes the segment before
                if any(operators[j + 1].block_start and operators[j].activation_factor == 1 for j in range(i, k)):
                    continue
                closed = operators[k + 1].block_start and operators[k].activation_factor == 1
                absent = [1 - self.marked[j] for j in inside] + [1 - self.lies[s][j] for j in inside]
                if not closed:
                    # behind k + 1 the run ends: by a mark that is missing, or by the stage's end and no shared buffer
                    if k + 2 < count:
                        if operators[k].activation_factor == 1:
                            absent.append(self._goes_on(s, k + 2))
                        else:
                            absent.append(1 - self._stops_inside(s, k + 2))
                    elif operators[k].activation_factor != 1:
                        continue
                for c in self.choices:
                    held = sum(float(self.batch.choices[c].held_bytes[j]) for j in range(i, k + 1)) / unit
                    self.program += peak >= held * (1 - pulp.lpSum(absent) - (1 - self.has[s][c]))

    def _goes_on(self, s: int, j: int) -> pulp.LpVariable:
        """Return 1 if operator j is marked and in the stage."""
        name = f"on_{s}_{j}"
        if not hasattr(self, "_known"):
            self._known: dict[str, pulp.LpVariable] = {}
        if name not in self._known:
            self._known[name] = self._product(name, self.marked[j], self.lies[s][j])
        return self._known[name]

    def _stops_inside(self, s: int, j: int) -> pulp.LpAffineExpression:
        """Return 1 if operator j is in the stage and not marked."""
        return self.lies[s][j] - self._goes_on(s, j)


def flat_optimum(problem: ParallelismProblem, clock: Clock) -> FlatOptimum | None:
    """Return the optimum of a tiny problem by the flat programs; None if every one of them is infeasible.

    Raises `ValueError` if a limit came first.
    """
    best: FlatOptimum | None = None
    for size in micro_batch_sizes(problem):
        batch = micro_batch(problem, size)
        if not batch.choices:
            continue
        most = min(problem.cluster.devices, len(problem.operators), problem.space.max_stages or len(problem.operators))
        for stages in range(1, most + 1):
            program = _Program(problem, batch, stages).program
            outcome = solve_milp(program, clock)
            if outcome.status == "infeasible":
                continue
            if outcome.status != "optimal" or outcome.objective is None or outcome.bound is None:
                raise ValueError(f"the flat program was not solved: {outcome.status}")
            if best is None or outcome.objective < best.objective_ms:
                bound = outcome.bound if best is None else min(best.bound_ms, outcome.bound)
                best = FlatOptimum(outcome.objective, bound)
    return best
