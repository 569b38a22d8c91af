"""Forgetting the newest tokens: in the tail, in a page, over pages; and growing again."""

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.errors import CodecError
from kvrt.kvstore import KVSpec, estimate
from kvrt.kvstore.stats import sealed_pages
from tests.helpers.codecs import GEOMETRY as PACKED_GEOMETRY
from tests.helpers.codecs import PACKED
from tests.helpers.compare import relative_rmse
from tests.helpers.stores import (
    GEOMETRY,
    PLAIN_SPECS,
    Tokens,
    append,
    assert_holds,
    contents,
    extend,
    fill,
    new_store,
    page_bytes,
    random_tokens,
    read,
)
from tests.helpers.tolerances import tolerance

TOKENS = random_tokens(1000)
PACKED_TOKENS = random_tokens(420, PACKED_GEOMETRY)
CUTS = [0, 1, 3, 4, 5, 64, 65, 100, 127, 128, 150, 192, 195, 196, 197, 230, 259, 260, 299, 300]


def joined(first: Tokens, second: Tokens) -> Tokens:
    return Tokens(*(np.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)))


@pytest.mark.parametrize("spec", PLAIN_SPECS)
@pytest.mark.parametrize("cut", CUTS)
def test_a_truncated_store_is_a_fresh_one(ops: CpuOps, spec: str, cut: int) -> None:
    """Dense formats keep a token's rounding wherever it lies, so equality is exact."""
    store, fresh = new_store(ops, spec), new_store(ops, spec)
    extend(store, TOKENS.part(0, 300))
    store.truncate(cut)
    if cut:
        extend(fresh, TOKENS.part(0, cut))
    assert contents(store) == contents(fresh)
    assert store.stats() == fresh.stats()
    assert_holds(store, TOKENS.part(0, cut))
    other = random_tokens(500, seed=1)  # what comes after differs from what was cut off
    for target in (store, fresh):
        fill(target, joined(TOKENS.part(0, cut), other), [0, 90, 0, 64, 33])
    assert contents(store) == contents(fresh)
    assert store.stats() == fresh.stats()


def test_truncating_step_by_step_is_truncating_at_once(ops: CpuOps) -> None:
    store = new_store(ops, "k=f16,v=f32,sink=4,window=30")
    extend(store, TOKENS.part(0, 400))
    for cut in range(399, -1, -7):
        store.truncate(cut)
        assert_holds(store, TOKENS.part(0, cut))
        assert store.stats().bytes == estimate(GEOMETRY, store.spec, cut)


def test_clear_forgets_everything(ops: CpuOps) -> None:
    store = new_store(ops, "k=f16,v=f16,sink=4")
    extend(store, TOKENS.part(0, 300))
    store.clear()
    assert len(store) == 0 and store.stats() == new_store(ops, "k=f16,v=f16,sink=4").stats()


@pytest.mark.parametrize("cut", [-1, 11, 1000])
def test_truncating_to_what_is_not_there_is_refused(ops: CpuOps, cut: int) -> None:
    store = new_store(ops)
    extend(store, TOKENS.part(0, 10))
    with pytest.raises(CodecError, match=f"cannot truncate to {cut} tokens, the store holds 10"):
        store.truncate(cut)
    assert_holds(store, TOKENS.part(0, 10))


def cuts_of(spec: KVSpec, length: int) -> dict[str, int]:
    """Where to cut a store of so many tokens, by where that is."""
    start, last = spec.sink, sealed_pages(spec, length)
    end = start + 64 * last
    inside = {
        "to the tail": length - 1,
        "to the end of the pages": end,
        "inside the last page": end - 20,
        "over a page": end - 64 - 33,
        "at the start of a page": end - 64,
        "inside the first page": start + 30,
        "to the sinks": start,
        "into the sinks": start // 2,
    }
    return {name: cut for name, cut in inside.items() if cut >= 0}


@pytest.mark.parametrize("spec", PACKED)
def test_tokens_of_a_cut_page_keep_their_rounding(ops: CpuOps, spec: str) -> None:
    """Whole pages stay byte for byte; what returns to the tail differs by that tail's f16 alone."""
    full = new_store(ops, spec, PACKED_GEOMETRY)
    extend(full, PACKED_TOKENS)
    before, pages = read(full), page_bytes(full)
    assert len(pages) > 2
    for name, cut in cuts_of(full.spec, 420).items():
        store = full.fork()
        store.truncate(cut)
        kept = sealed_pages(full.spec, cut)
        assert page_bytes(store) == pages[:kept], name
        assert store.stats().bytes == estimate(PACKED_GEOMETRY, full.spec, cut), name
        whole = min(cut, full.spec.sink + 64 * kept)
        for got, want in zip(read(store), before.part(0, cut), strict=True):
            assert np.array_equal(got[:, :whole], want[:, :whole]), name
            if cut:
                error = relative_rmse(got, want)
                assert not error > tolerance("tail", "f16").rtol, name
        assert page_bytes(full) == pages


@pytest.mark.parametrize("spec", PACKED)
def test_growing_again_is_as_good_as_growing_once(ops: CpuOps, spec: str) -> None:
    """Pages that are sealed again hold numbers rounded twice, and new ones."""
    store, once = (new_store(ops, spec, PACKED_GEOMETRY) for _ in range(2))
    extend(once, PACKED_TOKENS)
    extend(store, PACKED_TOKENS.part(0, 300))
    for cut in (290, 200, 77):
        store.truncate(cut)
        extend(store, PACKED_TOKENS.part(cut, 310))
        append(store, PACKED_TOKENS.part(310, 313))
    extend(store, PACKED_TOKENS.part(313, 420))
    assert store.stats() == once.stats()
    for got, want, exact in zip(read(store), read(once), PACKED_TOKENS, strict=True):
        assert not relative_rmse(got, exact) > 1.5 * relative_rmse(want, exact)


@pytest.mark.parametrize("spec", PACKED)
def test_after_a_cut_to_nothing_a_store_is_new(ops: CpuOps, spec: str) -> None:
    """Scales that were measured on the first page are measured again."""
    store, fresh = (new_store(ops, spec, PACKED_GEOMETRY) for _ in range(2))
    other = random_tokens(300, PACKED_GEOMETRY, seed=5)
    other.keys[...] *= 7
    other.values[...] *= 0.1
    extend(store, other)
    store.truncate(0)
    assert store.stats() == fresh.stats()
    for target in (store, fresh):
        extend(target, PACKED_TOKENS.part(0, 300))
    assert contents(store) == contents(fresh)
