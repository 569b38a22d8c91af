"""The prefill kernel of cuda_src/prefill.cu, emulated, against attention in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.emulator import COMPILER, EmulatedModule

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

ROWS = 128


@cache
def module(dim: int, keys: int = 0) -> EmulatedModule:
    options = {"HEAD_DIM": dim, **({"PREFILL_KEYS": keys} if keys else {})}
    return EmulatedModule("prefill.cu", options)


def launch_sizes(dim: int, keys: int = 0) -> tuple[int, int, int]:
    """Keys of a tile, threads and shared bytes, as the kernel's file states them."""
    two_bands = dim < 176
    tile_keys = keys or (48 if dim == 64 else 32 if two_bands and dim > 128 else 64)
    pitch = 2 * dim + 16
    tiles, queries = 4 * tile_keys * pitch, ROWS * pitch
    if two_bands:
        return tile_keys, 128, tiles + queries
    return tile_keys, 256, max(tiles, queries)


def prefill(
    query: Any, keys: Any, values: Any, *, window: int = 0, scale: float, tile_keys: int = 0
) -> Any:
    """Run the kernel on (n, heads, dim), (m, kv heads, dim) twice; any strides of tokens, heads."""
    n, heads, dim = query.shape
    out = np.full((n + 3, heads * dim + 8), np.nan, np.float32)
    _, threads, shared = launch_sizes(dim, tile_keys)
    strides = [
        query.strides[0], keys.strides[0], keys.strides[1], values.strides[0], values.strides[1]
    ]  # fmt: skip
    module(dim, tile_keys).launch(
        "prefill",
        (heads, -(-n // ROWS)),
        (threads,),
        query, keys, values, out, n, keys.shape[0], heads // keys.shape[1], window, scale,
        *[stride // 2 for stride in strides],
        heads * dim + 8,
        shared=shared,
    )  # fmt: skip
    assert np.isnan(out[n:]).all() and np.isnan(out[:, heads * dim :]).all()
    return out[:n, : heads * dim].reshape(n, heads, dim)


def reference(query: Any, keys: Any, values: Any, *, window: int = 0, scale: float) -> Any:
    (n, heads, dim), (m, kv_heads, _) = query.shape, keys.shape
    behind = (m - n + np.arange(n))[:, None] - np.arange(m)
    visible = (behind >= 0) & (behind < (window or m))
    out = np.empty((n, heads, dim))
    for head in range(heads):
        k, v = (x[:, head // (heads // kv_heads)].astype(np.float64) for x in (keys, values))
        scores = np.where(visible, query[:, head].astype(np.float64) @ k.T * scale, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v
    return out


def inputs(n: int, m: int, heads: int, group: int, dim: int, spread: float = 1.0) -> Any:
    rng = np.random.default_rng(n * 1000 + m)
    query = rng.standard_normal((n, heads, dim)) * spread
    keys, values = rng.standard_normal((2, m, heads // group, dim))
    return tuple(x.astype(np.float16) for x in (query, keys, values))


def error(out: Any, expected: Any) -> float:
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def check(n: int, m: int, heads: int, group: int, dim: int, **options: Any) -> None:
    arrays = inputs(n, m, heads, group, dim, options.pop("spread", 1.0))
    scale = dim**-0.5
    out = prefill(*arrays, scale=scale, **options)
    options.pop("tile_keys", None)
    assert error(out, reference(*arrays, scale=scale, **options)) < 6e-4


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("n", [1, 17, 64, 130])
def test_sizes(dim: int, n: int) -> None:
    check(n, n, 2, 2, dim)


@pytest.mark.parametrize("dim", [96, 112, 144, 160, 176, 192, 208, 224, 240])
def test_other_dims(dim: int) -> None:
    check(19, 70, 1, 1, dim)


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize(("n", "m"), [(1, 200), (17, 65), (64, 128), (130, 193)])
def test_history(dim: int, n: int, m: int) -> None:
    check(n, m, 1, 1, dim)


@pytest.mark.parametrize("window", [1, 2, 5, 64, 79, 100, 1000, 2**31 - 1])
@pytest.mark.parametrize(("n", "m"), [(130, 130), (33, 230)])
def test_window(window: int, n: int, m: int) -> None:
    check(n, m, 1, 1, 64, window=window)


@pytest.mark.parametrize("window", [1, 100])
def test_window_of_one_band(window: int) -> None:
    check(140, 170, 1, 1, 256, window=window)


@pytest.mark.parametrize(("heads", "group"), [(3, 1), (6, 3), (4, 4)])
def test_groups(heads: int, group: int) -> None:
    check(20, 40, heads, group, 80)


def test_smaller_tiles() -> None:
    check(130, 150, 1, 1, 128, tile_keys=32)


def test_scores_far_apart() -> None:
    """References move again and again, and weights are as sharp as f16 allows."""
    check(70, 200, 2, 1, 64, spread=12.0)


def test_rising_scores() -> None:
    """Every key passes the ones before by much: old sums shrink to nothing."""
    query, keys, values = inputs(30, 200, 1, 1, 64)
    query[:] = 1
    keys[:] = np.linspace(-30, 30, 200)[:, None, None]
    out = prefill(query, keys, values, scale=1.0)
    assert error(out, reference(query, keys, values, scale=1.0)) < 6e-4


def test_slices() -> None:
    """Tokens and heads far apart, as in fused projections and in caches by head."""
    n, m, dim = 21, 85, 128
    query, keys, values = inputs(n, m, 4, 2, dim)
    fused = np.full((n, 8, dim), np.nan, np.float16)
    fused[:, 2:6] = query
    by_head = np.full((2, m + 3, dim), np.nan, np.float16)
    by_head[:, :m] = keys.transpose(1, 0, 2)
    wide = np.full((m, 3, dim + 8), np.nan, np.float16)
    wide[:, 1:, 8:] = values
    out = prefill(
        fused[:, 2:6], by_head[:, :m].transpose(1, 0, 2), wide[:, 1:, 8:], scale=dim**-0.5
    )
    assert error(out, reference(query, keys, values, scale=dim**-0.5)) < 6e-4


def test_nan_shows() -> None:
    query, keys, values = inputs(40, 40, 1, 1, 64)
    query[3, 0, 5] = keys[20, 0, 7] = values[30, 0, 9] = np.nan
    out = prefill(query, keys, values, scale=0.125)
    rows = np.isnan(out[:, 0]).all(axis=1)
    assert rows[3] and rows[20:].all() and not rows[4:20].any() and not rows[:3].any()
    only_value = inputs(40, 40, 1, 1, 64)
    only_value[2][30, 0, 9] = np.nan
    out = prefill(*only_value, scale=0.125)
    assert np.isnan(out[30:, 0, 9]).all()
    assert np.isfinite(np.delete(out, 9, axis=2)).all()
