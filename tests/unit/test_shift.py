"""Dropping the oldest tokens behind the sinks: the others move up, and no code is touched."""

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.errors import CodecError, UnsupportedError
from kvrt.kvstore import KVSpec, KVStore, estimate
from tests.helpers.codecs import GEOMETRY, MATRIX
from tests.helpers.compare import assert_close, relative_rmse
from tests.helpers.rotated import Sequence, random_sequence
from tests.helpers.stores import (
    append,
    attend,
    contents,
    extend,
    new_store,
    page_bytes,
    queries,
    random_tokens,
    read,
)  # fmt: skip
from tests.helpers.tolerances import tolerance

SPECS = [
    "k=int8:channel:g32:pre,v=int8:token:g32",
    "k=int8:token:g32:pre,v=q8_0,sink=5,window=30",
    "k=int8:token:g32:page,v=int8:token:g32,sink=70",
    "k=int8:channel:g64:page:had,v=int8:token:g64:had,sink=4,window=100",
    "k=int8:token:g32:norm:page,v=f16,sink=1,window=64",
]
POST = [spec for spec in MATRIX if not KVSpec.parse(spec).shifts]


def dropped(sequence: Sequence, sink: int, count: int) -> Sequence:
    """The same without `count` tokens behind the sinks, at the positions that are then theirs."""
    kept = np.r_[0:sink, sink + count : len(sequence.raw)]
    raw, values = sequence.raw[kept], sequence.values[kept]
    return Sequence(raw, values, sequence.bias, sequence.theta, sequence.amplitude)


def check(store: KVStore, sequence: Sequence) -> None:
    """Attention over the store, and its tokens, are those of the sequence."""
    q = queries(1, 4, 64, len(store))[0]
    assert len(store) == len(sequence.raw)
    for window in (None, 70):
        got = attend(store, q, 0, window)
        assert_close(got, sequence.attention(q, window), tolerance("attend", "int8"))
    keys, values = read(store)
    assert relative_rmse(keys[0], sequence.keys()) < 0.01
    assert relative_rmse(values[0], sequence.values) < 0.01
    assert store.stats().bytes == estimate(store.geometry, store.spec, len(store))


def shifting(ops: CpuOps, spec: str, count: int = 450) -> tuple[KVStore, Sequence]:
    sequence = random_sequence(count, bias=4.0, amplitude=1.2)
    store = sequence.store(ops, spec)
    extend(store, sequence.tokens)
    return store, sequence


@pytest.mark.parametrize("pages", [0, 1, 2, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_after_a_shift_all_is_as_if_moved(ops: CpuOps, spec: str, pages: int) -> None:
    store, sequence = shifting(ops, spec)
    before = page_bytes(store)
    store.shift(64 * pages)
    assert page_bytes(store) == before[pages:] and len(before) > pages
    check(store, dropped(sequence, store.spec.sink, 64 * pages))


@pytest.mark.parametrize("spec", ["k=f32:pre,v=f32,sink=3", "k=f32:page,v=f32,window=50"])
def test_a_shift_of_floats_is_exact(ops: CpuOps, spec: str) -> None:
    store, sequence = shifting(ops, spec)
    store.shift(192)
    left, q = dropped(sequence, store.spec.sink, 192), queries(1, 4, 64)[0] / 3
    assert_close(attend(store, q), left.attention(q), tolerance("attend", "packed"))
    assert_close(read(store).keys[0], left.keys(), tolerance("basis", "f32"))


@pytest.mark.parametrize("spec", SPECS)
def test_a_shifted_store_goes_on(ops: CpuOps, spec: str) -> None:
    """Append, extend, truncate, fork and shift again."""
    store, sequence = shifting(ops, spec)
    sink = store.spec.sink
    store.shift(128)
    more = random_sequence(200, seed=8)
    long = Sequence(
        np.concatenate([dropped(sequence, sink, 128).raw, more.raw]),
        np.concatenate([dropped(sequence, sink, 128).values, more.values]),
        sequence.bias,
        amplitude=sequence.amplitude,
    )
    append(store, long.tokens.part(322, 400))
    check(store, long.part(0, 400))
    extend(store, long.tokens.part(400, 522))
    check(store, long)
    other = store.fork()
    store.truncate(150)
    check(store, long.part(0, 150))
    check(other, long)
    extend(store, long.tokens.part(150, 300))
    check(store, long.part(0, 300))
    other.shift(64)
    check(other, dropped(long, sink, 64))
    pages = other.view(0).extent.pages
    other.shift(64 * pages)
    check(other, dropped(long, sink, 64 * (pages + 1)))
    other.truncate(0)
    fresh = long.store(ops, spec)
    for target in (other, fresh):
        extend(target, long.tokens.part(0, 300))
    assert contents(other) == contents(fresh)


@pytest.mark.parametrize("spec", SPECS[1::2])
def test_a_long_conversation_in_a_small_cache(ops: CpuOps, spec: str) -> None:
    """Ten times around the tail's ring; what is left is always where it should be."""
    sequence = random_sequence(1500, bias=4.0)
    store = sequence.store(ops, spec, max_tokens=400)
    sink, first, done = store.spec.sink, 0, 0  # tokens dropped; tokens seen
    while done < 1500:
        room = min(45, 1500 - done)
        while len(store) + room > 400:
            store.shift(64)
            first += 64
        known = dropped(sequence.part(0, done + room), sink, first)
        extend(store, known.tokens.part(len(store), len(store) + room))
        done += room
    check(store, dropped(sequence, sink, first))
    assert first >= 1088


@pytest.mark.parametrize("spec", SPECS)
def test_chunks_do_not_matter_after_a_shift(ops: CpuOps, spec: str) -> None:
    store, _ = shifting(ops, spec)
    store.shift(64)
    more = random_tokens(170, store.geometry, seed=3)
    other = store.fork()
    extend(store, more)
    for start, end in ((0, 1), (1, 90)):
        extend(other, more.part(start, end))
    append(other, more.part(90, 170))
    assert contents(store) == contents(other)


@pytest.mark.parametrize("spec", POST)
def test_keys_after_rope_cannot_move(ops: CpuOps, spec: str) -> None:
    store = new_store(ops, spec, GEOMETRY)
    extend(store, random_tokens(330, GEOMETRY))
    before = contents(store)
    with pytest.raises(UnsupportedError, match="keeps keys after RoPE, so they cannot move"):
        store.shift(64)
    assert contents(store) == before


@pytest.mark.parametrize("count", [-64, 1, 63, 65, 384, 448, 10**9])
def test_other_counts_are_refused(ops: CpuOps, count: int) -> None:
    store, _ = shifting(ops, SPECS[2])
    before = contents(store)
    assert store.view(0).extent.pages == 5
    expected = rf"cannot shift by {count} tokens, expected a multiple of 64 up to 320"
    with pytest.raises(CodecError, match=expected):
        store.shift(count)
    assert contents(store) == before


def test_a_shift_frees_memory(ops: CpuOps) -> None:
    store, _ = shifting(ops, SPECS[0])
    before = store.stats()
    store.shift(256)
    after = store.stats()
    assert before.page_bytes - after.page_bytes == 4 * before.page_bytes // 7
    assert len(store) == 450 - 256
