"""How a store of zones gives back what it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..backends.ops import Ops
from ..errors import CodecError
from ..kvstore.checks import check_layer, check_rows
from ..kvstore.compression import EXACT_BYTES
from ..kvstore.layout import Geometry
from .memory import Memory
from .segment import Widths
from .state import EXACT, State, Zones


class Readable(ABC):
    """The reading half of a `ZoneStore`."""

    geometry: Geometry
    ops: Ops
    _state: State
    _memory: Memory
    _extending: int | None
    _pending: dict[int, tuple[Zones, int, bool]]

    @abstractmethod
    def _recover(self) -> None: ...

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
        if layer in self._pending:
            raise CodecError(
                f"layer {layer} has the new tokens already: read it before, or once they count"
            )
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
                self.ops.recall(self._memory.views[layer], bool(is_value), 0, out[held - exact :])
        self._rotate(values, self._state.rotated, inwards=False)
        return firsts

    def read_exact(self, layer: int, keys: Any, values: Any, position: int) -> None:
        """Round keys, values (n, num_kv_heads, head_dim) f32 in place to what zone C holds."""
        check_rows(self.geometry, keys, values, len(keys))
        values[...] = self._kept(values)
        for rows in (keys, values):
            self.ops.round_rows(rows, EXACT)
        self._rotate(values, self._state.rotated, inwards=False)

    def _kept(self, values: Any) -> Any:
        """values (n, num_kv_heads, head_dim) f32 as they are kept: itself, or a new array."""
        if not self._state.rotated:
            return values
        values = values.copy()
        self._rotate(values, True)
        return values

    def _rotate(self, values: Any, wanted: bool, inwards: bool = True) -> None:
        """Put values (n, num_kv_heads, head_dim) f32 through the transform, in place, if wanted."""
        if wanted:
            self.ops.change_basis(values, inwards, hadamard=self._memory.block)

    def widths(self, layer: int) -> Widths:
        """How many tokens and channels a layer keeps at each width, of those compressed."""
        check_layer(self.geometry, layer)
        return Widths.of(self._state.layers[layer].segments, self.geometry.head_dim)

    def read_bytes(self, lengths: Iterable[int], windows: Sequence[int | None]) -> list[int]:
        """Bytes that one token's attention reads where so many tokens are cached, over all layers.

        Blocks and their directories as they are now, and exact tokens. No layer has a window.
        """
        state, geometry = self._state, self.geometry
        row = EXACT_BYTES * geometry.head_dim * geometry.num_kv_heads * geometry.num_layers
        blocks = self._block_bytes() + self._directory_bytes()
        return [blocks + row * (state.rows + length - state.length) for length in lengths]

    def _block_bytes(self) -> int:
        segments = [segment for zones in self._state.layers for segment in zones.segments]
        return sum(int(segment.data.nbytes) for segment in segments)

    def _directory_bytes(self) -> int:
        layers = self._state.layers
        return sum(zones.directory.nbytes for zones in layers if zones.directory is not None)
