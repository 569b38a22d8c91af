"""The CPU backend's half that knows the cache: its basis, append, seal, gather, attention."""

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from . import cpu_attn, cpu_store
from . import view as place
from .checks import check_attend, check_enter, check_writeable, token_of
from .cpu_math import KINDS
from .native import Kernels
from .ops import PAGE_TOKENS, Norm
from .view import Extent, PageView

FEW_ROWS = 8
"""Row-wise kernels on fewer rows run on the calling thread."""


class Tensor(np.ndarray):
    """A NumPy array that remembers its address."""

    @cached_property
    def address(self) -> int:
        return self.ctypes.data


def address_of(array: np.ndarray) -> int:
    return array.address if isinstance(array, Tensor) else array.ctypes.data


class CacheOps:
    """Kernels over a store's memory. Shapes are those of `Ops`."""

    kernels: Kernels
    threads: int

    def __init__(self) -> None:
        self._scratch = self.empty((0,))
        self._partials = self.empty((0,))
        self._arrivals = self.empty((0,), np.int64)

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Tensor:
        return np.empty(shape, dtype).view(Tensor)

    # A decode step

    def publish(self, extent: Extent) -> None:
        token = token_of(extent)
        extent.mirror = np.ascontiguousarray(token.angles, np.float32).view(Tensor)

    def enter(self, view: PageView, qkv: Tensor, norms: tuple[Norm, Norm] | None) -> None:
        token, settings = token_of(view.extent), view.settings
        kv_heads, (rows, dim) = view.num_kv_heads, qkv.shape
        heads = rows - 2 * kv_heads
        check_enter(qkv, view)
        row, kernels = 4 * dim, self.kernels  # bytes of a head, and of one kind of angles
        q = address_of(qkv)
        k, v = q + heads * row, q + (heads + kv_heads) * row
        if norms is not None:
            for at, count, (gains, eps) in ((q, heads, norms[0]), (k, kv_heads, norms[1])):
                kernels.rmsnorm(count, FEW_ROWS, at, address_of(gains), dim, eps, at)
        forwards, backwards, base, offset = (view.extent.mirror.address + i * row for i in range(4))
        kernels.rope(1, FEW_ROWS, q, heads + kv_heads, dim, forwards, forwards + row // 2)
        if settings[place.QUERIES]:
            kept = int(settings[place.QUERIES]) + token.slot % place.QUERY_ROWS * heads * row
            ctypes.memmove(kept, q, heads * row)
        form, bias = int(settings[place.FORM]), int(settings[place.KEY_BIAS])
        turns = {place.POST: 0, place.PAGE: base, place.PRE: backwards}[form]
        bias_turns = {place.POST: forwards, place.PAGE: offset, place.PRE: 0}[form]
        sides = (
            (k, turns, bias, bias_turns if bias else 0, int(settings[place.KEY_HADAMARD])),
            (v, 0, 0, 0, int(settings[place.VALUE_HADAMARD])),
        )
        for at, *steps in sides:
            if any(steps):
                kernels.change_basis(1, FEW_ROWS, at, kv_heads, dim, 1, *steps)
        kernels.append(1, FEW_ROWS, view.address, k, v, token.slot, int(token.is_sink))

    # Attention

    def attend(
        self, q: Tensor, view: PageView, scale: float, window: int | None, out: Tensor
    ) -> None:
        heads, dim = q.shape
        kv_heads, extent = view.num_kv_heads, view.extent
        group = heads // kv_heads
        check_attend(q, view, out)
        blocks = extent.pages + -(-(extent.sinks + extent.tail_tokens) // PAGE_TOKENS)
        splits = 1 if self.threads == 1 else max(1, min(blocks, 8 * self.threads // kv_heads))
        partials, sums, arrivals = self._split_states(kv_heads, splits, group, dim)
        tokens = extent.sinks + extent.pages * PAGE_TOKENS + extent.tail_tokens
        first = 0 if window is None else max(tokens - window, 0)
        self.kernels.attend(
            kv_heads * splits, 1, address_of(q), group, scale, splits,
            self._thread_scratch(cpu_attn.attend_bytes(dim, group)), partials, sums,
            arrivals, address_of(out), view.address,
            extent.sinks, extent.table_address, extent.pages, extent.tail_tokens,
            extent.tail_slot, extent.bases_address, first,
        )  # fmt: skip

    def _split_states(
        self, kv_heads: int, splits: int, group: int, dim: int
    ) -> tuple[int, int, int]:
        """Addresses of what each split of a head leaves, and of who has arrived; see `attend`.

        Outputs (items, group, dim) f32; maxima and totals (items, 2, group) f32; (kv_heads,) i64.
        """
        items = kv_heads * splits
        states = items * group * (dim + 2)
        if self._partials.size < states:
            self._partials = self.empty((states,))
        if len(self._arrivals) < kv_heads:
            self._arrivals = np.zeros(kv_heads, np.int64).view(Tensor)  # (kv_heads,)
        partials = self._partials.address
        return partials, partials + items * group * dim * 4, self._arrivals.address

    def _thread_scratch(self, nbytes: int) -> int:
        """The address of so many bytes for each thread; valid until the next call."""
        floats = -(-nbytes // 4) * self.threads
        if self._scratch.size < floats:
            self._scratch = self.empty((floats,))
        return self._scratch.address

    # Cache

    def change_basis(
        self,
        rows: Tensor,
        inwards: bool,
        *,
        turns: Tensor | None = None,
        bias: Tensor | None = None,
        bias_turns: Tensor | None = None,
        hadamard: int = 0,
    ) -> None:
        check_writeable("change_basis", rows)
        n, heads, dim = rows.shape
        addresses = [0 if part is None else address_of(part) for part in (turns, bias, bias_turns)]
        self.kernels.change_basis(
            n, FEW_ROWS, address_of(rows), heads, dim, int(inwards), *addresses, hadamard
        )

    def append(self, view: PageView, k: Tensor, v: Tensor, slot: int, sink: bool = False) -> None:
        self.kernels.append(
            len(k), FEW_ROWS, view.address, address_of(k), address_of(v), slot, int(sink)
        )

    def recall(
        self, view: PageView, is_value: bool, slot: int, out: Tensor, sink: bool = False
    ) -> None:
        self.kernels.recall(
            len(out), FEW_ROWS, view.address, int(is_value), slot, int(sink), address_of(out)
        )

    def round_rows(self, rows: Tensor, dtype: np.dtype) -> None:
        check_writeable("round_rows", rows)
        width = rows[0].size
        self.kernels.round_rows(len(rows), FEW_ROWS, address_of(rows), width, KINDS[dtype])

    def seal(
        self,
        views: Sequence[PageView],
        first_page: int,
        count: int,
        new: tuple[Tensor, Tensor] | None,
        new_start: int,
        tail_first: int,
        tail_slot: int,
        measure: bool,
    ) -> None:
        for view in views:
            self._seal(view, first_page, count, new, new_start, tail_first, tail_slot, measure)

    def _seal(
        self, view: PageView, first_page: int, count: int, new: tuple[Tensor, Tensor] | None,
        new_start: int, tail_first: int, tail_slot: int, measure: bool,
    ) -> None:  # fmt: skip
        """Those of one layer."""
        heads, dim, table = view.num_kv_heads, view.head_dim, view.extent.table_address
        for is_value, survey in enumerate(view.surveys):
            fresh, tokens = (
                (0, 0) if new is None else (address_of(new[is_value]), len(new[is_value]))
            )
            source = (tail_first, tail_slot, fresh, new_start, tokens)
            surveyed = {"never": 0, "first": int(measure), "every": count}[survey]
            if surveyed:
                scratch = self._thread_scratch(heads * PAGE_TOKENS * dim * 4)
                self.kernels.survey(
                    surveyed, 1, view.address, is_value, table, first_page, int(measure), *source,
                    scratch,
                )  # fmt: skip
            tile_bytes = PAGE_TOKENS * dim * 4
            side = place.VALUE_SIDE if is_value else place.KEY_SIDE
            work = int(view.settings[side + place.WORK])
            scratch = self._thread_scratch(tile_bytes + cpu_store.codes_bytes(dim) + work)
            self.kernels.seal(
                count * heads, 1, view.address, is_value, table, first_page, *source,
                scratch, scratch + self.threads * tile_bytes,
            )  # fmt: skip

    def gather(
        self, view: PageView, is_value: bool, first_page: int, count: int, out: Tensor
    ) -> None:
        self.kernels.gather(
            count * view.num_kv_heads, 1, view.address, int(is_value), view.extent.table_address,
            first_page, self._thread_scratch(cpu_store.decode_bytes(view.head_dim)),
            address_of(out),
        )  # fmt: skip
