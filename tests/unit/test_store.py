"""KVStore: what is kept depends on the tokens and their number only, and nothing is ever lost."""

from collections.abc import Callable

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.errors import CodecError, ContextFullError
from kvrt.kvstore import Geometry
from tests.helpers.codecs import GEOMETRY as PACKED_GEOMETRY
from tests.helpers.codecs import MATRIX
from tests.helpers.stores import (
    PLAIN_SPECS,
    append,
    assert_holds,
    attend,
    contents,
    extend,
    fill,
    new_store,
    on_device,
    page_bytes,
    queries,
    random_tokens,
    read,
)

TOKENS = random_tokens(1000)
PACKED_TOKENS = random_tokens(400, PACKED_GEOMETRY)


@pytest.mark.parametrize("spec", PLAIN_SPECS)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 63, 64, 65, 134, 135, 168, 169, 400])
def test_read_gives_every_token(ops: CpuOps, spec: str, length: int) -> None:
    store = new_store(ops, spec)
    if length:
        extend(store, TOKENS.part(0, length))
    assert len(store) == length
    assert_holds(store, TOKENS.part(0, length))


SPLITS: dict[str, list[int]] = {
    "one by one": [0] * 300,
    "pages": [64] * 4 + [44],
    "page and one": [64, 0, 64, 0, 170],
    "sinks apart": [3, 2, 295],
    "one, then many": [0, 299],
    "many, then one by one": [250] + [0] * 50,
    "odd": [1, 7, 130, 5, 61, 0, 0, 94],
    "two": [199, 101],
}


@pytest.mark.parametrize("spec", PLAIN_SPECS)
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_gives_the_same_bytes(ops: CpuOps, spec: str, split: str) -> None:
    whole, parts = new_store(ops, spec), new_store(ops, spec)
    assert sum(max(size, 1) for size in SPLITS[split]) == 300
    extend(whole, TOKENS.part(0, 300))
    fill(parts, TOKENS, SPLITS[split])
    assert contents(parts) == contents(whole)
    assert parts.stats() == whole.stats()
    assert_holds(parts, TOKENS.part(0, 300))


@pytest.mark.parametrize("spec", MATRIX)
@pytest.mark.parametrize("split", ["one by one", "odd", "sinks apart"])
def test_every_split_and_fork_gives_the_same_packed_bytes(
    ops: CpuOps, spec: str, split: str
) -> None:
    """And the same attention to the bit, while two forks go other ways in between."""
    whole = new_store(ops, spec, PACKED_GEOMETRY)
    extend(whole, PACKED_TOKENS.part(0, 300))
    parts, done = new_store(ops, spec, PACKED_GEOMETRY), 0
    for size in SPLITS[split]:
        fill(parts, PACKED_TOKENS, [size])
        before, done = done, len(parts)
        if done // 90 > before // 90:
            other, parts = parts, parts.fork()
            extend(other, random_tokens(70, PACKED_GEOMETRY, seed=done))
    assert contents(parts) == contents(whole)
    assert parts.stats() == whole.stats()
    for layer in range(2):
        q = queries(1, 6, 64)[0]
        assert np.array_equal(attend(parts, q, layer), attend(whole, q, layer))
    for got, want in zip(read(parts), read(whole), strict=True):
        assert np.array_equal(got, want) and np.isfinite(got).all()


@pytest.mark.parametrize("spec", MATRIX)
def test_what_is_sealed_depends_on_the_tokens_of_the_page_alone(ops: CpuOps, spec: str) -> None:
    """Other tokens after the first page, which fixes scales, change no byte of it."""
    stores = [new_store(ops, spec, PACKED_GEOMETRY) for _ in range(2)]
    count = stores[0].spec.sink + 64
    for seed, store in enumerate(stores):
        extend(store, PACKED_TOKENS.part(0, count))
        extend(store, random_tokens(200, PACKED_GEOMETRY, seed + 50))
    first, second = (page_bytes(store) for store in stores)
    assert first[0] == second[0] and first[1] != second[1]


@pytest.mark.parametrize(("sink", "window"), [(0, 0), (4, 100), (70, 1)])
def test_pages_are_sealed_by_length_alone(ops: CpuOps, sink: int, window: int) -> None:
    """sealed(n) = max(0, (n - S - W) // 64 * 64); the exact window is never below W."""
    store = new_store(ops, f"k=f16,v=f16,sink={sink},window={window}")
    for length in range(1, 300):
        append(store, TOKENS.part(length - 1, length))
        sealed = max(0, (length - sink - window) // 64 * 64)
        extent = store.view(0).extent
        assert store.stats().sealed_tokens == sealed == 64 * len(store._state.slabs)
        assert (extent.sinks, extent.pages) == (min(length, sink), sealed // 64)
        assert extent.tail_tokens == length - extent.sinks - sealed
        assert extent.tail_tokens >= min(window, length - extent.sinks)
        assert extent.tail_tokens < window + 64


def test_a_token_under_way_is_seen_but_not_counted(ops: CpuOps) -> None:
    store = new_store(ops)
    extend(store, TOKENS.part(0, 63))
    one = TOKENS.part(63, 64)
    for layer in range(2):
        store.append(layer, on_device(store, one.keys[layer]), on_device(store, one.values[layer]))
        assert len(store) == 63 and store.view(layer).extent.tail_tokens == 64
    store.advance()
    assert len(store) == 64 and store.stats().sealed_tokens == 64


@pytest.mark.parametrize("spec", PLAIN_SPECS)
@pytest.mark.parametrize("start", [0, 2, 63, 170, 250])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("layers_done", [0, 1, 2])
def test_a_failed_extension_leaves_no_trace(
    ops: CpuOps, spec: str, start: int, error: type[BaseException], layers_done: int
) -> None:
    store = new_store(ops, spec)
    if start:
        extend(store, TOKENS.part(0, start))
    before, stats = contents(store), store.stats()
    part = TOKENS.part(start, start + 200)
    with pytest.raises(error):
        with store.extending(200):
            for layer in range(layers_done):
                store.extend(
                    layer, on_device(store, part.keys[layer]), on_device(store, part.values[layer])
                )
            raise error
    assert contents(store) == before and store.stats() == stats
    assert_holds(store, TOKENS.part(0, start))
    extend(store, part)
    assert_holds(store, TOKENS.part(0, start + 200))


@pytest.mark.parametrize("spec", ["kvrt3", "k=q4_0:pre,v=int4:channel:g32,sink=70"])
def test_a_page_can_be_read_while_tokens_are_added(ops: CpuOps, spec: str) -> None:
    """A layer's new pages as soon as it is extended; others never."""
    store, whole = (new_store(ops, spec, PACKED_GEOMETRY) for _ in range(2))
    extend(store, PACKED_TOKENS.part(0, 210))
    extend(whole, PACKED_TOKENS)
    expected, sink = read(whole), whole.spec.sink
    page = ops.empty((2, 64, 2, 64))
    with store.extending(190):
        for layer in range(2):
            sides = (on_device(store, side[layer, 210:]) for side in PACKED_TOKENS)
            store.extend(layer, *sides)
            for index in range(4):
                page.fill(np.nan)
                store.read_page(layer, index, *page)
                rows = slice(sink + 64 * index, sink + 64 * index + 64)
                for got, want in zip(page, expected, strict=True):
                    assert np.array_equal(got, want[layer, rows])
            for index in (-1, len(store._state.slabs), 1000):
                with pytest.raises(CodecError, match=f"there is no sealed page {index}, there are"):
                    store.read_page(layer, index, *page)
    assert contents(store) == contents(whole)


@pytest.mark.parametrize("interrupted_layer", [0, 1])
def test_a_step_interrupted_while_sealing_can_be_done_again(
    ops: CpuOps, monkeypatch: pytest.MonkeyPatch, interrupted_layer: int
) -> None:
    store, fresh = new_store(ops), new_store(ops)
    extend(store, TOKENS.part(0, 63))
    calls: list[int] = []
    seal = CpuOps._seal

    def interrupted(*arguments: object) -> None:
        calls.append(1)
        if len(calls) == interrupted_layer + 1:
            raise KeyboardInterrupt
        seal(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(CpuOps, "_seal", interrupted)
        with pytest.raises(KeyboardInterrupt):
            append(store, TOKENS.part(63, 64))
    assert len(store) == 63
    assert_holds(store, TOKENS.part(0, 63))
    append(store, TOKENS.part(63, 70))
    extend(fresh, TOKENS.part(0, 70))
    assert contents(store) == contents(fresh)


def test_a_full_store_refuses_before_any_change(ops: CpuOps) -> None:
    store = new_store(ops, "k=f16,v=f16,sink=4", max_tokens=100)
    extend(store, TOKENS.part(0, 90))
    before = contents(store)
    with pytest.raises(ContextFullError, match="90 tokens cached and 11 more asked for, the limit"):
        with store.extending(11):
            pytest.fail("entered")
    assert contents(store) == before
    append(store, TOKENS.part(90, 100))
    before = contents(store)
    one = on_device(store, TOKENS.keys[0, 100:101])
    with pytest.raises(ContextFullError, match="limit is 100"):
        store.append(0, one, one)
    with pytest.raises(ContextFullError):
        store.check_room(1)
    store.check_room(0)
    assert contents(store) == before
    store.truncate(99)
    append(store, TOKENS.part(99, 100))
    assert contents(store) == before


def test_a_store_may_be_filled_to_the_last_token_at_once(ops: CpuOps) -> None:
    store = new_store(ops, max_tokens=300)
    extend(store, TOKENS.part(0, 300))
    assert len(store) == 300


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_below_one_token_is_refused(ops: CpuOps, limit: int) -> None:
    with pytest.raises(CodecError, match=f"at least one token, got max_tokens={limit}"):
        new_store(ops, max_tokens=limit)


@pytest.mark.parametrize(
    "shape", [(1, 3, 8), (1, 2, 7), (2, 2, 8), (0, 2, 8), (1, 16), (1, 8, 2)], ids=str
)
def test_tokens_of_another_shape_are_refused(ops: CpuOps, shape: tuple[int, ...]) -> None:
    """They would be written past the end of the arrays."""
    store = new_store(ops)
    wrong, right = ops.to_device(np.zeros(shape, "f4")), ops.to_device(np.zeros((1, 2, 8), "f4"))
    calls: list[Callable[[], None]] = [
        lambda: store.append(0, wrong, right),
        lambda: store.append(0, right, wrong),
        lambda: store.extend(0, wrong, right),
        lambda: store.extend(0, right, wrong),
    ]
    with store.extending(1):
        for call in calls:
            with pytest.raises(CodecError, match="for a store that expects"):
                call()
        for layer in range(2):
            store.extend(layer, right, right)
    with pytest.raises(CodecError, match="for a store that expects"):
        store.read(0, wrong, right)
    with pytest.raises(CodecError, match=r"inside .with store.extending"):
        store.extend(0, right, right)  # nothing was announced


@pytest.mark.parametrize("spec", MATRIX)
def test_pages_may_lie_anywhere(ops: CpuOps, spec: str) -> None:
    """Moving every page to another address, in another order, changes no bit of any result."""
    store = new_store(ops, spec, PACKED_GEOMETRY)
    extend(store, PACKED_TOKENS)
    q = queries(1, 4, 64, seed=3)[0]
    tokens, result, before = read(store), attend(store, q, 1), contents(store)
    old = store._state.slabs
    order = np.random.default_rng(4).permutation(len(old))
    moved = {int(index): ops.to_device(old[index].copy()) for index in order}
    store._hold([moved[index] for index in range(len(old))])
    for slab in old:
        slab.fill(255)
    store._set_extent(len(store))
    assert len(order) > 2 and contents(store) == before
    assert np.array_equal(attend(store, q, 1), result)
    for side, expected in zip(read(store), tokens, strict=True):
        assert np.array_equal(side, expected)


def test_layers_and_heads_do_not_touch_each_other(ops: CpuOps) -> None:
    geometry = Geometry(num_layers=3, num_kv_heads=5, head_dim=3)
    tokens = random_tokens(200, geometry)
    store = new_store(ops, "k=f32,v=f16,sink=1,window=2", geometry)
    extend(store, tokens)
    assert_holds(store, tokens)
