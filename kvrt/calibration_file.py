"""The file of a calibration: safetensors, read no further than is asked.

Metadata: `format`, `version`, the model's name, fingerprint and geometry, the texts' sha256, the
number of tokens, and `fingerprint`. Version 1 has the tables of nuq alone, and its fingerprint is
the sha256 of all tensors. Version 2 has codebooks too, or instead: `digests` is the sha256 of each
tensor, so that parts that are not needed need not be read, `seeds` the seeds of SimVQ's codebooks,
and the fingerprint that of both. Entries of codebooks are checked, and stay in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .calibration import Calibration, Origin, digest_of, fingerprint_of
from .calibration_parts import NUQ, Kind, expected_tensors, is_order, part_of, stored_parts
from .errors import CodecError, StorageError, UnsupportedError, UsageError
from .fields import shown
from .kvstore.layout import Geometry
from .paths import storage_error

FORMAT = "kvrt-calibration"
VERSIONS = PLAIN, WITH_BOOKS = "1", "2"

_LIMIT = 1 << 36
"""Bytes of a file; more is no calibration."""

_MOST = 2.0**20
"""Of scales, their inverses and centres of keys, so that no product of them overflows."""

_DTYPES = {
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
}


@dataclass(frozen=True)
class CalibrationFile:
    """A file whose metadata and list of tensors are checked, and whose numbers are not read yet.

    `parts`: how many stages it has of each (0 of nuq).
    """

    path: Path
    origin: Origin
    parts: Mapping[str, int]
    _tensors: Mapping[str, Kind]
    _fingerprint: str
    _digests: Mapping[str, str] | None  # of version 2
    _seeds: Mapping[str, int]

    @classmethod
    def open(cls, path: Path) -> CalibrationFile:
        """Read what is before the numbers. Raises what `Calibration.open` raises."""
        with _reading(path) as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise StorageError(
                    f"{path}: safetensors, but no calibration; `kvrt calibrate` makes one"
                )
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors: dict[str, Any] = {
                name: (tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype()))
                for name, part in slices.items()
            }
        origin = _origin(path, header)
        digests, seeds = _hashes(path, header)
        parts = stored_parts(tensors)
        _check_kinds(path, tensors, expected_tensors(origin.geometry, parts or {NUQ: 0}, seeds))
        fingerprint = header["fingerprint"]
        if digests is not None and (
            set(digests) != set(tensors) or fingerprint_of(digests, seeds) != fingerprint
        ):
            raise StorageError(f"{path}: damaged, its metadata do not go with its tensors")
        return cls(path, origin, parts, tensors, fingerprint, digests, seeds)

    def read(self, parts: Iterable[str]) -> Calibration:
        """These parts, checked wholly. Raises StorageError."""
        wanted = set(parts)
        found: dict[str, np.ndarray] = {}
        with _reading(self.path) as file:
            places = _places(self.path)
            for name, (shape, dtype) in self._tensors.items():
                if part_of(name) not in wanted:
                    continue
                if name.endswith(".entries"):
                    # Hundreds of megabytes, of which each layer is copied once.
                    found[name] = np.memmap(self.path, dtype, "r", places[name], shape)
                else:
                    found[name] = file.get_tensor(name)
        seeds = {part: seed for part, seed in self._seeds.items() if part in wanted}
        made = Calibration(self.origin, found, str(self.path), seeds, self._digests)
        if self._digests is None:
            sound = made.fingerprint == self._fingerprint
        else:
            sound = all(digest_of(found[name]) == self._digests[name] for name in found)
        if not sound:
            raise StorageError(
                f"{self.path}: damaged, the tensors are not those it was written with"
            )
        for name, tensor in found.items():
            if wrong := _wrong_numbers(name, tensor):
                raise StorageError(f"{self.path}: {name} holds {wrong}")
        return made


def write(calibration: Calibration, path: Path) -> None:
    """Write the file, whole or not at all. Raises StorageError."""
    from .tensor_file import Tensor, write_tensors

    origin, geometry = calibration.origin, calibration.origin.geometry
    header = {
        "format": FORMAT,
        "version": PLAIN,
        "model": origin.model,
        "model_fingerprint": origin.model_fingerprint,
        "num_layers": str(geometry.num_layers),
        "num_kv_heads": str(geometry.num_kv_heads),
        "head_dim": str(geometry.head_dim),
        "texts": json.dumps(origin.texts),
        "tokens": str(origin.tokens),
        "fingerprint": calibration.fingerprint,
    }
    if set(calibration.parts) != {NUQ}:
        header["version"] = WITH_BOOKS
        header["digests"] = json.dumps(dict(calibration.all_digests))
        header["seeds"] = json.dumps(dict(calibration.seeds))
    tensors = {name: Tensor.of(array) for name, array in sorted(calibration.tensors.items())}
    write_tensors(path, header, tensors)


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """The opened safetensors file, with errors in words."""
    from safetensors import SafetensorError, safe_open

    try:
        size = path.stat().st_size
        if not path.is_file() or size > _LIMIT:
            raise StorageError(f"{path}: no calibration, expected a file made by `kvrt calibrate`")
        if not size:
            raise StorageError(f"{path}: empty, expected a file made by `kvrt calibrate`")
        with safe_open(path, framework="np") as file:
            yield file
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file, expected a calibration") from None
    except OSError as error:
        raise storage_error(path, error) from None
    except SafetensorError as error:
        reason = " ".join(str(error).split())[:120]
        raise StorageError(f"{path}: damaged, or no calibration: {reason}") from None


def _places(path: Path) -> dict[str, int]:
    """Where each tensor's numbers begin, of a file whose header is sound."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: 8 + length + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _origin(path: Path, header: Mapping[str, str]) -> Origin:
    """What the metadata say of model and texts."""
    version = header.get("version")
    if version not in VERSIONS:
        raise UnsupportedError(
            f"{path}: calibration of version {shown(version)}, this kvrt reads "
            f"{' and '.join(VERSIONS)}; make it again with `kvrt calibrate`"
        )
    try:
        texts = json.loads(header["texts"])
        sizes = [int(header[name]) for name in ("num_layers", "num_kv_heads", "head_dim")]
        header["fingerprint"]
        return Origin(
            header["model"],
            header["model_fingerprint"],
            Geometry(sizes[0], sizes[1], sizes[2]),
            tuple(str(text) for text in texts),
            int(header["tokens"]),
        )
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError, CodecError):
        raise StorageError(f"{path}: damaged, its metadata are incomplete") from None


def _hashes(
    path: Path, header: Mapping[str, str]
) -> tuple[Mapping[str, str] | None, Mapping[str, int]]:
    """Digests of tensors and seeds; of version 1 there are none."""
    if header["version"] == PLAIN:
        return None, {}
    try:
        digests, seeds = json.loads(header["digests"]), json.loads(header["seeds"])
        return (
            {str(name): str(digest) for name, digest in digests.items()},
            {str(part): int(seed) for part, seed in seeds.items()},
        )
    except (KeyError, ValueError, TypeError, OverflowError, AttributeError, RecursionError):
        raise StorageError(f"{path}: damaged, its metadata are incomplete") from None


def _check_kinds(path: Path, found: Mapping[str, Kind], expected: Mapping[str, Kind]) -> None:
    """Raise StorageError unless all tensors are there, and as they should be."""
    if found == expected:
        return
    wrong = next(n for n in (*expected, *found) if found.get(n) != expected.get(n))
    raise StorageError(
        f"{path}: tensor {shown(wrong)} is {_spelled(found.get(wrong))}, "
        f"expected {_spelled(expected.get(wrong))}"
    )


def _wrong_numbers(name: str, tensor: np.ndarray) -> str:
    """What a tensor holds that it cannot, in words; nothing where all is well."""
    if not all(np.isfinite(layer).all() for layer in tensor):
        return "numbers that are not finite"
    if name.endswith(".scale") and not ((tensor > 1 / _MOST) & (tensor < _MOST)).all():
        return f"numbers that are not between {1 / _MOST:.0e} and {_MOST:.0e}"
    if name.endswith(".centre") and not (abs(tensor) < _MOST).all():
        return f"numbers beyond {_MOST:.0e}"
    if name.endswith(".order") and not is_order(tensor):
        return (
            "an order of channels that cannot be, expected each channel of a head once, in groups "
            "of four and their partners in RoPE"
        )
    return ""


def _spelled(tensor: Kind | None) -> str:
    return "absent" if tensor is None else f"{tensor[1]} {list(tensor[0])}"
