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


def _codes_of(s: int, j: int, dim: int, is_value: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and channels (32 lanes, 8 numbers) of tile (s, j)."""
    rows, cols = a_fragment()
    if is_value:
        return 16 * j + cols, 16 * s + rows
    # Eight channels of the low half, then of the high half.
    return 16 * j + rows, 8 * s + cols % 8 + dim // 2 * (cols // 8)


@cache
def bit_places(dim: int, bits: int, is_value: bool) -> np.ndarray:
    """Where each bit of each code of 2, 3, 4 or 8 bits is: (64 tokens, dim, bits) i64."""
    places = np.full((TOKENS, dim, bits), -1, np.int64)
    lane, number = np.arange(LANES)[:, None], np.arange(8)[None]
    register, half = number // 2, number % 2
    if bits == 3:
        for s in range(dim // 16):
            words = [(3 * s + word) * LANES * 32 + lane * 32 + 16 * half for word in range(3)]
            for j in range(4):
                at = np.stack([words[j % 3] + np.array([0, 9, 3, 12])[register]] * 3, -1)
                at += np.arange(3)
                if j == 3:
                    for r in range(3):
                        at[:, 2 * r : 2 * r + 2] = words[r][:, :2, None] + 6 + np.arange(3)
                    at[:, 6:] = np.stack([word[:, :2] + 15 for word in words], -1)
                places[_codes_of(s, j, dim, is_value)] = at
        return places
    tiles, start, at = dim // 16, 0, 0
    while start < tiles:
        count = max(1, 4 // bits)  # tiles of a word
        while count > tiles - start:
            count //= 2
        words = 2 if bits == 8 else 1  # of the tile(s) of one j
        word_bits = bits * 8 * count // words
        for i in range(count):
            for j in range(4):
                word = register // 2 if bits == 8 else 0 * register
                field = register % 2 if bits == 8 else 4 * i + register
                unit = at + word * LANES * 4 * word_bits
                offset = unit + (lane * 4 + j) * word_bits + bits * field + word_bits // 2 * half
                where = _codes_of(start + i, j, dim, is_value)
                places[where] = offset[..., None] + np.arange(bits)
        at += words * LANES * 4 * word_bits
        start += count
    return places


def pack(codes: np.ndarray, bits: int, is_value: bool) -> bytes:
    """Codes (64, dim) of 2, 3, 4 or 8 bits in fragment order."""
    stream = np.zeros(codes.size * bits, np.uint8)  # one bit each
    stream[bit_places(codes.shape[1], bits, is_value)] = codes[..., None] >> np.arange(bits) & 1
    return np.packbits(stream, bitorder="little").tobytes()


def unpack(data: bytes, dim: int, bits: int, is_value: bool) -> np.ndarray:
    """Codes (64, dim) i64 of bytes in fragment order."""
    stream = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.int64)
    return (stream[bit_places(dim, bits, is_value)] << np.arange(bits)).sum(-1)


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
