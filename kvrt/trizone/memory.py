"""The memory of a `ZoneStore`, and what kernels are told of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..backends import view as place
from ..backends.cpu_math import KINDS
from ..backends.ops import Ops
from ..backends.view import POST, QUERY_ROWS, Extent, PageView
from ..kvstore.layout import Geometry
from ..kvstore.stats import exact_rows
from .state import EXACT, Zones, exact_arrays

_MUCH = 256 << 20
"""Bytes from which zone C of all layers is not held twice while it grows."""


class Memory:
    """Makes the arrays of layers, and keeps the settings by which kernels find them.

    `query_heads` is None where queries are not kept. `views` are valid for the memory's whole life.
    """

    def __init__(self, geometry: Geometry, ops: Ops, extent: Extent, query_heads: int | None):
        self._geometry = geometry
        self._ops = ops
        self._query_heads = query_heads
        self.block = geometry.head_dim & -geometry.head_dim  # of the transform, in channels
        count = place.zone_settings(geometry.num_kv_heads)
        self._settings = np.zeros((geometry.num_layers, count), np.int64)
        self.settings = ops.to_device(self._settings)  # (layers, count) i64
        row, address = count * 8, ops.address(self.settings)
        self.views = [
            PageView(extent, settings, address + layer * row, ("never", "never"), zones=True)
            for layer, settings in enumerate(self._settings)
        ]

    def exact(self, rows: int) -> tuple[Any, Any]:
        """Zone C of a layer, with room for so many tokens: keys and values."""
        geometry = self._geometry
        return exact_arrays(self._ops, geometry.num_kv_heads, rows, geometry.head_dim)

    def expect(self, rows: int) -> bool:
        """Prepare for zone C of all layers with room for so many tokens.

        Returns whether that is so much that old and new ones should not be there side by side: an
        allocator has no use for what is freed, since each time more is asked for.
        """
        geometry = self._geometry
        row = geometry.num_kv_heads * geometry.head_dim * EXACT.itemsize
        nbytes, count = row * exact_rows(rows), 2 * geometry.num_layers
        if nbytes * count > _MUCH:
            return True
        self._ops.expect(count, nbytes)
        return False

    def empty_layers(self) -> tuple[Zones, ...]:
        """Layers that hold nothing."""
        return tuple(
            Zones(*self.exact(0), self._no_queries()) for _ in range(self._geometry.num_layers)
        )

    def _no_queries(self) -> Any | None:
        if self._query_heads is None:
            return None
        shape = (QUERY_ROWS, self._query_heads, self._geometry.head_dim)
        return self._ops.to_device(np.zeros(shape, np.float32))

    def with_room(self, zones: Zones, rows: int, used: int) -> Zones:
        """A layer with room for so many exact tokens and no more; `used` are there."""
        if exact_rows(rows) == zones.capacity:
            return zones
        keys, values = self.exact(rows)
        keys[:, :used], values[:, :used] = zones.keys[:, :used], zones.values[:, :used]
        return replace(zones, keys=keys, values=values)

    def point(self, layer: int, zones: Zones, rotated: bool) -> None:
        """Tell the kernels where a layer's tokens are, and whether values are `rotated`."""
        settings, address = self._settings[layer], self._ops.address
        directory, queries = zones.directory, zones.queries
        values = {
            place.HEADS: self._geometry.num_kv_heads,
            place.DIM: self._geometry.head_dim,
            place.KEY_KIND: KINDS[EXACT],
            place.VALUE_KIND: KINDS[EXACT],
            place.TAIL_ROWS: zones.capacity,
            place.TAIL_KEYS: address(zones.keys),
            place.TAIL_VALUES: address(zones.values),
            place.FORM: POST,
            place.VALUE_HADAMARD: self.block if rotated else 0,
            place.QUERIES: 0 if queries is None else address(queries),
        }
        for name, value in values.items():
            settings[name] = value
        if directory is None:
            place.set_blocks(settings, 0, [0], 0)
        else:
            units = address(directory.units)
            place.set_blocks(settings, units, directory.starts, directory.largest)
        self.settings[layer] = self._ops.to_device(settings)
