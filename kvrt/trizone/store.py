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

from ..backends import view as place
from ..backends.cpu_math import KINDS
from ..backends.ops import Ops
from ..backends.view import FORWARDS, POST, Extent, PageView, Token
from ..errors import CodecError, ContextFullError, UnsupportedError
from ..kvstore.checks import check_complete, check_count, check_finite, check_layer, check_rows
from ..kvstore.compression import EXACT_BYTES
from ..kvstore.layout import Geometry
from ..kvstore.rotary import Rotary
from ..kvstore.spec import KVSpec
from ..kvstore.stats import StoreStats
from ..tensor_file import Tensor, TensorFile
from .compress import Queries, compress
from .saving import restored_state, saved_state
from .segment import Directory, Widths
from .state import EXACT, State, Zones, exact_arrays


class ZoneStore:
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
        debug: bool = False,
    ):
        """`rotary` is what keys were turned by, which a saved file names; `debug` refuses keys and
        values that are not finite.

        Raises UnsupportedError where the format does not fit the geometry.
        """
        check_count(max_tokens)
        if max_tokens < 1:
            raise CodecError(f"a store must hold at least one token, got max_tokens={max_tokens}")
        spec.check(geometry)
        if spec.compression is None:
            raise CodecError(f"cache format {spec} does not compress prompts: use a KVStore")
        self.geometry = geometry
        self.spec = spec
        self.ops = ops
        self.max_tokens = max_tokens
        self.rotary = rotary
        self.key_bias = None  # it stays in the keys
        self.debug = debug
        self.compression = spec.compression
        self.empty_twin = partial(
            ZoneStore, geometry, spec, ops, max_tokens, rotary=rotary, debug=debug
        )
        self._settings = np.zeros((geometry.num_layers, place.LAYER_SETTINGS), np.int64)
        self._on_device = ops.to_device(self._settings)  # (layers, LAYER_SETTINGS) i64
        self._extent = Extent()
        self._extending: int | None = None  # tokens that are being added
        self._pending: dict[int, tuple[Zones, int]] = {}  # layers that have them, and their rows
        self._stepped: set[int] = set()  # layers that have the next token
        self._moved = False  # whether kernels may see something else than the state
        self._state = State(0, 0, 0, self._empty_layers(0))
        self._point_all()
        row = place.LAYER_SETTINGS * 8
        address = ops.address(self._on_device)
        self._views = [
            PageView(self._extent, settings, address + layer * row, ("never", "never"), zones=True)
            for layer, settings in enumerate(self._settings)
        ]

    def __len__(self) -> int:
        """Tokens cached, those that were forgotten too: the next one's position."""
        return self._state.length

    def view(self, layer: int) -> PageView:
        """One layer for the kernels. It follows the store: valid for the store's whole life."""
        check_layer(self.geometry, layer)
        return self._views[layer]

    def check_room(self, tokens: int) -> None:
        """Raise ContextFullError unless so many more tokens fit."""
        self._recover()
        if len(self) + tokens > self.max_tokens:
            raise ContextFullError(
                f"context full: {len(self)} tokens cached and {tokens} more asked for, "
                f"the limit is {self.max_tokens}"
            )

    # One token, step by step

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Put the next token's k, v (1, num_kv_heads, head_dim) f32 into a layer's zone C.

        The token counts as cached only after `advance`; until then it may be written again.
        """
        self._check(layer, k, v, 1)
        self.check_room(1)
        self._reserve(self._state.rows + 1)
        self.ops.append(self._views[layer], k, v, self._state.rows)
        self._stepped.add(layer)
        self._extent.tail_tokens = self._state.rows + 1

    def advance(self) -> None:
        """Count the appended token. Raises CodecError unless every layer has it."""
        self.check_room(1)
        check_complete(self.geometry, self._stepped, "append")
        state = self._state
        self._state = replace(state, length=state.length + 1, rows=state.rows + 1)
        self._stepped.clear()

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
        check_count(tokens)
        if tokens < 0:
            raise CodecError(f"cannot add {tokens} tokens")
        self.check_room(tokens)
        try:
            self._extending = tokens
            yield
            check_complete(self.geometry, set(self._pending), "extend")
            layers, rows = zip(*(self._pending[i] for i in range(self.geometry.num_layers)))
            length, frozen = len(self) + tokens, self._state.frozen
            if rows[0] < self._state.rows + tokens:
                frozen = length
            self._extending, self._moved = None, False
            self._state = State(length, frozen, rows[0], layers)
            self._pending = {}
            self._extent.tail_tokens = rows[0]
        except BaseException:
            self._extending = None
            self._recover()
            raise

    def extend(self, layer: int, k: Any, v: Any) -> None:
        """Put a layer's new tokens k, v (n, num_kv_heads, head_dim) f32 into its zone C.

        n is what `extending` was told. Raises CodecError for other shapes, or outside of it.
        """
        self._check_new(layer, k, v)
        zones, rows = self._state.layers[layer], self._state.rows
        self._settle(layer, self._with_room(zones, rows + len(k), rows), rows + len(k))
        self.ops.append(self._views[layer], k, v, rows)

    def compress(self, layer: int, k: Any, v: Any, queries: Queries) -> None:
        """Like `extend`, and then pack what the budget does not keep exact.

        `queries(rows)` gives the queries, after RoPE, of a slice of the n new tokens: (rows,
        num_heads, head_dim) f32.
        """
        self._check_new(layer, k, v)
        rows = self._state.rows
        total = rows + len(k)
        sink, window = self.spec.sink, self.spec.window
        budget = self.compression.budget_bytes(total, self.geometry.head_dim)
        if total <= sink + window or budget >= EXACT_BYTES * self.geometry.head_dim * total:
            self.extend(layer, k, v)
            return
        keys, values = self._with_exact(layer, k, v)
        segment = compress(self.ops, self.spec, budget, keys, values, queries, len(k))
        zones = self._state.layers[layer]
        segments = (*zones.segments, segment) if len(segment.units) else zones.segments
        directory = zones.directory
        if segments != zones.segments:
            directory = Directory.of(segments, self.geometry.num_kv_heads, self.ops)
        exact = sink + window
        self._settle(layer, Zones(*self._empty(exact), segments, directory), exact)
        for slot, part in ((0, slice(sink)), (sink, slice(total - window, total))):
            self.ops.append(self._views[layer], keys[part], values[part], slot)

    def _with_exact(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """Exact tokens before the new ones, and these: keys and values (total, kv_heads, dim)."""
        rows = self._state.rows
        if not rows:
            return k, v
        both = []
        for is_value, new in enumerate((k, v)):
            whole = self.ops.empty((rows + len(new), *new.shape[1:]))
            self.ops.recall(self._views[layer], bool(is_value), 0, whole[:rows])
            whole[rows:] = new
            both.append(whole)
        return both[0], both[1]

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

    def _settle(self, layer: int, zones: Zones, rows: int) -> None:
        """What a layer will be once all have the new tokens; kernels see it at once."""
        self._moved = True
        self._pending[layer] = zones, rows
        self._point(layer, zones)

    def _recover(self) -> None:
        """Undo a change that was interrupted. Interrupted itself, it is done again later."""
        if self._extending is not None:
            raise CodecError("inside `with store.extending(n):` only extend() and reading work")
        self._pending = {}
        if self._moved:
            self._point_all()
            self._moved = False
        self._extent.tail_tokens = self._state.rows

    # Reading

    @property
    def held(self) -> int:
        """Rows that `read` needs: the exact tokens, and the most that a head keeps of others."""
        heads = self.geometry.num_kv_heads
        packed = (
            sum(segment.kept(heads) for segment in zones.segments) for zones in self._state.layers
        )
        return self._state.rows + max(int(np.max(kept, initial=0)) for kept in packed)

    def read(self, layer: int, keys: Any, values: Any) -> np.ndarray:
        """Decode a layer's tokens into the ends of keys, values (held, num_kv_heads, head_dim) f32.

        Returns of each head the first row that is one of its tokens, (num_kv_heads,) i64: packed
        ones, block by block, then the exact ones. Rows before it are undefined.
        """
        if self._extending is None:
            self._recover()
        check_layer(self.geometry, layer)
        held, exact = self.held, self._state.rows
        check_rows(self.geometry, keys, values, held)
        zones, heads = self._state.layers[layer], self.geometry.num_kv_heads
        firsts = np.full(heads, held - exact)  # (kv_heads,)
        if zones.directory is not None:
            directory = zones.directory
            counts = np.concatenate([segment.token_counts for segment in zones.segments])
            owners = np.concatenate([segment.heads for segment in zones.segments])
            order = np.argsort(owners, kind="stable")
            tokens, owners = counts.sum(1)[order], owners[order]  # (units,)
            kept = np.bincount(owners, tokens, heads).astype(np.int64)
            firsts -= kept
            before = np.cumsum(tokens) - tokens - (np.cumsum(kept) - kept)[owners]
            rows = self.ops.to_device(firsts[owners] + before)  # (units,)
            for is_value, out in enumerate((keys, values)):
                self.ops.unpack_zones(
                    directory.units, self.ops.to_device(owners), rows, bool(is_value), out
                )
        if exact:
            for is_value, out in enumerate((keys, values)):
                self.ops.recall(self._views[layer], bool(is_value), 0, out[held - exact :])
        return firsts

    def read_exact(self, layer: int, keys: Any, values: Any, position: int) -> None:
        """Round keys, values (n, num_kv_heads, head_dim) f32 in place to what zone C holds."""
        check_rows(self.geometry, keys, values, len(keys))
        for rows in (keys, values):
            self.ops.round_rows(rows, EXACT)

    def widths(self, layer: int) -> Widths:
        """How many tokens and channels a layer keeps at each width, of those compressed."""
        check_layer(self.geometry, layer)
        return Widths.of(self._state.layers[layer].segments, self.geometry.head_dim)

    # Taking away, copying

    def cut(self, tokens: int) -> int:
        """The most tokens, up to `tokens`, that `truncate` can keep."""
        return tokens if tokens >= self._state.frozen else 0

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens: none, or all that were compressed and some that were not.

        Raises UnsupportedError for a cut among those that were compressed, CodecError where the
        store does not hold so many.
        """
        self._recover()
        check_count(tokens)
        if not 0 <= tokens <= len(self):
            raise CodecError(f"cannot truncate to {tokens} tokens, the store holds {len(self)}")
        state = self._state
        if 0 < tokens < state.frozen:
            raise UnsupportedError(
                f"cache format {self.spec}: cannot truncate to {tokens} tokens, the first "
                f"{state.frozen} were compressed together; {state.frozen} to {len(self)}, or 0, "
                "work"
            )
        self._stepped.clear()
        if tokens:
            rows = state.rows - (state.length - tokens)
            self._state = replace(state, length=tokens, rows=rows)
        else:
            self._moved = True
            self._state = State(0, 0, 0, self._empty_layers(0))
        self._recover()

    def clear(self) -> None:
        """Forget everything."""
        self.truncate(0)

    def shift(self, tokens: int) -> None:
        """Raises UnsupportedError: keys are kept after RoPE."""
        raise UnsupportedError(
            f"cache format {self.spec} keeps keys after RoPE, so they cannot move; k=...:page and "
            "k=...:pre can"
        )

    def fork(self) -> ZoneStore:
        """A store that holds the same tokens and goes its own way. Blocks are shared."""
        self._recover()
        other, state = self.empty_twin(), self._state
        layers = tuple(
            replace(zones, keys=zones.keys.copy(), values=zones.values.copy())
            for zones in state.layers
        )
        other.adopt(replace(state, layers=layers))
        return other

    def adopt(self, state: State) -> None:
        """Hold what a state says; for an empty store."""
        self._moved = True
        self._state = state
        self._recover()

    def parts(self) -> State:
        """What the store holds, for reading; valid until it changes."""
        self._recover()
        return self._state

    def saved(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors of every byte that holds a token, and further texts, by name."""
        self._recover()
        return saved_state(self._state, self.ops)

    def restored(self, file: TensorFile, tokens: int) -> ZoneStore:
        """A new store of this kind with what a file holds. Raises StorageError."""
        store = self.empty_twin()
        store.adopt(restored_state(file, tokens, store.parts(), self.ops))
        return store

    def fitted_tables(self) -> tuple[Any, ...]:
        """No arrays that were fitted to a model."""
        return ()

    # Memory

    def _empty(self, rows: int) -> tuple[Any, Any]:
        """Zone C of a layer, with room for so many tokens: keys and values."""
        return exact_arrays(self.ops, self.geometry.num_kv_heads, rows, self.geometry.head_dim)

    def _empty_layers(self, rows: int) -> tuple[Zones, ...]:
        return tuple(Zones(*self._empty(rows)) for _ in range(self.geometry.num_layers))

    def _with_room(self, zones: Zones, rows: int, used: int) -> Zones:
        """A layer with room for so many exact tokens, of which `used` are there."""
        if rows <= zones.capacity:
            return zones
        keys, values = self._empty(rows)
        keys[:, :used], values[:, :used] = zones.keys[:, :used], zones.values[:, :used]
        return replace(zones, keys=keys, values=values)

    def _reserve(self, rows: int) -> None:
        """Have room for so many exact tokens in all layers."""
        state = self._state
        if rows > state.layers[0].capacity:
            self._moved = True
            layers = tuple(self._with_room(zones, rows, state.rows) for zones in state.layers)
            self._state = replace(state, layers=layers)
            self._point_all()
            self._moved = False

    def _point(self, layer: int, zones: Zones) -> None:
        """Tell the kernels where a layer's tokens are."""
        settings, address = self._settings[layer], self.ops.address
        values = {
            place.HEADS: self.geometry.num_kv_heads,
            place.DIM: self.geometry.head_dim,
            place.KEY_KIND: KINDS[EXACT],
            place.VALUE_KIND: KINDS[EXACT],
            place.TAIL_ROWS: zones.capacity,
            place.TAIL_KEYS: address(zones.keys),
            place.TAIL_VALUES: address(zones.values),
            place.FORM: POST,
            place.ZONE_UNITS: 0,
            place.ZONE_STARTS: 0,
        }
        if zones.directory is not None:
            values[place.ZONE_UNITS] = address(zones.directory.units)
            values[place.ZONE_STARTS] = address(zones.directory.starts)
        for name, value in values.items():
            settings[name] = value
        self._on_device[layer] = self.ops.to_device(settings)

    def _point_all(self) -> None:
        for layer, zones in enumerate(self._state.layers):
            self._point(layer, zones)

    def stats(self) -> StoreStats:
        """Bytes held now, summed over the arrays. Blocks that forks share count in each.

        `bits_per_element` are those of the tokens that were compressed, forgotten ones too.
        """
        self._recover()
        state, geometry = self._state, self.geometry
        blocks = sum(part.data.nbytes for zones in state.layers for part in zones.segments)
        directories = [zones.directory.nbytes for zones in state.layers if zones.directory]
        compressed = state.length - state.rows
        numbers = 2 * compressed * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
        return StoreStats(
            tokens=len(self),
            sealed_tokens=compressed,
            page_bytes=blocks,
            tail_bytes=sum(zones.keys.nbytes + zones.values.nbytes for zones in state.layers),
            sink_bytes=0,
            table_bytes=int(self._on_device.nbytes) + sum(directories),
            codec_bytes=0,
            bits_per_element=8 * (blocks + sum(directories)) / numbers if compressed else 16.0,
        )
