"""Saved stores and sessions: every byte comes back, in another process too; misfits are refused."""

import errno
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kvrt import paths, tensor_file
from kvrt.backends import get_ops
from kvrt.backends.cpu import CpuOps
from kvrt.calibration import NuqTables
from kvrt.config import ModelConfig
from kvrt.errors import ContextFullError, KvrtError, StorageError, UnsupportedError
from kvrt.generate import cache_geometry
from kvrt.kvstore import Geometry, KVSpec, KVStore, load_store, save_store, serialize
from kvrt.models.decoder import Decoder
from kvrt.models.families import expected_tensors, ignored_tensor
from kvrt.session import Session
from kvrt.weights import Weights
from tests.helpers.codecs import GEOMETRY, MATRIX, FittedTables, rotary_for
from tests.helpers.fake_model import FakeTokenizer
from tests.helpers.interrupts import interrupt_at
from tests.helpers.stores import (
    append,
    attend,
    contents,
    extend,
    fill,
    new_store,
    queries,
    random_tokens,
    read,
)
from tests.helpers.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
TOKENS = random_tokens(600, GEOMETRY)
SPEC = "k=int4:token:g32:norm:page:had,v=e4m3,sink=3,window=20"
"""One with sinks, measured scales and a form of keys that can be shifted."""

SHIFTING = [text for text in MATRIX if KVSpec.parse(text).shifts]


def full_store(ops: CpuOps, spec: str = SPEC, length: int = 300, **extras: Any) -> KVStore:
    store = new_store(ops, spec, GEOMETRY, **extras)
    if length:
        extend(store, TOKENS.part(0, length))
    return store


def reloaded(store: KVStore, folder: Path) -> KVStore:
    save_store(store, folder / "x.kv")
    return load_store(folder / "x.kv", store).store


def assert_same(got: KVStore, expected: KVStore) -> None:
    """Equal in every byte that holds a token, in what they read, and in all that comes after."""
    assert contents(got) == contents(expected)
    assert got.stats() == expected.stats()
    for other in (got, expected):
        fill(other, random_tokens(220, GEOMETRY, seed=1), [0, 90, 0, 129])
    assert contents(got) == contents(expected)
    for side, wanted in zip(read(got), read(expected), strict=True):
        assert np.array_equal(side, wanted)
    q = queries(1, 4, GEOMETRY.head_dim)[0]
    for layer in range(GEOMETRY.num_layers):
        assert np.array_equal(attend(got, q, layer), attend(expected, q, layer))


@pytest.mark.parametrize("spec", MATRIX)
def test_every_format_comes_back(ops: CpuOps, spec: str, tmp_path: Path) -> None:
    """Sinks not full, just before the first page is sealed, several pages."""
    parsed = KVSpec.parse(spec)
    edge = parsed.sink + parsed.window
    for length in (1, edge + 63, edge + 200):
        store = full_store(ops, spec, length)
        assert_same(reloaded(store, tmp_path), store)
    assert [path.name for path in tmp_path.iterdir()] == ["x.kv"]


@pytest.mark.parametrize("spec", SHIFTING)
@pytest.mark.parametrize("pages", [1, 2, 4])
def test_a_shifted_store_comes_back(ops: CpuOps, spec: str, pages: int, tmp_path: Path) -> None:
    parsed = KVSpec.parse(spec)
    store = full_store(ops, spec, parsed.sink + parsed.window + 4 * 64 + 7)
    store.shift(64 * pages)  # the last time all that there are
    fork = store.fork()
    assert_same(reloaded(store, tmp_path), store)
    assert_same(reloaded(fork, tmp_path), fork)
    assert contents(fork) == contents(store)


@pytest.mark.parametrize("tokens", [0, 2, 3, 30, 100, 151, 214, 299])
def test_a_truncated_store_comes_back(ops: CpuOps, tokens: int, tmp_path: Path) -> None:
    store = full_store(ops)
    store.truncate(tokens)
    assert_same(reloaded(store, tmp_path), store)


def test_a_fork_and_its_origin_are_saved_apart(ops: CpuOps, tmp_path: Path) -> None:
    store = full_store(ops)
    fork = store.fork()
    append(fork, TOKENS.part(300, 400))
    assert_same(reloaded(store, tmp_path), full_store(ops))
    assert_same(reloaded(fork, tmp_path), full_store(ops, length=400))


def test_a_store_whose_step_was_interrupted_is_saved_as_it_counts(
    ops: CpuOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    spec, length = "k=f16:page,v=e4m3,sink=3", 3 + 64 - 1  # the next token seals a page
    store = full_store(ops, spec, length)
    with monkeypatch.context() as patch:
        patch.setattr(CpuOps, "seal", interrupted)
        with pytest.raises(KeyboardInterrupt):
            append(store, TOKENS.part(length, length + 1))
    loaded, fork = reloaded(store, tmp_path), store.fork()
    assert contents(loaded) == contents(full_store(ops, spec, length))
    append(store, TOKENS.part(length, length + 1))
    append(fork, TOKENS.part(300, 301))  # into a page of its own
    assert_same(store, full_store(ops, spec, length + 1))


def test_a_store_whose_undoing_was_interrupted_is_saved_as_it_was(
    ops: CpuOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    store, part = full_store(ops, length=150), TOKENS.part(150, 300)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        with store.extending(150):
            store.extend(0, ops.to_device(part.keys[0]), ops.to_device(part.values[0]))
            patch.setattr(KVStore, "_recover", interrupted)
            raise KeyboardInterrupt
    assert_same(reloaded(store, tmp_path), full_store(ops, length=150))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 150)),
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("truncate"), st.integers(0, 300)),
        st.tuples(st.just("shift"), st.integers(0, 3)),
        st.tuples(st.just("reload"), st.just(0)),
    ),
    max_size=8,
)


@settings(max_examples=25)
@given(steps=steps)
def test_any_life_goes_on_after_a_reload(
    ops: CpuOps, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    store, never = (new_store(ops, SPEC, GEOMETRY) for _ in range(2))
    for step, number in [*steps, ("reload", 0)]:
        if step == "reload":
            store = reloaded(store, tmp_path_factory.getbasetemp())
            assert contents(store) == contents(never)
            continue
        for target in (store, never):
            length = len(target)
            if step == "truncate":
                target.truncate(min(number, length))
            elif step == "shift":
                target.shift(min(number * 64, target.stats().sealed_tokens))
            elif length + number <= len(TOKENS):
                how = extend if step == "extend" else append
                how(target, TOKENS.part(length, length + number))


# Another process


def open_decoder(folder: Path) -> Decoder:
    config = ModelConfig.from_dir(folder)
    weights = Weights.open(folder, expected_tensors(config), ignored_tensor)
    return Decoder(config, weights, get_ops("cpu", 1))


def new_session(decoder: Decoder, spec: str) -> Session:
    """A session in any format, also in those that need a calibration."""
    geometry = cache_geometry(decoder.config)
    extras = {"rotary": decoder.rotary, "key_bias": decoder.key_biases}
    store = new_store(decoder.ops, spec, geometry, **extras)
    return Session(decoder, FakeTokenizer(), store, lambda: "tiny")  # type: ignore[arg-type]


def go_on(session: Session) -> np.ndarray:
    """The logits (steps, vocab_size) of what follows."""
    rows = [session.feed([*session.tokens, 7])]
    assert session.timings.reused_tokens == len(session.tokens) - 1
    for _ in range(20):
        rows.append(session.feed([*session.tokens, int(rows[-1].argmax())]))
    return np.stack(rows)


def child(folder: Path) -> None:
    """Go on with every saved session of the folder and write its logits."""
    decoder = open_decoder(folder)
    for index, spec in enumerate(MATRIX):
        session, metadata = new_session(decoder, spec).load(folder / f"{index}.kv")
        assert metadata["note"] == spec
        np.save(folder / f"{index}.npy", go_on(session))


def test_another_process_goes_on_with_the_same_logits(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen2", head_dim=64, vocab_size=100, max_context=4096)
    ids = np.random.default_rng(0).integers(0, 100, 260).tolist()
    decoder, expected = open_decoder(tmp_path), {}
    for index, spec in enumerate(MATRIX):
        session = new_session(decoder, spec)
        session.feed(ids)
        session.save(tmp_path / f"{index}.kv", {"note": spec})
        expected[index] = go_on(session)
        assert np.isfinite(expected[index]).all()
    code = "import sys; from pathlib import Path; from tests.unit.test_state import child;"
    command = [sys.executable, "-c", f"{code} child(Path(sys.argv[1]))", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for index, spec in enumerate(MATRIX):
        assert np.array_equal(np.load(tmp_path / f"{index}.npy"), expected[index]), spec


def test_a_forked_session_goes_its_own_way(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, head_dim=64, vocab_size=100)
    decoder = open_decoder(tmp_path)
    session = new_session(decoder, SPEC)
    session.feed(list(range(100)))
    fork = session.fork()
    fork.feed([*range(90), 5, 6, 7])
    assert session.tokens == list(range(100)) and len(session.store) == 100
    logits, again = go_on(session), new_session(decoder, SPEC)
    again.feed(list(range(100)))
    assert np.array_equal(go_on(again), logits)


# Refusals


def saved(ops: CpuOps, folder: Path, **how: Any) -> Path:
    save_store(full_store(ops), folder / "x.kv", **how)
    return folder / "x.kv"


def assert_refused(
    path: Path, like: KVStore, error: type[KvrtError], said: str, model: str = ""
) -> None:
    """In one line that names the file; the running store stays as it is."""
    before, held = contents(like), like.stats()
    with pytest.raises(error) as caught:
        load_store(path, like, model=model)
    assert type(caught.value) is error
    message = str(caught.value)
    assert said in message and path.name in message and "\n" not in message
    assert contents(like) == before and like.stats() == held


def changed(path: Path, **metadata: str | None) -> Path:
    """The file with other metadata."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"].update(metadata)
    header["__metadata__"] = {k: v for k, v in header["__metadata__"].items() if v is not None}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    return path


OTHER_SHAPE = replace(GEOMETRY, num_kv_heads=1)
MISFITS: dict[str, tuple[str, Callable[[CpuOps], KVStore]]] = {
    "shape": (
        'of another shape: got "2 layers, 2 KV heads of 64", expected "2 layers, 1 KV heads of 64"',
        lambda ops: new_store(ops, SPEC, OTHER_SHAPE),
    ),
    "theta": (
        "saved with another RoPE: got",
        lambda ops: full_store(ops, rotary=rotary_for(GEOMETRY, theta=5e5)),
    ),
    "amplitude": (
        "saved with another RoPE: got",
        lambda ops: full_store(ops, rotary=rotary_for(GEOMETRY, amplitude=1.1)),
    ),
    "spec": (
        f'saved in another cache format: got "{SPEC}", expected "kvrt4"; start with --kv {SPEC}',
        lambda ops: full_store(ops, "kvrt4"),
    ),
    "window": (
        "saved in another cache format",
        lambda ops: full_store(ops, SPEC.replace("window=20", "window=21")),
    ),
    "override": (
        "saved in another cache format",
        lambda ops: full_store(ops, SPEC + ",layers[1]=q8_0"),
    ),
    "limit": (
        "300 tokens, more than the context limit of 299; start with -c 300 or more",
        lambda ops: full_store(ops, length=200, max_tokens=299),
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_file_for_another_store_is_refused(ops: CpuOps, tmp_path: Path, name: str) -> None:
    said, other = MISFITS[name]
    error = ContextFullError if name == "limit" else UnsupportedError
    assert_refused(saved(ops, tmp_path), other(ops), error, said)


def test_the_cache_of_another_model_is_refused(ops: CpuOps, tmp_path: Path) -> None:
    path = saved(ops, tmp_path, model="a" * 64, metadata={"model_name": 'the "one"'})
    said = 'with another model: got "aaaaaaaaaaaa", expected "bbbbbbbbbbbb"; start with -m the '
    assert_refused(path, full_store(ops), UnsupportedError, said, model="b" * 64)
    assert load_store(path, full_store(ops), model="a" * 64).metadata["model"] == "a" * 64
    assert_refused(path, full_store(ops), UnsupportedError, 'expected "none"')


class OtherTables(FittedTables):
    def tables(self, *which: Any, **how: Any) -> NuqTables:
        tables = super().tables(*which, **how)
        return replace(tables, levels=tables.levels + np.float32(0.001))


def test_the_cache_of_another_calibration_is_refused(ops: CpuOps, tmp_path: Path) -> None:
    save_store(full_store(ops, "kvquant2"), tmp_path / "x.kv")
    other = full_store(ops, "kvquant2", calibration=OtherTables(GEOMETRY))
    said = "saved with another calibration: got"
    assert_refused(tmp_path / "x.kv", other, UnsupportedError, said)
    assert_same(reloaded(other, tmp_path), other)


def test_the_cache_of_another_key_bias_is_refused(ops: CpuOps, tmp_path: Path) -> None:
    geometry = replace(GEOMETRY, key_bias=True)

    def biased(size: float) -> KVStore:
        bias = ops.to_device(np.full((2, 64), size, np.float32))
        store = new_store(ops, "kivi4", geometry, key_bias=[bias, bias])
        extend(store, TOKENS.part(0, 250))
        return store

    assert_same(reloaded(biased(3), tmp_path), biased(3))
    said = "saved with another bias of the keys"
    assert_refused(tmp_path / "x.kv", biased(4), UnsupportedError, said)
    assert_refused(tmp_path / "x.kv", full_store(ops, "kivi4"), UnsupportedError, ', key bias"')


@pytest.mark.parametrize(
    ("metadata", "error", "said"),
    [
        ({"version": "2"}, UnsupportedError, 'of cache format version "2", this kvrt reads 3'),
        ({"version": None}, UnsupportedError, "of cache format version null"),
        ({"format": "kvrt-calibration"}, StorageError, "safetensors, but no saved cache"),
        ({"spec": None}, StorageError, "damaged: its metadata lack 'spec'"),
        ({"spec": "no\nspec"}, UnsupportedError, "another cache format"),
        ({"tokens": "299"}, StorageError, "damaged: tensor"),
        ({"tokens": "400"}, StorageError, "damaged: tensor"),
        ({"tokens": "-1"}, StorageError, 'its number of tokens is "-1"'),
        ({"tokens": "9" * 5000}, StorageError, "its number of tokens is"),
        ({"tokens": None}, StorageError, "its number of tokens is"),
        ({"tokens": "0"}, StorageError, "damaged: its numbers are not those that were saved"),
        ({"crc32": "1"}, StorageError, "damaged: its numbers are not those that were saved"),
        ({"crc32": None}, StorageError, "damaged: its numbers are not those that were saved"),
    ],
)
def test_changed_metadata_are_refused(
    ops: CpuOps, tmp_path: Path, metadata: dict[str, str], error: type[KvrtError], said: str
) -> None:
    assert_refused(changed(saved(ops, tmp_path), **metadata), full_store(ops), error, said)


def test_a_file_cut_anywhere_or_with_more_behind_is_refused(ops: CpuOps, tmp_path: Path) -> None:
    whole = saved(ops, tmp_path).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    path, like = tmp_path / "cut.kv", full_store(ops)
    for size in (0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert_refused(path, like, StorageError, "")
    path.write_bytes(whole + b"\0")
    assert_refused(path, like, StorageError, "more behind the last tensor")
    path.write_bytes(whole)
    assert_same(load_store(path, like).store, like)


def test_a_changed_byte_is_noticed(ops: CpuOps, tmp_path: Path) -> None:
    whole = saved(ops, tmp_path).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    path, like = tmp_path / "flipped.kv", full_store(ops)
    for at in np.random.default_rng(0).integers(header, len(whole), 20):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert_refused(path, like, StorageError, "not those that were saved")


def test_what_is_no_cache_is_refused(ops: CpuOps, tmp_path: Path) -> None:
    like = full_store(ops)
    write_tiny_model(tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    assert_refused(weights, like, StorageError, "safetensors, but no saved cache")
    (tmp_path / "text.kv").write_text("a text that is longer than eight bytes")
    assert_refused(tmp_path / "text.kv", like, StorageError, "no safetensors file")
    assert_refused(tmp_path / "absent.kv", like, StorageError, "cannot read")
    assert_refused(tmp_path, like, StorageError, "cannot read")


def test_a_session_interrupted_between_cache_and_ids_is_saved_as_both_hold(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, head_dim=64, vocab_size=100)
    session = new_session(open_decoder(tmp_path), SPEC)
    session.feed(list(range(100)))
    session.tokens.pop()  # the cache is ahead: Ctrl-C came after the last step was computed
    session.save(tmp_path / "x.kv")
    loaded, _ = session.load(tmp_path / "x.kv")
    assert loaded.tokens == list(range(99)) and len(loaded.store) == 99
    assert np.array_equal(go_on(loaded), go_on(session))


def test_a_cache_without_token_ids_is_no_session(ops: CpuOps, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, head_dim=64, vocab_size=100)
    session = new_session(open_decoder(tmp_path), SPEC)
    session.feed(list(range(100)))
    save_store(session.store, tmp_path / "x.kv", model="tiny")
    with pytest.raises(StorageError, match="a cache without token ids"):
        session.load(tmp_path / "x.kv")


# The file


@pytest.mark.parametrize("spec", ["f16", SPEC, "kvrt4"])
def test_the_formats_library_reads_it(ops: CpuOps, tmp_path: Path, spec: str) -> None:
    path = tmp_path / "x.kv"
    save_store(full_store(ops, spec), path, token_ids=list(range(300)), metadata={"é": "\n😀"})
    tensors = load_file(path)
    pages = full_store(ops, spec).parts().slabs
    assert np.array_equal(tensors["pages"], np.stack(pages))
    assert tensors["token_ids"].tolist() == list(range(300))
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    assert metadata["é"] == "\n😀" and metadata["tokens"] == "300"
    # Written again by it, in whatever order it likes.
    save_file(tensors, path, metadata)
    assert_same(load_store(path, full_store(ops, spec)).store, full_store(ops, spec))


def test_a_preset_is_spelled_out(ops: CpuOps, tmp_path: Path) -> None:
    """So that a file of today is not misread once the name means something else."""
    for spec in MATRIX:
        text = serialize._spelled(KVSpec.parse(spec))
        assert KVSpec.parse(text) == KVSpec.parse(spec)
        assert text.startswith("k=") and not any(name in text for name in ("kvrt", "kivi"))
    save_store(new_store(ops, "kvrt4", GEOMETRY), tmp_path / "x.kv")
    with safe_open(tmp_path / "x.kv", framework="np") as file:
        assert file.metadata()["spec"].startswith("k=int4:")


def test_saving_and_loading_copy_no_page_twice(ops: CpuOps, tmp_path: Path) -> None:
    geometry = Geometry(2, 2, 64)
    store = new_store(ops, "f32", geometry)
    for _ in range(4):
        extend(store, random_tokens(4096, geometry))
    pages = store.stats().page_bytes
    assert pages > 30 << 20

    def peak(action: Callable[[], object]) -> float:
        tracemalloc.start()
        try:
            action()
            return tracemalloc.get_traced_memory()[1] / pages
        finally:
            tracemalloc.stop()

    assert peak(lambda: save_store(store, tmp_path / "x.kv")) < 0.1
    assert peak(lambda: load_store(tmp_path / "x.kv", store)) < 1.1


# Interruptions


def test_a_failed_save_leaves_the_old_file(
    ops: CpuOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = saved(ops, tmp_path).read_bytes()
    store = full_store(ops, length=400)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    for name in ("replace", "fsync"):
        for failure, error in ((full, StorageError), (interrupted, KeyboardInterrupt)):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, failure)
                with pytest.raises(error):
                    save_store(store, tmp_path / "x.kv")
            assert [path.name for path in tmp_path.iterdir()] == ["x.kv"]
            assert (tmp_path / "x.kv").read_bytes() == old
    assert_same(reloaded(store, tmp_path), full_store(ops, length=400))


def in_the_files(code: CodeType) -> bool:
    return code.co_filename in (serialize.__file__, tensor_file.__file__, paths.__file__)


def test_an_interrupted_save_leaves_the_old_file_or_the_new(ops: CpuOps, tmp_path: Path) -> None:
    spec = "k=f16,v=f16,sink=1"
    path = tmp_path / "x.kv"
    store, like = full_store(ops, spec, 70), full_store(ops, spec, 5)
    for line in range(1, 2000, 7):
        save_store(like, path)
        if not interrupt_at(line, lambda: save_store(store, path), in_the_files):
            break
        loaded = load_store(path, like).store
        assert contents(loaded) == contents(store if len(loaded) == 70 else like)
        assert contents(store) == contents(full_store(ops, spec, 70))
    assert 100 < line < 1999
    assert len(load_store(path, like).store) == 70
