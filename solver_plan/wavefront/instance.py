"""A wavefront problem in numbered form: what every heuristic, bound and model of this wing reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from solver_plan.wavefront.costs import Choice, choices_of, parameters_of
from solver_plan.wavefront.problem import Cluster, WavefrontProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Components by number; names stay in `problem`."""

    problem: WavefrontProblem
    cluster: Cluster
    devices: int
    two_phases: bool
    layers: tuple[int, ...]
    choices: tuple[tuple[Choice, ...], ...]
    """Ways to run a layer of each component, fewest devices first; without dominated ones where only time counts."""
    predecessors: tuple[tuple[int, ...], ...]
    successors: tuple[tuple[int, ...], ...]
    topological: tuple[int, ...]
    parameters: tuple[int, ...]
    """Number of each component's weights; equal numbers share them."""
    output_bytes: tuple[int, ...]
    device_sets_matter: bool
    """False: only how many devices run a slice counts, any free ones will do."""

    @property
    def components(self) -> range:
        """Numbers of the components."""
        return range(len(self.layers))

    @property
    def memory_limit(self) -> int | None:
        """Bytes of a device."""
        return self.cluster.memory_bytes_per_device

    def keeps_memory(self, device_memory_bytes: Sequence[int]) -> bool:
        """Tell whether no device holds more than the limit, if there is one."""
        return self.memory_limit is None or max(device_memory_bytes) <= self.memory_limit

    def shortest_ms(self, component: int) -> float:
        """Return the least time that all layers of a component take."""
        return self.layers[component] * min(choice.layer_ms for choice in self.choices[component])


def instance_of(problem: WavefrontProblem) -> Instance:
    """Number the components of a problem."""
    number = {component.name: index for index, component in enumerate(problem.components)}
    cluster = problem.cluster
    predecessors: list[list[int]] = [[] for _ in number]
    successors: list[list[int]] = [[] for _ in number]
    for before, after in problem.edges:
        predecessors[number[after]].append(number[before])
        successors[number[before]].append(number[after])
    choices = [choices_of(component, cluster.devices) for component in problem.components]
    links = cluster.intra_node_bytes_per_s is not None or cluster.inter_node_bytes_per_s is not None
    outputs = any(component.output_bytes for component in problem.components)
    gradients = any(choice.gradient_bytes for each in choices for choice in each)
    sizes = any(choice.state_bytes or choice.activation_bytes for each in choices for choice in each)
    memory = cluster.memory_bytes_per_device is not None and sizes
    if not memory:
        choices = [_fastest(each) for each in choices]
    keys: dict[tuple[str, str], int] = {}
    for component in problem.components:
        keys.setdefault(parameters_of(component), len(keys))
    return Instance(
        problem=problem,
        cluster=cluster,
        devices=cluster.devices,
        two_phases=problem.phases == "forward_backward",
        layers=tuple(component.layers for component in problem.components),
        choices=tuple(choices),
        predecessors=tuple(tuple(each) for each in predecessors),
        successors=tuple(tuple(each) for each in successors),
        topological=_topological(predecessors, successors),
        parameters=tuple(keys[parameters_of(component)] for component in problem.components),
        output_bytes=tuple(component.output_bytes for component in problem.components),
        device_sets_matter=memory or (links and (outputs or gradients)),
    )


def _fastest(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Drop what costs no less time, forward or backward, than another choice with no more devices or gradients."""
    return tuple(
        choice
        for index, choice in enumerate(choices)
        if not any(
            other.devices <= choice.devices
            and other.forward_ms <= choice.forward_ms
            and other.backward_ms <= choice.backward_ms
            and other.gradient_bytes <= choice.gradient_bytes
            and (index > place or _costs(other) != _costs(choice))
            for place, other in enumerate(choices)
            if place != index
        )
    )


def _costs(choice: Choice) -> tuple[float, ...]:
    return choice.devices, choice.forward_ms, choice.backward_ms, choice.gradient_bytes


def _topological(predecessors: Sequence[Sequence[int]], successors: Sequence[Sequence[int]]) -> tuple[int, ...]:
    waiting = [len(each) for each in predecessors]
    ready = [index for index, count in enumerate(waiting) if count == 0]
    order: list[int] = []
    for index in ready:  # grows while it is walked
        order.append(index)
        for after in successors[index]:
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)
    assert len(order) == len(waiting)
    return tuple(order)
