"""The store's own basis: what keys and values look like where they are kept.

Keys arrive after RoPE at their positions. In the form `post` they stay so; `page` takes back the
rotation of the page's first position, `pre` all of it. The bias of the key projection is left out
of packed keys (their codes would spend their range on it), and had is a Hadamard transform along
head_dim. Sinks and tail are kept in this basis too, so that a token means the same wherever it
lies; attention changes the basis of the query and of the result, not that of a cached token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.ops import PAGE_TOKENS, Ops
from ..backends.view import BACKWARDS, BASE, FORWARDS, OFFSET, PAGE, POST, PRE
from ..errors import CodecError
from .codecs import Dense
from .layout import Geometry
from .rotary import Rotary
from .spec import KVSpec, Side

FORMS = {"post": POST, "page": PAGE, "pre": PRE}


def hadamard_block(side: Side, head_dim: int) -> int:
    """Size of the transform's blocks, the largest power of two that divides head_dim; 0: none."""
    return head_dim & -head_dim if side.had else 0


def leaves_bias_out(side: Side) -> bool:
    return not isinstance(side.codec, Dense)


def needs_bases(geometry: Geometry, spec: KVSpec) -> bool:
    """Whether attention must know the angle at which each block of tokens begins."""
    sides = [spec.sides(layer)[0] for layer in range(geometry.num_layers)]
    return any(
        side.rope != "post" or (geometry.key_bias and leaves_bias_out(side)) for side in sides
    )


def block_starts(sink: int, blocks: int) -> np.ndarray:
    """Positions where blocks of 64 begin, those of the sinks first: (blocks,) i64."""
    sinks = np.arange(-(-sink // PAGE_TOKENS)) * PAGE_TOKENS  # (sink blocks,)
    rest = sink + np.arange(max(blocks - len(sinks), 0)) * PAGE_TOKENS
    return np.concatenate([sinks, rest])[:blocks].astype(np.int64)


class Basis:
    """Changes of basis of one store, and the tables of angles that its attention reads."""

    def __init__(
        self,
        geometry: Geometry,
        spec: KVSpec,
        ops: Ops,
        rotary: Rotary | None,
        key_bias: Sequence[Any] | None,
    ):
        """`key_bias`: one array (num_kv_heads, head_dim) f32 on the device for each layer.

        Raises CodecError where the format needs a rotation or a bias that is not given.
        """
        self._spec = spec
        self._ops = ops
        self._dim = geometry.head_dim
        self._sink = spec.sink
        self._tables: dict[str, tuple[int, int, Any]] = {}
        if geometry.key_bias != (key_bias is not None):
            raise CodecError("the geometry says whether keys have a bias, so give one accordingly")
        if not needs_bases(geometry, spec):
            self._rotary, self.turns, self.quick_pairs = None, None, 0
        elif rotary is None:
            raise CodecError(f"cache format {spec}: keys are kept unrotated, so a Rotary is needed")
        else:
            self._rotary = rotary
            offsets = rotary.table(np.arange(PAGE_TOKENS), rotary.amplitude)  # (64, 2, half)
            self.turns = ops.to_device(offsets)
            self.quick_pairs = rotary.quick_pairs(PAGE_TOKENS)
        self._bias = [
            key_bias[layer] if key_bias and leaves_bias_out(spec.sides(layer)[0]) else None
            for layer in range(geometry.num_layers)
        ]

    def bias(self, layer: int) -> Any | None:
        """What is left out of a layer's keys: (num_kv_heads, head_dim) f32, or None."""
        return self._bias[layer]

    def bases(self, blocks: int) -> Any | None:
        """cos and sin (blocks, 2, head_dim / 2) f32 where blocks begin; None if nobody asks."""
        if self._rotary is None:
            return None
        return self._ops.to_device(self._rotary.table(block_starts(self._sink, blocks)))

    def is_plain(self, layer: int, is_value: bool) -> bool:
        """Whether the store's basis is the model's."""
        side = self._spec.sides(layer)[is_value]
        turned = not is_value and (side.rope != "post" or self._bias[layer] is not None)
        return not (side.had or turned)

    def enter(self, layer: int, is_value: bool, rows: Any, position: int) -> Any:
        """rows (n, num_kv_heads, head_dim) of positions position, ... in the store's basis.

        A new array, unless nothing changes.
        """
        if self.is_plain(layer, is_value):
            return rows
        rows = rows.copy()
        self._change(layer, is_value, rows, position, inwards=True)
        return rows

    def leave(self, layer: int, is_value: bool, rows: Any, position: int) -> None:
        """The opposite of `enter`, in place."""
        if not self.is_plain(layer, is_value):
            self._change(layer, is_value, rows, position, inwards=False)

    def _change(
        self, layer: int, is_value: bool, rows: Any, position: int, *, inwards: bool
    ) -> None:
        side = self._spec.sides(layer)[is_value]
        steps: dict[str, Any] = {"hadamard": hadamard_block(side, self._dim)}
        if not is_value:
            bias = self._bias[layer]
            if side.rope == "page":
                steps["turns"] = self._table("base", position, len(rows))
            elif side.rope == "pre":
                kind = "backwards" if inwards else "forwards"
                steps["turns"] = self._table(kind, position, len(rows))
            if bias is not None:
                steps["bias"] = bias
                if side.rope != "pre":
                    kind = "offset" if side.rope == "page" else "forwards"
                    steps["bias_turns"] = self._table(kind, position, len(rows))
        self._ops.change_basis(rows, inwards, **steps)

    def angles(self, position: int, forwards: np.ndarray) -> np.ndarray:
        """All angles of a token (4, 2, head_dim / 2) f32, as `view.Token` has them.

        forwards: cos and sin (2, head_dim / 2) f32 of its position, with which q and k turn.
        """
        found = np.zeros((4, *forwards.shape), np.float32)
        found[FORWARDS] = forwards
        if (rotary := self._rotary) is not None:
            body = position - self._sink
            offset = (position if body < 0 else body) % PAGE_TOKENS
            found[BACKWARDS], found[BASE], found[OFFSET] = rotary.table(
                np.array([position, position - offset, offset]),
                (1.0 / rotary.amplitude, 1.0, rotary.amplitude),
            )
        return found

    def _table(self, kind: str, position: int, count: int) -> Any:
        """Angles of tokens; the last of each kind is kept, since all layers ask for the same."""
        known = self._tables.get(kind)
        if known is None or known[:2] != (position, count):
            rotary = self._rotary
            assert rotary is not None  # nothing turns without one
            positions = np.arange(position, position + count)
            body = positions - self._sink
            offsets = np.where(body < 0, positions, body) % PAGE_TOKENS
            angles, amplitude = {
                "base": (positions - offsets, 1.0),
                "offset": (offsets, rotary.amplitude),
                "forwards": (positions, rotary.amplitude),
                "backwards": (positions, 1.0 / rotary.amplitude),
            }[kind]
            known = (position, count, self._ops.to_device(rotary.table(angles, amplitude)))
            self._tables[kind] = known
        return known[2]
