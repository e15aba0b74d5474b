"""The wavefront problem: several tasks on one cluster, each task a DAG of components, each component a chain of layers.

Field names follow `documents.md`; what is added is marked *added*.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Literal, Self

from annotated_types import Ge, Le, Len
from pydantic import StringConstraints, model_validator

from solver_plan.documents import Bytes, Count, Devices, Milliseconds, Name, PerSecond, ProblemDocument, document, fail

DeviceCount = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,8}$")]
"""A number of devices as a JSON key."""
LEAST_LAYER_MS = 1e-6
"""The tolerance of `check`: what takes less cannot be told from what takes no time."""
LONGEST_MS = 1e12
"""Of all layers one after another, 31 years: beyond, no solver counts time to the millisecond."""
MOST_BYTES = 10**18
"""Of all layers together, the largest size that a document states."""
MOST_LAYERS = 100_000
"""Of all components together: many times the deepest models, and few enough to be counted one by one."""
LayerMilliseconds = Annotated[float, Ge(LEAST_LAYER_MS), Le(LONGEST_MS)]
Phases = Literal["fused", "forward_backward"]


@document
class Cluster:
    """Equal devices in equal nodes; device r is on node r // devices_per_node."""

    devices: Devices
    devices_per_node: Count
    memory_bytes_per_device: Bytes | None = None
    """None: memory does not limit."""
    intra_node_bytes_per_s: PerSecond | None = None
    """None: moving data within a node is free."""
    inter_node_bytes_per_s: PerSecond | None = None
    """None: moving data between nodes is free."""

    def node_of(self, device: int) -> int:
        """Return the node of a device."""
        return device // self.devices_per_node

    def in_one_node(self, devices: Sequence[int]) -> bool:
        """Tell whether all the devices are on one node."""
        return not devices or self.node_of(min(devices)) == self.node_of(max(devices))

    def ms_to_move(self, size_bytes: float, within_node: bool) -> float:
        """Return the milliseconds that moving data takes, 0 where the bandwidth is not given."""
        rate = self.intra_node_bytes_per_s if within_node else self.inter_node_bytes_per_s
        return 0.0 if rate is None else 1000.0 * size_bytes / rate


@document
class Mode:
    """One way to run a layer of a component; sizes are of one device."""

    devices: Count
    forward_ms: LayerMilliseconds
    backward_ms: Milliseconds
    """0: frozen, the layer has no backward."""
    state_bytes_per_layer: Bytes = 0
    activation_bytes_per_layer: Bytes = 0
    gradient_bytes_per_layer: Bytes | None = None
    """*Added.* What one device reduces of a layer; None: the component's."""
    degrees: dict[Name, Count] | None = None
    """Parallel degrees, such as tensor_parallel and data_parallel; their product is `devices`."""

    @model_validator(mode="after")
    def _degrees_multiply(self) -> Self:
        product = 1
        for degree in (self.degrees or {}).values():
            product *= degree
        if self.degrees is not None and product != self.devices:
            raise fail("degrees", product, f"the product of the degrees is the number of devices, {self.devices}")
        return self


@document
class Component:
    """A chain of equal layers: the same type, the same input size."""

    name: Name
    task: Name
    layers: Count
    layer_ms: dict[DeviceCount, LayerMilliseconds] | None = None
    """Number of devices to time of one layer, forward and backward; forward is one third."""
    modes: Annotated[tuple[Mode, ...], Len(1)] | None = None
    """In place of `layer_ms`."""
    parameters: Name | None = None
    """Components with the same key share weights layer by layer; None: its own weights."""
    state_bytes_per_layer: Bytes = 0
    """Weights, gradients and optimizer state of one layer; with `modes` theirs counts."""
    activation_bytes_per_layer: Bytes = 0
    """Of the whole batch, each of n devices holds 1/n; with `modes` theirs counts."""
    gradient_bytes_per_layer: Bytes = 0
    """What is reduced between the devices that share a layer."""
    output_bytes: Bytes = 0
    """What its successors, and its own next slice on other devices, need of it."""
    batch: Count | None = None
    """*Added.* Samples that it takes in one iteration, which its devices share; running needs it, planning does not."""

    @model_validator(mode="after")
    def _one_way_to_give_times(self) -> Self:
        if (self.layer_ms is None) == (self.modes is None):
            found = "neither" if self.layer_ms is None else "both"
            raise fail("layer_ms", found, "a component has either layer_ms or modes")
        if self.layer_ms is not None and not self.layer_ms:
            raise fail("layer_ms", {}, "give the time of a layer for at least one number of devices")
        return self


@document
class WavefrontProblem(ProblemDocument):
    """Several tasks that share a cluster."""

    kind: Literal["wavefront"] = "wavefront"
    cluster: Cluster
    model: Name | None = None
    """*Added.* What execution builds, as ``models/multitask_clip.py:clip4``; planning never reads it."""
    phases: Phases = "fused"
    """`fused`: forward and backward of a slice are one piece of work; `forward_backward`: two, on the same devices."""
    components: Annotated[tuple[Component, ...], Len(1)]
    edges: tuple[tuple[Name, Name], ...] = ()
    """(predecessor, successor)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names: dict[str, int] = {}
        sharing: dict[str, Component] = {}
        for index, component in enumerate(self.components):
            place = f"components[{index}]"
            if component.name in names:
                raise fail(f"{place}.name", component.name, "names are unique")
            names[component.name] = index
            counts = _device_counts(component)
            if min(counts) > self.cluster.devices:
                rule = f"at least one mode has at most {self.cluster.devices} devices, as the cluster has"
                raise fail(f"{place}.{'layer_ms' if component.layer_ms else 'modes'}", sorted(counts), rule)
            if component.parameters is None:
                continue
            first = sharing.setdefault(component.parameters, component)
            if first.layers != component.layers:
                rule = f"{first.name} shares these parameters and has {first.layers} layers: the numbers are equal"
                raise fail(f"{place}.layers", component.layers, rule)
            both_plain = first.modes is None and component.modes is None
            if both_plain and first.state_bytes_per_layer != component.state_bytes_per_layer:
                rule = f"{first.name} shares these parameters with {first.state_bytes_per_layer} bytes: they are equal"
                raise fail(f"{place}.state_bytes_per_layer", component.state_bytes_per_layer, rule)
        seen: set[tuple[str, str]] = set()
        for index, edge in enumerate(self.edges):
            for end, name in enumerate(edge):
                if name not in names:
                    raise fail(f"edges[{index}][{end}]", name, "an edge joins two components by name")
            if edge in seen:
                raise fail(f"edges[{index}]", list(edge), "each edge once")
            seen.add(edge)
        cycle = _cycle(self.edges)
        if cycle:
            raise fail("edges", " -> ".join(cycle), "edges have no cycle; remove one of these")
        self._refuse_what_is_too_large()
        return self

    def _refuse_what_is_too_large(self) -> None:
        layers = sum(component.layers for component in self.components)
        if layers > MOST_LAYERS:
            raise fail("components", f"{layers} layers", f"all components together have at most {MOST_LAYERS}")
        held = sum(_most_bytes(component) for component in self.components)
        if held > MOST_BYTES:
            raise fail(
                "components", f"{held:.3g} bytes of state and activations", f"they sum to at most {MOST_BYTES:g}"
            )
        longest_ms = sum(_most_ms(component, self.cluster) for component in self.components)
        outputs = {component.name: component.output_bytes for component in self.components}
        moved = sum(outputs[before] for before, _ in self.edges)
        moved += sum(component.output_bytes * (component.layers - 1) for component in self.components)
        longest_ms += 2 * _most_ms_to_move(self.cluster, moved)
        if longest_ms > LONGEST_MS:
            rule = f"one layer after another they take at most {LONGEST_MS:g} ms, transfers and reductions included"
            raise fail("components", f"{longest_ms:.3g} ms", rule)

    @cached_property
    def component_of(self) -> Mapping[str, Component]:
        """Component of each name."""
        return {component.name: component for component in self.components}


def _device_counts(component: Component) -> list[int]:
    if component.modes is not None:
        return [mode.devices for mode in component.modes]
    assert component.layer_ms is not None
    return [int(count) for count in component.layer_ms]


def _most_bytes(component: Component) -> int:
    """Return the state and the activations of all layers, in the mode where they are most."""
    if component.modes is None:
        return component.layers * (component.state_bytes_per_layer + component.activation_bytes_per_layer)
    return component.layers * max(
        mode.state_bytes_per_layer + mode.activation_bytes_per_layer for mode in component.modes
    )


def _most_ms(component: Component, cluster: Cluster) -> float:
    """Return the time of all layers in the slowest mode, and of reducing their gradients."""
    gradient = component.gradient_bytes_per_layer
    if component.modes is None:
        slowest_ms = max((component.layer_ms or {}).values())
    else:
        slowest_ms = max(mode.forward_ms + mode.backward_ms for mode in component.modes)
        gradient = max(gradient, *(mode.gradient_bytes_per_layer or 0 for mode in component.modes))
    return component.layers * (slowest_ms + 2 * _most_ms_to_move(cluster, gradient))


def _most_ms_to_move(cluster: Cluster, size_bytes: float) -> float:
    return max(cluster.ms_to_move(size_bytes, within_node) for within_node in (True, False))


def _cycle(edges: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names along a cycle, first and last the same; empty if there is none."""
    successors: dict[str, list[str]] = {}
    incoming: dict[str, int] = {}
    for before, after in edges:
        successors.setdefault(before, []).append(after)
        incoming[after] = incoming.get(after, 0) + 1
        incoming.setdefault(before, 0)
    ready = [name for name, count in incoming.items() if count == 0]
    while ready:
        for after in successors.get(ready.pop(), []):
            incoming[after] -= 1
            if incoming[after] == 0:
                ready.append(after)
    left = {name for name, count in incoming.items() if count > 0}
    if not left:
        return []
    predecessors = {after: before for before, after in edges if before in left and after in left}
    path = [min(name for name in left if name in predecessors)]
    while path[-1] not in path[:-1]:
        path.append(predecessors[path[-1]])
    return path[path.index(path[-1]) :][::-1]
