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

    A decode step is `append` and attention on `view` layer by layer, then `advance(1)`. Many
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
        self._length = 0
        self._extending = 0  # tokens that `extending` is adding
        self._slabs: list[Any] = []  # each (num_layers * page_bytes,) u8
        self._table = ops.empty((table_entries(0),), np.int64)  # (entries,) i64 addresses
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
        self._extent = Extent(table_address=ops.address(self._table))
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
        return self._length

    def view(self, layer: int) -> PageView:
        """One layer for the kernels. It follows the store: valid for the store's whole life."""
        return self._views[layer]

    def check_room(self, tokens: int) -> None:
        """Raise ContextFullError unless so many more tokens fit."""
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
        self.check_room(1)
        self._check_shapes(k, v, 1)
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
        self._length = length
        self._set_extent(length, new)

    # Many tokens, layer by layer

    @contextmanager
    def extending(self, tokens: int) -> Iterator[None]:
        """Add `tokens` tokens: inside, call `extend` once for each layer.

        On any exception, a keyboard interrupt too, the store is as it was before.
        Raises ContextFullError before any work where they do not fit.
        """
        self.check_room(tokens)
        old, self._extending = self._length, tokens
        # An empty store has nothing to lose.
        saved = [part.copy() for part in self._tail] if old else []
        try:
            self._reserve(sealed_pages(self.spec, old + tokens))
            yield
        except BaseException:
            for copy, part in zip(saved, self._tail):
                part[...] = copy
            self._release(sealed_pages(self.spec, old))
            raise
        finally:
            self._extending = 0
        self._length = old + tokens
        self._set_extent(self._length, sealed_pages(self.spec, self._length))

    def extend(self, layer: int, k: Any, v: Any) -> None:
        """Put a layer's new tokens k, v (n, num_kv_heads, head_dim) f32 into the store.

        n is what `extending` was told. Raises CodecError for other shapes.
        """
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
        self._check_shapes(keys, values, self._length)
        self._read(layer, 0, self._length, keys, values)

    def _read(self, layer: int, start: int, end: int, keys: Any, values: Any) -> None:
        """Decode positions start .. end - 1; start is 0 or on a page's first token."""
        view, sink = self._views[layer], self.spec.sink
        sealed = sink + self._extent.pages * PAGE_TOKENS
        parts = (
            (start, min(sink, end), view.sink_keys_address, view.sink_values_address, sink, start),
            (
                max(start, sealed), end, view.tail_keys_address, view.tail_values_address,
                self._rows, (max(start, sealed) - sink) % self._rows,
            ),
        )  # fmt: skip
        for low, high, key_address, value_address, rows, slot in parts:
            if low < high:
                part = slice(low - start, high - start)
                self.ops.recall(key_address, view.key_kind, rows, slot, keys[part])
                self.ops.recall(value_address, view.value_kind, rows, slot, values[part])
        low, high = max(start, sink), min(end, sealed)
        if low < high:
            part = slice(low - start, high - start)
            first = (low - sink) // PAGE_TOKENS
            count = (high - low) // PAGE_TOKENS
            self.ops.gather(view, first, count, keys[part], values[part])

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens.

        A cut inside a sealed page decodes that page back into the tail: its tokens keep the
        rounding of the format. Raises CodecError where the store does not hold so many.
        """
        if not 0 <= tokens <= self._length:
            raise CodecError(f"cannot truncate to {tokens} tokens, the store holds {self._length}")
        pages = sealed_pages(self.spec, tokens)
        if pages < self._extent.pages:
            self._unseal(pages, min(tokens, self.spec.sink + self._extent.pages * PAGE_TOKENS))
        self._length = tokens
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

    def _reserve(self, pages: int) -> None:
        """Have memory for so many pages of every layer."""
        if len(self._slabs) >= pages:
            return
        size = self.geometry.num_layers * self.layout.page_bytes
        while len(self._slabs) < pages:
            self._slabs.append(self.ops.empty((size,), np.uint8))
        self._write_table()

    def _release(self, pages: int) -> None:
        """Free all but the first `pages` pages; say where the tokens are now."""
        del self._slabs[pages:]
        self._write_table()
        self._set_extent(self._length, pages)

    def _write_table(self) -> None:
        addresses = np.zeros(table_entries(len(self._slabs)), np.int64)  # (entries,)
        addresses[: len(self._slabs)] = [self.ops.address(slab) for slab in self._slabs]
        self._table = self.ops.to_device(addresses)
        self._extent.table_address = self.ops.address(self._table)

    def _set_extent(self, tokens: int, pages: int) -> None:
        self._extent.sinks = min(tokens, self.spec.sink)
        self._extent.pages = pages
        self._extent.tail_tokens = tokens - self._extent.sinks - pages * PAGE_TOKENS

    def stats(self) -> StoreStats:
        """Bytes held now, summed over the arrays."""
        return StoreStats(
            tokens=self._length,
            sealed_tokens=self._extent.pages * PAGE_TOKENS,
            page_bytes=sum(slab.nbytes for slab in self._slabs),
            tail_bytes=sum(part.nbytes for part in self._tail),
            sink_bytes=sum(part.nbytes for part in self._sinks),
            table_bytes=self._table.nbytes,
            bits_per_element=bits_per_element(self.geometry, self.spec),
        )
