"""Between tiles of f32 and arrays of codes, for codecs that look at one number at a time."""

from __future__ import annotations

import numpy as np

from ...backends import jit


@jit.exact
def place_codes(tile, is_value, codes):
    """codes (cols / 8, rows, 8) u16 = the codes that a tile (64, head_dim) holds as f32."""
    for t in range(tile.shape[0]):
        for c in range(tile.shape[1]):
            row, col = (c, t) if is_value else (t, c)
            codes[col // 8, row, col % 8] = np.uint16(tile[t, c])


@jit.inline
def place_block(numbers, block, factors, shifts, tile):
    """Eight columns of tile = numbers (8 * rows,) * factor + shift of their column."""
    for row in range(tile.shape[0]):
        for i in range(8):
            col = block * 8 + i
            tile[row, col] = numbers[row * 8 + i] * factors[col] + shifts[col]
