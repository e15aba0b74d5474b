"""From an operator graph to a wavefront problem: contraction, analytic or given points, fitted curves, sizes.

Analytic time of an operator on n = t d devices, t tensor-parallel and d data-parallel (the roofline of `Accelerator`):

    forward:   launch / 3 + FLOPs / (n peak efficiency) + 2 all-reduces of the output of a replica
    backward:  twice the launch and the FLOPs, as many all-reduces (Megatron-LM, Shoeybi et al. 2019)

An all-reduce of s bytes takes 2 (t - 1) / t * s / intra-node bandwidth. The efficiency of matrix products falls with
the tokens on a device, tokens / (tokens + half_efficiency_tokens).
Data-parallel degrees divide the batch; tensor-parallel degrees stay within a node.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from solver_plan.errors import InputError
from solver_plan.wavefront.contraction import Chain, OperatorNode, contract
from solver_plan.wavefront.problem import Cluster, Component, Mode, Phases, WavefrontProblem
from solver_plan.wavefront.scalability import fit_curve

STATE_BYTES_PER_PARAMETER = 16
"""Weight and gradient in 16 bit, master weight and two moments in 32 bit (ZeRO, Rajbhandari et al. 2020, 3.1)."""
FROZEN_BYTES_PER_PARAMETER = 2
GRADIENT_BYTES_PER_PARAMETER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Rates of a device. The defaults: 312 TFLOP/s in 16 bit, as A100 and A800 (data sheet); the others are guesses."""

    peak_flops_per_s: float = 312e12
    efficiency: float = 0.5
    half_efficiency_tokens: float = 512.0
    launch_ms: float = 0.35
    """Of one layer, forward and backward: kernels that are too short to hide their launch."""


def points_of(
    operator: OperatorNode, accelerator: Accelerator, cluster: Cluster, tensor_parallel: int, counts: Iterable[int]
) -> list[tuple[int, float]]:
    """Return (devices, ms) of an operator's forward and backward."""
    found = []
    for count in counts:
        tokens = operator.batch * operator.sequence * tensor_parallel / count
        share = accelerator.efficiency * tokens / (tokens + accelerator.half_efficiency_tokens)
        passes = 1 if operator.frozen else 3
        compute = 1000 * passes * operator.forward_flops / count / (accelerator.peak_flops_per_s * share)
        ring = 2 * (tensor_parallel - 1) / tensor_parallel
        moved = 2 * operator.output_bytes * tensor_parallel / count * ring
        communication = (1 if operator.frozen else 2) * cluster.ms_to_move(moved, True)
        launch = accelerator.launch_ms * passes / 3
        found.append((count, launch + compute + communication))
    return found


def problem_from_operators(
    graph: "nx.DiGraph[OperatorNode]",
    cluster: Cluster,
    *,
    accelerator: Accelerator | None = None,
    phases: Phases = "fused",
    model: str | None = None,
    tensor_parallel: Sequence[int] = (1,),
    pieces: int = 3,
    points: Mapping[str, Sequence[tuple[int, float]]] | None = None,
) -> WavefrontProblem:
    """Return the problem of training a graph of operators on a cluster.

    Parameters
    ----------
    graph
        Operators of all tasks; see `contraction.operator_graph`.
    cluster
        What it is trained on.
    accelerator
        Rates of a device; None: the defaults.
    phases
        Of the problem.
    model
        What the problem names for execution, as ``models/multitask_clip.py:clip4``.
    tensor_parallel
        Degrees to offer; with any but 1 components have modes.
    pieces
        Of the fitted curves.
    points
        Measured (devices, ms of one layer, forward and backward) per operator kind, in place of the analytic ones.

    Raises
    ------
    InputError
        If no degree fits a component.
    """
    device = accelerator or Accelerator()
    chains, edges = contract(graph)
    components = [
        _component(chain, cluster, device, phases, tensor_parallel, pieces, (points or {}).get(chain.operators[0].kind))
        for chain in chains
    ]
    return WavefrontProblem(
        cluster=cluster,
        phases=phases,
        model=model,
        components=tuple(components),
        edges=tuple((before.name, after.name) for before, after in edges),
    )


def _component(
    chain: Chain,
    cluster: Cluster,
    accelerator: Accelerator,
    phases: Phases,
    degrees: Sequence[int],
    pieces: int,
    measured: Sequence[tuple[int, float]] | None,
) -> Component:
    one = chain.operators[0]
    held = FROZEN_BYTES_PER_PARAMETER if one.frozen else STATE_BYTES_PER_PARAMETER
    state = held * one.parameters
    gradient = 0 if one.frozen else GRADIENT_BYTES_PER_PARAMETER * one.parameters
    modes: list[Mode] = []
    times: dict[str, float] = {}
    for degree in degrees:
        counts = [degree * d for d in range(1, cluster.devices // degree + 1) if one.batch % d == 0]
        if degree > cluster.devices_per_node or not counts:
            continue
        profiled = measured or points_of(one, accelerator, cluster, degree, _powers(counts))
        curve = fit_curve(profiled, pieces)
        for count in counts:
            layer_ms = round(curve.at(count), 3)
            times.setdefault(str(count), layer_ms)
            modes.append(
                Mode(
                    devices=count,
                    forward_ms=layer_ms if one.frozen else layer_ms / 3,
                    backward_ms=0.0 if one.frozen else layer_ms * 2 / 3,
                    state_bytes_per_layer=state // degree,
                    activation_bytes_per_layer=-(-one.activation_bytes // count),
                    gradient_bytes_per_layer=gradient // degree,
                    degrees={"tensor_parallel": degree, "data_parallel": count // degree},
                )
            )
    if not modes:
        raise InputError(f"{chain.name}: none of the tensor-parallel degrees {list(degrees)} fits the cluster's nodes")
    plain = tuple(degrees) == (1,) and not one.frozen
    return Component(
        name=chain.name,
        task=one.task,
        layers=len(chain.operators),
        layer_ms=times if plain else None,
        modes=None if plain else tuple(modes),
        parameters=chain.weights,
        state_bytes_per_layer=state if plain else 0,
        activation_bytes_per_layer=one.activation_bytes if plain else 0,
        gradient_bytes_per_layer=gradient if plain else 0,
        output_bytes=one.output_bytes,
        batch=one.batch,
    )


def _powers(counts: Sequence[int]) -> list[int]:
    """Return the counts that would be profiled: the first, then each at least twice the one before, and the last."""
    found = [counts[0]]
    for count in counts:
        if count >= 2 * found[-1]:
            found.append(count)
    if found[-1] != counts[-1]:
        found.append(counts[-1])
    return found
