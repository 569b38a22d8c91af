"""Vector quantisation: a few channels, or a whole head, at once (PQCache arXiv 2407.12820 and
"Residual vector quantization for KV cache compression" arXiv 2410.15704, in kvrt's own form).

A vector of d channels is a sum of entries, one of each stage's codebook: stage s codes what the
stages before have left over. `pq8x256` cuts a head into groups of 8 channels, each with books of
its own; with `rvq` the whole head is the one group, and its books have 256 to 4096 entries. Heads
share their books, or (perhead) each has a set of its own.

Keys x are coded as (x - centre) * scale, channel by channel: scale weighs errors by what queries
make of them. Which channels of keys make a group is fitted, too: `order` has them group by group,
four and their partners in RoPE, strong and weak ones together, since all groups have as many bits.
What is stored of a token is the index of one entry of each book; the rest is a calibration's, and
lies in each layer's table:

    entries f16 (stages, sets, groups, E, d); norms f32 (stages, sets, groups, E), half their
    squares' sums; of keys centre, scale, 1 / scale f32 and order i32 (heads, head_dim)

where entries of 8 channels of values lie (stages, sets, groups / 8, E, 8, d).

An index is the first j of the smallest norm_j - r . e_j, the product summed channel by channel with
one rounding each: the same on every device, so that pages are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...backends import cpu_store, jit
from ...backends.ops import PAGE_TOKENS
from ...errors import UnsupportedError
from . import vq_codes
from .base import CODES, OWN, TABLE, Packed

if TYPE_CHECKING:
    from ...calibration import Fitted
    from ..grammar import Rope

GROUP = 8
"""Channels of a group of `pq`; also channels that one pass of the search takes."""

BLOCK = 256
"""Entries that the search looks at together; books are multiples of it."""

WORK_BYTES = (PAGE_TOKENS * (BLOCK + GROUP + 1) + BLOCK * (GROUP + 1)) * 4

_REFERENCE_DIM = 128

_LAST = 0x7FFFFFFF  # a key beyond every number's


@dataclass(frozen=True)
class VqBooks:
    """The codebooks of one layer and side: entries (stages, sets * groups, E, d) f16.

    Of keys centre, scale (num_kv_heads, head_dim) f32 and order, i32 of the same shape.
    """

    entries: np.ndarray
    centre: np.ndarray | None = None
    scale: np.ndarray | None = None
    order: np.ndarray | None = None

    @cached_property
    def norms(self) -> np.ndarray:
        """Half the squared norm of each entry: (stages, sets * groups, E) f32, rounded once."""
        flat = self.entries.reshape(-1, self.entries.shape[-1])
        norms = np.empty(len(flat), np.float32)
        for start in range(0, len(flat), 1 << 16):  # in pieces: they are four times as wide
            wide = flat[start : start + (1 << 16)].astype(np.float64)
            norms[start : start + (1 << 16)] = np.einsum("nd,nd->n", wide, wide) / 2
        return norms.reshape(self.entries.shape[:-1])


@dataclass(frozen=True)
class Vq(Packed):
    """`count` stages of `entries` each; `grouped`: of groups of 8 channels (pq), else of heads.

    scaled: the count is for a head_dim of 128, and in proportion to it for others; perhead: each
    head has books of its own.
    """

    count: int
    entries: int
    grouped: bool
    scaled: bool = False
    perhead: bool = False

    number = 5
    calibrated = True

    @property
    def name(self) -> str:  # type: ignore[override]
        own = ":perhead" * self.perhead
        if self.grouped:
            return f"pq{GROUP}x{self.entries}:r{self.count}{own}"
        return f"rvq{self.count}x{self.entries}{':scaled' * self.scaled}{own}"

    @property
    def book(self) -> str:
        """What a calibration calls its codebooks, of however many stages."""
        name = f"pq{GROUP}x{self.entries}" if self.grouped else f"rvq{self.entries}"
        return f"{name}{'.perhead' * self.perhead}"

    @property
    def code_bits(self) -> int:  # type: ignore[override]
        """Of one index."""
        return self.entries.bit_length() - 1

    def stages(self, head_dim: int) -> int:
        """How many entries are summed up."""
        if not self.scaled:
            return self.count
        return max(1, round(self.count * head_dim / _REFERENCE_DIM))

    def groups(self, head_dim: int) -> int:
        return head_dim // GROUP if self.grouped else 1

    def books(self, head_dim: int) -> int:
        """Codebooks, and indices of a token."""
        return self.stages(head_dim) * self.groups(head_dim)

    def sets(self, num_kv_heads: int) -> int:
        """Sets of codebooks: one for all heads, or one each."""
        return num_kv_heads if self.perhead else 1

    def shape(self, num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
        """Of the entries: (stages, sets * groups, E, d)."""
        groups, sets = self.groups(head_dim), self.sets(num_kv_heads)
        return self.stages(head_dim), sets * groups, self.entries, head_dim // groups

    def plain_order(self, num_kv_heads: int, head_dim: int) -> np.ndarray:
        """Neighbours of keys and their partners in a group: (num_kv_heads, head_dim) i32."""
        place = np.arange(head_dim, dtype=np.int32)
        if self.grouped:
            place = place % GROUP // 4 * (head_dim // 2) + place // GROUP * 4 + place % 4
        return np.tile(place.astype(np.int32), (num_kv_heads, 1))

    def check(self, is_value: bool, num_kv_heads: int, head_dim: int) -> None:
        super().check(is_value, num_kv_heads, head_dim)
        if self.grouped and head_dim % 64:
            raise UnsupportedError(
                f"{self.name} needs a head_dim that is a multiple of 64, this cache has "
                f"{head_dim}; rvq and nuq take any multiple of 16"
            )

    def code_bytes(self, head_dim: int) -> int:
        return PAGE_TOKENS // 8 * self.books(head_dim) * self.code_bits

    def work_bytes(self, head_dim: int) -> int:
        return WORK_BYTES

    def table_bytes(self, is_value: bool, num_kv_heads: int, head_dim: int) -> int:
        stages, groups, entries, dim = self.shape(num_kv_heads, head_dim)
        channels = 0 if is_value else 4 * num_kv_heads * head_dim
        return stages * groups * entries * (2 * dim + 4) + 4 * channels

    def settings(self, is_value: bool, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        groups = self.groups(head_dim)
        return head_dim // groups, self.stages(head_dim), self.code_bits, groups, int(self.perhead)

    def tables(
        self,
        calibration: Fitted,
        layer: int,
        is_value: bool,
        rope: Rope = "post",
        had: bool = False,
    ) -> np.ndarray:
        """What the kernels read of a calibration, for one layer and side: (table_bytes,) u8."""
        books = calibration.books(layer, is_value, self, rope, had)
        entries = books.entries.astype("<f2", copy=False)
        if is_value and self.grouped:
            rows = entries.reshape(len(entries), -1, GROUP, self.entries, GROUP)
            entries = rows.swapaxes(2, 3)
        parts = [entries, books.norms]
        if books.centre is not None and books.scale is not None and books.order is not None:
            parts += [books.centre, books.scale, np.float32(1) / books.scale, books.order]
        bytes_of = [np.ascontiguousarray(part).view(np.uint8).ravel() for part in parts]
        return np.concatenate(bytes_of)


# Loops below run over the 256 entries of a block or the channels of a row, which vectorises.


@jit.exact
def _transpose(entries, first, channel, columns):
    """columns (8, 256) f32 = eight channels of the entries first, first + 1, ... f16 bits."""
    dim = entries.shape[1]
    words = jit.array(jit.address_of(entries[first]), (BLOCK, dim >> 2), np.uint64)
    for part in range(2):
        at = (channel >> 2) + part
        a, b = columns[4 * part], columns[4 * part + 1]
        c, d = columns[4 * part + 2], columns[4 * part + 3]
        for j in range(BLOCK):
            word = words[j, at]
            a[j] = jit.half_to_float(np.uint16(word))
            b[j] = jit.half_to_float(np.uint16(word >> np.uint64(16)))
            c[j] = jit.half_to_float(np.uint16(word >> np.uint64(32)))
            d[j] = jit.half_to_float(np.uint16(word >> np.uint64(48)))


@jit.exact
def _add_products(sums, columns, row, channel, begins):
    """sums (256,) += eight channels of a row times theirs, in order; `begins` from 0."""
    x0, x1, x2, x3 = row[channel], row[channel + 1], row[channel + 2], row[channel + 3]
    x4, x5, x6, x7 = row[channel + 4], row[channel + 5], row[channel + 6], row[channel + 7]
    for j in range(BLOCK):
        total = jit.fma(x0, columns[0, j], sums[j] if not begins else np.float32(0.0))
        total = jit.fma(x1, columns[1, j], total)
        total = jit.fma(x2, columns[2, j], total)
        total = jit.fma(x3, columns[3, j], total)
        total = jit.fma(x4, columns[4, j], total)
        total = jit.fma(x5, columns[5, j], total)
        total = jit.fma(x6, columns[6, j], total)
        sums[j] = jit.fma(x7, columns[7, j], total)


@jit.exact
def _nearest(sums, norms, keys):
    """(the smallest norm - sum as an integer in the order of floats, its first place).

    As integers, since LLVM does not vectorise a float minimum; a NaN counts as larger than
    infinity.
    """
    for j in range(BLOCK):
        far = norms[j] - sums[j]
        bits = np.int32(jit.float_to_bits(far))
        key = np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(_LAST)))
        keys[j] = key if far == far else np.int32(_LAST)
    least = np.int32(_LAST)
    for j in range(BLOCK):
        least = keys[j] if keys[j] < least else least
    place = np.int32(BLOCK)
    for j in range(BLOCK):
        at = np.int32(j) if keys[j] == least else np.int32(BLOCK)
        place = at if at < place else place
    return least, place


@jit.exact
def _search(rows, entries, start, norms, work, codes):
    """codes (64,) = the nearest entry of each row; rows (64, d) become what is left over.

    The numbers of an entry are the columns start ... start + d - 1 of entries (E, n) f16 bits.
    """
    dim = rows.shape[1]
    sums = jit.array(work, (PAGE_TOKENS, BLOCK), np.float32)
    columns = jit.array(work + PAGE_TOKENS * BLOCK * 4, (GROUP, BLOCK), np.float32)
    keys_at = work + (PAGE_TOKENS + GROUP) * BLOCK * 4
    keys = jit.array(keys_at, (BLOCK,), np.int32)
    least = jit.array(keys_at + BLOCK * 4, (PAGE_TOKENS,), np.int32)
    for t in range(PAGE_TOKENS):
        codes[t] = 0
        least[t] = _LAST
    for first in range(0, entries.shape[0], BLOCK):
        for channel in range(0, dim, GROUP):
            _transpose(entries, first, start + channel, columns)
            for t in range(PAGE_TOKENS):
                _add_products(sums[t], columns, rows[t], channel, channel == 0)
        for t in range(PAGE_TOKENS):
            key, place = _nearest(sums[t], norms[first : first + BLOCK], keys)
            if key < least[t]:
                least[t] = key
                codes[t] = first + place
    for t in range(PAGE_TOKENS):
        entry, row = entries[codes[t]], rows[t]
        for c in range(dim):
            row[c] -= jit.half_to_float(entry[start + c])


@jit.inline
def _book_at(stage, group, head, groups, sets, packed):
    """(row, first column) of a book among entries whose rows have `packed` groups."""
    own = head if sets > 1 else 0
    return (stage * sets + own) * (groups // packed) + group // packed, group % packed * GROUP


@jit.exact
def vq_encode(tile, side, is_value, head, heads, run, codes):
    """Encode a tile, which is overwritten, into the run; see `dispatch` for the arguments."""
    size, stages, bits, groups = side[OWN], side[OWN + 1], side[OWN + 2], side[OWN + 3]
    dim = tile.shape[1]
    sets = heads if side[OWN + 4] else 1
    books = stages * groups
    work = jit.address_of(codes) + cpu_store.codes_bytes(dim)
    chosen = jit.array(jit.address_of(codes), (books, PAGE_TOKENS), np.uint16)
    packed = GROUP if is_value and size != dim else 1
    entries = jit.array(side[TABLE], (books * sets // packed, 1 << bits, packed * size), np.uint16)
    norms_at = side[TABLE] + entries.size * 2
    norms = jit.array(norms_at, (books * sets, 1 << bits), np.float32)
    units = jit.array(norms_at + norms.size * 4, (3, heads, dim), np.float32)
    orders = jit.array(norms_at + (norms.size + 3 * heads * dim) * 4, (heads, dim), np.int32)
    if not is_value:
        centre, scale = units[0, head], units[1, head]
        for t in range(PAGE_TOKENS):
            row = tile[t]
            for c in range(dim):
                row[c] = (row[c] - centre[c]) * scale[c]
    if size == dim:
        for stage in range(stages):
            book, _ = _book_at(stage, 0, head, 1, sets, 1)
            _search(tile, entries[book], 0, norms[book], work, chosen[stage])
        vq_codes.pack_heads(chosen, bits, is_value, run + side[CODES])
        return
    rows_at = work + WORK_BYTES - PAGE_TOKENS * GROUP * 4
    rows = jit.array(rows_at, (PAGE_TOKENS, GROUP), np.float32)
    for group in range(groups):
        for c in range(GROUP):
            place = group * GROUP + c
            channel = place if is_value else np.int64(orders[head, place])
            for t in range(PAGE_TOKENS):
                rows[t, c] = tile[t, channel]
        for stage in range(stages):
            book, _ = _book_at(stage, group, head, groups, sets, 1)
            at, start = _book_at(stage, group, head, groups, sets, packed)
            _search(rows, entries[at], start, norms[book], work, chosen[stage * groups + group])
    vq_codes.pack_groups(chosen, groups, is_value, run + side[CODES])


@jit.exact
def vq_decode(run, side, is_value, head, heads, codes, tile):
    """Decode the run's codes into a tile (64, head_dim), keys and values alike."""
    size, stages, bits, groups = side[OWN], side[OWN + 1], side[OWN + 2], side[OWN + 3]
    dim = tile.shape[1]
    sets = heads if side[OWN + 4] else 1
    books = stages * groups
    chosen = jit.array(jit.address_of(codes), (books, PAGE_TOKENS), np.uint16)
    packed = GROUP if is_value and size != dim else 1
    entries = jit.array(side[TABLE], (books * sets // packed, 1 << bits, packed * size), np.uint16)
    units_at = side[TABLE] + entries.size * 2 + books * sets * (4 << bits)
    units = jit.array(units_at, (3, heads, dim), np.float32)
    orders = jit.array(units_at + 3 * heads * dim * 4, (heads, dim), np.int32)
    for t in range(PAGE_TOKENS):
        row = tile[t]
        for c in range(dim):
            row[c] = np.float32(0.0)
    if size == dim:
        vq_codes.unpack_heads(run + side[CODES], bits, is_value, chosen)
        for stage in range(stages):
            book, _ = _book_at(stage, 0, head, 1, sets, 1)
            for t in range(PAGE_TOKENS):
                entry, row = entries[book, chosen[stage, t]], tile[t]
                for c in range(dim):
                    row[c] += jit.half_to_float(entry[c])
    else:
        vq_codes.unpack_groups(run + side[CODES], groups, is_value, chosen)
        for stage in range(stages):
            for group in range(groups):
                at, start = _book_at(stage, group, head, groups, sets, packed)
                own = chosen[stage * groups + group]
                if is_value:
                    for t in range(PAGE_TOKENS):
                        entry, row = entries[at, own[t]], tile[t]
                        for c in range(GROUP):
                            row[group * GROUP + c] += jit.half_to_float(entry[start + c])
                else:
                    order = orders[head, group * GROUP : (group + 1) * GROUP]
                    for t in range(PAGE_TOKENS):
                        entry, row = entries[at, own[t]], tile[t]
                        for c in range(GROUP):
                            row[order[c]] += jit.half_to_float(entry[c])
    if not is_value:
        centre, inverse = units[0, head], units[2, head]
        for t in range(PAGE_TOKENS):
            row = tile[t]
            for c in range(dim):
                row[c] = centre[c] + inverse[c] * row[c]
