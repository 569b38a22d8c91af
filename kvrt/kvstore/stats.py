"""The arithmetic of cache memory: what a store will hold, before it exists, and what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..backends.ops import PAGE_TOKENS
from ..backends.view import LAYER_SETTINGS, zone_settings
from .basis import needs_bases
from .compression import EXACT_BYTES, Compression
from .layout import Geometry, PageLayout
from .spec import KVSpec

TABLE_START = 16
"""Entries of the smallest page table; it doubles."""

_LONG_PROMPT = 1 << 40
"""Tokens beyond every budget and window."""


@dataclass(frozen=True)
class StoreStats:
    """Bytes that a store holds, by part.

    `bits_per_element` counts a sealed page, or a block, with all its metadata; `bytes` counts
    everything.
    `table_bytes` are those of the page table, of tables of angles and of the kernels' settings;
    `codec_bytes` of scales measured once and of fitted tables.
    """

    tokens: int
    sealed_tokens: int
    page_bytes: int
    tail_bytes: int
    sink_bytes: int
    table_bytes: int
    codec_bytes: int
    bits_per_element: float

    @property
    def bytes(self) -> int:
        parts = self.page_bytes + self.tail_bytes + self.sink_bytes
        return parts + self.table_bytes + self.codec_bytes


def sealed_pages(spec: KVSpec, tokens: int) -> int:
    """Pages sealed once so many tokens are cached: a function of the length alone.

    None in formats that compress prompts.
    """
    if spec.compression is not None:
        return 0
    return max(0, tokens - spec.sink - spec.window) // PAGE_TOKENS


def tail_rows(spec: KVSpec) -> int:
    """Slots of the tail ring: window + one page, in whole pages so that a page never wraps."""
    return -(-(spec.window + PAGE_TOKENS) // PAGE_TOKENS) * PAGE_TOKENS


def exact_rows(tokens: int) -> int:
    """Tokens that zone C has room for when it holds so many: whole pages, one at least.

    From 16 pages on it grows by a sixteenth to an eighth, since each time all is copied.
    """
    pages = max(-(-tokens // PAGE_TOKENS), 1)
    step = 1 << max(pages.bit_length() - 4, 0)
    return -(-pages // step) * step * PAGE_TOKENS


def table_entries(pages: int) -> int:
    """Entries of the page table for so many pages: a power of two, so that growth is rare."""
    return max(TABLE_START, 1 << (pages - 1).bit_length() if pages else 0)


def base_entries(spec: KVSpec, pages: int) -> int:
    """Entries of the table of angles: blocks of the sinks, the page table's, those of the tail."""
    return -(-spec.sink // PAGE_TOKENS) + table_entries(pages) + tail_rows(spec) // PAGE_TOKENS


@lru_cache(maxsize=64)
def layouts(geometry: Geometry, spec: KVSpec) -> tuple[PageLayout, ...]:
    """The layout of each layer."""
    return tuple(PageLayout.of(geometry, spec, layer) for layer in range(geometry.num_layers))


def slab_bytes(geometry: Geometry, spec: KVSpec) -> int:
    """Bytes of one page of all layers."""
    return sum(layout.page_bytes for layout in layouts(geometry, spec))


def codec_bytes(layout: PageLayout) -> list[tuple[int, int]]:
    """Bytes that K and V of a layer need beside pages: (measured, fitted)."""
    heads, dim = layout.num_kv_heads, layout.head_dim
    return [
        (4 * codec.state_floats(heads, dim), codec.table_bytes(bool(is_value), heads, dim))
        for is_value, codec in enumerate(layout.codecs)
    ]


def _exact_bytes(geometry: Geometry, spec: KVSpec, rows: int) -> int:
    numbers = geometry.num_kv_heads * geometry.head_dim * rows
    return numbers * sum(
        codec.exact_dtype.itemsize for layout in layouts(geometry, spec) for codec in layout.codecs
    )


def _angle_bytes(geometry: Geometry, spec: KVSpec, pages: int) -> int:
    if not needs_bases(geometry, spec):
        return 0
    return (PAGE_TOKENS + base_entries(spec, pages)) * geometry.head_dim * 4


def stats_for(geometry: Geometry, spec: KVSpec, tokens: int) -> StoreStats:
    """What a store of so many tokens holds.

    In a format that compresses prompts they are one prompt, and this is the most it may hold: see
    `compressed_stats`.
    """
    if spec.compression is not None:
        return compressed_stats(geometry, spec, spec.compression, [tokens])
    pages = sealed_pages(spec, tokens)
    settings = geometry.num_layers * LAYER_SETTINGS * 8
    beside = [codec_bytes(layout) for layout in layouts(geometry, spec)]
    return StoreStats(
        tokens=tokens,
        sealed_tokens=pages * PAGE_TOKENS,
        page_bytes=pages * slab_bytes(geometry, spec),
        tail_bytes=_exact_bytes(geometry, spec, tail_rows(spec)),
        sink_bytes=_exact_bytes(geometry, spec, spec.sink),
        table_bytes=table_entries(pages) * 8 + settings + _angle_bytes(geometry, spec, pages),
        codec_bytes=sum(sum(sum(pair) for pair in layer) for layer in beside),
        bits_per_element=bits_per_element(geometry, spec),
    )


def compresses(spec: KVSpec, tokens: int) -> bool:
    """Whether a format compresses prompts, and keeps less than a whole one of so many tokens."""
    compression = spec.compression
    if compression is None or tokens <= spec.sink + spec.window:
        return False
    # A channel stands for all: budgets and tokens are in proportion to them.
    return compression.budget_bytes(tokens, 1) < EXACT_BYTES * tokens


def compressed_stats(
    geometry: Geometry,
    spec: KVSpec,
    compression: Compression,
    prompts: Iterable[int],
    generated: int = 0,
) -> StoreStats:
    """The most that a store holds of prompts, compressed one after the other, and what follows.

    `prompts` are their tokens; `generated` ones come after the last, one by one. What is left of a
    budget is less than the smallest step of each head. Queries that recompress keeps are not in it:
    a cache's shape does not say how many heads they have.
    """
    heads = _heads(geometry)
    row = EXACT_BYTES * geometry.head_dim
    exact = spec.sink + spec.window
    length, packed, rows = 0, 0, 0

    def pack_oldest() -> None:
        nonlocal packed, rows
        most = compression.recompress
        while most is not None and rows > most:
            budget = compression.budget_bytes(length, geometry.head_dim) * PAGE_TOKENS // length
            if budget >= row * PAGE_TOKENS:
                return
            packed, rows = packed + budget, rows - PAGE_TOKENS

    for prompt in prompts:
        length, rows = length + prompt, rows + prompt
        if prompt and compresses(spec, rows):
            budget = compression.budget_bytes(rows, geometry.head_dim)
            packed, rows = packed + max(budget - row * exact, 0), exact
        pack_oldest()
    for _ in range(generated):
        length, rows = length + 1, rows + 1
        pack_oldest()
    compressed = length - rows
    numbers = 2 * compressed * heads * geometry.head_dim
    return StoreStats(
        tokens=length,
        sealed_tokens=compressed,
        page_bytes=packed * heads,
        tail_bytes=row * exact_rows(rows) * heads,
        sink_bytes=0,
        table_bytes=geometry.num_layers * zone_settings(geometry.num_kv_heads) * 8,
        codec_bytes=0,
        bits_per_element=8 * packed * heads / numbers if numbers else 16.0,
    )


def estimate(geometry: Geometry, spec: KVSpec, tokens: int) -> int:
    """Bytes of a store that holds so many tokens; equals `KVStore.stats().bytes`.

    In a format that compresses prompts, at most: see `stats_for`.
    """
    return stats_for(geometry, spec, tokens).bytes


def read_bytes(
    geometry: Geometry, spec: KVSpec, lengths: Iterable[int], windows: Sequence[int | None]
) -> list[int]:
    """Bytes that one token's attention reads of a cache of each length, over all layers.

    Sealed pages and exact tokens; `windows` has of each layer how many tokens a query sees, None
    for all. Pages count whole.
    """
    parts = []  # of each layer: bytes of a page, bytes of an exact token, window
    for layout, window in zip(layouts(geometry, spec), windows, strict=True):
        numbers = sum(codec.exact_dtype.itemsize for codec in layout.codecs)
        exact = geometry.num_kv_heads * geometry.head_dim * numbers
        parts.append((layout.page_bytes, exact, window))
    found = []
    for length in lengths:
        pages, total = sealed_pages(spec, length), 0
        for page_bytes, exact_bytes, window in parts:
            first = 0 if window is None else max(length - window, 0)
            unseen = min(max(first - spec.sink, 0) // PAGE_TOKENS, pages)
            sinks = max(min(length, spec.sink) - first, 0)
            tail_start = min(length, spec.sink) + pages * PAGE_TOKENS
            tail = length - max(tail_start, first)
            total += (pages - unseen) * page_bytes + (sinks + max(tail, 0)) * exact_bytes
        found.append(total)
    return found


def fixed_bytes(geometry: Geometry, spec: KVSpec) -> int:
    """Bytes that do not grow with the tokens: sinks, tail and tables, as of an empty store.

    In a format that compresses prompts, those of a long prompt: its budget too, if that is fixed.
    """
    compression = spec.compression
    if compression is None:
        return estimate(geometry, spec, 0)
    if isinstance(compression.budget, int):
        return estimate(geometry, spec, _LONG_PROMPT)
    grown = compression.budget_bytes(_LONG_PROMPT, geometry.head_dim)
    return estimate(geometry, spec, _LONG_PROMPT) - grown * _heads(geometry)


def bytes_per_token(geometry: Geometry, spec: KVSpec) -> float:
    """Bytes that each token adds in the long run.

    In a format that compresses prompts, each of a prompt: none where the budget is fixed.
    """
    if spec.compression is not None:
        budget = spec.compression.budget
        share = 0.0 if isinstance(budget, int) else float(budget)
        return share * EXACT_BYTES * geometry.head_dim * _heads(geometry)
    return slab_bytes(geometry, spec) / PAGE_TOKENS


def smaller_from(geometry: Geometry, spec: KVSpec, other: KVSpec) -> int | None:
    """Tokens from which on a store holds less than one of another format, tables and all.

    None where it never does: it adds as much with each token. To within a page.
    """
    if bytes_per_token(geometry, spec) >= bytes_per_token(geometry, other):
        return None
    low, high = 0, 1

    def is_smaller(tokens: int) -> bool:
        return estimate(geometry, spec, tokens) < estimate(geometry, other, tokens)

    while not is_smaller(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_smaller(middle) else (middle, high)
    return high


def bits_per_element(geometry: Geometry, spec: KVSpec, tokens: int = 0) -> float:
    """Bits of each cached number in a sealed page, metadata included, over all layers.

    In a format that compresses prompts, of each number of what is compressed of a prompt of so many
    `tokens`, forgotten ones too; 16 where nothing is.
    """
    if spec.compression is not None:
        return stats_for(geometry, spec, tokens).bits_per_element
    elements = 2 * PAGE_TOKENS * _heads(geometry) * geometry.head_dim
    return slab_bytes(geometry, spec) * 8 / elements


def _heads(geometry: Geometry) -> int:
    """KV heads of all layers."""
    return geometry.num_layers * geometry.num_kv_heads
