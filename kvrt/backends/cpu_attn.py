"""CPU attention: causal prefill pieces, and decode over sinks, packed pages and the tail.

Softmax is online (Milakov and Gimelshein 2018): a running maximum, sum and weighted value per
query head. A page is decoded into a tile that stays in the first-level cache; everything that can
be done to the query or to the result (rotation by a page's base, Hadamard transform, channel
norms) is done there, never to a cached token.
"""

from types import ModuleType

import numpy as np

from . import cpu_math, cpu_store, jit, view
from .jit import Address, Int, Real
from .ops import PAGE_TOKENS


@jit.inline
def _inner_products(dim, low, tokens, group, q_at, tile_at, weights, add):
    """weights[g, t] = (or, with add, +=) q[g] . tile[t] for low <= t < tokens."""
    q = jit.array(q_at, (group, dim), np.float32)
    tile = jit.array(tile_at, (tokens, dim), np.float32)
    whole = low + (tokens - low) // 4 * 4
    for g in range(group):
        query = q[g]
        row = weights[g]
        for t in range(low, whole, 4):
            a, b, c, d = cpu_math.inner4(query, tile, t)
            if add:
                a, b, c, d = a + row[t], b + row[t + 1], c + row[t + 2], d + row[t + 3]
            row[t], row[t + 1], row[t + 2], row[t + 3] = a, b, c, d
        for t in range(whole, tokens):
            row[t] = cpu_math.inner(query, tile[t]) + (row[t] if add else np.float32(0.0))


@jit.inline
def _sum_rows(dim, low, tokens, group, tile_at, weights, acc_at):
    """acc (group, dim) += weights (group, >= tokens) @ tile (tokens, dim), from row `low` on."""
    tile = jit.array(tile_at, (tokens, dim), np.float32)
    acc = jit.array(acc_at, (group, dim), np.float32)
    whole = low + (tokens - low) // 4 * 4
    for g in range(group):
        for t in range(low, whole, 4):
            cpu_math.add_scaled4(tile, weights[g], t, acc[g])
        for t in range(whole, tokens):
            cpu_math.add_scaled(tile[t], weights[g, t], acc[g])


# With a constant head_dim LLVM unrolls the inner loops, which makes them 1.5 times faster.


@jit.device
def key_scores(dim, low, tokens, group, q_at, tile_at, weights, add):
    if dim == 64:
        _inner_products(64, low, tokens, group, q_at, tile_at, weights, add)
    elif dim == 128:
        _inner_products(128, low, tokens, group, q_at, tile_at, weights, add)
    else:
        _inner_products(dim, low, tokens, group, q_at, tile_at, weights, add)


@jit.device
def values_by_token(dim, low, tokens, group, tile_at, weights, acc_at):
    if dim == 64:
        _sum_rows(64, low, tokens, group, tile_at, weights, acc_at)
    elif dim == 128:
        _sum_rows(128, low, tokens, group, tile_at, weights, acc_at)
    else:
        _sum_rows(dim, low, tokens, group, tile_at, weights, acc_at)


@jit.device
def _values_by_channel(dim, group, tile_at, weights, acc_at):
    """acc (group, dim) += weights (group, 64) @ tile (dim, 64) transposed."""
    tile = jit.array(tile_at, (dim, PAGE_TOKENS), np.float32)
    acc = jit.array(acc_at, (group, dim), np.float32)
    for g in range(group):
        row, out = weights[g], acc[g]
        for c in range(0, dim, 4):  # a multiple of 16
            a, b, d, e = cpu_math.inner4(row, tile, c)
            out[c] += a
            out[c + 1] += b
            out[c + 2] += d
            out[c + 3] += e


@jit.device
def softmax_step(low, tokens, group, factor, weights, peaks, totals, acc):
    """Turn scores low ... tokens - 1 into weights of the running softmax; rescale the past."""
    for g in range(group):
        row = weights[g, low:tokens]
        peak = max(peaks[g], cpu_math.maximum(row) * factor)
        shrink = cpu_math.exp(peaks[g] - peak)
        peaks[g] = peak
        totals[g] = totals[g] * shrink + cpu_math.exp_minus(row, peak / factor, factor)
        cpu_math.scale(acc[g], shrink)
        cpu_math.fill(weights[g, :low], np.float32(0.0))


@jit.device
def _prepare(layer, head, q, base, exact, packed, against_bias):
    """Queries of one KV head in the store's basis; all (group, dim).

    `base` is the address of the block's cos and sin, or 0. `exact` meets sinks and tail, `packed`
    the codes; `against_bias` (or a size of 0) the in-block angles, for the bias left out of keys.
    """
    info = jit.array(layer, (view.LAYER_SETTINGS,), np.int64)
    heads, dim = info[view.HEADS], info[view.DIM]
    half = dim // 2
    angles = jit.array(base, (2, half), np.float32)
    bias = jit.array(info[view.KEY_BIAS], (heads, dim), np.float32)
    norm = jit.array(info[view.KEY_NORM], (heads, dim), np.float32)
    for g in range(q.shape[0]):
        row = exact[g]
        for i in range(dim):
            row[i] = q[g, i]
        if base and info[view.FORM] != view.POST:
            cpu_math.turn(row, angles[0], angles[1], -1)
        if info[view.KEY_BIAS]:
            # q . R(o) b = sum over pairs of cos(o) (...) + sin(o) (...)
            turned = packed[g]
            for i in range(dim):
                turned[i] = row[i]
            if info[view.FORM] == view.POST:
                cpu_math.turn(turned, angles[0], angles[1], -1)
            for i in range(half):
                a, b = bias[head, i], bias[head, half + i]
                against_bias[g, i] = turned[i] * a + turned[half + i] * b
                against_bias[g, half + i] = turned[half + i] * a - turned[i] * b
        if info[view.KEY_HADAMARD]:
            cpu_math.hadamard(row, info[view.KEY_HADAMARD])
        for i in range(dim):
            packed[g, i] = row[i] * norm[head, i] if info[view.KEY_NORM] else row[i]


@jit.device
def _turn_rows(tile, tokens, turns):
    """Rotate the rows of tile (>= tokens, dim) by their offsets in the block."""
    angles = jit.array(turns, (PAGE_TOKENS, 2, tile.shape[1] // 2), np.float32)
    for t in range(tokens):
        cpu_math.turn(tile[t], angles[t, 0], angles[t, 1], 1)


@jit.device
def combine(head, splits, group, dim, partials, sums, block, out):
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
        if block:
            cpu_math.hadamard(result, block)


@jit.inline
def attend_bytes(dim, group):
    """Scratch of one thread: what decoding takes, weights, and queries in three bases."""
    return cpu_store.decode_bytes(dim) + group * (PAGE_TOKENS + 3 * dim) * 4


def build_attend(codecs: ModuleType) -> None:
    """Register `attend`, the decode attention kernel. `codecs` has decode_at and token_major."""

    def attend(
        thread, begin, end,
        q: Address, group: Int, scale: Real, splits: Int, scratch: Address,
        partials: Address, sums: Address, arrivals: Address, out: Address, layer: Address,
        sinks: Int, pages: Address, num_pages: Int, tail_tokens: Int, tail_slot: Int,
        bases: Address, first: Int,
    ):  # fmt: skip
        """One item is one (KV head, split) of the tokens; the last split of a head merges them.

        q (heads, dim) f32; the view's settings and extent; `first` is the first position that may
        be seen. partials (items, group, dim) f32; sums (items, 2, group) f32: maximum, total;
        arrivals (kv_heads,) i64 zeros, zeros again at the end; out (heads, dim) f32.
        """
        info = jit.array(layer, (view.LAYER_SETTINGS,), np.int64)
        dim, sink_rows, tail_rows = info[view.DIM], info[view.SINK_ROWS], info[view.TAIL_ROWS]
        key_kind, value_kind = info[view.KEY_KIND], info[view.VALUE_KIND]
        key_bytes = cpu_math.row_bytes(key_kind, dim)
        value_bytes = cpu_math.row_bytes(value_kind, dim)
        key_side = jit.array(layer + view.KEY_SIDE * 8, (view.SIDE_SETTINGS,), np.int64)
        value_side = jit.array(layer + view.VALUE_SIDE * 8, (view.SIDE_SETTINGS,), np.int64)
        by_token = codecs.token_major(value_side, 1)
        turning = bases != 0
        tile_at = scratch + thread * attend_bytes(dim, group)
        tile = jit.array(tile_at, (PAGE_TOKENS, dim), np.float32)
        queries_at = tile_at + cpu_store.decode_bytes(dim)
        exact = jit.array(queries_at, (group, dim), np.float32)
        packed = jit.array(queries_at + group * dim * 4, (group, dim), np.float32)
        against_bias = jit.array(queries_at + 2 * group * dim * 4, (group, dim), np.float32)
        weights = jit.array(queries_at + 3 * group * dim * 4, (group, PAGE_TOKENS), np.float32)
        page_table = jit.array(pages, (num_pages,), np.int64)
        # Blocks: the sinks, then the pages, then the tail.
        sink_blocks = (sinks + PAGE_TOKENS - 1) // PAGE_TOKENS
        tail_blocks = (tail_tokens + PAGE_TOKENS - 1) // PAGE_TOKENS
        blocks = sink_blocks + num_pages + tail_blocks
        for item in range(begin, end):
            head = item // splits
            split = item % splits
            query = jit.array(q + head * group * dim * 4, (group, dim), np.float32)
            acc_at = partials + item * group * dim * 4
            acc = jit.array(acc_at, (group, dim), np.float32)
            cpu_math.fill(jit.array(acc_at, (group * dim,), np.float32), np.float32(0.0))
            peaks = jit.array(sums + item * 2 * group * 4, (group,), np.float32)
            totals = jit.array(sums + (item * 2 + 1) * group * 4, (group,), np.float32)
            for g in range(group):
                peaks[g] = np.float32(-1e30)
                totals[g] = np.float32(0.0)
            if not turning:
                _prepare(layer, head, query, 0, exact, packed, against_bias)
            for block in range(blocks * split // splits, blocks * (split + 1) // splits):
                page = block - sink_blocks
                is_page = 0 <= page < num_pages
                if block < sink_blocks:
                    position = block * PAGE_TOKENS
                    count = min(PAGE_TOKENS, sinks - position)
                    row = head * sink_rows + position
                    keys, values = info[view.SINK_KEYS], info[view.SINK_VALUES]
                elif is_page:
                    position = sink_rows + page * PAGE_TOKENS
                    count = PAGE_TOKENS
                    row, keys, values = 0, 0, 0
                else:
                    done = (page - num_pages) * PAGE_TOKENS
                    position = sink_rows + num_pages * PAGE_TOKENS + done
                    count = min(PAGE_TOKENS, tail_tokens - done)
                    # The ring is a multiple of PAGE_TOKENS long and starts on a page boundary.
                    row = head * tail_rows + (tail_slot + done) % tail_rows
                    keys, values = info[view.TAIL_KEYS], info[view.TAIL_VALUES]
                low = min(max(first - position, 0), count)
                if low == count:
                    continue
                if turning:
                    base = bases + block * dim * 4
                    _prepare(layer, head, query, base, exact, packed, against_bias)
                page_at = page_table[page] + info[view.LAYER_OFFSET] if is_page else 0
                if is_page:
                    codecs.decode_at(tile_at, page_at, info, key_side, 0, head)
                else:
                    cpu_math.load_rows(keys + row * key_bytes, key_kind, count, dim, tile)
                if info[view.FORM] == view.PRE:
                    _turn_rows(tile, count, info[view.TURNS])
                asked = jit.address_of(packed if is_page else exact)
                key_scores(dim, low, count, group, asked, tile_at, weights, False)
                if info[view.KEY_BIAS]:
                    asked = jit.address_of(against_bias)
                    key_scores(dim, low, count, group, asked, info[view.TURNS], weights, True)
                softmax_step(low, count, group, np.float32(scale), weights, peaks, totals, acc)
                if is_page:
                    codecs.decode_at(tile_at, page_at, info, value_side, 1, head)
                else:
                    cpu_math.load_rows(values + row * value_bytes, value_kind, count, dim, tile)
                if is_page and not by_token:
                    _values_by_channel(dim, group, tile_at, weights, acc_at)
                else:
                    values_by_token(dim, low, count, group, tile_at, weights, acc_at)
            if jit.atomic_add(arrivals + head * 8, 1) == splits - 1:
                jit.array(arrivals + head * 8, (1,), np.int64)[0] = 0
                hadamard = info[view.VALUE_HADAMARD]
                combine(head, splits, group, dim, partials, sums, hadamard, out)

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
