"""8-bit floats: OCP e4m3 (largest 448) and e5m2 (largest 57,344), one scale for each KV head.

x = value * scale. Round to nearest even, saturating: there are no infinities and no NaN in a page
(a NaN becomes 0). The scale is measured on the first sealed page and kept for good: a scale of 1
would waste the range or clip it. It is the smallest power of two that leaves twice the largest
number of that page in range. A power of two makes the one rounding that of the format itself, and
the head-room of 2 to 4 costs nothing but subnormals, of which both formats have plenty below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ...backends import jit
from .. import fragment
from . import tiles
from .base import CODES, OWN, STATE, Packed, Survey

E4M3, E5M2 = 0, 1


@dataclass(frozen=True)
class Fp8(Packed):
    """One of the two 8-bit floats."""

    name: Literal["e4m3", "e5m2"]

    number = 3
    code_bits = 8
    survey: ClassVar[Survey] = "first"

    def state_floats(self, num_kv_heads: int, head_dim: int) -> int:
        return num_kv_heads

    def settings(self, is_value: bool, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (E4M3 if self.name == "e4m3" else E5M2,)


@jit.exact
def _round_e4m3(x):
    """The e4m3 code nearest to x, as u32."""
    bits = jit.float_to_bits(x)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Exponent bias 127 -> 7, mantissa 23 -> 3 bits.
    normal = np.uint32(size + np.uint32(0x7FFFF) + ((size >> np.uint32(20)) & np.uint32(1)))
    normal = np.uint32(np.uint32(normal >> np.uint32(20)) - np.uint32((127 - 7) << 3))
    # Below 2^-6 codes are multiples of 2^-9: one unit in the last place of 2^14.
    shifted = np.float32(jit.bits_to_float(size) + np.float32(16384.0))
    small = np.uint32(jit.float_to_bits(shifted) - np.uint32(0x46800000))
    code = small if size < np.uint32(0x3C800000) else normal
    code = np.uint32(0x7E) if code > np.uint32(0x7E) else code
    code = np.uint32(0) if size > np.uint32(0x7F800000) else code
    return np.uint32(code | ((bits >> np.uint32(24)) & np.uint32(0x80)))


@jit.exact
def _round_e5m2(x):
    """The e5m2 code nearest to x, as u32."""
    bits = jit.float_to_bits(x)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    normal = np.uint32(size + np.uint32(0xFFFFF) + ((size >> np.uint32(21)) & np.uint32(1)))
    normal = np.uint32(np.uint32(normal >> np.uint32(21)) - np.uint32((127 - 15) << 2))
    # Below 2^-14 codes are multiples of 2^-16: one unit in the last place of 2^7.
    shifted = np.float32(jit.bits_to_float(size) + np.float32(128.0))
    small = np.uint32(jit.float_to_bits(shifted) - np.uint32(0x43000000))
    code = small if size < np.uint32(0x38800000) else normal
    code = np.uint32(0x7B) if code > np.uint32(0x7B) else code
    code = np.uint32(0) if size > np.uint32(0x7F800000) else code
    return np.uint32(code | ((bits >> np.uint32(24)) & np.uint32(0x80)))


@jit.exact
def _encode_row(row, kind, inverse):
    """row = the codes of its numbers, as f32."""
    if kind == E4M3:
        for c in range(row.shape[0]):
            row[c] = np.float32(_round_e4m3(np.float32(row[c] * inverse)))
    else:
        for c in range(row.shape[0]):
            row[c] = np.float32(_round_e5m2(np.float32(row[c] * inverse)))


@jit.exact
def fp8_encode(tile, side, is_value, head, heads, run, shared, codes):
    """Encode a tile, which is overwritten, into the run; see `dispatch` for the arguments."""
    scale = jit.array(side[STATE], (heads,), np.float32)[head]
    inverse = np.float32(np.float32(1.0) / scale)
    for t in range(tile.shape[0]):
        _encode_row(tile[t], side[OWN], inverse)
    tiles.place_codes(tile, is_value, codes)
    fragment.pack_codes(codes, 8, is_value, run + side[CODES])


@jit.device
def fp8_decode(run, shared, side, is_value, head, heads, codes, scratch, tile):
    """Decode the run's codes into a tile; see `dispatch` for the arguments."""
    scale = jit.array(side[STATE], (heads,), np.float32)[head]
    # Both formats are the top of a half, but for e4m3's exponent bias of 7 instead of 15.
    left = 7 if side[OWN] == E4M3 else 8
    factor = np.float32(scale * np.float32(256.0)) if side[OWN] == E4M3 else scale
    address = run + side[CODES]
    fragment.unpack_minifloats(address, left, is_value, codes, factor, tile)


@jit.exact
def fp8_survey(numbers, side, is_value, first, shared):
    """Measure each head's scale on numbers (heads, 64, head_dim) of the first sealed page."""
    if first == 0:
        return
    heads, tokens, dim = numbers.shape
    scales = jit.array(side[STATE], (heads,), np.float32)
    largest = np.float32(448.0) if side[OWN] == E4M3 else np.float32(57344.0)
    for head in range(heads):
        peak = np.float32(0.0)
        for t in range(tokens):
            for c in range(dim):
                size = abs(numbers[head, t, c])
                # False for a NaN; infinities have become the largest half on their way here.
                if size > peak:
                    peak = size
        scales[head] = _power_of_two(np.float32(np.float32(2.0) * peak / largest))


@jit.exact
def _power_of_two(x):
    """The smallest power of two that is not below a positive number; 1 for zero."""
    bits = np.uint32(jit.float_to_bits(x) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)
    return jit.bits_to_float(np.uint32(bits)) if x > np.float32(0.0) else np.float32(1.0)
