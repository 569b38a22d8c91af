"""What a cache holds before a test begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..generate import Model
    from ..kvstore import KVSpec, KVStore

CHUNK = 4096
"""Synthetic tokens that are made at a time; layers and later chunks get the same ones."""

Told = Callable[[int], None]
"""Told how many tokens were just done."""


def random_ids(model: Model, count: int, seed: int) -> np.ndarray:
    """Token ids (count,) i64."""
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, count)


def prefill(model: Model, store: KVStore, ids: np.ndarray, batch: int | None) -> None:
    """Compute tokens (n,) into the store, `batch` of them a call; None is all of them."""
    step = batch or max(len(ids), 1)
    for start in range(0, len(ids), step):
        model.decoder.prefill(ids[start : start + step], store)


class Synthetic:
    """Stores of random keys and values, normally distributed; the real encoder seals them."""

    def __init__(self, model: Model, seed: int) -> None:
        config = model.config
        self._layers = range(config.num_layers)
        self._model = model
        shape = (CHUNK, config.num_kv_heads, config.head_dim)
        rng = np.random.default_rng(seed)
        self._sides = [  # K and V, each (CHUNK, kv_heads, head_dim) f32
            model.ops.to_device(rng.standard_normal(shape, dtype=np.float32)) for _ in range(2)
        ]

    def grow(self, store: KVStore, tokens: int, told: Told) -> None:
        """Add tokens until the store holds so many."""
        for count in _pieces(tokens - len(store)):
            k, v = (side[:count] for side in self._sides)
            with store.extending(count):
                for layer in self._layers:
                    store.extend(layer, k, v)
            told(count)

    def filled(self, spec: KVSpec, tokens: int) -> KVStore:
        """A new store of so many tokens."""
        store = self._model.new_store(spec)
        self.grow(store, tokens, lambda count: None)
        return store


def _pieces(tokens: int) -> Iterator[int]:
    while tokens > 0:
        yield min(tokens, CHUNK)
        tokens -= CHUNK
