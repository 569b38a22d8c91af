"""The decode attention kernel, emulated, over stores for its tests."""

from typing import Any

import numpy as np

from kvrt.backends.attend_variant import (
    QUERY_HEADS,
    attend_defines,
    with_lookup,
    with_shape,
    with_sides,
)
from kvrt.backends.cpu import CpuOps
from kvrt.kvstore import Geometry, KVStore
from tests.emulator import EmulatedModule

from .codecs import FittedTables, rotary_for
from .stores import new_store

WARPS, STAGES = 4, 2

TOLERANCE = 1.5e-3
"""Queries, keys and weights of the kernel are halves (11 bits); sums are f32."""


def make_store(
    ops: CpuOps,
    spec: str,
    kv_heads: int,
    dim: int,
    tokens: int,
    bias: float = 0.0,
    outliers: float = 0.0,
    amplitude: float = 1.0,
    size: float = 20.0,
    calibration: FittedTables | None = None,
    theta: float = 10000.0,
) -> KVStore:
    """A store of one layer; keys have a bias of that spread, if any, RoPE that amplitude and base.

    `outliers`: how many of its numbers are `size` times as large.
    """
    rng = np.random.default_rng(tokens + dim)
    geometry = Geometry(1, kv_heads, dim, key_bias=bool(bias))
    left_out = rng.normal(0, bias, (kv_heads, dim)).astype(np.float32)
    rotary = rotary_for(geometry, theta, amplitude)
    extras: dict[str, Any] = {"rotary": rotary}
    if calibration is not None:
        extras["calibration"] = calibration
    if bias:
        extras["key_bias"] = [ops.to_device(left_out)]
    store = new_store(ops, spec, geometry, max(tokens, 1), **extras)
    with store.extending(tokens):
        rows = [make_rows(rng, tokens, kv_heads, dim) for _ in range(2)]
        for part in rows if outliers else ():
            part[rng.random(part.shape) < outliers] *= size
        turned = np.repeat(left_out[None], tokens, axis=0)  # (tokens, kv_heads, dim)
        rows[0] += rotary.rotate(turned, np.arange(tokens))
        k, v = (ops.to_device(part) for part in rows)
        store.extend(0, k, v)
    return store


def make_rows(rng: np.random.Generator, tokens: int, heads: int, dim: int) -> np.ndarray:
    rows = rng.normal(0, 1, (tokens, heads, dim))  # (tokens, heads, dim)
    rows *= rng.uniform(0.2, 4, (1, heads, dim))  # channels differ
    return rows.astype(np.float32)


def attend_both(
    ops: CpuOps,
    store: KVStore,
    group: int,
    window: int | None = None,
    splits: int = 3,
    spread: float = 1.0,
    bulk: bool = False,
    lookup: bool = True,
    by_side: bool = False,
    stages: int = STAGES,
) -> tuple[np.ndarray, np.ndarray]:
    """What the emulated kernel and the CPU's give: (heads, dim) f32 each.

    Queries have that spread. `bulk`: pages come by the copy engine, as from sm_90 on.
    `lookup`: levels of non-uniform integers are looked up, as where there is memory for that.
    `by_side`: one of the `stages` of a warp's ring has a side of a page, not all of it.
    """
    view = store.view(0)
    heads, dim = group * view.num_kv_heads, view.head_dim
    rng = np.random.default_rng(heads)
    q = ops.to_device(rng.normal(0, spread, (heads, dim)).astype(np.float32))
    scale = dim**-0.5
    expected = ops.empty((heads, dim))
    ops.attend(q, view, scale, window, expected)

    defines = attend_defines(view.settings, group)
    if lookup:
        defines = with_lookup(defines)
    if by_side:
        defines = with_sides(defines)
    shape = with_shape(defines, WARPS, stages)
    module = EmulatedModule("attend.cu", {**shape, "KVRT_BULK_COPIES": int(bulk)})
    extent = view.extent
    lengths = np.array(
        [
            extent.sinks, extent.pages, extent.tail_tokens, extent.tail_slot,
            extent.table_address, extent.bases_address,
        ]
    )  # fmt: skip
    rows = view.num_kv_heads * -(-group // QUERY_HEADS)
    partials = np.zeros((rows, splits, QUERY_HEADS, dim + 2), np.float32)
    arrivals = np.zeros(rows, np.int32)
    out = np.full((heads, dim), np.nan, np.float32)
    module.launch(
        "attend", (splits, rows), (WARPS * 32,), q, view.settings, lengths,
        scale * np.log2(np.e), group, window or 0, partials, arrivals, out,
        shared=shape["SHARED_BYTES"],
    )  # fmt: skip
    assert not arrivals.any() and not partials.any()
    return out, expected


def error(got: np.ndarray, expected: np.ndarray) -> float:
    wide = expected.astype(np.float64)
    return float(np.linalg.norm(got - wide) / np.linalg.norm(wide))
