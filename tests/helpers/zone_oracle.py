"""What compressing a layer should give, in float64, from the rules: scores, a budget, blocks.

Policies and the allocator have tests of their own and are taken as they are; what they are fed, and
how their widths become blocks, is done here once more.
"""

import math
from typing import NamedTuple

import numpy as np

from kvrt.kvstore import KVSpec
from kvrt.trizone.allocator import allocate
from kvrt.trizone.policies import POLICIES, Policy

from .zones import BLOCK, plain_levels, reference_block

UNIT = 32 + 15
"""A block's row of the directory, and what rounds its run up, at most."""


class Layer(NamedTuple):
    """tokens[head]: (row, width) of what is kept, by row; channels (kv_heads, dim) widths."""

    tokens: list[list[tuple[int, int]]]
    channels: np.ndarray


def compressed(spec: KVSpec, keys: np.ndarray, values: np.ndarray, queries: np.ndarray) -> Layer:
    """keys, values (total, kv_heads, dim) as they are kept; queries (new, heads, dim)."""
    assert spec.compression is not None
    compression, (total, kv_heads, dim) = spec.compression, keys.shape
    policy = POLICIES[f"{compression.policy}{':paper' * compression.paper}"]
    first, last = spec.sink, total - spec.window
    asked = min(policy.asks(total), len(queries))
    received = _received(keys, queries[len(queries) - asked :])
    weights = policy.token_weights(np, received, slice(first, last), asked)
    left = compression.budget_bytes(total, dim) - 4 * dim * (spec.sink + spec.window)
    budgets = policy.head_budgets(np, weights, np.full(kv_heads, max(left, 0)), 4 * dim)
    if policy.key_widths == (16,):
        shared = compression.shared
        kept = (_best_of_all if shared else _best)(weights, budgets, dim)
        tokens = [[(first + row, 16) for row in rows] for rows in kept]
        return Layer(tokens, np.array([[16 * bool(rows)] * dim for rows in kept]))
    errors = _value_errors(values[first:last])
    distortion = policy.token_distortion(np, weights, errors).astype(np.float32)
    widths = np.array(policy.widths)
    rates = np.array([0, *(width * dim // 8 + 4 * (width < 16) for width in widths[1:])])
    chosen = allocate(np, distortion, rates, (budgets - 63) // 2, shared=compression.shared).chosen
    tokens = [
        [(first + int(row), int(widths[index[row]])) for row in np.flatnonzero(index)]
        for index in chosen
    ]
    spent = np.array([sum(int(rates[i]) for i in index) for index in chosen])
    units = np.array([-(-len(rows) // BLOCK) for rows in tokens])
    own = units * UNIT + 15 * (units > 0)
    for_keys = budgets - spent - own
    if compression.shared:
        for_keys = (budgets.sum() - own.sum()) * spent // max(spent.sum(), 1) - spent
    return Layer(tokens, _channels(policy, keys, queries[-32:], tokens, for_keys))


def _received(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """(kv_heads, total) f64 sums of attention weights."""
    total, kv_heads, dim = keys.shape
    group = queries.shape[1] // kv_heads
    out = np.zeros((kv_heads, total))
    for back, rows in enumerate(queries[::-1].astype(np.float64)):
        for head, query in enumerate(rows):
            scores = keys[: total - back, head // group] @ query / math.sqrt(dim)
            weights = np.exp(scores - scores.max())
            out[head // group, : total - back] += weights / weights.sum()
    return out


def _value_errors(values: np.ndarray) -> np.ndarray:
    """(4, kv_heads, n) f64."""
    count, heads, _ = values.shape
    out = np.zeros((4, heads, count))
    for head in range(heads):
        for token in range(count):
            x = values[token, head]
            out[:, head, token] = _errors(x, [plain_levels(x, bits).numbers for bits in (2, 4, 8)])
    return out


def _errors(x: np.ndarray, coded: list[np.ndarray]) -> list[float]:
    wide = x.astype(np.float64)
    return [float((wide**2).sum()), *(float(((wide - other) ** 2).sum()) for other in coded)]


def _channels(
    policy: Policy, keys: np.ndarray, queries: np.ndarray, tokens: list[list[tuple[int, int]]],
    budgets: np.ndarray,
) -> np.ndarray:  # fmt: skip
    _, kv_heads, dim = keys.shape
    squares = (queries.astype(np.float64) ** 2).reshape(len(queries), kv_heads, -1, dim)
    energy = squares.mean(axis=(0, 2))  # (kv_heads, dim)
    errors = np.zeros((kv_heads, dim, 4))
    widths, rates = np.array(policy.key_widths), np.zeros((5, kv_heads), np.int64)
    for head, kept in enumerate(tokens):
        for block in _blocks(kept):
            rows = keys[[row for row, _ in block], head]
            for c in range(dim):
                coded = [plain_levels(rows[:, c], bits).numbers for bits in (2, 4, 8)]
                errors[head, c] += _errors(rows[:, c], coded)
            room = -(-len(block) // 4) * 4
            rates[1:, head] += [room * w // 8 + 4 * (w < 16) for w in widths[1:].tolist()]
        rates[1:, head] += bool(kept)  # a channel's place in the order
    counts = np.array([len(kept) for kept in tokens])
    distortion = policy.channel_distortion(np, energy, errors, counts).astype(np.float32)
    return widths[allocate(np, distortion, rates, budgets).chosen] * (counts > 0)[:, None]


def _best(weights: np.ndarray, budgets: np.ndarray, dim: int) -> list[list[int]]:
    """Of each head the tokens of largest weight, as many as fit with all their bytes."""
    kept = []
    for scores, budget in zip(weights, budgets.tolist(), strict=True):
        count = 0
        while count < len(scores) and whole_bytes(count + 1, dim) <= budget:
            count += 1
        kept.append(sorted(np.argsort(-scores, kind="stable")[:count].tolist()))
    return kept


def _best_of_all(weights: np.ndarray, budgets: np.ndarray, dim: int) -> list[list[int]]:
    """The same of all heads together, with room for whatever each has to round up."""
    heads, n = weights.shape
    left = int(budgets.sum()) - heads * (7 * dim + 32)
    most = min(max(left * 64 // (4 * dim * 64 + 32), 0), weights.size)
    chosen = np.argsort(-weights.ravel(), kind="stable")[:most]
    return [sorted(int(i) % n for i in chosen if i // n == head) for head in range(heads)]


def whole_bytes(count: int, dim: int) -> int:
    """What so many 16-bit tokens of a head take: rows, a directory, an order of channels."""
    blocks = [min(BLOCK, count - start) for start in range(0, count, BLOCK)]
    return sum(2 * dim * (size + -(-size // 4) * 4) + 32 for size in blocks) + dim * bool(count)


def _blocks(kept: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Tokens of blocks, as a block has them: the widest first."""
    parts = [kept[start : start + BLOCK] for start in range(0, len(kept), BLOCK)]
    return [sorted(part, key=lambda token: (-token[1], token[0])) for part in parts]


def runs(layer: Layer, keys: np.ndarray, values: np.ndarray) -> list[tuple[int, bytes]]:
    """Head and bytes of each block."""
    out = []
    for head, kept in enumerate(layer.tokens):
        for block in _blocks(kept):
            rows, widths = [row for row, _ in block], np.array([width for _, width in block])
            sides = (side[rows, head] for side in (keys, values))
            out.append((head, reference_block(*sides, widths, layer.channels[head]).run))
    return out
