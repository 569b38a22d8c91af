"""Weights: views in their stored type, no copy, and every malformed file refused by name."""

import json
import math
import os
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvrt.config import ModelConfig
from kvrt.errors import KvrtError, StorageError, WeightError
from kvrt.models.families import expected_tensors, ignored_tensor
from kvrt.weights import INDEX, SINGLE, Weights
from tests.helpers.refs import load_tensors
from tests.helpers.tiny_model import CASES, save_safetensors, write_case, write_tiny_model

EXPECTED = {"a": (2, 3), "b": (4,)}
ARRAYS: dict[str, np.ndarray] = {
    "a": np.arange(6, dtype=np.float16).reshape(2, 3),
    "b": np.arange(4, dtype=np.float32),
}


def never(_name: str) -> bool:
    return False


def open_(folder: Path, expected: Mapping[str, tuple[int, ...]] = EXPECTED) -> Weights:
    return Weights.open(folder, expected, never)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"a": entry("F16", [2, 3], 0, 12), "b": entry("F32", [4], 12, 28)}


def write_raw(path: Path, header: Any, data: bytes = bytes(28), claim: int | None = None) -> None:
    """A safetensors file with any header, valid or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if claim is None else claim) + raw + data)


def refused(folder: Path, *words: str, error: type[KvrtError] = WeightError) -> None:
    """Opening raises `error` with one short line that holds each word."""
    with pytest.raises(error) as caught:
        open_(folder)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert message.isprintable() and len(message) < 400 + len(str(folder))


@pytest.mark.parametrize("name", CASES)
def test_tiny_models_open_with_their_stored_values(tmp_path: Path, name: str) -> None:
    config = write_case(tmp_path, name)
    expected = expected_tensors(config)
    weights = Weights.open(tmp_path, expected, ignored_tensor)
    reference = load_tensors(tmp_path)
    assert list(weights) == list(expected) and set(weights) == set(reference)
    for tensor, array in weights.items():
        assert array.shape == expected[tensor]
        assert np.array_equal(array.astype(np.float64), reference[tensor])
    assert weights.nbytes == sum(array.nbytes for array in weights.values())
    assert sum(math.prod(array.shape) for array in weights.values()) == config.parameters()


@pytest.mark.parametrize(
    "dtype, kinds",
    [
        ("float32", {np.dtype(np.float32)}),
        ("float16", {np.dtype(np.float16)}),
        ("bfloat16", {np.dtype(ml_dtypes.bfloat16)}),
        ("mixed", {np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)}),
    ],
)
def test_stored_types_are_kept(tmp_path: Path, dtype: str, kinds: set[np.dtype[Any]]) -> None:
    config = write_tiny_model(tmp_path, dtype=dtype)
    weights = Weights.open(tmp_path, expected_tensors(config), ignored_tensor)
    assert {array.dtype for array in weights.values()} == kinds


def test_views_are_read_only_and_own_nothing(tmp_path: Path) -> None:
    save_safetensors(tmp_path / SINGLE, ARRAYS)
    weights = open_(tmp_path)
    for array in weights.values():
        assert not array.flags.writeable and not array.flags.owndata and array.flags.aligned
    with pytest.raises(ValueError, match="read-only"):
        weights["a"][0, 0] = 1


def test_opening_reads_no_data(tmp_path: Path) -> None:
    """A sparse file of 5 GiB: offsets beyond 2^32, and nothing allocated."""
    count = 5 << 28
    path = tmp_path / SINGLE
    header = json.dumps({"a": entry("F32", [count], 0, 4 * count)}).encode()
    write_raw(path, header + b" " * (-len(header) % 8), b"")  # padded, as all writers do
    start = path.stat().st_size
    os.truncate(path, start + 4 * count)
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", 1.5))
    tracemalloc.start()
    try:
        weights = open_(tmp_path, {"a": (count,)})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert weights["a"][-1] == 1.5 and weights["a"][0] == 0.0
    assert weights.nbytes == 4 * count


@pytest.mark.parametrize("padding", range(8))
def test_unaligned_data_is_copied_right(tmp_path: Path, padding: int) -> None:
    data = ARRAYS["a"].tobytes() + ARRAYS["b"].tobytes()
    write_raw(tmp_path / SINGLE, json.dumps(GOOD).encode() + b" " * padding, data)
    weights = open_(tmp_path)
    for name, array in weights.items():
        assert array.flags.aligned and not array.flags.writeable
        assert np.array_equal(array, ARRAYS[name])


def test_close_lets_go_but_not_under_a_reader(tmp_path: Path) -> None:
    save_safetensors(tmp_path / SINGLE, ARRAYS)
    weights = open_(tmp_path)
    held = weights["b"]
    weights.close()
    weights.close()
    assert len(weights) == 0 and np.array_equal(held, ARRAYS["b"])


def test_ignored_tensors_are_neither_needed_nor_kept(tmp_path: Path) -> None:
    config = write_tiny_model(tmp_path, tie=True)
    expected = expected_tensors(config)
    tensors = dict(Weights.open(tmp_path, expected, ignored_tensor))
    tensors["lm_head.weight"] = np.zeros((3, 3), np.float16)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float64)
    save_safetensors(tmp_path / SINGLE, tensors)
    weights = Weights.open(tmp_path, expected, ignored_tensor)
    assert list(weights) == list(expected)
    assert weights.nbytes == 2 * config.parameters()


def test_head_of_an_untied_model_is_needed(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, tie=True)
    data = json.loads((tmp_path / "config.json").read_text())
    untied = ModelConfig.from_dict({**data, "tie_word_embeddings": False})
    with pytest.raises(WeightError, match=r"1 missing tensor \(lm_head\.weight\)"):
        Weights.open(tmp_path, expected_tensors(untied), ignored_tensor)


def test_missing_extra_and_misshaped_are_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    save_safetensors(path, {"a": ARRAYS["a"]})
    refused(tmp_path, "1 missing tensor (b)")
    save_safetensors(path, {**ARRAYS, **{f"x{i}": ARRAYS["b"] for i in range(9)}})
    refused(tmp_path, "9 unexpected tensors (x0, x1, x2, ...)")
    save_safetensors(path, {"a": ARRAYS["a"], "z": ARRAYS["b"]})
    refused(tmp_path, "1 missing tensor (b); 1 unexpected tensor (z)")
    save_safetensors(path, {**ARRAYS, "a": ARRAYS["a"].T.copy()})
    refused(tmp_path, "1 misshaped tensor (a got [3, 2], expected [2, 3])")
    save_safetensors(path, {**ARRAYS, "a": ARRAYS["a"].reshape(6)})
    refused(tmp_path, "a got [6], expected [2, 3]")


@pytest.mark.parametrize(
    "dtype", [np.float64, np.int8, np.uint8, np.int32, ml_dtypes.float8_e4m3fn]
)
def test_other_types_are_refused_by_name(tmp_path: Path, dtype: Any) -> None:
    name = {"float64": "F64", "int8": "I8", "uint8": "U8", "int32": "I32"}
    save_safetensors(tmp_path / SINGLE, {**ARRAYS, "a": ARRAYS["a"].astype(dtype)})
    refused(tmp_path, '"a"', name.get(np.dtype(dtype).name, "F8_E4M3"), "F32, F16 and BF16")


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / SINGLE, {**GOOD, "a": entry("Q4_K", [2, 3], 0, 12)})
    refused(tmp_path, "Q4_K", "F32, F16 and BF16")


def without(value: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name != key}


@pytest.mark.parametrize(
    "header, word",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff" * 64, "not UTF-8"),
        (b"[1, 2]", "expected a JSON object"),
        (b"[" * 100_000, "header"),
        (json.dumps(GOOD).encode()[:-1] + b', "b": {}}', 'holds "b" twice'),
        (
            json.dumps(GOOD).encode().replace(b'"shape": [4]', b'"shape": [4], "shape": [4]'),
            "twice",
        ),
        ({**GOOD, "b": 3}, "expected dtype, shape and data_offsets"),
        ({**GOOD, "b": without(GOOD["b"], "dtype")}, "expected dtype, shape"),
        ({**GOOD, "b": without(GOOD["b"], "shape")}, "expected dtype, shape"),
        ({**GOOD, "b": without(GOOD["b"], "data_offsets")}, "expected dtype, shape"),
        ({**GOOD, "b": {**GOOD["b"], "dtype": 5}}, "unknown dtype 5"),
        ({**GOOD, "b": {**GOOD["b"], "dtype": ["F32"]}}, "unknown dtype"),
        ({**GOOD, "b": entry("F32", [-4], 12, 28)}, "shape is [-4]"),
        ({**GOOD, "b": {**GOOD["b"], "shape": 4}}, "shape is 4"),
        ({**GOOD, "b": {**GOOD["b"], "shape": [4.0]}}, "shape is [4.0]"),
        ({**GOOD, "b": {**GOOD["b"], "shape": [True, 4]}}, "shape is [true, 4]"),
        ({**GOOD, "b": entry("F32", [3], 12, 28)}, "16 bytes, expected 12"),
        ({**GOOD, "b": entry("F16", [4], 12, 28)}, "16 bytes, expected 8 for F16"),
        ({**GOOD, "b": entry("F32", [2**62, 2**62], 12, 28)}, "16 bytes, expected"),
        ({**GOOD, "b": entry("F32", [4], 28, 12)}, "data_offsets are [28, 12]"),
        ({**GOOD, "b": entry("F32", [4], -4, 12)}, "data_offsets are [-4, 12]"),
        ({**GOOD, "b": {**GOOD["b"], "data_offsets": [12]}}, "data_offsets are [12]"),
        ({**GOOD, "b": {**GOOD["b"], "data_offsets": [12, 28, 30]}}, "data_offsets"),
        ({**GOOD, "b": {**GOOD["b"], "data_offsets": [12.0, 28.0]}}, "data_offsets"),
        ({**GOOD, "b": entry("F32", [4], 8, 24)}, "overlaps"),
        ({**GOOD, "b": entry("F32", [4], 0, 16)}, "overlaps"),
        ({"a": entry("F16", [2, 3], 4, 16), "b": entry("F32", [3], 16, 28)}, "hole"),
        ({**GOOD, "b": entry("F32", [4], 2**40, 2**40 + 16)}, "truncated"),
        ({"a": GOOD["a"]}, "16 bytes after the last tensor"),
        ({**GOOD, "new\nline" * 90: 3}, "expected dtype"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_malformed_headers(tmp_path: Path, header: Any, word: str) -> None:
    write_raw(tmp_path / SINGLE, header)
    refused(tmp_path, SINGLE, word)


def test_the_hand_made_file_is_good(tmp_path: Path) -> None:
    """So that the refusals above are for the named reason only."""
    write_raw(tmp_path / SINGLE, {"__metadata__": {"format": "pt"}, **GOOD})
    assert list(open_(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("claim", [2**60, 2**64 - 1, 2**63, 1 << 31, 10_000])
def test_header_longer_than_the_file(tmp_path: Path, claim: int) -> None:
    write_raw(tmp_path / SINGLE, GOOD, claim=claim)
    refused(tmp_path, f"header of {claim} bytes claimed", "truncated")


def test_header_beyond_the_format_limit(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    path.write_bytes(struct.pack("<Q", 1 << 32))
    os.truncate(path, 1 << 33)  # sparse: the claim fits the file
    refused(tmp_path, f"header of {1 << 32} bytes claimed")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    save_safetensors(path, ARRAYS)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refused(tmp_path, SINGLE)
    path.write_bytes(whole + b"\0")
    refused(tmp_path, "1 bytes after the last tensor")


def test_garbage_never_escapes_as_another_error(tmp_path: Path) -> None:
    """Seeded damage to the length and header: it opens, or one of our errors says why not."""
    path = tmp_path / SINGLE
    save_safetensors(path, ARRAYS)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    outcomes = {True: 0, False: 0}
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(0, len(whole) - 28)] = rng.integers(0, 256)
        path.write_bytes(bytes(damaged))
        try:
            open_(tmp_path)
            outcomes[True] += 1
        except WeightError as problem:
            assert str(problem).isprintable()
            outcomes[False] += 1
    assert outcomes[False] > 200


@pytest.mark.parametrize(
    "files, words",
    [
        ([], ["the folder is empty"]),
        (["config.json"], [SINGLE, INDEX]),
        (["config.json", "pytorch_model.bin"], ["pytorch_model.bin", "safetensors"]),
        (["consolidated.00.pth"], ["consolidated.00.pth"]),
        (["m.Q4_1.gguf", "pytorch_model.bin"], ["m.Q4_1.gguf", "kvrt convert"]),
        (["weights.safetensors"], ["weights.safetensors", "rename"]),
    ],
)
def test_folders_without_weights(tmp_path: Path, files: list[str], words: list[str]) -> None:
    for file in files:
        (tmp_path / file).touch()
    refused(tmp_path, *words)


def test_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such folder")


def sharded(folder: Path) -> dict[str, Any]:
    """Two good shards; returns the index, not yet written."""
    save_safetensors(folder / "one.safetensors", {"a": ARRAYS["a"]})
    save_safetensors(folder / "two.safetensors", {"b": ARRAYS["b"]})
    return {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}


def write_index(folder: Path, index: Any) -> None:
    (folder / INDEX).write_text(json.dumps(index))


def test_shards_are_joined(tmp_path: Path) -> None:
    write_index(tmp_path, sharded(tmp_path))
    weights = open_(tmp_path)
    assert np.array_equal(weights["a"], ARRAYS["a"]) and np.array_equal(weights["b"], ARRAYS["b"])
    assert weights.nbytes == 28


@pytest.mark.parametrize(
    "weight_map, words",
    [
        (None, ["weight_map is null"]),
        ({}, ["weight_map is {}"]),
        (["a"], ["weight_map"]),
        ({"a": "one.safetensors", "b": 3}, ['"b"', "got 3"]),
        ({"a": "one.safetensors", "b": None}, ['"b"', "got null"]),
        ({"a": "one.safetensors", "b": "three.safetensors"}, ["three.safetensors", "missing"]),
        ({"a": "one.safetensors", "b": "one.safetensors"}, ['"b" is not in "one.safetensors"']),
        ({"a": "one.safetensors"}, ["1 missing tensor (b)"]),
        (
            {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"},
            ['"c" is not in "two.safetensors"'],
        ),
        ({"a": "one.safetensors", "b": ""}, ["shard"]),
        ({"a": "one.safetensors", "b": "."}, ["shard"]),
        ({"a": "one.safetensors", "b": "config.json"}, ["expected a .safetensors file"]),
    ],
)
def test_bad_indexes(tmp_path: Path, weight_map: Any, words: list[str]) -> None:
    write_index(tmp_path, {**sharded(tmp_path), "weight_map": weight_map})
    refused(tmp_path, *words)


def test_index_that_is_not_json(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_bytes(b"{nope")
    refused(tmp_path, INDEX, "not JSON")
    (tmp_path / INDEX).write_bytes(b"[]")
    refused(tmp_path, INDEX, "expected a JSON object")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    save_safetensors(tmp_path / "two.safetensors", ARRAYS)
    write_index(tmp_path, index)
    refused(tmp_path, 'tensor "a" is in one.safetensors and two.safetensors')


def absolute(folder: Path) -> str:
    return str(folder.parent / "outside.safetensors")


@pytest.mark.parametrize(
    "shard",
    [
        absolute,
        lambda folder: str(folder / "two.safetensors"),
        lambda _: "../outside.safetensors",
        lambda _: "x/../../outside.safetensors",
        lambda folder: f"../{folder.name}/two.safetensors",
        lambda _: "..\\outside.safetensors",
        lambda _: "C:outside.safetensors",
        lambda _: "two\0.safetensors",
        lambda _: "link/outside.safetensors",
        lambda _: "link.safetensors",
    ],
    ids=[
        "absolute",
        "absolute-in",
        "up",
        "up-deep",
        "up-and-back",
        "backslash",
        "drive",
        "nul",
        "folder",
        "link",
    ],
)
def test_shards_outside_the_folder(tmp_path: Path, shard: Callable[[Path], str]) -> None:
    """The file outside is a good one, so only its place is wrong."""
    folder = tmp_path / "model"
    folder.mkdir()
    index = sharded(folder)
    outside = tmp_path / "outside.safetensors"
    save_safetensors(outside, {"b": ARRAYS["b"]})
    try:
        (folder / "link").symlink_to(tmp_path, target_is_directory=True)
        (folder / "link.safetensors").symlink_to(outside)
    except OSError:
        pytest.skip("no symbolic links here")
    index["weight_map"]["b"] = shard(folder)
    write_index(folder, index)
    refused(folder, "shard", "folder")


def test_links_inside_the_folder_and_of_the_hub_cache_are_fine(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "0123abc"
    blobs = tmp_path / "blobs"
    for path in (folder, blobs):
        path.mkdir(parents=True)
    index = sharded(folder)
    write_index(folder, index)
    try:
        (folder / "three.safetensors").symlink_to("two.safetensors")
    except OSError:
        pytest.skip("no symbolic links here")
    index["weight_map"]["b"] = "three.safetensors"
    write_index(folder, index)
    assert np.array_equal(open_(folder)["b"], ARRAYS["b"])
    (folder / "two.safetensors").rename(blobs / "f00d")
    (folder / "three.safetensors").unlink()
    (folder / "three.safetensors").symlink_to(Path("../../blobs/f00d"))
    assert np.array_equal(open_(folder)["b"], ARRAYS["b"])
    (blobs / "f00d").rename(tmp_path / "elsewhere")
    (folder / "three.safetensors").unlink()
    (folder / "three.safetensors").symlink_to(Path("../../elsewhere"))
    refused(folder, "link out of the folder")


def test_looping_links(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    try:
        (tmp_path / "two.safetensors").symlink_to("two.safetensors")
    except OSError:
        pytest.skip("no symbolic links here")
    write_index(tmp_path, index)
    refused(tmp_path, "two.safetensors")


def test_one_damaged_shard(tmp_path: Path) -> None:
    write_index(tmp_path, sharded(tmp_path))
    path = tmp_path / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(tmp_path, "two.safetensors", "truncated")


def test_single_file_wins_over_an_index(tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": {"a": "gone.safetensors"}})
    save_safetensors(tmp_path / SINGLE, ARRAYS)
    assert len(open_(tmp_path)) == 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all files")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    save_safetensors(path, ARRAYS)
    path.chmod(0)
    refused(tmp_path, "cannot be read", error=StorageError)
