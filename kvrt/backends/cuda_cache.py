"""The CUDA backend's half that knows the cache: its basis, append, seal, gather, attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from ..errors import KernelError
from . import books_variant, cuda_rvq
from .attend_variant import QUERY_HEADS, chosen
from .checks import check_attend, check_attend_causal, check_enter, token_of
from .cpu_math import F16, KINDS
from .gpu_formats import LOG2_E, OWN_SHARED
from .ops import PAGE_TOKENS, Array, Norm
from .view import LENGTHS, TOKEN_ID, TOKEN_IS_SINK, TOKEN_SLOT, Extent, PageView

_THREADS = 256
"""Of a block of the store's kernels, as store.cu has it."""

_PREFILL_ROWS = 128
"""Queries of a block of prefill attention."""


class Device(Protocol):
    """What kernels are launched on: `CudaDevice`, or an emulator."""

    xp: Any  # CuPy, or NumPy
    name: str
    multiprocessors: int
    max_shared: int  # bytes of shared memory that a block may have

    @property
    def label(self) -> str: ...  # for people
    @property
    def build(self) -> str: ...
    def module(self, name: str, defines: Any = None) -> Any: ...
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array: ...
    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array: ...
    def put(self, array: Any) -> Array: ...
    def upload(self, array: Any) -> Array: ...
    def end_uploads(self) -> None: ...
    def to_host(self, array: Array) -> np.ndarray: ...
    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray: ...
    def send(self, staged: np.ndarray, array: Array) -> None: ...
    def program(self, run: Any, keep: Any) -> Any: ...
    def address(self, array: Array) -> int: ...
    def release(self) -> None: ...
    def reset_peak(self) -> bool: ...
    def peak_bytes(self) -> int: ...
    def read_bandwidth(self) -> float: ...
    def matmul(self, x: Array, weight: Array, out: Array, add: bool) -> None: ...


_MOST_CHANNELS = 256
"""Of a head, where keys or values change their basis."""

_MIRROR = LENGTHS + 4 * _MOST_CHANNELS // 2
"""Integers of an extent on the device: lengths, and angles."""


@dataclass
class _Mirror:
    """An extent on the device."""

    array: Array  # (_MIRROR,) i64
    staging: np.ndarray  # the same, on the host, where a copy need not be waited for
    numbers: tuple[int, ...]  # of the extent


@lru_cache(maxsize=512)
def _variant(settings: bytes, shared: int, group: int) -> tuple[str, dict[str, Any], int]:
    """`attend_variant.chosen` of a layer's settings, the device's shared memory, a group's size."""
    return chosen(np.frombuffer(settings, np.int64).tolist(), shared, group)


def _how_to_seal(view: PageView) -> tuple[tuple[str, ...], tuple[bool, bool]]:
    """What layers must have in common to be sealed by one launch."""
    of_keys, of_values = (books_variant.whole_heads(view.settings, side) for side in (False, True))
    return view.surveys, (of_keys, of_values)


def prefill_geometry(dim: int) -> tuple[int, int]:
    """Threads and bytes of shared memory of a block of prefill.cu, as its comments have them."""
    pitch = 2 * dim + 16
    keys = 48 if dim == 64 else 32 if 128 < dim < 176 else 64
    tiles, queries = 4 * keys * pitch, _PREFILL_ROWS * pitch
    return (128, tiles + queries) if dim < 176 else (256, max(tiles, queries))


class CacheKernels:
    """Kernels over a store's memory. Shapes are those of `Ops`."""

    device: Device
    _entered = 0
    """The layer that `enter` was called for last, by its address; 0 after its attention.

    Attention reads pages before the kernel ahead of it has ended, so that must be `enter`.
    """

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        raise NotImplementedError

    def to_device(self, array: np.ndarray) -> Array:
        raise NotImplementedError

    def _scratch(self, use: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array that is the same from call to call, one for each dtype, grown as needed."""
        raise NotImplementedError

    def _store(self, kernel: str, grid: tuple[int, ...], *arguments: Any, shared: int = 0) -> None:
        self.device.module("store.cu").launch(kernel, grid, (_THREADS,), *arguments, shared=shared)

    def change_basis(
        self,
        rows: Array,
        inwards: bool,
        *,
        turns: Array | None = None,
        bias: Array | None = None,
        bias_turns: Array | None = None,
        hadamard: int = 0,
    ) -> None:
        n, heads, dim = rows.shape
        if not n:
            return
        if dim > _MOST_CHANNELS:
            raise KernelError(f"on a GPU, head_dim is {_MOST_CHANNELS} at most, got {dim}")
        warps = _THREADS // 32
        angles = [0 if part is None else part for part in (turns, bias, bias_turns)]
        self._store(
            "change_basis", (n, -(-heads // warps)), rows, heads, dim, int(inwards), *angles,
            hadamard, shared=warps * dim * 4,
        )  # fmt: skip

    def append(self, view: PageView, k: Array, v: Array, slot: int, sink: bool = False) -> None:
        if len(k):
            grid = (len(k), view.num_kv_heads)
            self._store("append", grid, view.address, k, v, int(slot), int(sink))

    def recall(
        self, view: PageView, is_value: bool, slot: int, out: Array, sink: bool = False
    ) -> None:
        if len(out):
            grid = (len(out), view.num_kv_heads)
            self._store("recall", grid, view.address, int(is_value), int(slot), int(sink), out)

    def round_rows(self, rows: Array, dtype: np.dtype) -> None:
        if len(rows):
            width = rows.size // len(rows)
            self._store("round_rows", (len(rows),), rows, width, KINDS[dtype])

    def seal(
        self,
        views: Sequence[PageView],
        first_page: int,
        count: int,
        new: tuple[Array, Array] | None,
        new_start: int,
        tail_first: int,
        tail_slot: int,
        measure: bool,
    ) -> None:
        tokens, pages = 0 if new is None else len(new[0]), views[0].extent.table_address
        for (surveys, whole), group in groupby(views, key=_how_to_seal):
            layers = list(group)  # whose settings follow one another
            first, heads = layers[0], layers[0].num_kv_heads
            for is_value, survey in enumerate(surveys):
                fresh = 0 if new is None else new[is_value]
                source = (tail_first, tail_slot, fresh, new_start, tokens)
                surveyed = {"never": 0, "first": int(measure), "every": count}[survey]
                if surveyed:
                    self._store(
                        "survey", (surveyed, PAGE_TOKENS // 8, len(layers)), first.address,
                        is_value, pages, first_page, int(measure), *source,
                    )  # fmt: skip
                page = (first.address, is_value, pages, first_page)
                shape = (count, heads, len(layers), first.head_dim)
                self._encode(page, source, shape, whole[is_value])

    def _encode(
        self,
        page: tuple[Any, ...],
        source: tuple[Any, ...],
        shape: tuple[int, int, int, int],
        whole: bool,
    ) -> None:
        """Encode one side: pages, heads, layers and channels say how much.

        whole: by codebooks of whole heads.
        """
        count, heads, layers, dim = shape
        shared = books_variant.encode_shared(dim) if whole else 0
        if 0 < shared <= self.device.max_shared - OWN_SHARED:
            blocks = heads * -(-count // 2)
            self.device.module("encode_heads.cu", {"HEAD_DIM": dim}).launch(
                "encode_heads", (blocks, layers), (_THREADS,), *page, count, *source, shared=shared
            )
            return
        tile_bytes = PAGE_TOKENS * (dim + 1) * 4
        self._store(
            "seal", (count * heads, layers), *page, *source, shared=(1 + whole) * tile_bytes
        )

    def gather(
        self, view: PageView, is_value: bool, first_page: int, count: int, out: Array
    ) -> None:
        self._store(
            "gather", (count * view.num_kv_heads,), view.address, int(is_value),
            view.extent.table_address, first_page, out,
            shared=PAGE_TOKENS * (view.head_dim + 1) * 4,
        )  # fmt: skip

    # A decode step

    def publish(self, extent: Extent) -> None:
        token, mirror = token_of(extent), self._mirror(extent)
        mirror.numbers = extent.numbers
        mirror.staging[: len(mirror.numbers)] = mirror.numbers
        places = [TOKEN_ID, TOKEN_SLOT, TOKEN_IS_SINK]
        mirror.staging[places] = token.token_id, token.slot, int(token.is_sink)
        angles = np.ravel(token.angles)  # (4 * head_dim,) f32
        mirror.staging[LENGTHS:].view(np.float32)[: len(angles)] = angles
        self.device.send(mirror.staging, mirror.array)

    def _mirror(self, extent: Extent) -> _Mirror:
        if extent.mirror is None:
            array, staging = (
                self.empty((_MIRROR,), np.int64),
                self.device.pinned((_MIRROR,), np.int64),
            )
            extent.mirror = _Mirror(array, staging, ())
        mirror: _Mirror = extent.mirror
        return mirror

    def _lengths(self, extent: Extent) -> Array:
        """An extent on the device, its numbers as they are now."""
        mirror, numbers = self._mirror(extent), extent.numbers
        if mirror.numbers != numbers:
            mirror.array[: len(numbers)] = self.to_device(np.array(numbers, np.int64))
            mirror.numbers = numbers
        return mirror.array

    def enter(self, view: PageView, qkv: Array, norms: tuple[Norm, Norm] | None) -> None:
        kv_heads, (rows, dim) = view.num_kv_heads, qkv.shape
        heads = rows - 2 * kv_heads
        check_enter(qkv, view)
        gains = (0, 0.0, 0, 0.0) if norms is None else (*norms[0], *norms[1])
        self.device.module("store.cu").launch(
            "enter", (rows,), (32,), view.address, self._lengths(view.extent), qkv, heads, *gains,
            shared=dim * 4, overlap=True,
        )  # fmt: skip
        self._entered = view.address

    # Attention

    def attend(
        self, q: Array, view: PageView, scale: float, window: int | None, out: Array
    ) -> None:
        heads, dim = q.shape
        kv_heads = view.num_kv_heads
        group = heads // kv_heads
        check_attend(q, view, out)
        if books_variant.whole_heads(view.settings, is_value=False):
            entered, self._entered = self._entered == view.address, 0
            cuda_rvq.attend(self, q, view, scale, window, out, entered)
            return
        settings, shared = view.settings.tobytes(), self.device.max_shared
        source, defines, tile = _variant(settings, shared, group)
        rows = kv_heads * -(-group // tile)
        splits = max(self.device.multiprocessors // rows, 1)
        states = rows * splits * QUERY_HEADS  # so many of a CTA whatever the tile
        partials = self._scratch("partials", (states * (dim + 2),), np.float32)
        arrivals = self._scratch("arrivals", (rows,), np.int32)
        self.device.module(source, defines).launch(
            "attend", (splits, rows), (defines["WARPS"] * 32,), q, view.address,
            self._lengths(view.extent), scale * LOG2_E, group, window or 0, partials, arrivals,
            out, shared=defines["SHARED_BYTES"], overlap=self._entered == view.address,
        )  # fmt: skip
        self._entered = 0

    def attend_causal(
        self, q: Array, keys: Array, values: Array, scale: float, window: int | None
    ) -> None:
        n, heads, dim = q.shape
        total, kv_heads, _ = keys.shape
        group = heads // kv_heads
        check_attend_causal(q, keys, values)
        halves = []
        for use, rows in (("queries", q), ("keys", keys), ("values", values)):
            half = self._scratch(use, rows.shape, np.float16)
            self.narrow(rows, half, F16)
            halves.append(half)
        threads, shared = prefill_geometry(dim)
        row = kv_heads * dim
        self.device.module("prefill.cu", {"HEAD_DIM": dim}).launch(
            "prefill", (heads, -(-n // _PREFILL_ROWS)), (threads,), *halves, q, n, total, group,
            window or 0, scale, heads * dim, row, dim, row, dim, heads * dim, shared=shared,
        )  # fmt: skip

    def narrow(self, rows: Array, out: Array, kind: int) -> None:
        """out = rows f32 as 16-bit floats of a kind, held to their range."""
        raise NotImplementedError
