"""`PageLayout`: where every byte of a page is. It sizes the pools and configures the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..backends.ops import PAGE_TOKENS
from ..errors import CodecError
from .codecs import TileCodec

if TYPE_CHECKING:
    from .spec import KVSpec

FORMAT_VERSION = 3
"""Of pages; saved stores of another version are refused."""

RUN_ALIGNMENT = 128
"""Runs start at multiples of so many bytes from the page's start, so that one bulk copy can fetch
one; where pages start is up to the backend's allocator."""

_REGION_ALIGNMENT = 16


@dataclass(frozen=True)
class Geometry:
    """The shape of a cache: what it needs to know of a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    key_bias: bool = False  # whether the key projection has a bias
    # Whether some layers see the newest tokens alone, which no byte of a cache tells.
    windows: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_kv_heads, self.head_dim) < 1:
            raise CodecError(f"a cache needs at least one layer, head and channel, got {self}")


@dataclass(frozen=True)
class Region:
    """One part of a head's run, or of what the heads share."""

    name: str
    offset: int
    nbytes: int


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def _regions(sizes: dict[str, int]) -> tuple[Region, ...]:
    regions, offset = [], 0
    for name, nbytes in sizes.items():
        offset = _aligned(offset, _REGION_ALIGNMENT)
        regions.append(Region(name, offset, nbytes))
        offset += nbytes
    return tuple(regions)


@dataclass(frozen=True)
class PageLayout:
    """One layer's part of a page of 64 tokens: a contiguous run of bytes for each KV head, then,
    where a codec needs it, what all heads share.

    A run is the regions K codes, K meta, V codes, V meta, in this order, each at a multiple of 16
    bytes; runs and the shared part are padded to 128.
    """

    k: TileCodec
    v: TileCodec
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, geometry: Geometry, spec: KVSpec, layer: int = 0) -> PageLayout:
        k, v = spec.sides(layer)
        return cls(k.codec, v.codec, geometry.num_kv_heads, geometry.head_dim)

    @property
    def codecs(self) -> tuple[TileCodec, TileCodec]:
        return self.k, self.v

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The regions of a head's run."""
        dim = self.head_dim
        return _regions(
            {
                "k_codes": self.k.code_bytes(dim),
                "k_meta": self.k.meta_bytes(False, dim),
                "v_codes": self.v.code_bytes(dim),
                "v_meta": self.v.meta_bytes(True, dim),
            }
        )

    @cached_property
    def shared_regions(self) -> tuple[Region, ...]:
        """The regions behind the runs, which belong to all heads."""
        heads, dim = self.num_kv_heads, self.head_dim
        return _regions(
            {
                "k_shared": self.k.shared_bytes(False, heads, dim),
                "v_shared": self.v.shared_bytes(True, heads, dim),
            }
        )

    @cached_property
    def run_bytes(self) -> int:
        """Bytes of one head's run."""
        last = self.regions[-1]
        return _aligned(last.offset + last.nbytes, RUN_ALIGNMENT)

    @cached_property
    def page_bytes(self) -> int:
        last = self.shared_regions[-1]
        shared = _aligned(last.offset + last.nbytes, RUN_ALIGNMENT)
        return self.num_kv_heads * self.run_bytes + shared

    @property
    def bits_per_element(self) -> float:
        """All bits of a page over its K and V numbers."""
        elements = 2 * PAGE_TOKENS * self.num_kv_heads * self.head_dim
        return self.page_bytes * 8 / elements

    def side_settings(self, is_value: bool) -> list[int]:
        """The settings of one side that need no address, in the order of `backends.view`."""
        codec = self.codecs[is_value]
        codes, meta = self.regions[2 * is_value], self.regions[2 * is_value + 1]
        own = codec.settings(is_value, self.num_kv_heads, self.head_dim)
        shared = self.shared_regions[is_value]
        return [codec.number, codes.offset, meta.offset, shared.offset, *own]

    def defines(self) -> dict[str, int]:
        """Names and numbers for a CUDA compiler's -D options."""
        names = {
            f"{region.name.upper()}_OFFSET": region.offset
            for region in (*self.regions, *self.shared_regions)
        }
        return {
            "FORMAT_VERSION": FORMAT_VERSION,
            "PAGE_TOKENS": PAGE_TOKENS,
            "HEAD_DIM": self.head_dim,
            "NUM_KV_HEADS": self.num_kv_heads,
            "RUN_BYTES": self.run_bytes,
            "PAGE_BYTES": self.page_bytes,
            **names,
        }
