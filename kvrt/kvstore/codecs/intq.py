"""Uniform integers with a scale, and a minimum, for each group (KIVI, InnerQ).

A group is `group` consecutive tokens of one channel (axis channel) or `group` consecutive channels
of one token (axis token). Scales and minima are f16; a code is the nearest level of the rounded
scale and minimum, ties to even, so that encode needs nothing that decode does not have.

- asym (KIVI, arXiv 2402.02750): scale = (max - min) / (2^b - 1), x = code * scale + min. The
  minimum is a float, never an integer zero-point; a range of 0 gives scale 0 and the exact value.
- sym (InnerQ, arXiv 2602.23200): 2^b - 1 levels, scale = max |x| / (2^(b-1) - 1).
- hybrid (InnerQ): for each group the arm of the smaller L1 error, sym at b bits or asym at b - 1;
  the scale's sign bit tells them apart.
- norm (InnerQ): keys are divided by sqrt(max |k|) of their channel over the first sealed page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...backends import cpu_math, jit
from ...backends.ops import PAGE_TOKENS
from ...errors import UnsupportedError
from .. import fragment
from .base import CODES, META, OWN, STATE, Packed, Survey

ASYM, SYM, HYBRID = 0, 1, 2
_MODES = {"asym": ASYM, "sym": SYM, "hybrid": HYBRID}


@dataclass(frozen=True)
class IntQ(Packed):
    """`bits` 2, 3, 4 or 8; `axis` of the groups; `group` 32, 64 or 128; see the module."""

    bits: int
    axis: Literal["channel", "token"]
    group: int
    mode: Literal["asym", "sym", "hybrid"] = "asym"
    norm: bool = False

    number = 1

    @property
    def name(self) -> str:  # type: ignore[override]
        mode = "" if self.mode == "asym" else f":{self.mode}"
        norm = ":norm" if self.norm else ""
        return f"int{self.bits}:{self.axis}:g{self.group}{mode}{norm}"

    @property
    def code_bits(self) -> int:  # type: ignore[override]
        return self.bits

    @property
    def survey(self) -> Survey:  # type: ignore[override]
        return "first" if self.norm else "never"

    def check(self, is_value: bool, num_kv_heads: int, head_dim: int) -> None:
        super().check(is_value, num_kv_heads, head_dim)
        length = PAGE_TOKENS if self.axis == "channel" else head_dim
        if length % self.group:
            fitting = [f"g{group}" for group in (32, 64, 128) if length % group == 0]
            what = "tokens of a page" if self.axis == "channel" else "channels of a head"
            raise UnsupportedError(
                f"{self.name}: groups of {self.group} do not divide the {length} {what}; "
                + (f"{' and '.join(fitting)} work" if fitting else "e4m3, e5m2 and f16 work")
            )

    def meta_bytes(self, is_value: bool, head_dim: int) -> int:
        groups = PAGE_TOKENS * head_dim // self.group
        return groups * (2 if self.mode == "sym" else 4)

    def state_floats(self, num_kv_heads: int, head_dim: int) -> int:
        return num_kv_heads * head_dim if self.norm else 0

    def settings(self, is_value: bool, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        # By rows of the decoded tile: tokens of K, channels of V.
        by_rows = (self.axis == "channel") != is_value
        return self.bits, self.group, _MODES[self.mode], int(by_rows), int(self.norm)


# Scales and minima lie in planes of (groups, places): one place for each channel (axis channel) or
# token (axis token), in the order in which a tensor-core kernel reads them.


@jit.inline
def outer_at(place, outers, is_value, by_rows):
    """The channel or token whose numbers are at a place of a plane."""
    return fragment.column_at(place, outers, is_value) if by_rows else place


@jit.exact
def _nearest(x, scale, minimum, top):
    """The code of x: the nearest level, ties to even, 0 where all levels are one."""
    if scale == np.float32(0.0):
        return 0
    return np.int64(min(max(np.rint((x - minimum) / scale), np.float32(0.0)), np.float32(top)))


@jit.exact
def _half(x):
    """x as it is once stored in f16, whose largest number stands for all beyond."""
    return jit.half_to_float(cpu_math.float_to_half(x))


@jit.exact
def _number(tile, by_token, outer, k):
    """Number k of row or column `outer` of a tile (tokens, channels)."""
    return tile[outer, k] if by_token else tile[k, outer]


@jit.exact
def _error(tile, by_token, outer, start, size, scale, minimum, top):
    """The sum of |x - its level| over a group."""
    total = np.float32(0.0)
    for k in range(start, start + size):
        x = _number(tile, by_token, outer, k)
        code = np.float32(_nearest(x, scale, minimum, top))
        total += abs(x - (code * scale + minimum))
    return total


@jit.exact
def _fit(tile, by_token, outer, start, size, bits, mode):
    """(scale, minimum, largest code, whether asymmetric) of a group."""
    low = _number(tile, by_token, outer, start)
    high = low
    for k in range(start, start + size):
        x = _number(tile, by_token, outer, k)
        low = min(low, x)
        high = max(high, x)
    asym_bits = bits - 1 if mode == HYBRID else bits
    top = (1 << asym_bits) - 1
    scale = _half((high - low) / np.float32(top))
    minimum = _half(low)
    if mode == ASYM:
        return scale, minimum, top, True
    middle = (1 << (bits - 1)) - 1
    step = _half(max(high, -low) / np.float32(middle))
    floor = -np.float32(middle) * step
    if mode == HYBRID:
        error = _error(tile, by_token, outer, start, size, scale, minimum, top)
        if error < _error(tile, by_token, outer, start, size, step, floor, 2 * middle):
            return scale, minimum, top, True
    return step, floor, 2 * middle, False


@jit.exact
def intq_survey(tiles, side, is_value, first, shared):
    """norm: the factor of each channel, sqrt(max |x|) over the first page; 1 where all are 0."""
    factors = jit.array(side[STATE], (tiles.shape[0], tiles.shape[2]), np.float32)
    for head in range(tiles.shape[0]):
        for c in range(tiles.shape[2]):
            peak = np.float32(0.0)
            for t in range(tiles.shape[1]):
                peak = max(peak, abs(tiles[head, t, c]))
            factors[head, c] = np.sqrt(peak) if peak > np.float32(0.0) else np.float32(1.0)


@jit.exact
def intq_encode(tile, side, is_value, head, heads, run, shared, codes):
    """Encode a tile, which norm overwrites, into the run; see `dispatch` for the arguments."""
    bits, group, mode, by_rows, norm = (
        side[OWN],
        side[OWN + 1],
        side[OWN + 2],
        side[OWN + 3],
        side[OWN + 4],
    )
    dim = tile.shape[1]
    if norm:
        factors = jit.array(side[STATE], (heads, dim), np.float32)
        for t in range(PAGE_TOKENS):
            for c in range(dim):
                tile[t, c] /= factors[head, c]
    by_token = by_rows if is_value else not by_rows
    outers = PAGE_TOKENS if by_token else dim
    length = dim if by_token else PAGE_TOKENS
    groups = length // group
    scales = jit.array(run + side[META], (groups, outers), np.uint16)
    minima = jit.array(run + side[META] + groups * outers * 2, (groups, outers), np.uint16)
    for place in range(outers):
        outer = outer_at(place, outers, is_value, by_rows)
        for g in range(groups):
            scale, minimum, top, asym = _fit(tile, by_token, outer, g * group, group, bits, mode)
            scales[g, place] = jit.float_to_half(scale)
            if mode == HYBRID and asym:
                scales[g, place] |= 0x8000
            if mode != SYM:
                minima[g, place] = jit.float_to_half(minimum) if asym else np.uint16(0)
            for k in range(g * group, (g + 1) * group):
                x = _number(tile, by_token, outer, k)
                row, col = (outer, k) if by_token != is_value else (k, outer)
                codes[col // 8, row, col % 8] = _nearest(x, scale, minimum, top)
    fragment.pack_codes(codes, bits, is_value, run + side[CODES])


@jit.device
def intq_decode(run, shared, side, is_value, head, heads, codes, scratch, tile):
    """Decode the run's codes into a tile, without norm's factors, which go to the query."""
    bits, group, mode, by_rows = side[OWN], side[OWN + 1], side[OWN + 2], side[OWN + 3]
    rows, cols = tile.shape
    groups = (rows if by_rows else cols) // group
    places = cols if by_rows else rows
    stored = jit.array(run + side[META], (groups, places), np.uint16)
    minima = jit.array(run + side[META] + groups * places * 2, (groups, places), np.uint16)
    scales = jit.array(jit.address_of(scratch), (groups, places), np.float32)
    shifts = jit.array(jit.address_of(scratch) + groups * places * 4, (groups, places), np.float32)
    middle = np.float32((1 << (bits - 1)) - 1)
    for g in range(groups):
        for place in range(places):
            outer = outer_at(place, places, is_value, by_rows)
            scale = jit.half_to_float(stored[g, place] & np.uint16(0x7FFF))
            scales[g, outer] = scale
            if mode == ASYM or (mode == HYBRID and stored[g, place] >> 15):
                shifts[g, outer] = jit.half_to_float(minima[g, place])
            else:
                shifts[g, outer] = -middle * scale
    address = run + side[CODES]
    fragment.unpack_affine(address, bits, is_value, codes, scales, shifts, by_rows, group, tile)
