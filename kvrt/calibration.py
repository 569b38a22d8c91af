"""What non-uniform cache formats learnt of a model beforehand, and the file that keeps it.

A calibration is a safetensors file. Its metadata say which model it belongs to and what it was
made of; `fingerprint`, the sha256 of all tensors, tells codebooks apart. Of every layer it has:

- `k.sensitivity`, `v.sensitivity` (num_kv_heads, head_dim) f32: how much an error of a channel
  matters: E[q_c^2] for keys, for values the squared norm of the output projection's column, each
  query head's times its mean squared attention; both summed over the queries of a KV head.
- `k.ROPE.SHARE.low`, `.high` (num_kv_heads, head_dim) f16: thresholds of keys in each of the three
  forms; SHARE is 0% (none is outside) or 1% (half of it beyond either).
- `k.ROPE.SHARE.BITS.levels`, `v.SHARE.BITS.levels` (2^bits,) f32, growing: where numbers that are
  normalised to -1 ... 1 between their thresholds are rounded to; `.read_levels`: the same with the
  mean and the spread that the numbers had before they were rounded (KVQuant's Q-norm).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import StorageError, UnsupportedError, UsageError
from .fields import shown
from .kvstore.layout import Geometry
from .paths import storage_error

if TYPE_CHECKING:
    from .kvstore.codecs import Nuq
    from .kvstore.grammar import Rope

FORMAT = "kvrt-calibration"
VERSION = "1"
FILE_NAME = "calibration.safetensors"
"""Name of the calibration of a model, in the model's folder."""

ROPES: tuple[Rope, ...] = ("post", "page", "pre")
SHARES = ("0%", "1%")
BITS = (2, 3, 4)

WIDENING = 1.001
"""Thresholds are widened so that a number that made one is not outside of it by a rounding."""

_LIMIT = 1 << 30  # bytes of a file that are read at most


@dataclass(frozen=True)
class NuqTables:
    """The tables of one layer and side for one `Nuq`.

    levels, read_levels: (2^bits,) f32; centre, half: (num_kv_heads, head_dim) f32, None for values.
    """

    levels: np.ndarray
    read_levels: np.ndarray
    centre: np.ndarray | None = None
    half: np.ndarray | None = None


@dataclass(frozen=True)
class Origin:
    """What a calibration belongs to and was made of."""

    model: str  # its name, for people
    model_fingerprint: str
    geometry: Geometry
    texts: tuple[str, ...]  # sha256 of each text
    tokens: int


def expected_tensors(geometry: Geometry) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """The tensors of a file: name -> (shape, dtype)."""
    layers = geometry.num_layers
    channels = (layers, geometry.num_kv_heads, geometry.head_dim)
    f16, f32 = np.dtype(np.float16), np.dtype(np.float32)
    result: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "k.sensitivity": (channels, f32),
        "v.sensitivity": (channels, f32),
    }
    sides = [f"k.{rope}" for rope in ROPES]
    for share in SHARES:
        for side in sides:
            result |= {f"{side}.{share}.{end}": (channels, f16) for end in ("low", "high")}
        for side in (*sides, "v"):
            for bits in BITS:
                for kind in ("levels", "read_levels"):
                    result[f"{side}.{share}.{bits}.{kind}"] = ((layers, 2**bits), f32)
    return result


@dataclass(frozen=True, eq=False)
class Calibration:
    """Where numbers of each layer lie, fitted by `kvrt calibrate`; `tensors` as the module says.

    `where` names it in messages: its file.
    """

    origin: Origin
    tensors: Mapping[str, np.ndarray]
    where: str = "the calibration"

    @classmethod
    def open(cls, path: Path) -> Calibration:
        """Read a file, checked wholly.

        Raises UsageError where there is none, UnsupportedError for another version, StorageError
        for a file that cannot be read, is damaged, or is no calibration.
        """
        header, tensors = _read(path)
        origin, digest = _origin(path, header)
        found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        expected = expected_tensors(origin.geometry)
        if found != expected:
            wrong = next(n for n in (*expected, *found) if found.get(n) != expected.get(n))
            raise StorageError(
                f"{path}: tensor {shown(wrong)} is {_spelled(found.get(wrong))}, "
                f"expected {_spelled(expected.get(wrong))}"
            )
        result = cls(origin, tensors, str(path))
        if result.fingerprint != digest:
            raise StorageError(f"{path}: damaged, the tensors are not those it was written with")
        if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
            raise StorageError(f"{path}: holds numbers that are not finite")
        return result

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises StorageError."""
        from .tensor_file import Tensor, write_tensors

        origin, geometry = self.origin, self.origin.geometry
        header = {
            "format": FORMAT,
            "version": VERSION,
            "model": origin.model,
            "model_fingerprint": origin.model_fingerprint,
            "num_layers": str(geometry.num_layers),
            "num_kv_heads": str(geometry.num_kv_heads),
            "head_dim": str(geometry.head_dim),
            "texts": json.dumps(origin.texts),
            "tokens": str(origin.tokens),
            "fingerprint": self.fingerprint,
        }
        tensors = {name: Tensor.of(array) for name, array in sorted(self.tensors.items())}
        write_tensors(path, header, tensors)

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of the tensors, in hex: the hash of the codebooks."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            tensor = np.ascontiguousarray(self.tensors[name])
            digest.update(f"\n{name} {tensor.dtype.name} {tensor.shape}\n".encode())
            digest.update(tensor.tobytes())
        return digest.hexdigest()

    @property
    def model_fingerprint(self) -> str:
        return self.origin.model_fingerprint

    def check(self, model_fingerprint: str, geometry: Geometry) -> None:
        """Raise UnsupportedError unless it was made of this model."""
        mine, other = _shape(self.origin.geometry), _shape(geometry)
        if mine != other:
            raise UnsupportedError(
                f"{self.where}: made for {_described(mine)}, this model has {_described(other)}"
            )
        if self.model_fingerprint != model_fingerprint:
            raise UnsupportedError(
                f"{self.where}: made for other weights ({shown(self.origin.model)}, "
                f"{self.model_fingerprint[:12]}), this model is {model_fingerprint[:12]}"
            )

    def tables(self, layer: int, is_value: bool, codec: Nuq, rope: Rope = "post") -> NuqTables:
        """The tables of one layer and side; `rope` is the form of the keys."""
        side = "v" if is_value else f"k.{rope}"
        side += ".1%" if codec.outliers else ".0%"
        levels = self.tensors[f"{side}.{codec.bits}.levels"][layer]
        read_levels = self.tensors[f"{side}.{codec.bits}.read_levels"][layer]
        read_levels = read_levels if codec.qnorm else levels
        if is_value:
            return NuqTables(levels, read_levels)
        low = self.tensors[f"{side}.low"][layer].astype(np.float32)
        high = self.tensors[f"{side}.high"][layer].astype(np.float32)
        return NuqTables(levels, read_levels, *middle_and_half(low, high))


def middle_and_half(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """centre and half, f32, of thresholds f32: a little wider than these, and never empty."""
    middle = (low + high) * np.float32(0.5)
    half = (high - low) * np.float32(0.5 * WIDENING)
    # A channel that never moved: whatever else comes is far outside.
    least = np.maximum(np.abs(middle), np.float32(1.0)) * np.float32(2.0**-12)
    return middle, np.maximum(half, least)


def _read(path: Path) -> tuple[Mapping[str, str], dict[str, np.ndarray]]:
    """Metadata and tensors of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        size = path.stat().st_size
        if not path.is_file() or size > _LIMIT:
            raise StorageError(f"{path}: no calibration, expected a file made by `kvrt calibrate`")
        if not size:
            raise StorageError(f"{path}: empty, expected a file made by `kvrt calibrate`")
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:  # before tensors of a type that NumPy lacks
                raise StorageError(
                    f"{path}: safetensors, but no calibration; `kvrt calibrate` makes one"
                )
            return header, {name: file.get_tensor(name) for name in list(file.keys())}
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file, expected a calibration") from None
    except OSError as error:
        raise storage_error(path, error) from None
    except SafetensorError as error:
        reason = " ".join(str(error).split())[:120]
        raise StorageError(f"{path}: damaged, or no calibration: {reason}") from None


def _origin(path: Path, header: Mapping[str, str]) -> tuple[Origin, str]:
    """What the metadata say, and the tensors' digest."""
    version = header.get("version")
    if version != VERSION:
        raise UnsupportedError(
            f"{path}: calibration of version {shown(version)}, this kvrt reads {VERSION}; "
            "make it again with `kvrt calibrate`"
        )
    try:
        texts = json.loads(header["texts"])
        sizes = [int(header[name]) for name in ("num_layers", "num_kv_heads", "head_dim")]
        origin = Origin(
            header["model"],
            header["model_fingerprint"],
            Geometry(sizes[0], sizes[1], sizes[2]),
            tuple(str(text) for text in texts),
            int(header["tokens"]),
        )
        return origin, header["fingerprint"]
    except (KeyError, ValueError, TypeError, RecursionError):
        raise StorageError(f"{path}: damaged, its metadata are incomplete") from None


def _shape(geometry: Geometry) -> tuple[int, int, int]:
    return geometry.num_layers, geometry.num_kv_heads, geometry.head_dim


def _described(shape: tuple[int, int, int]) -> str:
    return f"{shape[0]} layers of {shape[1]} KV heads of {shape[2]} channels"


def _spelled(tensor: tuple[tuple[int, ...], Any] | None) -> str:
    return "absent" if tensor is None else f"{tensor[1]} {list(tensor[0])}"
