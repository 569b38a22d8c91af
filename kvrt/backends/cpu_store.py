"""CPU kernels that move tokens into and out of a store: change of basis, append, seal and gather.

`layer` is the address of a layer's settings (`view`). `build_seal` registers the kernels that know
the codecs.
"""

from types import ModuleType

import numpy as np

from . import cpu_math, jit, view
from .jit import Address, Int
from .ops import PAGE_TOKENS


@jit.inline
def codes_bytes(dim):
    """Bytes of one head's unpacked codes, u16, and of scratch for as many packed ones.

    Small heads of many codebooks have more codes than numbers: hence the 8 KB.
    """
    return PAGE_TOKENS * dim * 3 + 8192


@jit.inline
def codec_floats(dim):
    """f32 numbers of scratch that a codec may use while it decodes."""
    return 16 * dim + 256


@jit.inline
def decode_bytes(dim):
    """What decoding one head takes: its tile, its codes, the codec's scratch."""
    return PAGE_TOKENS * dim * 4 + codes_bytes(dim) + codec_floats(dim) * 4


@jit.exact
def _add_turned(x, bias, cos, sin, sign):
    """x += sign * bias rotated by the angles of cos and sin."""
    half = cos.shape[0]
    factor = np.float32(sign)
    for i in range(half):
        a, b = bias[i], bias[half + i]
        x[i] += factor * (a * cos[i] - b * sin[i])
        x[half + i] += factor * (b * cos[i] + a * sin[i])


@jit.exact
def _add(x, bias, sign):
    for i in range(x.shape[0]):
        x[i] += np.float32(sign) * bias[i]


@jit.exact
def _hold(x):
    """Hold x to what float32 can sum up: the difference of two infinities would be a NaN."""
    for i in range(x.shape[0]):
        value = np.float32(1e30) if x[i] > np.float32(1e30) else x[i]
        x[i] = np.float32(-1e30) if value < np.float32(-1e30) else value


@jit.kernel
def change_basis(
    thread, begin, end,
    rows: Address, heads: Int, dim: Int, inwards: Int, turns: Address, bias: Address,
    bias_turns: Address, block: Int,
):  # fmt: skip
    """Keys or values (n, heads, dim) f32 in place, from the model's basis into the store's.

    Inwards: rotate backwards by `turns`, leave out `bias` (heads, dim) rotated by `bias_turns`,
    Hadamard transform in blocks. Outwards: all of it undone. turns, bias_turns (n, 2, dim / 2) f32
    hold cos and sin for each token; each of the steps is left out where its address or block is 0.
    """
    x = jit.array(rows, (end, heads, dim), np.float32)
    angles = jit.array(turns, (end, 2, dim // 2), np.float32)
    bias_angles = jit.array(bias_turns, (end, 2, dim // 2), np.float32)
    biases = jit.array(bias, (heads, dim), np.float32)
    sign = -1 if inwards else 1
    for t in range(begin, end):
        for h in range(heads):
            row = x[t, h]
            if inwards:
                _hold(row)
            if block and not inwards:
                cpu_math.hadamard(row, block)
            if turns and inwards:
                cpu_math.turn(row, angles[t, 0], angles[t, 1], -1)
            if bias and bias_turns:
                _add_turned(row, biases[h], bias_angles[t, 0], bias_angles[t, 1], sign)
            elif bias:
                _add(row, biases[h], sign)
            if turns and not inwards:
                cpu_math.turn(row, angles[t, 0], angles[t, 1], 1)
            if block and inwards:
                cpu_math.hadamard(row, block)


@jit.kernel
def append(
    thread, begin, end, layer: Address, keys: Address, values: Address, slot: Int, sink: Int,
):  # fmt: skip
    """Store keys, values (n, heads, dim) f32 at slots slot, ... of the tail, or of the sinks."""
    info = jit.array(layer, (view.LAYER_SETTINGS,), np.int64)
    heads, dim = info[view.HEADS], info[view.DIM]
    rows = info[view.SINK_ROWS] if sink else info[view.TAIL_ROWS]
    key_rows = info[view.SINK_KEYS] if sink else info[view.TAIL_KEYS]
    value_rows = info[view.SINK_VALUES] if sink else info[view.TAIL_VALUES]
    key_kind, value_kind = info[view.KEY_KIND], info[view.VALUE_KIND]
    new_keys = jit.array(keys, (end, heads, dim), np.float32)
    new_values = jit.array(values, (end, heads, dim), np.float32)
    key_bytes = cpu_math.row_bytes(key_kind, dim)
    value_bytes = cpu_math.row_bytes(value_kind, dim)
    for i in range(begin, end):
        place = (slot + i) % rows
        for h in range(heads):
            row = h * rows + place
            cpu_math.store_row(new_keys[i, h], key_kind, key_rows + row * key_bytes)
            cpu_math.store_row(new_values[i, h], value_kind, value_rows + row * value_bytes)


@jit.kernel
def recall(
    thread, begin, end, layer: Address, is_value: Int, slot: Int, sink: Int, target: Address,
):  # fmt: skip
    """target (n, heads, dim) f32 = slots slot, slot + 1, ... of the tail, or of the sinks."""
    info = jit.array(layer, (view.LAYER_SETTINGS,), np.int64)
    heads, dim = info[view.HEADS], info[view.DIM]
    rows = info[view.SINK_ROWS] if sink else info[view.TAIL_ROWS]
    if is_value:
        source = info[view.SINK_VALUES] if sink else info[view.TAIL_VALUES]
    else:
        source = info[view.SINK_KEYS] if sink else info[view.TAIL_KEYS]
    kind = info[view.VALUE_KIND] if is_value else info[view.KEY_KIND]
    out = jit.array(target, (end, heads, dim), np.float32)
    size = cpu_math.row_bytes(kind, dim)
    for i in range(begin, end):
        place = (slot + i) % rows
        for h in range(heads):
            cpu_math.load_rows(source + (h * rows + place) * size, kind, 1, dim, out[i, h : h + 1])


@jit.kernel
def round_rows(thread, begin, end, rows: Address, width: Int, kind: Int):
    """rows (n, width) f32 in place = what they are once stored as floats of a kind."""
    x = jit.array(rows, (end, width), np.float32)
    for i in range(begin, end):
        _round_row(x[i], kind, x[i])


@jit.device
def _round_row(row, kind, out):
    """The value that a row has once stored in `kind`."""
    if kind == cpu_math.F16:
        for d in range(row.shape[0]):
            out[d] = jit.half_to_float(cpu_math.float_to_half(row[d]))
    elif kind == cpu_math.BF16:
        for d in range(row.shape[0]):
            out[d] = cpu_math.bfloat_to_float(cpu_math.float_to_bfloat(row[d]))
    else:
        for d in range(row.shape[0]):
            out[d] = row[d]


@jit.device
def _collect(tile, layer, is_value, first, head, tail_first, tail_slot, new, new_start, new_tokens):
    """tile (64, dim) = tokens first, first + 1, ... of one head, as the tail holds them.

    Tokens from position new_start on are in new (new_tokens, heads, dim) f32, older ones in the
    ring, where position tail_first has slot tail_slot.
    """
    info = jit.array(layer, (view.LAYER_SETTINGS,), np.int64)
    heads, dim, rows = info[view.HEADS], info[view.DIM], info[view.TAIL_ROWS]
    kind = info[view.VALUE_KIND] if is_value else info[view.KEY_KIND]
    tail = info[view.TAIL_VALUES] if is_value else info[view.TAIL_KEYS]
    fresh = jit.array(new, (new_tokens, heads, dim), np.float32)
    size = cpu_math.row_bytes(kind, dim)
    for t in range(PAGE_TOKENS):
        position = first + t
        if position >= new_start:
            # Rounded as the tail would have, so that bytes do not depend on how calls were split.
            _round_row(fresh[position - new_start, head], kind, tile[t])
        else:
            slot = head * rows + (tail_slot + position - tail_first) % rows
            cpu_math.load_rows(tail + slot * size, kind, 1, dim, tile[t : t + 1])


@jit.device
def _spread(tile, by_token, out, start, head):
    """out (n, heads, dim): one head of 64 tokens = tile, (64, dim) or (dim, 64)."""
    for t in range(PAGE_TOKENS):
        for d in range(out.shape[2]):
            out[start + t, head, d] = tile[t, d] if by_token else tile[d, t]


def build_seal(codecs: ModuleType) -> None:
    """Register the kernels survey, seal and gather. `codecs` has survey, encode and decode."""

    def survey(
        thread, begin, end,
        layer: Address, is_value: Int, pages: Address, first_page: Int, first: Int,
        tail_first: Int, tail_slot: Int, new: Address, new_start: Int, new_tokens: Int,
        scratch: Address,
    ):  # fmt: skip
        """Let the codec of one side look at all heads of page first_page + item."""
        info = jit.array(layer, (view.LAYER_SETTINGS,), np.int64)
        heads, dim = info[view.HEADS], info[view.DIM]
        table = jit.array(pages, (first_page + end,), np.int64)
        side_at = view.VALUE_SIDE if is_value else view.KEY_SIDE
        side = jit.array(layer + side_at * 8, (view.SIDE_SETTINGS,), np.int64)
        size = heads * PAGE_TOKENS * dim * 4
        tiles = jit.array(scratch + thread * size, (heads, PAGE_TOKENS, dim), np.float32)
        for item in range(begin, end):
            page = first_page + item
            position = info[view.SINK_ROWS] + page * PAGE_TOKENS
            for head in range(heads):
                _collect(
                    tiles[head], layer, is_value, position, head, tail_first, tail_slot,
                    new, new_start, new_tokens,
                )  # fmt: skip
            shared = table[page] + info[view.LAYER_OFFSET] + info[view.SHARED_OFFSET]
            codecs.survey(tiles, side, is_value, first, shared + side[view.SHARED])

    def seal(
        thread, begin, end,
        layer: Address, is_value: Int, pages: Address, first_page: Int,
        tail_first: Int, tail_slot: Int, new: Address, new_start: Int, new_tokens: Int,
        scratch: Address, codes_at: Address,
    ):  # fmt: skip
        """Encode one side of page first_page + item // heads, head item % heads."""
        info = jit.array(layer, (view.LAYER_SETTINGS,), np.int64)
        heads, dim = info[view.HEADS], info[view.DIM]
        side_at = view.VALUE_SIDE if is_value else view.KEY_SIDE
        side = jit.array(layer + side_at * 8, (view.SIDE_SETTINGS,), np.int64)
        tile = jit.array(scratch + thread * PAGE_TOKENS * dim * 4, (PAGE_TOKENS, dim), np.float32)
        rows = dim if is_value else PAGE_TOKENS
        codes_at = codes_at + thread * (codes_bytes(dim) + side[view.WORK])
        codes = jit.array(codes_at, (PAGE_TOKENS * dim // rows // 8, rows, 8), np.uint16)
        for item in range(begin, end):
            page = first_page + item // heads
            head = item % heads
            base = jit.array(pages, (page + 1,), np.int64)[page] + info[view.LAYER_OFFSET]
            _collect(
                tile, layer, is_value, info[view.SINK_ROWS] + page * PAGE_TOKENS, head,
                tail_first, tail_slot, new, new_start, new_tokens,
            )  # fmt: skip
            run = base + head * info[view.RUN_BYTES]
            shared = base + info[view.SHARED_OFFSET] + side[view.SHARED]
            codecs.encode(tile, side, is_value, head, heads, run, shared, codes)

    def gather(
        thread, begin, end,
        layer: Address, is_value: Int, pages: Address, first_page: Int, scratch: Address,
        out: Address,
    ):  # fmt: skip
        """Decode one side of whole pages into out (n, heads, dim) f32, in the store's basis."""
        info = jit.array(layer, (view.LAYER_SETTINGS,), np.int64)
        heads, dim = info[view.HEADS], info[view.DIM]
        side_at = view.VALUE_SIDE if is_value else view.KEY_SIDE
        side = jit.array(layer + side_at * 8, (view.SIDE_SETTINGS,), np.int64)
        norm = 0 if is_value else info[view.KEY_NORM]
        factors = jit.array(norm, (heads, dim), np.float32)
        place = scratch + thread * decode_bytes(dim)
        by_token = codecs.token_major(side, is_value)
        for item in range(begin, end):
            page = item // heads
            head = item % heads
            table = jit.array(pages, (first_page + page + 1,), np.int64)
            base = table[first_page + page] + info[view.LAYER_OFFSET]
            start = page * PAGE_TOKENS
            target = jit.array(out, (start + PAGE_TOKENS, heads, dim), np.float32)
            codecs.decode_at(place, base, info, side, is_value, head)
            if by_token:
                tile = jit.array(place, (PAGE_TOKENS, dim), np.float32)
                _spread(tile, True, target, start, head)
            else:
                tile = jit.array(place, (dim, PAGE_TOKENS), np.float32)
                _spread(tile, False, target, start, head)
            if norm:
                for t in range(start, start + PAGE_TOKENS):
                    for d in range(dim):
                        target[t, head, d] *= factors[head, d]

    jit.kernel(survey)
    jit.kernel(seal)
    jit.kernel(gather)
