"""Compressing one layer of a prompt: a policy scores, the allocator spends, the zones store.

Half of a head's budget for the candidates goes to values: a width for each token. What they leave
goes to keys: a width for each channel, for all tokens that are kept. All bytes count: scales,
minima, the directory's rows, what rounds a block's size up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.ops import Ops
from ..kvstore.compression import EXACT_BYTES, Compression
from .layout import (
    BLOCK_TOKENS,
    META_BYTES,
    RUN_ALIGNMENT,
    WIDTHS,
    key_rows,
    meta_bytes,
    row_bytes,
)
from .policies import POLICIES, Policy, query_energy
from .segment import Segment, lay_out

Queries = Callable[[slice], Any]
"""Gives the queries (rows, num_heads, head_dim) f32, after RoPE, of a slice of the new tokens."""

AT_ONCE = 256
"""Queries whose attention is summed up at a time."""

ENERGY_QUERIES = 32
"""The last queries, by which channels of keys are weighed; no policy asks for fewer."""

_UNIT_BYTES = 32 + RUN_ALIGNMENT - 1
"""Of a block beside its run: its row of the directory, and what rounds the run up, at most."""


@np.errstate(all="ignore")  # numbers that are not finite take no width
def compress(
    ops: Ops,
    compression: Compression,
    budget: int,
    keys: Any,
    values: Any,
    candidates: slice,
    queries: Queries,
    new: int,
) -> Segment:
    """Choose from the candidates, some of a layer's tokens, and pack what is kept of them.

    keys (after RoPE), values (total, num_kv_heads, head_dim) f32, of which the last `new` are those
    that `queries` knows; budget: bytes of the candidates for each KV head.
    """
    policy = POLICIES[compression.name]
    heads, dim = keys.shape[1:]
    asked = min(policy.asks(len(keys)), new)
    received, last = _received(ops, asked, keys, queries, new)
    energy = query_energy(ops.xp, last[-ENERGY_QUERIES:], heads)  # (heads, dim) f32
    weights = policy.token_weights(ops.xp, received, candidates, asked)  # (heads, n) f32
    errors = ops.empty((4, *weights.shape))
    ops.value_errors(values[candidates], errors)
    distortion = policy.token_distortion(ops.xp, weights, errors)  # (widths, heads, n)
    budgets = np.full(heads, max(budget, 0), np.int64)
    budgets = policy.head_budgets(ops.xp, weights, budgets, EXACT_BYTES * dim)
    kept, budgets = _keep(
        ops, policy, distortion, budgets, dim, compression.shared, candidates.start
    )
    channels = _channel_widths(ops, policy, kept, budgets, keys, energy)
    return _packed(ops, kept, channels, keys, values, weights.shape[1])


def _received(ops: Ops, asked: int, keys: Any, queries: Queries, new: int) -> tuple[Any, Any]:
    """The attention that each token gets from the last `asked` queries, (kv_heads, total) f32.

    And the last of these queries: AT_ONCE of them, or all.
    """
    total, heads, dim = keys.shape
    received, last = ops.xp.zeros((heads, total), np.float32), None
    scale = 1.0 / math.sqrt(dim)
    for stop in range(new - (asked - 1) // AT_ONCE * AT_ONCE, new + 1, AT_ONCE):
        last = queries(slice(max(stop - AT_ONCE, new - asked), stop))
        seen = total - new + stop
        if seen == total:
            ops.attention_received(last, keys, scale, received)
        else:
            part = ops.xp.zeros((heads, seen), np.float32)
            ops.attention_received(last, keys[:seen], scale, part)
            received[:, :seen] += part
    return received, last


@dataclass(frozen=True)
class _Kept:
    """The tokens that are kept, block after block, heads in order.

    counts (units, 4) i64: a block's tokens by width; heads (units,) i64: its head. On the device:
    tokens (any,) i64, rows; blocks (3, units) i64: where each block begins among these, how many
    it has, and its head.
    """

    counts: np.ndarray
    heads: np.ndarray
    tokens: Any
    blocks: Any


def _keep(
    ops: Ops,
    policy: Policy,
    distortion: Any,
    budgets: np.ndarray,
    dim: int,
    shared: bool,
    start: int,
) -> tuple[_Kept, np.ndarray]:
    """Choose widths for tokens, of which the first is row `start`.

    Gives what is kept, and what is left of the budgets (kv_heads,).
    """
    widths = np.array(policy.widths)
    rates = widths * dim // 8 + np.where((widths > 0) & (widths < 16), META_BYTES, 0)
    if policy.key_widths == (16,):
        rates += np.where(widths > 0, 2 * dim, 0)  # a whole token, keys too
        for_values = _for_whole_tokens(budgets, dim, shared)
    else:
        for_values = (budgets - _UNIT_BYTES - RUN_ALIGNMENT) // 2
    chosen, _ = ops.allocate(distortion, rates, for_values, shared=shared)
    kept = _in_blocks(ops, policy, chosen, start)
    spent = np.bincount(kept.heads, kept.counts @ _value_bytes(dim), len(budgets)).astype(np.int64)
    if shared:  # keys are paid as values are, once each head's blocks have their own
        units = np.bincount(kept.heads, minlength=len(budgets))
        own = units * _UNIT_BYTES + np.where(units > 0, RUN_ALIGNMENT - 1, 0)
        total = max(int(spent.sum()), 1)
        budgets = own + (budgets.sum() - own.sum()) * spent // total
    return kept, budgets - spent


def _for_whole_tokens(budgets: np.ndarray, dim: int, shared: bool) -> np.ndarray:
    """What whole tokens may take of budgets (kv_heads,), so that all their bytes fit.

    A head has an order of channels, a block a row of the directory; its keys have room for a
    multiple of 4 tokens. A shared budget bears the most that any division among the heads takes.
    """
    row, unit = EXACT_BYTES * dim, _UNIT_BYTES - (RUN_ALIGNMENT - 1)  # runs are whole as they are
    budgets = np.maximum(budgets, 0)
    if shared:
        heads = len(budgets)
        left = budgets.sum() - heads * (dim + unit + 3 * 2 * dim)
        most = max(int(left) * BLOCK_TOKENS // (row * BLOCK_TOKENS + unit), 0)
        return np.full(heads, -(-most * row // heads))
    tokens = np.maximum(budgets - dim, 0) // row
    while True:
        room = -(-tokens // 4) * 4 - tokens
        taken = tokens * row + room * 2 * dim + -(-tokens // BLOCK_TOKENS) * unit + dim
        over = (taken > budgets) & (tokens > 0)
        if not over.any():
            return tokens * row
        # A token takes all these bytes at most.
        tokens = tokens - over * np.maximum((taken - budgets) // (row + unit + 3 * 2 * dim), 1)


def _value_bytes(dim: int) -> np.ndarray:
    """Bytes of a token's values by width, in the order of WIDTHS."""
    each = np.eye(len(WIDTHS), dtype=np.int64)
    return row_bytes(each, dim) + meta_bytes(each)


def _in_blocks(ops: Ops, policy: Policy, chosen: Any, start: int) -> _Kept:
    """The tokens that were given a width, chosen (kv_heads, n) u8, cut into blocks."""
    heads, n = chosen.shape
    tokens = ops.empty((heads, n), np.int64)
    counts = ops.empty((heads, -(-n // BLOCK_TOKENS), len(WIDTHS)), np.uint8)
    ranks = [0, *(WIDTHS.index(width) for width in policy.widths[1:])]
    ops.cut_blocks(chosen, ranks, start, tokens, counts)
    counts = ops.to_host(counts)
    owners, number = counts.view(np.uint32)[:, :, 0].nonzero()  # (units,) each, heads in order
    counts = counts[owners, number].astype(np.int64)
    blocks = np.stack([owners * n + number * BLOCK_TOKENS, counts.sum(1), owners])
    return _Kept(counts, owners, tokens.reshape(-1), ops.to_device(blocks))


def _channel_widths(
    ops: Ops, policy: Policy, kept: _Kept, budgets: np.ndarray, keys: Any, energy: Any
) -> np.ndarray:
    """The width of each channel of keys, (kv_heads, dim) i64; 0 where a head keeps no token."""
    heads, dim = energy.shape
    tokens = kept.counts.sum(1)  # (units,)
    per_head = np.bincount(kept.heads, tokens, heads).astype(np.int64)
    if policy.key_widths == (16,):
        return np.where(per_head[:, None] > 0, 16, np.zeros((heads, dim), np.int64))
    errors = ops.empty((heads, dim, 4), np.float64)
    firsts, sizes, owners = kept.blocks
    ops.key_errors(keys, kept.tokens, firsts, sizes, owners, errors)
    # Few numbers, and on the host the same on each backend.
    distortion = policy.channel_distortion(np, ops.to_host(energy), ops.to_host(errors), per_head)
    units = np.bincount(kept.heads, minlength=heads)
    rows = np.bincount(kept.heads, key_rows(kept.counts), heads).astype(np.int64)
    widths = np.array(policy.key_widths)[:, None]  # (widths, 1)
    rates = rows * widths // 8 + np.where((widths > 0) & (widths < 16), META_BYTES * units, 0)
    # The orders of the channels themselves take a byte each.
    rates += np.where((widths > 0) & (units > 0), 1, 0)
    left = budgets - units * _UNIT_BYTES - (RUN_ALIGNMENT - 1)
    chosen, _ = ops.allocate(ops.to_device(distortion), rates, left)
    return np.where(per_head[:, None] > 0, widths[:, 0][ops.to_host(chosen)], 0)


def _packed(
    ops: Ops, kept: _Kept, widths: np.ndarray, keys: Any, values: Any, candidates: int
) -> Segment:
    """Blocks of the tokens that are kept, with channels of these widths (kv_heads, dim)."""
    dim = widths.shape[1]
    channels = np.stack([(widths == width).sum(1) for width in WIDTHS], axis=1)  # (heads, 4)
    units, nbytes = lay_out(kept.counts, kept.heads, channels, dim)
    order = np.argsort(-widths, axis=1, kind="stable")  # (heads, dim): widest channels first
    orders = np.concatenate([row[:count] for row, count in zip(order, channels.sum(1))])
    data = ops.empty((nbytes,), np.uint8)
    data.fill(0)
    data[: len(orders)] = ops.to_device(orders.astype(np.uint8))
    segment = Segment(data, units, kept.heads, candidates, channels)
    if len(units):
        firsts, _, owners = kept.blocks
        units = ops.to_device(segment.placed(ops))
        ops.pack_zones(keys, values, kept.tokens, firsts, owners, units)
    return segment
