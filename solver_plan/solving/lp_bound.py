"""The bound that the duals of a linear program prove, with a margin for floating-point error.

For ``min c x + c0, L <= A x <= U, l <= x <= u`` any row duals y give, with reduced costs ``d = c - A' y``, the bound

    c0 + sum_i (y_i L_i if y_i > 0 else y_i U_i) + sum_j (d_j l_j if d_j > 0 else d_j u_j)

(weak duality; Neumaier and Shcherbina, Safe bounds in linear and mixed-integer linear programming, 2004, section 3).
The duals need not be optimal, nor the solver right: only this sum is trusted.
"""

import highspy
import numpy as np

WRONG_SIGN = 1e-9
"""A reduced cost whose sign asks for an infinite bound is taken for 0 up to this, relative to the sizes it was made of.
Exact only where every variable has finite bounds."""


def dual_bound(highs: highspy.Highs) -> float | None:
    """Return the bound that the row duals of the last solve prove; None if they prove nothing."""
    program, solution = highs.getLp(), highs.getSolution()
    if not solution.dual_valid:
        return None
    duals = np.array(solution.row_dual, dtype=float)
    row_lower, row_upper = np.array(program.row_lower_), np.array(program.row_upper_)
    row_bound = np.where(duals > 0, row_lower, row_upper)
    duals = np.where(np.isfinite(row_bound), duals, 0.0)
    row_terms = duals * np.where(np.isfinite(row_bound), row_bound, 0.0)

    costs = np.array(program.col_cost_, dtype=float)
    products = _transposed_product(program, duals, absolute=False)
    sizes = np.abs(costs) + _transposed_product(program, np.abs(duals), absolute=True)
    reduced = costs - products
    column_bound = np.where(reduced > 0, np.array(program.col_lower_), np.array(program.col_upper_))
    endless = ~np.isfinite(column_bound)
    if np.any(endless & (np.abs(reduced) > WRONG_SIGN * np.maximum(1.0, sizes))):
        return None
    column_bound = np.where(endless, 0.0, column_bound)

    bound = float(program.offset_) + float(np.sum(row_terms)) + float(np.sum(reduced * column_bound))
    terms = abs(program.offset_) + float(np.sum(np.abs(row_terms))) + float(np.sum(sizes * np.abs(column_bound)))
    summands = len(costs) + len(duals) + 10
    return bound - float(np.finfo(float).eps) * summands * terms - 1e-9 * abs(bound)


def _transposed_product(program: highspy.HighsLp, row_values: np.ndarray, *, absolute: bool) -> np.ndarray:
    """Return A' times a vector over rows, or the same with the absolute values of A."""
    matrix = program.a_matrix_
    starts, indices = np.array(matrix.start_, dtype=int), np.array(matrix.index_, dtype=int)
    values = np.array(matrix.value_, dtype=float)
    values = np.abs(values) if absolute else values
    major = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    rows, columns = (indices, major) if matrix.format_ == highspy.MatrixFormat.kColwise else (major, indices)
    return np.bincount(columns, weights=values * row_values[rows], minlength=program.num_col_)
