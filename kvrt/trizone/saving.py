"""How a store of zones is written to a file, and read again.

Tensors, for each layer i: `layers.i.k.exact`, `layers.i.v.exact` (num_kv_heads, rows, head_dim)
F16, zone C; `layers.i.queries` (QUERY_ROWS, num_heads, head_dim) F32, where they are kept; and for
each segment s `layers.i.zones.s` (bytes,) U8, its memory as it is, `layers.i.blocks.s` (units, 5)
I64, head and tokens by width of each block, `layers.i.channels.s` (num_kv_heads, 4) I64, channels
by width. Where a block begins follows from these. The text `zones` says how many tokens are exact,
how many are frozen, whether values are rotated, and of each layer's segments the candidates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from ..backends.ops import Ops
from ..errors import CodecError
from ..kvstore.saving import Copy
from ..kvstore.spec import KVSpec
from ..tensor_file import Tensor, TensorFile
from .layout import WIDTHS, check_counts
from .segment import Directory, Segment, Widths, lay_out
from .state import EXACT, State, Zones, exact_arrays

_I64, _U8, _F32 = np.dtype(np.int64), np.dtype(np.uint8), np.dtype(np.float32)


def saved_state(state: State, ops: Ops) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and texts by name."""
    tensors: dict[str, Tensor] = {}
    for layer, zones in enumerate(state.layers):
        heads, _, dim = zones.keys.shape
        for side, array in (("k", zones.keys), ("v", zones.values)) if state.rows else ():
            copy = Copy(ops, array, (slice(None), slice(state.rows)))
            tensors[f"layers.{layer}.{side}.exact"] = Tensor(EXACT, (heads, state.rows, dim), copy)
        if zones.queries is not None:
            tensors[f"layers.{layer}.queries"] = Tensor(
                _F32, zones.queries.shape, Copy(ops, zones.queries, slice(None))
            )
        for number, segment in enumerate(zones.segments):
            blocks = np.concatenate([segment.heads[:, None], segment.token_counts], axis=1)
            data = segment.data
            tensors[f"layers.{layer}.blocks.{number}"] = Tensor.of(blocks)
            tensors[f"layers.{layer}.channels.{number}"] = Tensor.of(segment.channels)
            tensors[f"layers.{layer}.zones.{number}"] = Tensor(
                _U8, data.shape, Copy(ops, data, slice(None))
            )
    candidates = [[segment.candidates for segment in zones.segments] for zones in state.layers]
    known = {
        "rows": state.rows,
        "frozen": state.frozen,
        "rotated": state.rotated,
        "candidates": candidates,
    }
    return tensors, {"zones": json.dumps(known)}


def restored_state(file: TensorFile, tokens: int, spec: KVSpec, empty: State, ops: Ops) -> State:
    """What a file holds; `empty` is that of a new store. Raises StorageError."""
    rows, frozen, rotated, candidates = _text(file, tokens, spec, len(empty.layers))
    layers = tuple(
        _layer(file, layer, rows, candidates[layer], zones, ops)
        for layer, zones in enumerate(empty.layers)
    )
    return State(tokens, frozen, rows, layers, rotated)


def saved_widths(
    file: TensorFile, tokens: int, spec: KVSpec, layers: int, head_dim: int
) -> list[Widths]:
    """Widths of each layer that a file holds, as of `ZoneStore.widths`. Raises StorageError."""
    *_, candidates = _text(file, tokens, spec, layers)
    found = []
    for layer, counts in enumerate(candidates):
        segments = []
        for number, count in enumerate(counts):
            heads = file.shape(f"layers.{layer}.channels.{number}")[0]
            owners, by_width, channels = _counts(file, layer, number, count, heads, head_dim)
            units, _ = lay_out(by_width, owners, channels, head_dim)
            segments.append(Segment(None, units, owners, count, channels))
        found.append(Widths.of(segments, head_dim))
    return found


def _text(
    file: TensorFile, tokens: int, spec: KVSpec, layers: int
) -> tuple[int, int, bool, list[list[int]]]:
    """Rows, frozen tokens, whether values are rotated, and candidates, checked."""
    try:
        known = json.loads(file.metadata.get("zones", ""))
        rows, frozen, candidates = known["rows"], known["frozen"], known["candidates"]
        right = all(_is_count(number) for number in (rows, frozen, *chain(*candidates)))
        rotated = known["rotated"]
        right = right and type(rotated) is bool
        right = right and type(candidates) is list and len(candidates) == layers
        # What is not exact was chosen from, in each layer; after that all tokens are exact.
        right = right and all(sum(counts) == tokens - rows for counts in candidates)
        before = rows - (tokens - frozen)
        right = right and frozen <= tokens and before in _exact_before(spec, frozen)
    except (ValueError, TypeError, KeyError, RecursionError):
        right = False
    if not right:
        raise file.damaged("its metadata do not say where tokens are")
    return rows, frozen, rotated, candidates


def _exact_before(spec: KVSpec, frozen: int) -> tuple[int, ...]:
    """How many of the first `frozen` tokens may be exact."""
    if not frozen:
        return (0,)
    prompt = spec.sink + spec.window
    if spec.compression is None or spec.compression.recompress is None:
        return (prompt,)
    return (prompt, spec.sink)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _layer(
    file: TensorFile, layer: int, rows: int, candidates: list[int], empty: Zones, ops: Ops
) -> Zones:
    heads, _, dim = empty.keys.shape
    arrays = exact_arrays(ops, heads, rows, dim)
    for side, array in zip("kv", arrays) if rows else ():
        found = file.read(f"layers.{layer}.{side}.exact", EXACT, (heads, rows, dim))
        array[:, :rows] = ops.to_device(found)
    queries = None
    if empty.queries is not None:
        found = file.read(f"layers.{layer}.queries", _F32, tuple(empty.queries.shape))
        queries = ops.to_device(found)
    segments = tuple(_segments(file, layer, candidates, heads, dim, ops))
    return Zones(*arrays, queries, segments, Directory.of(segments, ops, head_dim=dim))


def _segments(
    file: TensorFile, layer: int, candidates: list[int], heads: int, dim: int, ops: Ops
) -> Iterator[Segment]:
    for number, count in enumerate(candidates):
        owners, tokens, channels = _counts(file, layer, number, count, heads, dim)
        units, nbytes = lay_out(tokens, owners, channels, dim)
        data = file.read(f"layers.{layer}.zones.{number}", _U8, (nbytes,))
        if np.any(data[: channels.sum()] >= dim):
            raise file.damaged(f"layer {layer} keeps channels beyond the {dim} of a head")
        yield Segment(ops.to_device(data), units, owners, count, channels)


def _counts(
    file: TensorFile, layer: int, number: int, count: int, heads: int, dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a segment: heads (units,) and tokens by width (units, 4) of blocks, channels by width."""
    where = f"layers.{layer}.%s.{number}"
    shape = (file.shape(where % "blocks")[0], 1 + len(WIDTHS))
    blocks = file.read(where % "blocks", _I64, shape)
    channels = file.read(where % "channels", _I64, (heads, len(WIDTHS)))
    owners, tokens = blocks[:, 0].copy(), np.ascontiguousarray(blocks[:, 1:])
    if np.any((owners < 0) | (owners >= heads)) or np.any(np.diff(owners) < 0):
        raise file.damaged(f"blocks of layer {layer} belong to no head")
    if np.any(np.bincount(owners, tokens.sum(1), heads) > count):
        raise file.damaged(f"blocks of layer {layer} hold more than its {count} tokens")
    if np.any((channels < 0) | (channels > dim)):
        raise file.damaged(f"layer {layer} has heads of {channels.tolist()} channels")
    try:
        check_counts(tokens, channels[owners], dim)
    except CodecError as error:
        raise file.damaged(f"layer {layer}: {error}") from None
    return owners, tokens, channels
