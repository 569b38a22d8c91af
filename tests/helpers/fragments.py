"""Fragment order in NumPy, forwards from the definition of the A operand of mma.m16n8k16.

The PTX manual gives each lane eight numbers a0 ... a7 of a 16 x 16 tile: group = lane / 4 and
thread = lane % 4; a_i is in row group (+ 8 for i = 2, 3, 6, 7) and in column 2 * thread + i % 2
(+ 8 for i >= 4). From there to bytes: see `kvrt.kvstore.fragment`, with which this shares no code.
"""

from functools import cache

import numpy as np

TOKENS, LANES = 64, 32


def a_fragment() -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns (32 lanes, 8 numbers) of a tile."""
    lane, i = np.arange(LANES)[:, None], np.arange(8)[None]
    rows = lane // 4 + 8 * (i // 2 % 2)
    cols = lane % 4 * 2 + i % 2 + 8 * (i // 4)
    return rows, cols


@cache
def bit_places(dim: int, bits: int, is_value: bool) -> np.ndarray:
    """Where in a plane each code of `bits` (1, 2, 4, 8) bits begins: (64 tokens, dim) i64."""
    places = np.full((TOKENS, dim), -1, np.int64)
    rows, cols = a_fragment()
    lane, number = np.arange(LANES)[:, None], np.arange(8)[None]
    tiles, start, at = dim // 16, 0, 0
    while start < tiles:
        count = max(1, 4 // bits)  # tiles of a word
        while count > tiles - start:
            count //= 2
        words = 2 if bits == 8 else 1  # of the tile(s) of one j
        word_bits = bits * 8 * count // words
        for i in range(count):
            for j in range(4):
                s = start + i
                if is_value:
                    tokens, channels = 16 * j + cols, 16 * s + rows  # (32, 8) each
                else:  # eight channels of the low half, then of the high half
                    tokens = 16 * j + rows
                    channels = 8 * s + cols % 8 + dim // 2 * (cols // 8)
                register, half = number // 2, number % 2
                word = register // 2 if bits == 8 else 0 * register
                field = register % 2 if bits == 8 else 4 * i + register
                unit = at + word * LANES * 4 * word_bits
                offset = unit + (lane * 4 + j) * word_bits + bits * field + word_bits // 2 * half
                places[tokens, channels] = offset
        at += words * LANES * 4 * word_bits
        start += count
    return places


def pack(codes: np.ndarray, bits: int, is_value: bool) -> bytes:
    """Codes (64, dim) of 2, 3, 4 or 8 bits in fragment order."""
    if bits == 3:
        return pack(codes & 3, 2, is_value) + _pack_plane(codes >> 2, 1, is_value)
    return _pack_plane(codes, bits, is_value)


def _pack_plane(codes: np.ndarray, bits: int, is_value: bool) -> bytes:
    places = bit_places(codes.shape[1], bits, is_value)
    stream = np.zeros(codes.size * bits, np.uint8)  # one bit each
    for bit in range(bits):
        stream[places + bit] = codes >> bit & 1
    return np.packbits(stream, bitorder="little").tobytes()


def unpack(data: bytes, dim: int, bits: int, is_value: bool) -> np.ndarray:
    """Codes (64, dim) i64 of bytes in fragment order."""
    if bits == 3:
        low = TOKENS * dim * 2 // 8
        first = unpack(data[:low], dim, 2, is_value)
        return first + 4 * unpack(data[low:], dim, 1, is_value)
    stream = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.int64)
    places = bit_places(dim, bits, is_value)
    return sum((stream[places + bit] << bit for bit in range(bits)), np.zeros_like(places))


def column_order(size: int, is_value: bool) -> np.ndarray:
    """Columns (channels of K, tokens of V) in the order in which lanes meet them: (size,) i64.

    The four columns of lane 4 g + t of tile s are neighbours: those of its numbers 0, 1, 4, 5.
    """
    _, cols = a_fragment()
    order = []
    for tile in range(size // 16):
        for thread in range(4):
            for number in (0, 1, 4, 5):
                k = int(cols[thread, number])
                if is_value:
                    order.append(16 * tile + k)
                else:
                    order.append(8 * tile + k if k < 8 else size // 2 + 8 * tile + k - 8)
    return np.array(order)
