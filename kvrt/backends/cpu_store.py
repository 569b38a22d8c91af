"""CPU kernels that move tokens into and out of a store: append, seal and gather.

Sinks and tail are (kv_heads, rows, dim) stored floats; the tail is a ring whose slot for position
p is (p - sinks) % rows. `build_seal` registers the two kernels that know a codec's pages.
"""

from types import ModuleType

import numpy as np

from . import cpu_math, jit
from .jit import Address, Int
from .ops import PAGE_TOKENS


@jit.device
def row_bytes(kind, dim):
    return dim * (4 if kind == cpu_math.F32 else 2)


@jit.kernel
def append(
    thread, begin, end,
    keys: Address, values: Address, heads: Int, dim: Int, rows: Int, slot: Int,
    key_kind: Int, key_ring: Address, value_kind: Int, value_ring: Address,
):  # fmt: skip
    """Store keys, values (n, heads, dim) f32 at ring slots slot, ...; one item is one token."""
    new_keys = jit.array(keys, (end, heads, dim), np.float32)
    new_values = jit.array(values, (end, heads, dim), np.float32)
    key_bytes = row_bytes(key_kind, dim)
    value_bytes = row_bytes(value_kind, dim)
    for i in range(begin, end):
        place = (slot + i) % rows
        for h in range(heads):
            row = h * rows + place
            cpu_math.store_row(new_keys[i, h], key_kind, key_ring + row * key_bytes)
            cpu_math.store_row(new_values[i, h], value_kind, value_ring + row * value_bytes)


@jit.device
def _round_row(row, kind, out):
    """The value that a row has once stored in `kind`."""
    if kind == cpu_math.F16:
        for d in range(row.shape[0]):
            out[d] = jit.half_to_float(jit.float_to_half(row[d]))
    elif kind == cpu_math.BF16:
        for d in range(row.shape[0]):
            out[d] = cpu_math.bfloat_to_float(cpu_math.float_to_bfloat(row[d]))
    else:
        for d in range(row.shape[0]):
            out[d] = row[d]


@jit.device
def _collect(tile, first, head, heads, dim, kind, tail, rows, sinks, new, new_start, new_tokens):
    """tile (PAGE_TOKENS, dim) = the exact tokens first, first + 1, ... of one head."""
    fresh = jit.array(new, (new_tokens, heads, dim), np.float32)
    size = row_bytes(kind, dim)
    for t in range(PAGE_TOKENS):
        position = first + t
        if position >= new_start:
            # Rounded as the tail would have, so that bytes do not depend on how calls were split.
            _round_row(fresh[position - new_start, head], kind, tile[t])
        else:
            slot = head * rows + (position - sinks) % rows
            cpu_math.load_rows(tail + slot * size, kind, 1, dim, tile[t : t + 1])


@jit.device
def _spread(tile, out, start, head):
    """out (n, heads, dim): one head of PAGE_TOKENS tokens = tile."""
    for t in range(tile.shape[0]):
        for d in range(tile.shape[1]):
            out[start + t, head, d] = tile[t, d]


def build_seal(suffix: str, codec: ModuleType) -> None:
    """Register `seal_<suffix>` and `gather_<suffix>` for a codec.

    The codec has `save_keys(tile, settings, run)`, `save_values`, `load_keys(run, settings, tile)`
    and `load_values`; `run` is the address of one KV head's part of a page.
    """

    def seal(
        thread, begin, end,
        pages: Address, first_page: Int, layer_offset: Int, run_bytes: Int, settings: Address,
        heads: Int, dim: Int, sinks: Int, rows: Int, scratch: Address,
        key_kind: Int, tail_keys: Address, new_keys: Address,
        value_kind: Int, tail_values: Address, new_values: Address,
        new_start: Int, new_tokens: Int,
    ):  # fmt: skip
        """Encode page first_page + item // heads of head item % heads, from tail and new tokens."""
        tile = jit.array(scratch + thread * PAGE_TOKENS * dim * 4, (PAGE_TOKENS, dim), np.float32)
        for item in range(begin, end):
            page = first_page + item // heads
            head = item % heads
            table = jit.array(pages, (page + 1,), np.int64)
            run = table[page] + layer_offset + head * run_bytes
            first = sinks + page * PAGE_TOKENS
            options = jit.array(settings, (16,), np.int64)
            _collect(
                tile, first, head, heads, dim, key_kind, tail_keys, rows, sinks,
                new_keys, new_start, new_tokens,
            )  # fmt: skip
            codec.save_keys(tile, options, run)
            _collect(
                tile, first, head, heads, dim, value_kind, tail_values, rows, sinks,
                new_values, new_start, new_tokens,
            )  # fmt: skip
            codec.save_values(tile, options, run)

    def gather(
        thread, begin, end,
        pages: Address, first_page: Int, layer_offset: Int, run_bytes: Int, settings: Address,
        heads: Int, dim: Int, scratch: Address, keys: Address, values: Address,
    ):  # fmt: skip
        """Decode whole pages into keys, values (n, heads, dim) f32, page `first_page` at row 0."""
        tile = jit.array(scratch + thread * PAGE_TOKENS * dim * 4, (PAGE_TOKENS, dim), np.float32)
        for item in range(begin, end):
            page = item // heads
            head = item % heads
            table = jit.array(pages, (first_page + page + 1,), np.int64)
            run = table[first_page + page] + layer_offset + head * run_bytes
            options = jit.array(settings, (16,), np.int64)
            start = page * PAGE_TOKENS
            out_keys = jit.array(keys, (start + PAGE_TOKENS, heads, dim), np.float32)
            out_values = jit.array(values, (start + PAGE_TOKENS, heads, dim), np.float32)
            codec.load_keys(run, options, tile)
            _spread(tile, out_keys, start, head)
            codec.load_values(run, options, tile)
            _spread(tile, out_values, start, head)

    seal.__name__ = f"seal_{suffix}"
    gather.__name__ = f"gather_{suffix}"
    jit.kernel(seal)
    jit.kernel(gather)


@jit.kernel
def recall(
    thread, begin, end,
    source: Address, rows: Int, slot: Int, kind: Int, heads: Int, dim: Int, target: Address,
):  # fmt: skip
    """target (n, heads, dim) f32 = ring slots slot, slot + 1, ... of sinks or tail, by token."""
    out = jit.array(target, (end, heads, dim), np.float32)
    size = row_bytes(kind, dim)
    for i in range(begin, end):
        place = (slot + i) % rows
        for h in range(heads):
            cpu_math.load_rows(source + (h * rows + place) * size, kind, 1, dim, out[i, h : h + 1])
