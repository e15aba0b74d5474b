"""What a pipeline takes, from its stages: the part of a stage graph that differs from one cost model to the other.

A stage graph finds lower bounds on all pipelines through a stage from *potentials*: a value and a sum of what lies
behind it, and of what lies in front.

Aceso       (N - 1) * max_i t_i + sum_i t_i                                                       → `SlowestAndSum`
1F1B        for every stage i, with k = min(behind_i, N - 1), S_i = sum of t_j behind it:
                sum_{j < i} t_j + N t_i + max(0, S_i - k f_i) + max(0, S_i - k b_i)               → `OneForwardOneBackward`
            The first backward waits for F(i, 0) to go through all stages behind and back, while k other forwards run;
            the last forward likewise, while k other backwards run. (Where N <= behind_i the larger of the two counts,
            both waits may be one.) Before its first forward, and after its last backward, stage i waits for the stages
            in front. Grows with every t, f and b, so lower bounds on these give one on the pipeline.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from solver_plan.parallelism.choices import Floats, Integers


class PipelineValue(Protocol):
    """A way to value pipelines; all arrays have one shape."""

    def behind(self, time: Floats, forward: Floats, behind: int | Integers, value: Floats, total: Floats) -> Floats:
        """Return the value of a stage and what lies behind it: value and sum `total` of that are given."""

    def front(self, time: Floats, value: Floats, total: Floats) -> Floats:
        """Return the value of a stage and what lies in front of it."""

    def least_front(self, per_device_ms: Floats) -> Floats:
        """Return the value of stages in front that have so much work for each device."""

    def through(
        self,
        time: Floats,
        forward: Floats,
        once: Floats,
        behind: int | Integers,
        behind_value: Floats,
        behind_total: Floats,
        front_value: Floats,
        front_total: Floats,
    ) -> Floats:
        """Return the value of pipelines through a stage; infinite where any of it is."""


@dataclass(frozen=True, slots=True)
class SlowestAndSum:
    """`scale` times the slowest stage and `weight` times the sum of all."""

    scale: float
    weight: float = 1.0

    def behind(self, time: Floats, forward: Floats, behind: int | Integers, value: Floats, total: Floats) -> Floats:
        """Return the slowest stage."""
        return np.asarray(np.maximum(time, value))

    def front(self, time: Floats, value: Floats, total: Floats) -> Floats:
        """Return the slowest stage."""
        return np.asarray(np.maximum(time, value))

    def least_front(self, per_device_ms: Floats) -> Floats:
        """Return the slowest stage: at least the mean."""
        return per_device_ms

    def through(
        self,
        time: Floats,
        forward: Floats,
        once: Floats,
        behind: int | Integers,
        behind_value: Floats,
        behind_total: Floats,
        front_value: Floats,
        front_total: Floats,
    ) -> Floats:
        """Return the weighted sum of slowest stage and sum."""
        slowest = np.maximum(np.maximum(time, behind_value), front_value)
        value = np.where(np.isfinite(slowest), 0.0, np.inf)
        if self.scale:
            value = value + self.scale * slowest
        if self.weight:
            value = value + self.weight * (time + behind_total + front_total)
        return np.asarray(value)


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """A lower bound on 1F1B with so many micro-batches, and what comes once an iteration."""

    micro_batches: int

    def own(self, time: Floats, forward: Floats, behind: int | Integers, total: Floats) -> Floats:
        """Return the time from the first forward to the last backward of a stage with a sum `total` behind it."""
        others = np.minimum(behind, self.micro_batches - 1)
        filling = np.maximum(0.0, total - others * forward)
        draining = np.maximum(0.0, total - others * (time - forward))
        waits = np.where(self.micro_batches > behind, filling + draining, np.maximum(filling, draining))
        return np.asarray(self.micro_batches * time + waits)

    def behind(self, time: Floats, forward: Floats, behind: int | Integers, value: Floats, total: Floats) -> Floats:
        """Return the time from the first forward to the last backward of a stage, and of those behind it."""
        return np.asarray(np.maximum(self.own(time, forward, behind, total), time + value))

    def front(self, time: Floats, value: Floats, total: Floats) -> Floats:
        """Return the longest work of a stage, with what lies in front of it."""
        return np.asarray(np.maximum(value, total + self.micro_batches * time))

    def least_front(self, per_device_ms: Floats) -> Floats:
        """Return the work of all micro-batches."""
        return np.asarray(self.micro_batches * per_device_ms)

    def through(
        self,
        time: Floats,
        forward: Floats,
        once: Floats,
        behind: int | Integers,
        behind_value: Floats,
        behind_total: Floats,
        front_value: Floats,
        front_total: Floats,
    ) -> Floats:
        """Return the bound on the schedule, and what this stage takes once an iteration."""
        value = front_total + self.behind(time, forward, behind, behind_value, behind_total)
        # a stage in front waits for this one and all behind it
        return np.asarray(np.maximum(value, front_value) + once)
