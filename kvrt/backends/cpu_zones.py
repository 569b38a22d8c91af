"""The CPU backend's part that knows zones: what widths cost, packing, unpacking, attention."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from ..trizone.allocator import allocate
from ..trizone.blocks import cut_blocks
from . import cpu_zone_attn, cpu_zone_codes
from .checks import (
    check_attend,
    check_cut_blocks,
    check_key_errors,
    check_pack_zones,
    check_unpack_zones,
    check_value_errors,
    check_zone_window,
)
from .cpu_cache import CacheOps, Tensor, address_of
from .ops import PAGE_TOKENS
from .view import PageView


class ZoneOps(CacheOps):
    """Kernels over a store's memory, zones among it. Shapes are those of `Ops`."""

    @property
    def xp(self) -> ModuleType:
        return np

    def attend(
        self, q: Tensor, view: PageView, scale: float, window: int | None, out: Tensor
    ) -> None:
        if not view.zones:
            super().attend(q, view, scale, window, out)
            return
        check_attend(q, view, out)
        check_zone_window(window)
        heads, dim = q.shape
        kv_heads = view.num_kv_heads
        group = heads // kv_heads
        # How many blocks a head has is known to the kernel alone.
        splits = 1 if self.threads == 1 else max(1, 8 * self.threads // kv_heads)
        partials, sums, arrivals = self._split_states(kv_heads, splits, group, dim)
        self.kernels.attend_zones(
            kv_heads * splits, 1, address_of(q), group, scale, splits,
            self._thread_scratch(cpu_zone_attn.attend_zones_bytes(dim, group)), partials, sums,
            arrivals, address_of(out), view.address, view.extent.tail_tokens,
        )  # fmt: skip

    def value_errors(self, values: Tensor, out: Tensor) -> None:
        check_value_errors(values, out)
        count, heads, dim = values.shape
        self.kernels.value_errors(
            -(-count // PAGE_TOKENS) * heads, 1, address_of(values), count, heads, dim,
            self._thread_scratch(cpu_zone_codes.encode_bytes(dim)), address_of(out),
        )  # fmt: skip

    def key_errors(
        self, keys: Tensor, tokens: Tensor, firsts: Tensor, counts: Tensor, heads: Tensor,
        out: Tensor,
    ) -> None:  # fmt: skip
        check_key_errors(keys, firsts, counts, heads, out)
        _, kv_heads, dim = keys.shape
        lists = (address_of(part) for part in (tokens, firsts, counts, heads))
        self.kernels.key_errors(
            kv_heads, 1, address_of(keys), kv_heads, dim, *lists, len(firsts),
            self._thread_scratch(cpu_zone_codes.encode_bytes(dim)), address_of(out),
        )  # fmt: skip

    def allocate(
        self, distortion: Tensor, rates: np.ndarray, budget: np.ndarray, *, shared: bool = False
    ) -> tuple[Tensor, Tensor]:
        return allocate(np, distortion, rates, budget, shared=shared)

    def cut_blocks(
        self, chosen: Tensor, ranks: Sequence[int], start: int, tokens: Tensor, counts: Tensor
    ) -> None:
        check_cut_blocks(chosen, ranks, tokens, counts)
        cut_blocks(chosen, ranks, start, tokens, counts)

    def pack_zones(
        self, keys: Tensor, values: Tensor, tokens: Tensor, firsts: Tensor, heads: Tensor,
        units: Tensor,
    ) -> None:  # fmt: skip
        check_pack_zones(keys, values, firsts, heads, units)
        _, kv_heads, dim = keys.shape
        lists = (address_of(part) for part in (tokens, firsts, heads, units))
        self.kernels.pack_zones(
            len(units), 1, address_of(keys), address_of(values), kv_heads, dim, *lists,
            self._thread_scratch(cpu_zone_codes.encode_bytes(dim)),
        )  # fmt: skip

    def unpack_zones(
        self, units: Tensor, heads: Tensor, rows: Tensor, is_value: bool, out: Tensor
    ) -> None:
        check_unpack_zones(units, heads, rows, out)
        _, kv_heads, dim = out.shape
        lists = (address_of(part) for part in (units, heads, rows))
        self.kernels.unpack_zones(
            len(units), 1, *lists, int(is_value), kv_heads, dim,
            self._thread_scratch(cpu_zone_codes.encode_bytes(dim)), address_of(out),
        )  # fmt: skip
