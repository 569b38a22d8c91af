"""How a store forgets tokens, and moves those behind them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

from ..backends.ops import PAGE_TOKENS
from ..errors import CodecError, UnsupportedError
from .checks import check_count, check_kept
from .layers import Layers
from .reading import Readable
from .state import State
from .stats import sealed_pages


class Movable(Readable):
    """The half of a `KVStore` that takes tokens away."""

    _layers: Layers
    _layers_done: set[int]
    _rows: int

    @abstractmethod
    def _release(self, pages: int) -> None: ...
    @abstractmethod
    def _write(self, layer: int, position: int, k: Any, v: Any) -> None: ...
    @abstractmethod
    def _make_tables(self, slabs: Any) -> tuple[Any, Any | None]: ...

    def cut(self, tokens: int) -> int:
        """The most tokens, up to `tokens`, that `truncate` can keep: as many."""
        return tokens

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens.

        A cut inside a sealed page decodes that page back into the tail: its tokens keep the
        rounding of the format. Raises CodecError where the store does not hold so many.
        """
        self._recover()
        check_kept(tokens, len(self))
        pages, old_pages = (sealed_pages(self.spec, n) for n in (tokens, len(self)))
        if pages < old_pages:
            self._set_extent(len(self))
            sealed = self.spec.sink + old_pages * PAGE_TOKENS
            journal = [part.copy() for part in self._layers.tail_arrays]
            self._state = replace(self._state, journal=journal)
            self._unseal(pages, min(tokens, sealed))
        self._state = replace(self._state, length=tokens, journal=None)
        self._layers_done.clear()
        self._release(pages)

    def _unseal(self, pages: int, end: int) -> None:
        """Copy the tokens behind the first `pages` pages, up to position end, into the tail."""
        start = self.spec.sink + pages * PAGE_TOKENS
        count = end - start
        if count <= 0:
            return
        whole = -(-count // PAGE_TOKENS)
        shape = (whole * PAGE_TOKENS, self.geometry.num_kv_heads, self.geometry.head_dim)
        sides = [self.ops.empty(shape), self.ops.empty(shape)]  # (n, kv_heads, head_dim) f32
        for layer, view in enumerate(self._views):
            for is_value, rows in enumerate(sides):
                self.ops.gather(view, bool(is_value), pages, whole, rows)
            self._write(layer, start, *(rows[:count] for rows in sides))

    def clear(self) -> None:
        """Forget everything."""
        self.truncate(0)

    def shift(self, tokens: int) -> None:
        """Drop the oldest `tokens` tokens behind the sinks; all later ones move up by as many.

        No code is touched: keys that are kept before RoPE, or rotated inside their page alone, move
        exactly. Raises UnsupportedError for a format that keeps keys after RoPE, CodecError unless
        `tokens` is a multiple of 64 that the sealed pages hold.
        """
        self._recover()
        check_count(tokens)
        if not self.spec.shifts:
            raise UnsupportedError(
                f"cache format {self.spec} keeps keys after RoPE, so they cannot move; "
                "k=...:page and k=...:pre can"
            )
        pages = sealed_pages(self.spec, len(self))
        if tokens % PAGE_TOKENS or not 0 <= tokens <= pages * PAGE_TOKENS:
            raise CodecError(
                f"cannot shift by {tokens} tokens, expected a multiple of {PAGE_TOKENS} "
                f"up to {pages * PAGE_TOKENS}, which are sealed"
            )
        state = self._state
        slabs = state.slabs[tokens // PAGE_TOKENS :]
        table, bases = self._make_tables(slabs)
        origin = (state.origin + tokens) % self._rows
        self._state = State(state.length - tokens, slabs, table, bases, origin)
        self._set_extent(len(self))
