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
from .allocator import allocate
from .layout import BLOCK_TOKENS, RUN_ALIGNMENT, WIDTHS, key_rows
from .policies import POLICIES, Policy, query_energy
from .segment import Segment, lay_out

Queries = Callable[[slice], Any]
"""Gives the queries (rows, num_heads, head_dim) f32, after RoPE, of a slice of the new tokens."""

QUERY_ROWS = 256
"""Queries whose attention is summed up at a time."""

ENERGY_QUERIES = 32
"""The last queries, by which channels of keys are weighed."""

_META_BYTES = 4
"""A scale and a minimum."""

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
    received = _received(ops, asked, keys, queries, new)
    weights = policy.token_weights(ops.xp, received, candidates, asked)  # (heads, n) f32
    errors = ops.empty((4, *weights.shape))
    ops.value_errors(values[candidates], errors)
    distortion = policy.token_distortion(ops.xp, weights, errors)  # (widths, heads, n)
    budgets = np.full(heads, max(budget, 0), np.int64)
    budgets = policy.head_budgets(ops.xp, weights, budgets, EXACT_BYTES * dim)
    kept, budgets = _keep(ops, policy, distortion, budgets, dim, compression.shared)
    kept = kept.moved(candidates.start)
    last = queries(slice(max(new - ENERGY_QUERIES, 0), new))
    energy = ops.to_host(query_energy(ops.xp, last, heads))  # (heads, dim) f32
    channels = _channel_widths(ops, policy, kept, budgets, keys, energy)
    return _packed(ops, kept, channels, keys, values, weights.shape[1])


def _received(ops: Ops, asked: int, keys: Any, queries: Queries, new: int) -> Any:
    """The attention that each token gets from the last `asked` queries, (kv_heads, total) f32."""
    total, heads, dim = keys.shape
    received = ops.xp.zeros((heads, total), np.float32)
    for start in range(new - asked, new, QUERY_ROWS):
        rows = slice(start, min(start + QUERY_ROWS, new))
        seen = total - new + rows.stop
        part = ops.xp.zeros((heads, seen), np.float32)
        ops.attention_received(queries(rows), keys[:seen], 1.0 / math.sqrt(dim), part)
        received[:, :seen] += part
    return received


@dataclass(frozen=True)
class _Kept:
    """The tokens that are kept, block after block, heads in order.

    tokens (kept,) i64, on the device: their rows; firsts (units,) i64, on the device: where each
    block begins among them; counts (units, 4) i64: a block's tokens by width; heads (units,) i64.
    """

    tokens: Any
    firsts: Any
    counts: np.ndarray
    heads: np.ndarray

    def moved(self, rows: int) -> _Kept:
        """The same tokens, whose rows are counted from so many before."""
        return _Kept(self.tokens + rows, self.firsts, self.counts, self.heads)


def _keep(
    ops: Ops, policy: Policy, distortion: Any, budgets: np.ndarray, dim: int, shared: bool
) -> tuple[_Kept, np.ndarray]:
    """Choose widths for tokens; give what is kept, and what is left of the budgets (kv_heads,)."""
    xp, widths = ops.xp, np.array(policy.widths)
    rates = widths * dim // 8 + np.where((widths > 0) & (widths < 16), _META_BYTES, 0)
    if policy.key_widths == (16,):
        rates += np.where(widths > 0, 2 * dim, 0)  # a whole token, keys too
        for_values = _for_whole_tokens(budgets, dim, shared)
    else:
        for_values = (budgets - _UNIT_BYTES - RUN_ALIGNMENT) // 2
    chosen, _ = allocate(xp, distortion, rates, for_values, shared=shared)
    kept = _in_blocks(ops, chosen, policy)
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
    widths = np.array(WIDTHS)
    return widths * dim // 8 + np.where(widths < 16, _META_BYTES, 0)


def _in_blocks(ops: Ops, chosen: Any, policy: Policy) -> _Kept:
    """The tokens that were given a width, chosen (kv_heads, n) u8, cut into blocks."""
    xp, (heads, n) = ops.xp, chosen.shape
    kept = ops.to_host((chosen > 0).sum(axis=1)).astype(np.int64)  # (heads,)
    blocks = -(-kept // BLOCK_TOKENS)
    owners = np.repeat(np.arange(heads), blocks)  # (units,)
    flat = xp.flatnonzero(chosen)
    head = flat // max(n, 1)
    starts, first_units = (ops.to_device(np.cumsum(x) - x) for x in (kept, blocks))
    place = xp.arange(len(flat)) - starts[head]  # in the head
    unit = first_units[head] + place // BLOCK_TOKENS
    ranks = np.array([0, *(WIDTHS.index(width) for width in policy.widths[1:])])
    group = unit * len(WIDTHS) + ops.to_device(ranks)[chosen.reshape(-1)[flat]]
    # By block, then width, then position; no two are equal.
    order = xp.sort(group * n + flat % max(n, 1))
    counts = xp.bincount(order // max(n, 1), minlength=len(WIDTHS) * len(owners))
    counts = ops.to_host(counts)[: len(WIDTHS) * len(owners)].reshape(-1, len(WIDTHS))
    counts = counts.astype(np.int64)
    in_block = counts.sum(1)
    firsts = ops.to_device(np.cumsum(in_block) - in_block)
    return _Kept(order % max(n, 1), firsts, counts, owners)


def _channel_widths(
    ops: Ops, policy: Policy, kept: _Kept, budgets: np.ndarray, keys: Any, energy: np.ndarray
) -> np.ndarray:
    """The width of each channel of keys, (kv_heads, dim) i64; 0 where a head keeps no token."""
    heads, dim = energy.shape
    tokens = kept.counts.sum(1)  # (units,)
    per_head = np.bincount(kept.heads, tokens, heads).astype(np.int64)
    if policy.key_widths == (16,):
        return np.where(per_head[:, None] > 0, 16, np.zeros((heads, dim), np.int64))
    errors = ops.empty((heads, dim, 4), np.float64)
    ops.key_errors(
        keys, kept.tokens, kept.firsts, ops.to_device(tokens), ops.to_device(kept.heads), errors
    )
    distortion = policy.channel_distortion(np, energy, ops.to_host(errors), per_head)
    units = np.bincount(kept.heads, minlength=heads)
    rows = np.bincount(kept.heads, key_rows(kept.counts), heads).astype(np.int64)
    widths = np.array(policy.key_widths)[:, None]  # (widths, 1)
    rates = rows * widths // 8 + np.where((widths > 0) & (widths < 16), _META_BYTES * units, 0)
    # The orders of the channels themselves take a byte each.
    rates += np.where((widths > 0) & (units > 0), 1, 0)
    left = budgets - units * _UNIT_BYTES - (RUN_ALIGNMENT - 1)
    chosen, _ = allocate(np, distortion, rates, left)
    return np.where(per_head[:, None] > 0, widths[:, 0][chosen], 0)


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
        ops.pack_zones(
            keys, values, kept.tokens, kept.firsts, ops.to_device(kept.heads),
            ops.to_device(segment.placed(ops)),
        )  # fmt: skip
    return segment
