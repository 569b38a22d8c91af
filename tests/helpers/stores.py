"""Stores for tests: seeded keys and values, every way to fill a store, and what is in it."""

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry, KVSpec, KVStore

from .codecs import FittedTables, rotary_for

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=8)

PLAIN_SPECS = (
    "f32",
    "f16",
    "bf16",
    "k=f32,v=f16,window=1",
    "k=f16,v=f16,sink=4,window=100",
    "k=bf16,v=f32,sink=70",
    "k=f16,v=bf16,sink=64,window=64",
)
"""Formats that give back just what went in, rounded to their float; any head_dim fits."""


class Tokens(NamedTuple):
    """Keys and values of n tokens in all layers: (num_layers, n, num_kv_heads, head_dim) f32."""

    keys: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return self.keys.shape[1]

    def part(self, start: int, end: int) -> "Tokens":
        return Tokens(self.keys[:, start:end], self.values[:, start:end])


def random_tokens(count: int, geometry: Geometry = GEOMETRY, seed: int = 0) -> Tokens:
    rng = np.random.default_rng(seed)
    shape = (geometry.num_layers, count, geometry.num_kv_heads, geometry.head_dim)
    return Tokens(
        rng.standard_normal(shape, dtype=np.float32), rng.standard_normal(shape, dtype=np.float32)
    )


def new_store(
    ops: Ops,
    spec: str = "f16",
    geometry: Geometry = GEOMETRY,
    max_tokens: int = 16384,
    **extras: Any,
) -> KVStore:
    """A store with everything that any format may need; `extras` go to KVStore."""
    extras.setdefault("rotary", rotary_for(geometry))
    extras.setdefault("calibration", FittedTables(geometry))
    return KVStore(geometry, KVSpec.parse(spec), ops, max_tokens, **extras)


def append(store: KVStore, tokens: Tokens) -> None:
    """Add tokens one by one, as decode does."""
    for index in range(len(tokens)):
        one = tokens.part(index, index + 1)
        for layer in range(store.geometry.num_layers):
            store.append(
                layer, on_device(store, one.keys[layer]), on_device(store, one.values[layer])
            )
        store.advance()


def extend(store: KVStore, tokens: Tokens) -> None:
    """Add tokens at once, as prefill does."""
    with store.extending(len(tokens)):
        for layer in range(store.geometry.num_layers):
            store.extend(
                layer, on_device(store, tokens.keys[layer]), on_device(store, tokens.values[layer])
            )


def on_device(store: KVStore, array: np.ndarray) -> np.ndarray:
    return store.ops.to_device(np.ascontiguousarray(array))


def fill(store: KVStore, tokens: Tokens, split: Iterable[int]) -> None:
    """Add tokens in calls of the given sizes; a size of 0 means one token by `append`."""
    start = len(store)
    for size in split:
        part = tokens.part(start, start + max(size, 1))
        if size:
            extend(store, part)
        else:
            append(store, part)
        start += len(part)


def read(store: KVStore) -> Tokens:
    """Everything in a store, decoded: (num_layers, len(store), num_kv_heads, head_dim) f32."""
    geometry = store.geometry
    shape = (len(store), geometry.num_kv_heads, geometry.head_dim)
    layers = []
    for layer in range(geometry.num_layers):
        keys, values = store.ops.empty(shape), store.ops.empty(shape)
        keys.fill(np.nan)
        values.fill(np.nan)
        store.read(layer, keys, values)
        layers.append((store.ops.to_host(keys), store.ops.to_host(values)))
    return Tokens(np.stack([k for k, _ in layers]), np.stack([v for _, v in layers]))


def contents(store: KVStore) -> dict[str, str]:
    """What holds tokens: pages, sinks and tail in order of position, scales, as hashes; counts."""
    extent, host, layers = store.view(0).extent, store.ops.to_host, store._layers
    slots = [(extent.tail_slot + i) % store._rows for i in range(extent.tail_tokens)]
    parts = {
        "pages": map(host, store._state.slabs),
        "sinks": [host(array)[:, : extent.sinks] for array in layers.sink_arrays],
        "tail": [host(array)[:, slots] for array in layers.tail_arrays],
        "scales": map(host, layers.state_arrays if extent.pages else []),
    }
    out = {name: digest(part) for name, part in parts.items()}
    out["counts"] = repr((len(store), extent.sinks, extent.pages, extent.tail_tokens))
    return out


def digest(parts: Iterable[np.ndarray]) -> str:
    """The sha256 of arrays' bytes."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.tobytes())
    return whole.hexdigest()


def page_bytes(store: KVStore) -> list[bytes]:
    """The bytes of each sealed page, all layers."""
    return [store.ops.to_host(slab).tobytes() for slab in store._state.slabs]


def arrays(store: KVStore) -> list[np.ndarray]:
    """Every array that a store holds."""
    layers, state, turns = store._layers, store._state, store._basis.turns
    angles = [part for part in (state.bases, turns) if part is not None]
    own = [*layers.sink_arrays, *layers.tail_arrays, *layers.codec_arrays, layers.settings]
    return [*state.slabs, state.table, *angles, *own]


def stored(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What float32 numbers are once kept in a stored type, as f32."""
    return array.astype(dtype).astype(np.float32)


def exact_dtypes(spec: KVSpec, layer: int = 0) -> tuple[np.dtype, np.dtype]:
    """The types of keys and values in sinks and tail."""
    k, v = spec.sides(layer)
    return k.codec.exact_dtype, v.codec.exact_dtype


def assert_holds(store: KVStore, expected: Tokens) -> None:
    """A store of one of PLAIN_SPECS gives back these tokens, and no others."""
    k, v = exact_dtypes(store.spec)
    got = read(store)
    assert np.array_equal(got.keys, stored(expected.keys, k))
    assert np.array_equal(got.values, stored(expected.values, v))


def attend(
    store: KVStore, q: np.ndarray, layer: int = 0, window: int | None = None, scale: float = 0.125
) -> np.ndarray:
    """Attention of one query (heads, head_dim) f32 over a layer, into an output full of NaN."""
    out = store.ops.empty(q.shape)
    out.fill(np.nan)
    store.ops.attend(on_device(store, q), store.view(layer), scale, window, out)
    return store.ops.to_host(out)


def queries(count: int, heads: int, dim: int, seed: int = 9) -> np.ndarray:
    """Queries of spread 2, so that attention is far from uniform: (count, heads, dim) f32."""
    rng = np.random.default_rng(seed)
    return 2 * rng.standard_normal((count, heads, dim), dtype=np.float32)
