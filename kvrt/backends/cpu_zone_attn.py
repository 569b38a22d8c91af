"""CPU decode attention over the blocks of zones and the rows of the tail.

Online softmax as in `cpu_attn`, whose parts it uses. Keys of a block are decoded channel by
channel, as they lie, and meet the query in their own order.
"""

import numpy as np

from . import cpu_attn, cpu_math, cpu_zone_codes, jit, view
from .jit import Address, Int, Real
from .ops import PAGE_TOKENS


@jit.inline
def attend_zones_bytes(dim, group):
    """Scratch of one thread: a tile, weights, and queries in the order of a block's channels."""
    return PAGE_TOKENS * dim * 4 + group * (PAGE_TOKENS + dim) * 4


@jit.device
def _block_scores(query, unit, tile_at, asked, weights):
    """weights[:, :tokens] = query (group, dim) . keys of a block (a row of the directory).

    What is behind is undefined.
    """
    group, dim = query.shape
    kept = cpu_zone_codes.total_of(unit[3])
    channels = jit.array(unit[1], (kept,), np.uint8)
    _, key_meta, key_codes = cpu_zone_codes.regions(unit[2], unit[3], dim)
    tile = jit.array(tile_at, (kept, PAGE_TOKENS), np.float32)
    rows = cpu_zone_codes.key_rows(unit[2])
    cpu_zone_codes.decode(unit[0] + key_codes, unit[0] + key_meta, unit[3], rows, tile)
    for g in range(group):
        for c in range(kept):
            asked[g, c] = query[g, channels[c]]
        cpu_math.fill(weights[g], np.float32(0.0))
    weights_at = jit.address_of(weights)
    cpu_attn.values_by_token(PAGE_TOKENS, 0, kept, group, tile_at, asked, weights_at)


@jit.kernel
def attend_zones(
    thread, begin, end,
    q: Address, group: Int, scale: Real, splits: Int, scratch: Address,
    partials: Address, sums: Address, arrivals: Address, out: Address, layer: Address,
    tail_tokens: Int,
):  # fmt: skip
    """One item is one (KV head, split) of its blocks; the last split of a head merges them.

    q, out (heads, dim) f32; the view's settings and its extent's tail_tokens. partials (items,
    group, dim) f32; sums (items, 2, group) f32: maximum, total; arrivals (kv_heads,) i64 zeros,
    zeros again at the end.
    """
    info = jit.array(layer, (view.LAYER_SETTINGS,), np.int64)
    dim, tail_rows = info[view.DIM], info[view.TAIL_ROWS]
    key_kind, value_kind = info[view.KEY_KIND], info[view.VALUE_KIND]
    key_bytes = cpu_math.row_bytes(key_kind, dim)
    value_bytes = cpu_math.row_bytes(value_kind, dim)
    tile_at = scratch + thread * attend_zones_bytes(dim, group)
    tile = jit.array(tile_at, (PAGE_TOKENS, dim), np.float32)
    asked = jit.array(tile_at + PAGE_TOKENS * dim * 4, (group, dim), np.float32)
    weights_at = tile_at + (PAGE_TOKENS + group) * dim * 4
    weights = jit.array(weights_at, (group, PAGE_TOKENS), np.float32)
    # Blocks: those of the tail, then the head's own.
    tail_blocks = (tail_tokens + PAGE_TOKENS - 1) // PAGE_TOKENS
    for item in range(begin, end):
        head = item // splits
        split = item % splits
        starts = jit.array(layer + (view.LAYER_SETTINGS + head) * 8, (2,), np.int64)
        first_unit, blocks = starts[0], tail_blocks + starts[1] - starts[0]
        query_at = q + head * group * dim * 4
        query = jit.array(query_at, (group, dim), np.float32)
        acc_at = partials + item * group * dim * 4
        acc = jit.array(acc_at, (group, dim), np.float32)
        cpu_math.fill(jit.array(acc_at, (group * dim,), np.float32), np.float32(0.0))
        peaks = jit.array(sums + item * 2 * group * 4, (group,), np.float32)
        totals = jit.array(sums + (item * 2 + 1) * group * 4, (group,), np.float32)
        for g in range(group):
            peaks[g] = np.float32(-1e30)
            totals[g] = np.float32(0.0)
        for block in range(blocks * split // splits, blocks * (split + 1) // splits):
            in_tail = block < tail_blocks
            row = head * tail_rows + block * PAGE_TOKENS
            at = info[view.ZONE_UNITS] + (first_unit + block - tail_blocks) * 32
            unit = jit.array(0 if in_tail else at, (4,), np.int64)
            if in_tail:
                count = min(PAGE_TOKENS, tail_tokens - block * PAGE_TOKENS)
                keys = info[view.TAIL_KEYS] + row * key_bytes
                cpu_math.load_rows(keys, key_kind, count, dim, tile)
                cpu_attn.key_scores(dim, 0, count, group, query_at, tile_at, weights, False)
            else:
                count = cpu_zone_codes.total_of(unit[2])
                _block_scores(query, unit, tile_at, asked, weights)
            cpu_attn.softmax_step(0, count, group, np.float32(scale), weights, peaks, totals, acc)
            if in_tail:
                values = info[view.TAIL_VALUES] + row * value_bytes
                cpu_math.load_rows(values, value_kind, count, dim, tile)
            else:
                value_meta, _, _ = cpu_zone_codes.regions(unit[2], unit[3], dim)
                cpu_zone_codes.decode(unit[0], unit[0] + value_meta, unit[2], dim, tile)
            cpu_attn.values_by_token(dim, 0, count, group, tile_at, weights, acc_at)
        if jit.atomic_add(arrivals + head * 8, 1) == splits - 1:
            jit.array(arrivals + head * 8, (1,), np.int64)[0] = 0
            hadamard = info[view.VALUE_HADAMARD]
            cpu_attn.combine(head, splits, group, dim, partials, sums, hadamard, out)
