"""Non-uniform integers against NumPy: levels, thresholds, and outliers to the bit."""

from typing import Any

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.calibration import Calibration
from kvrt.errors import CodecError
from kvrt.kvstore import Geometry, KVSpec, KVStore, PageLayout
from kvrt.kvstore.codecs import Nuq
from kvrt.kvstore.codecs.nuq import UNUSED
from tests.helpers import fragments
from tests.helpers.calibrations import calibration_by_hand
from tests.helpers.pages import SealedPage
from tests.helpers.stores import Tokens, extend, fill, new_store, page_bytes, random_tokens, read
from tests.helpers.tiles import TILES, gaussian

BITS = (2, 3, 4)
CASES = [(2, (2, 32)), (3, (3, 64)), (4, (4, 128))]  # bits, (KV heads, head_dim)


def store_of(
    ops: CpuOps, side: str, geometry: Geometry, calibration: Calibration | None = None
) -> KVStore:
    found = calibration_by_hand(geometry) if calibration is None else calibration
    return new_store(ops, f"k={side},v={side}", geometry, calibration=found)


def page_of(
    ops: CpuOps,
    side: str,
    keys: np.ndarray,
    values: np.ndarray,
    calibration: Calibration | None = None,
) -> tuple[SealedPage, Tokens]:
    """The page of 64 tokens, keys and values (64, heads, head_dim), and what it means."""
    store = store_of(ops, side, Geometry(1, *keys.shape[1:]), calibration)
    extend(store, Tokens(keys[None], values[None]))
    return pages_of(store)[0], read(store)


def pages_of(store: KVStore) -> list[SealedPage]:
    layout = PageLayout.of(store.geometry, store.spec)
    return [SealedPage(layout, data) for data in page_bytes(store)]


def nearest(places: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Codes of the nearest levels; argmin gives the lower one of two."""
    far = np.abs(places[..., None].astype(np.float64) - levels.astype(np.float64))
    codes: np.ndarray = far.argmin(axis=-1)
    return codes


def places_of(x: np.ndarray, centre: Any, half: Any) -> np.ndarray:
    """(x - centre) / half in f32; 0 where half is 0."""
    safe = np.where(half > 0, half, np.float32(1))
    return np.where(half > 0, (x - centre) / safe, np.float32(0)).astype(np.float32)


def key_slots(page: SealedPage, head: int) -> np.ndarray:
    """(slots, 2) u16: value and index."""
    codec = page.layout.k
    assert isinstance(codec, Nuq)
    count = codec.key_slots(page.layout.head_dim)
    return np.frombuffer(page.region("k_meta", head), np.uint16)[: 2 * count].reshape(-1, 2)


def value_parts(page: SealedPage) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Centres and halves (64,) f32 by token; slots (64 tokens, high and low, n, 2) u16."""
    layout, codec = page.layout, page.layout.v
    assert isinstance(codec, Nuq)
    start = layout.num_kv_heads * layout.run_bytes + layout.shared_regions[1].offset
    words = np.frombuffer(page.data[start : start + layout.shared_regions[1].nbytes], np.uint16)
    planes = words[:128].reshape(2, 64)
    in_order = np.empty_like(planes)
    in_order[:, fragments.column_order(64, True)] = planes
    centre, half = in_order.view(np.float16).astype(np.float32)
    return centre, half, words[128:].reshape(64, 2, -1, 2)


def half_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


def kept_keys(x: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """Slots (count, 2) u16 for the keys (64, dim) of a head: the farthest outside, by index."""
    sizes = np.abs(places).ravel()
    outside = np.flatnonzero(sizes > 1)
    chosen = np.sort(outside[np.argsort(-sizes[outside], kind="stable")][:count])
    slots = np.zeros((count, 2), np.uint16)
    slots[:, 1] = UNUSED
    slots[: len(chosen), 0] = half_bits(x.ravel()[chosen])
    slots[: len(chosen), 1] = chosen
    return slots


def split_values(
    values: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of values (64, heads, dim): the largest and the smallest `count` of each token (indices, 64 x
    count each), and the thresholds behind them."""
    flat = values.reshape(64, -1)  # (64, heads * dim)
    down = np.argsort(-flat, axis=1, kind="stable")
    up = np.argsort(flat, axis=1, kind="stable")
    token = np.arange(64)
    return down[:, :count], up[:, :count], flat[token, down[:, count]], flat[token, up[:, count]]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("options", ["", ":1%", ":1%:qnorm"])
@pytest.mark.parametrize(("bits", "shape"), CASES)
def test_pages_are_those_of_numpy(
    ops: CpuOps, bits: int, shape: tuple[int, int], options: str, tile: str
) -> None:
    (heads, dim), codec = shape, Nuq(bits, "1%" in options, "qnorm" in options)
    keys, values = TILES[tile](heads, dim, 1), TILES[tile](heads, dim, 2)
    calibration = calibration_by_hand(Geometry(1, heads, dim))
    page, got = page_of(ops, f"nuq{bits}{options}", keys, values, calibration)

    fitted = calibration.tables(0, False, codec)
    assert fitted.centre is not None and fitted.half is not None
    for head in range(heads):
        centre, half = fitted.centre[head], fitted.half[head]
        places = places_of(keys[:, head], centre, half)
        codes = nearest(places, fitted.levels)
        np.testing.assert_array_equal(page.codes(False, head), codes)
        slots = kept_keys(keys[:, head], places, codec.key_slots(dim))
        np.testing.assert_array_equal(key_slots(page, head), slots)
        want = centre + half * fitted.read_levels[codes].astype(np.float64)
        used = slots[slots[:, 1] != UNUSED]
        want.ravel()[used[:, 1]] = used[:, 0].copy().view(np.float16)
        # One or two roundings of f32.
        np.testing.assert_allclose(got.keys[0, :, head], want, rtol=0, atol=2.0**-22 * 4)

    fitted = calibration.tables(0, True, codec)
    most, least, high, low = split_values(values, codec.value_slots(heads, dim))
    centre = ((high + low) * np.float32(0.5)).astype(np.float16).astype(np.float32)  # (64,)
    half = ((high - low) * np.float32(0.5)).astype(np.float16).astype(np.float32)
    got_centre, got_half, slots = value_parts(page)
    np.testing.assert_array_equal(got_centre, centre)
    np.testing.assert_array_equal(got_half, half)
    flat = values.reshape(64, -1)
    for end, indices in enumerate((most, least)):
        np.testing.assert_array_equal(slots[:, end, :, 1], indices)
        numbers = np.take_along_axis(flat, indices, 1)
        np.testing.assert_array_equal(
            slots[:, end, :, 0].copy().view(np.float16).astype(np.float32), numbers
        )
    places = places_of(values, centre[:, None, None], half[:, None, None])
    codes = nearest(places, fitted.levels)  # (64, heads, dim)
    for head in range(heads):
        np.testing.assert_array_equal(page.codes(True, head), codes[:, head])
    want = centre[:, None, None] + half[:, None, None] * fitted.read_levels[codes].astype("f8")
    for indices in (most, least):
        np.put_along_axis(want.reshape(64, -1), indices, np.take_along_axis(flat, indices, 1), 1)
    room = 2.0**-22 * (np.abs(centre) + half)[:, None, None]
    assert (np.abs(got.values[0] - want) <= room).all()


@pytest.mark.parametrize("bits", BITS)
def test_a_tie_takes_the_lower_code(ops: CpuOps, bits: int) -> None:
    """Numbers that are exactly on a boundary, of keys with a half that is no power of two."""
    geometry = Geometry(1, 1, 32)
    half = calibration_by_hand(geometry, k__post__0pct__low=np.full((1, 1, 32), -2.0),
                               k__post__0pct__high=np.full((1, 1, 32), 2.0)).tables(
        0, False, Nuq(bits)).half  # fmt: skip
    assert half is not None
    place = np.float32(1) / half[0, 0]  # where a key of 1 is
    levels = (np.arange(2**bits) - 2 ** (bits - 1)) * 2.0 * place.astype(np.float64)
    calibration = calibration_by_hand(
        geometry,
        k__post__0pct__low=np.full((1, 1, 32), -2.0),
        k__post__0pct__high=np.full((1, 1, 32), 2.0),
        **{f"k__post__0pct__{bits}__levels": levels[None]},
        **{f"v__0pct__{bits}__levels": (np.arange(2**bits) / 2 ** (bits - 1) - 1)[None]},
    )
    # A token of values from -4 to 4 has centre 0 and half 4, and its boundaries at odd steps.
    keys = np.empty((64, 1, 32), np.float32)
    keys[...] = np.resize([1.0, -1.0, np.nextafter(np.float16(1), np.float16(2)), 0.999], 32)
    step = 4 / 2 ** (bits - 1)
    values = np.empty_like(keys)
    values[...] = np.resize([-4.0, 4.0, step / 2, -step / 2, step * 0.51, 0.0], 32)
    page, _ = page_of(ops, f"nuq{bits}", keys, values, calibration)
    middle = 2 ** (bits - 1)  # the code of level 0
    assert page.codes(False)[0, :4].tolist() == [middle, middle - 1, middle + 1, middle]
    want = [0, 2**bits - 1, middle, middle - 1, middle + 1, middle]
    assert page.codes(True)[0, :6].tolist() == want


@pytest.mark.parametrize("bits", BITS)
def test_thresholds_of_values_are_a_tokens_own_over_all_heads(ops: CpuOps, bits: int) -> None:
    values = gaussian(2, 32, 1) / 4
    values[10, 1, 7], values[10, 0, 9] = 6.0, -2.0  # a head each
    page, _ = page_of(ops, f"nuq{bits}", values, values)
    centre, half, slots = value_parts(page)
    assert (centre[10], half[10]) == (2.0, 4.0)
    assert half[11] == np.float16(np.ptp(values[11]) / 2) < 1
    assert slots.size == 0  # without 1% none is kept apart


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("extra", [-3, 0, 1, 40])
def test_of_too_many_keys_the_farthest_are_kept_exactly(ops: CpuOps, bits: int, extra: int) -> None:
    """Farthest by channel: a wide channel's larger number may be nearer to its thresholds."""
    geometry, side = Geometry(1, 2, 32), f"nuq{bits}:1%"
    wide = np.full((1, 2, 32), 2.0)
    wide[:, :, ::2] = 200.0
    calibration = calibration_by_hand(geometry, k__post__1pct__low=-wide, k__post__1pct__high=wide)
    count = Nuq(bits, outliers=True).key_slots(32)
    assert count == 21  # 1 % of 2,048, rounded up
    keys = gaussian(2, 32, 1) / 8
    rng = np.random.default_rng(bits)
    at = rng.choice(64 * 32, count + extra, replace=False)
    times = 2 + rng.permutation(len(at)) / 8  # how far outside, all different
    signs = rng.choice([-1.0, 1.0], len(at))
    numbers = (wide[0, 0][at % 32] * times * signs).astype(np.float16)
    keys[at // 32, 1, at % 32] = numbers  # head 0 has none
    page, got = page_of(ops, side, keys, keys, calibration)
    kept = np.sort(at[np.argsort(-times)[:count]])
    slots = key_slots(page, 1)
    assert slots[: len(kept), 1].tolist() == kept.tolist()
    assert (slots[len(kept) :] == [0, UNUSED]).all()
    assert (key_slots(page, 0) == [0, UNUSED]).all()
    read_back = got.keys[0, :, 1].ravel()
    np.testing.assert_array_equal(read_back[kept], keys[:, 1].ravel()[kept])
    lost = np.setdiff1d(at, kept)  # they saturate
    assert len(lost) == max(extra, 0)
    assert (np.abs(read_back[lost]) <= wide[0, 0][lost % 32] * 1.01).all()


@pytest.mark.parametrize("bits", BITS)
def test_equally_far_keys_are_kept_by_index(ops: CpuOps, bits: int) -> None:
    wide = np.full((1, 1, 32), 2.0)
    calibration = calibration_by_hand(
        Geometry(1, 1, 32), k__post__1pct__low=-wide, k__post__1pct__high=wide
    )
    keys = np.full((64, 1, 32), 8.0, np.float32)
    keys[5, 0, 3] = -9.0
    page, _ = page_of(ops, f"nuq{bits}:1%", keys, keys, calibration)
    assert key_slots(page, 0)[:, 1].tolist() == [*range(20), 5 * 32 + 3]


@pytest.mark.parametrize(
    ("heads", "dim", "count"), [(1, 16, 1), (2, 32, 1), (3, 128, 2), (4, 128, 3)]
)
def test_values_keep_half_a_percent_on_either_side_one_at_least(
    ops: CpuOps, heads: int, dim: int, count: int
) -> None:
    values = gaussian(heads, dim, 4)
    values[7, heads - 1, 2:5] = 100.0, 90.0, 80.0
    values[7, 0, 6:9] = -100.0, -90.0, -80.0
    page, got = page_of(ops, "nuq2:1%", values, values)
    assert value_parts(page)[2].shape == (64, 2, count, 2)
    numbers = got.values[0, 7]
    assert numbers[heads - 1, 2 : 2 + count].tolist() == [100.0, 90.0, 80.0][:count]
    assert numbers[0, 6 : 6 + count].tolist() == [-100.0, -90.0, -80.0][:count]
    assert numbers[heads - 1, 2 + count :].max() <= ([100.0, 90.0, 80.0, 6.0][count]) * 1.001


@pytest.mark.parametrize("bits", BITS)
def test_qnorm_reads_other_levels_of_the_same_codes(ops: CpuOps, bits: int) -> None:
    tile = gaussian(2, 32, 1)
    plain, without = page_of(ops, f"nuq{bits}", tile, tile)
    corrected, with_qnorm = page_of(ops, f"nuq{bits}:qnorm", tile, tile)
    assert plain.data == corrected.data
    calibration = calibration_by_hand(Geometry(1, 2, 32))
    for is_value in (False, True):
        levels = calibration.tables(0, is_value, Nuq(bits)).levels
        read_levels = calibration.tables(0, is_value, Nuq(bits, qnorm=True)).read_levels
        codes = plain.codes(is_value, 1)
        moved = (with_qnorm[is_value] - without[is_value])[0, :, 1]  # (64, dim)
        want = (read_levels - levels)[codes]  # in units of half, which is positive
        far = np.abs(want) > 0.01
        assert far.any() and (np.sign(moved) == np.sign(want))[far].all()


@pytest.mark.parametrize("form", ["post", "page", "pre"])
def test_keys_use_the_thresholds_of_their_form(form: str) -> None:
    calibration = calibration_by_hand(Geometry(2, 2, 32))
    low = calibration.tensors[f"k.{form}.1%.low"][1].astype(np.float32)
    high = calibration.tensors[f"k.{form}.1%.high"][1].astype(np.float32)
    tables = calibration.tables(1, False, Nuq(3, outliers=True), form)  # type: ignore[arg-type]
    assert tables.centre is not None and tables.half is not None
    np.testing.assert_array_equal(tables.centre, (low + high) / 2)
    np.testing.assert_allclose(tables.half, (high - low) / 2 * 1.001, rtol=1e-6)  # f32
    np.testing.assert_array_equal(tables.levels, calibration.tensors[f"k.{form}.1%.3.levels"][1])


@pytest.mark.parametrize("options", ["", ":1%"])
@pytest.mark.parametrize(("bits", "shape"), [(2, (2, 48)), (3, (3, 80)), (4, (4, 112))])
def test_exactly_the_declared_bytes_are_written(
    ops: CpuOps, bits: int, shape: tuple[int, int], options: str
) -> None:
    """Memory full of two patterns: what is written is equal, what is not keeps its pattern."""
    geometry, side = Geometry(1, *shape), f"nuq{bits}{options}"
    tile = gaussian(*shape, 1)[None] * 4
    pages = []
    for pattern in (0xA5, 0x5A):
        store = store_of(ops, side, geometry)
        with store.extending(64):
            for slab in store._state.slabs:
                slab.fill(pattern)
            store.extend(0, tile[0], tile[0])
        pages.append(np.frombuffer(page_bytes(store)[0], np.uint8))
    layout = PageLayout.of(geometry, KVSpec.parse(f"k={side},v={side}"))
    codec = layout.k
    assert isinstance(codec, Nuq)
    declared = np.zeros(layout.page_bytes, bool)
    for head in range(shape[0]):
        for region in layout.regions:
            start = head * layout.run_bytes + region.offset
            used = 4 * codec.key_slots(shape[1]) if region.name == "k_meta" else region.nbytes
            declared[start : start + used] = True
            assert used <= region.nbytes < used + 16
    shared = layout.shared_regions[1]
    start = shape[0] * layout.run_bytes + shared.offset
    declared[start : start + shared.nbytes] = True
    np.testing.assert_array_equal(pages[0] == pages[1], declared)
    assert (pages[0][~declared] == 0xA5).all() and (pages[1][~declared] == 0x5A).all()


def test_sizes_are_those_of_the_formats() -> None:
    codec, plain = Nuq(3, outliers=True), Nuq(3)
    assert codec.code_bytes(128) == 64 * 128 * 3 // 8
    assert (codec.key_slots(128), codec.key_slots(16), plain.key_slots(128)) == (82, 11, 0)
    assert codec.meta_bytes(False, 16) == 48 and codec.meta_bytes(True, 16) == 0
    assert plain.meta_bytes(False, 16) == 0
    assert plain.shared_bytes(True, 4, 128) == 64 * 4
    assert codec.shared_bytes(True, 4, 128) == 64 * (4 + 2 * 3 * 4)
    assert codec.shared_bytes(False, 4, 128) == 0


@pytest.mark.parametrize("side", ["nuq2", "nuq3:1%", "nuq4:1%:qnorm"])
def test_numbers_that_are_not_finite_count_as_the_nearest_ones(ops: CpuOps, side: str) -> None:
    """NaN as 0, what f16 does not hold as its largest number; all that is read is finite."""
    wild, tame = gaussian(2, 32, 1), gaussian(2, 32, 1)
    for at, (odd, meant) in enumerate(
        [(np.nan, 0.0), (np.inf, 65504.0), (-np.inf, -65504.0), (1e30, 65504.0), (-7e4, -65504.0)]
    ):
        wild[3 * at, at % 2, 5 * at], tame[3 * at, at % 2, 5 * at] = odd, meant
        wild[40 + at], tame[40 + at] = odd, meant  # whole tokens
    page, got = page_of(ops, side, wild, wild)
    assert page.data == page_of(ops, side, tame, tame)[0].data
    assert np.isfinite(got.keys).all() and np.isfinite(got.values).all()


@pytest.mark.parametrize("side", ["nuq2:qnorm", "nuq3:1%", "nuq4"])
def test_pages_depend_on_their_own_tokens_alone(ops: CpuOps, side: str) -> None:
    """Not on how calls were split, nor on pages before."""
    geometry = Geometry(2, 2, 32)
    tokens = random_tokens(200, geometry)
    tokens.values[:, :64] *= 100
    stores = [store_of(ops, side, geometry) for _ in range(4)]
    for store, split in zip(stores, ([200], [1, 63, 64, 72], [0] * 70 + [130], [100, *[0] * 100])):
        fill(store, tokens, split)
    assert len(page_bytes(stores[0])) == 3
    for store in stores[1:]:
        assert page_bytes(store) == page_bytes(stores[0])
    later = store_of(ops, side, geometry)
    extend(later, tokens.part(64, 200))
    assert page_bytes(later) == page_bytes(stores[0])[1:]


def test_layers_have_their_own_tables(ops: CpuOps) -> None:
    geometry = Geometry(2, 2, 32)
    tokens = random_tokens(64, geometry)
    tokens.keys[1], tokens.values[1] = tokens.keys[0], tokens.values[0]
    store = store_of(ops, "nuq3", geometry)
    extend(store, tokens)
    for side in read(store):
        assert (side[0] != side[1]).mean() > 0.5


def test_a_store_without_a_calibration_is_refused(ops: CpuOps) -> None:
    with pytest.raises(CodecError, match=r"nuq3\b.* needs a calibration; `kvrt calibrate`"):
        new_store(ops, "k=nuq3,v=f16", Geometry(1, 2, 32), calibration=None)
