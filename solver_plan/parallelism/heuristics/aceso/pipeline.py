"""Whole configurations under a cost model: evaluation, bottlenecks, the start, and what the primitives need to know."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from solver_plan.parallelism.choices import Floats, MicroBatch
from solver_plan.parallelism.heuristics.aceso.configuration import (
    Configuration,
    Run,
    StageLayout,
    even_device_counts,
    within_node,
)
from solver_plan.parallelism.heuristics.aceso.stage_costs import INTER, INTRA, Place, StageCosts, StageTrial
from solver_plan.parallelism.problem import ParallelismProblem

IMPOSSIBLE_MS = 1e9
"""Stands for infinity where differences are taken; the exact evaluation refuses what it stands for."""


@dataclass(slots=True, eq=False)
class Evaluated:
    """A configuration and what it costs."""

    configuration: Configuration
    stages: tuple[StageTrial, ...]
    iteration_ms: float
    fits: bool
    expansions: int = field(default=0)
    """How often the search went on from here."""

    @property
    def largest_memory_bytes(self) -> float:
        """Memory of the fullest stage."""
        return max(stage.memory_bytes for stage in self.stages)

    @property
    def order(self) -> tuple[bool, float, float]:
        """The smaller the better: what fits by time, the rest by memory."""
        return (False, self.iteration_ms, 0.0) if self.fits else (True, self.largest_memory_bytes, self.iteration_ms)

    def bottlenecks(self) -> list[int]:
        """Return the stages in the order in which they are in the way (Heuristic-1): by memory if one does not fit."""
        key = [stage.time_ms if self.fits else stage.memory_bytes for stage in self.stages]
        return sorted(range(len(key)), key=lambda number: (-key[number], number))


class Pipelines:
    """All configurations of a problem."""

    def __init__(self, problem: ParallelismProblem, batches: Sequence[MicroBatch], costs: StageCosts) -> None:
        self.problem = problem
        self.batches = batches
        self.costs = costs
        self._number_of = [{costs.choice: number for number, costs in enumerate(batch.choices)} for batch in batches]
        self._handing_over: dict[tuple[int, int, int], Floats] = {}
        self._neighbours: dict[tuple[int, int, bool, bool], int | None] = {}

    # -- evaluation ---------------------------------------------------------------------------------------------

    def devices(self, size: int, layout: StageLayout) -> int:
        """Return the number of devices of a stage."""
        return self.batches[size].choices[layout[0].choice].choice.devices

    def places(self, size: int, stages: Sequence[StageLayout]) -> list[Place] | None:
        """Return where each stage lies; None if the devices do not suffice or a stage crosses a forbidden edge."""
        per_node = self.problem.cluster.devices_per_node
        counts = [self.devices(size, layout) for layout in stages]
        total = self.problem.cluster.devices
        rank = total - sum(counts)
        if rank < 0 or (rank > 0 and self.problem.space.use_all_devices):
            return None
        first = []
        for count in counts:
            if not within_node(self.problem, rank, count):
                return None
            first.append(rank)
            rank += count
        edges = [INTRA]
        for number in range(1, len(stages)):
            begin, end = first[number - 1], first[number] + counts[number] - 1
            edges.append(INTRA if begin // per_node == end // per_node else INTER)
        edges.append(INTER)
        last = len(stages) - 1
        return [Place(last - number, edges[number], edges[number + 1], first[number]) for number in range(len(stages))]

    def evaluate(self, configuration: Configuration) -> Evaluated | None:
        """Return what a configuration costs; None if it is impossible (it may still not fit the memory)."""
        places = self.places(configuration.size, configuration.stages)
        if places is None:
            return None
        trials = []
        for layout, place in zip(configuration.stages, places, strict=True):
            trial = self.costs.stage(configuration.size, layout, place)
            if trial is None:
                return None
            trials.append(trial)
        return Evaluated(
            configuration=configuration,
            stages=tuple(trials),
            iteration_ms=self.costs.iteration_ms(configuration.size, trials),
            fits=all(trial.fits for trial in trials),
        )

    def marks(self, configuration: Configuration) -> list[tuple[bool, ...]]:
        """Return the recomputed operators of each stage."""
        places = self.places(configuration.size, configuration.stages)
        assert places is not None
        return [
            self.costs.marks(configuration.size, layout, place)
            for layout, place in zip(configuration.stages, places, strict=True)
        ]

    # -- choices ------------------------------------------------------------------------------------------------

    def neighbour(self, size: int, choice: int, tensor: bool, up: bool) -> int | None:
        """Return the choice with the next larger or smaller tensor (else data) parallel degree, all else equal."""
        key = (size, choice, tensor, up)
        if key not in self._neighbours:
            here = self.batches[size].choices[choice].choice
            found = []
            for other, number in self._number_of[size].items():
                degrees = (here.tensor_parallel, here.data_parallel, other.tensor_parallel, other.data_parallel)
                old, kept, new, same = degrees if tensor else (degrees[1], degrees[0], degrees[3], degrees[2])
                if other.partition == here.partition and kept == same and (new > old if up else new < old):
                    found.append((abs(new - old), number))
            self._neighbours[key] = min(found)[1] if found else None
        return self._neighbours[key]

    def exchanged(self, size: int, choice: int, to_tensor: bool) -> int | None:
        """Return the choice on as many devices with the next larger tensor (else data) parallel degree."""
        here = self.batches[size].choices[choice].choice
        found = [
            (other.tensor_parallel if to_tensor else other.data_parallel, number)
            for other, number in self._number_of[size].items()
            if other.devices == here.devices
            and other.partition == here.partition
            and (other.tensor_parallel > here.tensor_parallel) == to_tensor
            and other.tensor_parallel != here.tensor_parallel
        ]
        return min(found)[1] if found else None

    def other_partitions(self, size: int, choice: int) -> list[int]:
        """Return the choices that differ in the partition alone."""
        here = self.batches[size].choices[choice].choice
        return [
            number
            for other, number in self._number_of[size].items()
            if (other.tensor_parallel, other.data_parallel) == (here.tensor_parallel, here.data_parallel)
            and other.partition != here.partition
        ]

    def handing_over_ms(self, size: int, before: int, after: int) -> Floats:
        """Return the time of handing over to each operator in choice `after` from its predecessor in `before`.

        Shape (operators,); 0 for the first operator, `IMPOSSIBLE_MS` where no collective does it.
        """
        key = (size, before, after)
        if key not in self._handing_over:
            times = [0.0]
            for operator in range(1, len(self.problem.operators)):
                time = self.costs.resharding_between(size, before, after, operator)
                times.append(IMPOSSIBLE_MS if time is None else time)
            self._handing_over[key] = np.array(times)
        return self._handing_over[key]

    def scaled(self, size: int, layout: StageLayout, tensor: bool, up: bool) -> StageLayout | None:
        """Return a stage with all its tensor (else data) parallel degrees one step up or down.

        Operators that have no such step take one of the other degree, if that gives the same number of devices.
        """
        runs, counts = [], set()
        for run in layout:
            number = self.neighbour(size, run.choice, tensor, up)
            if number is None and len(layout) > 1:
                number = self.neighbour(size, run.choice, not tensor, up)
            if number is None:
                return None
            counts.add(self.batches[size].choices[number].choice.devices)
            runs.append(Run(run.first, run.end, number))
        return tuple(runs) if len(counts) == 1 else None

    # -- start --------------------------------------------------------------------------------------------------

    def start(self, stages: int) -> Evaluated | None:
        """Return the balanced configuration that the search of a number of stages begins with.

        Devices and operators are split evenly; all devices of a stage are tensor parallel, as far as that was profiled;
        the micro-batch is the smallest one. None if there is no such configuration.
        """
        counts = even_device_counts(self.problem, stages)
        operators = len(self.problem.operators)
        if counts is None or stages > operators:
            return None
        cuts = [operators * number // stages for number in range(stages + 1)]
        for size in range(len(self.batches)):
            layouts = []
            for number, devices in enumerate(counts):
                run = self._most_tensor_parallel(size, devices, cuts[number], cuts[number + 1])
                if run is None:
                    break
                layouts.append((run,))
            else:
                found = self.evaluate(Configuration(size, tuple(layouts)))
                if found is not None:
                    return found
        return None

    def _most_tensor_parallel(self, size: int, devices: int, first: int, end: int) -> Run | None:
        options = [
            (-costs.choice.tensor_parallel, costs.choice.partition, number)
            for number, costs in enumerate(self.batches[size].choices)
            if costs.choice.devices == devices and bool(np.isfinite(costs.forward_ms[first:end]).all())
        ]
        return Run(first, end, min(options)[2]) if options else None
