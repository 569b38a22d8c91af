"""Safetensors files of any size, written and read piece by piece.

The format: the header's length (u64, little-endian), the header (JSON: name -> dtype, shape and
the range of bytes in the data; `__metadata__`: texts by name), the data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard
from zlib import crc32

import ml_dtypes
import numpy as np

from .errors import StorageError
from .fields import parse_object, shown
from .paths import atomic_write

MAX_HEADER = 100_000_000
"""Bytes of a header; the limit of the format's own library."""

_NAMES = {
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float32): "F32",
}


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written. `pieces` gives arrays that hold its numbers, in order, every time."""

    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]]

    @classmethod
    def of(cls, array: np.ndarray) -> Tensor:
        return cls(array.dtype, array.shape, lambda: [array])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks(self) -> Iterator[memoryview]:
        """The bytes of its pieces."""
        for piece in self.pieces():
            yield raw_bytes(np.ascontiguousarray(piece))


def raw_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, to be read or written."""
    return np.asarray(array).reshape(-1).view(np.uint8).data


def write_tensors(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write a file, whole or not at all, without a copy of the tensors. Raises StorageError."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise StorageError(
            f"{path}: {len(text):,} bytes of text are more than the {MAX_HEADER:,} that fit"
        )

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        for tensor in tensors.values():
            yield from tensor.chunks()

    atomic_write(path, chunks())


def is_tensor_file(path: Path) -> bool:
    """Whether a file begins like safetensors, and not like text. Raises OSError."""
    with open(path, "rb") as file:
        # A header's length is far below 2^56; no text holds a zero byte.
        return b"\0" in file.read(8)


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    end: int


class TensorFile:
    """A safetensors file, open for reading: `metadata`, and tensors by name.

    `crc32` is that of all numbers read so far, one tensor after the other.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises StorageError."""
        self.path = path
        self.crc32 = 0
        with self._reading():
            self._file = open(path, "rb")  # noqa: SIM115, close() is __exit__
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of one axis or more. Raises StorageError where there is none."""
        entry = self._entries.get(name)
        if entry is None or not entry.shape:
            raise self.damaged(f"tensor {name} is absent, or a single number")
        return entry.shape

    def read(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """A whole tensor. Raises StorageError where it is absent or not of this type and shape."""
        position = self._start(name, dtype, shape)  # first: the shape may be the file's own
        array = np.empty(shape, dtype)
        self._fill(raw_bytes(array), position)
        return array

    def rows(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        """A tensor row by row: arrays of shape[1:], in memory of their own. Raises as `read`."""
        position = self._start(name, dtype, shape)
        for _ in range(shape[0]):
            array = np.empty(shape[1:], dtype)
            self._fill(raw_bytes(array), position)
            position += array.nbytes
            yield array

    def _start(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> int:
        entry = self._entries.get(name)
        if entry is None:
            raise self.damaged(f"tensor {name} is absent")
        size = math.prod(shape) * dtype.itemsize
        found = entry.dtype, entry.shape, entry.end - entry.start
        if found != (_NAMES[dtype], shape, size):
            raise self.damaged(
                f"tensor {name} is {shown(entry.dtype)} {list(entry.shape)} of {found[2]} bytes, "
                f"expected {_NAMES[dtype]} {list(shape)} of {size}"
            )
        return entry.start

    def _fill(self, memory: memoryview, position: int) -> None:
        left = memory
        with self._reading():
            self._file.seek(position)
            while len(left):
                count = self._file.readinto(left)
                if not count:
                    raise self.damaged("it became shorter while it was read")
                left = left[count:]
        self.crc32 = crc32(memory, self.crc32)

    def damaged(self, what: str) -> StorageError:
        """The error that says so."""
        return StorageError(f"{self.path}: damaged: {what}")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror or error}") from error

    def _read_header(self) -> None:
        with self._reading():
            size = os.fstat(self._file.fileno()).st_size
            length = int.from_bytes(self._file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                what = "truncated, or no safetensors file" if size else "expected safetensors"
                raise StorageError(f"{self.path}: {size} bytes: {what}")
            raw = self._file.read(length)
        header = parse_object(raw, f"{self.path}: header", StorageError)
        self.metadata = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict) or not all(
            isinstance(value, str) for value in self.metadata.values()
        ):
            raise self.damaged("its metadata are no texts")
        self._entries = {
            name: self._entry(name, value, 8 + length) for name, value in header.items()
        }
        end = max((entry.end for entry in self._entries.values()), default=8 + length)
        if end != size:
            what = "truncated" if end > size else "more behind the last tensor"
            raise self.damaged(f"{size:,} bytes, its header says {end:,}: {what}")

    def _entry(self, name: str, value: Any, data: int) -> _Entry:
        fields = value if isinstance(value, dict) else {}
        dtype, shape = fields.get("dtype"), fields.get("shape")
        ends = fields.get("data_offsets")
        if isinstance(dtype, str) and _counts(shape) and _counts(ends) and len(ends) == 2:
            return _Entry(dtype, tuple(shape), data + ends[0], data + ends[1])
        raise self.damaged(f"tensor {shown(name)} is {shown(value)}")


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
