"""What every page must satisfy, of any format: packing, places, re-encoding, chunks."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from kvrt.backends.cpu import CpuOps
from kvrt.kvstore import Geometry, KVSpec, PageLayout
from kvrt.kvstore.codecs import IntQ, TileCodec, Vq
from kvrt.kvstore.spec import Side
from tests.helpers.codecs import fits
from tests.helpers.compare import relative_rmse
from tests.helpers.pages import SealedPage, sealed_page
from tests.helpers.stores import (
    Tokens,
    attend,
    contents,
    extend,
    fill,
    new_store,
    queries,
    random_tokens,
    read,
)  # fmt: skip
from tests.property.test_spec_properties import sides
from tests.unit.test_fragment import coded_tokens
from tests.unit.test_layout import check_regions

SEEDS = st.integers(0, 1 << 32)
HEAD_DIMS = st.integers(1, 16).map(lambda tiles: 16 * tiles)
PLACES = st.one_of(st.sampled_from((0, 1, 4, 63, 64)), st.integers(0, 100))
FEW = st.builds(
    Vq, st.integers(1, 3), st.sampled_from((256, 512)), st.just(False), st.booleans(), st.booleans()
)
KEYS, VALUES = sides(values=False, rvq=FEW), sides(values=True, rvq=FEW)
SPECS = st.builds(KVSpec, KEYS, VALUES, PLACES, PLACES)


@given(st.sampled_from((2, 3, 4, 8)), HEAD_DIMS, st.integers(1, 5), SEEDS)
def test_codes_come_back_from_a_page(
    ops: CpuOps, bits: int, dim: int, heads: int, seed: int
) -> None:
    tokens, side = coded_tokens(bits, dim, heads, seed), f"int{bits}:channel:g32"
    store = new_store(ops, f"k={side},v={side}", Geometry(1, heads, dim))
    extend(store, tokens)
    for got, want in zip(read(store), tokens, strict=True):
        assert np.array_equal(got, want)


@given(SPECS, HEAD_DIMS, st.integers(1, 9))
def test_regions_are_disjoint_aligned_and_inside(spec: KVSpec, dim: int, heads: int) -> None:
    geometry = Geometry(1, heads, dim)
    assume(fits(str(spec), geometry))
    check_regions(PageLayout.of(geometry, spec))


@st.composite
def tiles(draw: st.DrawFn, dim: int = 64) -> np.ndarray:
    """(64, 2, dim) f32 in f16's numbers: channels and tokens of many sizes, some without range."""
    rng = np.random.default_rng(draw(SEEDS))
    shape = (64, 2, dim)
    kind = draw(st.sampled_from(("normal", "flat", "heavy", "few")))
    if kind == "flat":
        tile = rng.uniform(-1, 1, shape)
    elif kind == "heavy":
        tile = rng.standard_cauchy(shape)
    else:
        tile = rng.standard_normal(shape)
    if kind == "few":
        tile = np.round(tile)
    spread = draw(st.floats(0, 3))
    tile = tile * np.exp(spread * rng.standard_normal((1, 2, dim)))
    tile += draw(st.floats(0, 5)) * rng.standard_normal((1, 2, dim))
    tile *= 2.0 ** draw(st.integers(-8, 3))
    tile[:, :, rng.integers(0, dim)] = 0
    return np.clip(tile, -60000, 60000).astype(np.float16).astype(np.float32)


def allowed(page: SealedPage, is_value: bool, head: int, numbers: np.ndarray) -> np.ndarray:
    """Half a step, and what f16 does to the scale and, in the tail, to the ends of the group."""
    codec: TileCodec = page.layout.codecs[is_value]
    assert isinstance(codec, IntQ)
    scales = (page.planes(is_value, head)[0] & 0x7FFF).astype(np.uint16).view(np.float16)
    steps = np.repeat(scales.astype(np.float64), codec.group, axis=1)  # (outer, length)
    steps = steps.T if codec.axis == "channel" else steps  # (64, dim)
    ends = np.abs(numbers).max(axis=0 if codec.axis == "channel" else 1, keepdims=True)
    rounding = 2.0**codec.bits * np.maximum(steps * 2.0**-11, 2.0**-25)
    return steps / 2 + rounding + ends * 2.0**-10


NUMBERS = sides(values=True, rvq=None)
INTS = NUMBERS.filter(lambda side: isinstance(side.codec, IntQ) and not side.had)


@given(INTS, tiles())
def test_encoding_again_moves_nothing_by_more_than_half_a_step(
    ops: CpuOps, side: Side, tile: np.ndarray
) -> None:
    spec, geometry = f"k={side},v={side}", Geometry(1, 2, 64)
    assume(fits(spec, geometry))
    page = sealed_page(ops, spec, tile, tile)
    once = decoded(ops, spec, tile, tile)
    twice = decoded(ops, spec, *once)
    for is_value, (first, second) in enumerate(zip(once, twice, strict=True)):
        for head in range(2):
            moved = np.abs(second[:, head].astype(np.float64) - first[:, head])
            assert (moved <= allowed(page, bool(is_value), head, first[:, head])).all()


def decoded(
    ops: CpuOps, spec: str, keys: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    store = new_store(ops, spec, Geometry(1, *keys.shape[1:]))
    extend(store, Tokens(keys[None], values[None]))
    k, v = read(store)
    return k[0], v[0]


@given(NUMBERS, tiles())
def test_encoding_again_loses_far_less_than_encoding(
    ops: CpuOps, side: Side, tile: np.ndarray
) -> None:
    """Of any codec of numbers: what it once gave is nearly what it would choose."""
    spec = f"k={side},v={side}"
    assume(fits(spec, Geometry(1, 2, 64)) and "qnorm" not in spec and "nuq" not in spec)
    once = decoded(ops, spec, tile, tile)
    twice = decoded(ops, spec, *once)
    for first, second in zip(once, twice, strict=True):
        assert relative_rmse(second, first) <= 0.3 * relative_rmse(first, tile) + 1e-3


@st.composite
def splits(draw: st.DrawFn, count: int) -> list[int]:
    """Sizes of calls that add up to `count`; 0 is one token by `append`."""
    sizes: list[int] = []
    left = count
    while left:
        size = min(draw(st.one_of(st.just(0), st.integers(1, 9), st.integers(50, 140))), left)
        sizes.append(size)
        left -= max(size, 1)
    return sizes


@given(SPECS, st.data(), st.integers(1, 2), SEEDS)
def test_chunks_do_not_matter(
    ops: CpuOps, spec: KVSpec, data: st.DataObject, heads: int, seed: int
) -> None:
    """Any format, in any split, with forks in between, gives the same bytes and attention."""
    geometry = Geometry(2, heads, 64)
    assume(fits(str(spec), geometry))
    count = data.draw(st.integers(1, spec.sink + spec.window + 200))
    tokens = random_tokens(count, geometry, seed)
    whole, parts = (new_store(ops, str(spec), geometry) for _ in range(2))
    extend(whole, tokens)
    for size in data.draw(splits(count)):
        fill(parts, tokens, [size])
        if data.draw(st.integers(0, 9)) == 0:
            parts = parts.fork()
    assert contents(parts) == contents(whole)
    assert parts.stats() == whole.stats()
    q = queries(1, 2 * heads, 64)[0]
    assert np.array_equal(attend(parts, q, 1), attend(whole, q, 1))
