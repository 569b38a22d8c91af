"""Keys before RoPE, a bias left out of them, non-uniform integers: attention, emulated."""

from dataclasses import replace

import numpy as np
import pytest

from kvrt.backends.attend_variant import attend_defines
from kvrt.backends.cpu import CpuOps
from kvrt.calibration import NuqTables
from kvrt.kvstore import Geometry
from kvrt.kvstore.codecs import Nuq
from tests.emulator import COMPILER
from tests.helpers.codecs import FittedTables, rotary_for
from tests.helpers.emulated_attend import TOLERANCE, attend_both, error, make_rows, make_store
from tests.helpers.stores import Tokens, extend, new_store

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

BEFORE_ROPE = [
    "k=f16:pre,v=f16,sink=70", "k=bf16:pre,v=bf16,sink=70", "k=e4m3:pre,v=int4:token:g64,sink=4",
    "k=e5m2:pre,v=e5m2",
    "k=int8:channel:g64:pre,v=int8:token:g32:sym,sink=3",
    "k=int4:channel:g32:pre,v=int3:token:g32,sink=5,window=64",
    "k=int3:channel:g64:hybrid:pre,v=int2:token:g64",
    "k=int2:channel:g32:sym:pre,v=int2:token:g32",
    "k=int2:token:g64:hybrid:pre,v=int4:channel:g64:hybrid,window=70",
    "k=int3:token:g32:sym:pre,v=int4:token:g64", "k=q4_0:pre,v=q8_0", "k=int8:token:g32:pre,v=e4m3",
]  # fmt: skip


@pytest.mark.parametrize("spec", BEFORE_ROPE)
def test_keys_before_rope(ops: CpuOps, spec: str) -> None:
    store = make_store(ops, spec, kv_heads=2, dim=64, tokens=411)
    assert error(*attend_both(ops, store, group=3)) < TOLERANCE


@pytest.mark.parametrize(
    "spec",
    ["kvrt4", "kvrt2", "k=int4:token:g64:had:page,v=int4:token:g64:had,sink=70",
     "k=int4:channel:g64:pre,v=int4:token:g64,sink=4,window=64", "k=e4m3:page,v=e4m3", "innerq"],
)  # fmt: skip
@pytest.mark.parametrize("bias", [1.0, 100.0])
def test_keys_without_their_bias(ops: CpuOps, spec: str, bias: float) -> None:
    store = make_store(ops, spec, kv_heads=2, dim=64, tokens=333, bias=bias)
    # Scores of hundreds from the bias.
    assert error(*attend_both(ops, store, group=3)) < TOLERANCE


@pytest.mark.parametrize("spec", ["kvrt4", "kvquant3:1%", "k=int4:channel:g64:page,v=e4m3"])
def test_the_amplitude_of_yarn(ops: CpuOps, spec: str) -> None:
    store = make_store(ops, spec, kv_heads=1, dim=64, tokens=250, bias=3, amplitude=1.3)
    assert error(*attend_both(ops, store, group=2, spread=0.3)) < TOLERANCE


SLOW = [
    ("k=int4:channel:g64:pre,v=int4:token:g64,sink=4", 0.0),
    ("k=int2:channel:g32:sym:pre,v=int2:token:g32", 0.0), ("kvquant3:1%", 3.0),
    ("k=int3:channel:g64:hybrid:pre,v=int4:token:g64", 0.0), ("k=e4m3:pre,v=e4m3", 0.0),
    ("k=int4:token:g32:pre,v=int4:token:g64", 0.0),
    ("k=int4:channel:g32:pre,v=int4:token:g32", 60.0),
]  # fmt: skip


@pytest.mark.parametrize("group", [3, 5])
@pytest.mark.parametrize(("spec", "bias"), SLOW)
def test_channels_that_turn_slowly(ops: CpuOps, spec: str, bias: float, group: int) -> None:
    store = make_store(ops, spec, 1, 128, tokens=300, bias=bias, amplitude=1.2, theta=5e5)
    assert attend_defines(store.view(0).settings)["TURNED_TILES"] == 4
    assert error(*attend_both(ops, store, group, spread=0.3)) < TOLERANCE


@pytest.mark.parametrize(("theta", "turned"), [(1e30, 1), (1.0, 4)])
def test_few_channels_turn_or_all(ops: CpuOps, theta: float, turned: int) -> None:
    spec = "k=int3:channel:g64:pre,v=int4:token:g64"
    store = make_store(ops, spec, kv_heads=1, dim=64, tokens=200, theta=theta)
    assert attend_defines(store.view(0).settings)["TURNED_TILES"] == turned
    assert error(*attend_both(ops, store, group=5, spread=0.3)) < TOLERANCE


NON_UNIFORM = [
    "k=nuq4:pre,v=nuq4:1%", "k=nuq2:1%:pre,v=nuq4",
    "kvquant2", "kvquant3", "kvquant4", "kvquant2:1%", "kvquant3:1%", "kvquant4:1%",
    "k=nuq2:1%,v=nuq3:1%", "k=nuq4:1%:qnorm:page,v=int4:token:g64,sink=70",
    "k=int2:channel:g32,v=nuq4:1%,window=100", "k=nuq3,v=nuq2:qnorm", "k=nuq2,v=nuq4",
]  # fmt: skip


@pytest.mark.parametrize("spec", NON_UNIFORM)
def test_non_uniform_integers(ops: CpuOps, spec: str) -> None:
    store = make_store(ops, spec, kv_heads=2, dim=64, tokens=411, outliers=0.005)
    looked_up, expected = attend_both(ops, store, group=3, spread=0.3)
    assert error(looked_up, expected) < TOLERANCE
    # Where a device has no memory for the table.
    permuted, _ = attend_both(ops, store, group=3, spread=0.3, lookup=False)
    np.testing.assert_array_equal(permuted, looked_up)


class WideTables(FittedTables):
    """Keys of a thousand."""

    def tables(self, layer: int, is_value: bool, codec: Nuq, rope: str = "post") -> NuqTables:
        fitted = super().tables(layer, is_value, codec, rope)
        return fitted if fitted.half is None else replace(fitted, half=fitted.half * 400)


def test_keys_of_a_thousand(ops: CpuOps) -> None:
    # A query is up to 2^8, and times half of what a channel's keys span it must be a half still.
    wide = WideTables(Geometry(1, 1, 64))
    store = make_store(ops, "k=nuq4,v=nuq4", 1, 64, tokens=200, calibration=wide)
    assert error(*attend_both(ops, store, group=2, spread=0.01)) < TOLERANCE


SIZES = [
    ("k=f16:pre,v=f16", 80, 0), ("k=int3:channel:g64:pre,v=int3:token:g64", 128, 3),
    ("k=int2:token:g32:pre,v=int2:token:g32", 96, 0), ("kvrt4", 256, 3), ("kvquant3:1%", 80, 0),
    ("kvquant4:1%", 112, 3), ("kvquant2:1%", 128, 3), ("k=nuq3:1%,v=nuq2:1%", 256, 0),
    ("k=int4:channel:g64:pre,v=int4:token:g64", 256, 0), ("k=e4m3:pre,v=e4m3", 192, 0),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "dim", "bias"), SIZES)
def test_head_dims(ops: CpuOps, spec: str, dim: int, bias: float) -> None:
    outliers = 0.003 if "nuq" in spec or "kvquant" in spec else 0.0
    store = make_store(ops, spec, 1, dim, tokens=230, bias=bias, outliers=outliers)
    assert error(*attend_both(ops, store, group=4, spread=0.3)) < TOLERANCE


@pytest.mark.parametrize("group", [1, 8, 9])
@pytest.mark.parametrize("spec", ["kvquant2:1%", "k=int2:channel:g32:pre,v=int2:token:g32,sink=4"])
def test_groups(ops: CpuOps, spec: str, group: int) -> None:
    store = make_store(ops, spec, kv_heads=3, dim=32, tokens=300, bias=2)
    assert error(*attend_both(ops, store, group, spread=0.3)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 4, 5, 64, 65, 200])
@pytest.mark.parametrize("window", [None, 63])
@pytest.mark.parametrize("spec", ["kvquant3:1%", "k=int4:channel:g32:pre,v=e4m3,sink=66"])
def test_lengths(ops: CpuOps, spec: str, tokens: int, window: int | None) -> None:
    store = make_store(ops, spec, kv_heads=1, dim=32, tokens=tokens, bias=2)
    assert error(*attend_both(ops, store, group=2, window=window, spread=0.3)) < TOLERANCE


@pytest.mark.parametrize("spec", ["kvquant2:1%", "k=nuq4:1%,v=nuq4:1%"])
def test_outliers_of_thousands(ops: CpuOps, spec: str) -> None:
    # Times the query they are beyond what a half holds.
    store = make_store(ops, spec, kv_heads=2, dim=64, tokens=200, outliers=0.003, size=250)
    assert error(*attend_both(ops, store, group=2, spread=0.01)) < TOLERANCE


def test_outliers_whose_rotation_is_beyond_a_half(ops: CpuOps) -> None:
    geometry = Geometry(1, 1, 64)
    store = new_store(ops, "kvquant2:1%", geometry, 200, rotary=rotary_for(geometry))
    rows = make_rows(np.random.default_rng(0), 200, 1, 64)
    rows[70:90:2, 0, [3, 35]] = 60000  # both of a RoPE pair
    rows[71:91:2, 0, [3, 35]] = -60000
    extend(store, Tokens(rows[None], rows[None]))
    # A score that is infinite would make everything NaN.
    for found in attend_both(ops, store, group=2, spread=1e-2):
        assert np.isfinite(found).all()


def test_floats_that_outgrew_the_first_page(ops: CpuOps) -> None:
    geometry = Geometry(1, 1, 64)
    store = new_store(ops, "k=e5m2:pre,v=e5m2", geometry, 200, rotary=rotary_for(geometry))
    rows = make_rows(np.random.default_rng(0), 200, 1, 64)
    rows[100:, :, 32:] = rows[100:, :, :32] = 8 * rows[100:, :, :32]  # both of a RoPE pair
    extend(store, Tokens(rows[None], rows[None]))
    assert error(*attend_both(ops, store, group=2, spread=0.02)) < TOLERANCE


@pytest.mark.parametrize("kv_heads", [1, 16])
def test_outliers_of_few_and_of_many_heads(ops: CpuOps, kv_heads: int) -> None:
    # A lane keeps its slots in registers, or reads them again for each group of channels.
    store = make_store(ops, "kvquant2:1%", kv_heads, 112, tokens=129, outliers=0.005)
    assert error(*attend_both(ops, store, group=1, spread=0.3)) < TOLERANCE


BY_COPY_ENGINE = ["kvrt4", "kvquant2", "kvquant2:1%", "k=nuq4:1%,v=nuq3:1%"]


@pytest.mark.parametrize("window", [None, 130])
@pytest.mark.parametrize("spec", BY_COPY_ENGINE)
def test_pages_by_the_copy_engine(ops: CpuOps, spec: str, window: int | None) -> None:
    """The bits that copies by the lanes give. A warp has several pages: stages are used again."""
    store = make_store(ops, spec, kv_heads=1, dim=64, tokens=800, outliers=0.005)
    found = [
        attend_both(ops, store, 3, window, splits=1, spread=0.3, bulk=bulk)[0]
        for bulk in (True, False)
    ]
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0]).all()
