"""`KVStore`: the cache of one sequence. It owns all cache memory.

Per layer: sinks (the first tokens, exact, for ever), body (sealed pages of 64 tokens), tail (a
ring of exact tokens). When the tail holds `window + 64` tokens its oldest 64 are sealed into a
page, once. What is packed therefore depends only on the number of tokens, never on how the calls
were split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends.ops import PAGE_TOKENS, Ops
from ..backends.view import Extent, PageView, Token
from ..errors import CodecError
from .basis import Basis
from .checks import (
    check_added,
    check_complete,
    check_finite,
    check_fits,
    check_layer,
    check_limit,
    check_rows,
)
from .layers import Layers
from .layout import Geometry
from .rotary import Rotary
from .saving import Savable
from .spec import KVSpec
from .state import Parts, State
from .stats import (
    StoreStats,
    base_entries,
    bits_per_element,
    sealed_pages,
    table_entries,
    tail_rows,
)

if TYPE_CHECKING:
    from ..calibration import Fitted


GROWTH = 16
"""Pages whose memory is asked for at once."""


class KVStore(Savable):
    """Keys and values of one sequence, in the format of a `KVSpec`.

    A decode step is `append` and attention on `view` layer by layer, then `advance()`. Many
    tokens at once are `extend`: layer by layer, all tokens of a layer, inside one context. Keys go
    in as the model computes them, after RoPE at their positions, and `read` gives them back so.
    """

    def __init__(
        self,
        geometry: Geometry,
        spec: KVSpec,
        ops: Ops,
        max_tokens: int,
        *,
        rotary: Rotary | None = None,
        key_bias: Sequence[Any] | None = None,
        calibration: Fitted | None = None,
        debug: bool = False,
    ):
        """Allocate sinks, tail and tables; pages come as they are needed.

        `rotary` is needed where keys are not kept as they come (pre, page, a bias); `key_bias` has
        an array (num_kv_heads, head_dim) f32 for each layer; `calibration` has fitted tables.
        `debug` refuses keys and values that are not finite. Raises UnsupportedError where the
        format does not fit the geometry, CodecError where something that it needs is missing.
        """
        check_limit(max_tokens)
        spec.check(geometry)
        if spec.compression is not None:
            raise CodecError(f"cache format {spec} keeps no pages: use a ZoneStore")
        self.geometry = geometry
        self.spec = spec
        self.ops = ops
        self.max_tokens = max_tokens
        self.rotary = rotary
        self.key_bias = key_bias
        self.debug = debug
        self.empty_twin = partial(
            KVStore, geometry, spec, ops, max_tokens,
            rotary=rotary, key_bias=key_bias, calibration=calibration, debug=debug,
        )  # fmt: skip
        self._basis = Basis(geometry, spec, ops, rotary, key_bias)
        self._layers = Layers(geometry, spec, ops, self._basis, calibration)
        self._rows = tail_rows(spec)
        self._extending: int | None = None  # tokens that are being added
        self._inside = False  # a `with extending` block
        self._layers_done: set[int] = set()  # that have the tokens under way
        self._state = State(0, (), *self._make_tables(()))
        self._extent = Extent()
        self._set_extent(0)
        self._views = self._layers.views(self._extent)

    def __len__(self) -> int:
        """Tokens cached."""
        return self._state.length

    def view(self, layer: int) -> PageView:
        """One layer for the kernels. It follows the store: valid for the store's whole life."""
        check_layer(self.geometry, layer)
        return self._views[layer]

    def check_room(self, tokens: int) -> None:
        """Raise ContextFullError unless so many more tokens fit."""
        self._recover()
        check_fits(len(self), tokens, self.max_tokens)

    # One token, step by step

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Put the next token's k, v (1, num_kv_heads, head_dim) f32 into a layer's tail.

        The token counts as cached only after `advance`; until then it may be written again.
        """
        self._check(layer, k, v, 1)
        self.check_room(1)
        self._write(layer, len(self), *self._enter(layer, k, v, len(self)))
        self._layers_done.add(layer)
        self._set_extent(len(self) + 1, sealed_pages(self.spec, len(self)))

    def advance(self) -> None:
        """Count the appended token, and seal a page of every layer when one is due.

        Raises CodecError unless every layer has it.
        """
        self.check_room(1)
        check_complete(self.geometry, self._layers_done, "append")
        length = len(self) + 1
        old, new = sealed_pages(self.spec, len(self)), sealed_pages(self.spec, length)
        if new > old:
            self._reserve(new)
            self._seal(self._views, old, new, None, length)
        # Last, so that an interrupted step can be done again.
        self._state = replace(self._state, length=length)
        self._layers_done.clear()
        self._set_extent(length)

    @contextmanager
    def stepping(self, token_id: int, angles: np.ndarray) -> Iterator[None]:
        """Add the next token: inside, `Ops.enter` puts it into each layer's view.

        angles: cos and sin (2, head_dim / 2) f32 of its position. On any exception the store is as
        it was before. Raises ContextFullError, before any work, where the token does not fit.
        """
        self.check_room(1)
        length = len(self)
        is_sink = length < self.spec.sink
        slot = length if is_sink else int(self._slot(length))
        self._set_extent(length + 1, sealed_pages(self.spec, length))
        self._extent.token = Token(token_id, slot, is_sink, self._basis.angles(length, angles))
        self.ops.publish(self._extent)
        yield
        self._layers_done.update(range(self.geometry.num_layers))
        self.advance()

    def check_finite(self, layer: int, k: Any, v: Any) -> None:
        """Raise CodecError for keys or values that are not finite."""
        check_finite(layer, *(self.ops.to_host(rows) for rows in (k, v)))

    # Many tokens, layer by layer

    @contextmanager
    def extending(self, tokens: int) -> Iterator[None]:
        """Add `tokens` tokens: inside, call `extend` once for each layer.

        On any exception, a keyboard interrupt too, the store is as it was before; also where a
        layer was left out, which raises CodecError. Raises ContextFullError before any work where
        they do not fit.
        """
        check_added(tokens)
        self.check_room(tokens)
        old = len(self)
        try:
            # An empty store has nothing to lose.
            journal = [part.copy() for part in self._layers.tail_arrays] if old else []
            self._state = replace(self._state, journal=journal)
            self._extending, self._inside = tokens, True
            self._layers_done.clear()
            self._reserve(sealed_pages(self.spec, old + tokens))
            yield
            check_complete(self.geometry, self._layers_done, "extend")
            self._set_extent(old + tokens)
            self._state = replace(self._state, length=old + tokens, journal=None)
            self._extending, self._inside = None, False
            self._layers_done.clear()
        except BaseException:
            self._inside = False
            self._recover()
            raise

    def _recover(self) -> None:
        """Undo a change that was interrupted. Interrupted itself, it is done again later."""
        if self._inside:
            raise CodecError("inside `with store.extending(n):` only extend() and reading work")
        saved = self._state.journal
        if saved is not None:
            for copy, part in zip(saved, self._layers.tail_arrays):
                part[...] = copy
            self._extending = None
            self._layers_done.clear()
            self._release(sealed_pages(self.spec, len(self)))
            self._state = replace(self._state, journal=None)

    def extend(self, layer: int, k: Any, v: Any) -> None:
        """Put a layer's new tokens k, v (n, num_kv_heads, head_dim) f32 into the store.

        n is what `extending` was told. Raises CodecError for other shapes, or outside of it.
        """
        if self._extending is None:
            raise CodecError("extend() adds tokens inside `with store.extending(n):` only")
        self._check(layer, k, v, self._extending)
        if layer in self._layers_done:
            raise CodecError(f"layer {layer} has these tokens already, extend() it once")
        self._layers_done.add(layer)
        start, end = len(self), len(self) + len(k)
        k, v = self._enter(layer, k, v, start)
        old, new = sealed_pages(self.spec, start), sealed_pages(self.spec, end)
        if new > old:
            # Before the tail is overwritten: the first of these pages may begin in it.
            self._seal(self._views[layer : layer + 1], old, new, (k, v), start)
        sinks = min(max(self.spec.sink - start, 0), len(k))
        if sinks:
            self._write(layer, start, k[:sinks], v[:sinks])
        first = max(start + sinks, self.spec.sink + new * PAGE_TOKENS)
        if first < end:
            self._write(layer, first, k[first - start :], v[first - start :])

    def _check(self, layer: int, k: Any, v: Any, tokens: int) -> None:
        check_layer(self.geometry, layer)
        check_rows(self.geometry, k, v, tokens)
        if self.debug:
            self.check_finite(layer, k, v)

    def _enter(self, layer: int, k: Any, v: Any, position: int) -> tuple[Any, Any]:
        enter = self._basis.enter
        return enter(layer, False, k, position), enter(layer, True, v, position)

    def _seal(
        self,
        views: Sequence[PageView],
        old: int,
        new: int,
        fresh: tuple[Any, Any] | None,
        fresh_start: int,
    ) -> None:
        """Seal the pages old ... new - 1 of layers, from their tails and from fresh tokens."""
        # What the codecs measure on the first page they keep for good.
        measure = old == 0
        self.ops.seal(
            views, old, new - old, fresh, fresh_start,
            self.spec.sink, self._state.origin, measure,
        )  # fmt: skip

    def _slot(self, position: Any) -> Any:
        return (position - self.spec.sink + self._state.origin) % self._rows

    def _write(self, layer: int, position: int, k: Any, v: Any) -> None:
        """Store tokens, all of them sinks or all of them in the tail, from a position on."""
        if position < self.spec.sink:
            self.ops.append(self._views[layer], k, v, position, sink=True)
        else:
            self.ops.append(self._views[layer], k, v, self._slot(position))

    # Copying

    def fork(self) -> KVStore:
        """A store that holds the same tokens and goes its own way. Sealed pages are shared."""
        self._recover()
        other = self.empty_twin()
        other._layers.copy_from(self._layers)
        # Without pages that an interrupted step reserved: both would seal into them.
        other.adopt(len(self), self.parts().slabs, self._state.origin)
        return other

    def parts(self) -> Parts:
        """Where the tokens lie, for `serialize`; valid until the store changes."""
        self._recover()
        length, pages = len(self), sealed_pages(self.spec, len(self))
        sinks = min(length, self.spec.sink)
        tail = np.arange(sinks + pages * PAGE_TOKENS, length)  # (n,) positions
        return Parts(self._state.slabs[:pages], sinks, self._slot(tail), self._layers)

    def adopt(self, tokens: int, slabs: Sequence[Any], origin: int = 0) -> None:
        """Hold so many tokens, the sealed ones in these slabs; for an empty store.

        The others are where `parts` says then. `origin` is a slot as in `State`.
        """
        table, bases = self._make_tables(slabs)
        self._state = State(tokens, tuple(slabs), table, bases, origin)
        self._set_extent(tokens)

    # Memory

    def _make_tables(self, slabs: Sequence[Any]) -> tuple[Any, Any | None]:
        """The table of the slabs' addresses and that of the angles where blocks begin."""
        addresses = np.zeros(table_entries(len(slabs)), np.int64)  # (entries,)
        addresses[: len(slabs)] = [self.ops.address(slab) for slab in slabs]
        bases = self._basis.bases(base_entries(self.spec, len(slabs)))
        return self.ops.to_device(addresses), bases

    def _hold(self, slabs: Sequence[Any]) -> None:
        """Have exactly these pages."""
        table, bases = self._make_tables(slabs)
        self._state = replace(self._state, slabs=tuple(slabs), table=table, bases=bases)

    def _reserve(self, pages: int) -> None:
        """Have memory for so many pages of every layer."""
        state, held = self._state, len(self._state.slabs)
        if held < pages:
            # A few more than needed, so that a long answer does not ask the driver page by page.
            shape = (self._layers.slab_bytes,)
            if held % GROWTH == 0 or pages - held > GROWTH:
                self.ops.expect(-(-(pages - held) // GROWTH) * GROWTH, *shape)
            slabs = [self.ops.empty(shape, np.uint8) for _ in range(held, pages)]
            for slab in slabs:
                slab.fill(0)  # padding too: equal stores are equal byte for byte
            if table_entries(pages) > len(state.table):
                self._hold([*state.slabs, *slabs])
            else:  # nobody reads behind the pages that are sealed
                addresses = np.array([self.ops.address(slab) for slab in slabs], np.int64)
                state.table[held:pages] = self.ops.to_device(addresses)
                self._state = replace(state, slabs=(*state.slabs, *slabs))
        self._extent.table_address = self.ops.address(self._state.table)

    def _release(self, pages: int) -> None:
        """Free all but the first `pages` pages; say where the tokens are now."""
        if len(self._state.slabs) > pages:
            self._hold(self._state.slabs[:pages])
        self._set_extent(len(self))

    def _set_extent(self, tokens: int, pages: int | None = None) -> None:
        """Tell the kernels where so many tokens are, `pages` of them sealed."""
        pages = sealed_pages(self.spec, tokens) if pages is None else pages
        self._state.describe(self._extent, self.ops, self.spec.sink, self._rows, tokens, pages)

    def stats(self) -> StoreStats:
        """Bytes held now, summed over the arrays. Pages that forks share count in each."""
        state, layers = self._state, self._layers
        angles = [part for part in (state.bases, self._basis.turns) if part is not None]
        sizes = {
            "page_bytes": state.slabs,
            "tail_bytes": layers.tail_arrays,
            "sink_bytes": layers.sink_arrays,
            "table_bytes": [state.table, layers.settings, *angles],
            "codec_bytes": layers.codec_arrays,
        }
        return StoreStats(
            tokens=len(self),
            sealed_tokens=sealed_pages(self.spec, len(self)) * PAGE_TOKENS,
            bits_per_element=bits_per_element(self.geometry, self.spec),
            **{name: sum(part.nbytes for part in parts) for name, parts in sizes.items()},
        )
