"""How the CPU kernels quantise the sides of a block (kvrt/trizone/layout.py) and decode them.

Both sides are quantised as tiles whose rows are what a group runs along and whose columns are the
groups, all done at once: V is (channels, tokens), K is (tokens, channels). Columns are sorted by
width, as a block's rows are. A group's scale and minimum are KIVI's (arXiv 2402.02750; see
kvrt/kvstore/codecs/intq.py). Sums go from first to last in float32, every operation rounded, so
that each backend gives the same bits.
"""

import numpy as np

from . import cpu_math, jit
from .ops import PAGE_TOKENS

_LOW, _HIGH, _SCALE, _MINIMUM, ERROR = range(5)
"""Rows of a thread's `numbers`, one number a column."""

COLUMN_NUMBERS = 5


@jit.inline
def columns(dim):
    """The most columns of a tile."""
    return max(dim, PAGE_TOKENS)


@jit.inline
def encode_bytes(dim):
    """Scratch of one thread: a tile, and numbers of its columns."""
    return (PAGE_TOKENS * dim + COLUMN_NUMBERS * columns(dim)) * 4


@jit.inline
def count_of(packed, index):
    """How many have width 16 >> index."""
    return (packed >> (16 * index)) & 0xFFFF


@jit.inline
def total_of(packed):
    return count_of(packed, 0) + count_of(packed, 1) + count_of(packed, 2) + count_of(packed, 3)


@jit.inline
def _row_bytes(packed, length):
    bits = 16 * count_of(packed, 0) + 8 * count_of(packed, 1)
    return (bits + 4 * count_of(packed, 2) + 2 * count_of(packed, 3)) * length // 8


@jit.inline
def _meta_bytes(packed):
    return (total_of(packed) - count_of(packed, 0)) * 4


@jit.inline
def key_rows(tokens):
    """Tokens that a channel of K has room for."""
    return (total_of(tokens) + 3) // 4 * 4


@jit.device
def regions(tokens, channels, dim):
    """Offsets of V meta, K meta and K codes in the run of a block with these packed counts."""
    value_meta = _row_bytes(tokens, dim)
    key_meta = value_meta + _meta_bytes(tokens)
    return value_meta, key_meta, key_meta + _meta_bytes(channels)


@jit.exact
def _half(x):
    """x as it is once stored in f16, whose largest number stands for all beyond."""
    return jit.half_to_float(cpu_math.float_to_half(x))


@jit.exact
def _code(x, scale, minimum, top):
    """The code of x as a float: the nearest level, ties to even, 0 where all levels are one."""
    level = np.rint((x - minimum) / scale)
    level = level if level > np.float32(0.0) else np.float32(0.0)
    level = top if level > top else level
    return np.float32(0.0) if scale == np.float32(0.0) else level


@jit.exact
def _widen(row, low, high):
    for j in range(low.shape[0]):
        x = row[j]
        low[j] = x if x < low[j] else low[j]
        high[j] = x if x > high[j] else high[j]


@jit.exact
def add_squares(row, total):
    for j in range(total.shape[0]):
        x = row[j]
        total[j] = total[j] + x * x


@jit.exact
def _add_errors(row, scale, minimum, top, total):
    for j in range(total.shape[0]):
        x = row[j]
        d = x - (_code(x, scale[j], minimum[j], top) * scale[j] + minimum[j])
        total[j] = total[j] + d * d


@jit.exact
def errors(tile, length, first, last, bits, numbers, total):
    """total = squared errors of columns first ... last - 1 with their scales and minima."""
    top = np.float32((1 << bits) - 1)
    scale, minimum = numbers[_SCALE, first:last], numbers[_MINIMUM, first:last]
    cpu_math.fill(total, np.float32(0.0))
    for k in range(length):
        _add_errors(tile[k, first:last], scale, minimum, top, total)


@jit.exact
def fit(tile, length, first, last, bits, numbers):
    """Scales and minima of columns first ... last - 1 at a width."""
    low, high = numbers[_LOW, first:last], numbers[_HIGH, first:last]
    scale, minimum = numbers[_SCALE, first:last], numbers[_MINIMUM, first:last]
    top = np.float32((1 << bits) - 1)
    start = tile[0, first:last]
    for j in range(low.shape[0]):
        low[j] = start[j]
        high[j] = start[j]
    for k in range(1, length):
        _widen(tile[k, first:last], low, high)
    for j in range(low.shape[0]):
        scale[j] = _half((high[j] - low[j]) / top)
        minimum[j] = _half(low[j])


@jit.exact
def _store_codes(tile, column, length, bits, scale, minimum, at):
    """The codes of a column, the first in the lowest bits of the first byte."""
    top, each = np.float32((1 << bits) - 1), 8 // bits
    out = jit.array(at, ((length + each - 1) // each,), np.uint8)
    for place in range(out.shape[0]):
        byte = 0
        for i in range(min(each, length - place * each)):
            x = tile[place * each + i, column]
            byte |= np.int64(_code(x, scale, minimum, top)) << (i * bits)
        out[place] = np.uint8(byte)


@jit.exact
def encode(tile, length, packed, row, codes_at, meta_at, numbers):
    """Write a tile (length, columns) with so many columns of each width.

    A column becomes a row with room for `row` numbers.
    """
    halves = count_of(packed, 0)
    for column in range(halves):
        out = jit.array(codes_at, (length,), np.uint16)
        for k in range(length):
            out[k] = cpu_math.float_to_half(tile[k, column])
        codes_at += row * 2
    first = halves
    for index in range(1, 4):
        bits = 16 >> index
        last = first + count_of(packed, index)
        if last > first:
            fit(tile, length, first, last, bits, numbers)
        for column in range(first, last):
            scale, minimum = numbers[_SCALE, column], numbers[_MINIMUM, column]
            meta = jit.array(meta_at + (column - halves) * 4, (2,), np.uint16)
            meta[0] = jit.float_to_half(scale)
            meta[1] = jit.float_to_half(minimum)
            _store_codes(tile, column, length, bits, scale, minimum, codes_at)
            codes_at += row * bits // 8
        first = last


@jit.device
def _decode_row(at, bits, scale, minimum, out):
    """out = a row of codes; its length is a multiple of 4."""
    size = out.shape[0]
    codes = jit.array(at, (size * bits // 8,), np.uint8)
    if bits == 8:
        for i in range(size):
            out[i] = np.float32(codes[i]) * scale + minimum
    elif bits == 4:
        for i in range(size // 2):
            byte = codes[i]
            out[2 * i] = np.float32(byte & 15) * scale + minimum
            out[2 * i + 1] = np.float32(byte >> 4) * scale + minimum
    else:
        for i in range(size // 4):
            byte = codes[i]
            out[4 * i] = np.float32(byte & 3) * scale + minimum
            out[4 * i + 1] = np.float32((byte >> 2) & 3) * scale + minimum
            out[4 * i + 2] = np.float32((byte >> 4) & 3) * scale + minimum
            out[4 * i + 3] = np.float32(byte >> 6) * scale + minimum


@jit.device
def decode(codes_at, meta_at, packed, length, tile):
    """tile (rows, length or more) = rows of so many of each width, of `length` numbers."""
    row, halves = 0, count_of(packed, 0)
    for index in range(4):
        bits = 16 >> index
        for _ in range(count_of(packed, index)):
            if index == 0:
                cpu_math.load_rows(codes_at, cpu_math.F16, 1, length, tile[row : row + 1])
            else:
                meta = jit.array(meta_at + (row - halves) * 4, (2,), np.uint16)
                scale, minimum = jit.half_to_float(meta[0]), jit.half_to_float(meta[1])
                _decode_row(codes_at, bits, scale, minimum, tile[row, :length])
            codes_at += length * bits // 8
            row += 1
