"""Decode attention of the CUDA backend over pages whose keys and values are both `rvq`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from ..errors import UnsupportedError
from . import view as place
from .cpu_math import BF16
from .gpu_formats import LOG2_E, LayerFormat, check_readable, check_shared
from .ops import Array
from .view import PageView

HEAD_DIMS = (64, 128)

_SIDES = (place.KEY_SIDE, place.VALUE_SIDE)

_HEADS = 4
"""Query heads of a CTA: HEADS of rvq_shape.cuh, as the names below."""

_WARPS = 16
_WARP_PAGES = 8
_SLOTS = 16
_MOST_FURTHER = 2
"""Bits of a code beside its byte: a table of more finds no room on any device."""

_TABLE_WARPS, _TABLE_ENTRIES, _TABLE_COLUMNS = 8, 8, 32
"""Of rvq_tables.cuh: WARPS, ENTRIES and COLUMNS."""


class Kernels(Protocol):
    """What `attend` needs of a backend: `CacheKernels`."""

    device: Any

    def _scratch(self, use: str, shape: tuple[int, ...], dtype: Any) -> Array: ...
    def _lengths(self, extent: Any) -> Array: ...


def _blocks(stages: int) -> int:
    """Blocks of books that tables of keys are made of."""
    return stages // 16 + stages // 8 % 2 + stages // 4 % 2 + (stages % 4 > 0)


def _shared_bytes(dim: int, key_bits: int, value_bits: int, value_stages: int) -> int:
    """Dynamic shared memory of attend_rvq, as attend_rvq.cu counts it."""
    table = (1 << key_bits) * _SLOTS * _HEADS * 2
    wide = value_stages > 8 and value_bits < 10  # V_BOOKS is 16, else 8
    histogram = (1 << value_bits) * (2 if wide else 1) * 128
    exact = _HEADS * (dim + 2) * 4
    weights = 2 * (512 + 32) if wide else 4 * (256 + 16)
    return max(table, histogram) + _WARPS * (max(exact, weights) + 8 * (_WARP_PAGES + 1))


def sum_shared(dim: int, bits: int, splits: int) -> int:
    """Dynamic shared memory of sum_values: weights of entries, sums of warps, factors."""
    return (16 << bits) + _WARPS * _HEADS * (dim + 8) * 4 + 2 * splits * 16


def check_heads(dim: int, own: tuple[Sequence[int], Sequence[int]], shared: int) -> int:
    """The dynamic shared memory that attention needs, where a CTA may have `shared` bytes.

    own: the codecs' own settings, of keys and values. Raises UnsupportedError for codebooks that
    the kernels do not read, or do not fit.
    """
    (_, key_stages, key_bits, *_), (_, value_stages, value_bits, *_) = own
    most = 8 + _MOST_FURTHER
    if dim not in HEAD_DIMS:
        raise UnsupportedError(
            f"on a GPU, rvq is for a head_dim of 64 or 128, got {dim}; vq2 works"
        )
    if any(side[4] for side in own):
        raise UnsupportedError("on a GPU, heads share the books of rvq; pq8x256 takes perhead")
    if max(key_bits, value_bits) > most:
        raise UnsupportedError(f"on a GPU, books of rvq have at most {1 << most} entries")
    size = _shared_bytes(dim, key_bits, value_bits, value_stages)
    what = f"rvq{key_stages}x{1 << key_bits}"
    return check_shared(size, shared, what, "fewer entries take less")


def rvq_defines(settings: Sequence[int], shared: int) -> dict[str, Any]:
    """All -D options of attend_rvq.cu, where a block may have so many bytes of shared memory.

    Raises UnsupportedError for what the kernels cannot read.
    """
    row = [int(value) for value in settings]
    layer = LayerFormat.of(row)
    check_readable(layer, shared)
    defines: dict[str, Any] = {
        "HEAD_DIM": layer.head_dim,
        "EXACT_KIND": 2 if BF16 in layer.kinds else 1,
        "RUN_BYTES": row[place.RUN_BYTES],
        "SHARED_BYTES": check_heads(layer.head_dim, layer.own, shared),
    }
    for letter, start in zip("KV", _SIDES, strict=True):
        defines |= {
            f"{letter}_STAGES": row[start + place.OWN + 1],
            f"{letter}_BITS": row[start + place.OWN + 2],
            f"{letter}_CODES_OFFSET": row[start + place.CODES],
        }
    return defines


@lru_cache(maxsize=512)
def _variant(settings: bytes, shared: int) -> dict[str, Any]:
    return rvq_defines(np.frombuffer(settings, np.int64).tolist(), shared)


def attend(
    kernels: Kernels,
    q: Array,
    view: PageView,
    scale: float,
    window: int | None,
    out: Array,
    overlap: bool,
) -> None:
    """`Ops.attend` over pages of rvq. `overlap`: pages are as they are since the kernel ahead."""
    device = kernels.device
    defines = _variant(view.settings[: place.LAYER_SETTINGS].tobytes(), device.max_shared)
    heads, dim = q.shape
    kv_heads = view.num_kv_heads
    group = heads // kv_heads
    tiles = kv_heads * -(-group // _HEADS)
    splits = max(device.multiprocessors // tiles, 1)
    stages, k_entries = defines["K_STAGES"], 1 << defines["K_BITS"]
    v_stages, v_entries = defines["V_STAGES"], 1 << defines["V_BITS"]
    size = _blocks(stages) * k_entries * _SLOTS * _HEADS
    tables = kernels._scratch("rvq_tables", (tiles * size,), np.uint16)
    basis = kernels._scratch("rvq_basis", (tiles * _HEADS * dim,), np.float32)
    constants = kernels._scratch("rvq_constants", (tiles * _HEADS,), np.float32)
    weights = (tiles * v_stages * splits * v_entries * _HEADS,)
    histograms = kernels._scratch("rvq_histograms", weights, np.uint16)
    states = kernels._scratch("rvq_states", (tiles * splits * _HEADS * (dim + 4),), np.float32)
    partials = kernels._scratch("rvq_partials", (tiles * v_stages * _HEADS * dim,), np.float32)
    arrivals = kernels._scratch("rvq_arrivals", (tiles,), np.int32)
    lengths, seen = kernels._lengths(view.extent), window or 0
    module = device.module("attend_rvq.cu", defines)
    tasks = -(-stages // 4) * (k_entries // _TABLE_ENTRIES)
    pitch = dim * 2 + 64
    module.launch(
        "make_tables", (-(-tasks // _TABLE_WARPS),), (_TABLE_WARPS * 32,), q, view.address,
        scale * LOG2_E, group, basis, constants, tables,
        shared=_TABLE_COLUMNS * (2 * pitch + 4), overlap=overlap,
    )  # fmt: skip
    module.launch(
        "attend_rvq", (splits, tiles), (_WARPS * 32,), view.address, lengths, group, seen, basis,
        constants, tables, histograms, states, shared=defines["SHARED_BYTES"], overlap=True,
    )  # fmt: skip
    module.launch(
        "sum_values", (v_stages, tiles), (_WARPS * 32,), view.address, lengths, group, seen,
        splits, histograms, states, partials, arrivals, out,
        shared=sum_shared(dim, defines["V_BITS"], splits), overlap=True,
    )  # fmt: skip
