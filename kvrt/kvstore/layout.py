"""`PageLayout`: where every byte of a page is. It sizes the pools and configures the kernels."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..backends.ops import PAGE_TOKENS
from .codecs import TileCodec
from .spec import KVSpec

FORMAT_VERSION = 1
RUN_ALIGNMENT = 128
"""Runs start at multiples of so many bytes from the page's start, so that one bulk copy can fetch
one; where pages start is up to the backend's allocator."""

SETTINGS = 16
"""Integers that a layout hands to its kernels: 4 offsets, 4 for the K codec, 4 for V, 4 spare."""


@dataclass(frozen=True)
class Geometry:
    """The shape of a cache: what it needs to know of a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Region:
    """One part of a head's run."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class PageLayout:
    """A page holds 64 tokens of one layer: for each KV head one contiguous run of bytes.

    A run is the regions K codes, K meta, V codes, V meta, in this order, padded to 128 bytes.
    """

    k: TileCodec
    v: TileCodec
    num_kv_heads: int
    head_dim: int
    page_tokens: int = PAGE_TOKENS

    @classmethod
    def of(cls, geometry: Geometry, spec: KVSpec) -> "PageLayout":
        return cls(spec.k, spec.v, geometry.num_kv_heads, geometry.head_dim)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        sizes = {
            f"{side}_{part}": getattr(codec, f"{name}_bytes")(self.page_tokens, self.head_dim)
            for side, codec in (("k", self.k), ("v", self.v))
            for part, name in (("codes", "code"), ("meta", "meta"))
        }
        regions, offset = [], 0
        for name, nbytes in sizes.items():
            regions.append(Region(name, offset, nbytes))
            offset += nbytes
        return tuple(regions)

    @cached_property
    def run_bytes(self) -> int:
        """Bytes of one head's part of a page."""
        used = sum(region.nbytes for region in self.regions)
        return -(-used // RUN_ALIGNMENT) * RUN_ALIGNMENT

    @cached_property
    def page_bytes(self) -> int:
        return self.num_kv_heads * self.run_bytes

    @property
    def bits_per_element(self) -> float:
        """All bits of a page over its K and V numbers."""
        elements = 2 * self.page_tokens * self.num_kv_heads * self.head_dim
        return self.page_bytes * 8 / elements

    @cached_property
    def settings(self) -> np.ndarray:
        """What the kernels read: region offsets, then the settings of each codec; (16,) i64."""
        settings = np.zeros(SETTINGS, np.int64)  # (16,)
        settings[:4] = [region.offset for region in self.regions]
        for start, codec in ((4, self.k), (8, self.v)):
            values = codec.settings()
            settings[start : start + len(values)] = values
        return settings
