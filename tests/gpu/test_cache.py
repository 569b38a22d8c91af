"""A store on a GPU is the CPU's store, byte for byte, and its attention agrees."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvrt.backends import view
from kvrt.backends.cpu import CpuOps
from kvrt.backends.cuda import CudaOps
from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry, KVStore
from tests.helpers.attention_oracle import attended
from tests.helpers.codecs import rotary_for
from tests.helpers.stores import attend, extend, new_store, random_tokens

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=128)

FORMATS = [
    "f16", "bf16", "f8", "f8e5m2", "q8_0", "q4_0", "kivi2", "kivi4", "kvrt4", "kvrt3", "kvrt2",
    "innerq", "innerq-small", "innerq-hybrid", "kvquant2", "kvquant3:1%", "kvquant4:1%",
    "k=int8:channel:g64:pre,v=int8:token:g32:sym,sink=3",
    "k=int3:token:g32:sym:page,v=int3:channel:g32:hybrid,window=100",
    "k=nuq3:1%:qnorm:pre,v=nuq2:1%",
]  # fmt: skip

READABLE = [
    *FORMATS, "k=f16:pre,v=f16,sink=70", "k=bf16:pre,v=bf16", "k=e4m3:pre,v=e4m3,sink=4",
    "k=int4:channel:g32:pre,v=int4:token:g32,sink=5,window=64",
    "k=int3:channel:g64:hybrid:pre,v=int3:token:g64", "k=int2:token:g32:pre,v=int2:token:g32",
    "k=nuq2:1%,v=nuq3:1%", "k=nuq4:1%:qnorm:page,v=int4:token:g64", "k=int2:channel:g32,v=nuq4:1%",
]  # fmt: skip

BIASED = [
    "f8", "kivi4", "kvrt4", "kvrt3", "kvrt2", "innerq", "kvquant2:1%", "kvquant4",
    "k=int4:channel:g64:had:page,v=int4:token:g64:had,sink=70",
    "k=int4:channel:g32:pre,v=int4:token:g32,sink=5",
]  # fmt: skip

# Queries, keys and weights of the attention kernel are halves, and so are rotated keys.
TOLERANCE = 1.5e-3


def rows_for(tokens: int, geometry: Geometry = GEOMETRY) -> np.ndarray:
    """Keys and values (2, layers, tokens, kv_heads, head_dim) f32, some of which stand out."""
    rng = np.random.default_rng(tokens)
    shape = (2, geometry.num_layers, tokens, geometry.num_kv_heads, geometry.head_dim)
    rows = rng.normal(0, 1, shape) * rng.uniform(0.2, 4, (1, 1, 1, *shape[3:]))
    rows[rng.random(shape) < 0.002] *= 40
    rows[:, :, 40:60, 0, :5] = 0
    return rows.astype(np.float32)


def fill(
    ops: Ops, spec: str, rows: np.ndarray, *cuts: int, bias: np.ndarray | None = None
) -> KVStore:
    """A store that got its tokens in parts; bias (kv_heads, head_dim) f32 is that of its keys."""
    extras: dict[str, Any] = {}
    if bias is not None:
        extras["key_bias"] = [ops.to_device(bias) for _ in range(GEOMETRY.num_layers)]
    store = new_store(ops, spec, replace(GEOMETRY, key_bias=bias is not None), **extras)
    edges = [0, *cuts, rows.shape[2]]
    for start, end in itertools.pairwise(edges):
        with store.extending(end - start):
            for layer in range(GEOMETRY.num_layers):
                k, v = (ops.to_device(side[layer, start:end].copy()) for side in rows)
                store.extend(layer, k, v)
    return store


def contents(store: KVStore) -> list[np.ndarray]:
    """All bytes that hold a token."""
    parts, host = store.parts(), store.ops.to_host
    arrays: list[Any] = [*parts.slabs, *parts.layers.state_arrays]
    arrays += [rows[:, : parts.sinks] for rows in parts.layers.sink_arrays]
    arrays += [rows[:, parts.tail_slots] for rows in parts.layers.tail_arrays]
    return [np.ascontiguousarray(host(array)).reshape(-1).view(np.uint8) for array in arrays]


@pytest.mark.parametrize("spec", FORMATS)
def test_bytes_are_the_cpus(ops: CpuOps, cuda: CudaOps, spec: str) -> None:
    rows = rows_for(500)
    mine, other = (contents(fill(backend, spec, rows, 130, 301)) for backend in (cuda, ops))
    assert len(mine) == len(other)
    differing = [i for i, (a, b) in enumerate(zip(mine, other)) if not np.array_equal(a, b)]
    assert not differing


@pytest.mark.parametrize("spec", FORMATS)
def test_reads_what_the_cpu_reads(ops: CpuOps, cuda: CudaOps, spec: str) -> None:
    rows = rows_for(333)
    found = []
    for backend in (cuda, ops):
        store = fill(backend, spec, rows)
        shape = (len(store), GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
        keys, values = backend.empty(shape), backend.empty(shape)
        store.read(1, keys, values)
        found.append([backend.to_host(keys), backend.to_host(values)])
    for mine, other in zip(*found):
        np.testing.assert_allclose(mine, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("group", [1, 4, 9])
@pytest.mark.parametrize("spec", READABLE)
def test_attention_agrees_with_float64(
    ops: CpuOps, cuda: CudaOps, spec: str, group: int, window: int | None
) -> None:
    rows = rows_for(900)
    heads, dim = group * GEOMETRY.num_kv_heads, GEOMETRY.head_dim
    q = np.random.default_rng(1).normal(0, 0.2, (heads, dim)).astype(np.float32)
    on_cpu, found = fill(ops, spec, rows), []
    for backend, store in ((cuda, fill(cuda, spec, rows)), (ops, on_cpu)):
        out = backend.empty((heads, dim))
        backend.attend(backend.to_device(q), store.view(1), dim**-0.5, window, out)
        found.append(backend.to_host(out).astype(np.float64))
    mine, other = found
    keys, values = (ops.empty((len(on_cpu), GEOMETRY.num_kv_heads, dim)) for _ in "kv")
    on_cpu.read(1, keys, values)
    # Keys before RoPE: scale, minimum, cosine, sine, and the two products of the rotation.
    roundings = 6 if on_cpu.view(1).settings[view.FORM] == view.PRE else 1
    exact = attended(q, np.asarray(keys), np.asarray(values), window, roundings)
    assert np.linalg.norm(other - exact.out) < 1e-5 * np.linalg.norm(exact.out)
    # What is rounded beside a group's range, not beside its own size, is in the second part.
    assert np.linalg.norm(mine - exact.out) < 1.6 * exact.loss + 2**-11 * np.linalg.norm(exact.out)


@pytest.mark.parametrize("group", [2, 8])
@pytest.mark.parametrize(
    "spec", ["f16", "f8", "q8_0", "kvrt4", "k=e4m3:pre,v=e4m3", "kvquant3", "kvquant4:1%"]
)
def test_attention_of_warps_that_take_several_pages(
    ops: CpuOps, cuda: CudaOps, spec: str, group: int
) -> None:
    # So many heads that a warp has three pages: what it fetches goes round in its memory.
    geometry = Geometry(1, 66, 128)
    tokens = random_tokens(3100, geometry)
    heads = group * geometry.num_kv_heads
    q = np.random.default_rng(4).normal(0, 0.2, (heads, 128)).astype(np.float32)
    found = []
    for backend in (cuda, ops):
        store = new_store(backend, spec, geometry)
        extend(store, tokens)
        found.append(attend(store, q, scale=128**-0.5).astype(np.float64))
    mine, other = found
    assert np.linalg.norm(mine - other) < TOLERANCE * np.linalg.norm(other)


@pytest.mark.parametrize("spec", BIASED)
def test_attention_agrees_where_keys_have_a_bias(ops: CpuOps, cuda: CudaOps, spec: str) -> None:
    tokens, heads, dim = 700, 4 * GEOMETRY.num_kv_heads, GEOMETRY.head_dim
    rng = np.random.default_rng(3)
    rows = rng.normal(0, 1, (2, 2, tokens, GEOMETRY.num_kv_heads, dim)).astype(np.float32)
    bias = rng.normal(0, 60, (GEOMETRY.num_kv_heads, dim)).astype(np.float32)
    turned = np.repeat(bias[None], tokens, axis=0)  # (tokens, kv_heads, dim)
    rows[0] += rotary_for(GEOMETRY).rotate(turned, np.arange(tokens))
    q = rng.normal(0, 1, (heads, dim)).astype(np.float32)
    found = []
    for backend in (cuda, ops):
        store = fill(backend, spec, rows, bias=bias)
        out = backend.empty((heads, dim))
        backend.attend(backend.to_device(q), store.view(1), dim**-0.5, None, out)
        found.append(backend.to_host(out).astype(np.float64))
    mine, other = found
    assert np.linalg.norm(mine - other) < TOLERANCE * np.linalg.norm(other)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("history", [0, 200])
def test_prefill_attention_agrees(
    ops: CpuOps, cuda: CudaOps, history: int, window: int | None
) -> None:
    rng = np.random.default_rng(2)
    n, kv_heads, dim = 300, 2, 128
    q = rng.normal(0, 1, (n, 6, dim)).astype(np.float32)
    keys, values = rng.normal(0, 1, (2, history + n, kv_heads, dim)).astype(np.float32)
    found = []
    for backend in (cuda, ops):
        out = backend.to_device(q.copy())
        k, v = backend.to_device(keys), backend.to_device(values)
        backend.attend_causal(out, k, v, dim**-0.5, window)
        found.append(backend.to_host(out).astype(np.float64))
    mine, other = found
    assert np.linalg.norm(mine - other) < TOLERANCE * np.linalg.norm(other)
