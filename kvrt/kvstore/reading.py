"""How a store gives back what it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from ..backends.ops import PAGE_TOKENS, Ops
from ..backends.view import PageView
from ..errors import CodecError
from .basis import Basis
from .checks import check_layer, check_rows
from .layout import Geometry
from .spec import KVSpec
from .state import State
from .stats import read_bytes, sealed_pages


class Readable(ABC):
    """The reading half of a `KVStore`."""

    geometry: Geometry
    spec: KVSpec
    ops: Ops
    _basis: Basis
    _state: State
    _views: list[PageView]
    _extending: int | None

    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def _recover(self) -> None: ...
    @abstractmethod
    def _set_extent(self, tokens: int, pages: int | None = None) -> None: ...
    @abstractmethod
    def _slot(self, position: Any) -> Any: ...

    def read(self, layer: int, keys: Any, values: Any) -> None:
        """Decode a layer's tokens into keys, values (len(store), num_kv_heads, head_dim) f32."""
        if self._extending is None:
            self._recover()
        end = len(self)
        check_layer(self.geometry, layer)
        check_rows(self.geometry, keys, values, end)
        if not end:
            return
        self._set_extent(end)
        for is_value, rows in enumerate((keys, values)):
            self._gather(layer, bool(is_value), rows, end)
            self._basis.leave(layer, bool(is_value), rows, 0)

    def read_bytes(self, lengths: Iterable[int], windows: Sequence[int | None]) -> list[int]:
        """Bytes that one token's attention reads where so many tokens are cached: see `stats`."""
        return read_bytes(self.geometry, self.spec, lengths, windows)

    def _gather(self, layer: int, is_value: bool, rows: Any, end: int) -> None:
        """All tokens of one side, in the store's basis."""
        view, sink = self._views[layer], self.spec.sink
        pages = sealed_pages(self.spec, end)
        sinks, sealed = min(sink, end), sink + pages * PAGE_TOKENS
        if sinks:
            self.ops.recall(view, is_value, 0, rows[:sinks], sink=True)
        if pages:
            self.ops.gather(view, is_value, 0, pages, rows[sink:sealed])
        if end > sealed:
            self.ops.recall(view, is_value, self._slot(sealed), rows[sealed:])

    def read_page(self, layer: int, page: int, keys: Any, values: Any) -> None:
        """Decode one sealed page into keys, values (64, num_kv_heads, head_dim) f32.

        Inside `extending` also pages that were sealed there. Raises CodecError for any other.
        """
        if not 0 <= page < len(self._state.slabs):
            raise CodecError(f"there is no sealed page {page}, there are {len(self._state.slabs)}")
        check_rows(self.geometry, keys, values, PAGE_TOKENS)
        for is_value, rows in enumerate((keys, values)):
            self.ops.gather(self._views[layer], bool(is_value), page, 1, rows)
            self._basis.leave(layer, bool(is_value), rows, self.spec.sink + page * PAGE_TOKENS)

    def read_exact(self, layer: int, keys: Any, values: Any, position: int) -> None:
        """Round keys, values (n, num_kv_heads, head_dim) f32 of positions position, ... in place.

        They become what they are as long as sinks or tail hold them.
        """
        check_rows(self.geometry, keys, values, len(keys))
        for is_value, rows in enumerate((keys, values)):
            side = self.spec.sides(layer)[is_value]
            inside = self._basis.enter(layer, bool(is_value), rows, position)
            self.ops.round_rows(inside, side.codec.exact_dtype)
            self._basis.leave(layer, bool(is_value), inside, position)
            rows[...] = inside
