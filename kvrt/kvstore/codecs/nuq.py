"""KVQuant's non-uniform integers (arXiv 2401.18079): fitted levels, thresholds, exact outliers.

x = centre + half * level[code]. Keys: centre and half are static, one pair for each channel, from a
calibration; values: a pair for each token over all heads, found when the page is sealed. `level` is
one table for each layer and side. A code is the number of boundaries, midway between two levels,
that lie below (x - centre) / half: the nearest level, ties to the lower code. With Q-norm the
levels that are read differ from those that a code is chosen by.

With outliers (1 %), numbers outside of the thresholds centre +- half are kept as f16 beside the
codes, which saturate; a number that is kept replaces what its code says. Quotas are fixed, so that
pages are of one size. In a tie the lower index (token * head_dim + channel, or head * head_dim +
channel) is kept.

- Keys: 1 % of a page of one head, rounded up: slots of (f16 value, u16 index) in the head's meta,
  by growing index; unused ones, at the end, have the index 0xFFFF. If more numbers are outside,
  those farthest out in units of half are kept.
- Values: 0.5 % of a token's numbers on either side, one at least, and the thresholds are the next
  largest and smallest. In the shared part: a plane of 64 f16 centres and one of 64 halves, both in
  the order of `fragment.column_at`, then for each token its largest numbers and its smallest, in
  such slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ...backends import jit
from ...backends.ops import PAGE_TOKENS
from ...errors import UnsupportedError
from .. import fragment
from . import tiles
from .base import CODES, META, OWN, TABLE, Packed, Survey

if TYPE_CHECKING:
    from ...calibration import Fitted
    from ..grammar import Rope

UNUSED = 0xFFFF
"""Index of a slot that holds no outlier."""

SLOT_BYTES = 4

_LARGEST_HALF = np.float32(65504.0)


@dataclass(frozen=True)
class Nuq(Packed):
    """`bits` 2, 3 or 4; `outliers` keeps 1 % exact; `qnorm` corrects mean and spread on read."""

    bits: int
    outliers: bool = False
    qnorm: bool = False

    number = 4
    calibrated = True
    survey: ClassVar[Survey] = "every"  # of keys it needs none

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"nuq{self.bits}{':1%' * self.outliers}{':qnorm' * self.qnorm}"

    @property
    def code_bits(self) -> int:  # type: ignore[override]
        return self.bits

    def check(self, is_value: bool, num_kv_heads: int, head_dim: int) -> None:
        super().check(is_value, num_kv_heads, head_dim)
        numbers = head_dim * (num_kv_heads if is_value else PAGE_TOKENS)
        if self.outliers and numbers > UNUSED:
            what = "a token's values" if is_value else "a head's keys in a page"
            raise UnsupportedError(
                f"{self.name}: {numbers:,} numbers ({what}) are more than the {UNUSED:,} that an "
                f"outlier's index can tell apart; nuq{self.bits} without 1% works"
            )

    def key_slots(self, head_dim: int) -> int:
        """Outliers kept of the keys of a page of one head."""
        return -(-PAGE_TOKENS * head_dim // 100) if self.outliers else 0

    def value_slots(self, num_kv_heads: int, head_dim: int) -> int:
        """Outliers kept of the values of a token, on either side."""
        # Half a percent, rounded half up.
        return max(1, (num_kv_heads * head_dim + 100) // 200) if self.outliers else 0

    def meta_bytes(self, is_value: bool, head_dim: int) -> int:
        used = 0 if is_value else self.key_slots(head_dim) * SLOT_BYTES
        return -(-used // 16) * 16

    def shared_bytes(self, is_value: bool, num_kv_heads: int, head_dim: int) -> int:
        if not is_value:
            return 0
        slots = 2 * self.value_slots(num_kv_heads, head_dim)
        return PAGE_TOKENS * (4 + slots * SLOT_BYTES)

    def settings(self, is_value: bool, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        if is_value:
            return self.bits, self.value_slots(num_kv_heads, head_dim)
        return self.bits, self.key_slots(head_dim)

    def table_bytes(self, is_value: bool, num_kv_heads: int, head_dim: int) -> int:
        return 4 * (2 * 2**self.bits + (0 if is_value else 2 * num_kv_heads * head_dim))

    def tables(
        self,
        calibration: Fitted,
        layer: int,
        is_value: bool,
        rope: Rope = "post",
        had: bool = False,
    ) -> np.ndarray:
        """What the kernels read of a calibration, for one layer and side: (table_bytes / 4,) f32.

        The levels that are read (2^bits,); the boundaries (2^bits,), the last of them infinite;
        for keys centre and half, (num_kv_heads, head_dim) each.
        """
        fitted = calibration.tables(layer, is_value, self, rope)
        middles = (fitted.levels[:-1].astype(np.float64) + fitted.levels[1:]) / 2  # (2^bits - 1,)
        parts = [fitted.read_levels, np.array([*middles, np.inf])]
        if fitted.centre is not None and fitted.half is not None:
            parts += [fitted.centre.ravel(), fitted.half.ravel()]
        return np.concatenate(parts).astype(np.float32)


@jit.exact
def _finite(x):
    """x, what is beyond f16 as its largest number, NaN as 0."""
    x = x if x < _LARGEST_HALF else (_LARGEST_HALF if x > np.float32(0.0) else np.float32(0.0))
    return x if x > -_LARGEST_HALF else -_LARGEST_HALF


@jit.exact
def _place(x, centre, half):
    """Where x is between the thresholds, -1 ... 1; 0 where they are one number."""
    return (x - centre) / half if half > np.float32(0.0) else np.float32(0.0)


@jit.exact
def _count_below(row, boundaries, count):
    """row = how many of the first `count` boundaries lie below each of its numbers."""
    for c in range(row.shape[0]):
        y = row[c]
        below = np.float32(0.0)
        for i in range(count):
            below += np.float32(1.0) if y > boundaries[i] else np.float32(0.0)
        row[c] = below


@jit.exact
def _choose_codes(tile, boundaries, bits, is_value, codes):
    """codes (cols / 8, rows, 8) of a tile (64, head_dim) of places, which is overwritten."""
    for t in range(tile.shape[0]):
        # Constant counts, so that the inner loop unrolls and the outer one vectorises.
        if bits == 2:
            _count_below(tile[t], boundaries, 3)
        elif bits == 3:
            _count_below(tile[t], boundaries, 7)
        else:
            _count_below(tile[t], boundaries, 15)
    tiles.place_codes(tile, is_value, codes)


@jit.exact
def _keep_keys(tile, centre, half, slots):
    """Fill slots (n, 2) u16 of value and index with the numbers farthest outside."""
    tokens, dim = tile.shape
    used = 0
    weakest = 0  # the slot to give up, once all are taken
    for t in range(tokens):
        for c in range(dim):
            x = _finite(tile[t, c])
            size = abs(_place(x, centre[c], half[c]))
            if not size > np.float32(1.0):
                continue
            if used < slots.shape[0]:
                slot = used
                used += 1
            elif size > _size(tile, centre, half, slots[weakest, 1]):
                slot = weakest
            else:
                continue
            slots[slot, 0] = jit.float_to_half(x)
            slots[slot, 1] = t * dim + c
            if used == slots.shape[0]:
                weakest = _weakest(tile, centre, half, slots)
    for slot in range(used, slots.shape[0]):
        slots[slot, 0] = 0
        slots[slot, 1] = UNUSED
    for end in range(1, used):
        slot = end
        value, index = slots[end, 0], slots[end, 1]
        while slot > 0 and slots[slot - 1, 1] > index:
            slots[slot, 0], slots[slot, 1] = slots[slot - 1, 0], slots[slot - 1, 1]
            slot -= 1
        slots[slot, 0], slots[slot, 1] = value, index


@jit.exact
def _size(tile, centre, half, index):
    """How far the key of an index is from its channel's centre, in units of half."""
    dim = tile.shape[1]
    c = index % dim
    return abs(_place(_finite(tile[index // dim, c]), centre[c], half[c]))


@jit.exact
def _weakest(tile, centre, half, slots):
    """The slot of the smallest size, of the largest index among equals."""
    result = 0
    least = _size(tile, centre, half, slots[0, 1])
    for slot in range(1, slots.shape[0]):
        size = _size(tile, centre, half, slots[slot, 1])
        if size < least or (size == least and slots[slot, 1] > slots[result, 1]):
            result, least = slot, size
    return result


@jit.exact
def nuq_encode(tile, side, is_value, head, heads, run, shared, codes):
    """Encode a tile, which is overwritten, into the run; see `dispatch` for the arguments."""
    bits, slots = side[OWN], side[OWN + 1]
    dim = tile.shape[1]
    levels = 1 << bits
    table = side[TABLE]
    if is_value:
        planes = jit.array(shared, (2, PAGE_TOKENS), np.uint16)
        for place in range(PAGE_TOKENS):
            t = fragment.column_at(place, PAGE_TOKENS, is_value)
            centre, half = jit.half_to_float(planes[0, place]), jit.half_to_float(planes[1, place])
            for c in range(dim):
                tile[t, c] = _place(_finite(tile[t, c]), centre, half)
    else:
        fitted = jit.array(table + 2 * levels * 4, (2, heads, dim), np.float32)
        centres, halves = fitted[0, head], fitted[1, head]
        if slots > 0:
            kept = jit.array(run + side[META], (slots, 2), np.uint16)
            _keep_keys(tile, centres, halves, kept)
        for t in range(PAGE_TOKENS):
            for c in range(dim):
                tile[t, c] = _place(_finite(tile[t, c]), centres[c], halves[c])
    boundaries = jit.array(table + levels * 4, (levels,), np.float32)
    _choose_codes(tile, boundaries, bits, is_value, codes)
    fragment.pack_codes(codes, bits, is_value, run + side[CODES])


@jit.exact
def _next(values, t, sign, size, index):
    """The number of token t that follows `size` in falling order of sign * x: (size, index)."""
    heads, _, dim = values.shape
    best, best_index = np.float32(0.0), -1
    for head in range(heads):
        for c in range(dim):
            x = sign * _finite(values[head, t, c])
            i = head * dim + c
            follows = x < size or (x == size and i > index)
            if follows and (best_index < 0 or x > best):
                best, best_index = x, i
    return best, best_index


@jit.exact
def _keep_values(values, t, sign, slots):
    """Fill slots (n, 2) u16 with the largest of token t by sign * x; give the one behind them."""
    size, index = _next(values, t, sign, np.float32(np.inf), -1)
    for slot in range(slots.shape[0]):
        slots[slot, 0] = jit.float_to_half(sign * size)
        slots[slot, 1] = index
        size, index = _next(values, t, sign, size, index)
    return sign * size


@jit.exact
def nuq_survey(values, side, is_value, first, shared):
    """Find thresholds and outliers of each token of values (heads, 64, head_dim)."""
    if not is_value:
        return
    slots = side[OWN + 1]
    planes = jit.array(shared, (2, PAGE_TOKENS), np.uint16)
    kept = jit.array(shared + 4 * PAGE_TOKENS, (PAGE_TOKENS, 2, slots, 2), np.uint16)
    for place in range(PAGE_TOKENS):
        t = fragment.column_at(place, PAGE_TOKENS, is_value)
        high = _keep_values(values, t, np.float32(1.0), kept[t, 0])
        low = _keep_values(values, t, np.float32(-1.0), kept[t, 1])
        planes[0, place] = jit.float_to_half((high + low) * np.float32(0.5))
        planes[1, place] = jit.float_to_half((high - low) * np.float32(0.5))


@jit.device
def _levels_of(codes, levels, out):
    """out[n] = levels[codes[n]]."""
    for n in range(out.shape[0]):
        out[n] = levels[codes[n]]


@jit.device
def _spread_levels(codes, levels, scratch, centre, half, tile):
    """tile (rows, cols) = centre + half * levels[codes], centre and half (cols,)."""
    numbers = scratch[: tile.shape[0] * 8]
    for block in range(codes.shape[0]):
        _levels_of(
            jit.array(jit.address_of(codes[block]), (codes.shape[1] * 8,), np.uint16),
            levels,
            numbers,
        )
        tiles.place_block(numbers, block, half, centre, tile)


@jit.device
def nuq_decode(run, shared, side, is_value, head, heads, codes, scratch, tile):
    """Decode the run's codes and outliers into a tile; see `dispatch` for the arguments."""
    bits, slots = side[OWN], side[OWN + 1]
    levels = 1 << bits
    table = side[TABLE]
    read_levels = jit.array(table, (levels,), np.float32)
    fragment.unpack_codes(run + side[CODES], bits, is_value, codes)
    if is_value:
        dim = tile.shape[0]
        thresholds = jit.array(jit.address_of(scratch), (2, PAGE_TOKENS), np.float32)
        planes = jit.array(shared, (2, PAGE_TOKENS), np.uint16)
        for place in range(PAGE_TOKENS):
            t = fragment.column_at(place, PAGE_TOKENS, is_value)
            thresholds[0, t] = jit.half_to_float(planes[0, place])
            thresholds[1, t] = jit.half_to_float(planes[1, place])
        rest = scratch[2 * PAGE_TOKENS :]
        _spread_levels(codes, read_levels, rest, thresholds[0], thresholds[1], tile)
        kept = jit.array(shared + 4 * PAGE_TOKENS, (PAGE_TOKENS, 2 * slots, 2), np.uint16)
        for t in range(PAGE_TOKENS):
            for slot in range(2 * slots):
                c = np.int64(kept[t, slot, 1]) - head * dim
                if 0 <= c < dim:
                    tile[c, t] = jit.half_to_float(kept[t, slot, 0])
    else:
        dim = tile.shape[1]
        fitted = jit.array(table + 2 * levels * 4, (2, heads, dim), np.float32)
        _spread_levels(codes, read_levels, scratch, fitted[0, head], fitted[1, head], tile)
        outliers = jit.array(run + side[META], (slots, 2), np.uint16)
        for slot in range(slots):
            index = np.int64(outliers[slot, 1])
            if index >= PAGE_TOKENS * dim:  # unused, and so are those behind it
                break
            tile[index // dim, index % dim] = jit.half_to_float(outliers[slot, 0])
