"""The order of codes in a page: that of tensor-core fragments. The one place that knows it.

A page is read by `mma.m16n8k16` with keys, and values transposed, as the wide operand A: 16 tokens
(K) or 16 channels (V) are M, 16 channels or tokens are the depth k, the query heads are N. A lane
holds of a 16 x 16 tile of A four registers of two neighbours along k:

    lane = (M % 8) * 4 + (k % 8) / 2,  register = (k / 8) * 2 + M / 8,  half = k % 2

- K: tile (s, j) has the tokens 16 j ... 16 j + 15 and the channels 8 s ... 8 s + 7, then those half
  a head further, so that the partners of a RoPE pair lie in one lane.
- V: tile (s, j) has the channels 16 s ... 16 s + 15 and the tokens 16 j ... 16 j + 15.

Codes of 2, 4 or 8 bits lie in 32-bit words. A word takes n = 4 / bits tiles s, s + 1, ... of one j;
the code of register r and half h of the i-th of them is at bit bits * (4 i + r) + 16 h. (With 8
bits, registers 0 and 1 are in one word and 2 and 3 in the next.) A lane reads 16 bytes at a time:
the words of j = 0 ... 3, so that the four tiles that share a scale or a query come together. Units
of 32 lanes x 16 bytes follow each other with growing s. Where a last tile is left alone, its words
are half as wide (the second half in the middle): nothing is padded.

Codes of 3 bits: the tiles (s, 0) ... (s, 3) are three words of each lane, by s, word and lane.
Either half of a word has room for five codes and one bit more:

    word   bits 0-2, 9-11, 3-5, 12-14   bits 6-8          bit 15 (either half)
    w      registers 0 ... 3 of (s, w)  r = w of (s, 3)   bit w of r = 3 of (s, 3)

So 15 of 16 codes are found by shifting by 0 or 9, and registers 0 and 1, or 2 and 3, of a tile come
out at the same place.

Scales and minima that go with columns (k) come in the order of `column_at`: the four that a lane
needs of a tile are neighbours. Those that go with rows (M) come in natural order.

Between this order and arithmetic, codes are u16 arrays (cols / 8, rows, 8), where rows are M
(tokens of K, channels of V) and cols are k. What follows such an array in memory is scratch of
this module (`cpu_store.codes_bytes`): words by unit, j and lane, the narrow ones widened; of 3 bits
only the codes of register 3 of the tiles (s, 3).
"""

from __future__ import annotations

import numpy as np

from ..backends import jit

LANES = 32
UNIT_BYTES = 512
ROW_BYTES = 128  # a word of each lane


@jit.inline
def _place(is_value, tiles, s, j, register):
    """Where 8 rows x 8 columns, one register of all lanes, begin: (block of columns, row)."""
    if is_value:
        return 2 * j + (register >> 1), 16 * s + 8 * (register & 1)
    return (register >> 1) * tiles + s, 16 * j + 8 * (register & 1)


@jit.inline
def column_at(place, cols, is_value):
    """The column whose scale is at a place: places are ordered by tile, k % 8 / 2, k / 8, k % 2."""
    s, pair, half, one = place >> 4, place >> 2 & 3, place >> 1 & 1, place & 1
    if is_value:
        return 16 * s + 8 * half + 2 * pair + one
    return half * (cols >> 1) + 8 * s + 2 * pair + one


@jit.inline
def _unit(bits, s, register):
    """The unit that holds a register of the tiles (s, ...), not of 3 bits."""
    return 2 * s + (register >> 1) if bits == 8 else s * bits >> 2


@jit.inline
def _units(bits, tiles):
    """Units of a side, the narrow one included."""
    return (tiles * bits + 3) >> 2


@jit.inline
def _shift(bits, s, j, register):
    """Where the code of a register of tile (s, j) begins in either half of its word."""
    if bits == 3:
        return 6 if j == 3 else 9 * (register & 1) + 3 * (register >> 1)
    return 8 * (register & 1) if bits == 8 else (s * bits * 4 & 15) + bits * register


@jit.inline
def _apart(bits, j, register):
    """Whether the bits of a register's codes are in three words."""
    return bits == 3 and j == 3 and register == 3


@jit.inline
def _words_at(codes):
    """The address of the words, by unit, j and lane."""
    return jit.address_of(codes) + codes.size * 2


@jit.inline
def _row(bits, s, j, register, address, words_at):
    """The address of the words of all lanes that hold a register; and how far to shift them.

    The side's codes are at `address`, what `_load` made of them at `words_at`.
    """
    if _apart(bits, j, register):
        return words_at + s * ROW_BYTES, 0
    if bits == 3:
        row = address + (3 * s + (register if j == 3 else j)) * ROW_BYTES
    else:
        row = words_at + _unit(bits, s, register) * UNIT_BYTES + j * ROW_BYTES
    return row, _shift(bits, s, j, register)


@jit.device
def _join(codes, bits, is_value, words_at):
    """Make words of codes: by unit, j and lane, or (3 bits) by s, word and lane."""
    tiles = codes.size // 1024
    count = tiles * 3 if bits == 3 else _units(bits, tiles) * 4
    words = jit.array(words_at, (count, LANES), np.uint32)
    for row in range(count):
        for lane in range(LANES):
            words[row, lane] = 0
    for s in range(tiles):
        for register in range(4):
            for j in range(4):
                block, first = _place(is_value, tiles, s, j, register)
                at, shift = _row(bits, s, j, register, 0, 0)
                for lane in range(LANES):
                    for half in range(2):
                        code = np.int64(codes[block, first + lane // 4, lane % 4 * 2 + half])
                        if _apart(bits, j, register):
                            for bit in range(3):
                                field = (code >> bit & 1) << (15 + 16 * half)
                                words[3 * s + bit, lane] |= np.uint32(field)
                        else:
                            field = code << (shift + 16 * half)
                            words[at // ROW_BYTES, lane] |= np.uint32(field)


@jit.device
def pack_codes(codes, bits, is_value, address):
    """Write codes of 2, 3, 4 or 8 bits in fragment order: head_dim * 64 * bits / 8 bytes."""
    if bits == 3:
        _join(codes, bits, is_value, address)
        return
    _join(codes, bits, is_value, _words_at(codes))
    tiles = codes.size // 1024
    whole = tiles * bits // 4
    for unit in range(_units(bits, tiles)):
        words = jit.array(_words_at(codes) + unit * UNIT_BYTES, (4, LANES), np.uint32)
        wide = jit.array(address + unit * UNIT_BYTES, (LANES, 4), np.uint32)
        narrow = jit.array(address + unit * UNIT_BYTES, (LANES, 4), np.uint16)
        for lane in range(LANES):
            for j in range(4):
                word = words[j, lane]
                if unit < whole:
                    wide[lane, j] = word
                else:
                    narrow[lane, j] = word & np.uint32(0xFF) | word >> np.uint32(8)


@jit.device
def _load(address, bits, tiles, words_at):
    """Make what `_row` needs at words_at."""
    if bits == 3:
        ones = np.uint64(0x0001000100010001)  # four halves of words at a time
        for s in range(tiles):
            words = jit.array(address + s * 3 * ROW_BYTES, (3, 16), np.uint64)
            codes = jit.array(words_at + s * ROW_BYTES, (16,), np.uint64)
            for n in range(16):
                code = words[0, n] >> np.uint64(15) & ones
                code |= (words[1, n] >> np.uint64(15) & ones) << np.uint64(1)
                codes[n] = code | (words[2, n] >> np.uint64(15) & ones) << np.uint64(2)
        return
    whole = tiles * bits // 4
    for unit in range(_units(bits, tiles)):
        wide = jit.array(address + unit * UNIT_BYTES, (LANES, 4), np.uint32)
        narrow = jit.array(address + unit * UNIT_BYTES, (LANES, 4), np.uint16)
        words = jit.array(words_at + unit * UNIT_BYTES, (4, LANES), np.uint32)
        if unit < whole:
            for lane in range(LANES):
                for j in range(4):
                    words[j, lane] = wide[lane, j]
        else:
            for lane in range(LANES):
                for j in range(4):
                    word = np.uint32(narrow[lane, j])
                    words[j, lane] = word & np.uint32(0xFF) | word >> np.uint32(8) << np.uint32(16)


@jit.device
def unpack_codes(address, bits, is_value, codes):
    """Read codes of 2, 3, 4 or 8 bits in fragment order into codes (cols / 8, rows, 8) u16."""
    tiles, words_at = codes.size // 1024, _words_at(codes)
    _load(address, bits, tiles, words_at)
    # Four halves of words at a time: their 16 bits are what a code becomes.
    mask = ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)) * np.uint64(0x0001000100010001)
    for s in range(tiles):
        for register in range(4):
            for j in range(4):
                block, row = _place(is_value, tiles, s, j, register)
                source, shift = _row(bits, s, j, register, address, words_at)
                right = np.uint64(shift)
                part = jit.array(source, (16,), np.uint64)
                target = jit.array(jit.address_of(codes[block, row]), (16,), np.uint64)
                for n in range(16):
                    target[n] = part[n] >> right & mask


@jit.device
def unpack_affine(address, bits, is_value, codes, scales, shifts, by_rows, group, tile):
    """tile (rows, cols) = code * scale + shift.

    scales, shifts f32 are (rows / group, cols) by rows, else (cols / group, rows). `codes` lends
    its scratch.
    """
    rows, cols = tile.shape
    tiles, words_at = tile.size // 1024, _words_at(codes)
    _load(address, bits, tiles, words_at)
    # A division for each block would take longer than its numbers; groups are powers of two.
    group_bits = 5
    while 1 << group_bits < group:
        group_bits += 1
    tile_at, scales_at, shifts_at = (
        jit.address_of(tile), jit.address_of(scales), jit.address_of(shifts),
    )  # fmt: skip
    mask = (1 << bits) - 1
    for s in range(tiles):
        for register in range(4):
            for j in range(4):
                block, row = _place(is_value, tiles, s, j, register)
                source, right = _row(bits, s, j, register, address, words_at)
                out = tile_at + (row * cols + block * 8) * 4
                if by_rows:
                    place = ((row >> group_bits) * cols + block * 8) * 4
                    scale, shift = scales_at + place, shifts_at + place
                    jit.affine8x8(out, cols * 4, source, right, mask, scale, shift)
                else:
                    place = ((block * 8 >> group_bits) * rows + row) * 4
                    scale, shift = scales_at + place, shifts_at + place
                    jit.affine8x8_columns(out, cols * 4, source, right, mask, scale, shift)


@jit.device
def unpack_minifloats(address, left, is_value, codes, scale, tile):
    """tile (rows, cols) = scale * numbers of 8 bits; `left` shifts all but the sign into a half."""
    cols = tile.shape[1]
    tiles = tile.size // 1024
    words_at = _words_at(codes)
    _load(address, 8, tiles, words_at)
    for s in range(tiles):
        for register in range(4):
            for j in range(4):
                block, row = _place(is_value, tiles, s, j, register)
                source, right = _row(8, s, j, register, address, words_at)
                out = jit.address_of(tile) + (row * cols + block * 8) * 4
                jit.minifloat8x8(out, cols * 4, source, right, left, scale)
