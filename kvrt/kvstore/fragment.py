"""The order of codes in a page: that of tensor-core fragments. The one place that knows it.

A page is read by `mma.m16n8k16` with keys, and values transposed, as the wide operand A: 16 tokens
(K) or 16 channels (V) are M, 16 channels or tokens are the depth k, the query heads are N. A lane
holds of a 16 x 16 tile of A four registers of two neighbours along k:

    lane = (M % 8) * 4 + (k % 8) / 2,  register = (k / 8) * 2 + M / 8,  half = k % 2

- K: tile (s, j) has the tokens 16 j ... 16 j + 15 and the channels 8 s ... 8 s + 7, then those half
  a head further, so that the partners of a RoPE pair lie in one lane.
- V: tile (s, j) has the channels 16 s ... 16 s + 15 and the tokens 16 j ... 16 j + 15.

Codes of 1, 2, 4 or 8 bits lie in 32-bit words. A word takes n = 4 / bits tiles s, s + 1, ... of one
j; the code of register r and half h of the i-th of them is at bit bits * (4 i + r) + 16 h. (With 8
bits, registers 0 and 1 are in one word and 2 and 3 in the next.) A lane reads 16 bytes at a time:
the words of j = 0 ... 3, so that the four tiles that share a scale or a query come together. Units
of 32 lanes x 16 bytes follow each other with growing s. Where n does not divide head_dim / 16, the
last words are narrower (16, then 8 bits, the second half in the middle): nothing is padded. Codes
of 3 bits are a plane of their low 2 bits and, behind it, a plane of 1 bit.

Scales and minima that go with columns (k) come in the order of `column_at`: the four that a lane
needs of a tile are neighbours. Those that go with rows (M) come in natural order.

Between this order and arithmetic, codes are u16 arrays (cols / 8, rows, 8), where rows are M
(tokens of K, channels of V) and cols are k. What follows such an array in memory is scratch of
this module (`cpu_store.codes_bytes`): words by unit, j and lane, the narrow ones widened.
"""

from __future__ import annotations

import numpy as np

from ..backends import jit

LANES = 32
UNIT_BYTES = 512


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
    """The unit that holds a register of the tiles (s, ...)."""
    return 2 * s + (register >> 1) if bits == 8 else s * bits >> 2


@jit.inline
def _shift(bits, s, register):
    """Where the code of a register begins in either half of its word."""
    return 8 * (register & 1) if bits == 8 else (s * bits * 4 & 15) + bits * register


@jit.inline
def _units(bits, tiles):
    """Units of a plane, narrow ones included."""
    return (tiles * bits + 3) >> 2


@jit.inline
def _words_at(codes):
    """The address of the words, by unit, j and lane."""
    return jit.address_of(codes) + codes.size * 2


@jit.device
def _join(codes, bits, is_value, plane):
    """Make words of bits plane ... plane + bits - 1 of the codes."""
    tiles = codes.size // 1024
    words = jit.array(_words_at(codes), (_units(bits, tiles), 4, LANES), np.uint32)
    for unit in range(words.shape[0]):
        for j in range(4):
            for lane in range(LANES):
                words[unit, j, lane] = 0
    mask = (1 << bits) - 1
    for s in range(tiles):
        for register in range(4):
            unit, shift = _unit(bits, s, register), _shift(bits, s, register)
            for j in range(4):
                block, row = _place(is_value, tiles, s, j, register)
                for lane in range(LANES):
                    for half in range(2):
                        code = np.int64(codes[block, row + lane // 4, lane % 4 * 2 + half])
                        field = (code >> plane & mask) << (shift + 16 * half)
                        words[unit, j, lane] |= np.uint32(field)


@jit.inline
def _narrow_bits(bits, tiles, s):
    """Bits in each half of the word that begins with tile s: 16, less where few tiles are left."""
    size = 16
    while size > 4 * bits * (tiles - s):
        size //= 2
    return size


@jit.device
def _store(codes, bits, address):
    """Write a plane's words in their order; give the address behind them."""
    tiles = codes.size // 1024
    words = jit.array(_words_at(codes), (_units(bits, tiles), 4, LANES), np.uint32)
    s = 0
    while s < tiles:
        size = 16 if bits == 8 else _narrow_bits(bits, tiles, s)
        shift = _shift(bits, s, 0)
        mask = (1 << size) - 1
        for unit in range(_unit(bits, s, 0), _unit(bits, s, 3) + 1):
            target = jit.array(address, (LANES, 4, size // 4), np.uint8)
            for lane in range(LANES):
                for j in range(4):
                    word = np.int64(words[unit, j, lane])
                    word = (word >> shift & mask) | (word >> (16 + shift) & mask) << size
                    for byte in range(size // 4):
                        target[lane, j, byte] = word >> (8 * byte) & 255
            address += LANES * size
        s += 1 if bits == 8 else size // (4 * bits)
    return address


@jit.device
def _load(address, bits, tiles, words_at):
    """Read a plane's words; give the address behind them."""
    whole = tiles * bits // 4
    for unit in range(whole):
        source = jit.array(address + unit * UNIT_BYTES, (LANES, 4), np.uint32)
        words = jit.array(words_at + unit * UNIT_BYTES, (4, LANES), np.uint32)
        for lane in range(LANES):
            for j in range(4):
                words[j, lane] = source[lane, j]
    address += whole * UNIT_BYTES
    s = whole * 4 // bits
    if s < tiles:
        words = jit.array(words_at + whole * UNIT_BYTES, (4, LANES), np.uint32)
        for j in range(4):
            for lane in range(LANES):
                words[j, lane] = 0
        while s < tiles:
            size, shift = _narrow_bits(bits, tiles, s), _shift(bits, s, 0)
            mask = (1 << size) - 1
            narrow = jit.array(address, (LANES, 4, size // 4), np.uint8)
            for lane in range(LANES):
                for j in range(4):
                    word = 0
                    for byte in range(size // 4):
                        word |= np.int64(narrow[lane, j, byte]) << (8 * byte)
                    field = (word & mask) << shift | (word >> size & mask) << (16 + shift)
                    words[j, lane] |= np.uint32(field)
            address += LANES * size
            s += size // (4 * bits)
    return address


@jit.device
def pack_codes(codes, bits, is_value, address):
    """Write codes of 2, 3, 4 or 8 bits in fragment order: head_dim * 64 * bits / 8 bytes."""
    low = 2 if bits == 3 else bits
    _join(codes, low, is_value, 0)
    address = _store(codes, low, address)
    if bits == 3:
        _join(codes, 1, is_value, 2)
        _store(codes, 1, address)


@jit.device
def _spread(codes, bits, is_value, plane):
    """codes = (plane > 0: |=) the fields of the words, shifted left by `plane`."""
    tiles = codes.size // 1024
    # Four halves of words at a time: their 16 bits are what a code becomes.
    mask = ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)) * np.uint64(0x0001000100010001)
    for s in range(tiles):
        for register in range(4):
            words_at = _words_at(codes) + _unit(bits, s, register) * UNIT_BYTES
            right = np.uint64(_shift(bits, s, register))
            for j in range(4):
                block, row = _place(is_value, tiles, s, j, register)
                part = jit.array(words_at + j * 4 * LANES, (16,), np.uint64)
                target = jit.array(jit.address_of(codes[block, row]), (16,), np.uint64)
                if plane:
                    for n in range(16):
                        target[n] |= (part[n] >> right & mask) << np.uint64(plane)
                else:
                    for n in range(16):
                        target[n] = part[n] >> right & mask


@jit.device
def unpack_codes(address, bits, is_value, codes):
    """Read codes of 2, 3, 4 or 8 bits in fragment order into codes (cols / 8, rows, 8) u16."""
    low = 2 if bits == 3 else bits
    tiles = codes.size // 1024
    address = _load(address, low, tiles, _words_at(codes))
    _spread(codes, low, is_value, 0)
    if bits == 3:
        _load(address, 1, tiles, _words_at(codes))
        _spread(codes, 1, is_value, 2)


@jit.device
def unpack_affine(address, bits, is_value, codes, scales, shifts, by_rows, group, tile):
    """tile (rows, cols) = code * scale + shift.

    scales, shifts f32 are (rows / group, cols) by rows, else (cols / group, rows). `codes` lends
    its scratch.
    """
    low = 2 if bits == 3 else bits
    rows, cols = tile.shape
    tiles = tile.size // 1024
    low_at = _words_at(codes)
    high_at = low_at + _units(low, tiles) * UNIT_BYTES
    address = _load(address, low, tiles, low_at)
    if bits == 3:
        _load(address, 1, tiles, high_at)
    # A division for each block would take longer than its numbers; groups are powers of two.
    group_bits = 5
    while 1 << group_bits < group:
        group_bits += 1
    tile_at, scales_at, shifts_at = (
        jit.address_of(tile), jit.address_of(scales), jit.address_of(shifts),
    )  # fmt: skip
    mask = (1 << low) - 1
    for s in range(tiles):
        for register in range(4):
            right, high_right = _shift(low, s, register), _shift(1, s, register)
            for j in range(4):
                block, row = _place(is_value, tiles, s, j, register)
                out = tile_at + (row * cols + block * 8) * 4
                source = low_at + _unit(low, s, register) * UNIT_BYTES + j * 4 * LANES
                high = high_at + _unit(1, s, register) * UNIT_BYTES + j * 4 * LANES
                if by_rows:
                    place = ((row >> group_bits) * cols + block * 8) * 4
                else:
                    place = ((block * 8 >> group_bits) * rows + row) * 4
                scale, shift = scales_at + place, shifts_at + place
                if by_rows and bits == 3:
                    jit.affine8x8_planes(
                        out, cols * 4, source, right, high, high_right, scale, shift
                    )
                elif by_rows:
                    jit.affine8x8(out, cols * 4, source, right, mask, scale, shift)
                elif bits == 3:
                    jit.affine8x8_planes_columns(
                        out, cols * 4, source, right, high, high_right, scale, shift
                    )
                else:
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
            right = _shift(8, s, register)
            for j in range(4):
                block, row = _place(is_value, tiles, s, j, register)
                out = jit.address_of(tile) + (row * cols + block * 8) * 4
                source = words_at + _unit(8, s, register) * UNIT_BYTES + j * 4 * LANES
                jit.minifloat8x8(out, cols * 4, source, right, left, scale)
