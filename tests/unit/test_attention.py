"""Attention over a store, and causal attention, against float64.

The oracle sees keys and values as the store keeps them, so only float32 rounding is left.
"""

import math

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.errors import KernelError
from kvrt.kvstore import Geometry, KVSpec, KVStore
from tests.helpers import stores
from tests.helpers.compare import assert_close
from tests.helpers.refs import attention
from tests.helpers.stores import (
    Tokens,
    append,
    exact_dtypes,
    extend,
    new_store,
    queries,
    random_tokens,
    stored,
)
from tests.helpers.tolerances import tolerance

GROUPS = [1, 2, 3, 4, 5, 7, 8, 16]
HEAD_DIMS = [64, 80, 96, 112, 128, 256]
LENGTHS = [1, 31, 63, 64, 65, 127, 128, 129, 300, 1000]
EXACT_F32 = tolerance("attend", "f32")


def attend(store: KVStore, q: np.ndarray, window: int | None) -> np.ndarray:
    """The last layer's attention of one query (heads, dim)."""
    layer = store.geometry.num_layers - 1
    return stores.attend(store, q, layer, window, 1 / math.sqrt(q.shape[-1]))


def expected(
    spec: str, tokens: Tokens, q: np.ndarray, window: int | None, layer: int = -1
) -> np.ndarray:
    """q (n, heads, dim) over the tokens as the format keeps them, in f64."""
    k, v = exact_dtypes(KVSpec.parse(spec))
    keys = stored(tokens.keys[layer], k).astype(np.float64)
    values = stored(tokens.values[layer], v).astype(np.float64)
    return attention(q.astype(np.float64), keys, values, window)[0]


def check(
    ops: CpuOps,
    spec: str,
    length: int,
    *,
    group: int = 2,
    kv_heads: int = 2,
    dim: int = 16,
    window: int | None = None,
) -> None:
    geometry = Geometry(1, kv_heads, dim)
    tokens = random_tokens(length, geometry)
    store = new_store(ops, spec, geometry)
    if length > 1:
        extend(store, tokens.part(0, length - 1))
    # As decode does it: the new token is in the tail but does not count yet.
    store.append(
        0,
        ops.to_device(tokens.keys[0, -1:].copy()),
        ops.to_device(tokens.values[0, -1:].copy()),
    )
    q = queries(1, group * kv_heads, dim)
    got = attend(store, q[0], window)
    assert_close(got, expected(spec, tokens, q, window)[0], EXACT_F32, f"{spec} {length}")


@pytest.fixture(scope="module", params=[1, 2, 5])
def threaded(request: pytest.FixtureRequest) -> CpuOps:
    """Backends of 1, 2 and 5 threads."""
    return CpuOps(request.param)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("length", [1, 65, 300])
def test_every_group_size(ops: CpuOps, group: int, length: int) -> None:
    check(ops, "f16", length, group=group, kv_heads=3)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("length", [1, 64, 129])
def test_every_head_dim(ops: CpuOps, dim: int, length: int) -> None:
    check(ops, "bf16", length, dim=dim)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_on_every_number_of_threads(threaded: CpuOps, length: int) -> None:
    check(threaded, "f16", length)
    check(threaded, "k=f16,v=f16,sink=4,window=100", length, kv_heads=1, group=3)


@pytest.mark.parametrize("window", [1, 5, 64, 100, 2000])
@pytest.mark.parametrize("length", LENGTHS)
def test_sliding_window(ops: CpuOps, window: int, length: int) -> None:
    check(ops, "f16", length, window=window)


@pytest.mark.parametrize("window", [None, 1, 70, 200])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 69, 104, 167, 168, 169, 301])
@pytest.mark.parametrize(
    "spec",
    [
        "k=f16,v=f16,sink=4,window=100",
        "k=f32,v=f32,sink=130",
        "k=bf16,v=f32,sink=64,window=1",
        "k=f16,v=bf16,window=128",
    ],
)
def test_sinks_and_windows_of_the_format(
    ops: CpuOps, spec: str, length: int, window: int | None
) -> None:
    check(ops, spec, length, window=window)


@pytest.mark.parametrize("k", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("v", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("length", [40, 200])
def test_keys_and_values_of_different_types(ops: CpuOps, k: str, v: str, length: int) -> None:
    check(ops, f"k={k},v={v}", length)


def test_every_layer_has_its_own_tokens(ops: CpuOps) -> None:
    geometry = Geometry(3, 2, 16)
    tokens = random_tokens(150, geometry)
    store = new_store(ops, "k=f16,v=f16,sink=3", geometry)
    extend(store, tokens)
    q = queries(1, 4, 16)
    for layer in range(3):
        out = ops.empty((4, 16))
        ops.attend(ops.to_device(q[0]), store.view(layer), 0.25, None, out)
        assert_close(out, expected("f16", tokens, q, None, layer)[0], EXACT_F32, f"layer {layer}")


@pytest.mark.parametrize("factor", [1e2, 1e4])
@pytest.mark.parametrize("length", [30, 300])
def test_scores_far_beyond_float16(ops: CpuOps, factor: float, length: int) -> None:
    """Scores of 1e5 and more: the softmax is all on one token, and must be on the right one."""
    geometry = Geometry(1, 1, 64)
    tokens = random_tokens(length, geometry)
    tokens.keys[...] *= 100
    store = new_store(ops, "f16", geometry)
    extend(store, tokens)
    q = queries(1, 2, 64) * np.float32(factor)
    keys = stored(tokens.keys[0, :, 0], np.dtype("f2")).astype(np.float64)
    assert np.abs(keys @ q[0].T.astype(np.float64) / 8).max() > 65504 * factor / 1e4
    want = expected("f16", tokens, q, None)
    assert_close(attend(store, q[0], None), want[0], EXACT_F32)
    everything = ops.to_device(np.concatenate([q] * length))
    ops.attend_causal(
        everything, ops.to_device(tokens.keys[0]), ops.to_device(tokens.values[0]), 0.125, None
    )
    exact = expected("f32", tokens, q, None)
    assert_close(everything[-1], exact[0], EXACT_F32)


@pytest.mark.parametrize("position", [0, 10, 70, 140])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize(
    ("spec", "bad"),
    # In f16 an infinity saturates, see test_robust_numbers.
    [("f16", np.nan), ("f16", -np.nan), ("bf16", np.nan), ("bf16", np.inf), ("f32", np.inf)],
)
def test_a_broken_token_is_never_hidden(
    ops: CpuOps, spec: str, bad: float, position: int, side: str
) -> None:
    """In sinks, pages and tail; an overflow to infinity must not become a plausible answer."""
    geometry = Geometry(1, 1, 8)
    tokens = random_tokens(150, geometry)
    getattr(tokens, side)[0, position, 0, 3] = bad
    store = new_store(ops, f"k={spec},v={spec},sink=4", geometry)
    extend(store, tokens)
    q = np.abs(queries(1, 1, 8))
    out = attend(store, q[0], None)
    assert not np.isfinite(out).all()
    hidden = attend(store, q[0], 150 - position - 1)  # a window that excludes the token
    assert np.isfinite(hidden).all() and np.any(hidden)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("count", "length"), [(1, 1), (5, 5), (3, 40), (70, 70)])
def test_causal(ops: CpuOps, group: int, count: int, length: int) -> None:
    check_causal(ops, count, length, group=group, kv_heads=2, dim=16)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_causal_every_head_dim(ops: CpuOps, dim: int) -> None:
    check_causal(ops, 9, 33, group=2, kv_heads=2, dim=dim)


@pytest.mark.parametrize("window", [None, 1, 5, 64, 100, 2000])
@pytest.mark.parametrize(("count", "length"), [(1, 300), (300, 300), (7, 129), (257, 257)])
def test_causal_windows(threaded: CpuOps, window: int | None, count: int, length: int) -> None:
    check_causal(threaded, count, length, group=3, kv_heads=1, dim=16, window=window)


def check_causal(
    ops: CpuOps,
    count: int,
    length: int,
    *,
    group: int,
    kv_heads: int,
    dim: int,
    window: int | None = None,
) -> None:
    tokens = random_tokens(length, Geometry(1, kv_heads, dim))
    q = queries(count, group * kv_heads, dim)
    out = ops.to_device(q.copy())
    keys, values = ops.to_device(tokens.keys[0]), ops.to_device(tokens.values[0])
    ops.attend_causal(out, keys, values, 1 / math.sqrt(dim), window)
    assert_close(out, expected("f32", tokens, q, window), EXACT_F32)


def test_causal_pieces_give_what_one_call_gives(
    ops: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are made for a limited number of queries at a time."""
    monkeypatch.setattr("kvrt.backends.cpu._SCORE_ELEMENTS", 50)  # 16 queries at a time
    check_causal(ops, 100, 120, group=2, kv_heads=2, dim=16)
    check_causal(ops, 100, 120, group=2, kv_heads=2, dim=16, window=20)


def test_wrong_shapes_are_refused(ops: CpuOps) -> None:
    store = new_store(ops, "f16", Geometry(1, 2, 16))
    append(store, random_tokens(1, store.geometry))
    view = store.view(0)
    for q, out in [((4, 8), (4, 8)), ((3, 16), (3, 16)), ((4, 16), (2, 16)), ((1, 16), (1, 16))]:
        with pytest.raises(KernelError, match="attend: q"):
            ops.attend(ops.empty(q), view, 1.0, None, ops.empty(out))
