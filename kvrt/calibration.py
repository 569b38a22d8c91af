"""What cache formats learnt of a model beforehand: a calibration, made by `kvrt calibrate`.

It says which model it belongs to and what it was made of; `fingerprint` tells calibrations apart.
Its tensors are of some parts (`calibration_parts`): codebooks, and the tables of nuq, of every
layer

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .calibration_parts import (
    BITS,
    NUQ,
    ROPES,
    SHARES,
    Kind,
    book_name,
    expected_tensors,
    stored_parts,
)
from .errors import CodecError, UnsupportedError
from .fields import shown
from .kvstore.codecs import VqBooks
from .kvstore.layout import Geometry

if TYPE_CHECKING:
    from .kvstore.codecs import Nuq, Vq
    from .kvstore.grammar import Rope

__all__ = [
    "BITS",
    "FILE_NAME",
    "ROPES",
    "SHARES",
    "Calibration",
    "Fitted",
    "NuqTables",
    "Origin",
    "expected_tensors",
    "middle_and_half",
]

FILE_NAME = "calibration.safetensors"
"""Name of the calibration of a model, in the model's folder."""

WIDENING = 1.001
"""Thresholds are widened so that a number that made one is not outside of it by a rounding."""


@dataclass(frozen=True)
class NuqTables:
    """The tables of one layer and side for one `Nuq`.

    levels, read_levels: (2^bits,) f32; centre, half: (num_kv_heads, head_dim) f32, None for values.
    """

    levels: np.ndarray
    read_levels: np.ndarray
    centre: np.ndarray | None = None
    half: np.ndarray | None = None


class Fitted(Protocol):
    """What was fitted to a model, as codecs ask for it: a `Calibration`, or parts of several."""

    def tables(self, layer: int, is_value: bool, codec: Nuq, rope: Rope = "post") -> NuqTables: ...

    def books(
        self, layer: int, is_value: bool, codec: Vq, rope: Rope = "post", had: bool = False
    ) -> VqBooks: ...


@dataclass(frozen=True)
class Origin:
    """What a calibration belongs to and was made of."""

    model: str  # its name, for people
    model_fingerprint: str
    geometry: Geometry
    texts: tuple[str, ...]  # sha256 of each text
    tokens: int

    def check(self, model_fingerprint: str, geometry: Geometry, where: str) -> None:
        """Raise UnsupportedError unless it is of this model; `where` names what is checked."""
        mine, other = _shape(self.geometry), _shape(geometry)
        if mine != other:
            raise UnsupportedError(
                f"{where}: made for {_described(mine)}, this model has {_described(other)}"
            )
        if self.model_fingerprint != model_fingerprint:
            raise UnsupportedError(
                f"{where}: made for other weights ({shown(self.model)}, "
                f"{self.model_fingerprint[:12]}), this model is {model_fingerprint[:12]}"
            )


@dataclass(frozen=True, eq=False)
class Calibration:
    """Parts of what `kvrt calibrate` fitted; `tensors` as the module says.

    `where` names it in messages: its file. `seeds`: of SimVQ's codebooks, by part. `digests`: the
    sha256 of each tensor, also of those that were left in the file.
    """

    origin: Origin
    tensors: Mapping[str, np.ndarray]
    where: str = "the calibration"
    seeds: Mapping[str, int] = field(default_factory=dict)
    digests: Mapping[str, str] | None = None

    @classmethod
    def open(cls, path: Path) -> Calibration:
        """Read a file, checked wholly.

        Raises UsageError where there is none, UnsupportedError for another version, StorageError
        for a file that cannot be read, is damaged, or is no calibration.
        """
        from .calibration_file import CalibrationFile

        file = CalibrationFile.open(path)
        return file.read(file.parts)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises StorageError."""
        from .calibration_file import write

        write(self, path)

    @property
    def parts(self) -> dict[str, int]:
        """The parts it has, and how many stages of them (0 of nuq)."""
        return stored_parts(kinds_of(self.tensors))

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the tensors, in hex, in the file and not: what tells calibrations apart."""
        if self.digests is None and set(self.parts) <= {NUQ}:
            return _plain_fingerprint(self.tensors)
        return fingerprint_of(self.all_digests, self.seeds)

    @cached_property
    def all_digests(self) -> Mapping[str, str]:
        """The sha256 of each tensor, with its dtype and shape."""
        if self.digests is not None:
            return self.digests
        return {name: digest_of(tensor) for name, tensor in self.tensors.items()}

    @property
    def model_fingerprint(self) -> str:
        return self.origin.model_fingerprint

    def check(self, model_fingerprint: str, geometry: Geometry) -> None:
        """Raise UnsupportedError unless it was made of this model."""
        self.origin.check(model_fingerprint, geometry, self.where)

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

    def books(
        self, layer: int, is_value: bool, codec: Vq, rope: Rope = "post", had: bool = False
    ) -> VqBooks:
        """The codebooks of one layer and side, of as many stages as the codec has.

        Raises CodecError where it has no such ones.
        """
        name = book_name(codec, is_value, rope, had)
        head_dim = self.origin.geometry.head_dim
        stages = codec.stages(head_dim)
        if self.parts.get(name, 0) < stages:
            raise CodecError(f"{self.where} has no {stages} stages of the codebooks {name}")
        if name in self.seeds:
            projections = self.tensors[f"{name}.w"][layer, :stages]
            entries = _made_again(projections, self.seeds[name], codec)
        else:
            entries = self.tensors[f"{name}.entries"][layer, :stages]
        if is_value:
            return VqBooks(entries)
        centre, scale = (self.tensors[f"{name}.{what}"][layer] for what in ("centre", "scale"))
        if codec.grouped:
            return VqBooks(entries, centre, scale, self.tensors[f"{name}.order"][layer])
        return VqBooks(entries, centre, scale, codec.plain_order(*centre.shape))


def kinds_of(tensors: Mapping[str, np.ndarray]) -> dict[str, Kind]:
    """Shapes and dtypes."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _made_again(projections: np.ndarray, seed: int, codec: Vq) -> np.ndarray:
    """Entries (stages, groups, E, d) f16 of W (stages, groups, d, d) f16."""
    from .codebooks import simvq_entries

    by_group = [
        simvq_entries(seed, projections[:, group], codec.entries)
        for group in range(projections.shape[1])
    ]
    return np.stack(by_group, axis=1)


def digest_of(tensor: np.ndarray) -> str:
    """The sha256 of a tensor's dtype, shape and numbers; one of many layers is read by layers."""
    digest = hashlib.sha256(f"{tensor.dtype.name} {tensor.shape}\n".encode())
    for part in tensor if tensor.ndim else tensor[None]:
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def fingerprint_of(digests: Mapping[str, str], seeds: Mapping[str, int]) -> str:
    """The sha256 of the names and digests of all tensors, and of seeds."""
    lines = [f"{name} {digests[name]}\n" for name in sorted(digests)]
    lines += [f"{name} seed {seeds[name]}\n" for name in sorted(seeds)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _plain_fingerprint(tensors: Mapping[str, np.ndarray]) -> str:
    """The sha256 of all tensors: of calibrations of nuq alone, as it has always been."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        digest.update(f"\n{name} {tensor.dtype.name} {tensor.shape}\n".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def middle_and_half(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """centre and half, f32, of thresholds f32: a little wider than these, and never empty."""
    middle = (low + high) * np.float32(0.5)
    half = (high - low) * np.float32(0.5 * WIDENING)
    # A channel that never moved: whatever else comes is far outside.
    least = np.maximum(np.abs(middle), np.float32(1.0)) * np.float32(2.0**-12)
    return middle, np.maximum(half, least)


def _shape(geometry: Geometry) -> tuple[int, int, int]:
    return geometry.num_layers, geometry.num_kv_heads, geometry.head_dim


def _described(shape: tuple[int, int, int]) -> str:
    return f"{shape[0]} layers of {shape[1]} KV heads of {shape[2]} channels"
