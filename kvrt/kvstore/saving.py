"""How a store of pages is written to a file, and read again.

Tensors: `pages` (pages, bytes of all layers) U8 as they are sealed; for each layer i and side (k or
v) `layers.i.k.sinks`, `layers.i.k.tail` (num_kv_heads, tokens, head_dim) in order of position, and
`layers.i.k.scales`, what the codec measured on the first sealed page. What is empty is left out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends.ops import Ops
from ..tensor_file import Tensor, TensorFile
from .moving import Movable
from .state import Parts
from .stats import sealed_pages

if TYPE_CHECKING:
    from .store import KVStore

_U8 = np.dtype(np.uint8)

Region = tuple[str, Any, Any, tuple[int, ...]]
"""A name, and array[where] of a shape."""


class Savable(Movable):
    """The half of a `KVStore` that goes to a file and comes back."""

    empty_twin: Callable[[], KVStore]

    @abstractmethod
    def parts(self) -> Parts: ...

    def saved(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors of every byte that holds a token, and further texts, by name."""
        parts, ops = self.parts(), self.ops
        tensors = {}
        if parts.slabs:
            size = (len(parts.slabs), parts.layers.slab_bytes)
            tensors["pages"] = Tensor(_U8, size, lambda: map(ops.to_host, parts.slabs))
        for name, array, where, shape in _regions(parts):
            tensors[name] = Tensor(array.dtype, shape, Copy(ops, array, where))
        return tensors, {}

    def restored(self, file: TensorFile, tokens: int) -> KVStore:
        """A new store of this kind with what a file holds. Raises StorageError."""
        store = self.empty_twin()
        size = (sealed_pages(self.spec, tokens), store.parts().layers.slab_bytes)
        pages = file.rows("pages", _U8, size) if size[0] else ()
        store.adopt(tokens, [self.ops.to_device(page) for page in pages])
        for name, array, where, shape in _regions(store.parts()):
            array[where] = self.ops.to_device(file.read(name, array.dtype, shape))
        return store

    def fitted_tables(self) -> Sequence[Any]:
        """Arrays that were fitted to a model, which pages mean nothing without."""
        return [table for table in self.parts().layers.table_arrays if table.size]


@dataclass(frozen=True)
class Copy:
    """Gives a part of an array of a store's, copied to the host only when asked for."""

    ops: Ops
    array: Any
    where: Any

    def __call__(self) -> list[np.ndarray]:
        return [self.ops.to_host(self.array[self.where])]


def _regions(parts: Parts) -> Iterator[Region]:
    """What holds tokens outside of pages. Nothing is empty."""
    layers, every = parts.layers, slice(None)
    for kind, arrays, rows, count in (
        ("sinks", layers.sink_arrays, slice(parts.sinks), parts.sinks),
        ("tail", layers.tail_arrays, parts.tail_slots, len(parts.tail_slots)),
    ):
        for index, array in enumerate(arrays if count else ()):
            heads, _, dim = array.shape
            yield _name(index, kind), array, (every, rows), (heads, count, dim)
    # Without a page they are measured anew, on the next one.
    for index, array in enumerate(layers.state_arrays if parts.slabs else ()):
        if array.size:
            yield _name(index, "scales"), array, every, array.shape


def _name(index: int, kind: str) -> str:
    layer, side = divmod(index, 2)
    return f"layers.{layer}.{'kv'[side]}.{kind}"
