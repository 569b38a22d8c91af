"""`KVStore`: the cache of one sequence. It owns all cache memory.

Per layer: sinks (the first tokens, exact, for ever), body (sealed pages of 64 tokens), tail (a
ring of exact tokens). When the tail holds `window + 64` tokens its oldest 64 are sealed into a
page, once. What is packed therefore depends only on the number of tokens, never on how the calls
were split.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..backends.ops import PAGE_TOKENS, Ops
from ..backends.view import Extent, PageView
from ..errors import CodecError, ContextFullError
from .layout import Geometry, PageLayout
from .spec import KVSpec
from .stats import StoreStats, bits_per_element, sealed_pages, table_entries, tail_rows


class KVStore:
    """Keys and values of one sequence, in the format of a `KVSpec`.

    A decode step is `append` and attention on `view` layer by layer, then `advance()`. Many
    tokens at once are `extend`: layer by layer, all tokens of a layer, inside one context.
    """

    def __init__(self, geometry: Geometry, spec: KVSpec, ops: Ops, max_tokens: int):
        """Allocate sinks, tail and page table; pages come as they are needed.

        Raises CodecError where the format does not fit the geometry.
        """
        if max_tokens < 1:
            raise CodecError(f"a store must hold at least one token, got max_tokens={max_tokens}")
        self.geometry = geometry
        self.spec = spec
        self.ops = ops
        self.max_tokens = max_tokens
        self.layout = PageLayout.of(geometry, spec)
        # The length, and while the ring is written over what it held: one object, so that an
        # interrupt finds the store either before a change or after it. See `_recover`.
        self._state: tuple[int, list[Any] | None] = (0, None)
        self._extending: int | None = None  # tokens that are being added
        self._pages = self._make_pages([])
        layers, heads, dim = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
        self._sinks = [
            ops.empty((layers, heads, spec.sink, dim), codec.exact_dtype)
            for codec in (spec.k, spec.v)
        ]
        self._rows = tail_rows(spec)
        self._tail = [
            ops.empty((layers, heads, self._rows, dim), codec.exact_dtype)
            for codec in (spec.k, spec.v)
        ]
        self._extent = Extent()
        self._set_extent(0)
        self._settings = ops.to_device(self.layout.settings)
        self._views = [self._make_view(layer) for layer in range(layers)]

    def _make_view(self, layer: int) -> PageView:
        def at(parts: list[Any], side: int) -> int:
            return self.ops.address(parts[side][layer])

        settings = self.layout.settings
        return PageView(
            extent=self._extent,
            kernels=self.spec.k.kernels,
            num_kv_heads=self.layout.num_kv_heads,
            head_dim=self.layout.head_dim,
            key_kind=int(settings[4]),
            value_kind=int(settings[8]),
            sink_rows=self.spec.sink,
            tail_rows=self._rows,
            layer_offset=layer * self.layout.page_bytes,
            run_bytes=self.layout.run_bytes,
            settings_address=self.ops.address(self._settings),
            sink_keys_address=at(self._sinks, 0),
            sink_values_address=at(self._sinks, 1),
            tail_keys_address=at(self._tail, 0),
            tail_values_address=at(self._tail, 1),
        )

    def __len__(self) -> int:
        """Tokens cached."""
        return self._state[0]

    @property
    def _length(self) -> int:
        return self._state[0]

    def view(self, layer: int) -> PageView:
        """One layer for the kernels. It follows the store: valid for the store's whole life."""
        return self._views[layer]

    def check_room(self, tokens: int) -> None:
        """Raise ContextFullError unless so many more tokens fit."""
        self._recover()
        if self._length + tokens > self.max_tokens:
            raise ContextFullError(
                f"context full: {self._length} tokens cached and {tokens} more asked for, "
                f"the limit is {self.max_tokens}"
            )

    # One token, step by step

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Put the next token's k, v (1, num_kv_heads, head_dim) f32 into a layer's tail.

        The token counts as cached only after `advance`; until then it may be written again.
        """
        self._check_shapes(k, v, 1)
        self.check_room(1)
        self._write(layer, self._length, k, v)
        self._set_extent(self._length + 1, sealed_pages(self.spec, self._length))

    def advance(self) -> None:
        """Count the appended token, and seal a page of every layer when one is due."""
        length = self._length + 1
        old, new = sealed_pages(self.spec, self._length), sealed_pages(self.spec, length)
        if new > old:
            self._reserve(new)
            for view in self._views:
                self.ops.seal(view, old, new - old, None, length)
        # Last, so that an interrupted step can be done again.
        self._state = (length, None)
        self._set_extent(length)

    # Many tokens, layer by layer

    @contextmanager
    def extending(self, tokens: int) -> Iterator[None]:
        """Add `tokens` tokens: inside, call `extend` once for each layer.

        On any exception, a keyboard interrupt too, the store is as it was before. Raises
        ContextFullError before any work where they do not fit.
        """
        self.check_room(tokens)
        old = self._length
        try:
            # An empty store has nothing to lose.
            self._state = (old, [part.copy() for part in self._tail] if old else [])
            self._extending = tokens
            self._reserve(sealed_pages(self.spec, old + tokens))
            yield
            self._set_extent(old + tokens)
            self._state = (old + tokens, None)
            self._extending = None
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """Undo a change that was interrupted. Interrupted itself, it is done again later."""
        length, saved = self._state
        if saved is not None:
            for copy, part in zip(saved, self._tail):
                part[...] = copy
            self._extending = None
            self._release(sealed_pages(self.spec, length))
            self._state = (length, None)

    def extend(self, layer: int, k: Any, v: Any) -> None:
        """Put a layer's new tokens k, v (n, num_kv_heads, head_dim) f32 into the store.

        n is what `extending` was told. Raises CodecError for other shapes, or outside of it.
        """
        if self._extending is None:
            raise CodecError("extend() adds tokens inside `with store.extending(n):` only")
        self._check_shapes(k, v, self._extending)
        start, end = self._length, self._length + len(k)
        old, new = sealed_pages(self.spec, start), sealed_pages(self.spec, end)
        if new > old:
            # Before the tail is overwritten: the first of these pages may begin in it.
            self.ops.seal(self._views[layer], old, new - old, (k, v), start)
        sinks = min(max(self.spec.sink - start, 0), len(k))
        if sinks:
            self._write(layer, start, k[:sinks], v[:sinks])
        first = max(start + sinks, self.spec.sink + new * PAGE_TOKENS)
        if first < end:
            self._write(layer, first, k[first - start :], v[first - start :])

    def _check_shapes(self, k: Any, v: Any, tokens: int) -> None:
        shape = (tokens, self.geometry.num_kv_heads, self.geometry.head_dim)
        if k.shape != shape or v.shape != shape:
            raise CodecError(f"got k {k.shape} and v {v.shape} for a store that expects {shape}")

    def _write(self, layer: int, position: int, k: Any, v: Any) -> None:
        """Store tokens, all of them sinks or all of them in the tail, from a position on."""
        view, sink = self._views[layer], self.spec.sink
        if position < sink:
            self.ops.append(view, k, v, position, sink=True)
        else:
            self.ops.append(view, k, v, (position - sink) % self._rows)

    # Reading back, and forgetting

    def read(self, layer: int, keys: Any, values: Any) -> None:
        """Decode a layer's tokens into keys, values (len(store), num_kv_heads, head_dim) f32."""
        if self._extending is None:
            self._recover()
        end = self._length
        self._check_shapes(keys, values, end)
        self._set_extent(end)
        view, sink, pages = self._views[layer], self.spec.sink, self._extent.pages
        sinks, sealed = min(sink, end), sink + pages * PAGE_TOKENS
        if sinks:
            self.ops.recall(view.sink_keys_address, view.key_kind, sink, 0, keys[:sinks])
            self.ops.recall(view.sink_values_address, view.value_kind, sink, 0, values[:sinks])
        if pages:
            self.ops.gather(view, 0, pages, keys[sink:sealed], values[sink:sealed])
        if end > sealed:
            slot = (sealed - sink) % self._rows
            address, rows = view.tail_keys_address, self._rows
            self.ops.recall(address, view.key_kind, rows, slot, keys[sealed:])
            address = view.tail_values_address
            self.ops.recall(address, view.value_kind, rows, slot, values[sealed:])

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens.

        A cut inside a sealed page decodes that page back into the tail: its tokens keep the
        rounding of the format. Raises CodecError where the store does not hold so many.
        """
        self._recover()
        if not 0 <= tokens <= self._length:
            raise CodecError(f"cannot truncate to {tokens} tokens, the store holds {self._length}")
        pages, old_pages = (sealed_pages(self.spec, n) for n in (tokens, self._length))
        if pages < old_pages:
            self._set_extent(self._length)
            sealed = self.spec.sink + old_pages * PAGE_TOKENS
            self._state = (self._length, [part.copy() for part in self._tail])
            self._unseal(pages, min(tokens, sealed))
        self._state = (tokens, None)
        self._release(pages)

    def _unseal(self, pages: int, end: int) -> None:
        """Copy the tokens behind the first `pages` pages, up to position end, into the tail."""
        start = self.spec.sink + pages * PAGE_TOKENS
        count = end - start
        if count <= 0:
            return
        whole = -(-count // PAGE_TOKENS)
        shape = (whole * PAGE_TOKENS, self.geometry.num_kv_heads, self.geometry.head_dim)
        keys, values = self.ops.empty(shape), self.ops.empty(shape)  # (n, kv_heads, head_dim) f32
        for layer, view in enumerate(self._views):
            self.ops.gather(view, pages, whole, keys, values)
            self._write(layer, start, keys[:count], values[:count])

    def clear(self) -> None:
        """Forget everything."""
        self.truncate(0)

    # Memory

    def _make_pages(self, slabs: list[Any]) -> tuple[list[Any], Any]:
        """Memory of whole pages, each (num_layers * page_bytes,) u8, and their table of addresses.

        The two belong together: they are replaced in one assignment, never changed.
        """
        addresses = np.zeros(table_entries(len(slabs)), np.int64)  # (entries,)
        addresses[: len(slabs)] = [self.ops.address(slab) for slab in slabs]
        return slabs, self.ops.to_device(addresses)

    def _reserve(self, pages: int) -> None:
        """Have memory for so many pages of every layer."""
        slabs = list(self._pages[0])
        if len(slabs) < pages:
            size = self.geometry.num_layers * self.layout.page_bytes
            while len(slabs) < pages:
                slabs.append(self.ops.empty((size,), np.uint8))
            self._pages = self._make_pages(slabs)
        self._extent.table_address = self.ops.address(self._pages[1])

    def _release(self, pages: int) -> None:
        """Free all but the first `pages` pages; say where the tokens are now."""
        if len(self._pages[0]) > pages:
            self._pages = self._make_pages(self._pages[0][:pages])
        self._set_extent(self._length)

    def _set_extent(self, tokens: int, pages: int | None = None) -> None:
        """Tell the kernels where so many tokens are, `pages` of them sealed."""
        pages = sealed_pages(self.spec, tokens) if pages is None else pages
        self._extent.table_address = self.ops.address(self._pages[1])
        self._extent.sinks = min(tokens, self.spec.sink)
        self._extent.pages = pages
        self._extent.tail_tokens = tokens - self._extent.sinks - pages * PAGE_TOKENS

    def stats(self) -> StoreStats:
        """Bytes held now, summed over the arrays."""
        return StoreStats(
            tokens=self._length,
            sealed_tokens=sealed_pages(self.spec, self._length) * PAGE_TOKENS,
            page_bytes=sum(slab.nbytes for slab in self._pages[0]),
            tail_bytes=sum(part.nbytes for part in self._tail),
            sink_bytes=sum(part.nbytes for part in self._sinks),
            table_bytes=self._pages[1].nbytes + self._settings.nbytes,
            bits_per_element=bits_per_element(self.geometry, self.spec),
        )
