"""What a store of zones refuses: calls out of order, wrong shapes, numbers that are not finite."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.errors import CodecError, ContextFullError, KernelError, UnsupportedError
from kvrt.kvstore import Geometry, KVSpec, estimate
from kvrt.trizone.store import ZoneStore
from tests.helpers.stores import append, attend, extend, on_device, queries
from tests.helpers.zone_stores import (
    GEOMETRY,
    MORE,
    OTHERS,
    PROMPT,
    SPECS,
    Prompt,
    compress_layer,
    contents,
    filled,
    new_store,
    prefill,
    random_prompt,
    read_heads,
    same,
)


def test_calls_in_the_wrong_order(ops: CpuOps) -> None:
    store = filled(ops)
    before = contents(store)
    keys = on_device(store, np.zeros((1, 2, 16), np.float32))
    with pytest.raises(CodecError, match=r"inside .with store.extending"):
        store.extend(0, keys, keys)
    with pytest.raises(CodecError, match=r"inside .with store.extending"):
        store.compress(0, keys, keys, lambda rows: keys)
    store.append(0, keys, keys)
    with pytest.raises(CodecError, match=r"append\(\) was not called for layer 1"):
        store.advance()
    calls: list[Callable[[], object]] = [
        lambda: store.append(0, keys, keys), store.advance, store.fork, store.saved, store.stats,
        store.parts, lambda: store.truncate(0), lambda: store.check_room(1),
        lambda: store.extending(1).__enter__(),
    ]  # fmt: skip
    with store.extending(len(MORE)):
        for call in calls:
            with pytest.raises(CodecError, match=r"only extend\(\) and reading work"):
                call()
        read_heads(store, 0)
        compress_layer(store, MORE, 0)
        with pytest.raises(CodecError, match="layer 0 has the new tokens already: read it before"):
            read_heads(store, 0)
        with pytest.raises(CodecError, match="layer 0 has these tokens already, extend"):
            compress_layer(store, MORE, 0)
        for wrong in (2, -1, "0"):
            with pytest.raises(CodecError, match="there is no layer"):
                store.compress(wrong, keys, keys, lambda rows: keys)  # type: ignore[arg-type]
        assert same(read_heads(store, 1), read_heads(filled(ops), 1))
        compress_layer(store, MORE, 1)
    with pytest.raises(CodecError, match=r"extend\(\) was not called for layer 0"):
        with store.extending(1):
            pass
    store.truncate(len(store))
    assert len(store) == 700 and contents(store) != before


def test_a_token_under_way_is_forgotten_when_others_come(ops: CpuOps) -> None:
    """The layer that has it does not have the next one."""
    store, plain = filled(ops), filled(ops)
    one, others = OTHERS.part(0, 1), OTHERS.part(1, 4)
    store.append(0, on_device(store, one.keys[0]), on_device(store, one.values[0]))
    assert store.view(0).extent.tail_tokens == 37 and len(store) == 300
    extend(store, others)
    store.append(1, on_device(store, one.keys[1]), on_device(store, one.values[1]))
    with pytest.raises(CodecError, match="was not called for layer 0"):
        store.advance()
    extend(plain, others)
    assert contents(store) == contents(plain)


@pytest.mark.parametrize("shape", [(1, 2, 15), (1, 1, 16), (2, 2, 16), (0, 2, 16), (1, 32)])
def test_tokens_of_another_shape_are_refused(ops: CpuOps, shape: tuple[int, ...]) -> None:
    store = filled(ops)
    wrong, right = (on_device(store, np.zeros(s, "f4")) for s in (shape, (1, 2, 16)))
    before = contents(store)
    with pytest.raises(CodecError, match="for a store that expects"):
        with store.extending(1):
            store.compress(0, right, wrong, lambda rows: right)
    for keys, values in ((wrong, right), (right, wrong)):
        with pytest.raises(CodecError, match="for a store that expects"):
            store.append(0, keys, values)
    with pytest.raises(CodecError, match="for a store that expects"):
        store.read(0, right, right)
    assert contents(store) == before


@pytest.mark.parametrize("spec", ["rdkv:48", "rdkv:48,recompress=400", "rdkv:300,recompress=400"])
@pytest.mark.parametrize(
    ("queries", "refused"),
    [
        (lambda rows: PROMPT.queries[0][rows][1:].copy(), r"got queries \(31, 4, 16\) float32"),
        (lambda rows: PROMPT.queries[0][rows].astype("f8"), r"\(32, 4, 16\) float64, expected"),
        (lambda rows: PROMPT.queries[0][rows, :3].copy(), r"got queries \(32, 3, 16\)"),
        (lambda rows: PROMPT.queries[0][rows, :, :8].copy(), r"16\) float32"),
        (lambda rows: PROMPT.queries[0][rows][:, ::-1], "queries are a strided view"),
        (lambda rows: None, "got queries NoneType"),
        (PROMPT.queries[0], "must be a function of a slice, got ndarray"),
    ],
)
def test_queries_that_do_not_fit_are_refused(
    ops: CpuOps, spec: str, queries: Any, refused: str
) -> None:
    store = new_store(ops, spec, query_heads=4)
    keys, values = (on_device(store, side[0]).copy() for side in PROMPT.tokens)
    before = contents(store)
    with pytest.raises(CodecError, match=refused):
        with store.extending(300):
            store.compress(0, keys, values, queries)
    assert contents(store) == before


@pytest.mark.parametrize("heads", [0, -2, 3, 4.0, "4", True])
def test_a_wrong_number_of_query_heads_is_refused(ops: CpuOps, heads: Any) -> None:
    with pytest.raises(CodecError, match=r"multiple of 2, the KV heads|must be a whole number"):
        new_store(ops, "rdkv:48,recompress=200", query_heads=heads)


def test_values_that_cannot_be_written_are_refused(ops: CpuOps) -> None:
    """They change by rounding: of a file that is mapped, which would end the process."""
    store = new_store(ops)
    keys, values = (on_device(store, side[0]).copy() for side in PROMPT.tokens)
    values.flags.writeable = False
    before = contents(store)
    with pytest.raises(KernelError, match=r"change_basis: rows .* are read-only"):
        with store.extending(300):
            store.compress(0, keys, values, lambda rows: PROMPT.queries[0][rows].copy())
    assert contents(store) == before and np.array_equal(values, PROMPT.values[0])
    with pytest.raises(KernelError, match=r"round_rows: rows .* are read-only"):
        store.ops.round_rows(values, np.dtype(np.float16))


def test_a_full_store_refuses_before_any_change(ops: CpuOps) -> None:
    store = filled(ops, max_tokens=310)
    before = contents(store)
    with pytest.raises(ContextFullError, match="300 tokens cached and 11 more asked for, the limi"):
        with store.extending(11):
            pytest.fail("entered")
    append(store, OTHERS.part(0, 10))
    with pytest.raises(ContextFullError, match="limit is 310"):
        append(store, OTHERS.part(10, 11))
    store.truncate(300)
    assert contents(store) == before


def test_what_no_such_store_can_be_is_refused(ops: CpuOps) -> None:
    with pytest.raises(CodecError, match="does not compress prompts: use a KVStore"):
        ZoneStore(GEOMETRY, KVSpec.parse("f16"), ops, 100)
    with pytest.raises(UnsupportedError, match="multiple of 16 up to 256, this cache has 24"):
        ZoneStore(Geometry(1, 1, 24), KVSpec.parse("rdkv:64"), ops, 100)
    with pytest.raises(CodecError, match="at least one token, got max_tokens=0"):
        new_store(ops, max_tokens=0)


@pytest.mark.parametrize("tokens", [-1, 1.5, True])
def test_a_wrong_number_of_tokens_is_refused(ops: CpuOps, tokens: Any) -> None:
    with pytest.raises(CodecError, match=r"cannot add -1|must be a whole number"):
        with new_store(ops).extending(tokens):
            pytest.fail("entered")


def test_no_tokens_change_nothing(ops: CpuOps) -> None:
    """Not even where exact tokens are more than the budget."""
    store = filled(ops, steps=50)
    before = contents(store)
    prefill(store, Prompt(*(side[:, :0] for side in PROMPT)))
    assert contents(store) == before


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_debug_refuses_numbers_that_are_not_finite(ops: CpuOps, side: str, bad: float) -> None:
    store = filled(ops, debug=True)
    before = contents(store)
    prompt = Prompt(*(part.copy() for part in MORE))
    getattr(prompt, side)[1, 30, 0, 3] = bad
    with pytest.raises(CodecError, match=f"layer 1: the {side} hold infinities or NaN"):
        prefill(store, prompt)
    assert contents(store) == before
    assert store.fork().debug


@pytest.mark.parametrize("spec", SPECS)
def test_numbers_that_are_not_finite_keep_to_the_budget(ops: CpuOps, spec: str) -> None:
    """Without `debug` they go through, and break no more than they are."""
    prompt = random_prompt(300)
    prompt.keys[0, 50, 0, 3], prompt.values[0, 60, 1, 2] = np.nan, np.inf
    prompt.queries[0, 290, 0] = np.nan
    store = new_store(ops, spec)
    prefill(store, prompt)
    assert store.stats().bytes <= estimate(GEOMETRY, store.spec, 300)
    assert np.isfinite(attend(store, queries(1, 4, 16)[0], layer=1)).all()
