"""The arithmetic of cache memory: what a store will hold, before it exists, and what it holds."""

from dataclasses import dataclass

from ..backends.ops import PAGE_TOKENS
from .layout import SETTINGS, Geometry, PageLayout
from .spec import KVSpec

TABLE_START = 16
"""Entries of the smallest page table; it doubles."""


@dataclass(frozen=True)
class StoreStats:
    """Bytes that a store holds, by part.

    `bits_per_element` counts a sealed page with all its metadata; `bytes` counts everything.
    `table_bytes` are those of the page table and of the kernels' settings.
    """

    tokens: int
    sealed_tokens: int
    page_bytes: int
    tail_bytes: int
    sink_bytes: int
    table_bytes: int
    bits_per_element: float

    @property
    def bytes(self) -> int:
        return self.page_bytes + self.tail_bytes + self.sink_bytes + self.table_bytes


def sealed_pages(spec: KVSpec, tokens: int) -> int:
    """Pages sealed once so many tokens are cached: a function of the length alone."""
    return max(0, tokens - spec.sink - spec.window) // PAGE_TOKENS


def tail_rows(spec: KVSpec) -> int:
    """Slots of the tail ring: window + one page, in whole pages so that a page never wraps."""
    return -(-(spec.window + PAGE_TOKENS) // PAGE_TOKENS) * PAGE_TOKENS


def table_entries(pages: int) -> int:
    """Entries of the page table for so many pages: a power of two, so that growth is rare."""
    return max(TABLE_START, 1 << (pages - 1).bit_length() if pages else 0)


def slab_bytes(geometry: Geometry, spec: KVSpec) -> int:
    """Bytes of one page of all layers."""
    return geometry.num_layers * PageLayout.of(geometry, spec).page_bytes


def _exact_bytes(geometry: Geometry, spec: KVSpec, rows: int) -> int:
    numbers = geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * rows
    return numbers * (spec.k.exact_dtype.itemsize + spec.v.exact_dtype.itemsize)


def stats_for(geometry: Geometry, spec: KVSpec, tokens: int) -> StoreStats:
    """What a store of so many tokens holds."""
    pages = sealed_pages(spec, tokens)
    return StoreStats(
        tokens=tokens,
        sealed_tokens=pages * PAGE_TOKENS,
        page_bytes=pages * slab_bytes(geometry, spec),
        tail_bytes=_exact_bytes(geometry, spec, tail_rows(spec)),
        sink_bytes=_exact_bytes(geometry, spec, spec.sink),
        table_bytes=(table_entries(pages) + SETTINGS) * 8,
        bits_per_element=bits_per_element(geometry, spec),
    )


def estimate(geometry: Geometry, spec: KVSpec, tokens: int) -> int:
    """Bytes of a store that holds so many tokens; equals `KVStore.stats().bytes`."""
    return stats_for(geometry, spec, tokens).bytes


def fixed_bytes(geometry: Geometry, spec: KVSpec) -> int:
    """Bytes of an empty store: sinks, tail and page table."""
    return estimate(geometry, spec, 0)


def bytes_per_token(geometry: Geometry, spec: KVSpec) -> float:
    """Bytes that each token adds in the long run."""
    return slab_bytes(geometry, spec) / PAGE_TOKENS


def bits_per_element(geometry: Geometry, spec: KVSpec) -> float:
    """Bits of each cached number in a sealed page, metadata included."""
    return PageLayout.of(geometry, spec).bits_per_element
