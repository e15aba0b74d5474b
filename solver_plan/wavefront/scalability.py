"""The scalability estimator: time of an operator over the number of devices, from a few profiled points.

Spindle (ASPLOS 2025, section 3.2 and appendix A): between profiled counts n_0 < n_1 < ... < n_k

    T(n) = alpha_i + beta_i * c + gamma_i * w / n        for n in [n_{i-1}, n_i]

with a fixed overhead, communication c that does not scale, and work w that does. Within a piece the first two are one
constant: a piece is T(n) = a_i + b_i / n. Pieces are least-squares fits to their points, of relative error; where they
start is chosen by dynamic programming, so that the sum of squared errors is least.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from solver_plan.errors import InputError


@dataclass(frozen=True, slots=True)
class Piece:
    """T(n) = fixed_ms + scaling_ms / n up to `last` devices."""

    last: int
    fixed_ms: float
    scaling_ms: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A fitted curve."""

    pieces: tuple[Piece, ...]

    def at(self, devices: int) -> float:
        """Return the time on a number of devices; beyond the last profiled count the last piece goes on."""
        piece = next((each for each in self.pieces if devices <= each.last), self.pieces[-1])
        return piece.fixed_ms + piece.scaling_ms / devices


def fit_curve(points: Sequence[tuple[int, float]], pieces: int) -> Curve:
    """Fit a curve of at most `pieces` pieces through (devices, ms) points.

    Neighbouring pieces share their end point. Raises `InputError` for no points, a count twice or times that are not
    positive and finite.
    """
    ordered = sorted(points)
    counts = [n for n, _ in ordered]
    if not ordered or pieces < 1:
        raise InputError("a curve needs at least one profiled point and one piece")
    if len(set(counts)) < len(counts) or counts[0] < 1:
        raise InputError(f"profiled points: found counts {counts}; each at least 1 and once")
    if any(not 0 < ms < float("inf") for _, ms in ordered):
        raise InputError(f"profiled points: found {[ms for _, ms in ordered]}; times are positive and finite")
    if len(ordered) == 1:
        return Curve((Piece(counts[0], ordered[0][1], 0.0),))
    last = len(ordered) - 1
    fits = {(i, j): _fit(ordered[i : j + 1]) for i in range(last) for j in range(i + 1, last + 1)}
    # best[j] with p pieces: (error, first point of the last piece)
    best: list[dict[int, tuple[float, int]]] = [{j: (fits[0, j][0], 0) for j in range(1, last + 1)}]
    for _ in range(1, min(pieces, last)):
        step = {}
        for j in range(1, last + 1):
            options = [(best[-1][i][0] + fits[i, j][0], i) for i in range(1, j)]
            step[j] = min([(best[-1][j][0], best[-1][j][1]), *options])
        best.append(step)
    found: list[Piece] = []
    end, level = last, len(best) - 1
    while end > 0:
        start = best[level][end][1]
        _, fixed, scaling = fits[start, end]
        found.append(Piece(counts[end], fixed, scaling))
        end, level = start, max(0, level - 1)
    return Curve(tuple(reversed(found)))


def _fit(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Return (squared relative error, a, b) of the least-squares T = a + b / n with a, b >= 0."""

    def error(fixed: float, scaling: float) -> float:
        return sum(((fixed + scaling / n) / ms - 1) ** 2 for n, ms in points)

    # weighted normal equations in u = 1 / T, v = 1 / (n T): a u + b v = 1
    uu = sum(1 / ms**2 for _, ms in points)
    uv = sum(1 / (n * ms**2) for n, ms in points)
    vv = sum(1 / (n * ms) ** 2 for n, ms in points)
    u1 = sum(1 / ms for _, ms in points)
    v1 = sum(1 / (n * ms) for n, ms in points)
    candidates = [(u1 / uu, 0.0), (0.0, v1 / vv)]
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        fixed = (u1 * vv - v1 * uv) / determinant
        scaling = (v1 * uu - u1 * uv) / determinant
        if fixed >= 0 and scaling >= 0:
            candidates.append((fixed, scaling))
    fixed, scaling = min(candidates, key=lambda each: error(*each))
    return error(fixed, scaling), fixed, scaling
