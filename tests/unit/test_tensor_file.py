"""Safetensors files as kvrt writes and reads them, and as the format's own library does."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kvrt.errors import StorageError
from kvrt.tensor_file import Tensor, TensorFile, is_tensor_file, write_tensors

ARRAYS = {
    "pages": np.arange(3 * 7, dtype=np.uint8).reshape(3, 7),  # (3, 7)
    "half": np.linspace(-2, 2, 10).astype(np.float16).reshape(2, 5),  # (2, 5)
    "ids": np.array([1, -5, 2**31 - 1], np.int32),  # (3,)
    "single": np.array(np.pi, np.float32),  # ()
    "none": np.zeros((2, 0), np.float32),  # (2, 0)
}
DTYPES = {name: array.dtype for name, array in ARRAYS.items()}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def write(path: Path, metadata: dict[str, str] | None = None) -> None:
    write_tensors(path, metadata or {}, {k: Tensor.of(a) for k, a in ARRAYS.items()})


def read(path: Path, name: str) -> np.ndarray:
    with TensorFile(path) as file:
        return file.read(name, DTYPES[name], ARRAYS[name].shape)


def test_the_formats_library_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "x", {"a": "b"})
    loaded = load_file(tmp_path / "x")
    assert loaded.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(loaded[name], array)
    with safe_open(tmp_path / "x", framework="np") as file:
        assert file.metadata() == {"a": "b"}
    length = int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")
    assert length % 8 == 0  # so that the numbers are aligned


def test_it_reads_what_the_formats_library_wrote(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "x", {"a": "b"})
    for name, array in ARRAYS.items():
        assert np.array_equal(read(tmp_path / "x", name), array)
    with TensorFile(tmp_path / "x") as file:
        assert file.metadata == {"a": "b"}
        rows = list(file.rows("pages", np.dtype(np.uint8), (3, 7)))
    assert np.array_equal(np.stack(rows), ARRAYS["pages"])
    assert not np.shares_memory(rows[0], rows[1])


def test_bfloat16_goes_there_and_back(tmp_path: Path) -> None:
    array = np.linspace(-3, 3, 12).astype(ml_dtypes.bfloat16).reshape(3, 4)  # (3, 4)
    write_tensors(tmp_path / "x", {}, {"a": Tensor.of(array)})
    with TensorFile(tmp_path / "x") as file:
        assert file.read("a", array.dtype, (3, 4)).tobytes() == array.tobytes()
    with safe_open(tmp_path / "x", framework="np") as library:
        assert library.get_slice("a").get_dtype() == "BF16"


def test_pieces_that_are_not_contiguous_follow_each_other(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)  # (4, 6)
    tensor = Tensor(whole.dtype, (6, 4), lambda: [whole.T[:2], whole.T[2:]])
    write_tensors(tmp_path / "x", {}, {"a": tensor})
    assert np.array_equal(load_file(tmp_path / "x")["a"], whole.T)


@given(metadata=st.dictionaries(texts, texts, max_size=4))
def test_metadata_survive(metadata: dict[str, str], tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.getbasetemp() / "metadata"
    write_tensors(path, metadata, {})
    with TensorFile(path) as file:
        assert file.metadata == metadata
    with safe_open(path, framework="np") as library:
        assert (library.metadata() or {}) == metadata
    assert is_tensor_file(path)


@given(text=st.text(max_size=20))
def test_no_text_is_taken_for_one(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "text"
    path.write_text(json.dumps(text) + " " * 8, encoding="utf-8")
    assert not is_tensor_file(path)


def test_the_checksum_is_of_what_was_read(tmp_path: Path) -> None:
    write(tmp_path / "x")
    sums = []
    for names in (["pages", "half"], ["half", "pages"], ["pages"]):
        with TensorFile(tmp_path / "x") as file:
            assert file.crc32 == 0
            for name in names:
                file.read(name, DTYPES[name], ARRAYS[name].shape)
            sums.append(file.crc32)
    assert len(set(sums)) == 3


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "said"),
    [
        ("other", np.uint8, (3, 7), "tensor other is absent"),
        ("pages", np.uint8, (7, 3), r'is "U8" \[3, 7\] of 21 bytes, expected U8 \[7, 3\] of 21'),
        ("pages", np.float16, (3, 7), "expected F16"),
    ],
)
def test_another_tensor_is_refused(tmp_path: Path, name, dtype, shape, said) -> None:
    write(tmp_path / "x")
    with TensorFile(tmp_path / "x") as file, pytest.raises(StorageError, match=said):
        file.read(name, np.dtype(dtype), shape)


def header(text: str, data: bytes = b"") -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(8, "little") + raw + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        header("{}", b"rest"),
        header("[]"),
        header("{"),
        header("[" * 100_000),
        header('{"__metadata__": 3}'),
        header('{"__metadata__": {"a": 3}}'),
        header('{"a": 3}'),
        header('{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}', b"abc"),
        header('{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 3]}}', b"abc"),
        header('{"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}}', b"abcd"),
        header('{"a": {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}}', b"abcd"),
        header('{"a": {"dtype": 8, "shape": [4], "data_offsets": [0, 4]}}', b"abcd"),
        header('{"a": {"dtype": "U8", "shape": [true], "data_offsets": [0, 4]}}', b"abcd"),
        header('{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]}}', b"abcd"),
        (2**62).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(StorageError, match="broken") as caught:
        with TensorFile(path) as file:
            file.read("a", np.dtype(np.uint8), (4,))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["absent", "."])
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="cannot read"):
        TensorFile(tmp_path / name)


def test_a_file_cut_while_it_is_open_is_refused(tmp_path: Path) -> None:
    array = np.zeros(1 << 20, np.uint8)
    write_tensors(tmp_path / "x", {}, {"a": Tensor.of(array)})
    with TensorFile(tmp_path / "x") as file:
        with open(tmp_path / "x", "r+b") as other:
            other.truncate(5000)
        with pytest.raises(StorageError, match="became shorter"):
            file.read("a", array.dtype, array.shape)


def test_too_much_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrt.tensor_file.MAX_HEADER", 100)
    with pytest.raises(StorageError, match="more than the 100 that fit"):
        write_tensors(tmp_path / "x", {"a": "b" * 100}, {})
    assert not list(tmp_path.iterdir())
