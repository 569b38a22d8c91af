"""Save and load a store: a safetensors file of every byte that holds a token.

Tensors: those that the store names (`saving`, `trizone.saving`), and `token_ids` (tokens,) I32 if
they are given. The metadata say what must agree for these bytes to mean
anything: model, geometry, RoPE, bias of the keys, format, fitted tables.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from ..errors import ContextFullError, KvrtError, StorageError, UnsupportedError
from ..fields import shown
from ..tensor_file import Tensor, TensorFile, write_tensors
from .layout import FORMAT_VERSION
from .spec import KVSpec

if TYPE_CHECKING:
    from ..stores import Store

FORMAT = "kvrt-cache"

_U8, _I32 = np.dtype(np.uint8), np.dtype(np.int32)

_DIFFERENCES = {
    "model": "saved with another model",
    "geometry": "saved with a model of another shape",
    "rope": "saved with another RoPE",
    "key_bias": "saved with another bias of the keys",
    "spec": "saved in another cache format",
    "tables": "saved with another calibration",
}


@dataclass(frozen=True)
class Loaded:
    """What a file held: the store, the ids of its tokens if they were given, all metadata."""

    store: Store
    token_ids: list[int] | None
    metadata: dict[str, str]


def save_store(
    store: Store,
    path: Path,
    *,
    model: str = "",
    token_ids: Sequence[int] = (),
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a store to a file, whole or not at all, without a copy of its pages.

    `model` identifies what made the keys and values; `metadata` are further texts by name, of which
    `model_name` appears in messages. Raises StorageError.
    """
    tensors, texts = store.saved()
    if token_ids:
        tensors["token_ids"] = Tensor.of(np.asarray(token_ids, _I32))  # (tokens,)
    checksum = 0
    for tensor in tensors.values():
        for chunk in tensor.chunks():
            checksum = crc32(chunk, checksum)
    own = {
        "format": FORMAT,
        "version": str(FORMAT_VERSION),
        "tokens": str(len(store)),
        "crc32": str(checksum),
    }
    header = {**(metadata or {}), **texts, **own, **_identity(store, model)}
    write_tensors(path, {**header, _HEADER_CRC: _checksum(header)}, tensors)


_HEADER_CRC = "header_crc32"


def _checksum(header: Mapping[str, str]) -> str:
    """The checksum of the metadata, as metadata."""
    rest = {name: text for name, text in header.items() if name != _HEADER_CRC}
    return str(crc32(json.dumps(rest, sort_keys=True).encode()))


def load_store(path: Path, like: Store, *, model: str = "") -> Loaded:
    """A new store of the kind of `like`, which stays as it is, with what a file holds.

    Raises StorageError for a file that cannot be read or is damaged, UnsupportedError for one of
    another model, geometry, RoPE, format or calibration, ContextFullError where it does not fit.
    """
    with TensorFile(path) as file:
        tokens, token_ids = _check(file, like, model), None
        store = like.restored(file, tokens)
        if "token_ids" in file:
            token_ids = file.read("token_ids", _I32, (tokens,)).tolist()
        if file.metadata.get("crc32") != str(file.crc32):
            raise file.damaged("its numbers are not those that were saved")
        if file.metadata.get(_HEADER_CRC) != _checksum(file.metadata):
            raise file.damaged("its texts are not those that were saved")
        return Loaded(store, token_ids, file.metadata)


@dataclass(frozen=True)
class Described:
    """What a file says of the cache in it: `spec` in the words of `KVSpec`, and its geometry."""

    tokens: int
    spec: str
    num_layers: int
    num_kv_heads: int
    head_dim: int


_GEOMETRY = re.compile(r"([0-9]{1,6}) layers, ([0-9]{1,6}) KV heads of ([0-9]{1,6})(, key bias)?")


def describe(file: TensorFile) -> Described:
    """What a file of `save_store` holds, from its texts alone, without the model it was made with.

    Raises StorageError where they are damaged or of another kind of file, UnsupportedError for
    another version.
    """
    tokens = _check_kind(file)
    if file.metadata.get(_HEADER_CRC) != _checksum(file.metadata):
        raise file.damaged("its texts are not those that were saved")
    shape = _GEOMETRY.fullmatch(file.metadata.get("geometry", ""))
    if shape is None:
        raise file.damaged("its metadata lack a geometry")
    return Described(tokens, _short(file.metadata.get("spec", "")), *map(int, shape.groups()[:3]))


def _identity(store: Store, model: str) -> dict[str, str]:
    """What must be the same where the bytes are read."""
    geometry, ops = store.geometry, store.ops
    rotary = store.rotary
    # Rounded, since the last bit of a power may differ from machine to machine.
    numbers = [] if rotary is None else [rotary.amplitude, *rotary.frequencies]
    return {
        "model": model,
        "geometry": f"{geometry.num_layers} layers, {geometry.num_kv_heads} KV heads "
        f"of {geometry.head_dim}{', key bias' * geometry.key_bias}",
        "rope": _digest([np.array(numbers, np.float32)] if numbers else []),
        "key_bias": _digest(ops.to_host(bias) for bias in store.key_bias or ()),
        "spec": _spelled(store.spec),
        "tables": _digest(ops.to_host(table) for table in store.fitted_tables()),
    }


def _digest(arrays: Iterable[Any]) -> str:
    """A hash of arrays; "" for none."""
    digest, some = hashlib.sha256(), False
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
        some = True
    return digest.hexdigest()[:32] if some else ""


def _spelled(spec: KVSpec) -> str:
    """A spec in the grammar, in full: what a preset's name means may change."""
    counts = f"sink={spec.sink},window={spec.window}"
    if spec.compression is not None:
        more = spec.compression.recompress
        return f"{spec.compression},{counts}{'' if more is None else f',recompress={more}'}"
    overrides = (f",layers[{o.layers}]=k={o.k},v={o.v}" for o in spec.overrides)
    return f"k={spec.k},v={spec.v},{counts}{''.join(overrides)}"


def _check(file: TensorFile, like: Store, model: str) -> int:
    """Tokens in the file, if it is one for such a store."""
    path, metadata = file.path, file.metadata
    tokens = _check_kind(file)
    for key, expected in _identity(like, model).items():
        got = metadata.get(key)
        if got is None:
            raise file.damaged(f"its metadata lack {key!r}")
        if got != expected:
            raise UnsupportedError(f"{path}: {_difference(key, got, expected, metadata)}")
    if tokens > like.max_tokens:
        raise ContextFullError(
            f"{path}: {tokens:,} tokens, more than the context limit of {like.max_tokens:,}; "
            f"start with -c {tokens} or more"
        )
    return tokens


def _check_kind(file: TensorFile) -> int:
    """Tokens in the file, if it is of this format and version."""
    path, metadata = file.path, file.metadata
    if metadata.get("format") != FORMAT:
        raise StorageError(f"{path}: safetensors, but no saved cache")
    if metadata.get("version") != str(FORMAT_VERSION):
        version = shown(metadata.get("version"))
        raise UnsupportedError(
            f"{path}: of cache format version {version}, this kvrt reads {FORMAT_VERSION}"
        )
    text = metadata.get("tokens", "")
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise file.damaged(f"its number of tokens is {shown(text)}")
    return int(text)


def _difference(key: str, got: str, expected: str, metadata: Mapping[str, str]) -> str:
    """What does not agree, and what to do."""
    advice = ""
    if key == "spec":
        got, expected = _short(got), _short(expected)
        advice = f"; start with --kv {got}"
    elif key == "tables":
        advice = "; start with the --calibration it was made with"
    elif key == "model" and "model_name" in metadata:
        advice = f"; start with -m {shown(metadata['model_name'], 200)[1:-1]}"
    if key not in ("spec", "geometry"):
        got, expected = (hashed[:12] or "none" for hashed in (got, expected))
    return f"{_DIFFERENCES[key]}: got {shown(got)}, expected {shown(expected)}{advice}"


def _short(spec: str) -> str:
    """A spec as `KVSpec` prints it; anything else as JSON."""
    try:
        return str(KVSpec.parse(spec))
    except KvrtError:
        return shown(spec)
