"""Weights of a model folder: memory-mapped safetensors, checked wholly before any compute.

Opening reads the headers only. Tensors are views of the mapped files, in their stored type.
"""

import math
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from .errors import StorageError, WeightError
from .fields import parse_object, read_object, shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library
_NAMED = 3  # tensors named in a message; the rest is counted

# Bits of every type the format has, to check sizes; kvrt computes with three of them.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32,
    "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class _Entry:
    """One tensor as a header describes it; `start` and `end` are bytes from the file's begin."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Weights(Mapping[str, np.ndarray]):
    """Tensor name -> read-only array in its stored type: float32, float16 or bfloat16."""

    def __init__(self, arrays: Mapping[str, np.ndarray], maps: list[mmap.mmap]) -> None:
        self._arrays = dict(arrays)
        self._maps = maps
        self.nbytes = sum(array.nbytes for array in self._arrays.values())

    @classmethod
    def open(
        cls,
        folder: Path,
        expected: Mapping[str, tuple[int, ...]],
        ignored: Callable[[str], bool],
    ) -> "Weights":
        """Map the tensors named in `expected` (name -> shape), which must all be there.

        `ignored(name)` says whether a tensor that is not expected may be there all the same.
        Raises WeightError naming the file or tensor, StorageError when a file cannot be read.
        """
        entries = _read_entries(folder)
        _check(entries, expected, ignored, folder)
        maps: dict[Path, mmap.mmap] = {}
        arrays: dict[str, np.ndarray] = {}
        for name in expected:
            entry = entries[name]
            if entry.file not in maps:
                maps[entry.file] = _map(entry.file)
            arrays[name] = _view(maps[entry.file], entry)
        return cls(arrays, list(maps.values()))

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def close(self) -> None:
        """Forget the tensors. A file stays mapped until the last array taken from it is gone."""
        self._arrays.clear()
        while self._maps:
            mapping = self._maps.pop()
            with suppress(BufferError):  # someone still holds an array; the mapping goes with it
                mapping.close()


def _read_entries(folder: Path) -> dict[str, _Entry]:
    """Every tensor of the folder, from the single file or from all shards of the index."""
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    index = folder / INDEX
    try:
        weight_map = read_object(index, WeightError).get("weight_map")
    except FileNotFoundError:
        raise WeightError(_nothing_there(folder)) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{index}: weight_map is {shown(weight_map)}, expected tensor -> file")
    entries: dict[str, _Entry] = {}
    shards: dict[str, Path] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise WeightError(f"{index}: tensor {shown(name)}: got {shown(shard)}, expected a file")
        if shard not in shards:
            shards[shard] = _shard_path(folder, shard)
            for other, entry in _read_header(shards[shard]).items():
                if other in entries:
                    first = entries[other].file.name
                    raise WeightError(f"{folder}: tensor {shown(other)} is in {first} and {shard}")
                entries[other] = entry
        if name not in entries or entries[name].file != shards[shard]:
            raise WeightError(f"{index}: tensor {shown(name)} is not in {shown(shard)}")
    return entries


def _nothing_there(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder, expected one with {SINGLE}"
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as problem:
        raise StorageError(f"{folder}: cannot be read: {problem.strerror or problem}") from None
    wanted = f"{folder}: neither {SINGLE} nor {INDEX}"
    for ending, advice in (
        (".gguf", "`kvrt convert` makes a model folder of it"),
        (".bin", "convert it to safetensors first"),
        (".pt", "convert it to safetensors first"),
        (".pth", "convert it to safetensors first"),
        (".safetensors", f"rename it to {SINGLE}, or add {INDEX}"),
    ):
        found = [name for name in names if name.endswith(ending)]
        if found:
            return f"{wanted}; found {shown(found[0])}: {advice}"
    return f"{wanted}" + ("" if names else "; the folder is empty")


def _shard_path(folder: Path, shard: str) -> Path:
    """The file of a shard; WeightError when it lies outside the folder or is missing."""
    pure = PurePosixPath(shard)
    plain = not pure.is_absolute() and ".." not in pure.parts and pure.suffix == ".safetensors"
    # Backslashes and drive letters are paths on Windows; NUL cannot be in a path at all.
    if not plain or any(character in shard for character in "\\:\0"):
        raise WeightError(
            f"{folder / INDEX}: shard {shown(shard)}: expected a .safetensors file in the folder"
        )
    path = folder / shard
    root = folder.resolve()
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")  # the hub's cache links its snapshots there
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # a loop of links; RuntimeError before Python 3.13
        raise WeightError(f"{path}: shard cannot be resolved, expected a file") from None
    if not any(target.is_relative_to(home) for home in homes):
        raise WeightError(f"{path}: shard is a link out of the folder")
    if not path.is_file():
        raise WeightError(f"{path}: shard is missing, {INDEX} names it")
    return path


def _read_header(path: Path) -> dict[str, _Entry]:
    """Read and check the header of one file: names, types, shapes and byte ranges."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise WeightError(f"{path}: {size} bytes, too short for a safetensors file")
            if length > min(size - 8, _MAX_HEADER):
                raise WeightError(
                    f"{path}: header of {length} bytes claimed in a file of {size}: truncated, or "
                    "not safetensors"
                )
            raw = file.read(length)
    except OSError as problem:
        raise StorageError(f"{path}: cannot be read: {problem.strerror or problem}") from None
    header = parse_object(raw, f"{path}: header", WeightError, object_pairs_hook=_no_twins(path))
    header.pop("__metadata__", None)
    data = 8 + length
    entries = {name: _entry(path, name, value, data) for name, value in header.items()}
    _check_layout(path, entries, data, size)
    return entries


def _no_twins(path: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            twin = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise WeightError(f"{path}: header holds {shown(twin)} twice")
        return result

    return collect


def _entry(path: Path, name: str, value: Any, data: int) -> _Entry:
    tensor = f"{path}: tensor {shown(name)}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise WeightError(f"{tensor}: got {shown(value)}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise WeightError(f"{tensor}: unknown dtype {shown(dtype)}, kvrt reads F32, F16 and BF16")
    if not _counts(shape):
        raise WeightError(f"{tensor}: shape is {shown(shape)}, expected a list of sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightError(f"{tensor}: data_offsets are {shown(offsets)}, expected [begin, end]")
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise WeightError(
            f"{tensor}: {offsets[1] - offsets[0]} bytes, expected {-(-bits // 8)} for {dtype} "
            f"{shown(shape)}"
        )
    return _Entry(path, dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(path: Path, entries: Mapping[str, _Entry], data: int, size: int) -> None:
    """The format wants the tensors to cover the data without overlap, hole or rest."""
    position = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.end > size:
            raise WeightError(
                f"{path}: tensor {shown(name)} ends at byte {entry.end} of a file of {size}: "
                "truncated"
            )
        if entry.start != position:
            problem = "overlaps the one before" if entry.start < position else "follows a hole"
            raise WeightError(f"{path}: tensor {shown(name)} {problem}, expected no gap or overlap")
        position = entry.end
    if position != size:
        raise WeightError(f"{path}: {size - position} bytes after the last tensor, expected none")


def _check(
    entries: Mapping[str, _Entry],
    expected: Mapping[str, tuple[int, ...]],
    ignored: Callable[[str], bool],
    folder: Path,
) -> None:
    extra = [name for name in entries if name not in expected and not ignored(name)]
    missing = [name for name in expected if name not in entries]
    problems = []
    if missing:
        problems.append(_listed("missing", missing))
    if extra:
        problems.append(_listed("unexpected", extra))
    if problems:
        raise WeightError(f"{folder}: {'; '.join(problems)}; config.json and weights do not match")
    for name in expected:
        entry = entries[name]
        if entry.dtype not in _DTYPES:
            raise WeightError(
                f"{entry.file}: tensor {shown(name)} is stored as {entry.dtype}: not supported, "
                "F32, F16 and BF16 are"
            )
    wrong = [
        f"{name} got {list(entries[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if entries[name].shape != tuple(shape)
    ]
    if wrong:
        raise WeightError(f"{folder}: {_listed('misshaped', wrong)}")


def _listed(kind: str, names: list[str]) -> str:
    """`3 missing tensors (a, b, c)`, naming the first few."""
    some = [shown(name, 120)[1:-1] for name in names[:_NAMED]]
    rest = ", ..." if len(names) > _NAMED else ""
    return f"{len(names)} {kind} tensor{'s'[: len(names) > 1]} ({', '.join(some)}{rest})"


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as problem:
        raise StorageError(f"{path}: cannot be mapped: {problem}") from None


def _view(mapping: mmap.mmap, entry: _Entry) -> np.ndarray:
    dtype = _DTYPES[entry.dtype]
    count = math.prod(entry.shape)
    if entry.end > len(mapping):
        raise WeightError(f"{entry.file}: became shorter while it was opened")
    flat = np.frombuffer(mapping, dtype, count, entry.start)  # (count,) stored type
    if entry.start % dtype.itemsize:
        flat = flat.copy()  # an odd header: kernels need aligned elements
        flat.flags.writeable = False
    return flat.reshape(entry.shape)  # entry.shape, stored type
