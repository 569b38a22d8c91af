"""What a cache holds before a test begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..backends.ops import Ops
    from ..generate import Model
    from ..kvstore import Geometry, KVSpec
    from ..stores import Store

CHUNK = 4096
"""Synthetic tokens that are made at a time; layers and later chunks get the same ones."""

Told = Callable[[int], None]
"""Told how many tokens were just done."""


def random_ids(model: Model, count: int, seed: int) -> np.ndarray:
    """Token ids (count,) i64."""
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, count)


def prefill(model: Model, store: Store, ids: np.ndarray, batch: int | None) -> None:
    """Compute tokens (n,) into the store, `batch` of them a call; None is all of them."""
    step = batch or max(len(ids), 1)
    for start in range(0, len(ids), step):
        model.decoder.prefill(ids[start : start + step], store)


class RandomTokens:
    """Random keys and values, normally distributed, for stores of one geometry.

    The host makes those of one chunk, once; the device keeps them, and the real encoder seals them.
    """

    def __init__(self, ops: Ops, geometry: Geometry, seed: int) -> None:
        self._ops = ops
        self._geometry = geometry
        self._seed = seed
        self._made = 0
        self._sides: list[Any] = []  # K and V, each (made, kv_heads, head_dim) f32

    def grow(self, store: Store, tokens: int, told: Told = lambda count: None) -> None:
        """Add tokens until the store holds so many."""
        for count in _pieces(tokens - len(store)):
            self._make(count)
            k, v = (side[:count] for side in self._sides)
            with store.extending(count):
                for layer in range(self._geometry.num_layers):
                    store.extend(layer, k, v)
            told(count)

    def _make(self, count: int) -> None:
        """Have so many tokens; the first are the same however many there are."""
        if count > self._made:
            shape = (count, self._geometry.num_kv_heads, self._geometry.head_dim)
            self._sides = [
                self._ops.to_device(
                    np.random.default_rng([self._seed, side]).standard_normal(shape, np.float32)
                )
                for side in range(2)
            ]
            self._made = count


class Synthetic(RandomTokens):
    """`RandomTokens` for the stores of a model."""

    def __init__(self, model: Model, seed: int) -> None:
        from ..generate import cache_geometry

        super().__init__(model.ops, cache_geometry(model.config), seed)
        self._model = model

    def filled(self, spec: KVSpec, tokens: int) -> Store:
        """A new store of so many tokens."""
        store = self._model.new_store(spec)
        self.grow(store, tokens)
        return store


def _pieces(tokens: int) -> Iterator[int]:
    while tokens > 0:
        yield min(tokens, CHUNK)
        tokens -= CHUNK
