"""What changes in a `ZoneStore`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.ops import Ops
from ..kvstore.stats import exact_rows
from .segment import Directory, Segment

EXACT = np.dtype(np.float16)


def exact_arrays(ops: Ops, kv_heads: int, rows: int, head_dim: int) -> tuple[Any, Any]:
    """Zone C of a layer, with room for so many tokens: keys and values, zeros."""
    shape = (kv_heads, exact_rows(rows), head_dim)
    keys, values = ops.empty(shape, EXACT), ops.empty(shape, EXACT)
    for array in (keys, values):
        array.fill(0)  # equal stores are equal byte for byte
    return keys, values


@dataclass(frozen=True)
class Zones:
    """What one layer holds.

    keys, values: zone C, (kv_heads, capacity, head_dim) f16; queries: (QUERY_ROWS, query heads,
    head_dim) f32, those of the newest tokens by their row in zone C, where they are kept.
    """

    keys: Any
    values: Any
    queries: Any | None = None
    segments: tuple[Segment, ...] = ()
    directory: Directory | None = None

    @property
    def capacity(self) -> int:
        return int(self.keys.shape[1])


@dataclass(frozen=True)
class State:
    """What changes, in one object, so that an interrupt finds the store before or after a change.

    `length` tokens are cached, the newest `rows` of them, and the sinks, exactly; the first
    `frozen` were compressed, or were there when others were. `rotated`: values are kept after a
    Hadamard transform, from the first compression on, if the policy wants that.
    """

    length: int
    frozen: int
    rows: int
    layers: tuple[Zones, ...]
    rotated: bool = False
