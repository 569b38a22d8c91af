"""Comparison that a NaN cannot pass, with the worst element in the message."""

import numpy as np
from numpy.typing import ArrayLike

from .tolerances import Tolerance


def assert_close(
    actual: ArrayLike, expected: ArrayLike, tolerance: Tolerance, what: str = "array"
) -> None:
    """Demand |actual - expected| <= atol + rtol * |expected| of every element, shapes equal.

    Fails for a NaN or an infinity in either, whatever the other holds.
    """
    got, want = np.asarray(actual), np.asarray(expected)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    got, want = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.abs(got - want)  # shape f64
        # "not within" instead of "beyond": a comparison with NaN is false.
        bad = ~(error <= tolerance.atol + tolerance.rtol * np.abs(want)) | ~np.isfinite(want)
    if bad.any():
        excess = np.where(np.isnan(error), np.inf, error)
        worst = np.unravel_index(np.argmax(np.where(bad, excess, -1.0)), got.shape)
        raise AssertionError(
            f"{what}: {bad.sum()} of {bad.size} elements are off, worst at "
            f"{tuple(int(i) for i in worst)}: got {got[worst]!r}, expected {want[worst]!r} "
            f"within {tolerance.atol:g} + {tolerance.rtol:g}x ({tolerance.why})"
        )


def max_error(actual: ArrayLike, expected: ArrayLike) -> float:
    """Largest absolute difference; NaN if there is any."""
    got, want = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    return float(np.max(np.abs(got - want), initial=0.0))


def relative_rmse(actual: ArrayLike, expected: ArrayLike) -> float:
    """sqrt(sum (actual - expected)^2 / sum expected^2); NaN if there is any."""
    got, want = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    # Not by BLAS, whose threads cost more than they save.
    return float(np.sqrt(np.sum((got - want) ** 2) / np.sum(want**2)))
