"""What lies in a sealed page, taken apart in NumPy."""

from dataclasses import dataclass

import numpy as np

from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry, KVSpec, PageLayout
from kvrt.kvstore.codecs import IntQ

from . import fragments
from .stores import Tokens, extend, new_store, page_bytes


@dataclass(frozen=True)
class SealedPage:
    """A page of one layer."""

    layout: PageLayout
    data: bytes

    def region(self, name: str, head: int = 0) -> bytes:
        """A region of a head's run, such as `k_codes`."""
        region = next(region for region in self.layout.regions if region.name == name)
        start = head * self.layout.run_bytes + region.offset
        return self.data[start : start + region.nbytes]

    def codes(self, is_value: bool, head: int = 0) -> np.ndarray:
        """Codes by token and channel: (64, head_dim) i64."""
        codec, dim = self.layout.codecs[is_value], self.layout.head_dim
        bits = codec.code_bytes(dim) * 8 // (64 * dim)
        packed = self.region("v_codes" if is_value else "k_codes", head)
        return fragments.unpack(packed, dim, bits, is_value)

    def planes(self, is_value: bool, head: int = 0) -> np.ndarray:
        """An intq side's bits of scales, and minima: (planes, channels or tokens, groups) u16."""
        codec = self.layout.codecs[is_value]
        assert isinstance(codec, IntQ)
        by_channel = codec.axis == "channel"
        outers = self.layout.head_dim if by_channel else 64
        length = 64 if by_channel else self.layout.head_dim
        meta = np.frombuffer(self.region("v_meta" if is_value else "k_meta", head), np.uint16)
        stored = meta.reshape(-1, length // codec.group, outers)  # by place
        planes = np.empty_like(stored)
        # Those that go with the depth of the product are in the order of lanes.
        deep = by_channel != is_value
        order = fragments.column_order(outers, is_value) if deep else np.arange(outers)
        planes[:, :, order] = stored
        return planes.swapaxes(1, 2)


def sealed_page(ops: Ops, spec: str, keys: np.ndarray, values: np.ndarray) -> SealedPage:
    """The page of 64 tokens, keys and values (64, heads, head_dim) f32, of a one-layer store."""
    geometry = Geometry(1, *keys.shape[1:])
    store = new_store(ops, spec, geometry)
    assert store.spec.sink == store.spec.window == 0
    extend(store, Tokens(keys[None], values[None]))
    (data,) = page_bytes(store)
    return SealedPage(PageLayout.of(geometry, KVSpec.parse(spec)), data)
