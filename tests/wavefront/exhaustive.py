"""Exhaustive search over small problems: every mode of every layer, in every order, on any free devices."""

from solver_plan.wavefront.instance import Instance


def shortest_makespan(instance: Instance, above: float) -> float:
    """Return the least makespan, at most `above`, where device sets do not matter.

    Layers start in order of time: a layer that would start before one that was placed earlier is another order. So each
    state is the layers done, when each component is ready and when devices become free; equal states are visited once.
    """
    count = len(instance.layers)
    best = above
    seen: dict[tuple[object, ...], float] = {}
    least_area = [min(k.devices * k.layer_ms for k in each) for each in instance.choices]
    least_time = [min(k.layer_ms for k in each) for each in instance.choices]

    def visit(
        done: tuple[int, ...], ready: tuple[float, ...], free: tuple[float, ...], now: float, ends: float
    ) -> None:
        nonlocal best
        left = [instance.layers[c] - done[c] for c in range(count)]
        if not any(left):
            best = min(best, ends)
            return
        area = sum(least_area[c] * left[c] for c in range(count))
        idle_from = sum(max(each, now) for each in free)
        if max(ends, (idle_from + area) / instance.devices) >= best - 1e-9:
            return
        if any(left[c] and max(ready[c], now) + left[c] * least_time[c] >= best - 1e-9 for c in range(count)):
            return
        state = (done, tuple(round(max(r, now), 6) for r in ready), tuple(round(max(f, now), 6) for f in free))
        if seen.get(state, float("inf")) <= ends + 1e-9:
            return
        seen[state] = ends
        for c in range(count):
            if not left[c] or any(done[p] < instance.layers[p] for p in instance.predecessors[c]):
                continue
            for choice in instance.choices[c]:
                start = max(ready[c], free[choice.devices - 1])
                if start < now - 1e-9:
                    start = now
                end = start + choice.layer_ms
                # devices that became free last, so that the early ones are left
                usable = [i for i, each in enumerate(free) if each <= start + 1e-9][-choice.devices :]
                rest = [each for i, each in enumerate(free) if i not in usable]
                new_ready = list(ready)
                new_ready[c] = end
                new_done = (*done[:c], done[c] + 1, *done[c + 1 :])
                if new_done[c] == instance.layers[c]:
                    for after in instance.successors[c]:
                        new_ready[after] = max(new_ready[after], end)
                visit(
                    new_done, tuple(new_ready), tuple(sorted([*rest, *[end] * choice.devices])), start, max(ends, end)
                )

    visit((0,) * count, (0.0,) * count, (0.0,) * instance.devices, 0.0, 0.0)
    return best
