"""How a store of zones compresses tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np

from ..backends.view import QUERY_ROWS
from ..errors import CodecError
from ..kvstore.checks import check_queries
from ..kvstore.compression import EXACT_BYTES, Compression
from ..kvstore.spec import KVSpec
from .compress import Queries, compress
from .layout import BLOCK_TOKENS
from .policies import POLICIES
from .reading import Readable
from .segment import Directory, Segment
from .state import EXACT, State, Zones


class Packing(Readable):
    """The half of a `ZoneStore` that packs what it holds exactly."""

    spec: KVSpec
    compression: Compression
    query_heads: int | None
    _moved: bool

    @abstractmethod
    def extend(self, layer: int, k: Any, v: Any, queries: Queries | None = None) -> None: ...
    @abstractmethod
    def _check_new(self, layer: int, k: Any, v: Any) -> None: ...
    @abstractmethod
    def _settle(self, layer: int, zones: Zones, rows: int, rotated: bool) -> None: ...

    @property
    def _rotates(self) -> bool:
        """Whether values are rotated once some are packed."""
        return POLICIES[self.compression.name].rotates

    def compress(self, layer: int, k: Any, v: Any, queries: Queries) -> None:
        """Like `extend`; then pack what the budget does not keep exact.

        v may change by the rounding of a transform there and back. Raises CodecError as `extend`,
        and for queries that do not fit.
        """
        self._check_new(layer, k, v)
        rows = self._state.rows
        total = rows + len(k)
        sink, window = self.spec.sink, self.spec.window
        budget = self.compression.budget_bytes(total, self.geometry.head_dim)
        whole = EXACT_BYTES * self.geometry.head_dim * total
        if total <= sink + window or budget >= whole or not len(k):
            self.extend(layer, k, v, queries)
            return
        rotated = self._state.rotated
        # In place: a second copy of a layer's values would be the most memory that a prompt takes.
        self._rotate(v, rotated)
        keys, values = self._with_exact(layer, k, v)
        self._rotate(values, self._rotates and not rotated)
        exact = sink + window
        left = budget - EXACT_BYTES * self.geometry.head_dim * exact
        segment = compress(
            self.ops, self.compression, left, keys, values, slice(sink, total - window),
            self._checked(queries), len(k),
        )  # fmt: skip
        zones = self._with_segment(self._state.layers[layer], segment)
        kept = self._memory.exact(exact)
        zones = replace(zones, keys=kept[0], values=kept[1])
        zones = self._with_queries(zones, queries, len(k), exact)
        self._settle(layer, zones, exact, self._rotates)
        for slot, part in ((0, slice(sink)), (sink, slice(total - window, total))):
            self.ops.append(self._memory.views[layer], keys[part], values[part], slot)
        self._rotate(v, rotated or (self._rotates and values is v), inwards=False)

    def _with_segment(self, zones: Zones, segment: Segment) -> Zones:
        """A layer with one more segment, which counts as what was chosen from even if empty."""
        segments = (*zones.segments, segment)
        directory = Directory.of(segments, self.ops, head_dim=self.geometry.head_dim)
        return replace(zones, segments=segments, directory=directory)

    def _with_queries(self, zones: Zones, queries: Queries | None, new: int, rows: int) -> Zones:
        """A layer that keeps the newest queries, when its zone C will have so many rows."""
        if zones.queries is None:
            return zones
        kept = zones.queries.copy()
        self._keep_queries(kept, queries, new, rows)
        return replace(zones, queries=kept)

    def _keep_queries(self, kept: Any | None, queries: Queries | None, new: int, rows: int) -> None:
        """Write the newest queries into `kept`, None: nowhere, by their tokens' rows in zone C.

        The last of `new` tokens is row `rows` - 1.
        """
        if kept is None:
            return
        if queries is None:
            raise CodecError(f"cache format {self.spec} weighs tokens by queries: give them")
        count = min(new, QUERY_ROWS)
        newest = self._checked(queries)(slice(new - count, new))
        for i in range(count):
            kept[(rows - count + i) % QUERY_ROWS] = newest[i]

    def _checked(self, queries: Queries) -> Queries:
        """Queries that raise CodecError where they are not what was asked for."""
        if not callable(queries):
            raise CodecError(f"queries must be a function of a slice, got {type(queries).__name__}")

        def checked(rows: slice) -> Any:
            found = queries(rows)
            check_queries(self.geometry, found, rows.stop - rows.start, self.query_heads)
            return found

        return checked

    def until_packing(self) -> int | None:
        """Tokens with which some will be packed, if added one by one; None if never."""
        most = self.compression.recompress
        return None if most is None else max(most + 1 - self._state.rows, 1)

    def _pack_oldest(self) -> None:
        """With recompress, pack the oldest tokens that are not protected, while too many are exact.

        They get their part of what the budget is for all tokens so far; nothing happens where that
        keeps them exact.
        """
        most = self.compression.recompress
        while most is not None and self._state.rows > most:
            state, dim = self._state, self.geometry.head_dim
            budget = self.compression.budget_bytes(state.length, dim)
            budget = budget * BLOCK_TOKENS // state.length
            if budget >= EXACT_BYTES * dim * BLOCK_TOKENS:
                return
            rotated = self._rotates
            layers = tuple(
                self._packed(layer, budget, rotated and not state.rotated)
                for layer in range(len(state.layers))
            )
            rows = state.rows - BLOCK_TOKENS
            frozen = state.length - (rows - self.spec.sink)
            self._moved = True
            self._state = State(state.length, frozen, rows, layers, rotated)
            self._recover()

    def _packed(self, layer: int, budget: int, rotate: bool) -> Zones:
        """A layer whose oldest tokens that are not protected are packed.

        `rotate`: its values are not rotated yet, and must be.
        """
        zones, rows, sink = self._state.layers[layer], self._state.rows, self.spec.sink
        keys, values = self._exact(layer, rows)
        self._rotate(values, rotate)
        asked = min(QUERY_ROWS, rows)
        order = np.arange(rows - asked, rows) % QUERY_ROWS
        assert zones.queries is not None  # recompress keeps them
        queries = zones.queries[self.ops.to_device(order)]  # (asked, query heads, head_dim)
        oldest = slice(sink, sink + BLOCK_TOKENS)
        segment = compress(
            self.ops, self.compression, budget, keys, values, oldest, queries.__getitem__, asked
        )
        self.ops.round_rows(values, EXACT)  # they were, unless just rotated
        kept = self._memory.exact(rows - BLOCK_TOKENS)
        for new, old in zip(kept, (keys, values)):
            new[:, :sink] = old[:sink].swapaxes(0, 1)
            new[:, sink : rows - BLOCK_TOKENS] = old[oldest.stop :].swapaxes(0, 1)
        return self._with_segment(replace(zones, keys=kept[0], values=kept[1]), segment)

    def _exact(self, layer: int, more: int) -> tuple[Any, Any]:
        """Keys and values (rows, kv_heads, head_dim) f32: the exact tokens, and room for others."""
        shape = (more, self.geometry.num_kv_heads, self.geometry.head_dim)
        keys, values = self.ops.empty(shape), self.ops.empty(shape)
        for is_value, out in enumerate((keys, values)):
            self.ops.recall(self._memory.views[layer], bool(is_value), 0, out[: self._state.rows])
        return keys, values

    def _with_exact(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """Exact tokens before the new ones, and these: keys and values (total, kv_heads, dim)."""
        rows = self._state.rows
        if not rows:
            return k, v
        keys, values = self._exact(layer, rows + len(k))
        keys[rows:], values[rows:] = k, v
        return keys, values
