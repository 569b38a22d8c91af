"""What a cache holds before a test begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..trizone.store import ZoneStore

if TYPE_CHECKING:
    from ..backends.ops import Ops
    from ..generate import Model
    from ..kvstore import Geometry, KVSpec
    from ..stores import Store

CHUNK = 4096
"""Synthetic tokens that are made at a time; layers and later chunks get the same ones."""

QUERIES = 256
"""Different synthetic queries; later ones are the same again."""

_SPREAD, _NOISE = 3.0, 0.3
"""Standard deviations of the direction that all queries of a head share, and of what is a query's
own."""

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

    A store that compresses prompts holds one prompt of all its tokens, which repeats the chunk. The
    queries of a head, `query_heads` of them (default: as many as of keys), share a direction of
    standard deviation 3, as real ones do, so that attention weights spread over several decades.
    """

    def __init__(
        self, ops: Ops, geometry: Geometry, seed: int, query_heads: int | None = None
    ) -> None:
        self._ops = ops
        self._geometry = geometry
        self._seed = seed
        self._query_heads = query_heads or geometry.num_kv_heads
        self._made = 0
        self._sides: list[Any] = []  # K and V, each (made, kv_heads, head_dim) f32

    def grow(self, store: Store, tokens: int, told: Told = lambda count: None) -> None:
        """Add tokens until the store holds so many.

        One that compresses prompts loses what it held, if that was something else.
        """
        if isinstance(store, ZoneStore):
            if len(store) != tokens:
                self._compress(store, tokens, told)
            return
        for count in _pieces(tokens - len(store)):
            self._make(count)
            k, v = (side[:count] for side in self._sides)
            with store.extending(count):
                for layer in range(self._geometry.num_layers):
                    store.extend(layer, k, v)
            told(count)

    def _compress(self, store: ZoneStore, tokens: int, told: Told) -> None:
        """Make the store hold one prompt of so many tokens, compressed at its end."""
        store.clear()
        if not tokens:
            return
        self._make(min(tokens, CHUNK))
        keys, values = (self._ops.empty((tokens, *side.shape[1:])) for side in self._sides)
        _repeat(self._sides[0], keys)
        made = self._make_queries()

        def queries(rows: slice) -> Any:
            return made[self._ops.xp.arange(rows.start, rows.stop) % QUERIES]

        layers = self._geometry.num_layers
        with store.extending(tokens):
            for layer in range(layers):
                _repeat(self._sides[1], values)  # the layer before may have overwritten them
                store.compress(layer, keys, values, queries)
                told(tokens * (layer + 1) // layers - tokens * layer // layers)

    def _make_queries(self) -> Any:
        """QUERIES queries (QUERIES, query_heads, head_dim) f32."""
        rng = np.random.default_rng([self._seed, 2])
        shape = (self._query_heads, self._geometry.head_dim)
        shared = _SPREAD * rng.standard_normal(shape, np.float32)
        own = _NOISE * rng.standard_normal((QUERIES, *shape), np.float32)
        return self._ops.to_device(shared + own)

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

        geometry = cache_geometry(model.config)
        super().__init__(model.ops, geometry, seed, model.config.num_heads)
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


def _repeat(chunk: Any, whole: Any) -> None:
    """Fill tokens (tokens, kv_heads, head_dim) with those of a chunk, over and over."""
    for start in range(0, len(whole), len(chunk)):
        part = whole[start : start + len(chunk)]
        part[...] = chunk[: len(part)]
