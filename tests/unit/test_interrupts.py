"""Ctrl-C at every line of the store and of the pool, and a fork: nothing lost, nothing stuck."""

import os
from collections.abc import Callable
from types import CodeType

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.backends.pool import Pool
from kvrt.kvstore import Geometry, KVStore, basis, checks, layers, reading, state, store
from tests.helpers.interrupts import interrupt_at
from tests.helpers.stores import (
    Tokens,
    append,
    contents,
    extend,
    new_store,
    random_tokens,
    read,
)

TOKENS = random_tokens(330)
SPEC = "k=f32,v=f32,sink=3,window=70"
PACKED_SPEC = "k=int4:channel:g32:norm:page:had,v=e4m3,sink=3,window=70"
PACKED_GEOMETRY = Geometry(num_layers=2, num_kv_heads=1, head_dim=16)
PACKED_TOKENS = random_tokens(330, PACKED_GEOMETRY)


IN_THE_STORE = {module.__file__ for module in (store, basis, checks, layers, reading, state)}


def in_the_store(code: CodeType) -> bool:
    return code.co_filename in IN_THE_STORE


def in_the_pool(code: CodeType) -> bool:
    return code is Pool.run.__code__


def check(kept: KVStore) -> None:
    """What the store says it holds is there, and it goes on from there as if nothing had been."""
    for side, expected in zip(read(kept), TOKENS.part(0, len(kept)), strict=True):
        assert np.array_equal(side, expected)
    extend(kept, TOKENS.part(len(kept), 330))
    for side, expected in zip(read(kept), TOKENS, strict=True):
        assert np.array_equal(side, expected)


ACTIONS: dict[str, tuple[int, Callable[[KVStore, Tokens], None], set[int]]] = {
    "append": (200, lambda kept, tokens: append(kept, tokens.part(200, 201)), {200, 201}),
    # The 201st token after 3 sinks and a window of 70 seals a page.
    "seal": (200, lambda kept, tokens: append(kept, tokens.part(200, 202)), {200, 201, 202}),
    "extend": (150, lambda kept, tokens: extend(kept, tokens.part(150, 320)), {150, 320}),
    "extend-empty": (0, lambda kept, tokens: extend(kept, tokens.part(0, 320)), {0, 320}),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_an_interrupted_addition_can_be_repeated(ops: CpuOps, name: str) -> None:
    start, action, lengths = ACTIONS[name]
    for line in range(1, 2000):
        kept = new_store(ops, SPEC)
        if start:
            extend(kept, TOKENS.part(0, start))
        if not interrupt_at(line, lambda kept=kept: action(kept, TOKENS), in_the_store):  # type: ignore[misc]
            break
        assert len(kept) in lengths
        check(kept)
    assert 10 < line < 1999


@pytest.mark.parametrize("name", ACTIONS)
def test_an_interrupted_addition_of_packed_tokens(ops: CpuOps, name: str) -> None:
    """Afterwards the bytes, and the scales of the first page, are those of an undisturbed store."""
    start, action, lengths = ACTIONS[name]
    begun, whole = (new_store(ops, PACKED_SPEC, PACKED_GEOMETRY) for _ in range(2))
    if start:
        extend(begun, PACKED_TOKENS.part(0, start))
    extend(whole, PACKED_TOKENS)
    for line in range(1, 2000, 3):
        kept = begun.fork()
        run = lambda kept=kept: action(kept, PACKED_TOKENS)  # noqa: E731
        if not interrupt_at(line, run, in_the_store):
            break
        assert len(kept) in lengths
        extend(kept, PACKED_TOKENS.part(len(kept), 330))
        assert contents(kept) == contents(whole)
    assert 10 < line < 1999


def test_an_interrupted_shift_is_done_or_not(ops: CpuOps) -> None:
    begun = new_store(ops, PACKED_SPEC, PACKED_GEOMETRY)
    extend(begun, PACKED_TOKENS)
    moved = begun.fork()
    moved.shift(128)
    known = {330: contents(begun), 202: contents(moved)}
    for line in range(1, 2000):
        kept = begun.fork()
        if not interrupt_at(line, lambda kept=kept: kept.shift(128), in_the_store):  # type: ignore[misc]
            break
        read(kept)
        assert contents(kept) == known[len(kept)]
    assert 5 < line < 1999


@pytest.mark.parametrize("tokens", [0, 2, 3, 100, 130, 250, 299])
def test_an_interrupted_truncation_keeps_a_prefix(ops: CpuOps, tokens: int) -> None:
    for line in range(1, 2000):
        kept = new_store(ops, SPEC)
        extend(kept, TOKENS.part(0, 300))
        if not interrupt_at(line, lambda kept=kept: kept.truncate(tokens), in_the_store):  # type: ignore[misc]
            break
        assert len(kept) in (tokens, 300)
        check(kept)
    assert 5 < line < 1999


def test_the_pool_runs_all_jobs_and_raises_their_errors() -> None:
    pool = Pool(3)
    seen: list[int] = []
    pool.run(seen.append, range(100))
    assert sorted(seen) == list(range(100))

    def fail(job: int) -> None:
        if job == 5:
            raise ValueError("five")

    with pytest.raises(ValueError, match="five"):
        pool.run(fail, range(10))
    pool.run(seen.append, range(3))
    assert len(seen) == 103


@pytest.mark.parametrize("line", range(1, 30))
def test_an_interrupted_pool_works_on(line: int) -> None:
    pool = Pool(2)
    seen: list[int] = []
    pool.run(seen.append, [0])
    interrupt_at(line, lambda: pool.run(seen.append, range(1, 8)), in_the_pool)
    before = len(seen)
    pool.run(seen.append, range(20))
    assert len(seen) - before >= 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes_too(ops: CpuOps) -> None:
    kept = new_store(ops, "f16")
    extend(kept, TOKENS.part(0, 100))
    x, table = ops.to_device(np.ones((40, 64), "f4")), ops.matrix(np.ones((48, 64), "f4"))
    from kvrt.backends.ops import Linear

    def compute() -> float:
        out = ops.empty((40, 48))
        ops.linear(x, (Linear(table),), (out,))
        few = ops.empty((1, 48))
        ops.linear(x[:1], (Linear(table),), (few,))
        return float(out.sum() + few.sum())

    expected = compute()
    child = os.fork()
    if child == 0:
        os._exit(0 if compute() == expected else 3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert compute() == expected
