"""The constraint program where any free devices will do: slices with a changing number of devices, no barriers.

Sets and data: components c with L_c layers, choices k with n_ck devices and t_ck ticks a layer, edges E, N devices.
Each free component has slices j = 1..J_c; the others keep the layers and choices of their segments.
Variables: b_cjk in {0,1} slice j runs in choice k; l_cjk whole layers; start s_cj; C makespan.

    minimise C
    sum_k b_cjk = 1,   0 <= l_cjk <= L_c b_cjk,   sum_jk l_cjk = L_c            every layer once          `_free`
    d_cj = sum_k t_ck l_cjk,   e_cj = s_cj + d_cj <= C                          duration, makespan        `_interval`
    e_cj <= s_c,j+1;   e_c,last <= s_d,1 for (c, d) in E                        order, precedence         `_precedence`
    sum over slices that run at any time of sum_k n_ck b_cjk <= N               cumulative                `_capacity`
    sum_cjk n_ck t_ck l_cjk <= N C                                              area cut                  `_capacity`

A slice of no layers takes no time and occupies nothing. With one slice of one layer for each layer the program allows
every plan, and its bound holds for every plan; with fewer slices it holds for those only. Intervals that keep the
cumulative always get devices: at each start enough are free.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

from ortools.sat.python import cp_model

from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.model.ticks import floor_ticks, ticks_per_ms
from solver_plan.wavefront.schedule import Segment


class _Slice:
    """One slice of the program: variables, or constants where it is fixed."""

    def __init__(self, component: int, start: cp_model.IntVar, end: cp_model.IntVar) -> None:
        self.component = component
        self.start = start
        self.end = end
        self.chosen: list[cp_model.IntVar] = []
        self.layers: list[cp_model.IntVar] = []
        self.fixed: Segment | None = None


class CapacityModel:
    """The program for a list of segments that ends by `horizon_ms`.

    Parameters
    ----------
    instance
        The problem.
    segments
        A list of segments in order of start that is the incumbent, and the hint.
    horizon_ms
        Its makespan.
    free
        Components that may change layers and choices; None: all, with a slice for every layer.
    slices
        Slices of a free component; at least as many as its segments.
    """

    def __init__(
        self,
        instance: Instance,
        segments: Sequence[Segment],
        horizon_ms: float,
        free: frozenset[int] | None = None,
        slices: int = 3,
    ) -> None:
        self.instance = instance
        times = [choice.layer_ms for each in instance.choices for choice in each]
        self.fineness = ticks_per_ms(times, horizon_ms)
        self.model = cp_model.CpModel()
        self.horizon = floor_ticks(horizon_ms, self.fineness) + 1
        self.makespan = self.model.new_int_var(0, self.horizon, "C")
        self.hints: dict[cp_model.IntVar, int] = {}
        self._intervals: list[cp_model.IntervalVar] = []
        self._demands: list[cp_model.LinearExprT] = []
        self._area: list[cp_model.LinearExprT] = []
        self.slices: list[list[_Slice]] = []
        of: list[list[Segment]] = [[] for _ in instance.components]
        for segment in segments:
            of[segment.component].append(segment)
        for component in instance.components:
            if free is None:
                single = [
                    Segment(component, 1, segment.choice) for segment in of[component] for _ in range(segment.layers)
                ]
                self.slices.append([self._free(component, segment, one_layer=True) for segment in single])
            elif component in free:
                start = [*of[component], *[None] * (slices - len(of[component]))]
                own = [self._free(component, segment, one_layer=False) for segment in start]
                self.slices.append(own)
                self.model.add(sum(x for each in own for x in each.layers) == instance.layers[component])
            else:
                self.slices.append([self._fixed(segment) for segment in of[component]])
        self._precedence()
        self._capacity()
        self.model.minimize(self.makespan)
        self._hint_times(segments, one_layer=free is None)

    def _ticks(self, component: int) -> list[int]:
        return [floor_ticks(choice.layer_ms, self.fineness) for choice in self.instance.choices[component]]

    def _interval(self, component: int, duration: cp_model.LinearExprT) -> _Slice:
        start = self.model.new_int_var(0, self.horizon, "")
        end = self.model.new_int_var(0, self.horizon, "")
        self._intervals.append(self.model.new_interval_var(start, duration, end, ""))
        self.model.add(end <= self.makespan)
        return _Slice(component, start, end)

    def _free(self, component: int, segment: Segment | None, one_layer: bool) -> _Slice:
        """Add a slice whose choice, and unless it has one layer whose number of layers, is open."""
        model = self.model
        choices = self.instance.choices[component]
        total = self.instance.layers[component]
        ticks = self._ticks(component)
        chosen = [model.new_bool_var("") for _ in choices]
        model.add_exactly_one(chosen)
        layers = chosen if one_layer else [model.new_int_var(0, total, "") for _ in choices]
        if not one_layer:
            for b, x in zip(chosen, layers, strict=True):
                model.add(x <= total * b)
        duration = model.new_int_var(0, self.horizon, "")
        model.add(duration == sum(t * x for t, x in zip(ticks, layers, strict=True)))
        found = self._interval(component, duration)
        found.chosen, found.layers = chosen, layers
        counts = [choice.devices for choice in choices]
        demand = model.new_int_var_from_domain(cp_model.Domain.from_values(counts), "")
        model.add(demand == sum(n * b for n, b in zip(counts, chosen, strict=True)))
        self._demands.append(demand)
        self.hints[demand] = counts[0 if segment is None else segment.choice]
        self._area.append(sum(choice.devices * t * x for choice, t, x in zip(choices, ticks, layers, strict=True)))
        self.hints[duration] = 0 if segment is None else ticks[segment.choice] * segment.layers
        for k, (b, x) in enumerate(zip(chosen, layers, strict=True)):
            is_hint = k == (0 if segment is None else segment.choice)
            self.hints[x] = segment.layers if segment is not None and is_hint else 0
            self.hints[b] = int(is_hint)
        return found

    def _fixed(self, segment: Segment) -> _Slice:
        """Add a slice that keeps its layers and its choice."""
        duration = self._ticks(segment.component)[segment.choice] * segment.layers
        found = self._interval(segment.component, duration)
        found.fixed = segment
        devices = self.instance.choices[segment.component][segment.choice].devices
        self._demands.append(devices)
        self._area.append(devices * duration)
        return found

    def _precedence(self) -> None:
        for component, own in enumerate(self.slices):
            for before, after in itertools.pairwise(own):
                self.model.add(before.end <= after.start)
            for after_component in self.instance.successors[component]:
                self.model.add(own[-1].end <= self.slices[after_component][0].start)

    def _capacity(self) -> None:
        self.model.add_cumulative(self._intervals, self._demands, self.instance.devices)
        self.model.add(sum(self._area) <= self.instance.devices * self.makespan)

    def _hint_times(self, segments: Sequence[Segment], one_layer: bool) -> None:
        """Hint the earliest times of the incumbent's order, in ticks."""
        instance = self.instance
        free = [0] * instance.devices
        ready = [0] * len(instance.layers)
        left = list(instance.layers)
        at = [0] * len(instance.layers)
        latest = 0
        for segment in segments:
            component = segment.component
            choice = instance.choices[component][segment.choice]
            start = max(ready[component], free[choice.devices - 1])
            ticks = self._ticks(component)[segment.choice]
            count = segment.layers if one_layer else 1
            for _ in range(count):
                piece = self.slices[component][at[component]]
                at[component] += 1
                self.hints[piece.start] = start
                start += ticks * (segment.layers // count)
                self.hints[piece.end] = start
            fit = sum(1 for each in free if each <= start - ticks * segment.layers)
            free[fit - choice.devices : fit] = []
            free = sorted([*free, *[start] * choice.devices])
            ready[component] = start
            latest = max(latest, start)
            left[component] -= segment.layers
            if left[component] == 0:
                for rest in self.slices[component][at[component] :]:
                    self.hints[rest.start] = self.hints[rest.end] = start
                for after in instance.successors[component]:
                    ready[after] = max(ready[after], start)
        self.hints[self.makespan] = latest

    @property
    def hint(self) -> Mapping[cp_model.IntVar, int]:
        """The incumbent as values of all variables."""
        return self.hints

    def read(self, value: Callable[[cp_model.IntVar], int]) -> list[Segment]:
        """Return the segments of a solution in order of start."""
        position = {component: place for place, component in enumerate(self.instance.topological)}
        found: list[tuple[tuple[int, int, int], Segment]] = []
        for each in self.slices:
            for index, piece in enumerate(each):
                key = value(piece.start), position[piece.component], index
                if piece.fixed is not None:
                    found.append((key, piece.fixed))
                    continue
                for choice, (b, x) in enumerate(zip(piece.chosen, piece.layers, strict=True)):
                    if value(b) and value(x):
                        found.append((key, Segment(piece.component, value(x), choice)))
        return [segment for _, segment in sorted(found, key=lambda pair: pair[0])]

    def milliseconds(self, ticks: int) -> float:
        """Return ticks as ms, a little less for floating-point error."""
        return ticks / self.fineness * (1 - 1e-12)
