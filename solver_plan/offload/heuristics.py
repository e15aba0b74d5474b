"""The rules that systems and people use to split the optimizer step, each giving a complete timeline.

zero_offload   all on the CPU; updates begin after the last backward, in the order the gradients came; the next forward
               waits for all (ZeRO-Offload, ATC 2021)
twin_flow      the same, but the first layers fill the device's room (Twin-Flow, ZeRO-Offload++)
coarse         all on the CPU; each update begins when its gradient has come; the next forward waits for all (the coarse
               grain of CoTrain, ICPP 2023)
cpu_edf        all on the CPU; the layer that is needed first goes first; each forward waits for its own layer only
prefix         cpu_edf with the first k layers updated on the device right after their backward, best k that fits
               (CoTrain's reuse distance)
suffix         the same with the last k layers (SuperOffload's tail buckets)
stride         the same with every k-th layer as far as the room goes, streamed where staging is allowed, best k up to 8
               (Deep Optimizer States, Middleware 2024)
stride_wait    every k-th layer, updates after the last backward, the next forward waits for all
"""

from collections.abc import Iterator
from dataclasses import dataclass

from solver_plan.offload.bounds import Inequality, inequalities, relaxed_period_ms
from solver_plan.offload.flow import Rule, run_rule
from solver_plan.offload.operations import Placement, all_on
from solver_plan.offload.plan import Place
from solver_plan.offload.problem import OffloadProblem
from solver_plan.offload.retiming import Timing
from solver_plan.offload.streaming import streamed_timing

RULES = ("zero_offload", "twin_flow", "coarse", "cpu_edf", "prefix", "suffix", "stride", "stride_wait")
LARGEST_STRIDE = 8
LARGEST_PREFIX_CHOICES = 11
"""At most this many values of k are tried, evenly spread, the largest that fits among them."""

SERIAL = Rule(first="ready_first", updates_wait=True, forward_waits=True)
COARSE = Rule(first="ready_first", forward_waits=True)
OVERLAPPED = Rule(gpu_updates="at_once")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """What a rule plans."""

    placement: Placement
    timing: Timing


def run_heuristic(problem: OffloadProblem, name: str) -> RuleResult:
    """Return the plan of a rule of `RULES`, the best of the choices that the rule leaves open."""
    best: RuleResult | None = None
    rows: list[Inequality] = []
    for placement, rule in _choices(problem, name):
        if "gpu_streamed" in placement:
            rows = rows or inequalities(problem)
            if best is not None and relaxed_period_ms(rows, placement) >= best.timing.period_ms:
                continue
            timing = streamed_timing(problem, placement, serial=rule.forward_waits)
        else:
            timing = run_rule(problem, placement, rule)[1]
        if timing is not None and (best is None or timing.period_ms < best.timing.period_ms):
            best = RuleResult(placement=placement, timing=timing)
    assert best is not None, name
    return best


def _choices(problem: OffloadProblem, name: str) -> Iterator[tuple[Placement, Rule]]:
    count = len(problem.layers)
    nothing = all_on("cpu", count)
    forward, backward = list(range(count)), list(reversed(range(count)))
    if name == "zero_offload":
        yield nothing, SERIAL
    elif name == "twin_flow":
        yield _first(count, forward[: _fitting(problem, forward)]), SERIAL
    elif name == "coarse":
        yield nothing, COARSE
    elif name == "cpu_edf":
        yield nothing, OVERLAPPED
    elif name in ("prefix", "suffix"):
        order = forward if name == "prefix" else backward
        most = _fitting(problem, order)
        for choice in sorted(
            {round(most * step / (LARGEST_PREFIX_CHOICES - 1)) for step in range(LARGEST_PREFIX_CHOICES)}
        ):
            yield _first(count, order[:choice]), OVERLAPPED
    else:
        rule = OVERLAPPED if name == "stride" else SERIAL
        seen: set[Placement] = set()
        for stride in range(1, min(LARGEST_STRIDE, count) + 1):
            for offset in sorted({0, stride - 1}):
                for placement in _strides(problem, stride, offset):
                    if placement not in seen:
                        seen.add(placement)
                        yield placement, rule


def _fitting(problem: OffloadProblem, order: list[int]) -> int:
    """Return how many layers, in this order, fit the device's room."""
    used = 0
    for position, layer in enumerate(order):
        used += problem.state_bytes(layer)
        if used > problem.gpu_state_bytes:
            return position
    return len(order)


def _first(count: int, on_gpu: list[int]) -> Placement:
    chosen = set(on_gpu)
    places: list[Place] = ["gpu" if layer in chosen else "cpu" for layer in range(count)]
    return tuple(places)


def _strides(problem: OffloadProblem, stride: int, offset: int) -> Iterator[Placement]:
    """Every stride-th layer, resident as far as the room goes; the rest of them streamed, or else on the CPU."""
    chosen = range(offset, len(problem.layers), stride)
    for stream in (False, True):
        places: list[Place] = ["cpu"] * len(problem.layers)
        used = 0
        for layer in chosen:
            if used + problem.state_bytes(layer) <= problem.gpu_state_bytes:
                used += problem.state_bytes(layer)
                places[layer] = "gpu"
            elif stream and problem.may_stream(layer):
                places[layer] = "gpu_streamed"
        if not stream or "gpu_streamed" in places:
            yield tuple(places)
