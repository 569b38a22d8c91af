"""CPU attention: causal prefill pieces, and decode over sinks, packed pages and the tail.

Softmax is online (Milakov and Gimelshein 2018): a running maximum, sum and weighted value per
query head. A page is widened into a scratch tile that stays in the first-level cache.
"""

from types import ModuleType

import numpy as np

from . import cpu_math, jit
from .jit import Address, Int, Real
from .ops import PAGE_TOKENS

@jit.device
def _scores(q, tile, low, high, scale, weights, maximum, total, acc):
    """Turn tile rows low..high-1 into softmax weights per query head; rescale what came before."""
    for g in range(q.shape[0]):
        peak = maximum[g]
        for t in range(low, high):
            score = np.float32(0.0)
            for d in range(q.shape[1]):
                score += q[g, d] * tile[t, d]
            score *= scale
            weights[g, t] = score
            peak = max(peak, score)
        shrink = cpu_math.exp(maximum[g] - peak)
        maximum[g] = peak
        subtotal = np.float32(0.0)
        for t in range(low, high):
            weight = cpu_math.exp(weights[g, t] - peak)
            weights[g, t] = weight
            subtotal += weight
        total[g] = total[g] * shrink + subtotal
        for d in range(q.shape[1]):
            acc[g, d] *= shrink


@jit.device
def _values(tile, low, high, weights, acc):
    for g in range(acc.shape[0]):
        for t in range(low, high):
            weight = weights[g, t]
            for d in range(acc.shape[1]):
                acc[g, d] += weight * tile[t, d]


def build_attend(suffix: str, codec: ModuleType) -> None:
    """Register `attend_<suffix>`, the decode attention kernel of a codec.

    `codec.load_keys(run_address, params, tile)` and `codec.load_values(...)` widen the part of a
    page that belongs to one KV head into tile (PAGE_TOKENS, head_dim) f32.
    """

    def attend(
        thread, begin, end,
        q: Address, group: Int, dim: Int, scale: Real, splits: Int, scratch: Address,
        partials: Address, sums: Address,
        sink_keys: Address, sink_values: Address, sinks: Int, sink_rows: Int,
        pages: Address, num_pages: Int, layer_offset: Int, run_bytes: Int, params: Address,
        tail_keys: Address, tail_values: Address, tail_start: Int, tail_tokens: Int, tail_rows: Int,
        key_kind: Int, value_kind: Int, first: Int,
    ):  # fmt: skip
        """One item is one (KV head, split) of the tokens; partial states go to the combine step.

        q (heads, dim) f32; sinks and tail are (kv_heads, rows, dim) stored floats of two kinds;
        pages (num_pages,) i64 addresses; `first` is the first position that may be seen.
        partials (items, group, dim) f32; sums (items, 2, group) f32: maximum, total.
        """
        key_bytes = dim * (4 if key_kind == cpu_math.F32 else 2)
        value_bytes = dim * (4 if value_kind == cpu_math.F32 else 2)
        per_thread = (PAGE_TOKENS * dim + group * PAGE_TOKENS) * 4
        tile = jit.array(scratch + thread * per_thread, (PAGE_TOKENS, dim), np.float32)
        weights = jit.array(
            scratch + thread * per_thread + PAGE_TOKENS * dim * 4, (group, PAGE_TOKENS), np.float32
        )
        page_table = jit.array(pages, (num_pages,), np.int64)
        settings = jit.array(params, (16,), np.int64)
        # Blocks: the sinks, then the pages, then the tail in tiles.
        sink_blocks = (sinks + PAGE_TOKENS - 1) // PAGE_TOKENS
        tail_blocks = (tail_tokens + PAGE_TOKENS - 1) // PAGE_TOKENS
        blocks = sink_blocks + num_pages + tail_blocks
        for item in range(begin, end):
            head = item // splits
            split = item % splits
            queries = jit.array(q + head * group * dim * 4, (group, dim), np.float32)
            acc = jit.array(partials + item * group * dim * 4, (group, dim), np.float32)
            maximum = jit.array(sums + item * 2 * group * 4, (group,), np.float32)
            total = jit.array(sums + (item * 2 + 1) * group * 4, (group,), np.float32)
            for g in range(group):
                maximum[g] = np.float32(-1e30)
                total[g] = np.float32(0.0)
                for d in range(dim):
                    acc[g, d] = np.float32(0.0)
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
                _scores(queries, tile, low, count, np.float32(scale), weights, maximum, total, acc)
                if block < sink_blocks:
                    cpu_math.load_rows(sink_values + row * value_bytes, value_kind, count, dim, tile)
                elif run != 0:
                    codec.load_values(run, settings, tile)
                else:
                    cpu_math.load_rows(tail_values + row * value_bytes, value_kind, count, dim, tile)
                _values(tile, low, count, weights, acc)

    attend.__name__ = f"attend_{suffix}"
    jit.kernel(attend)


@jit.kernel
def combine(
    thread, begin, end,
    partials: Address, sums: Address, splits: Int, group: Int, dim: Int, out: Address,
):  # fmt: skip
    """out (heads, dim): merge the partial states of one query head, one item each."""
    for item in range(begin, end):
        head = item // group
        g = item % group
        parts = jit.array(partials, ((head + 1) * splits, group, dim), np.float32)
        states = jit.array(sums, ((head + 1) * splits, 2, group), np.float32)
        result = jit.array(out + item * dim * 4, (dim,), np.float32)
        peak = np.float32(-1e30)
        for split in range(splits):
            peak = max(peak, states[head * splits + split, 0, g])
        total = np.float32(0.0)
        for d in range(dim):
            result[d] = np.float32(0.0)
        for split in range(splits):
            part = head * splits + split
            weight = cpu_math.exp(states[part, 0, g] - peak)
            total += weight * states[part, 1, g]
            for d in range(dim):
                result[d] += weight * parts[part, g, d]
        for d in range(dim):
            result[d] /= total


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
        high = min(first_query + i + 1 - first_key, cols)
        low = max(high - window, 0) if window > 0 else 0
        peak = np.float32(-1e30)
        for j in range(low, high):
            peak = max(peak, rows[i, j])
        total = np.float32(0.0)
        for j in range(low, high):
            weight = cpu_math.exp((rows[i, j] - peak) * np.float32(scale))
            rows[i, j] = weight
            total += weight
        inverse = np.float32(1.0) / total
        for j in range(low):
            rows[i, j] = np.float32(0.0)
        for j in range(low, high):
            rows[i, j] *= inverse
        for j in range(high, cols):
            rows[i, j] = np.float32(0.0)
