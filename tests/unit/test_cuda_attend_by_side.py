"""Pages that come by side, where few warps would have whole ones: attention, emulated."""

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from tests.emulator import COMPILER
from tests.helpers.emulated_attend import TOLERANCE, attend_both, error, make_store

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

FORMATS = [
    ("f8", 0.0, True, 3), ("f8", 3.0, True, 2), ("f8e5m2", 0.0, False, 2),
    ("q8_0,sink=70", 0.0, True, 3), ("k=e4m3:pre,v=e4m3,sink=4", 0.0, True, 3),
    ("k=e4m3:page,v=int4:token:g64,sink=4", 0.0, False, 3),
    ("k=int8:channel:g64:pre,v=int8:token:g32:sym", 0.0, True, 2),
    ("k=int4:channel:g64,v=int8:channel:g64", 0.0, True, 3), ("k=nuq4:1%,v=nuq3", 0.0, True, 3),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "bias", "bulk", "stages"), FORMATS)
def test_same_bits_as_whole_pages(
    ops: CpuOps, spec: str, bias: float, bulk: bool, stages: int
) -> None:
    """A warp has several pages: stages are used again."""
    store = make_store(ops, spec, kv_heads=1, dim=64, tokens=800, bias=bias)
    for window in (None, 130):
        whole, _ = attend_both(ops, store, 3, window, splits=1, spread=0.3)
        found, _ = attend_both(
            ops, store, 3, window, splits=1, spread=0.3, bulk=bulk, by_side=True, stages=stages
        )
        np.testing.assert_array_equal(found, whole)
        assert np.isfinite(found).all()


@pytest.mark.parametrize("tokens", [1, 65, 129, 200, 330])
@pytest.mark.parametrize("spec", ["f8", "k=e4m3:pre,v=int8:token:g64,sink=66"])
def test_lengths(ops: CpuOps, spec: str, tokens: int) -> None:
    store = make_store(ops, spec, kv_heads=2, dim=64, tokens=tokens)
    for window in (None, 63):
        whole, _ = attend_both(ops, store, 2, window, splits=1, spread=0.3)
        found, _ = attend_both(
            ops, store, 2, window, splits=1, spread=0.3, bulk=True, by_side=True, stages=3
        )
        np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("bulk", [False, True])
def test_units_of_which_nothing_is_seen(ops: CpuOps, bulk: bool) -> None:
    # A warp goes on from one at the tail's beginning to one at its end.
    store = make_store(ops, "f8,window=64", kv_heads=1, dim=64, tokens=330)
    got, expected = attend_both(ops, store, 2, window=20, splits=1, bulk=bulk, by_side=True)
    assert error(got, expected) < TOLERANCE
