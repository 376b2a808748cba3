"""Least squares of few unknowns, none of them negative."""

from __future__ import annotations

from collections.abc import Sequence


def nonnegative(rows: Sequence[tuple[float, ...]]) -> list[float] | None:
    """Numbers by which the factors of each row come nearest to 1 in sum.

    Where one would be negative it is 0, and the others are found anew.

    Returns:
        None where the rows do not tell the numbers apart.
    """
    import sympy  # type: ignore[import-untyped]  # late: about 0.2 s

    used = [*range(len(rows[0]))]
    while True:
        factors = sympy.Matrix([[row[index] for index in used] for row in rows])
        try:
            solved = (factors.T * factors).LUsolve(factors.T * sympy.Matrix([1] * len(rows)))
        except sympy.matrices.exceptions.NonInvertibleMatrixError:
            return None
        found = dict(zip(used, map(float, solved), strict=True))
        if all(each >= 0 for each in found.values()):
            return [found.get(index, 0.0) for index in range(len(rows[0]))]
        used = [index for index in used if found[index] >= 0]
