"""`ZoneStore`: a cache whose prompts are compressed once, when they have been read.

Per layer: zone C, the exact tokens (sinks, the newest ones of the prompt, all that came later), and
the blocks of zones A and B, which hold what was kept of the others (`layout`). Tokens that are not
kept are forgotten, but they count: positions go on as if they were there.

What is compressed stays as it is. A later prompt is compressed by itself, with the exact tokens
before it, as soon as these are more than the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..backends.ops import Ops
from ..backends.view import FORWARDS, Extent, PageView, Token
from ..errors import CodecError
from ..kvstore.checks import (
    check_added,
    check_complete,
    check_count,
    check_finite,
    check_fits,
    check_layer,
    check_limit,
    check_rows,
)
from ..kvstore.layout import Geometry
from ..kvstore.rotary import Rotary
from ..kvstore.spec import KVSpec
from ..kvstore.stats import StoreStats
from .compress import Queries
from .memory import Memory
from .moving import Movable
from .state import State, Zones


class ZoneStore(Movable):
    """Keys and values of one sequence, in a format that compresses prompts.

    It is used as a `KVStore` is: `extending` and `extend` add tokens exactly; `compress`, in place
    of `extend`, also packs what the format's budget does not keep exact.
    """

    def __init__(
        self,
        geometry: Geometry,
        spec: KVSpec,
        ops: Ops,
        max_tokens: int,
        *,
        rotary: Rotary | None = None,
        query_heads: int | None = None,
        debug: bool = False,
    ):
        """Hold nothing yet.

        `rotary` is what keys were turned by, which a saved file names; `query_heads` is needed with
        recompress, which weighs tokens by the newest queries; `debug` refuses keys and values that
        are not finite. Raises UnsupportedError where the format does not fit the geometry,
        CodecError for counts that are none.
        """
        check_limit(max_tokens)
        spec.check(geometry)
        if spec.compression is None:
            raise CodecError(f"cache format {spec} does not compress prompts: use a KVStore")
        recompress = spec.compression.recompress
        if recompress is not None and query_heads is None:
            raise CodecError(
                f"cache format {spec} keeps queries: say how many query heads there are"
            )
        if query_heads is not None:
            check_count(query_heads)
            if query_heads < 1 or query_heads % geometry.num_kv_heads:
                raise CodecError(
                    f"query_heads must be a multiple of {geometry.num_kv_heads}, the KV heads, "
                    f"got {query_heads}"
                )
        self.geometry = geometry
        self.spec = spec
        self.ops = ops
        self.max_tokens = max_tokens
        self.rotary = rotary
        self.key_bias = None  # it stays in the keys
        self.debug = debug
        self.compression = spec.compression
        self.query_heads = None if recompress is None else query_heads
        self.empty_twin = partial(
            ZoneStore, geometry, spec, ops, max_tokens,
            rotary=rotary, query_heads=query_heads, debug=debug,
        )  # fmt: skip
        self._extent = Extent()
        self._memory = Memory(geometry, ops, self._extent, self.query_heads)
        self._extending: int | None = None  # tokens that are being added
        # What layers that have them will be: zones, rows, whether values are rotated.
        self._pending: dict[int, tuple[Zones, int, bool]] = {}
        self._stepped: set[int] = set()  # layers that have the next token
        self._moved = False  # whether kernels may see something else than the state
        self._state = State(0, 0, 0, self._memory.empty_layers())
        self._point_all()

    def view(self, layer: int) -> PageView:
        """One layer for the kernels. It follows the store: valid for the store's whole life."""
        check_layer(self.geometry, layer)
        return self._memory.views[layer]

    def check_room(self, tokens: int) -> None:
        """Raise ContextFullError unless so many more tokens fit."""
        self._recover()
        check_fits(len(self), tokens, self.max_tokens)

    # One token, step by step

    def append(self, layer: int, k: Any, v: Any, queries: Queries | None = None) -> None:
        """Put the next token's k, v (1, num_kv_heads, head_dim) f32 into a layer's zone C.

        The token counts as cached only after `advance`; until then it may be written again.
        `queries` as of `extend`; only recompress needs them. Raises CodecError without them there.
        """
        self._check(layer, k, v, 1)
        self.check_room(1)
        rows = self._state.rows
        self._reserve(rows + 1)
        self._keep_queries(self._state.layers[layer].queries, queries, 1, rows + 1)
        self.ops.append(self._memory.views[layer], k, self._kept(v), rows)
        self._stepped.add(layer)
        self._extent.tail_tokens = rows + 1

    def advance(self) -> None:
        """Count the appended token; with recompress, pack the oldest ones when they are due.

        Raises CodecError unless every layer has it.
        """
        self.check_room(1)
        check_complete(self.geometry, self._stepped, "append")
        state = self._state
        self._state = replace(state, length=state.length + 1, rows=state.rows + 1)
        self._stepped.clear()
        self._pack_oldest()

    @contextmanager
    def stepping(self, token_id: int, angles: np.ndarray) -> Iterator[None]:
        """Add the next token: inside, `Ops.enter` puts it into each layer's view.

        angles: cos and sin (2, head_dim / 2) f32 of its position. On any exception the store is as
        it was before. Raises ContextFullError, before any work, where the token does not fit.
        """
        self.check_room(1)
        rows = self._state.rows
        self._reserve(rows + 1)
        turns = np.zeros((4, *angles.shape), np.float32)
        turns[FORWARDS] = angles
        self._extent.tail_tokens = rows + 1
        self._extent.token = Token(token_id, rows, False, turns)
        self.ops.publish(self._extent)
        yield
        self._stepped.update(range(self.geometry.num_layers))
        self.advance()

    def check_finite(self, layer: int, k: Any, v: Any) -> None:
        """Raise CodecError for keys or values that are not finite."""
        check_finite(layer, *(self.ops.to_host(rows) for rows in (k, v)))

    # Many tokens, layer by layer

    @contextmanager
    def extending(self, tokens: int) -> Iterator[None]:
        """Add `tokens` tokens: inside, call `extend` or `compress` once for each layer.

        On any exception, a keyboard interrupt too, the store is as it was before; also where a
        layer was left out, which raises CodecError. Raises ContextFullError before any work where
        they do not fit.
        """
        check_added(tokens)
        self.check_room(tokens)
        try:
            self._extending = tokens
            yield
            check_complete(self.geometry, set(self._pending), "extend")
            made = [self._pending[i] for i in range(self.geometry.num_layers)]
            layers = tuple(zones for zones, _, _ in made)
            _, rows, rotated = made[0]
            length, frozen = len(self) + tokens, self._state.frozen
            if rows < self._state.rows + tokens:
                frozen = length
            self._extending = None
            self._state = State(length, frozen, rows, layers, rotated)
            self._moved = False  # not before: until here an interrupt is undone
            self._pending = {}
            self._stepped.clear()
            self._extent.tail_tokens = rows
        except BaseException:
            self._extending = None
            self._recover()
            raise
        self._pack_oldest()

    def extend(self, layer: int, k: Any, v: Any, queries: Queries | None = None) -> None:
        """Put a layer's new tokens k, v (n, num_kv_heads, head_dim) f32 into its zone C.

        n is what `extending` was told. `queries(rows)` gives the queries, after RoPE, of a slice of
        them: (rows, num_heads, head_dim) f32; only recompress needs them. Raises CodecError for
        other shapes, or outside of it.
        """
        self._check_new(layer, k, v)
        zones, rows = self._state.layers[layer], self._state.rows
        zones = self._memory.with_room(zones, rows + len(k), rows)
        zones = self._with_queries(zones, queries, len(k), rows + len(k))
        self._settle(layer, zones, rows + len(k), self._state.rotated)
        self.ops.append(self._memory.views[layer], k, self._kept(v), rows)

    def _check(self, layer: int, k: Any, v: Any, tokens: int) -> None:
        check_layer(self.geometry, layer)
        check_rows(self.geometry, k, v, tokens)
        if self.debug:
            self.check_finite(layer, k, v)

    def _check_new(self, layer: int, k: Any, v: Any) -> None:
        if self._extending is None:
            raise CodecError("extend() adds tokens inside `with store.extending(n):` only")
        self._check(layer, k, v, self._extending)
        if layer in self._pending:
            raise CodecError(f"layer {layer} has these tokens already, extend() it once")

    def _settle(self, layer: int, zones: Zones, rows: int, rotated: bool) -> None:
        """What a layer will be once all have the new tokens; kernels see it at once."""
        self._moved = True
        self._pending[layer] = zones, rows, rotated
        self._memory.point(layer, zones, rotated)

    def _recover(self) -> None:
        """Undo a change that was interrupted. Interrupted itself, it is done again later."""
        if self._extending is not None:
            raise CodecError("inside `with store.extending(n):` only extend() and reading work")
        self._pending = {}
        if self._moved:
            self._point_all()
            self._moved = False
        self._extent.tail_tokens = self._state.rows

    # Memory

    def _reserve(self, rows: int) -> None:
        """Have room for so many exact tokens in all layers."""
        if rows <= self._state.layers[0].capacity:
            return
        self._moved = True
        large = self._memory.expect(rows)
        # One after the other, so that no two are there twice; the first last, which is asked above.
        for layer in reversed(range(self.geometry.num_layers)):
            layers = list(self._state.layers)
            layers[layer] = self._memory.with_room(layers[layer], rows, self._state.rows)
            self._state = replace(self._state, layers=tuple(layers))
            if large:
                self.ops.release()
        self._recover()
        self.ops.release()

    def _point_all(self) -> None:
        for layer, zones in enumerate(self._state.layers):
            self._memory.point(layer, zones, self._state.rotated)

    def stats(self) -> StoreStats:
        """Bytes held now, summed over the arrays. Blocks that forks share count in each.

        `bits_per_element` are those of the tokens that were compressed, forgotten ones too.
        """
        self._recover()
        state, geometry = self._state, self.geometry
        blocks, directories = self._block_bytes(), self._directory_bytes()
        compressed = state.length - state.rows
        numbers = 2 * compressed * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
        return StoreStats(
            tokens=len(self),
            sealed_tokens=compressed,
            page_bytes=blocks,
            tail_bytes=sum(zones.keys.nbytes + zones.values.nbytes for zones in state.layers),
            sink_bytes=0,
            table_bytes=int(self._memory.settings.nbytes) + directories,
            codec_bytes=sum(
                zones.queries.nbytes for zones in state.layers if zones.queries is not None
            ),
            bits_per_element=8 * (blocks + directories) / numbers if compressed else 16.0,
        )
