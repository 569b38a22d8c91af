"""Integers with a scale, and a minimum, for each group: against NumPy bit for bit."""

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.kvstore import Geometry
from tests.helpers import intq_ref
from tests.helpers.pages import SealedPage, sealed_page
from tests.helpers.stores import Tokens, extend, new_store, read
from tests.helpers.tiles import TILES, gaussian

BITS = (2, 3, 4, 8)
MODES = ("asym", "sym", "hybrid")
AXES = ("channel", "token")
HEADS = 2


def check_page(page: SealedPage, is_value: bool, tile: np.ndarray, axis: str) -> np.ndarray:
    """A side of a page is what NumPy makes of the tile (64, heads, dim); what it means, f32."""
    codec = page.layout.codecs[is_value]
    numbers = []
    for head in range(HEADS):
        want = intq_ref.encode(tile[:, head], codec.bits, axis, codec.group, codec.mode)  # type: ignore[attr-defined]
        np.testing.assert_array_equal(page.planes(is_value, head), want.planes)
        np.testing.assert_array_equal(page.codes(is_value, head), want.codes)
        numbers.append(want.numbers)
    return np.stack(numbers, axis=1)  # (64, heads, dim)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("axis", "group", "dim"), [
    ("channel", 32, 80), ("channel", 64, 112), ("token", 32, 96), ("token", 64, 64),
    ("token", 128, 128),
])  # fmt: skip
def test_codes_scales_and_minima_are_those_of_numpy(
    ops: CpuOps, axis: str, group: int, dim: int, bits: int, mode: str, tile: str
) -> None:
    keys, values = TILES[tile](HEADS, dim, 1), TILES[tile](HEADS, dim, 2)
    side = f"int{bits}:{axis}:g{group}:{mode}"
    page = sealed_page(ops, f"k={side},v={side}", keys, values)
    store = new_store(ops, f"k={side},v={side}", Geometry(1, HEADS, dim))
    extend(store, Tokens(keys[None], values[None]))
    for is_value, (inside, got) in enumerate(zip((keys, values), read(store), strict=True)):
        want = check_page(page, bool(is_value), inside, axis)
        np.testing.assert_array_equal(got[0], want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis", AXES)
def test_norm_divides_keys_by_a_factor_of_their_channel(ops: CpuOps, axis: str, mode: str) -> None:
    """The square root of the largest number of the first page, kept for pages to come."""
    first, second = gaussian(HEADS, 64, 1), 4 * gaussian(HEADS, 64, 2)
    first[:, :, 5] = 0  # a channel that has no size yet: its factor is 1
    keys = np.concatenate([first, second])  # (128, heads, dim)
    spec = f"k=int4:{axis}:g32:{mode}:norm,v=f32"
    store = new_store(ops, spec, Geometry(1, HEADS, 64))
    extend(store, Tokens(keys[None], keys[None]))
    factors = np.sqrt(np.abs(first).max(axis=0))  # (heads, dim) f32
    factors[:, 5] = 1
    np.testing.assert_array_equal(store._layers.state_arrays[0].reshape(HEADS, 64), factors)
    got = read(store).keys[0]
    for start in (0, 64):
        scaled = keys[start : start + 64] / factors
        for head in range(HEADS):
            want = intq_ref.encode(scaled[:, head], 4, axis, 32, mode).numbers
            np.testing.assert_array_equal(got[start : start + 64, head], want * factors[head])


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_a_range_of_nothing_has_scale_0_and_the_exact_number(
    ops: CpuOps, bits: int, axis: str
) -> None:
    rng = np.random.default_rng(0)
    shape = (1, HEADS, 64) if axis == "channel" else (64, HEADS, 1)
    numbers = np.broadcast_to(rng.standard_normal(shape).astype("f2").astype("f4"), (64, HEADS, 64))
    side = f"int{bits}:{axis}:g32"
    page = sealed_page(ops, f"k={side},v={side}", numbers.copy(), numbers.copy())
    for is_value in (False, True):
        for head in range(HEADS):
            scales, minima = page.planes(is_value, head)
            assert not scales.any() and not page.codes(is_value, head).any()
            decoded = minima.view(np.float16).astype(np.float32)  # (outer, groups)
            want = numbers[0, head] if axis == "channel" else numbers[:, head, 0]
            np.testing.assert_array_equal(decoded, np.stack([want, want], axis=1))


def test_hybrid_takes_the_better_arm(ops: CpuOps) -> None:
    """Groups far from zero take the minimum, centred ones the symmetric levels."""
    tile = gaussian(1, 64)
    tile[:, :, 32:] = tile[:, :, 32:] / 8 + 10
    page = sealed_page(ops, "k=int3:channel:g32:hybrid,v=f16", tile, tile)
    scales = page.planes(False)[0]  # (channels, groups)
    assert (scales[32:] >> 15 == 1).all()
    assert (scales[:32] >> 15 == 0).mean() > 0.9
