"""8-bit floats: every half against ml_dtypes, and the scale that the first page fixes."""

import math

import ml_dtypes
import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.kvstore import Geometry, KVSpec, KVStore, PageLayout
from tests.helpers.pages import SealedPage
from tests.helpers.stores import Tokens, extend, new_store, page_bytes, read
from tests.helpers.tiles import gaussian

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
TOP_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}  # of the largest number
HEADS, DIM = 2, 64


def store_of(ops: CpuOps, name: str, heads: int = HEADS) -> KVStore:
    return new_store(ops, f"k={name},v={name}", Geometry(1, heads, DIM))


def add(store: KVStore, *tiles: np.ndarray) -> None:
    """Pages (64, heads, head_dim) of keys; the values are half of them."""
    for tile in tiles:
        extend(store, Tokens(tile[None], tile[None] / 2))


def pages_of(store: KVStore) -> list[SealedPage]:
    layout = PageLayout.of(store.geometry, store.spec)
    return [SealedPage(layout, data) for data in page_bytes(store)]


def scales_of(store: KVStore) -> np.ndarray:
    """(2 sides, heads) f32."""
    return np.stack([store.ops.to_host(part) for part in store._layers.state_arrays])


def scale_for(name: str, peak: float) -> float:
    """The smallest power of two with twice the peak in range."""
    return 2.0 ** math.ceil(math.log2(2 * peak / LARGEST[name]))


def encoded(name: str, numbers: np.ndarray, scale: float) -> np.ndarray:
    """Codes of finite numbers: ml_dtypes' nearest ones, saturating."""
    inside = np.clip(numbers.astype(np.float64) / scale, -LARGEST[name], LARGEST[name])
    # A power of two divides exactly, so that f32 holds what ml_dtypes rounds.
    codes: np.ndarray = inside.astype(np.float32).astype(DTYPES[name]).view(np.uint8)
    return codes


@pytest.mark.parametrize("exponent", [-12, -3, 0, 2])
@pytest.mark.parametrize("name", DTYPES)
def test_every_half_gets_the_code_of_ml_dtypes(ops: CpuOps, name: str, exponent: int) -> None:
    """Ties to even, subnormals, saturation, no code of an infinity or NaN; NaN becomes 0."""
    scale = 2.0**exponent
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    tiles = halves.reshape(16, 64, 1, DIM)
    first = np.zeros((64, 1, DIM), np.float32)
    first[5, 0, 3] = -LARGEST[name] * scale / 2  # twice this is the largest number
    store = new_store(ops, f"k={name},v={name}", Geometry(1, 1, DIM))
    keys = np.concatenate([first, *tiles])[None]  # (1, 17 * 64, 1, dim)
    extend(store, Tokens(keys, keys))
    assert scales_of(store).tolist() == [[scale], [scale]]
    nan = np.isnan(halves)
    # A tail of halves has no infinities either.
    want = encoded(name, np.clip(halves[~nan], -65504, 65504), scale)
    for is_value in (False, True):
        codes = np.stack([page.codes(is_value) for page in pages_of(store)[1:]]).ravel()
        np.testing.assert_array_equal(codes[~nan], want)
        assert not (codes[nan] & 0x7F).any()
        if LARGEST[name] * scale <= 65504:
            assert (codes & 0x7F).max() == TOP_CODE[name]
        if exponent == 0:  # all of the format lies in the range of halves
            assert len(np.unique(codes)) == 2 * (TOP_CODE[name] + 1)
        got = read(store)[is_value][0, 64:].ravel()  # (65536,) f32
        meant = codes.astype(np.uint8).view(DTYPES[name]).astype(np.float32) * scale
        np.testing.assert_array_equal(got, meant)


@pytest.mark.parametrize("name", DTYPES)
def test_the_scale_of_each_head_leaves_twice_its_peak_in_range(ops: CpuOps, name: str) -> None:
    tile = gaussian(HEADS, DIM, 1)
    tile[:, 1] *= 64
    store = store_of(ops, name)
    add(store, tile)
    peaks = np.abs(tile).max(axis=(0, 2))  # (heads,)
    want = [[scale_for(name, peak / part) for peak in peaks] for part in (1, 2)]
    assert scales_of(store).tolist() == want
    assert want[0][1] >= 32 * want[0][0] and want[0] != want[1]  # heads and sides differ


@pytest.mark.parametrize("exponent", range(-3, 4))
@pytest.mark.parametrize("name", DTYPES)
def test_a_peak_that_just_fits_has_the_smaller_scale(ops: CpuOps, name: str, exponent: int) -> None:
    """The scale does not grow before twice the peak is beyond the largest number."""
    peak = np.float16(LARGEST[name] / 2 * 2.0**exponent / 4)
    tile = np.zeros((64, HEADS, DIM), np.float32)
    tile[63, 0, 63], tile[0, 1, 0] = peak, np.nextafter(peak, np.float16(np.inf))
    store = store_of(ops, name)
    add(store, tile)
    assert scales_of(store)[0].tolist() == [2.0**exponent / 4, 2.0**exponent / 2]


@pytest.mark.parametrize("name", DTYPES)
def test_later_pages_keep_the_scale_and_saturate(ops: CpuOps, name: str) -> None:
    first = gaussian(HEADS, DIM, 1)
    store = store_of(ops, name)
    add(store, first)
    scales = scales_of(store)
    add(store, 2 * first, 1000 * gaussian(HEADS, DIM, 2), first / 64)
    np.testing.assert_array_equal(scales_of(store), scales)
    keys = read(store).keys[0].reshape(4, 64, HEADS, DIM)
    doubled = 2 * first
    far = np.abs(doubled) > 2  # not among the subnormals
    step = 2.0**-4 if name == "e4m3" else 2.0**-3
    # The head-room: twice the first page's peak is not clipped.
    assert (np.abs(keys[1] - doubled)[far] <= np.abs(doubled)[far] * step).all()
    ends = LARGEST[name] * scales[0]  # (heads,)
    assert (np.abs(keys[2]).max(axis=(0, 2)) == ends).all()
    inside = [encoded(name, first[:, head] / 64, float(scales[0, head])) for head in range(HEADS)]
    for head in range(HEADS):
        np.testing.assert_array_equal(pages_of(store)[3].codes(False, head), inside[head])


@pytest.mark.parametrize("name", DTYPES)
def test_a_head_of_zeros_has_the_scale_1(ops: CpuOps, name: str) -> None:
    tile = np.zeros((64, HEADS, DIM), np.float32)
    tile[3, 1, :2] = np.nan, LARGEST[name] / 64
    store = store_of(ops, name)
    add(store, tile)
    assert scales_of(store)[0].tolist() == [1.0, 1 / 32]  # NaN sets no scale
    keys = read(store).keys[0]
    assert not keys[:, 0].any()
    assert keys[3, 1, :2].tolist() == [0.0, LARGEST[name] / 64]


@pytest.mark.parametrize("name", DTYPES)
def test_infinities_on_the_first_page_leave_all_numbers_finite(ops: CpuOps, name: str) -> None:
    tile = gaussian(HEADS, DIM, 1)
    tile[3, 1, :2] = np.inf, -np.inf
    store = store_of(ops, name)
    add(store, tile)
    scales, keys = scales_of(store), read(store).keys[0]
    assert np.isfinite(scales).all() and (scales > 0).all() and np.isfinite(keys).all()
    assert keys[3, 1, 0] == -keys[3, 1, 1] == keys.max() > 0


@pytest.mark.parametrize("name", DTYPES)
def test_errors_are_half_a_step_at_most(ops: CpuOps, name: str) -> None:
    """Half of the last of 3 (2) mantissa bits; among subnormals half of the smallest number."""
    relative, least = (2.0**-4, 2.0**-10) if name == "e4m3" else (2.0**-3, 2.0**-17)
    tile = gaussian(HEADS, DIM, 3)
    store = store_of(ops, name)
    add(store, tile)
    for side, numbers in zip((0, 1), (tile, tile / 2)):
        scale = scales_of(store)[side][:, None]  # (heads, 1)
        error = np.abs(read(store)[side][0] - numbers)
        bound = np.maximum(np.abs(numbers) * relative, least * scale)
        assert (error <= bound).all()
        assert (error / bound).max() > 0.8  # a bound that says something


@pytest.mark.parametrize("name", DTYPES)
def test_the_scale_is_measured_again_once_no_page_is_left(ops: CpuOps, name: str) -> None:
    small, large = gaussian(HEADS, DIM, 1) / 16, gaussian(HEADS, DIM, 2) * 16
    store, fresh = store_of(ops, name), store_of(ops, name)
    add(store, small, small)
    before = scales_of(store)
    store.truncate(64)  # a page is left, and with it its scale
    add(store, large)
    np.testing.assert_array_equal(scales_of(store), before)
    store.truncate(0)
    add(store, large)
    add(fresh, large)
    np.testing.assert_array_equal(scales_of(store), scales_of(fresh))
    assert (scales_of(store) > before).all()
    assert page_bytes(store) == page_bytes(fresh)


@pytest.mark.parametrize("name", DTYPES)
def test_a_page_is_a_byte_a_number(name: str) -> None:
    layout = PageLayout.of(Geometry(1, HEADS, DIM), KVSpec.parse(f"k={name},v={name}"))
    assert layout.page_bytes == 2 * HEADS * 64 * DIM
