"""Reading GGUF: the metadata, the tensor table and the tensors' numbers, a few rows at a time."""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ConfigError, KvrtError, UnsupportedError, UsageError, WeightError
from .paths import storage_error

_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
# GGUF value type -> struct code; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table; `shape` has the slowest axis first, as in NumPy."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int  # bytes from the file's start
    row_bytes: int  # bytes of one run along the last axis

    @property
    def rows(self) -> int:
        """Runs along the last axis: 1 for a vector."""
        return prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.rows * self.row_bytes


class GgufFile:
    """An open GGUF file: `metadata` (key -> value), `tensors` (name -> GgufTensor), `read_rows`.

    Everything is checked against the file's size on opening. Raises UsageError (no such file),
    WeightError (not GGUF, truncated, inconsistent), UnsupportedError (version, tensor type).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise UsageError(f"{path}: no such GGUF file")
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise storage_error(path, error) from error
        try:
            self._parse()
        except OSError as error:
            self._file.close()
            raise storage_error(path, error) from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read_rows(self, tensor: GgufTensor, start: int, stop: int) -> np.ndarray:
        """Dequantise rows start..stop of a tensor: (stop - start, last axis) f32."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        raw = np.empty((stop - start, tensor.row_bytes), np.uint8)  # (rows, row_bytes) u8
        try:
            self._file.seek(tensor.offset + start * tensor.row_bytes)
            got = self._file.readinto(raw.data.cast("B"))
        except OSError as error:
            raise storage_error(self.path, error) from error
        if got != raw.nbytes:
            raise WeightError(f"{self.path}: truncated while reading tensor {tensor.name}")
        kind = GGMLQuantizationType(tensor.type_id)
        try:
            # Corrupt block scales may be infinite or NaN; the caller checks the numbers.
            with np.errstate(all="ignore"):
                values = dequantize(_typed(raw, kind.name), kind)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{self.path}: tensor {tensor.name} has type {tensor.type_name}, "
                "which the gguf package cannot decode; re-quantise to F16 or Q8_0"
            ) from error
        return np.asarray(values, np.float32).reshape(stop - start, tensor.shape[-1])

    def _parse(self) -> None:
        size = self.path.stat().st_size
        if size < 24:
            raise WeightError(f"{self.path}: not a GGUF file (only {size} bytes)")
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            cursor = _Cursor(self.path, buffer, size)
            if bytes(buffer[:4]) != b"GGUF":
                raise WeightError(f"{self.path}: not a GGUF file (starts with {buffer[:4]!r})")
            cursor.at = 4
            version = cursor.scalar("I")
            if version not in (2, 3):
                swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
                got = "big-endian" if swapped in (2, 3) else f"version {version}"
                raise UnsupportedError(
                    f"{self.path}: GGUF is {got}; little-endian versions 2 and 3 work"
                )
            num_tensors, num_keys = cursor.count(8 + 4 + 4 + 8), cursor.count(8 + 4 + 1)
            self.metadata = cursor.metadata(num_keys)
            self.tensors = self._table(cursor, num_tensors, size)

    def _table(self, cursor: "_Cursor", num_tensors: int, size: int) -> dict[str, GgufTensor]:
        entries = [cursor.tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise WeightError(f"{self.path}: general.alignment is {alignment!r}")
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_id, offset in entries:
            type_name, row_bytes = _row_bytes(self.path, name, shape, type_id)
            tensor = GgufTensor(name, shape, type_id, type_name, start + offset, row_bytes)
            if name in tensors:
                raise WeightError(f"{self.path}: tensor {name} is listed twice")
            if tensor.offset + tensor.nbytes > size:
                raise WeightError(
                    f"{self.path}: truncated: tensor {name} ends at byte "
                    f"{tensor.offset + tensor.nbytes}, the file has {size}"
                )
            tensors[name] = tensor
        return tensors


def _row_bytes(path: Path, name: str, shape: tuple[int, ...], type_id: int) -> tuple[str, int]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError as error:
        raise UnsupportedError(
            f"{path}: tensor {name} has type {type_id}, unknown to the gguf package"
        ) from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise WeightError(f"{path}: tensor {name}: {shape[-1]} is no multiple of {block}")
    return kind.name, shape[-1] // block * block_bytes


def _typed(raw: np.ndarray, type_name: str) -> np.ndarray:
    """Plain number types are viewed as numbers, block types stay bytes: what gguf expects."""
    plain = {"F32": "<f4", "F16": "<f2"}
    return raw.view(plain[type_name]) if type_name in plain else raw


class _Cursor:
    """A checked walk over the header: no length in the file is believed before it is compared."""

    def __init__(self, path: Path, buffer: mmap.mmap, size: int) -> None:
        self.path, self.buffer, self.size, self.at = path, buffer, size, 0

    def _fail(self, what: str) -> KvrtError:
        return WeightError(f"{self.path}: truncated or malformed GGUF header ({what})")

    def take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self.size - self.at:
            raise self._fail(f"{what} of {num_bytes} bytes at byte {self.at}")
        self.at += num_bytes
        return self.buffer[self.at - num_bytes : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), "a value"))[0]

    def count(self, smallest: int) -> int:
        value = int(self.scalar("Q"))
        if value * smallest > self.size - self.at:
            raise self._fail(f"a count of {value}")
        return value

    def text(self, strict: bool = False) -> str:
        raw = self.take(self.count(1), "a string")
        try:
            return raw.decode("utf-8", "strict" if strict else "replace")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self.path}: a tokenizer string is not UTF-8: {raw!r:.60}"
            ) from error

    def metadata(self, num_keys: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.text()
            if key in values:
                raise self._fail(f"key {key} listed twice")
            values[key] = self.value(key, self.scalar("I"))
        return values

    def value(self, key: str, kind: int) -> Any:
        if kind == _ARRAY:
            kind = self.scalar("I")
            if kind in _SCALARS:
                code = _SCALARS[kind]
                num = self.count(struct.calcsize("<" + code))
                raw = self.take(num * struct.calcsize("<" + code), f"array {key}")
                return list(struct.unpack(f"<{num}{code}", raw))
            return [self._scalar_reader(key, kind)() for _ in range(self.count(8))]
        return self._scalar_reader(key, kind)()

    def _scalar_reader(self, key: str, kind: int) -> Callable[[], Any]:
        if kind == _STRING:
            strict = key.startswith("tokenizer.")
            return lambda: self.text(strict)
        if kind in _SCALARS:
            return lambda: self.scalar(_SCALARS[kind])
        raise self._fail(f"key {key} has value type {kind}")

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.text(), self.scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._fail(f"tensor {name!r:.80} has {num_dims} axes")
        fastest_first = [int(self.scalar("Q")) for _ in range(num_dims)]
        if min(fastest_first) <= 0:
            raise self._fail(f"tensor {name!r:.80} has an empty axis")
        type_id, offset = int(self.scalar("I")), int(self.scalar("Q"))
        return name, tuple(reversed(fastest_first)), type_id, offset
