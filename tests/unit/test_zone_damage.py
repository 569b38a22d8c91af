"""Damaged files of stores of zones: each tensor, each number; refused on one line, or sound."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.errors import KvrtError, StorageError
from kvrt.kvstore import load_store, save_store
from kvrt.trizone.store import ZoneStore
from tests.helpers.zone_files import File
from tests.helpers.zone_stores import (
    add_two_prompts,
    contents,
    held_by,
    new_store,
    read_heads,
)


def lived(ops: CpuOps) -> ZoneStore:
    store = new_store(ops)
    add_two_prompts(store)
    return store


def assert_refused(path: Path, like: ZoneStore, error: type[KvrtError], said: str) -> None:
    before, held = contents(like), like.stats()
    with pytest.raises(error) as caught:
        load_store(path, like)
    assert type(caught.value) is error
    message = str(caught.value)
    assert said in message and path.name in message and "\n" not in message
    assert contents(like) == before and like.stats() == held


def test_a_changed_byte_is_noticed_and_so_is_a_missing_one(ops: CpuOps, tmp_path: Path) -> None:
    like, path = lived(ops), tmp_path / "x.kv"
    save_store(like, path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for at in np.random.default_rng(0).integers(header, len(whole), 40):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert_refused(path, like, StorageError, "damaged")
    for size in (0, 8, header - 1, header, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert_refused(path, like, StorageError, "")


def test_a_file_written_so_is_read(ops: CpuOps, tmp_path: Path) -> None:
    """Or the refusals below would be of the checksums."""
    like = lived(ops)
    save_store(like, tmp_path / "x.kv")
    path = File(tmp_path / "x.kv").write(tmp_path / "y.kv")
    assert contents(load_store(path, new_store(ops)).store) == contents(like)  # type: ignore[arg-type]


def test_each_tensor_is_needed_as_it_is(ops: CpuOps, tmp_path: Path) -> None:
    like, path = lived(ops), tmp_path / "x.kv"
    save_store(like, path)
    for name in File(path).tensors:
        for change in ("absent", "short", "flat", "huge", "number", "type"):
            file = File(path)
            dtype, shape, raw = file.tensors.pop(name)
            if change == "short":
                row = len(raw) // shape[0]
                file.tensors[name] = (dtype, [shape[0] - 1, *shape[1:]], raw[row:])
            elif change == "flat":
                file.tensors[name] = (dtype, [*shape, 1], raw)
            elif change == "huge":
                file.tensors[name] = (dtype, [1 << 40, *shape[1:]], raw)
            elif change == "number":
                file.tensors[name] = (dtype, [], raw[:8])
            elif change == "type":
                file.tensors[name] = ({"I64": "F64", "U8": "I8", "F16": "BF16"}[dtype], shape, raw)
            assert_refused(file.write(tmp_path / "y.kv"), like, StorageError, "damaged: ")


def damaged_texts(whole: str) -> Iterator[str]:
    """The text `zones` with each of its numbers, and of its lists, changed."""
    for key in ("rows", "frozen"):
        for wrong in (None, "36", -1, 0, 35, 37.0, True, 1 << 31, [36], 10**400):
            yield json.dumps({**json.loads(whole), key: wrong})
        known = json.loads(whole)
        yield json.dumps({**known, key: known[key] + 1})
        del known[key]
        yield json.dumps(known)
    for wrong in (None, 1, "true", []):
        yield json.dumps({**json.loads(whole), "rotated": wrong})
    for layer in (0, 1):
        for wrong in ([], [264], [264, 159, 0], [424, -1], [-1, 424], None, "ab", [[1], 2], 5):
            known = json.loads(whole)
            known["candidates"][layer] = wrong
            yield json.dumps(known)
    for wrong in (
        [],
        [[], []],
        {},
        {"": 1, "a": 2},
        None,
        [[264, 159]],
        [[264, 159]] * 3,
        "",
        "ab",
    ):
        yield json.dumps({**json.loads(whole), "candidates": wrong})
    yield from ("", "[]", "{", "null", "[" * 100_000, '{"rows": 1}', "\ud800")


def test_each_number_of_the_text_is_checked(ops: CpuOps, tmp_path: Path) -> None:
    like, path = lived(ops), tmp_path / "x.kv"
    save_store(like, path)
    whole = File(path).texts["zones"]
    known = {"rows": 39, "frozen": 459, "rotated": True, "candidates": [[264, 159]] * 2}
    assert json.loads(whole) == known
    for text in damaged_texts(whole):
        file = File(path)
        file.texts["zones"] = text
        assert_refused(file.write(tmp_path / "y.kv"), like, StorageError, "damaged: ")
    file = File(path)
    del file.texts["zones"]
    assert_refused(file.write(tmp_path / "y.kv"), like, StorageError, "where tokens are")


@pytest.mark.parametrize("name", ["layers.1.blocks.0", "layers.0.channels.1"])
def test_each_count_of_blocks_is_checked(ops: CpuOps, tmp_path: Path, name: str) -> None:
    """Refused, or a store as sound as any: counts may be those of another one of the same size."""
    like, path = lived(ops), tmp_path / "x.kv"
    save_store(like, path)
    refused, numbers = 0, File(path).numbers(name)
    wrongs = (-1, 65, 257, 1 << 20, -(1 << 62), (1 << 63) - 1)
    for place in np.ndindex(*numbers.shape):
        old = int(numbers[place])
        for wrong in {0, 1, old - 1, old + 1, 1 - old, *wrongs} - {old}:
            file = File(path)
            changed = file.numbers(name)
            changed[place] = wrong
            file.put(name, changed)
            file.write(tmp_path / "y.kv")
            try:
                loaded = load_store(tmp_path / "y.kv", like).store
            except StorageError as error:
                assert "\n" not in str(error) and "damaged: " in str(error)
                refused += 1
                continue
            assert isinstance(loaded, ZoneStore) and wrong not in wrongs
            for layer in range(2):
                for got, want in zip(
                    read_heads(loaded, layer), held_by(loaded, layer), strict=True
                ):
                    assert np.allclose(got.keys, want.keys, atol=1e-5)
    assert refused >= len(wrongs) * numbers.size


def test_channels_that_a_head_does_not_have_are_refused(ops: CpuOps, tmp_path: Path) -> None:
    like, path = lived(ops), tmp_path / "x.kv"
    save_store(like, path)
    file = File(path)
    dtype, shape, raw = file.tensors["layers.0.zones.1"]
    file.tensors["layers.0.zones.1"] = (dtype, shape, b"\x10" + raw[1:])
    said = "layer 0 keeps channels beyond the 16 of a head"
    assert_refused(file.write(tmp_path / "y.kv"), like, StorageError, said)
