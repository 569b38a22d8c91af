"""Levels of non-uniform codes: optimal 1-D clustering, and refinement for averages of tokens.

Numbers are normalised by their thresholds: most are from -1 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

_BINS = 512
_ROUNDS = 12


def rounded(numbers: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The code of the level nearest to each number, ties to the lower code; levels grow."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, numbers)


def optimal_levels(
    numbers: np.ndarray, weights: np.ndarray, sizes: Sequence[int]
) -> dict[int, np.ndarray]:
    """The levels of least weighted squared error, growing, for each number of levels.

    numbers, weights (n,); numbers are from -1 to 1. Exact (Wang and Song 2011) but for a histogram
    of 512 bins, so that a fit has no seed and no local optimum.
    """
    place = np.clip(((numbers + 1.0) * (_BINS / 2)).astype(np.int64), 0, _BINS - 1)
    sums = [
        np.concatenate([[0.0], np.cumsum(np.bincount(place, weights * numbers**power, _BINS))])
        for power in (0, 1, 2)
    ]  # three of (bins + 1,)
    weight, first, second = (part[None, :] - part[:, None] for part in sums)  # (bins + 1, bins + 1)
    safe = np.where(weight > 0, weight, 1.0)
    cost = np.maximum(np.where(weight > 0, second - first * first / safe, 0.0), 0.0)
    cost[np.tril_indices(_BINS + 1, -1)] = np.inf  # of putting bins i ... j - 1 on one level
    best, cuts, found = cost[0], [], {}
    for size in range(2, max(sizes) + 1):
        total = best[:, None] + cost
        cuts.append(total.argmin(0))
        best = total[cuts[-1], np.arange(_BINS + 1)]
        if size in sizes:
            found[size] = _centres(cuts, sums)
    return found


def _centres(cuts: Sequence[np.ndarray], sums: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of each cluster, following the cuts back from the last bin."""
    edges = [_BINS]
    for cut in reversed(cuts):
        edges.append(int(cut[edges[-1]]))
    edges = [0, *reversed(edges)]
    levels = []
    for start, end in pairwise(edges):
        weight = sums[0][end] - sums[0][start]
        middle = (start + end) / _BINS - 1.0  # of bins without a number
        levels.append((sums[1][end] - sums[1][start]) / weight if weight > 0 else middle)
    return np.sort(np.array(levels))


def refined_levels(
    numbers: np.ndarray, sizes: np.ndarray, levels: np.ndarray, gains: np.ndarray, alone: float
) -> np.ndarray:
    """Levels that lessen sum over channels of gain * (alone * E[d^2] + (1 - alone) * E[d]^2).

    d = size * (level - number) is the error of a token's channel; numbers, sizes (n, channels),
    gains (channels,). Attention averages tokens: of errors that differ from token to token only a
    share is left (`alone`), what all tokens have in common stays. Codes and levels take turns; the
    best levels met are given, so never worse ones than those at the start.
    """
    best, least = levels, np.inf
    squares = np.square(sizes)
    for _ in range(_ROUNDS):
        codes = rounded(numbers, levels)
        error = sizes * (levels[codes] - numbers)  # (n, channels)
        cost = np.square(error).mean(0) * alone + np.square(error.mean(0)) * (1.0 - alone)
        if (total := float(cost @ gains)) < least:
            best, least = levels, total
        # With these codes the cost is quadratic in the levels.
        mine = [codes == code for code in range(len(levels))]
        shares = np.stack([(sizes * part).mean(0) for part in mine])  # (levels, channels)
        matrix = np.diag([(squares * part).mean(0) @ gains for part in mine]) * alone
        matrix += (shares * gains) @ shares.T * (1.0 - alone)
        wanted = np.array([(squares * numbers * part).mean(0) @ gains for part in mine]) * alone
        wanted += (shares * gains) @ (sizes * numbers).mean(0) * (1.0 - alone)
        matrix += np.eye(len(levels)) * 1e-9 * max(float(np.trace(matrix)), 1e-30)
        levels = np.sort((levels + np.linalg.solve(matrix, wanted)) / 2)
    return best
