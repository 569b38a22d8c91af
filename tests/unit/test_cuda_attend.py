"""The decode attention kernel, emulated, against the CPU's over the same store."""

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from tests.emulator import COMPILER
from tests.helpers.emulated_attend import TOLERANCE, WARPS, attend_both, error, make_store

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

FORMATS = [
    "f16", "bf16", "f8", "f8e5m2", "q8_0", "q4_0", "kivi2", "kivi4", "kvrt4", "kvrt3", "kvrt2",
    "innerq", "innerq-small", "innerq-hybrid",
    "k=int8:channel:g64,v=int8:token:g64", "k=int8:token:g32,v=int8:channel:g32",
    "k=int3:token:g32:sym,v=int3:channel:g64:hybrid",
    "k=int3:channel:g32:hybrid,v=int3:token:g32:sym",
    "k=int4:channel:g64:sym:page,v=int4:token:g64:hybrid,sink=70",
    "k=int2:channel:g32:had:page,v=int2:token:g32,sink=4",
    "k=e4m3:page,v=int4:token:g64,window=100",
    "k=int4:token:g32:norm:page:had,v=int3:channel:g32:had,sink=4,window=60",
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
    ("k=int3:channel:g32:page,v=int3:token:g32", 96), ("k=int4:token:g32,v=int4:token:g32", 96),
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


@pytest.mark.parametrize("tokens", [448, 460, 468, 484, 500, 512])
def test_exact_units_of_the_warp_that_has_a_page_less(ops: CpuOps, tokens: int) -> None:
    assert WARPS == 4
    store = make_store(ops, "q4_0", kv_heads=1, dim=64, tokens=tokens)
    assert store.view(0).extent.pages in (7, 8)
    assert error(*attend_both(ops, store, group=2, splits=1)) < TOLERANCE


@pytest.mark.parametrize("window", [1, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize("spec", ["f16", "kvrt4"])
def test_windows(ops: CpuOps, spec: str, window: int) -> None:
    store = make_store(ops, spec, kv_heads=1, dim=64, tokens=500)
    assert error(*attend_both(ops, store, group=2, window=window)) < TOLERANCE


@pytest.mark.parametrize("spec", ["kivi2", "f16"])
def test_a_maximum_that_grows(ops: CpuOps, spec: str) -> None:
    # One warp has many pages: weights of later ones are beyond a half until it is raised.
    store = make_store(ops, spec, kv_heads=1, dim=64, tokens=900)
    assert error(*attend_both(ops, store, group=4, splits=1, spread=20)) < TOLERANCE


def test_a_nan_shows(ops: CpuOps) -> None:
    store = make_store(ops, "kvrt4", kv_heads=1, dim=64, tokens=100)
    row = ops.to_device(np.full((1, 1, 64), np.nan, np.float32))
    with store.extending(0):
        store.extend(0, row[:0], row[:0])
    ops.append(store.view(0), row, row, 5)
    got, _ = attend_both(ops, store, group=2)
    assert np.isnan(got).all()
