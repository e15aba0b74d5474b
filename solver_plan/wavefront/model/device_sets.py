"""The constraint program of tiny problems: each layer picks one of all device sets.

Layers i; options o of a layer: a choice and a set S_o of as many devices. Data: t_o ticks, a_o activation bytes;
weights p of one layer with the layers that use them; N devices in nodes, M bytes of a device.
Variables: x_io layer i runs in option o; start s_i, end e_i (and s'_i, e'_i of the backward); for each dependency
(i, j) with data: q_S both run on S, m_n both run within node n; for weights that several layers use: w_pU devices U
hold them; C latest end; R reduction time. On device d: u_id = sum_{o: d in S_o} x_io.

    minimise C + R,  below the incumbent
    sum_o x_io = 1,   e_i = s_i + sum_o t_o x_io <= C                                            `_layer`
    on each device the layers with u_id = 1 do not overlap; their times sum to at most C         `_devices`
    q_S <= x_iS, x_jS;   m_n <= x_i, x_j within n;   sum_{S in n} q_S <= m_n                     `_delay`
    s_j >= e_i + intra (sum_n m_n - sum_{S in a node} q_S) + inter (1 - sum_n m_n - sum_{other S} q_S)   `_delay`
    sum_U w_pU = 1,   h_pd = sum_{U: d in U} w_pU >= u_id for its users;  h_pd = u_id for one user       `_reduction`
    sum_p state_p h_pd + sum_i sum_o a_o x_io <= M for every d                                   `_holding`
    R >= sum_p sum_{U: d in U} r_p(U) w_pU for every d                                           `_holding`
    the first layer runs on one set of each class of sets that renumbering devices makes equal   `_symmetry`

Against the program of `devices` everything that depends on a set is linear in one Boolean of that set, so that the
linear relaxation knows transfers, reductions and memory. There are 2^N sets: at most `MOST_DEVICES` devices.

Durations, transfers, sizes and reductions are rounded down, so that its bound holds for every plan.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ortools.sat.python import cp_model

from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.model.ticks import floor_ticks, ticks_per_ms
from solver_plan.wavefront.schedule import Run, Schedule

MOST_DEVICES = 4
LONGEST_TICKS = 20_000_000
"""Of the horizon, where not all times are whole at a coarser fineness: rounding down then costs a millionth or less."""
LARGEST_UNIT_COUNT = 10**7
"""Memory is counted in units of bytes so that a device has about this many."""

Devices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Option:
    choice: int
    devices: Devices
    chosen: cp_model.IntVar


class _Layer:
    """One layer of one component."""

    def __init__(self, component: int, layer: int) -> None:
        self.component = component
        self.layer = layer
        self.options: list[_Option] = []
        self.on: list[cp_model.IntVar] = []
        self.work: list[tuple[cp_model.IntVar, cp_model.IntVar]] = []
        """Start and end of the forward, and in two phases of the backward."""

    def runs_on(self, devices: Devices) -> list[cp_model.IntVar]:
        """Return the options on a set of devices."""
        return [option.chosen for option in self.options if option.devices == devices]

    def runs_within(self, devices: frozenset[int]) -> list[cp_model.IntVar]:
        """Return the options on some of the devices."""
        return [option.chosen for option in self.options if devices.issuperset(option.devices)]


class DeviceSetModel:
    """The program for plans no longer than `horizon_ms`, reduction included."""

    def __init__(self, instance: Instance, horizon_ms: float) -> None:
        assert instance.devices <= MOST_DEVICES
        self.instance = instance
        self.model = cp_model.CpModel()
        self.fineness = self._fineness(horizon_ms)
        self.horizon = floor_ticks(horizon_ms, self.fineness) + 1
        self.latest = self.model.new_int_var(0, self.horizon, "C")
        self.reduction = self.model.new_int_var(0, self.horizon, "R")
        self.model.add(self.latest + self.reduction <= self.horizon)
        cluster = instance.cluster
        self.nodes = [
            frozenset(d for d in range(instance.devices) if cluster.node_of(d) == node)
            for node in range(cluster.node_of(instance.devices - 1) + 1)
        ]
        self.layers = [[self._layer(c, layer) for layer in range(instance.layers[c])] for c in instance.components]
        self.all_layers = [layer for own in self.layers for layer in own]
        self._devices()
        for before, after in self._dependencies():
            self._delay(before, after)
        self._holding()
        self._symmetry()
        self.model.minimize(self.latest + self.reduction)

    def _fineness(self, horizon_ms: float) -> int:
        """Return ticks per ms: the fewest that make all times whole, else as many as a horizon may have."""
        instance = self.instance
        cluster = instance.cluster
        times = set()
        for component in instance.components:
            sizes: set[float] = {instance.output_bytes[component]}
            for choice in instance.choices[component]:
                times |= {choice.forward_ms, choice.backward_ms} if instance.two_phases else {choice.layer_ms}
                sizes |= {2 * (k - 1) / k * choice.gradient_bytes for k in range(2, instance.devices + 1)}
            times |= {cluster.ms_to_move(size, within) for size in sizes for within in (True, False)}
        coarse = ticks_per_ms(times, horizon_ms)
        if all(abs(time * coarse - round(time * coarse)) <= 1e-7 * max(1.0, time * coarse) for time in times):
            return coarse
        finest = int(LONGEST_TICKS / horizon_ms)
        # times in whole thirds of microseconds, as most profiles have them, stay whole
        return max(1, finest // 3000 * 3000 or finest)

    def _ticks(self, time_ms: float) -> int:
        return floor_ticks(time_ms, self.fineness)

    def _phase_ticks(self, layer: _Layer, choice: int) -> list[int]:
        found = self.instance.choices[layer.component][choice]
        times = (found.forward_ms, found.backward_ms) if self.instance.two_phases else (found.layer_ms,)
        return [self._ticks(each) for each in times]

    def _layer(self, component: int, number: int) -> _Layer:
        model, instance = self.model, self.instance
        layer = _Layer(component, number)
        for index, choice in enumerate(instance.choices[component]):
            for devices in itertools.combinations(range(instance.devices), choice.devices):
                layer.options.append(_Option(index, devices, model.new_bool_var("")))
        model.add_exactly_one(option.chosen for option in layer.options)
        for device in range(instance.devices):
            on = model.new_bool_var("")
            model.add(on == sum(option.chosen for option in layer.options if device in option.devices))
            layer.on.append(on)
        for phase in range(2 if instance.two_phases else 1):
            start = model.new_int_var(0, self.horizon, "")
            end = model.new_int_var(0, self.horizon, "")
            length = sum(self._phase_ticks(layer, o.choice)[phase] * o.chosen for o in layer.options)
            model.add(end == start + length)
            model.add(end <= self.latest)
            layer.work.append((start, end))
        if instance.two_phases:
            model.add(layer.work[1][0] >= layer.work[0][1])
        return layer

    def _devices(self) -> None:
        model = self.model
        intervals: list[list[cp_model.IntervalVar]] = [[] for _ in range(self.instance.devices)]
        loads: list[list[cp_model.LinearExprT]] = [[] for _ in range(self.instance.devices)]
        for layer in self.all_layers:
            ticks = [self._phase_ticks(layer, option.choice) for option in layer.options]
            for phase, (start, end) in enumerate(layer.work):
                sizes = {each[phase] for each in ticks}
                size = model.new_int_var_from_domain(cp_model.Domain.from_values(sorted(sizes)), "")
                for device, on in enumerate(layer.on):
                    intervals[device].append(model.new_optional_interval_var(start, size, end, on, ""))
            for option, phases in zip(layer.options, ticks, strict=True):
                for device in option.devices:
                    loads[device].append(sum(phases) * option.chosen)
        for on_device, load in zip(intervals, loads, strict=True):
            model.add_no_overlap(on_device)
            model.add(sum(load) <= self.latest)

    def _dependencies(self) -> Iterator[tuple[_Layer, _Layer]]:
        for component, own in enumerate(self.layers):
            yield from itertools.pairwise(own)
            for after in self.instance.successors[component]:
                yield own[-1], self.layers[after][0]

    def _delay(self, before: _Layer, after: _Layer) -> None:
        """The later layer waits for the earlier one and its data; in the backward the other way round."""
        model, cluster = self.model, self.instance.cluster
        size = self.instance.output_bytes[before.component]
        across = self._ticks(cluster.ms_to_move(size, False))
        # where data moves faster between nodes than within, the smaller of both: a relaxation
        within = self._ticks(cluster.ms_to_move(size, True))
        if len(self.nodes) > 1:
            within = min(within, across)
        delay = self.model.new_int_var(0, within if len(self.nodes) == 1 else across, "")
        if within + across > 0:
            near = [self._both(before.runs_within(node), after.runs_within(node)) for node in self.nodes]
            shared = [devices for devices in sorted({o.devices for o in before.options}) if after.runs_on(devices)]
            same_inside: list[cp_model.IntVar] = []
            outside: list[cp_model.IntVar] = []
            for devices in shared:
                same = self._both(before.runs_on(devices), after.runs_on(devices))
                home = next((n for n, node in enumerate(self.nodes) if node.issuperset(devices)), None)
                (outside if home is None else same_inside).append(same)
                if home is not None:
                    model.add_implication(same, near[home])
            model.add_at_most_one([*near, *outside])
            model.add_at_most_one(same_inside)
            apart = cp_model.LinearExpr.sum([*near, *outside])
            moved = cp_model.LinearExpr.sum(near) - cp_model.LinearExpr.sum(same_inside)
            model.add(delay >= within * moved + across - across * apart)
        model.add(after.work[0][0] >= before.work[0][1] + delay)
        if self.instance.two_phases:
            model.add(before.work[1][0] >= after.work[1][1] + delay)

    def _both(self, one: list[cp_model.IntVar], two: list[cp_model.IntVar]) -> cp_model.IntVar:
        """Return a Boolean that can only be true where one of each is."""
        both = self.model.new_bool_var("")
        self.model.add(both <= sum(one))
        self.model.add(both <= sum(two))
        return both

    def _holding(self) -> None:
        """Memory of each device, and the reduction of what several devices hold."""
        model, instance = self.model, self.instance
        limit = instance.memory_limit
        room: list[list[cp_model.LinearExprT]] = [[] for _ in range(instance.devices)]
        reduced: list[list[cp_model.LinearExprT]] = [[] for _ in range(instance.devices)]
        sharing: dict[tuple[int, int], list[_Layer]] = {}
        for layer in self.all_layers:
            sharing.setdefault((instance.parameters[layer.component], layer.layer), []).append(layer)
        unit = 1 if limit is None else max(1, limit // LARGEST_UNIT_COUNT)
        for users in sharing.values():
            self._reduction(users, reduced)
            if limit is not None:
                self._state(users, unit, room)
        for layer in self.all_layers:
            for option in layer.options:
                size = int(instance.choices[layer.component][option.choice].activation_bytes) // unit
                for device in option.devices:
                    room[device].append(size * option.chosen)
        if limit is not None:
            # check allows a byte for each slice
            most = (limit + sum(instance.layers)) // unit
            for each in room:
                model.add(sum(each) <= most)
        for each in reduced:
            model.add(sum(each) <= self.reduction)

    def _reduction_ticks(self, devices: Devices, gradient_bytes: int) -> int:
        count = len(devices)
        within = any(node.issuperset(devices) for node in self.nodes)
        return self._ticks(self.instance.cluster.ms_to_move(2 * (count - 1) / count * gradient_bytes, within))

    def _reduction(self, users: list[_Layer], reduced: list[list[cp_model.LinearExprT]]) -> None:
        """Add what each holder of some weights spends on reducing them."""
        instance, model = self.instance, self.model
        if len(users) == 1:
            for option in users[0].options:
                time = self._reduction_ticks(option.devices, self._gradient_bytes(users[0], option.choice))
                for device in option.devices:
                    reduced[device].append(time * option.chosen)
            return
        # where modes reduce different sizes, the least: a relaxation
        sizes = [min(self._gradient_bytes(layer, option.choice) for option in layer.options) for layer in users]
        if max(sizes) == 0:
            return
        sets = [
            devices
            for size in range(1, instance.devices + 1)
            for devices in itertools.combinations(range(instance.devices), size)
        ]
        holds = [model.new_bool_var("") for _ in sets]
        model.add_exactly_one(holds)
        least = min(sizes)
        for device in range(instance.devices):
            here = [(devices, held) for devices, held in zip(sets, holds, strict=True) if device in devices]
            for layer in users:
                model.add(sum(held for _, held in here) >= layer.on[device])
            more = model.new_int_var(0, self.horizon, "")
            reduced[device].append(more)
            for devices, held in here:
                time = self._reduction_ticks(devices, least)
                reduced[device].append(time * held)
                for layer, size in zip(users, sizes, strict=True):
                    if size > least:
                        extra = self._reduction_ticks(devices, size) - time
                        model.add(more >= extra).only_enforce_if([held, layer.on[device]])

    def _gradient_bytes(self, layer: _Layer, choice: int) -> int:
        return self.instance.choices[layer.component][choice].gradient_bytes

    def _state(self, users: list[_Layer], unit: int, room: list[list[cp_model.LinearExprT]]) -> None:
        """Weights count once on a device, in the largest share that a layer there holds."""
        model, instance = self.model, self.instance

        def size(layer: _Layer, option: _Option) -> int:
            return instance.choices[layer.component][option.choice].state_bytes // unit

        largest = max(size(layer, option) for layer in users for option in layer.options)
        for device, total in enumerate(room):
            here = [sum(size(u, o) * o.chosen for o in u.options if device in o.devices) for u in users]
            if len(here) == 1:
                total.append(here[0])
                continue
            held = model.new_int_var(0, largest, "")
            for each in here:
                model.add(held >= each)
            total.append(held)

    def _symmetry(self) -> None:
        """Devices of a node are alike, and so are nodes of one size."""
        layer = max(self.all_layers, key=lambda each: len(each.options))
        seen: set[tuple[tuple[int, int], ...]] = set()
        for devices in sorted({option.devices for option in layer.options}):
            pattern = tuple(sorted((len(node), len(node.intersection(devices))) for node in self.nodes))
            if pattern in seen:
                for chosen in layer.runs_on(devices):
                    self.model.add(chosen == 0)
            seen.add(pattern)

    def read(self, value: Callable[[cp_model.IntVar], int]) -> Schedule:
        """Return the schedule of a solution: what runs where, in order of start."""
        runs = []
        works: list[tuple[tuple[int, int, int, int], int]] = []
        position = {component: place for place, component in enumerate(self.instance.topological)}
        count = len(self.all_layers)
        for index, layer in enumerate(self.all_layers):
            option = next(option for option in layer.options if value(option.chosen))
            runs.append(Run(layer.component, layer.layer, layer.layer + 1, option.choice, option.devices))
            place = position[layer.component]
            works.append(((value(layer.work[0][0]), 0, place, layer.layer), index))
            if len(layer.work) > 1:
                # work of no ticks keeps the order of the backward: successors and later layers first
                works.append(((value(layer.work[1][0]), 1, -place, -layer.layer), count + index))
        return Schedule(tuple(runs), tuple(work for _, work in sorted(works)))

    def milliseconds(self, ticks: int) -> float:
        """Return ticks as ms, a little less for floating-point error."""
        return ticks / self.fineness * (1 - 1e-12)
