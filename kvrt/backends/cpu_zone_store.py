"""CPU kernels that measure what widths cost, and write and read blocks (kvrt/trizone/layout.py)."""

import numpy as np

from . import cpu_math, cpu_zone_codes, jit
from .jit import Address, Int
from .ops import PAGE_TOKENS


@jit.kernel
def value_errors(
    thread, begin, end,
    values: Address, count: Int, heads: Int, dim: Int, scratch: Address, out: Address,
):  # fmt: skip
    """Sums of squares and of squared errors at 2, 4 and 8 bits of each token's values.

    values (count, heads, dim) f32; out (4, heads, count) f32; one item is 64 tokens of a head.
    """
    x = jit.array(values, (count, heads, dim), np.float32)
    sums = jit.array(out, (4, heads, count), np.float32)
    place = scratch + thread * cpu_zone_codes.encode_bytes(dim)
    tile = jit.array(place, (dim, PAGE_TOKENS), np.float32)
    shape = (cpu_zone_codes.COLUMN_NUMBERS, cpu_zone_codes.columns(dim))
    numbers = jit.array(place + PAGE_TOKENS * dim * 4, shape, np.float32)
    for item in range(begin, end):
        head = item % heads
        start = item // heads * PAGE_TOKENS
        size = min(PAGE_TOKENS, count - start)
        for t in range(size):
            for d in range(dim):
                tile[d, t] = x[start + t, head, d]
        squares = sums[0, head, start : start + size]
        cpu_math.fill(squares, np.float32(0.0))
        for d in range(dim):
            cpu_zone_codes.add_squares(tile[d, :size], squares)
        for index in range(1, 4):
            bits = 1 << index
            cpu_zone_codes.fit(tile, dim, 0, size, bits, numbers)
            cpu_zone_codes.errors(
                tile, dim, 0, size, bits, numbers, sums[index, head, start : start + size]
            )


@jit.kernel
def key_errors(
    thread, begin, end,
    keys: Address, heads: Int, dim: Int, tokens: Address, firsts: Address, counts: Address,
    unit_heads: Address, units: Int, scratch: Address, out: Address,
):  # fmt: skip
    """Sums of squares and of squared errors at 2, 4 and 8 bits of each channel's kept keys.

    keys (n, heads, dim) f32; tokens (kept,) i64; firsts, counts, unit_heads (units,) i64; out
    (heads, dim, 4) f64; one item is a head.
    """
    firsts_of = jit.array(firsts, (units,), np.int64)
    counts_of = jit.array(counts, (units,), np.int64)
    heads_of = jit.array(unit_heads, (units,), np.int64)
    place = scratch + thread * cpu_zone_codes.encode_bytes(dim)
    tile = jit.array(place, (PAGE_TOKENS, dim), np.float32)
    shape = (cpu_zone_codes.COLUMN_NUMBERS, cpu_zone_codes.columns(dim))
    numbers = jit.array(place + PAGE_TOKENS * dim * 4, shape, np.float32)
    error = numbers[cpu_zone_codes.ERROR, :dim]
    for head in range(begin, end):
        sums = jit.array(out + head * dim * 32, (dim, 4), np.float64)
        for d in range(dim):
            for index in range(4):
                sums[d, index] = 0.0
        for unit in range(units):
            if heads_of[unit] != head:
                continue
            size = counts_of[unit]
            rows = jit.array(tokens + firsts_of[unit] * 8, (size,), np.int64)
            for t in range(size):
                row = jit.array(keys + (rows[t] * heads + head) * dim * 4, (dim,), np.float32)
                for d in range(dim):
                    tile[t, d] = row[d]
            cpu_math.fill(error, np.float32(0.0))
            for t in range(size):
                cpu_zone_codes.add_squares(tile[t], error)
            for d in range(dim):
                sums[d, 0] += np.float64(error[d])
            for index in range(1, 4):
                cpu_zone_codes.fit(tile, size, 0, dim, 1 << index, numbers)
                cpu_zone_codes.errors(tile, size, 0, dim, 1 << index, numbers, error)
                for d in range(dim):
                    sums[d, index] += np.float64(error[d])


@jit.kernel
def pack_zones(
    thread, begin, end,
    keys: Address, values: Address, heads: Int, dim: Int, tokens: Address, firsts: Address,
    unit_heads: Address, units: Address, scratch: Address,
):  # fmt: skip
    """Write blocks, whose runs are zeros; one item is a block.

    keys, values (n, heads, dim) f32; tokens (kept,) i64; firsts, unit_heads (units,) i64; units
    (units, 4) i64: addresses of run and channels, packed counts of tokens and channels.
    """
    directory = jit.array(units, (end, 4), np.int64)
    firsts_of = jit.array(firsts, (end,), np.int64)
    heads_of = jit.array(unit_heads, (end,), np.int64)
    place = scratch + thread * cpu_zone_codes.encode_bytes(dim)
    shape = (cpu_zone_codes.COLUMN_NUMBERS, cpu_zone_codes.columns(dim))
    numbers = jit.array(place + PAGE_TOKENS * dim * 4, shape, np.float32)
    for unit in range(begin, end):
        run, by_token, by_channel = directory[unit, 0], directory[unit, 2], directory[unit, 3]
        size, kept, head = (
            cpu_zone_codes.total_of(by_token),
            cpu_zone_codes.total_of(by_channel),
            heads_of[unit],
        )
        channels = jit.array(directory[unit, 1], (kept,), np.uint8)
        rows = jit.array(tokens + firsts_of[unit] * 8, (size,), np.int64)
        value_meta, key_meta, key_codes = cpu_zone_codes.regions(by_token, by_channel, dim)
        tile = jit.array(place, (dim, size), np.float32)
        for t in range(size):
            row = jit.array(values + (rows[t] * heads + head) * dim * 4, (dim,), np.float32)
            for d in range(dim):
                tile[d, t] = row[d]
        cpu_zone_codes.encode(tile, dim, by_token, dim, run, run + value_meta, numbers)
        tile = jit.array(place, (size, kept), np.float32)
        for t in range(size):
            row = jit.array(keys + (rows[t] * heads + head) * dim * 4, (dim,), np.float32)
            for c in range(kept):
                tile[t, c] = row[channels[c]]
        room = cpu_zone_codes.key_rows(by_token)
        cpu_zone_codes.encode(
            tile, size, by_channel, room, run + key_codes, run + key_meta, numbers
        )


@jit.kernel
def unpack_zones(
    thread, begin, end,
    units: Address, unit_heads: Address, first_rows: Address, is_value: Int, heads: Int, dim: Int,
    scratch: Address, out: Address,
):  # fmt: skip
    """Rows first_rows[u], ... of out (m, heads, dim) f32 = one side of block u.

    units, unit_heads as `pack_zones` has them, first_rows (units,) i64; one item is a block.
    """
    directory = jit.array(units, (end, 4), np.int64)
    rows_of = jit.array(first_rows, (end,), np.int64)
    heads_of = jit.array(unit_heads, (end,), np.int64)
    place = scratch + thread * cpu_zone_codes.encode_bytes(dim)
    for unit in range(begin, end):
        run, by_token, by_channel = directory[unit, 0], directory[unit, 2], directory[unit, 3]
        size, kept, head = (
            cpu_zone_codes.total_of(by_token),
            cpu_zone_codes.total_of(by_channel),
            heads_of[unit],
        )
        channels = jit.array(directory[unit, 1], (kept,), np.uint8)
        value_meta, key_meta, key_codes = cpu_zone_codes.regions(by_token, by_channel, dim)
        target = jit.array(out, (rows_of[unit] + size, heads, dim), np.float32)
        if is_value:
            tile = jit.array(place, (size, dim), np.float32)
            cpu_zone_codes.decode(run, run + value_meta, by_token, dim, tile)
            for t in range(size):
                for d in range(dim):
                    target[rows_of[unit] + t, head, d] = tile[t, d]
        else:
            tile = jit.array(place, (kept, PAGE_TOKENS), np.float32)
            cpu_zone_codes.decode(
                run + key_codes, run + key_meta, by_channel, cpu_zone_codes.key_rows(by_token), tile
            )
            for t in range(size):
                row = target[rows_of[unit] + t, head]
                cpu_math.fill(row, np.float32(0.0))
                for c in range(kept):
                    row[channels[c]] = tile[c, t]
