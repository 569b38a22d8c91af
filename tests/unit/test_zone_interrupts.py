"""Ctrl-C at every line of a store of zones: nothing changed, or all of it, and it goes on."""

from collections.abc import Callable
from pathlib import Path
from types import CodeType

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.kvstore import load_store, save_store
from kvrt.trizone import memory, moving, packing, reading, state, store
from kvrt.trizone.store import ZoneStore
from tests.helpers.interrupts import interrupt_at
from tests.helpers.stores import append, attend, extend, on_device, queries, random_tokens
from tests.helpers.zone_stores import (
    GEOMETRY,
    compress_layer,
    contents,
    new_store,
    prefill,
    random_prompt,
    read_heads,
)

FIRST, SECOND = random_prompt(120), random_prompt(90, seed=1)
TOKENS = random_tokens(40, GEOMETRY, seed=2)
MODULES = (memory, moving, packing, reading, state, store)
IN_THE_STORE = {module.__file__ for module in MODULES}


def in_the_store(code: CodeType) -> bool:
    return code.co_filename in IN_THE_STORE


def step(kept: ZoneStore, count: int = 1) -> None:
    """As the decoder does it."""
    for _ in range(count):
        token = len(kept) % 40
        with kept.stepping(token, np.ones((2, 8), np.float32)):
            for layer in range(2):
                rows = [np.zeros((4, 16), np.float32)]
                rows += [side[layer, token] for side in TOKENS]
                kept.ops.enter(kept.view(layer), on_device(kept, np.concatenate(rows)), None)


def begun(ops: CpuOps, steps: int) -> ZoneStore:
    kept = new_store(ops, "rdkv:48")
    prefill(kept, FIRST)
    append(kept, TOKENS.part(0, steps))
    return kept


# Exact tokens after the prompt (28 fill zone C), and what is done then.
ACTIONS: dict[str, tuple[int | None, Callable[[ZoneStore], None]]] = {
    "first prompt": (None, lambda kept: prefill(kept, FIRST)),
    "second prompt": (10, lambda kept: prefill(kept, SECOND)),
    "append": (3, lambda kept: append(kept, TOKENS.part(0, 1))),
    "append into a larger zone": (28, lambda kept: append(kept, TOKENS.part(0, 2))),
    "step": (5, step),
    "step into a larger zone": (27, lambda kept: step(kept, 3)),
    "extend": (10, lambda kept: extend(kept, TOKENS.part(0, 40))),
    "truncate": (36, lambda kept: kept.truncate(125)),
    "clear": (10, lambda kept: kept.clear()),
}


def seen(kept: ZoneStore) -> list[np.ndarray]:
    """What reading and attention give; attention first, as it sees what kernels see."""
    kept.check_room(0)
    q = queries(1, 4, 16)[0]
    out = [attend(kept, q, layer) for layer in range(2)] if len(kept) else []
    return out + [side for layer in range(2) for head in read_heads(kept, layer) for side in head]


@pytest.mark.parametrize("name", ACTIONS)
def test_an_interrupted_change_is_done_or_not(ops: CpuOps, name: str) -> None:
    steps, action = ACTIONS[name]
    start = new_store(ops, "rdkv:48") if steps is None else begun(ops, steps)
    known = {}
    last = start.fork()
    for done in (start, last):
        if done is last:
            action(last)
        after = done.fork()
        prefill(after, SECOND)
        known[len(done)] = contents(done), seen(done), contents(after)
    middle = start.fork()
    if name.startswith(("append into", "step into")):  # it adds several
        while len(middle) < len(last) - 1:
            (step if "step" in name else lambda kept: append(kept, TOKENS.part(0, 1)))(middle)
            after = middle.fork()
            prefill(after, SECOND)
            known[len(middle)] = contents(middle), seen(middle), contents(after)
    for line in range(1, 3000):
        kept = start.fork()
        if not interrupt_at(line, lambda kept=kept: action(kept), in_the_store):  # type: ignore[misc]
            break
        held, read, afterwards = known[len(kept)]
        for got, want in zip(seen(kept), read, strict=True):
            assert np.array_equal(got, want)
        assert contents(kept) == held
        prefill(kept, SECOND)
        assert contents(kept) == afterwards
    assert 8 < line < 2999


@pytest.mark.parametrize("steps", [0, 28])
def test_an_interrupted_step_is_no_part_of_a_fork_or_file(
    ops: CpuOps, tmp_path: Path, steps: int
) -> None:
    kept = begun(ops, steps)
    before, held = contents(kept), kept.stats()

    with pytest.raises(KeyboardInterrupt):
        with kept.stepping(7, np.ones((2, 8), np.float32)):
            assert kept.view(0).extent.tail_tokens == 36 + steps + 1
            raise KeyboardInterrupt
    save_store(kept, tmp_path / "x.kv")
    for other in (kept, kept.fork(), load_store(tmp_path / "x.kv", kept).store):
        assert contents(other) == before and len(other) == 120 + steps
    assert load_store(tmp_path / "x.kv", kept).store.stats() == held


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("steps", [None, 0, 30])
def test_a_failed_prompt_leaves_no_trace(
    ops: CpuOps, error: type[BaseException], layers: int, steps: int | None
) -> None:
    kept = new_store(ops, "rdkv:48") if steps is None else begun(ops, steps)
    before, read, stats = contents(kept), seen(kept), kept.stats()
    with pytest.raises(error):
        with kept.extending(len(SECOND)):
            for layer in range(layers):
                compress_layer(kept, SECOND, layer)
            raise error
    for got, want in zip(seen(kept), read, strict=True):
        assert np.array_equal(got, want)
    assert contents(kept) == before and kept.stats() == stats
    other = new_store(ops, "rdkv:48") if steps is None else begun(ops, steps)
    for store_ in (kept, other):
        prefill(store_, SECOND)
    assert contents(kept) == contents(other)


def test_undoing_that_is_interrupted_is_done_later(
    ops: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = begun(ops, 30)
    before, read = contents(kept), seen(kept)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        with kept.extending(len(SECOND)):
            compress_layer(kept, SECOND, 0)
            patch.setattr(ZoneStore, "_point_all", interrupted)
            raise ValueError
    for got, want in zip(seen(kept), read, strict=True):
        assert np.array_equal(got, want)
    assert contents(kept) == before


def test_queries_that_fail_leave_no_trace(ops: CpuOps) -> None:
    kept = begun(ops, 30)
    before = contents(kept)

    def fails(rows: slice) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with kept.extending(len(SECOND)):
            compress_layer(kept, SECOND, 0)
            kept.compress(1, *(on_device(kept, side[1]) for side in SECOND.tokens), fails)
    assert contents(kept) == before
