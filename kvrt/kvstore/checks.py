"""What a caller may hand to a store, and in which order.

All raise CodecError, but `check_fits`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import CodecError, ContextFullError
from .layout import Geometry


def check_rows(geometry: Geometry, k: Any, v: Any, tokens: int) -> None:
    """k and v are contiguous arrays (tokens, num_kv_heads, head_dim) f32."""
    shape = (tokens, geometry.num_kv_heads, geometry.head_dim)
    for name, rows in (("k", k), ("v", v)):
        found = getattr(rows, "shape", None), getattr(rows, "dtype", None)
        if found != (shape, np.float32):
            what = type(rows).__name__ if found[1] is None else f"{found[0]} {found[1]}"
            raise CodecError(f"got {name} {what} for a store that expects {shape} float32")
        if not rows.flags.c_contiguous:
            raise CodecError(f"{name} is a strided view, expected a contiguous array: copy it")


def check_queries(geometry: Geometry, q: Any, rows: int, heads: int | None) -> None:
    """q is a contiguous array (rows, heads, head_dim) f32, of as many heads for each KV head.

    `heads` None: how many there are is not known.
    """
    shape: tuple[int, ...] = getattr(q, "shape", ())
    dtype = getattr(q, "dtype", None)
    kv_heads, dim = geometry.num_kv_heads, geometry.head_dim
    fits = len(shape) == 3 and (shape[0], shape[2], dtype) == (rows, dim, np.float32)
    counts = range(kv_heads, 1 << 31, kv_heads) if heads is None else (heads,)
    if not fits or shape[1] not in counts:
        many = f"a multiple of {kv_heads}" if heads is None else f"{heads}"
        what = type(q).__name__ if dtype is None else f"{shape} {dtype}"
        raise CodecError(f"got queries {what}, expected ({rows}, {many}, {dim}) float32")
    if not q.flags.c_contiguous:
        raise CodecError("queries are a strided view, expected a contiguous array: copy it")


def check_finite(layer: int, k: np.ndarray, v: np.ndarray) -> None:
    """No key or value is an infinity or NaN."""
    for name, rows in (("keys", k), ("values", v)):
        if not np.isfinite(rows).all():
            raise CodecError(f"layer {layer}: the {name} hold infinities or NaN")


def check_layer(geometry: Geometry, layer: int) -> None:
    """There is such a layer."""
    if layer not in range(geometry.num_layers):
        raise CodecError(f"there is no layer {layer!r}, there are 0 to {geometry.num_layers - 1}")


def check_count(tokens: Any) -> None:
    """A number of tokens is a whole number."""
    if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)):
        raise CodecError(f"a number of tokens must be a whole number, got {tokens!r}")


def check_limit(max_tokens: Any) -> None:
    """A store may hold so many tokens."""
    check_count(max_tokens)
    if max_tokens < 1:
        raise CodecError(f"a store must hold at least one token, got max_tokens={max_tokens}")


def check_added(tokens: Any) -> None:
    """So many tokens can be added."""
    check_count(tokens)
    if tokens < 0:
        raise CodecError(f"cannot add {tokens} tokens")


def check_kept(tokens: Any, cached: int) -> None:
    """A store that holds `cached` tokens can be cut to so many."""
    check_count(tokens)
    if not 0 <= tokens <= cached:
        raise CodecError(f"cannot truncate to {tokens} tokens, the store holds {cached}")


def check_fits(cached: int, tokens: int, limit: int) -> None:
    """Raise ContextFullError unless so many more tokens fit."""
    if cached + tokens > limit:
        raise ContextFullError(
            f"context full: {cached} tokens cached and {tokens} more asked for, "
            f"the limit is {limit}"
        )


def check_complete(geometry: Geometry, done: set[int], call: str) -> None:
    """Every layer has got the tokens under way."""
    missing = [layer for layer in range(geometry.num_layers) if layer not in done]
    if missing:
        raise CodecError(f"{call}() was not called for layer {missing[0]}, nothing was added")
