"""What `Ops` refuses, the same on each backend: shapes that do not fit. All raise KernelError."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import KernelError
from .ops import PAGE_TOKENS, Array, Linear
from .view import Extent, PageView, Token


def check_rmsnorm(x: Array, weight: Array, out: Array) -> None:
    if weight.shape != (x.shape[-1],) or out.shape != x.shape:
        raise KernelError(f"rmsnorm: x {x.shape}, weight {weight.shape}, out {out.shape}")


def check_writeable(what: str, rows: np.ndarray) -> None:
    """For what works in place: memory may be a file's, which nothing can be written to."""
    if not rows.flags.writeable:
        raise KernelError(
            f"{what}: rows {rows.shape} are read-only, and change in place: copy them"
        )


def check_rope(x: Array, cos: Array, sin: Array) -> None:
    n, _, dim = x.shape
    if cos.shape != (n, dim // 2) or sin.shape != cos.shape:
        raise KernelError(f"rope: x {x.shape}, cos {cos.shape}, sin {sin.shape}")


def check_linear(x: Array, layers: Sequence[Linear], outs: Sequence[Array]) -> None:
    n, cols = x.shape
    for layer, out in zip(layers, outs, strict=True):
        if layer.weight.cols != cols or out.shape != (n, layer.weight.rows):
            raise KernelError(
                f"linear: x {x.shape}, weight ({layer.weight.rows}, {layer.weight.cols}), "
                f"out {out.shape}"
            )


def check_swiglu(x: Array, gate: Linear, up: Linear, out: Array) -> None:
    n, rows = x.shape[0], gate.weight.rows
    shapes = {(layer.weight.rows, layer.weight.cols) for layer in (gate, up)}
    if shapes != {(rows, x.shape[1])} or out.shape != (n, rows):
        raise KernelError(f"swiglu: x {x.shape}, weights {sorted(shapes)}, out {out.shape}")


def check_attend_causal(q: Array, keys: Array, values: Array) -> None:
    n, heads, dim = q.shape
    total, kv_heads, _ = keys.shape
    fits = keys.shape == values.shape == (total, kv_heads, dim)
    if n > total or heads % kv_heads or not fits:
        raise KernelError(f"attend_causal: q {q.shape}, keys {keys.shape}, values {values.shape}")


def check_attention_received(q: Array, keys: Array, out: Array) -> None:
    n, heads, dim = q.shape
    total, kv_heads, _ = keys.shape
    fits = keys.shape[2] == dim and out.shape == (kv_heads, total)
    if n > total or heads % kv_heads or not fits:
        raise KernelError(f"attention_received: q {q.shape}, keys {keys.shape}, out {out.shape}")


def check_value_errors(values: Array, out: Array) -> None:
    count, kv_heads, dim = values.shape
    if dim % 16 or out.shape != (4, kv_heads, count):
        raise KernelError(f"value_errors: values {values.shape}, out {out.shape}")


def check_key_errors(keys: Array, firsts: Array, counts: Array, heads: Array, out: Array) -> None:
    _, kv_heads, dim = keys.shape
    of_blocks = firsts.shape == counts.shape == heads.shape
    if dim % 16 or not of_blocks or out.shape != (kv_heads, dim, 4):
        raise KernelError(
            f"key_errors: keys {keys.shape}, firsts {firsts.shape}, counts {counts.shape}, "
            f"heads {heads.shape}, out {out.shape}"
        )


def check_cut_blocks(chosen: Array, ranks: Sequence[int], tokens: Array, counts: Array) -> None:
    heads, n = chosen.shape
    units = -(-n // PAGE_TOKENS)
    fits = tokens.shape == chosen.shape and counts.shape == (heads, units, 4)
    if not fits or len(ranks) > 5 or not all(0 <= rank < 4 for rank in ranks):
        raise KernelError(
            f"cut_blocks: chosen {chosen.shape}, ranks {list(ranks)}, tokens {tokens.shape}, "
            f"counts {counts.shape}"
        )


def check_pack_zones(keys: Array, values: Array, firsts: Array, heads: Array, units: Array) -> None:
    of_blocks = firsts.shape == heads.shape and units.shape == (len(firsts), 4)
    if keys.shape[2] % 16 or keys.shape != values.shape or not of_blocks:
        raise KernelError(
            f"pack_zones: keys {keys.shape}, values {values.shape}, firsts {firsts.shape}, "
            f"heads {heads.shape}, units {units.shape}"
        )


def check_unpack_zones(units: Array, heads: Array, rows: Array, out: Array) -> None:
    of_blocks = heads.shape == rows.shape and units.shape == (len(heads), 4)
    if out.shape[2] % 16 or not of_blocks:
        raise KernelError(
            f"unpack_zones: units {units.shape}, heads {heads.shape}, rows {rows.shape}, "
            f"out {out.shape}"
        )


def check_zone_window(window: int | None) -> None:
    if window is not None:
        raise KernelError(
            f"attend: a sliding window of {window} needs the order of tokens, which zones do not "
            "keep; formats without a budget have it"
        )


def check_attend(q: Array, view: PageView, out: Array) -> None:
    heads, dim = q.shape
    if dim != view.head_dim or heads % view.num_kv_heads or out.shape != q.shape:
        raise KernelError(f"attend: q {q.shape}, out {out.shape}, {_cache(view)}")


def check_enter(qkv: Array, view: PageView) -> None:
    rows, dim = qkv.shape
    heads = rows - 2 * view.num_kv_heads
    if dim != view.head_dim or heads <= 0 or heads % view.num_kv_heads:
        raise KernelError(f"enter: qkv {qkv.shape}, {_cache(view)}")


def token_of(extent: Extent) -> Token:
    """The token of a decode step."""
    if extent.token is None:
        raise KernelError("no token was published")
    return extent.token


def _cache(view: PageView) -> str:
    return f"cache ({view.num_kv_heads} heads, {view.head_dim})"
