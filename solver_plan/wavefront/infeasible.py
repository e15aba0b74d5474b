"""Why no plan fits the memory: which device, which components, how much is missing, and what would help.

From the cheapest proof to the dearest: one layer that no mode fits on a device; the state and activations of all
components together against all devices; and, where the layers are few, the constraint program without times, which
finds the least memory per device at which a plan exists.
"""

from dataclasses import dataclass

from ortools.sat.python import cp_model

from solver_plan.errors import InfeasibleProblemError
from solver_plan.solving import Clock
from solver_plan.solving.cp_sat import solve_cp_sat
from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Run, Schedule, in_list_order

MOST_PLACEMENTS = 20_000
"""Variables of the program, beyond which it is not tried."""
MOST_NAMED = 5
GIGA = 1e9


def refuse_what_cannot_fit(instance: Instance) -> None:
    """Raise `InfeasibleProblemError` if one layer, or everything together, exceeds the memory."""
    limit = instance.memory_limit
    if limit is None:
        return
    names = [component.name for component in instance.problem.components]
    for component, choices in enumerate(instance.choices):
        needs = [(choice.state_bytes + choice.activation_bytes, choice.devices) for choice in choices]
        least, devices = min(needs)
        if least > limit + 1:
            missing = int(least - limit)
            raise InfeasibleProblemError(
                f"memory: one layer of {names[component]} needs {_size(least)} on each of {devices} devices, "
                f"{_size(missing)} more than the {_size(limit)} of any device (device 0 as well as the others); "
                f"give devices {_size(least)}, or add a mode with more devices or sharded state"
            )
    state: dict[int, float] = {}
    kept = 0.0
    share: list[tuple[float, str]] = []
    for component, choices in enumerate(instance.choices):
        layers = instance.layers[component]
        key = instance.parameters[component]
        held = layers * min(choice.devices * choice.state_bytes for choice in choices)
        state[key] = max(state.get(key, 0.0), held)
        activations = layers * min(choice.devices * choice.activation_bytes for choice in choices)
        kept += activations
        share.append((held + activations, names[component]))
    total = sum(state.values()) + kept
    room = limit * instance.devices
    if total > room + instance.devices * sum(instance.layers):
        raise InfeasibleProblemError(
            f"memory: all {instance.devices} devices together have {_size(room)}, state and activations need at least "
            f"{_size(total)}, {_size(total - room)} more; most of it is {_largest(share)}; give each device "
            f"{_size(total / instance.devices)}, or {-(-int(total) // limit)} devices, or a smaller batch"
        )


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """The least memory of a device at which a plan exists, and what the fullest device holds then."""

    bytes_per_device: int
    proven: bool
    device: int
    holds: tuple[tuple[int, str], ...]
    """(bytes, component) on that device."""
    schedule: Schedule
    """The placement, one layer after another: a plan, if the memory is that large."""


def place_or_explain(instance: Instance, clock: Clock, limit: float) -> Schedule | None:
    """Return a schedule that needs little memory, None if none was found in time.

    Raises `InfeasibleProblemError` if the memory is proven too small for any plan.
    """
    room = instance.memory_limit
    if room is None:
        return None
    least = least_memory(instance, clock, limit)
    if least is None:
        return None
    if not least.proven or least.bytes_per_device <= room + sum(instance.layers):
        return least.schedule
    held = ", ".join(f"{name} {_size(size)}" for size, name in least.holds[:MOST_NAMED])
    raise InfeasibleProblemError(
        f"memory: however slices are placed, device {least.device} or another holds at least "
        f"{_size(least.bytes_per_device)}, {_size(least.bytes_per_device - room)} more than its {_size(room)}; in the "
        f"placement that needs least it holds {held}; give each device {_size(least.bytes_per_device)}, or more devices"
    )


def least_memory(instance: Instance, clock: Clock, limit: float) -> LeastMemory | None:
    """Return the least memory per device over all placements of single layers; None where that is too large a program.

    A placement without times is a plan, one layer after another, so this is the memory at which a plan exists.
    """
    modes = sum(layers * len(choices) for layers, choices in zip(instance.layers, instance.choices, strict=True))
    if (modes + sum(instance.layers)) * instance.devices > MOST_PLACEMENTS:
        return None
    model = cp_model.CpModel()
    devices = range(instance.devices)
    sizes = [
        int(size)
        for choices in instance.choices
        for choice in choices
        for size in (choice.state_bytes, choice.activation_bytes)
    ]
    unit = max(1, max(sizes) // 10**6)
    held: list[list[cp_model.LinearExprT]] = [[] for _ in devices]
    states: dict[tuple[int, int, int], cp_model.IntVar] = {}
    runs: list[tuple[int, int, list[list[cp_model.IntVar]]]] = []
    for component, choices in enumerate(instance.choices):
        key = instance.parameters[component]
        for layer in range(instance.layers[component]):
            chosen = [model.new_bool_var("") for _ in choices]
            model.add_exactly_one(chosen)
            on = [[model.new_bool_var("") for _ in devices] for _ in choices]
            runs.append((component, layer, on))
            for b, choice, used in zip(chosen, choices, on, strict=True):
                model.add(sum(used) == choice.devices * b)
            for device in devices:
                if (key, layer, device) not in states:
                    states[key, layer, device] = model.new_int_var(0, max(sizes) // unit, "")
                    held[device].append(states[key, layer, device])
                for used, choice in zip(on, choices, strict=True):
                    model.add(states[key, layer, device] >= choice.state_bytes // unit * used[device])
                    held[device].append(int(choice.activation_bytes) // unit * used[device])
    most = model.new_int_var(0, sum(sizes) // unit * max(instance.layers) * len(instance.layers), "")
    for each in held:
        model.add(sum(each) <= most)
    model.minimize(most)
    outcome = solve_cp_sat(model, clock, limit=limit, gap_limit=0.0)
    if outcome.values is None or outcome.bound is None:
        return None
    on_device: list[dict[str, int]] = [{} for _ in devices]
    placed: dict[tuple[int, int], Run] = {}
    counted: set[tuple[int, int, int]] = set()
    for component, layer, on in runs:
        name = instance.problem.components[component].name
        for index, (choice, used) in enumerate(zip(instance.choices[component], on, strict=True)):
            chosen_devices = tuple(device for device in devices if outcome.values(used[device]))
            if chosen_devices:
                placed[component, layer] = Run(component, layer, layer + 1, index, chosen_devices)
            for device in devices:
                if outcome.values(used[device]):
                    place = instance.parameters[component], layer, device
                    state = 0 if place in counted else choice.state_bytes
                    counted.add(place)
                    here = on_device[device]
                    here[name] = here.get(name, 0) + state + int(choice.activation_bytes)
    fullest = max(devices, key=lambda device: sum(on_device[device].values()))
    holds = sorted(((size, name) for name, size in on_device[fullest].items()), reverse=True)
    in_order = [placed[c, layer] for c in instance.topological for layer in range(instance.layers[c])]
    return LeastMemory(
        bytes_per_device=outcome.bound * unit,
        proven=outcome.status == "optimal",
        device=fullest,
        holds=tuple(holds),
        schedule=in_list_order(instance, in_order),
    )


def _size(size_bytes: float) -> str:
    return f"{size_bytes / GIGA:.3f} GB" if size_bytes >= 1e6 else f"{int(size_bytes)} bytes"


def _largest(share: list[tuple[float, str]]) -> str:
    return ", ".join(f"{name} {_size(size)}" for size, name in sorted(share, key=lambda each: -each[0])[:MOST_NAMED])
