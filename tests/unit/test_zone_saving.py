"""Saved stores of zones: they come back to the byte, and what is damaged is refused on one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvrt.backends.cpu import CpuOps
from kvrt.errors import ContextFullError, KvrtError, UnsupportedError
from kvrt.kvstore import Geometry, load_store, save_store
from kvrt.trizone.store import ZoneStore
from tests.helpers import stores as pages
from tests.helpers.codecs import rotary_for
from tests.helpers.stores import append, attend, extend, queries
from tests.helpers.zone_stores import (
    GEOMETRY,
    PROMPTS,
    SPECS,
    TOKENS,
    add_two_prompts,
    contents,
    new_store,
    prefill,
    read_heads,
)

FIRST, SECOND = PROMPTS


def empty(store: ZoneStore) -> None:
    pass


def cut(store: ZoneStore) -> None:
    add_two_prompts(store)
    store.truncate(store.parts().frozen)


LIVES: dict[str, Callable[[ZoneStore], None]] = {
    "empty": empty,
    "exact": lambda store: extend(store, TOKENS.part(0, 30)),
    "one prompt": lambda store: prefill(store, FIRST),
    "two prompts": add_two_prompts,
    "two prompts, cut": cut,
    "cleared": lambda store: (add_two_prompts(store), store.clear(), prefill(store, SECOND))[0],
}


def lived(ops: CpuOps, life: str = "two prompts", spec: str = "rdkv:48", **how: Any) -> ZoneStore:
    store = new_store(ops, spec, **how)
    LIVES[life](store)
    return store


def reloaded(store: ZoneStore, folder: Path) -> ZoneStore:
    save_store(store, folder / "x.kv")
    loaded = load_store(folder / "x.kv", store).store
    assert isinstance(loaded, ZoneStore)
    return loaded


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("life", LIVES)
def test_every_life_comes_back(ops: CpuOps, tmp_path: Path, spec: str, life: str) -> None:
    store = lived(ops, life, spec)
    other = reloaded(store, tmp_path)
    for _ in range(2):
        assert contents(other) == contents(store) and other.stats() == store.stats()
        for layer in range(2):
            for got, want in zip(read_heads(other, layer), read_heads(store, layer), strict=True):
                assert np.array_equal(got.keys, want.keys)
                assert np.array_equal(got.values, want.values)
            q = queries(1, 4, 16)[0]
            if len(store):
                assert np.array_equal(attend(other, q, layer), attend(store, q, layer))
        for one in (store, other):  # and goes on alike
            append(one, TOKENS.part(20, 60))
            prefill(one, SECOND)
            one.truncate(len(one))
    assert [path.name for path in tmp_path.iterdir()] == ["x.kv"]


def test_a_fork_is_saved_apart(ops: CpuOps, tmp_path: Path) -> None:
    store = lived(ops)
    fork, before = store.fork(), contents(store)
    append(fork, TOKENS.part(0, 70))
    assert contents(reloaded(fork, tmp_path)) == contents(fork)
    assert contents(reloaded(store, tmp_path)) == before


def test_the_formats_library_reads_it(ops: CpuOps, tmp_path: Path) -> None:
    store = lived(ops)
    save_store(store, tmp_path / "x.kv", token_ids=list(range(len(store))))
    found, state = load_file(tmp_path / "x.kv"), store.parts()
    names = {f"layers.{i}.{side}.exact" for i in (0, 1) for side in "kv"}
    parts = ("zones", "blocks", "channels")
    names |= {f"layers.{i}.{part}.{s}" for i in (0, 1) for part in parts for s in (0, 1)}
    assert set(found) == {*names, "token_ids"}
    for layer, zones in enumerate(state.layers):
        assert np.array_equal(found[f"layers.{layer}.k.exact"], zones.keys[:, : state.rows])
        for number, segment in enumerate(zones.segments):
            assert np.array_equal(found[f"layers.{layer}.zones.{number}"], segment.data)
            blocks = found[f"layers.{layer}.blocks.{number}"]
            assert np.array_equal(blocks[:, 0], segment.heads)
            assert np.array_equal(blocks[:, 1:], segment.token_counts)


# Refusals


def assert_refused(path: Path, like: ZoneStore, error: type[KvrtError], said: str) -> None:
    before, held = contents(like), like.stats()
    with pytest.raises(error) as caught:
        load_store(path, like)
    assert type(caught.value) is error
    message = str(caught.value)
    assert said in message and path.name in message and "\n" not in message
    assert contents(like) == before and like.stats() == held


MISFITS: dict[str, tuple[str, Callable[[CpuOps], ZoneStore]]] = {
    "budget": (
        'another cache format: got "rdkv:48", expected "rdkv:49"; start with --kv rdkv:48',
        lambda ops: lived(ops, spec="rdkv:49"),
    ),
    "option": ("another cache format", lambda ops: lived(ops, spec="rdkv:48:shared")),
    "form": ("another cache format", lambda ops: lived(ops, spec="rdkv:paper:48")),
    "policy": ("another cache format", lambda ops: lived(ops, spec="h2o:48")),
    "window": ("another cache format", lambda ops: lived(ops, spec="rdkv:48,window=33")),
    "rope": ("another RoPE", lambda ops: lived(ops, rotary=rotary_for(GEOMETRY, theta=5e5))),
    "shape": (
        "of another shape",
        lambda ops: new_store(ops, "rdkv:48", Geometry(2, 1, 16)),
    ),
    "limit": (
        "462 tokens, more than the context limit of 461; start with -c 462 or more",
        lambda ops: lived(ops, "one prompt", max_tokens=461),
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_file_for_another_store_is_refused(ops: CpuOps, tmp_path: Path, name: str) -> None:
    save_store(lived(ops), tmp_path / "x.kv")
    said, other = MISFITS[name]
    error = ContextFullError if name == "limit" else UnsupportedError
    assert_refused(tmp_path / "x.kv", other(ops), error, said)


def test_stores_of_pages_and_of_zones_refuse_each_other(ops: CpuOps, tmp_path: Path) -> None:
    plain, zones = pages.new_store(ops, "f16", GEOMETRY), lived(ops)
    extend(plain, TOKENS)
    save_store(plain, tmp_path / "pages.kv")
    save_store(zones, tmp_path / "zones.kv")
    assert_refused(tmp_path / "pages.kv", zones, UnsupportedError, "start with --kv f16")
    with pytest.raises(UnsupportedError, match="start with --kv rdkv:48"):
        load_store(tmp_path / "zones.kv", plain)
