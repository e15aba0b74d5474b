"""Small programs with known answers, and one that no solver finishes, for the tests of solving."""

import random
from dataclasses import dataclass

import pulp
from ortools.sat.python import cp_model


@dataclass(frozen=True)
class Assignment:
    """Items on machines, the largest load to be minimised: a CP-SAT model with its variables."""

    model: cp_model.CpModel
    on: list[list[cp_model.IntVar]]
    largest: cp_model.IntVar
    weights: list[list[int]]

    def hint(self, machine_of: list[int]) -> dict[cp_model.IntVar, int]:
        """Return a complete hint for an assignment."""
        values = {
            variable: int(machine_of[item] == machine)
            for item, row in enumerate(self.on)
            for machine, variable in enumerate(row)
        }
        return {**values, self.largest: self.load(machine_of)}

    def load(self, machine_of: list[int]) -> int:
        """Return the largest load."""
        machines = len(self.weights[0])
        return max(
            sum(row[machine] for item, row in enumerate(self.weights) if machine_of[item] == machine)
            for machine in range(machines)
        )


def weights(items: int, machines: int, seed: int = 1) -> list[list[int]]:
    """Return the load of each item on each machine."""
    chance = random.Random(seed)
    return [[chance.randint(500, 5000) for _ in range(machines)] for _ in range(items)]


def assignment(items: int, machines: int, seed: int = 1) -> Assignment:
    """Return the assignment problem; from about 40 items on 6 machines on, no solver proves it in a minute."""
    sizes = weights(items, machines, seed)
    model = cp_model.CpModel()
    on = [[model.new_bool_var(f"on[{i},{j}]") for j in range(machines)] for i in range(items)]
    largest = model.new_int_var(0, sum(map(max, sizes)), "largest")
    for row in on:
        model.add_exactly_one(row)
    for machine in range(machines):
        model.add(sum(sizes[item][machine] * on[item][machine] for item in range(items)) <= largest)
    model.minimize(largest)
    return Assignment(model=model, on=on, largest=largest, weights=sizes)


@dataclass(frozen=True)
class MilpAssignment:
    """The same as a program for HiGHS, with a constant added to the objective."""

    program: pulp.LpProblem
    on: list[list[pulp.LpVariable]]
    largest: pulp.LpVariable
    weights: list[list[int]]

    def start(self, machine_of: list[int]) -> dict[pulp.LpVariable, float]:
        """Return a complete start for an assignment."""
        machines = len(self.weights[0])
        loads = [
            sum(row[machine] for item, row in enumerate(self.weights) if machine_of[item] == machine)
            for machine in range(machines)
        ]
        values = {
            variable: float(machine_of[item] == machine)
            for item, row in enumerate(self.on)
            for machine, variable in enumerate(row)
        }
        return {**values, self.largest: float(max(loads))}


def milp_assignment(items: int, machines: int, seed: int = 1, constant: float = 0.0) -> MilpAssignment:
    """Return the program of `assignment`."""
    sizes = weights(items, machines, seed)
    program = pulp.LpProblem("assignment", pulp.LpMinimize)
    on = [[pulp.LpVariable(f"on_{i}_{j}", cat="Binary") for j in range(machines)] for i in range(items)]
    largest = pulp.LpVariable("largest", lowBound=0, upBound=sum(map(max, sizes)))
    program += largest + constant
    for row in on:
        program += pulp.lpSum(row) == 1
    for machine in range(machines):
        program += pulp.lpSum(sizes[item][machine] * on[item][machine] for item in range(items)) <= largest
    return MilpAssignment(program=program, on=on, largest=largest, weights=sizes)


def best_load(sizes: list[list[int]]) -> int:
    """Return the optimum by exhaustive search."""
    machines = len(sizes[0])
    best = sum(map(max, sizes))

    def search(item: int, loads: list[int]) -> None:
        nonlocal best
        if max(loads) >= best:
            return
        if item == len(sizes):
            best = max(loads)
            return
        for machine in range(machines):
            search(item + 1, [*loads[:machine], loads[machine] + sizes[item][machine], *loads[machine + 1 :]])

    search(0, [0] * machines)
    return best
