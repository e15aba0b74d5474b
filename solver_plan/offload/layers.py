"""Offload problems from a list of layers, by hand or from a table of measured or computed times."""

from collections.abc import Iterable
from dataclasses import replace

from solver_plan.errors import InputError
from solver_plan.offload.problem import BytesPerParameter, Layer, OffloadProblem, Rates

SIXTEEN_BIT_ADAM = BytesPerParameter(gradient=2, weight=2, optimizer_state=12)
"""16-bit gradients and weights; 32-bit master weight and two moments."""


def problem_from_layers(
    layers: Iterable[tuple[str, int, float, float]],
    rates: Rates,
    *,
    gpu_state_bytes: int,
    staging_bytes: int = 0,
    chunks_per_layer: int = 8,
    accumulation_steps: int = 1,
    clip_gradients: bool = True,
    bytes_per_parameter: BytesPerParameter = SIXTEEN_BIT_ADAM,
) -> OffloadProblem:
    """Return the problem of layers in forward order.

    Parameters
    ----------
    layers
        (name, parameters, forward ms, backward ms) of each; a layer that shares its weights with another has 0.
    rates
        Of updates and copies.
    gpu_state_bytes, staging_bytes, chunks_per_layer, accumulation_steps, clip_gradients, bytes_per_parameter
        As in `OffloadProblem`.

    Raises
    ------
    pydantic.ValidationError
        If a value breaks a rule of the problem.
    """
    return OffloadProblem(
        layers=tuple(
            Layer(name=name, parameters=parameters, forward_ms=float(forward), backward_ms=float(backward))
            for name, parameters, forward, backward in layers
        ),
        rates=rates,
        bytes_per_parameter=bytes_per_parameter,
        gpu_state_bytes=gpu_state_bytes,
        staging_bytes=staging_bytes,
        chunks_per_layer=chunks_per_layer,
        accumulation_steps=accumulation_steps,
        clip_gradients=clip_gradients,
    )


def equal_layers(
    count: int, parameters: int, forward_ms: float, backward_ms: float
) -> list[tuple[str, int, float, float]]:
    """Return a model's totals spread over equal layers, for `problem_from_layers`.

    Raises
    ------
    InputError
        If there is no layer.
    """
    if count < 1:
        raise InputError(f"layers: found {count}; at least 1")
    return [
        (f"h.{layer}", round(parameters / count), forward_ms / count, backward_ms / count) for layer in range(count)
    ]


def with_room(problem: OffloadProblem, gpu_state_bytes: int) -> OffloadProblem:
    """Return the problem with another room for resident state."""
    return replace(problem, gpu_state_bytes=gpu_state_bytes)
