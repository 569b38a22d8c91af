"""CPU attention: causal prefill pieces, and decode over sinks, packed pages and the tail.

Softmax is online (Milakov and Gimelshein 2018): a running maximum, sum and weighted value per
query head. A page is widened into a scratch tile that stays in the first-level cache.
"""

from types import ModuleType

import numpy as np

from . import cpu_math, jit
from .jit import Address, Int, Real
from .ops import PAGE_TOKENS


@jit.inline
def _scores(dim, tokens, group, q_at, tile_at, factor, weights, peaks, totals, acc_at):
    """Softmax weights (group, >= tokens) of a tile (tokens, dim) per query; rescale the past."""
    q = jit.array(q_at, (group, dim), np.float32)
    tile = jit.array(tile_at, (tokens, dim), np.float32)
    acc = jit.array(acc_at, (group, dim), np.float32)
    whole = tokens // 4 * 4
    for g in range(group):
        query = q[g]
        row = weights[g, :tokens]
        for t in range(0, whole, 4):
            row[t], row[t + 1], row[t + 2], row[t + 3] = cpu_math.inner4(query, tile, t)
        for t in range(whole, tokens):
            row[t] = cpu_math.inner(query, tile[t])
        peak = max(peaks[g], cpu_math.maximum(row) * factor)
        shrink = cpu_math.exp(peaks[g] - peak)
        peaks[g] = peak
        totals[g] = totals[g] * shrink + cpu_math.exp_minus(row, peak / factor, factor)
        cpu_math.scale(acc[g], shrink)


@jit.inline
def _values(dim, tokens, group, tile_at, weights, acc_at):
    """acc (group, dim) += weights (group, >= tokens) @ tile (tokens, dim)."""
    tile = jit.array(tile_at, (tokens, dim), np.float32)
    acc = jit.array(acc_at, (group, dim), np.float32)
    whole = tokens // 4 * 4
    for g in range(group):
        for t in range(0, whole, 4):
            cpu_math.add_scaled4(tile, weights[g], t, acc[g])
        for t in range(whole, tokens):
            cpu_math.add_scaled(tile[t], weights[g, t], acc[g])


# With a constant head_dim LLVM unrolls the inner loops, which makes them 1.5 times faster.


@jit.device
def _weigh(dim, tokens, group, q_at, tile_at, factor, weights, peaks, totals, acc_at):
    if dim == 64:
        _scores(64, tokens, group, q_at, tile_at, factor, weights, peaks, totals, acc_at)
    elif dim == 128:
        _scores(128, tokens, group, q_at, tile_at, factor, weights, peaks, totals, acc_at)
    else:
        _scores(dim, tokens, group, q_at, tile_at, factor, weights, peaks, totals, acc_at)


@jit.device
def _gather_values(dim, tokens, group, tile_at, weights, acc_at):
    if dim == 64:
        _values(64, tokens, group, tile_at, weights, acc_at)
    elif dim == 128:
        _values(128, tokens, group, tile_at, weights, acc_at)
    else:
        _values(dim, tokens, group, tile_at, weights, acc_at)


@jit.device
def _combine(head, splits, group, dim, partials, sums, out):
    """out (heads, dim) of one KV head's queries = its splits' partial states, merged."""
    parts = jit.array(partials, ((head + 1) * splits, group, dim), np.float32)
    states = jit.array(sums, ((head + 1) * splits, 2, group), np.float32)
    for g in range(group):
        result = jit.array(out + (head * group + g) * dim * 4, (dim,), np.float32)
        peak = np.float32(-1e30)
        for part in range(head * splits, (head + 1) * splits):
            peak = max(peak, states[part, 0, g])
        total = np.float32(0.0)
        cpu_math.fill(result, np.float32(0.0))
        for part in range(head * splits, (head + 1) * splits):
            weight = cpu_math.exp(states[part, 0, g] - peak)
            total += weight * states[part, 1, g]
            cpu_math.add_scaled(parts[part, g], weight, result)
        cpu_math.scale(result, np.float32(1.0) / total)


def build_attend(suffix: str, codec: ModuleType) -> None:
    """Register `attend_<suffix>`, the decode attention kernel of a codec.

    `codec.load_keys(run_address, params, tile)` and `codec.load_values(...)` widen the part of a
    page that belongs to one KV head into tile (PAGE_TOKENS, head_dim) f32.
    """

    def attend(
        thread, begin, end,
        q: Address, group: Int, dim: Int, scale: Real, splits: Int, scratch: Address,
        partials: Address, sums: Address, arrivals: Address, out: Address,
        sink_keys: Address, sink_values: Address, sinks: Int, sink_rows: Int,
        pages: Address, num_pages: Int, layer_offset: Int, run_bytes: Int, params: Address,
        tail_keys: Address, tail_values: Address, tail_start: Int, tail_tokens: Int, tail_rows: Int,
        key_kind: Int, value_kind: Int, first: Int,
    ):  # fmt: skip
        """One item is one (KV head, split) of the tokens; the last split of a head merges them.

        q (heads, dim) f32; sinks and tail are (kv_heads, rows, dim) stored floats of two kinds;
        pages (num_pages,) i64 addresses; `first` is the first position that may be seen.
        partials (items, group, dim) f32; sums (items, 2, group) f32: maximum, total; arrivals
        (kv_heads,) i64 zeros, zeros again at the end; out (heads, dim) f32.
        """
        key_bytes = dim * (4 if key_kind == cpu_math.F32 else 2)
        value_bytes = dim * (4 if value_kind == cpu_math.F32 else 2)
        per_thread = (PAGE_TOKENS * dim + group * PAGE_TOKENS) * 4
        tile_at = scratch + thread * per_thread
        tile = jit.array(tile_at, (PAGE_TOKENS, dim), np.float32)
        weights = jit.array(tile_at + PAGE_TOKENS * dim * 4, (group, PAGE_TOKENS), np.float32)
        page_table = jit.array(pages, (num_pages,), np.int64)
        settings = jit.array(params, (16,), np.int64)
        # Blocks: the sinks, then the pages, then the tail in tiles.
        sink_blocks = (sinks + PAGE_TOKENS - 1) // PAGE_TOKENS
        tail_blocks = (tail_tokens + PAGE_TOKENS - 1) // PAGE_TOKENS
        blocks = sink_blocks + num_pages + tail_blocks
        for item in range(begin, end):
            head = item // splits
            split = item % splits
            q_at = q + head * group * dim * 4
            acc_at = partials + item * group * dim * 4
            cpu_math.fill(jit.array(acc_at, (group * dim,), np.float32), np.float32(0.0))
            peaks = jit.array(sums + item * 2 * group * 4, (group,), np.float32)
            totals = jit.array(sums + (item * 2 + 1) * group * 4, (group,), np.float32)
            for g in range(group):
                peaks[g] = np.float32(-1e30)
                totals[g] = np.float32(0.0)
            for block in range(blocks * split // splits, blocks * (split + 1) // splits):
                if block < sink_blocks:
                    position = block * PAGE_TOKENS
                    count = min(PAGE_TOKENS, sinks - position)
                    row = head * sink_rows + position
                elif block < sink_blocks + num_pages:
                    position = sink_rows + (block - sink_blocks) * PAGE_TOKENS
                    count = PAGE_TOKENS
                    row = 0
                else:
                    done = (block - sink_blocks - num_pages) * PAGE_TOKENS
                    position = sink_rows + num_pages * PAGE_TOKENS + done
                    count = min(PAGE_TOKENS, tail_tokens - done)
                    # The ring is a multiple of PAGE_TOKENS long and starts on a page boundary.
                    row = head * tail_rows + (tail_start + done) % tail_rows
                low = min(max(first - position, 0), count)
                if low == count:
                    continue
                run = np.int64(0)
                if block < sink_blocks:
                    cpu_math.load_rows(sink_keys + row * key_bytes, key_kind, count, dim, tile)
                elif block < sink_blocks + num_pages:
                    run = page_table[block - sink_blocks] + layer_offset + head * run_bytes
                    codec.load_keys(run, settings, tile)
                else:
                    cpu_math.load_rows(tail_keys + row * key_bytes, key_kind, count, dim, tile)
                seen_at = tile_at + low * dim * 4
                _weigh(
                    dim, count - low, group, q_at, seen_at, np.float32(scale), weights,
                    peaks, totals, acc_at,
                )  # fmt: skip
                if block < sink_blocks:
                    cpu_math.load_rows(
                        sink_values + row * value_bytes, value_kind, count, dim, tile
                    )
                elif run != 0:
                    codec.load_values(run, settings, tile)
                else:
                    cpu_math.load_rows(
                        tail_values + row * value_bytes, value_kind, count, dim, tile
                    )
                _gather_values(dim, count - low, group, seen_at, weights, acc_at)
            if jit.atomic_add(arrivals + head * 8, 1) == splits - 1:
                jit.array(arrivals + head * 8, (1,), np.int64)[0] = 0
                _combine(head, splits, group, dim, partials, sums, out)

    attend.__name__ = f"attend_{suffix}"
    jit.kernel(attend)


@jit.kernel
def softmax_causal(
    thread, begin, end,
    scores: Address, cols: Int, scale: Real, first_query: Int, first_key: Int, window: Int,
):  # fmt: skip
    """Softmax rows of scores (m, cols) in place; row i sees keys up to position first_query + i.

    Column j is the key at first_key + j. A positive window keeps the last `window` keys.
    """
    rows = jit.array(scores, (end, cols), np.float32)
    for i in range(begin, end):
        row = rows[i]
        high = min(first_query + i + 1 - first_key, cols)
        low = max(high - window, 0) if window > 0 else 0
        seen = row[low:high]
        total = cpu_math.exp_minus(seen, cpu_math.maximum(seen), np.float32(scale))
        cpu_math.scale(seen, np.float32(1.0) / total)
        cpu_math.fill(row[:low], np.float32(0.0))
        cpu_math.fill(row[high:], np.float32(0.0))
