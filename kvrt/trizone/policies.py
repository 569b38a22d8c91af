"""Policies: what the attention of a layer says about its tokens and channels.

A policy turns what was measured into weights, and weights into the distortion that each width
leaves; of bytes and blocks it knows nothing. Keys and values are those of one layer after its
prefill; weights are of the candidates among its T tokens, a slice of them.

- rdkv (after RDKV, arXiv 2605.08317): attention of the last queries, half of it spread over 15
  neighbours so that a sentence stays whole, and a floor so that more tokens are kept, at few bits;
  measured errors.
- rdkv:paper: attention pooled over 5, and the analytic distortion of the paper, sigma * 2^-bits.
- snapkv (arXiv 2404.14469), adakv (arXiv 2407.11550), h2o (arXiv 2306.14048): evictions, which are
  widths of 0 and 16 bits.

Sums over the queries of a group stand for means: a factor that a whole layer shares moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.ops import Array

_MEASURED = {2: 1, 4: 2, 8: 3}
"""Where errors hold the squared errors of a width; 0 is where they hold the sum of squares."""


def query_energy(xp: Any, q: Array, kv_heads: int) -> Array:
    """E[q_c^2] (kv_heads, dim) f32 over the queries q (n, heads, dim) f32 and the heads of a group.

    Summed in f64, so that in f32 it hardly ever depends on the order.
    """
    n, heads, dim = q.shape
    squares = xp.square(q, dtype=xp.float64).reshape(n, kv_heads, heads // kv_heads, dim)
    sums = squares.sum(axis=(0, 2))  # (kv_heads, dim)
    return (sums / (n * (heads // kv_heads))).astype(xp.float32)


@dataclass(frozen=True)
class Policy:
    """What all policies share; `queries` are the last ones whose attention is wanted, None: all."""

    name: str
    widths: tuple[int, ...] = (0, 2, 4, 8, 16)  # bits of a V token, ascending
    key_widths: tuple[int, ...] = (0, 2, 4, 8, 16)  # bits of a K channel, ascending
    queries: int | None = 32
    per_query: bool = True  # divide by the number of queries that see the token
    pool: int = 5  # neighbours that share their weights, odd; 1: none
    own: float = 0.0  # of its weight that a token keeps for itself
    floor: float = 0.0  # what each gets beside, in means of the candidates' weights
    apart: bool = False  # whether candidates share among themselves alone
    rotates: bool = True  # whether values are packed after a Hadamard transform

    def asks(self, tokens: int) -> int:
        """How many of the last queries of a prompt the policy wants to see."""
        return tokens if self.queries is None else min(self.queries, tokens)

    def token_weights(
        self, xp: Any, received: Array, candidates: slice, queries: int | None = None
    ) -> Array:
        """What each of the candidates is worth, (kv_heads, n) f32.

        T and n are at least 1. received (kv_heads, T) f32: the attention that the last `queries`
        (None: `asks(T)`) queries give to each of T tokens, summed over them and the heads of the
        group.
        """
        weights = received
        tokens = received.shape[1]
        if self.per_query:
            asked = self.asks(tokens) if queries is None else queries
            visible = xp.minimum(xp.arange(tokens, 0, -1), asked)  # (T,)
            weights = weights / visible.astype(xp.float32)
        if self.apart:
            weights = weights[:, candidates]
        own = xp.float32(self.own)
        weights = own * weights + (1 - own) * _pooled(xp, weights, self.pool)
        if not self.apart:
            weights = weights[:, candidates]
        # In f64, so that in f32 it hardly ever depends on the order of the sum.
        mean = weights.sum(axis=1, keepdims=True, dtype=xp.float64) / weights.shape[1]
        return weights + (self.floor * mean).astype(xp.float32)

    def token_distortion(self, xp: Any, weights: Array, errors: Array) -> Array:
        """What each width of a V token leaves: (widths, kv_heads, n) f32.

        weights (kv_heads, n) f32 of the candidates; errors (4, kv_heads, n) f32: sums over the
        channels of v^2, and of squared errors at 2, 4 and 8 bits. Here errors count by their share
        of the token's energy (a token without any takes no width).
        """
        energy = errors[0]
        present = energy > 0
        shares = errors / xp.where(present, energy, xp.float32(1))  # (4, kv_heads, n)
        left = xp.zeros((len(self.widths), *weights.shape), xp.float32)
        for width, out in zip(self.widths, left):
            if width < 16:
                share = present if width == 0 else shares[_MEASURED[width]]
                xp.multiply(weights, share, out=out)
        return left

    def channel_distortion(self, xp: Any, energy: Array, errors: Array, kept: Array) -> Array:
        """What each width of a K channel leaves: (key_widths, kv_heads, dim) f32.

        energy (kv_heads, dim) f32: E[q_c^2] as of `query_energy`; errors (kv_heads, dim, 4) f64:
        sums over the kept tokens of k^2, and of squared errors at 2, 4 and 8 bits; kept (kv_heads,)
        i64, here or on the host: how many these are. Here E[q_c^2] times the mean squared error:
        what the error adds to the square of a score.
        """
        tokens = xp.maximum(xp.asarray(kept), 1)[:, None]

        def left(column: int) -> Array:
            return (energy * (errors[:, :, column] / tokens)).astype(xp.float32)

        return _by_width(xp, self.key_widths, left(0), lambda width: left(_MEASURED[width]))

    def head_budgets(
        self, xp: Any, weights: Array, budgets: np.ndarray, token_bytes: int
    ) -> np.ndarray:
        """The budgets (kv_heads,) i64 of a layer's heads, of the same sum as those given.

        weights (kv_heads, n) f32 of the candidates; budgets (kv_heads,) i64 bytes, alike;
        token_bytes: what a whole token costs. Here they stay as they are.
        """
        return budgets


@dataclass(frozen=True)
class PaperRdkv(Policy):
    """weight * sigma * 2^-bits, as the paper's theory (Bennett) has it.

    sigma = range / (2 sqrt 3) is known from the error at 8 bits, whose root mean square is
    sigma / 255. A V token counts its own sigma. A K channel's weight is E[q_c^2] E[k_c^2], so that
    sigma is taken relative to the root of E[k_c^2].
    """

    def token_distortion(self, xp: Any, weights: Array, errors: Array) -> Array:
        size = weights * xp.sqrt(errors[_MEASURED[8]])
        return xp.stack([size * xp.float32(2.0**-width) for width in self.widths])

    def channel_distortion(self, xp: Any, energy: Array, errors: Array, kept: Array) -> Array:
        spread = xp.sqrt(errors[:, :, 0] * errors[:, :, _MEASURED[8]])
        tokens = xp.maximum(xp.asarray(kept), 1)[:, None]
        size = (energy * (spread / tokens)).astype(xp.float32)
        return xp.stack([size * xp.float32(2.0**-width) for width in self.key_widths])


@dataclass(frozen=True)
class Eviction(Policy):
    """Tokens are kept whole, or not at all: a token that is not kept leaves its weight."""

    widths: tuple[int, ...] = (0, 16)
    key_widths: tuple[int, ...] = (16,)
    rotates: bool = False

    def token_distortion(self, xp: Any, weights: Array, errors: Array) -> Array:
        return xp.stack([weights, xp.zeros_like(weights)])


@dataclass(frozen=True)
class AdaKV(Eviction):
    """Heads get budgets by how many of the layer's best tokens they hold.

    Of heads * B tokens, B the mean budget: 4/5 of those that the head has among the layer's best
    heads * B, and B/5 (the floor that the authors use with grouped queries).
    """

    def head_budgets(
        self, xp: Any, weights: Array, budgets: np.ndarray, token_bytes: int
    ) -> np.ndarray:
        heads, n = weights.shape
        mean = min(int(budgets.sum()) // (heads * token_bytes), n)
        fifths = 4 * _counts_of_best(xp, weights, heads * mean) + mean  # (heads,)
        tokens, rest = fifths // 5, fifths % 5
        missing = heads * mean - int(tokens.sum())
        tokens[np.argsort(-rest, kind="stable")[:missing]] += 1
        return budgets + (tokens - mean) * token_bytes


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("rdkv", pool=15, own=0.5, floor=0.3, apart=True),
        PaperRdkv("rdkv:paper", rotates=False),
        Eviction("snapkv", per_query=False),
        AdaKV("adakv", per_query=False),
        Eviction("h2o", queries=None, pool=1),
    )
}
"""The policies by the names that a cache format gives them."""


def _by_width(
    xp: Any, widths: tuple[int, ...], whole: Array, left: Callable[[int], Array]
) -> Array:
    """Rows by width: all of it at 0 bits, nothing at 16, what `left` says between."""
    return xp.stack(
        [
            whole if width == 0 else xp.zeros_like(whole) if width == 16 else left(width)
            for width in widths
        ]
    )


def _pooled(xp: Any, weights: Array, width: int) -> Array:
    """Means over `width` neighbours of weights (kv_heads, T), which are mirrored at both ends."""
    if width == 1:
        return weights
    tokens = weights.shape[1]
    period = max(2 * (tokens - 1), 1)
    place = xp.arange(-(width // 2), tokens + width // 2) % period
    # Sums over 1, 2, 4, ... neighbours, each from the one before, and of them those that make up
    # the width: f32 is rounded alike wherever this runs.
    sums, size = weights[:, xp.minimum(place, period - place)], 1
    total, covered = None, 0
    while True:
        if width & size:
            part = sums[:, covered : covered + tokens]
            total = part if total is None else total + part
            covered += size
        if covered == width:
            return total / xp.float32(width)
        sums, size = sums[:, :-size] + sums[:, size:], 2 * size


def _counts_of_best(xp: Any, weights: Array, total: int) -> np.ndarray:
    """How many of the `total` largest weights (kv_heads, n) each head has, (kv_heads,) i64.

    Of equal weights the first heads'; NaN counts as 0.
    """
    weights = xp.where(weights > 0, weights, xp.float32(0))
    if total == 0:
        return np.zeros(len(weights), np.int64)
    least = xp.sort(weights.reshape(-1))[weights.size - total]
    counts = np.array((weights > least).sum(axis=1).tolist(), np.int64)
    equal = np.array((weights == least).sum(axis=1).tolist(), np.int64)
    rest = total - int(counts.sum())
    return counts + np.clip(rest - (equal.cumsum() - equal), 0, equal)
