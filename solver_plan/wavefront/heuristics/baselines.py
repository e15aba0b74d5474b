"""What is done without a planner: one component after another on all devices, or a group of devices for each task."""

from solver_plan.wavefront.instance import Instance
from solver_plan.wavefront.schedule import Run, Schedule, in_list_order


def sequential(instance: Instance) -> Schedule:
    """Run one component after another, each in its fastest mode on all devices, as DeepSpeed and Megatron-LM do.

    Tasks follow one another where the edges allow it.
    """
    every_device = tuple(range(instance.devices))
    groups = {component.task: every_device for component in instance.problem.components}
    return _on_groups(instance, groups)


def task_groups(instance: Instance) -> Schedule:
    """Give each task a group of devices of its own, so that the slowest task is fast (Spindle-Optimus).

    Starting from what each task needs at least, one more device goes to the slowest task each time (marginal gain, as
    in Optimus). Where not all tasks fit side by side, groups are shared: the next task, longest first, joins the group
    that is done first.
    """
    tasks: dict[str, list[int]] = {}
    for component in instance.topological:
        tasks.setdefault(instance.problem.components[component].task, []).append(component)
    least = {
        task: max(min(choice.devices for choice in instance.choices[c]) for c in members)
        for task, members in tasks.items()
    }
    by_work = sorted(tasks, key=lambda task: (-_task_ms(instance, tasks[task], least[task]), task))
    hosts: list[str] = []
    used = 0
    for task in by_work:
        if used + least[task] <= instance.devices:
            hosts.append(task)
            used += least[task]
    members = {task: [task] for task in hosts}
    size = {task: least[task] for task in hosts}

    def busy_ms(host: str) -> float:
        return sum(_task_ms(instance, tasks[task], size[host]) for task in members[host])

    for task in by_work:
        if task not in size:
            fitting = [host for host in hosts if size[host] >= least[task]]
            # no group is large enough: the largest grows into the whole cluster
            if not fitting:
                return sequential(instance)
            members[min(fitting, key=busy_ms)].append(task)
    widest = {
        host: max(instance.choices[c][-1].devices for task in members[host] for c in tasks[task]) for host in hosts
    }
    busy = {host: busy_ms(host) for host in hosts}
    while used < instance.devices:
        slowest = min(hosts, key=lambda host: (-busy[host], host))
        # no mode has more devices than the widest: the slowest stays so
        more = 1 if size[slowest] < widest[slowest] else instance.devices - used
        size[slowest] += more
        used += more
        busy[slowest] = busy_ms(slowest)
    groups = {}
    first = 0
    for host in hosts:
        devices = tuple(range(first, first + size[host]))
        first += size[host]
        groups.update(dict.fromkeys(members[host], devices))
    return _on_groups(instance, groups)


def _task_ms(instance: Instance, members: list[int], devices: int) -> float:
    """Return the time of a task's components one after another on a group."""
    return sum(
        instance.layers[c] * min(k.layer_ms for k in instance.choices[c] if k.devices <= devices) for c in members
    )


def _on_groups(instance: Instance, groups: dict[str, tuple[int, ...]]) -> Schedule:
    """Run each component in its fastest mode on the devices of its task."""
    runs = []
    for component in _task_by_task(instance):
        group = groups[instance.problem.components[component].task]
        choices = instance.choices[component]
        fitting = [index for index, choice in enumerate(choices) if choice.devices <= len(group)]
        choice = min(fitting, key=lambda index: choices[index].layer_ms)
        runs.append(Run(component, 0, instance.layers[component], choice, group[: choices[choice].devices]))
    return in_list_order(instance, runs)


def _task_by_task(instance: Instance) -> list[int]:
    """Return components in an order that respects the edges and keeps tasks together where it can."""
    waiting = [len(each) for each in instance.predecessors]
    task = [component.task for component in instance.problem.components]
    first_of = {name: index for index, name in reversed(list(enumerate(task)))}
    ready = [c for c in instance.components if not waiting[c]]
    order: list[int] = []
    while ready:
        now = task[order[-1]] if order else None
        chosen = min(ready, key=lambda c: (task[c] != now, first_of[task[c]], c))
        ready.remove(chosen)
        order.append(chosen)
        for after in instance.successors[chosen]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    return order
