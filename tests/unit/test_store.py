"""KVStore: what is kept depends on the tokens and their number only, and nothing is ever lost."""

from collections.abc import Callable

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.errors import CodecError, ContextFullError
from kvrt.kvstore import Geometry, KVSpec, estimate, fixed_bytes
from kvrt.kvstore.stats import sealed_pages, table_entries, tail_rows
from tests.helpers.stores import (
    GEOMETRY,
    Tokens,
    append,
    contents,
    extend,
    fill,
    new_store,
    on_device,
    random_tokens,
    read,
    stored,
)

SPECS = [
    "f32",
    "f16",
    "bf16",
    "k=f32,v=f16,window=1",
    "k=f16,v=f16,sink=4,window=100",
    "k=bf16,v=f32,sink=70",
    "k=f16,v=bf16,sink=64,window=64",
]
TOKENS = random_tokens(1000)


def assert_holds(store_tokens: Tokens, spec: str, expected: Tokens) -> None:
    parsed = KVSpec.parse(spec)
    assert np.array_equal(store_tokens.keys, stored(expected.keys, parsed.k.exact_dtype))
    assert np.array_equal(store_tokens.values, stored(expected.values, parsed.v.exact_dtype))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 63, 64, 65, 134, 135, 168, 169, 400])
def test_read_gives_every_token(ops: CpuOps, spec: str, length: int) -> None:
    store = new_store(ops, spec)
    if length:
        extend(store, TOKENS.part(0, length))
    assert len(store) == length
    assert_holds(read(store), spec, TOKENS.part(0, length))


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


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_gives_the_same_bytes(ops: CpuOps, spec: str, split: str) -> None:
    whole, parts = new_store(ops, spec), new_store(ops, spec)
    assert sum(max(size, 1) for size in SPLITS[split]) == 300
    extend(whole, TOKENS.part(0, 300))
    fill(parts, TOKENS, SPLITS[split])
    assert contents(parts) == contents(whole)
    assert parts.stats() == whole.stats()
    assert_holds(read(parts), spec, TOKENS.part(0, 300))


@pytest.mark.parametrize(("sink", "window"), [(0, 0), (4, 100), (70, 1)])
def test_pages_are_sealed_by_length_alone(ops: CpuOps, sink: int, window: int) -> None:
    """sealed(n) = max(0, (n - S - W) // 64 * 64); the exact window is never below W."""
    store = new_store(ops, f"k=f16,v=f16,sink={sink},window={window}")
    for length in range(1, 300):
        append(store, TOKENS.part(length - 1, length))
        sealed = max(0, (length - sink - window) // 64 * 64)
        extent = store.view(0).extent
        assert store.stats().sealed_tokens == sealed == 64 * len(store._pages[0])
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


@pytest.mark.parametrize("spec", SPECS)
def test_stats_are_the_arrays_and_the_estimate(ops: CpuOps, spec: str) -> None:
    parsed = KVSpec.parse(spec)
    edge = parsed.sink + parsed.window
    store = new_store(ops, spec)
    assert store.stats().bytes == fixed_bytes(GEOMETRY, parsed)
    for length in sorted({0, 1, parsed.sink, edge, edge + 63, edge + 64, edge + 65, 1000}):
        if length > len(store):
            extend(store, TOKENS.part(len(store), length))
        stats = store.stats()
        arrays = [*store._pages[0], *store._sinks, *store._tail, store._pages[1], store._settings]
        assert stats.bytes == sum(array.nbytes for array in arrays)
        assert stats.bytes == estimate(GEOMETRY, parsed, length)
        assert stats.tokens == length
        assert stats.sealed_tokens + parsed.sink + tail_rows(parsed) >= length


def test_the_estimate_in_numbers() -> None:
    """128 bytes a token in f16; 1,000 tokens after 4 sinks and a window of 100 seal 14 pages."""
    spec = KVSpec.parse("k=f16,v=f16,sink=4,window=100")
    pages, tail, sinks, tables = 14 * 64 * 128, 192 * 128, 4 * 128, (16 + 16) * 8
    assert estimate(GEOMETRY, spec, 1000) == pages + tail + sinks + tables
    assert estimate(GEOMETRY, KVSpec.parse("f32"), 64) == 64 * 256 + 64 * 256 + (16 + 16) * 8


@pytest.mark.parametrize(
    ("pages", "entries"), [(0, 16), (1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (1000, 1024)]
)
def test_the_page_table_doubles(pages: int, entries: int) -> None:
    assert table_entries(pages) == entries


def test_the_page_table_grows_and_shrinks_with_the_tokens(ops: CpuOps) -> None:
    """16 pages, 17, 33, and back; what is kept stays readable at every size of the table."""
    tokens = random_tokens(33 * 64)
    store = new_store(ops)
    for length in (16 * 64, 17 * 64, 33 * 64):
        extend(store, tokens.part(len(store), length))
        assert store.stats().table_bytes == 8 * (table_entries(length // 64) + 16)
        assert_holds(read(store), "f16", tokens.part(0, length))
    for length in (32 * 64, 17 * 64 - 1, 5, 0):
        store.truncate(length)
        assert store.stats().bytes == estimate(GEOMETRY, store.spec, length)
        assert_holds(read(store), "f16", tokens.part(0, length))


def test_a_limit_is_not_an_allocation(ops: CpuOps) -> None:
    small, large = new_store(ops, max_tokens=1), new_store(ops, max_tokens=1 << 40)
    assert small.stats().bytes == large.stats().bytes


CUTS = [0, 1, 3, 4, 5, 64, 65, 100, 127, 128, 150, 192, 195, 196, 197, 230, 259, 260, 299, 300]


@pytest.mark.parametrize("spec", SPECS)
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
    assert_holds(read(store), spec, TOKENS.part(0, cut))
    other = random_tokens(500, seed=1)  # what comes after differs from what was cut off
    for target in (store, fresh):
        fill(
            target,
            Tokens(
                *(
                    np.concatenate([a[:, :cut], b], axis=1)
                    for a, b in zip(TOKENS, other, strict=True)
                )
            ),
            [0, 90, 0, 64, 33],
        )
    assert contents(store) == contents(fresh)
    assert store.stats() == fresh.stats()


def test_truncating_step_by_step_is_truncating_at_once(ops: CpuOps) -> None:
    spec = "k=f16,v=f32,sink=4,window=30"
    store = new_store(ops, spec)
    extend(store, TOKENS.part(0, 400))
    for cut in range(399, -1, -7):
        store.truncate(cut)
        assert_holds(read(store), spec, TOKENS.part(0, cut))
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
    assert_holds(read(store), "f16", TOKENS.part(0, 10))


@pytest.mark.parametrize("spec", SPECS)
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
    assert_holds(read(store), spec, TOKENS.part(0, start))
    extend(store, part)
    assert_holds(read(store), spec, TOKENS.part(0, start + 200))


@pytest.mark.parametrize("interrupted_layer", [0, 1])
def test_a_step_interrupted_while_sealing_can_be_done_again(
    ops: CpuOps, monkeypatch: pytest.MonkeyPatch, interrupted_layer: int
) -> None:
    store, fresh = new_store(ops), new_store(ops)
    extend(store, TOKENS.part(0, 63))
    calls: list[int] = []
    seal = CpuOps.seal

    def interrupted(*arguments: object) -> None:
        calls.append(1)
        if len(calls) == interrupted_layer + 1:
            raise KeyboardInterrupt
        seal(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(CpuOps, "seal", interrupted)
        with pytest.raises(KeyboardInterrupt):
            append(store, TOKENS.part(63, 64))
    assert len(store) == 63
    assert_holds(read(store), "f16", TOKENS.part(0, 63))
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


@pytest.mark.parametrize("spec", ["f32", "k=f16,v=bf16,sink=4,window=100"])
def test_pages_may_lie_anywhere(ops: CpuOps, spec: str) -> None:
    """Moving every page to another address, in another order, changes no bit of any result."""
    store = new_store(ops, spec)
    extend(store, TOKENS.part(0, 700))
    q = ops.to_device(np.random.default_rng(3).standard_normal((4, 8), dtype=np.float32))

    def attend() -> np.ndarray:
        out = ops.empty((4, 8))
        ops.attend(q, store.view(1), 0.35, None, out)
        return np.array(out)

    tokens, result, before = read(store), attend(), contents(store)
    old = store._pages[0]
    order = np.random.default_rng(4).permutation(len(old))
    moved = {int(index): ops.to_device(old[index].copy()) for index in order}
    store._pages = store._make_pages([moved[index] for index in range(len(old))])
    for slab in old:
        slab.fill(255)
    store._set_extent(len(store))
    assert len(order) > 8 and contents(store) == before
    assert np.array_equal(attend(), result)
    for side, expected in zip(read(store), tokens, strict=True):
        assert np.array_equal(side, expected)


def test_layers_and_heads_do_not_touch_each_other(ops: CpuOps) -> None:
    geometry = Geometry(num_layers=3, num_kv_heads=5, head_dim=3)
    tokens = random_tokens(200, geometry)
    store = new_store(ops, "k=f32,v=f16,sink=1,window=2", geometry)
    extend(store, tokens)
    assert_holds(read(store), "k=f32,v=f16", tokens)


@pytest.mark.parametrize("spec", SPECS)
def test_sealed_pages_formula(spec: str) -> None:
    parsed = KVSpec.parse(spec)
    for length in range(400):
        expected = max(0, (length - parsed.sink - parsed.window) // 64)
        assert sealed_pages(parsed, length) == expected
