"""What changes in a store, and where its tokens lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.ops import PAGE_TOKENS, Ops
from ..backends.view import Extent
from .layers import Layers


@dataclass(frozen=True)
class State:
    """What changes, in one object, so that an interrupt finds the store before or after a change.

    `slabs` is memory of whole pages, each (bytes of all layers,) u8; a sealed slab is never
    written again, so forks share it. `table` holds their addresses, `bases` the angles where blocks
    begin. `origin` is the ring slot of the first position behind the sinks. While the ring is
    written over what it held, `journal` is a copy of it.
    """

    length: int
    slabs: tuple[Any, ...]
    table: Any  # (entries,) i64
    bases: Any | None  # (blocks, 2, head_dim / 2) f32
    origin: int = 0
    journal: list[Any] | None = None

    def describe(
        self, extent: Extent, ops: Ops, sink: int, rows: int, tokens: int, pages: int
    ) -> None:
        """Set an extent to so many tokens, `pages` of them sealed; the ring has `rows` slots."""
        extent.table_address = ops.address(self.table)
        extent.bases_address = 0 if self.bases is None else ops.address(self.bases)
        extent.sinks = min(tokens, sink)
        extent.pages = pages
        extent.tail_slot = (pages * PAGE_TOKENS + self.origin) % rows
        extent.tail_tokens = tokens - extent.sinks - pages * PAGE_TOKENS


@dataclass(frozen=True)
class Parts:
    """Where the tokens of a store lie. Sealed pages may be shared, so all is for reading.

    slabs: sealed pages, each (bytes of all layers,) u8; `sinks` rows of the layers' sinks are in
    use, and the slots tail_slots (n,) i64 of their tails, in order of position.
    """

    slabs: Sequence[Any]
    sinks: int
    tail_slots: np.ndarray
    layers: Layers
