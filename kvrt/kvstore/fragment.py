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

Scales and minima that go with columns (k) come in `column_place` order: the four that a lane needs
of a tile are neighbours. Those that go with rows (M) come in natural order.

Between this order and arithmetic, codes are u16 arrays (cols / 8, rows, 8), where rows are M (tokens
of K, channels of V) and cols are k; `SCRATCH_BYTES` behind such an array belong to this module.
"""

from __future__ import annotations

import numpy as np

from ..backends import jit

LANES = 32
UNIT_BYTES = 512
SCRATCH_BYTES = UNIT_BYTES
"""What must follow an array of codes in memory."""


@jit.inline
def _place(is_value, tiles, s, j, register):
    """Where 8 rows x 8 columns, one register of all lanes, begin: (block of columns, row)."""
    if is_value:
        return 2 * j + (register >> 1), 16 * s + 8 * (register & 1)
    return (register >> 1) * tiles + s, 16 * j + 8 * (register & 1)


@jit.device
def column_place(col, cols, is_value):
    """The place of a column's scale: ordered by tile, k % 8 / 2, k / 8, k % 2."""
    if is_value:
        return col // 16 * 16 + col % 8 // 2 * 4 + col % 16 // 8 * 2 + col % 2
    half = cols // 2
    return col % half // 8 * 16 + col % 8 // 2 * 4 + col // half * 2 + col % 2


@jit.inline
def _spread(words_at, bits, is_value, tiles, unit, codes, plane):
    """codes (plane > 0: |=) the fields of one unit's words (4, LANES) u32, shifted by `plane`."""
    # Four halves of words at a time: their 16 bits are what a code becomes.
    mask = ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)) * np.uint64(0x0001000100010001)
    left = np.uint64(plane)
    for i in range(16 // bits):
        if bits == 8:
            s, register = unit // 2, unit % 2 * 2 + i
        else:
            s, register = unit * (4 // bits) + i // 4, i % 4
        right = np.uint64(bits * i)
        for j in range(4):
            block, row = _place(is_value, tiles, s, j, register)
            part = jit.array(words_at + j * 4 * LANES, (16,), np.uint64)
            target = jit.array(jit.address_of(codes[block, row]), (16,), np.uint64)
            if plane:
                for n in range(16):
                    target[n] |= ((part[n] >> right) & mask) << left
            else:
                for n in range(16):
                    target[n] = (part[n] >> right) & mask


@jit.device
def _unpack_units(address, bits, is_value, tiles, units, codes, plane):
    """Fill codes from so many units of 32-bit words."""
    words_at = jit.address_of(codes) + codes.size * 2
    words = jit.array(words_at, (4, LANES), np.uint32)
    for unit in range(units):
        source = jit.array(address + unit * UNIT_BYTES, (LANES, 4), np.uint32)
        for lane in range(LANES):
            for j in range(4):
                words[j, lane] = source[lane, j]
        if bits == 1:
            _spread(words_at, 1, is_value, tiles, unit, codes, plane)
        elif bits == 2:
            _spread(words_at, 2, is_value, tiles, unit, codes, plane)
        elif bits == 4:
            _spread(words_at, 4, is_value, tiles, unit, codes, plane)
        else:
            _spread(words_at, 8, is_value, tiles, unit, codes, plane)


@jit.device
def _word_tiles(bits, left):
    """How many of the `left` last tiles the next word takes."""
    if bits == 8:
        return 1
    count = 4 // bits
    while count > left:
        count //= 2
    return count


@jit.device
def _pack_word(codes, bits, is_value, tiles, s, j, lane, first, fields, plane):
    """A word of `fields` registers from `first` on, of the tiles from (s, j) on."""
    mask = (1 << bits) - 1
    word = 0
    for i in range(fields):
        register = first + i % 4
        block, row = _place(is_value, tiles, s + i // 4, j, register)
        for half in range(2):
            code = np.int64(codes[block, row + lane // 4, lane % 4 * 2 + half])
            word |= ((code >> plane) & mask) << (bits * i + half * bits * fields)
    return word


@jit.device
def _unpack_word(word, codes, bits, is_value, tiles, s, j, lane, fields, plane):
    """The opposite of `_pack_word`, for words that begin with register 0."""
    mask = (1 << bits) - 1
    for i in range(fields):
        block, row = _place(is_value, tiles, s + i // 4, j, i % 4)
        for half in range(2):
            code = ((word >> (bits * i + half * bits * fields)) & mask) << plane
            at, column = row + lane // 4, lane % 4 * 2 + half
            codes[block, at, column] = code | (codes[block, at, column] if plane else 0)


@jit.device
def _pack_plane(codes, bits, is_value, address, plane):
    """Pack bits plane ... plane + bits - 1 of the codes; give the address behind them."""
    tiles = codes.size // 1024
    s = 0
    while s < tiles:
        count = _word_tiles(bits, tiles - s)
        fields = 2 if bits == 8 else 4 * count
        size = bits * fields // 4  # bytes of a word
        for part in range(4 * count // fields):
            target = jit.array(address, (LANES, 4, size), np.uint8)
            for lane in range(LANES):
                for j in range(4):
                    word = _pack_word(
                        codes, bits, is_value, tiles, s, j, lane, part * fields, fields, plane
                    )
                    for byte in range(size):
                        target[lane, j, byte] = (word >> (8 * byte)) & 255
            address += LANES * 4 * size
        s += count
    return address


@jit.device
def _unpack_plane(address, bits, is_value, codes, plane):
    """Fill codes from a plane; give the address behind it."""
    tiles = codes.size // 1024
    units = tiles * bits // 4
    _unpack_units(address, bits, is_value, tiles, units, codes, plane)
    address += units * UNIT_BYTES
    s = units * 4 // bits
    while s < tiles:
        count = _word_tiles(bits, tiles - s)
        size = bits * count  # bytes of a word
        source = jit.array(address, (LANES, 4, size), np.uint8)
        for lane in range(LANES):
            for j in range(4):
                word = 0
                for byte in range(size):
                    word |= np.int64(source[lane, j, byte]) << (8 * byte)
                _unpack_word(word, codes, bits, is_value, tiles, s, j, lane, 4 * count, plane)
        address += LANES * 4 * size
        s += count
    return address


@jit.device
def pack_codes(codes, bits, is_value, address):
    """Write codes of 2, 3, 4 or 8 bits in fragment order: head_dim * 64 * bits / 8 bytes."""
    if bits == 3:
        address = _pack_plane(codes, 2, is_value, address, 0)
        _pack_plane(codes, 1, is_value, address, 2)
    else:
        _pack_plane(codes, bits, is_value, address, 0)


@jit.device
def unpack_codes(address, bits, is_value, codes):
    """Read codes of 2, 3, 4 or 8 bits in fragment order into codes (cols / 8, rows, 8) u16."""
    if bits == 3:
        address = _unpack_plane(address, 2, is_value, codes, 0)
        _unpack_plane(address, 1, is_value, codes, 2)
    else:
        _unpack_plane(address, bits, is_value, codes, 0)
