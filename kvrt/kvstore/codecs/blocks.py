"""llama.cpp's q8_0 and q4_0: blocks of 32 channels of a token, an f16 scale each.

Scales and codes are bit for bit those of ggml's `quantize_row_q8_0_ref`, `quantize_row_q4_0_ref`;
only their places differ: codes lie in fragment order and scales behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...backends import jit
from ...backends.ops import PAGE_TOKENS
from ...errors import UnsupportedError
from .. import fragment
from .base import CODES, META, OWN, Packed

BLOCK = 32


@dataclass(frozen=True)
class Block(Packed):
    """One of llama.cpp's block formats."""

    name: Literal["q8_0", "q4_0"]

    number = 2

    @property
    def code_bits(self) -> int:  # type: ignore[override]
        return 8 if self.name == "q8_0" else 4

    def check(self, is_value: bool, num_kv_heads: int, head_dim: int) -> None:
        if head_dim % BLOCK:
            raise UnsupportedError(
                f"{self.name} needs a head_dim that is a multiple of 32, this cache has {head_dim}"
            )

    def meta_bytes(self, is_value: bool, head_dim: int) -> int:
        return PAGE_TOKENS * head_dim // BLOCK * 2

    def settings(self, is_value: bool, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return self.code_bits, BLOCK, 0, int(is_value)


@jit.exact
def _round_away(x):
    """The nearest integer, halves away from zero, as C's roundf."""
    whole = np.trunc(x)
    if abs(x - whole) >= np.float32(0.5):
        whole += np.float32(1.0) if x > np.float32(0.0) else np.float32(-1.0)
    return np.int64(whole)


@jit.exact
def block_encode(tile, side, is_value, head, heads, run, shared, codes):
    """Encode a tile into the run; see `dispatch` for the arguments."""
    bits = side[OWN]
    dim = tile.shape[1]
    groups = dim // BLOCK
    scales = jit.array(run + side[META], (groups, PAGE_TOKENS), np.uint16)
    for place in range(PAGE_TOKENS):
        t = fragment.column_at(place, PAGE_TOKENS, is_value) if is_value else place
        for g in range(groups):
            largest = np.float32(0.0)  # with its sign: q4_0 gives it the code that has no opposite
            for c in range(g * BLOCK, (g + 1) * BLOCK):
                if abs(tile[t, c]) > abs(largest):
                    largest = tile[t, c]
            if bits == 8:
                scale = abs(largest) / np.float32(127.0)
            else:
                scale = largest / np.float32(-8.0)
            inverse = np.float32(1.0) / scale if scale != np.float32(0.0) else np.float32(0.0)
            scales[g, place] = jit.float_to_half(scale)
            for c in range(g * BLOCK, (g + 1) * BLOCK):
                x = tile[t, c] * inverse
                if bits == 8:
                    code = _round_away(x) + 128
                else:
                    code = min(np.int64(x + np.float32(8.5)), 15)
                row, col = (c, t) if is_value else (t, c)
                codes[col // 8, row, col % 8] = code
    fragment.pack_codes(codes, bits, is_value, run + side[CODES])


@jit.device
def block_decode(run, shared, side, is_value, head, heads, codes, scratch, tile):
    """Decode the run's codes into a tile; see `dispatch` for the arguments."""
    bits = side[OWN]
    rows, cols = tile.shape
    groups = (rows if is_value else cols) // BLOCK
    stored = jit.array(run + side[META], (groups, PAGE_TOKENS), np.uint16)
    scales = jit.array(jit.address_of(scratch), (groups, PAGE_TOKENS), np.float32)
    shifts = jit.array(
        jit.address_of(scratch) + groups * PAGE_TOKENS * 4, (groups, PAGE_TOKENS), np.float32
    )
    zero = np.float32(-(1 << (bits - 1)))
    for g in range(groups):
        for place in range(PAGE_TOKENS):
            t = fragment.column_at(place, PAGE_TOKENS, is_value) if is_value else place
            scale = jit.half_to_float(stored[g, place])
            scales[g, t] = scale
            shifts[g, t] = zero * scale
    address = run + side[CODES]
    fragment.unpack_affine(address, bits, is_value, codes, scales, shifts, is_value, BLOCK, tile)
