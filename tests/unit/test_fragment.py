"""The order of codes in a page, against NumPy written from the definition of the mma fragment."""

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.kvstore import Geometry, KVSpec, PageLayout, fragment
from tests.helpers.fragments import LANES, bit_places, column_order, pack, unpack
from tests.helpers.stores import Tokens, extend, new_store, page_bytes, read

HEAD_DIMS = range(16, 257, 16)
BITS = (2, 3, 4, 8)
GROUP = 32


def coded_tokens(bits: int, dim: int, heads: int = 2, seed: int = 0) -> Tokens:
    """Whole numbers that are their own int codes: each group of 32 tokens has 0 and the largest."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 2**bits, (2, 1, 64, heads, dim)).astype(np.float32)
    groups = numbers.reshape(2, 64 // GROUP, GROUP, heads, dim)
    ends = rng.permuted(np.broadcast_to(np.arange(GROUP)[:, None, None], groups.shape[2:]), axis=0)
    for side in groups:
        for group in side:
            group[ends == 0] = 0
            group[ends == 1] = 2**bits - 1
    return Tokens(*numbers)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_codes_lie_where_the_fragments_are_read(ops: CpuOps, bits: int, dim: int) -> None:
    """Head sizes whose tiles do not fill the last words too: those words are narrower."""
    geometry, tokens = Geometry(1, 2, dim), coded_tokens(bits, dim)
    side = f"int{bits}:channel:g{GROUP}"
    store = new_store(ops, f"k={side},v={side}", geometry)
    extend(store, tokens)
    (page,) = page_bytes(store)
    layout = PageLayout.of(geometry, store.spec)
    for head in range(2):
        for is_value, name in enumerate(("k_codes", "v_codes")):
            region = next(region for region in layout.regions if region.name == name)
            start = head * layout.run_bytes + region.offset
            codes = tokens[is_value][0, :, head].astype(np.int64)  # (64, dim)
            packed = page[start : start + region.nbytes]
            assert packed == pack(codes, bits, bool(is_value)), name
            assert np.array_equal(unpack(packed, dim, bits, bool(is_value)), codes)
    for got, want in zip(read(store), tokens, strict=True):
        assert np.array_equal(got, want)  # the way back


@pytest.mark.parametrize("is_value", [False, True])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_bit_is_used_once(dim: int, is_value: bool) -> None:
    for bits in BITS:
        taken = np.sort(bit_places(dim, bits, is_value).ravel())
        assert np.array_equal(taken, np.arange(64 * dim * bits))


@pytest.mark.parametrize("is_value", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_lane_finds_its_share_in_16_bytes(dim: int, bits: int, is_value: bool) -> None:
    """Of each unit of 512 bytes: its rows and columns of the four tiles j of 4 / bits tiles s."""
    places = bit_places(dim, bits, is_value)[..., 0]
    lanes = places // 8 % (LANES * 16) // 16  # (64, dim)
    token, channel = np.indices((64, dim))
    row, col = (channel, token) if is_value else (token, channel)
    if not is_value:  # k counts the low half's eight channels, then the high half's
        col = channel % 8
    assert np.array_equal(lanes, row % 8 * 4 + col % 8 // 2)
    share = places // (8 * 16)  # (64, dim): which lane of which unit
    sizes = np.bincount(share.ravel())
    assert set(sizes.tolist()) == {16 * 8 // bits}
    # RoPE partners are in one lane, of one unit unless a unit holds half of their tiles' registers.
    if not is_value:
        assert np.array_equal(lanes[:, : dim // 2], lanes[:, dim // 2 :])
        if bits < 8:
            assert np.array_equal(share[:, : dim // 2], share[:, dim // 2 :])


@pytest.mark.parametrize("is_value", [False, True])
@pytest.mark.parametrize("size", HEAD_DIMS)
def test_places_of_columns_are_the_order_of_lanes(size: int, is_value: bool) -> None:
    columns = [fragment.column_at(place, size, is_value) for place in range(size)]
    assert sorted(columns) == list(range(size))
    assert np.array_equal(columns, column_order(size, is_value))


def test_scales_of_columns_lie_in_that_order(ops: CpuOps) -> None:
    """Keys along channels and values along tokens; the others in natural order."""
    geometry = Geometry(1, 1, 80)
    spec = KVSpec.parse("k=int3:channel:g64:sym,v=int3:channel:g64:sym")
    layout = PageLayout.of(geometry, spec)
    scales = np.arange(1, 81, dtype=np.float32)
    tokens = Tokens(*(np.broadcast_to(scales * 3, (2, 1, 64, 1, 80)).copy()))
    store = new_store(ops, str(spec), geometry)
    extend(store, tokens)
    (page,) = page_bytes(store)
    meta = {
        region.name: np.frombuffer(page, np.float16, region.nbytes // 2, region.offset)
        for region in layout.regions
        if region.name.endswith("meta")
    }
    assert np.array_equal(meta["k_meta"], scales[column_order(80, False)])
    assert np.array_equal(meta["v_meta"], scales)
