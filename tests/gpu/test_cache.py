"""A store on a GPU is the CPU's store, byte for byte, and its attention agrees."""

import itertools
from typing import Any

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.backends.cuda import CudaOps
from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry, KVStore
from tests.helpers.stores import new_store

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=128)

FORMATS = [
    "f16", "bf16", "f8", "f8e5m2", "q8_0", "q4_0", "kivi2", "kivi4", "kvrt4", "kvrt3", "kvrt2",
    "innerq", "innerq-small", "innerq-hybrid", "kvquant2", "kvquant3:1%", "kvquant4:1%",
    "k=int8:channel:g64:pre,v=int8:token:g32:sym,sink=3",
    "k=int3:token:g32:sym:page,v=int3:channel:g32:hybrid,window=100",
    "k=nuq3:1%:qnorm:pre,v=nuq2:1%",
]  # fmt: skip

READABLE = [spec for spec in FORMATS if "nuq" not in spec and "kvquant" not in spec]
READABLE = [spec for spec in READABLE if ":pre" not in spec]

# Queries, keys and weights of the attention kernel are halves.
TOLERANCE = 1.5e-3


def rows_for(tokens: int, geometry: Geometry = GEOMETRY) -> np.ndarray:
    """Keys and values (2, layers, tokens, kv_heads, head_dim) f32, some of which stand out."""
    rng = np.random.default_rng(tokens)
    shape = (2, geometry.num_layers, tokens, geometry.num_kv_heads, geometry.head_dim)
    rows = rng.normal(0, 1, shape) * rng.uniform(0.2, 4, (1, 1, 1, *shape[3:]))
    rows[rng.random(shape) < 0.002] *= 40
    rows[:, :, 40:60, 0, :5] = 0
    return rows.astype(np.float32)


def fill(ops: Ops, spec: str, rows: np.ndarray, *cuts: int) -> KVStore:
    """A store that got its tokens in parts."""
    store = new_store(ops, spec, GEOMETRY)
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
def test_attention_agrees(
    ops: CpuOps, cuda: CudaOps, spec: str, group: int, window: int | None
) -> None:
    rows = rows_for(900)
    heads, dim = group * GEOMETRY.num_kv_heads, GEOMETRY.head_dim
    # Scores of up to tens: what a half loses of a query counts times the score.
    q = np.random.default_rng(1).normal(0, 0.2, (heads, dim)).astype(np.float32)
    found = []
    for backend in (cuda, ops):
        store = fill(backend, spec, rows)
        out = backend.empty((heads, dim))
        backend.attend(backend.to_device(q), store.view(1), dim**-0.5, window, out)
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
