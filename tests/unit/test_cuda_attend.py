"""The decode attention kernel, emulated, against the CPU's over the same store."""

import numpy as np
import pytest

from kvrt.backends.attend_variant import QUERY_HEADS, attend_defines, shared_bytes
from kvrt.backends.cpu import CpuOps
from kvrt.kvstore import Geometry, KVSpec, KVStore
from kvrt.kvstore.rotary import Rotary
from tests.emulator import COMPILER, EmulatedModule

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

WARPS, STAGES = 4, 2

# Queries, keys and weights of the kernel are halves (11 bits); sums are f32.
TOLERANCE = 1.5e-3


def make_store(ops: CpuOps, spec: str, kv_heads: int, dim: int, tokens: int) -> KVStore:
    rng = np.random.default_rng(tokens + dim)
    rotary = Rotary(10000.0 ** (-np.arange(dim // 2) / (dim // 2)))
    store = KVStore(
        Geometry(1, kv_heads, dim), KVSpec.parse(spec), ops, max(tokens, 1), rotary=rotary
    )
    with store.extending(tokens):
        k, v = (ops.to_device(make_rows(rng, tokens, kv_heads, dim)) for _ in range(2))
        store.extend(0, k, v)
    return store


def make_rows(rng: np.random.Generator, tokens: int, heads: int, dim: int) -> np.ndarray:
    rows = rng.normal(0, 1, (tokens, heads, dim))  # (tokens, heads, dim)
    rows *= rng.uniform(0.2, 4, (1, heads, dim))  # channels differ
    return rows.astype(np.float32)


def attend_both(
    ops: CpuOps, store: KVStore, group: int, window: int | None = None, splits: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """What the emulated kernel and the CPU's give: (heads, dim) f32 each."""
    view = store.view(0)
    heads, dim = group * view.num_kv_heads, view.head_dim
    rng = np.random.default_rng(heads)
    q = ops.to_device(rng.normal(0, 1, (heads, dim)).astype(np.float32))
    scale = dim**-0.5
    expected = ops.empty((heads, dim))
    ops.attend(q, view, scale, window, expected)

    defines = attend_defines(view.settings)
    module = EmulatedModule("attend.cu", {**defines, "WARPS": WARPS, "STAGES": STAGES})
    extent = view.extent
    lengths = np.array(
        [
            extent.sinks, extent.pages, extent.tail_tokens, extent.tail_slot,
            extent.table_address, extent.bases_address,
        ]
    )  # fmt: skip
    rows = view.num_kv_heads * -(-group // QUERY_HEADS)
    partials = np.full((rows, splits, QUERY_HEADS, dim + 2), np.nan, np.float32)
    arrivals = np.zeros(rows, np.int32)
    out = np.full((heads, dim), np.nan, np.float32)
    module.launch(
        "attend", (splits, rows), (WARPS * 32,), q, view.settings, lengths,
        scale * np.log2(np.e), group, window or 0, partials, arrivals, out,
        shared=shared_bytes(defines, WARPS, STAGES, splits),
    )  # fmt: skip
    assert not arrivals.any()
    return out, expected


def error(got: np.ndarray, expected: np.ndarray) -> float:
    wide = expected.astype(np.float64)
    return float(np.linalg.norm(got - wide) / np.linalg.norm(wide))


FORMATS = [
    "f16", "bf16", "f8", "f8e5m2", "q8_0", "q4_0", "kivi2", "kivi4", "kvrt4", "kvrt3", "kvrt2",
    "innerq", "innerq-small", "innerq-hybrid",
    "k=int8:channel:g64,v=int8:token:g64", "k=int8:token:g32,v=int8:channel:g32",
    "k=int3:token:g32:sym,v=int3:channel:g64:hybrid",
    "k=int3:channel:g32:hybrid,v=int3:token:g32:sym",
    "k=int4:channel:g64:sym:page,v=int4:token:g64:hybrid,sink=70",
    "k=int2:channel:g32:had:page,v=int2:token:g32,sink=4",
    "k=e4m3:page,v=int4:token:g64,window=100",
]  # fmt: skip


@pytest.mark.parametrize("spec", FORMATS)
def test_agrees_with_the_cpu(ops: CpuOps, spec: str) -> None:
    store = make_store(ops, spec, kv_heads=2, dim=64, tokens=411)
    assert error(*attend_both(ops, store, group=3)) < TOLERANCE


SIZES = [
    ("f16", 80), ("f16", 128), ("f16", 256), ("bf16", 192),
    ("kvrt2", 128), ("kvrt2", 256), ("kvrt4", 192), ("f8", 256),
    ("k=int3:channel:g64:had,v=e4m3:had", 80),
    ("k=int2:channel:g64:had:page,v=int3:channel:g64", 112),
    ("k=int3:channel:g32:page,v=int3:token:g32", 96),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "dim"), SIZES)
def test_head_dims(ops: CpuOps, spec: str, dim: int) -> None:
    store = make_store(ops, spec, kv_heads=1, dim=dim, tokens=230)
    assert error(*attend_both(ops, store, group=4)) < TOLERANCE


@pytest.mark.parametrize("group", [1, 2, 7, 8, 9, 16])
def test_groups(ops: CpuOps, group: int) -> None:
    store = make_store(ops, "kvrt4", kv_heads=2, dim=64, tokens=400)
    assert error(*attend_both(ops, store, group)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 64, 65, 195, 196, 197, 700])
@pytest.mark.parametrize("splits", [1, 5, 40])
def test_lengths(ops: CpuOps, tokens: int, splits: int) -> None:
    store = make_store(ops, "kvrt4", kv_heads=1, dim=64, tokens=tokens)
    assert error(*attend_both(ops, store, group=2, splits=splits)) < TOLERANCE


@pytest.mark.parametrize("window", [1, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize("spec", ["f16", "kvrt4"])
def test_windows(ops: CpuOps, spec: str, window: int) -> None:
    store = make_store(ops, spec, kv_heads=1, dim=64, tokens=500)
    assert error(*attend_both(ops, store, group=2, window=window)) < TOLERANCE


def test_a_nan_shows(ops: CpuOps) -> None:
    store = make_store(ops, "kvrt4", kv_heads=1, dim=64, tokens=100)
    row = ops.to_device(np.full((1, 1, 64), np.nan, np.float32))
    with store.extending(0):
        store.extend(0, row[:0], row[:0])
    ops.append(store.view(0), row, row, 5)
    got, _ = attend_both(ops, store, group=2)
    assert np.isnan(got).all()
