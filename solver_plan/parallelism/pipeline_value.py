"""What a pipeline takes, from its stages: the part of a stage graph that differs from one cost model to the other.

A stage graph finds lower bounds on all pipelines through a stage from *potentials*: a value and a sum of what lies
behind it, and of what lies in front.

Aceso       (N - 1) * max_i t_i + sum_i t_i                                                       → `SlowestAndSum`
1F1B        for every stage i, with h_j = t_j + a_j + l_j (transfers of input and gradient that overlap computation),
            k = min(behind_i, N - 1), S_i = l_i + sum of h_j behind it:
                sum_{j < i} h_j + a_i + N t_i + max(0, S_i - k f_i) + max(0, S_i - k b_i)      → `OneForwardOneBackward`
            The first backward waits for F(i, 0) to go through all stages behind and back, while k other forwards run;
            the last forward likewise, while k other backwards run. (With N <= behind_i + 1 all forwards come before
            all backwards: both waits may be one, and the larger counts.) Before its first forward, and after its last
            backward, stage i waits for the stages in front. Grows with every t, f and b, so lower bounds on these give
            one on the pipeline.
"""

from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from solver_plan.parallelism.choices import Floats, Integers


@dataclass(frozen=True, slots=True, eq=False)
class StageTimes:
    """What a pipeline's value depends on, of one stage; all arrays have one shape."""

    time_ms: Floats
    """One micro-batch, forward and backward."""
    forward_ms: Floats
    """The part of it in the forward."""
    once_ms: Floats
    """Once an iteration."""
    arrive_ms: Floats
    """Transfer of the input, where it overlaps computation."""
    leave_ms: Floats
    """Transfer of the output's gradient, where it overlaps computation."""

    def select(self, index: Integers) -> "StageTimes":
        """Return some of the stages."""
        return StageTimes(*(getattr(self, field.name)[index] for field in fields(self)))

    @property
    def through_ms(self) -> Floats:
        """What a micro-batch takes to pass, both ways."""
        return self.time_ms + self.arrive_ms + self.leave_ms


class PipelineValue(Protocol):
    """A way to value pipelines; all arrays have one shape."""

    def behind(self, stage: StageTimes, behind: int | Integers, value: Floats, total: Floats) -> Floats:
        """Return the value of a stage and what lies behind it: value and sum `total` of that are given."""

    def front(self, stage: StageTimes, value: Floats, total: Floats) -> Floats:
        """Return the value of a stage and what lies in front of it."""

    def least_front(self, per_device_ms: Floats) -> Floats:
        """Return the value of stages in front that have so much work for each device."""

    def through(
        self,
        stage: StageTimes,
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

    def behind(self, stage: StageTimes, behind: int | Integers, value: Floats, total: Floats) -> Floats:
        """Return the slowest stage."""
        return np.asarray(np.maximum(stage.time_ms, value))

    def front(self, stage: StageTimes, value: Floats, total: Floats) -> Floats:
        """Return the slowest stage."""
        return np.asarray(np.maximum(stage.time_ms, value))

    def least_front(self, per_device_ms: Floats) -> Floats:
        """Return the slowest stage: at least the mean."""
        return per_device_ms

    def through(
        self,
        stage: StageTimes,
        behind: int | Integers,
        behind_value: Floats,
        behind_total: Floats,
        front_value: Floats,
        front_total: Floats,
    ) -> Floats:
        """Return the weighted sum of slowest stage and sum."""
        slowest = np.maximum(np.maximum(stage.time_ms, behind_value), front_value)
        value = np.where(np.isfinite(slowest), 0.0, np.inf)
        if self.scale:
            value = value + self.scale * slowest
        if self.weight:
            value = value + self.weight * (stage.time_ms + behind_total + front_total)
        return np.asarray(value)


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """A lower bound on 1F1B with so many micro-batches, and what comes once an iteration."""

    micro_batches: int

    def own(self, stage: StageTimes, behind: int | Integers, total: Floats) -> Floats:
        """Return the time from the end of the forward before to the last backward, with a sum `total` behind it."""
        others = np.minimum(behind, self.micro_batches - 1)
        round_trip = total + stage.leave_ms
        backward = np.where(np.isfinite(stage.time_ms), stage.time_ms - stage.forward_ms, 0.0)
        filling = np.maximum(0.0, round_trip - others * stage.forward_ms)
        draining = np.maximum(0.0, round_trip - others * backward)
        waits = np.where(self.micro_batches > np.asarray(behind) + 1, filling + draining, np.maximum(filling, draining))
        return np.asarray(stage.arrive_ms + self.micro_batches * stage.time_ms + waits)

    def behind(self, stage: StageTimes, behind: int | Integers, value: Floats, total: Floats) -> Floats:
        """Return the time from the first forward to the last backward of a stage, and of those behind it."""
        return np.asarray(np.maximum(self.own(stage, behind, total), stage.through_ms + value))

    def front(self, stage: StageTimes, value: Floats, total: Floats) -> Floats:
        """Return the longest work of a stage, with what lies in front of it."""
        return np.asarray(np.maximum(value, total + stage.arrive_ms + self.micro_batches * stage.time_ms))

    def least_front(self, per_device_ms: Floats) -> Floats:
        """Return the work of all micro-batches."""
        return np.asarray(self.micro_batches * per_device_ms)

    def through(
        self,
        stage: StageTimes,
        behind: int | Integers,
        behind_value: Floats,
        behind_total: Floats,
        front_value: Floats,
        front_total: Floats,
    ) -> Floats:
        """Return the bound on the schedule, and what this stage takes once an iteration."""
        value = front_total + self.behind(stage, behind, behind_value, behind_total)
        return np.asarray(np.maximum(value, front_value) + stage.once_ms)
