"""A store that loses something without rounding: sealed pages hold less than what went in.

A codec's codes jump where a number crosses a boundary, so two ways to compute the same thing may
differ by a whole step. Here they differ by float rounding alone, and a test can be strict.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry, KVSpec, KVStore
from kvrt.kvstore.stats import sealed_pages

Fade = Callable[[np.ndarray], None]


def halve(part: np.ndarray) -> None:
    part *= np.float32(0.5)


class FadedStore(KVStore):
    """An f32 store whose pages are changed as they are sealed.

    `fade` changes in place what a layer's page holds, (page_bytes / 4,) f32.
    """

    def __init__(
        self, geometry: Geometry, spec: KVSpec, ops: Ops, max_tokens: int, fade: Fade = halve
    ):
        super().__init__(geometry, spec, ops, max_tokens)
        self._fade = fade

    def advance(self) -> None:
        before = sealed_pages(self.spec, len(self))
        super().advance()
        for layer in range(self.geometry.num_layers):
            self._fade_pages(layer, before, sealed_pages(self.spec, len(self)))

    def extend(self, layer: int, k: Any, v: Any) -> None:
        super().extend(layer, k, v)
        before, after = (sealed_pages(self.spec, n) for n in (len(self), len(self) + len(k)))
        self._fade_pages(layer, before, after)

    def _fade_pages(self, layer: int, first: int, end: int) -> None:
        for slab in self._state.slabs[first:end]:
            numbers = slab.view(np.float32).reshape(self.geometry.num_layers, -1)
            with np.errstate(all="ignore"):  # padding is undefined
                self._fade(numbers[layer])
