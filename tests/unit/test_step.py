"""A decode step's token enters the cache as one that is appended or prefilled does."""

from typing import Any

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.backends.ops import Ops
from kvrt.errors import ContextFullError, KernelError
from kvrt.kvstore import Geometry, KVStore
from tests.emulator import COMPILER
from tests.helpers.codecs import rotary_for
from tests.helpers.emulated_device import emulated_ops
from tests.helpers.stores import contents, new_store, page_bytes

HEADS, GEOMETRY = 4, Geometry(2, 2, 32)
BIASED = Geometry(2, 2, 32, key_bias=True)
TOKENS = 90

SPECS = (
    "f16",
    "f16,sink=3,window=10",
    "k=bf16:page,v=bf16,window=1",
    "k=f16:pre,v=f16,sink=5,window=1",
    "k=int8:token:g32:had,v=int8:token:g32:had,sink=3,window=10",
    "k=int4:channel:g64:had,v=int4:token:g32:had,sink=64",
    "k=int4:channel:g64:page,v=int4:token:g32:had,sink=2,window=1",
    "k=int4:channel:g64:pre,v=int4:token:g32,window=20",
)


@pytest.fixture(params=["cpu", "cuda"])
def backend(request: pytest.FixtureRequest, ops: CpuOps) -> Ops:
    if request.param == "cpu":
        return ops
    if COMPILER is None:
        pytest.skip("the emulator needs g++")
    return emulated_ops()


def tokens(count: int, geometry: Geometry) -> np.ndarray:
    """q, k, v of each token in each layer: (count, layers, heads + 2 * kv_heads, head_dim) f32."""
    heads = HEADS + 2 * geometry.num_kv_heads
    rng = np.random.default_rng(7)
    shape = (count, geometry.num_layers, heads, geometry.head_dim)
    return rng.normal(0, 2, shape).astype(np.float32)


def step(store: KVStore, token: np.ndarray, norms: Any = None) -> list[np.ndarray]:
    """Add a token (layers, heads + 2 * kv_heads, head_dim); its queries as they are rotated."""
    position, rotary = len(store), rotary_for(store.geometry)
    angles = rotary.table(np.array([position]), rotary.amplitude)[0]
    queries = []
    with store.stepping(position, angles):
        for layer, row in enumerate(token):
            qkv = store.ops.to_device(row.copy())
            store.ops.enter(store.view(layer), qkv, norms)
            queries.append(np.array(store.ops.to_host(qkv))[:HEADS])
    return queries


def appended(ops: Ops, spec: str, geometry: Geometry, all_tokens: np.ndarray, **more: Any) -> Any:
    """A store that was given rotated keys, and the rotated queries (n, layers, heads, head_dim)."""
    store, rotary = new_store(ops, spec, geometry, **more), rotary_for(geometry)
    kv_heads, queries = geometry.num_kv_heads, []
    for position, token in enumerate(all_tokens):
        table = rotary.table(np.array([position]), rotary.amplitude)
        cos, sin = (ops.to_device(np.ascontiguousarray(table[:, i])) for i in range(2))
        for layer, row in enumerate(token):
            turned = ops.to_device(row[None, : HEADS + kv_heads].copy())
            ops.rope(turned, cos, sin)
            queries.append(np.array(ops.to_host(turned))[0, :HEADS])
            k, v = turned[:, HEADS:].copy(), ops.to_device(row[None, -kv_heads:].copy())
            store.append(layer, k, v)
        store.advance()
    return store, np.array(queries).reshape(len(all_tokens), -1, HEADS, geometry.head_dim)


def biases(ops: Ops) -> dict[str, Any]:
    rng, shape = np.random.default_rng(1), (BIASED.num_kv_heads, BIASED.head_dim)
    return {"key_bias": [ops.to_device(rng.normal(0, 9, shape).astype(np.float32)) for _ in "ab"]}


@pytest.mark.parametrize("geometry", [GEOMETRY, BIASED], ids=["plain", "bias"])
@pytest.mark.parametrize("spec", SPECS)
def test_as_if_appended(backend: Ops, spec: str, geometry: Geometry) -> None:
    given = tokens(TOKENS, geometry)
    more = biases(backend) if geometry.key_bias else {}
    theirs, wanted = appended(backend, spec, geometry, given, **more)
    ours = new_store(backend, spec, geometry, **more)
    found = np.array([step(ours, token) for token in given])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
    assert len(ours) == len(theirs) == TOKENS
    assert page_bytes(ours) == page_bytes(theirs)
    assert contents(ours) == contents(theirs)


@pytest.mark.parametrize("spec", ["f16", "k=f16:pre,v=f16"])
def test_norms_come_before_the_rotation(backend: Ops, spec: str) -> None:
    given = tokens(3, GEOMETRY)
    rng = np.random.default_rng(3)
    gains = [rng.normal(1, 0.2, GEOMETRY.head_dim).astype(np.float32) for _ in "qk"]
    kv_heads = GEOMETRY.num_kv_heads

    def normed(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        wide = x.astype(np.float64)
        return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * gain

    norms = tuple((backend.to_device(gain), 1e-5) for gain in gains)
    ours, by_hand = (new_store(backend, spec, GEOMETRY) for _ in range(2))
    for token in given:
        expected = token.copy()
        expected[:, :HEADS] = normed(token[:, :HEADS], gains[0])
        expected[:, HEADS:-kv_heads] = normed(token[:, HEADS:-kv_heads], gains[1])
        for one, other in zip(step(ours, token, norms), step(by_hand, expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    sides: list[list[np.ndarray]] = [[], []]
    for found, store in zip(sides, (ours, by_hand), strict=True):
        k, v = (backend.empty((3, kv_heads, GEOMETRY.head_dim)) for _ in range(2))
        store.read(0, k, v)
        found += [np.array(backend.to_host(rows)) for rows in (k, v)]
    np.testing.assert_allclose(sides[0][0], sides[1][0], rtol=0, atol=4e-3)
    np.testing.assert_array_equal(sides[0][1], sides[1][1])


def test_an_interrupted_step_leaves_the_store(backend: Ops) -> None:
    given = tokens(70, GEOMETRY)
    store, other = (
        new_store(backend, "k=int4:channel:g64,v=int4:token:g32,window=1", GEOMETRY)
        for _ in range(2)
    )
    for index, token in enumerate(given):
        step(other, token)
        if index == 40:
            with pytest.raises(KeyboardInterrupt), store.stepping(5, np.zeros((2, 16), "f4")):
                raise KeyboardInterrupt
            assert len(store) == 40
        step(store, token)
    assert contents(store) == contents(other)


def test_refused(backend: Ops) -> None:
    store = new_store(backend, "f16", GEOMETRY, max_tokens=1)
    view, angles = store.view(0), np.zeros((2, 16), np.float32)
    with pytest.raises(KernelError):
        backend.enter(view, backend.empty((8, 16)), None)
    step(store, tokens(1, GEOMETRY)[0])
    with pytest.raises(ContextFullError), store.stepping(0, angles):
        pytest.fail("there is no room")
    for shape in ((8, 16), (4, 32), (7, 32)):
        with pytest.raises(KernelError, match="enter"):
            backend.enter(view, backend.empty(shape), None)


@pytest.mark.parametrize(
    ("logits", "wanted"),
    [([1.0, 3.0, 3.0], 1), ([np.nan, 5.0, np.nan], 0), ([2.0, np.nan, np.inf], 1)],
)
def test_best(backend: Ops, logits: list[float], wanted: int) -> None:
    row = np.array(logits, np.float32)
    index, value = backend.best(backend.to_device(row))
    assert index == wanted == row.argmax()
    np.testing.assert_equal(value, float(row[wanted]))
