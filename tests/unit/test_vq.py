"""Vector quantisation against NumPy: indices, bytes and numbers, to the bit."""

from typing import Any

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.calibration_parts import is_order
from kvrt.errors import CodecError
from kvrt.kvstore import Geometry, KVSpec, PageLayout, bits_per_element, estimate
from kvrt.kvstore.codecs import Vq, VqBooks
from kvrt.kvstore.stats import bytes_per_token, read_bytes
from tests.helpers import vq_ref
from tests.helpers.codecs import FittedTables
from tests.helpers.pages import SealedPage
from tests.helpers.stores import (
    Tokens,
    contents,
    extend,
    fill,
    new_store,
    page_bytes,
    random_tokens,
    read,
)  # fmt: skip
from tests.helpers.tiles import TILES, gaussian

CASES = [
    ("pq8x256:r1", (2, 64)),
    ("pq8x256:r2", (1, 128)),
    ("pq8x256:r3", (2, 64)),
    ("pq8x256:r3", (1, 192)),
    ("rvq1x256", (2, 16)),
    ("rvq3x512", (1, 48)),
    ("rvq2x1024", (2, 32)),
    ("rvq2x2048", (1, 16)),
    ("rvq1x4096", (1, 64)),
    ("rvq5x256:scaled", (1, 80)),  # three stages
    ("rvq64x256", (1, 16)),  # more codes than numbers
    ("pq8x256:r2:perhead", (3, 64)),
    ("pq8x256:r1:perhead", (2, 128)),
    ("rvq2x256:perhead", (3, 32)),
    ("rvq2x512:scaled:perhead", (2, 80)),
]


class Given(FittedTables):
    """The same books for all layers, by side."""

    def __init__(self, geometry: Geometry, keys: VqBooks, values: VqBooks):
        super().__init__(geometry)
        self._books = keys, values

    def books(self, layer: int, is_value: bool, *form: Any) -> VqBooks:
        return self._books[is_value]


def codec_of(side: str) -> Vq:
    codec = KVSpec.parse(f"k={side},v={side}").k.codec
    assert isinstance(codec, Vq)
    return codec


def page_of(
    ops: CpuOps, side: str, keys: np.ndarray, values: np.ndarray, tables: FittedTables | None = None
) -> tuple[SealedPage, Tokens]:
    """The page of 64 tokens, keys and values (64, heads, head_dim), and what it means."""
    geometry, spec = Geometry(1, *keys.shape[1:]), f"k={side},v={side}"
    store = new_store(ops, spec, geometry, calibration=tables or FittedTables(geometry))
    extend(store, Tokens(keys[None], values[None]))
    (data,) = page_bytes(store)
    return SealedPage(PageLayout.of(geometry, KVSpec.parse(spec)), data), read(store)


def check_page(
    ops: CpuOps, side: str, keys: np.ndarray, values: np.ndarray, tables: FittedTables | None = None
) -> None:
    """Bytes and decoded numbers are those of the reference."""
    geometry, codec = Geometry(1, *keys.shape[1:]), codec_of(side)
    tables = tables or FittedTables(geometry)
    page, got = page_of(ops, side, keys, values, tables)
    for is_value, tile in enumerate((keys, values)):
        books = tables.books(0, bool(is_value), codec)
        width = books.entries.shape[-1]
        for head in range(geometry.num_kv_heads):
            want = vq_ref.encode(tile[:, head], books, head)
            packed = vq_ref.pack(want.codes, codec.code_bits, width, bool(is_value))
            assert page.region("v_codes" if is_value else "k_codes", head) == packed
            np.testing.assert_array_equal(got[is_value][0, :, head], want.decoded)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("side", "shape"), CASES)
def test_pages_are_those_of_numpy(
    ops: CpuOps, side: str, shape: tuple[int, int], tile: str
) -> None:
    check_page(ops, side, TILES[tile](*shape, 1), TILES[tile](*shape, 2))


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("is_value", [False, True])
def test_every_code_of_a_group_has_a_byte(dim: int, stages: int, is_value: bool) -> None:
    """The contract's order is one to one, so that `pack` is well defined."""
    groups = dim // 8
    places = list(vq_ref.group_places(stages * groups, groups, is_value))
    assert {place[0] for place in places} == set(range(64 * stages * groups))
    assert len({place[1:] for place in places}) == len(places) == 64 * stages * groups


def books_with(codec: Vq, dim: int, **entries: Any) -> VqBooks:
    """Books of far entries but for those given, by index: of every stage and group the same."""
    found = np.full(codec.shape(1, dim), 100.0, np.float16)
    for name, entry in entries.items():
        found[:, :, int(name[1:])] = entry
    return VqBooks(found)


@pytest.mark.parametrize(("side", "dim"), [("pq8x256:r1", 64), ("rvq1x1024", 16)])
def test_of_two_as_near_the_first_is_taken(ops: CpuOps, side: str, dim: int) -> None:
    """Both twice the same entry, and entries at either side, in one block of a search or in two."""
    codec, geometry = codec_of(side), Geometry(1, 1, dim)
    last = codec.entries - 1
    for places in ((0, last), (3, 4), (17, last), (0, 255), (255, last)):
        if places[0] == places[1]:
            continue
        for second in (1.0, 3.0):
            pair = {f"_{places[0]}": 1.0, f"_{places[1]}": second}
            values = books_with(codec, dim, **pair)
            even = np.ones((1, dim), np.float32)
            keys = VqBooks(values.entries, even * 0, even, codec.plain_order(1, dim))
            tile = np.full((64, 1, dim), 2.0, np.float32)
            tile[1::2] = second
            page, got = page_of(ops, side, tile, tile, Given(geometry, keys, values))
            assert (got.keys[0, ::2] == 1.0).all()
            assert (got.keys[0, 1::2] == second).all()
            if places[1] < 256:
                codes = np.frombuffer(page.region("k_codes")[: 64 * codec.books(dim)], np.uint8)
                assert set(codes) == ({places[0]} if second == 1.0 else set(places))
            check_page(ops, side, tile, tile, Given(geometry, keys, values))


@pytest.mark.parametrize(("side", "shape"), [c for c in CASES if c[0] != "rvq64x256"])
def test_what_is_no_number_stays_in_its_token(
    ops: CpuOps, side: str, shape: tuple[int, int]
) -> None:
    """NaN has code 0 in the groups that it reaches, infinity is f16's largest number."""
    tame = gaussian(*shape, 1)
    wild, meant = tame.copy(), tame.copy()
    for t, (odd, limited) in enumerate(
        [(np.inf, 65504.0), (-np.inf, -65504.0), (1e30, 65504.0), (-7e4, -65504.0)]
    ):
        wild[5 * t, :, 3 * t], meant[5 * t, :, 3 * t] = odd, limited
        wild[40 + t], meant[40 + t] = odd, limited
    assert page_of(ops, side, wild, wild)[0].data == page_of(ops, side, meant, meant)[0].data
    wild[20, :, 7] = np.nan
    meant[20, :, 7] = np.nan
    check_page(ops, side, meant, meant)
    _, got = page_of(ops, side, wild, wild)
    for numbers in got:
        assert np.isfinite(numbers).all()


def test_layers_and_heads_have_their_own_tables(ops: CpuOps) -> None:
    geometry = Geometry(2, 2, 64)
    tokens = random_tokens(64, geometry)
    for side in tokens:
        side[:] = side[:1, :, :1]
    store = new_store(ops, "k=pq8x256:r2,v=rvq2x256", geometry)
    extend(store, tokens)
    keys, values = read(store)
    assert (keys[0] != keys[1]).mean() > 0.5 and (values[0] != values[1]).mean() > 0.5
    assert (keys[0, :, 0] != keys[0, :, 1]).mean() > 0.5
    assert np.array_equal(values[0, :, 0], values[0, :, 1])  # of one book, without a scale


@pytest.mark.parametrize("side", ["pq8x256:r2:perhead", "rvq2x256:perhead"])
def test_heads_can_have_their_own_books(ops: CpuOps, side: str) -> None:
    tile = gaussian(2, 64, 1)
    tile[:, 1] = tile[:, 0]
    _, got = page_of(ops, side, tile, tile)
    for numbers in got:
        assert (numbers[0, :, 0] != numbers[0, :, 1]).mean() > 0.5


def test_groups_of_keys_are_the_channels_that_order_says(ops: CpuOps) -> None:
    """A book of one group does nothing to the channels of another."""
    geometry, codec = Geometry(1, 2, 64), codec_of("pq8x256:r1")
    fitted = FittedTables(geometry).books(0, False, codec)
    assert fitted.order is not None
    entries = np.zeros_like(fitted.entries)
    entries[:, 3] = 1.0
    even = np.ones((2, 64), np.float32)
    keys, tile = VqBooks(entries, even * 0, even, fitted.order), gaussian(2, 64, 1)
    _, got = page_of(ops, "pq8x256:r1", tile, tile, Given(geometry, keys, VqBooks(entries)))
    for head in range(2):
        where = np.flatnonzero(got.keys[0, 0, head])
        assert set(where) == set(fitted.order[head, 24:32]) and not set(where) <= {*range(24, 32)}
        assert set(np.flatnonzero(got.values[0, 0, head])) == {*range(24, 32)}


@pytest.mark.parametrize("dim", [64, 128, 192])
def test_the_plain_order_is_neighbours_and_their_partners(dim: int) -> None:
    order = codec_of("pq8x256:r1").plain_order(2, dim)
    assert order.dtype == np.int32 and order.shape == (2, dim)
    half = dim // 2
    assert [*order[0, 8:16]] == [4, 5, 6, 7, half + 4, half + 5, half + 6, half + 7]
    assert is_order(order)
    assert [*codec_of("rvq1x256").plain_order(1, 16)[0]] == [*range(16)]


@pytest.mark.parametrize(("side", "shape"), [("pq8x256:r3", (2, 64)), ("rvq3x512", (2, 80))])
def test_exactly_the_declared_bytes_are_written(
    ops: CpuOps, side: str, shape: tuple[int, int]
) -> None:
    geometry = Geometry(1, *shape)
    tile = gaussian(*shape, 1)
    pages = []
    for pattern in (0xA5, 0x5A):
        store = new_store(ops, f"k={side},v={side}", geometry)
        with store.extending(64):
            for slab in store._state.slabs:
                slab.fill(pattern)
            store.extend(0, tile, tile)
        pages.append(np.frombuffer(page_bytes(store)[0], np.uint8))
    layout = PageLayout.of(geometry, KVSpec.parse(f"k={side},v={side}"))
    declared = np.zeros(layout.page_bytes, bool)
    for head in range(shape[0]):
        for region in layout.regions:
            start = head * layout.run_bytes + region.offset
            declared[start : start + region.nbytes] = True
    np.testing.assert_array_equal(pages[0] == pages[1], declared)


@pytest.mark.parametrize("spec", ["vq2", "vq1", "k=rvq5x512,v=rvq2x256", "k=rvq2x256:pre,v=f16"])
def test_pages_depend_on_their_own_tokens_alone(ops: CpuOps, spec: str) -> None:
    """Not on how calls were split, nor on the pages before."""
    geometry = Geometry(2, 2, 64)
    tokens = random_tokens(400, geometry)
    stores = [new_store(ops, spec, geometry) for _ in range(3)]
    for store, split in zip(stores, ([400], [1, 63, 64, 272], [0] * 70 + [330])):
        fill(store, tokens, split)
    assert len(page_bytes(stores[0])) >= 4
    for store in stores[1:]:
        assert contents(store) == contents(stores[0])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_a_byte(ops: CpuOps, threads: int) -> None:
    geometry = Geometry(2, 3, 64)
    tokens = random_tokens(500, geometry)
    stores = [new_store(o, "k=pq8x256:r2,v=rvq3x256", geometry) for o in (ops, CpuOps(threads))]
    for store in stores:
        extend(store, tokens)
    assert page_bytes(stores[0]) == page_bytes(stores[1])


def test_sizes_are_those_of_the_formats() -> None:
    pq, rvq = codec_of("pq8x256:r2"), codec_of("rvq56x1024:scaled")
    assert (pq.code_bytes(128), pq.stages(128), pq.groups(128), pq.books(128)) == (2048, 2, 16, 32)
    assert pq.settings(False, 4, 128) == pq.settings(True, 4, 128) == (8, 2, 8, 16, 0)
    assert pq.table_bytes(True, 4, 128) == 32 * 256 * (16 + 4)
    # Centre, scale, its inverse and the order of channels.
    assert pq.table_bytes(False, 4, 128) == 32 * 256 * (16 + 4) + 4 * 4 * 128 * 4
    assert rvq.settings(False, 4, 128) == (128, 56, 10, 1, 0)
    assert rvq.settings(False, 4, 64) == (64, 28, 10, 1, 0)
    assert (rvq.stages(16), rvq.stages(256), codec_of("rvq1x256:scaled").stages(32)) == (7, 112, 1)
    assert rvq.code_bytes(128) == 56 * 64 * 10 // 8
    assert pq.meta_bytes(False, 128) == pq.shared_bytes(True, 4, 128) == 0


@pytest.mark.parametrize("side", ["pq8x256:r2", "rvq3x512"])
def test_books_of_each_head_are_as_many_codes_and_more_books(side: str) -> None:
    shared, own = codec_of(side), codec_of(f"{side}:perhead")
    assert own.code_bytes(128) == shared.code_bytes(128)
    stages, groups, entries, dim = shared.shape(4, 128)
    assert own.shape(4, 128) == (stages, 4 * groups, entries, dim)
    assert own.settings(True, 4, 128) == (*shared.settings(True, 4, 128)[:4], 1)
    assert own.table_bytes(True, 4, 128) == 4 * shared.table_bytes(True, 4, 128)
    units = 4 * 4 * 128 * 4
    assert own.table_bytes(False, 4, 128) - units == 4 * (shared.table_bytes(False, 4, 128) - units)
    assert own.book == f"{shared.book}.perhead"


@pytest.mark.parametrize(
    ("spec", "dim", "bits"),
    [
        ("vq2", 64, 2.0), ("vq2", 128, 2.0), ("vq1.5", 128, 1.5), ("vq1.5", 64, 1.5),
        ("vq1", 64, 1.0), ("vq1", 128, 1.0), ("vqkv", 64, 2.75), ("vqkv", 128, 2.75),
        # 1,696 bytes, 1.65625 bits: runs are whole multiples of 128 bytes.
        ("k=rvq14x1024,v=rvq8x512", 64, 1.75), ("k=rvq14x1024,v=rvq8x512", 128, 0.875),
    ],
)  # fmt: skip
def test_bits_per_element(spec: str, dim: int, bits: float) -> None:
    geometry, parsed = Geometry(2, 4, dim), KVSpec.parse(spec)
    assert bits_per_element(geometry, parsed) == bits
    assert bytes_per_token(geometry, parsed) == bits * 2 * 2 * 4 * dim / 8
    window, sink = parsed.window, parsed.sink
    (read_of,) = read_bytes(geometry, parsed, [sink + window + 640], [None, None])
    exact = 2 * 2 * 2 * 4 * dim  # bytes of a token: layers, sides, f16, heads
    assert read_of == 640 * bytes_per_token(geometry, parsed) + (sink + window) * exact


@pytest.mark.parametrize(
    "spec", ["vq2", "vq1.5", "k=rvq7x512:pre,v=rvq3x256:had", "k=rvq2x256:perhead,v=pq8x256:r2"]
)
def test_an_estimate_is_what_a_store_holds(ops: CpuOps, spec: str) -> None:
    geometry = Geometry(2, 2, 64)
    store = new_store(ops, spec, geometry)
    extend(store, random_tokens(400, geometry))
    assert store.stats().bytes == estimate(geometry, store.spec, 400)
    assert store.stats().codec_bytes == sum(
        codec.table_bytes(bool(is_value), 2, 64)
        for layout in [PageLayout.of(geometry, store.spec)] * 2
        for is_value, codec in enumerate(layout.codecs)
    )


def test_norms_are_rounded_once() -> None:
    entries = np.random.default_rng(0).standard_normal((3, 2, 256, 8)).astype(np.float16)
    want = (np.square(entries.astype(np.float64)).sum(-1) / 2).astype(np.float32)
    np.testing.assert_array_equal(VqBooks(entries).norms, want)


def test_a_store_without_codebooks_is_refused(ops: CpuOps) -> None:
    with pytest.raises(CodecError, match=r"pq8x256:r2 needs a calibration; `kvrt calibrate`"):
        new_store(ops, "k=pq8x256:r2,v=f16", Geometry(1, 2, 64), calibration=None)


def test_books_of_another_size_are_refused(ops: CpuOps) -> None:
    geometry = Geometry(1, 2, 64)
    few = FittedTables(geometry).books(0, True, codec_of("pq8x256:r1"))
    with pytest.raises(CodecError, match=r"bytes of fitted tables, pq8x256:r2 needs"):
        new_store(ops, "k=f16,v=pq8x256:r2", geometry, calibration=Given(geometry, few, few))
