"""The parts of a calibration: the tables of nuq, and codebooks by name.

The tables of nuq are one part, `nuq`. Codebooks that some formats share are one part each: the
side, the codec without its stages, for keys their form, and `had`, such as `k.pq8x256.post`,
`k.rvq1024.page.had`, `v.rvq512.perhead`. A part NAME has the tensors

- NAME.entries (layers, stages, sets * groups, E, d) f16. Stages are nested: a codec of fewer takes
  the first ones. Or, of SimVQ, NAME.w (layers, stages, sets * groups, d, d) f16, from which, with a
  seed, the entries are made again;
- for keys NAME.centre, NAME.scale (layers, num_kv_heads, head_dim) f32, and of groups NAME.order,
  i32 of the same shape: the channels, group by group (`is_order`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from .kvstore.codecs import Nuq, Vq
from .kvstore.codecs.vq import GROUP
from .kvstore.grammar import PQ, RVQ_ENTRIES

if TYPE_CHECKING:
    from .kvstore import Geometry, KVSpec, Side
    from .kvstore.grammar import Rope

NUQ = "nuq"
ROPES: tuple[Rope, ...] = ("post", "page", "pre")
SHARES = ("0%", "1%")
BITS = (2, 3, 4)
MAX_STAGES = 128

Kind = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of a tensor."""

_F16, _F32, _I32 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.int32)
_CODEC = rf"({PQ}|rvq[0-9]+)(\.perhead)?"
_NAME = re.compile(rf"(?:k\.{_CODEC}\.(?:(?:post|page)(?:\.had)?|pre)|v\.{_CODEC}(?:\.had)?)")


@dataclass(frozen=True)
class Books:
    """What a part's name says of its codebooks, and how many stages there are, or are needed."""

    name: str
    codec: Vq
    is_value: bool
    stages: int

    def tensors(self, geometry: Geometry, projected: bool = False) -> dict[str, Kind]:
        """Its tensors: name -> (shape, dtype). `projected`: of SimVQ."""
        _, groups, entries, dim = self.codec.shape(geometry.num_kv_heads, geometry.head_dim)
        channels = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
        kind = "w" if projected else "entries"
        rows = dim if projected else entries
        found: dict[str, Kind] = {
            f"{self.name}.{kind}": ((geometry.num_layers, self.stages, groups, rows, dim), _F16)
        }
        if not self.is_value:
            found |= {f"{self.name}.{what}": (channels, _F32) for what in ("centre", "scale")}
            found |= {f"{self.name}.order": (channels, _I32)} if self.codec.grouped else {}
        return found


def book_name(codec: Vq, is_value: bool, rope: Rope = "post", had: bool = False) -> str:
    """The part that holds the codebooks of a side."""
    side = f"v.{codec.book}" if is_value else f"k.{codec.book}.{rope}"
    return f"{side}{'.had' * had}"


def books_of(name: str, stages: int) -> Books | None:
    """What a part's name says; None where it is no name of codebooks."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    codec, own = match[1] or match[3], bool(match[2] or match[4])
    if codec == PQ:
        return Books(name, Vq(stages, 256, True, perhead=own), match[1] is None, stages)
    entries = int(codec.removeprefix("rvq")[:8])
    if entries not in RVQ_ENTRIES:
        return None
    return Books(name, Vq(stages, entries, False, perhead=own), match[1] is None, stages)


def needed_books(spec: KVSpec, geometry: Geometry) -> dict[str, tuple[Books, Side]]:
    """The codebooks that a format needs, by name, and a side that needs that many stages."""
    found: dict[str, tuple[Books, Side]] = {}
    for layer in range(geometry.num_layers):
        for is_value, side in enumerate(spec.sides(layer)):
            if not isinstance(side.codec, Vq):
                continue
            name = book_name(side.codec, bool(is_value), side.rope, side.had)
            stages = side.codec.stages(geometry.head_dim)
            if name not in found or found[name][0].stages < stages:
                books = books_of(name, stages)
                assert books is not None
                found[name] = books, side
    return found


def needed_parts(spec: KVSpec, geometry: Geometry) -> dict[str, int]:
    """The parts that a format needs -> how many stages of them; 0 of `nuq`."""
    sides = (side for layer in range(geometry.num_layers) for side in spec.sides(layer))
    nuq = {NUQ: 0} if any(isinstance(side.codec, Nuq) for side in sides) else {}
    books = needed_books(spec, geometry).values()
    return nuq | {one.name: one.stages for one, _ in books}


def nuq_tensors(geometry: Geometry) -> dict[str, Kind]:
    """The tensors of the part `nuq`: name -> (shape, dtype)."""
    layers = geometry.num_layers
    channels = (layers, geometry.num_kv_heads, geometry.head_dim)
    result: dict[str, Kind] = {"k.sensitivity": (channels, _F32), "v.sensitivity": (channels, _F32)}
    sides = [f"k.{rope}" for rope in ROPES]
    for share in SHARES:
        for side in sides:
            result |= {f"{side}.{share}.{end}": (channels, _F16) for end in ("low", "high")}
        for side in (*sides, "v"):
            for bits in BITS:
                for kind in ("levels", "read_levels"):
                    result[f"{side}.{share}.{bits}.{kind}"] = ((layers, 2**bits), _F32)
    return result


def is_order(order: np.ndarray) -> bool:
    """Whether rows of order (..., head_dim) i32 put channels into groups as keys of pq have them.

    Each channel is there once; a group's last four are the RoPE partners of its first.
    """
    dim = order.shape[-1]
    pairs = order.reshape(-1, dim // GROUP, 2, GROUP // 2)
    whole = (np.sort(order, axis=-1) == np.arange(dim)).all()
    return bool(whole and (pairs[:, :, 1] - pairs[:, :, 0] == dim // 2).all())


def part_of(tensor: str) -> str:
    """The part that a tensor of this name belongs to."""
    name = tensor.rpartition(".")[0]
    return name if _NAME.fullmatch(name) else NUQ


def stored_parts(found: Mapping[str, Kind]) -> dict[str, int]:
    """The parts of a file's tensors -> how many stages of them there are, as the names say."""
    parts: dict[str, int] = {}
    for name, (shape, _) in found.items():
        part = part_of(name)
        held = shape[1] if name.endswith((".entries", ".w")) and len(shape) == 5 else 0
        parts[part] = max(parts.get(part, 0), held)
    return parts


def expected_tensors(
    geometry: Geometry,
    parts: Mapping[str, int] = MappingProxyType({NUQ: 0}),
    projected: Iterable[str] = (),
) -> dict[str, Kind]:
    """The tensors of a file of these parts -> (shape, dtype); those `projected` are of SimVQ."""
    result: dict[str, Kind] = {}
    for part, stages in parts.items():
        books = books_of(part, min(max(stages, 1), MAX_STAGES))
        result |= (
            nuq_tensors(geometry)
            if books is None
            else books.tensors(geometry, part in set(projected))
        )
    return result
