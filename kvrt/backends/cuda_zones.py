"""The CUDA backend's part that knows zones: what widths cost, packing, unpacking, attention."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import KernelError
from .attend_variant import QUERY_HEADS
from .checks import (
    check_attend,
    check_attention_received,
    check_key_errors,
    check_pack_zones,
    check_unpack_zones,
    check_value_errors,
    check_zone_window,
)
from .cuda_cache import CacheKernels
from .gpu_formats import LOG2_E, OWN_SHARED
from .ops import PAGE_TOKENS, Array
from .view import PageView

_THREADS = 256
"""Of a block of the kernels of zones.cu and received.cu but `value_errors`."""

_FEW_HEADS = 4
"""Query heads of a CTA of attention are counted as so many, or as QUERY_HEADS."""

_TEAM_WARPS = 2
_MOST_TEAMS = 7
"""With 13 to 16 warps a thread has 128 registers."""

_LARGE_HEAD = 128
"""Above it a thread takes more: there are about half as many teams."""

_MOST_ARENA = 128 << 10
"""Bytes of shared memory that units are copied to, at most, where more would fit."""

_KEYS, _ROWS = 64, 128
"""Keys of a tile, and rows of queries, of received.cu."""

_SLICE = 256
"""Tokens whose queries are taken at once."""

_STATS_BYTES = 128 << 20
"""Scratch of received.cu, at most, but for one chunk of keys."""


def fixed_bytes(dim: int, heads: int, teams: int) -> int:
    """Shared memory of a CTA of attend_zones.cu beside that of units: `TeamSpace` and `Query`."""
    row = 16 * (heads // 4)  # of weights of a line
    tokens = PAGE_TOKENS // _TEAM_WARPS
    space = row * (dim + 1 + _TEAM_WARPS * (tokens + 1)) + _TEAM_WARPS * heads * 4
    return teams * space + (dim + 1) * heads * 4


def least_arena(dim: int, heads: int, teams: int) -> int:
    """Bytes that a unit, or what all warps have found in the end, takes."""
    warps = teams * _TEAM_WARPS
    states = 4 * heads * (warps * dim + 8 + 4 * warps)
    return max(PAGE_TOKENS * dim * 4 + 16, -(-states // 16) * 16)


@lru_cache(maxsize=64)
def zone_defines(dim: int, group: int, shared: int) -> dict[str, Any]:
    """All -D options of attend_zones.cu, where a CTA may have so many bytes of shared memory.

    Raises KernelError where a CTA does not fit.
    """
    heads = _FEW_HEADS if group <= _FEW_HEADS else QUERY_HEADS
    most = _MOST_TEAMS if dim <= _LARGE_HEAD else (_MOST_TEAMS + 1) // 2
    for teams in range(most, 0, -1):
        fixed, least = fixed_bytes(dim, heads, teams), least_arena(dim, heads, teams)
        room = (shared - OWN_SHARED - fixed) // 16 * 16
        if room >= least:
            arena = max(min(room, _MOST_ARENA), least)
            return {
                "HEAD_DIM": dim, "HEADS": heads, "TEAMS": teams, "ARENA_BYTES": arena,
                "SHARED_BYTES": fixed + arena,
            }  # fmt: skip
    raise KernelError(
        f"attention over zones of head_dim {dim} needs {fixed + least + OWN_SHARED} bytes of "
        f"shared memory a block; this device has {shared}"
    )


def received_shared(dim: int) -> int:
    """Dynamic shared memory of a block of received.cu: `Shared`."""
    return (_ROWS + _KEYS) * (2 * dim + 16) + _ROWS * 8 + _KEYS // 16 * _ROWS * 8 + 2 * _KEYS * 4


def _check_dim(what: str, dim: int) -> None:
    if dim % 16 or not 16 <= dim <= 256:
        raise KernelError(f"{what}: head_dim must be a multiple of 16 up to 256, got {dim}")


class ZoneKernels(CacheKernels):
    """Kernels over a store's memory, zones among it. Shapes are those of `Ops`."""

    @property
    def xp(self) -> Any:
        return self.device.xp

    def _zones(self, kernel: str, grid: tuple[int, ...], *arguments: Any, dim: int) -> None:
        """Launch a kernel of zones.cu with a tile of 64 rows."""
        self.device.module("zones.cu").launch(
            kernel, grid, (_THREADS,), *arguments, shared=PAGE_TOKENS * (dim + 1) * 4
        )

    def attend(
        self, q: Array, view: PageView, scale: float, window: int | None, out: Array
    ) -> None:
        if not view.zones:
            super().attend(q, view, scale, window, out)
            return
        heads, dim = q.shape
        kv_heads = view.num_kv_heads
        group = heads // kv_heads
        check_attend(q, view, out)
        check_zone_window(window)
        _check_dim("attend", dim)
        defines = zone_defines(dim, group, self.device.max_shared)
        tiles = -(-group // QUERY_HEADS)
        # Each head must have a block of threads.
        blocks = max(self.device.multiprocessors // tiles, kv_heads)
        partials = self._scratch(
            "partials", (blocks * tiles * QUERY_HEADS * (dim + 4),), np.float32
        )
        arrivals = self._scratch("arrivals", (tiles * kv_heads,), np.int32)
        self.device.module("attend_zones.cu", defines).launch(
            "attend_zones", (blocks, tiles), (defines["TEAMS"] * _TEAM_WARPS * 32,), q,
            view.address, self._lengths(view.extent), scale * LOG2_E, group, partials, arrivals,
            out, shared=defines["SHARED_BYTES"], overlap=self._entered == view.address,
        )  # fmt: skip
        self._entered = 0

    def attention_received(self, q: Array, keys: Array, scale: float, out: Array) -> None:
        n, _, dim = q.shape
        total = len(keys)
        check_attention_received(q, keys, out)
        _check_dim("attention_received", dim)
        for first in range(0, n, _SLICE):
            part = q[first : first + _SLICE]
            self._receive(part, keys, total - n + first, scale * LOG2_E, out)

    def _receive(self, q: Array, keys: Array, position: int, scale: float, out: Array) -> None:
        """Add what keys receive from the queries of positions `position`, position + 1, ..."""
        n, heads, dim = q.shape
        total, kv_heads, _ = keys.shape
        group = heads // kv_heads
        rows, tiles = n * group, -(-(position + n) // _KEYS)
        # Many chunks keep all multiprocessors at work; each has its sums in scratch.
        each = max(1, min(16, tiles * kv_heads // (8 * self.device.multiprocessors)))
        each = max(each, -(-tiles // max(_STATS_BYTES // (rows * kv_heads * 8), 1)))
        chunks = -(-tiles // each)
        stats = self._scratch("received", (kv_heads * rows * chunks * 2,), np.float32)
        bases = self._scratch("bases", (kv_heads * rows,), np.float32)
        module, shared = self.device.module("received.cu", {"HEAD_DIM": dim}), received_shared(dim)
        module.launch(
            "received_stats", (chunks, kv_heads, -(-rows // _ROWS)), (_THREADS,), q, keys, n,
            position, group, scale, each, stats, shared=shared,
        )  # fmt: skip
        module.launch(
            "received_bases", (-(-kv_heads * rows // (_THREADS // 32)),), (_THREADS,), stats,
            kv_heads * rows, chunks, bases,
        )  # fmt: skip
        module.launch(
            "received_sums", (chunks, kv_heads), (_THREADS,), q, keys, n, position, total, group,
            scale, each, bases, out, shared=shared,
        )  # fmt: skip

    def value_errors(self, values: Array, out: Array) -> None:
        check_value_errors(values, out)
        n, heads, dim = values.shape
        _check_dim("value_errors", dim)
        if n:
            self.device.module("zones.cu").launch(
                "value_errors", (-(-n * heads // PAGE_TOKENS),), (PAGE_TOKENS,), values, n, heads,
                dim, out, shared=PAGE_TOKENS * (dim + 1) * 4,
            )  # fmt: skip

    def key_errors(
        self, keys: Array, tokens: Array, firsts: Array, counts: Array, heads: Array, out: Array
    ) -> None:
        check_key_errors(keys, firsts, counts, heads, out)
        _, kv_heads, dim = keys.shape
        _check_dim("key_errors", dim)
        units = len(firsts)
        parts = self._scratch("key_errors", (max(units, 1), dim, 4), np.float32)
        if units:
            self._zones(
                "block_key_errors", (units,), keys, kv_heads, dim, tokens, firsts, counts, heads,
                parts, dim=dim,
            )  # fmt: skip
        self._zones(
            "sum_key_errors", (kv_heads, -(-dim * 4 // _THREADS)), parts, heads, units, dim * 4,
            out, dim=dim,
        )  # fmt: skip

    def pack_zones(
        self, keys: Array, values: Array, tokens: Array, firsts: Array, heads: Array, units: Array
    ) -> None:
        check_pack_zones(keys, values, firsts, heads, units)
        _, kv_heads, dim = keys.shape
        _check_dim("pack_zones", dim)
        if len(units):
            self._zones(
                "pack_zones", (len(units), 2), keys, values, kv_heads, dim, tokens, firsts, heads,
                units, dim=dim,
            )  # fmt: skip

    def unpack_zones(
        self, units: Array, heads: Array, rows: Array, is_value: bool, out: Array
    ) -> None:
        check_unpack_zones(units, heads, rows, out)
        _, kv_heads, dim = out.shape
        _check_dim("unpack_zones", dim)
        if len(units):
            self._zones(
                "unpack_zones", (len(units),), units, heads, rows, int(is_value), kv_heads, dim,
                out, dim=0,
            )  # fmt: skip
