"""Stores of zones for tests: prompts, ways to fill a store, and what it holds, decoded in float64.

`decoded` reads blocks from their definition, bit by bit; it shares no code with the kernels.
"""

from typing import Any, NamedTuple

import numpy as np

from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry, KVSpec
from kvrt.trizone.policies import POLICIES
from kvrt.trizone.segment import Segment
from kvrt.trizone.state import State
from kvrt.trizone.store import ZoneStore

from .codecs import rotary_for
from .refs import hadamard_matrix
from .stores import Tokens, append, digest, on_device, random_tokens

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=16)
HEADS = 4
"""Query heads of GEOMETRY."""

SPECS = (
    "rdkv:48",
    "rdkv:paper:60",
    "rdkv:25%",
    "rdkv:64:shared",
    "snapkv:60",
    "snapkv:70:shared",
    "adakv:60",
    "h2o:30%",
    "rdkv:0",
    "rdkv:40,sink=0,window=3",
)
"""Formats that compress a prompt of 300 tokens, each in its own way."""


class Prompt(NamedTuple):
    """Tokens of all layers, and queries (num_layers, n, heads, head_dim) f32."""

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray

    def __len__(self) -> int:
        return self.keys.shape[1]

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.keys, self.values)


class Head(NamedTuple):
    """What one KV head of a layer holds: (n, head_dim) each."""

    keys: np.ndarray
    values: np.ndarray


def random_prompt(
    count: int, geometry: Geometry = GEOMETRY, heads: int = HEADS, seed: int = 0
) -> Prompt:
    """Keys whose channels differ in size, and queries that prefer some tokens by far."""
    rng = np.random.default_rng(seed)
    layers, kv_heads, dim = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
    keys, values = (
        rng.standard_normal((layers, count, kv_heads, dim), dtype=np.float32) for _ in range(2)
    )
    keys *= rng.uniform(0.2, 2, dim).astype(np.float32)
    queries = 1.5 * rng.standard_normal((layers, count, heads, dim), dtype=np.float32)
    return Prompt(keys, values, queries)


def new_store(
    ops: Ops,
    spec: str = SPECS[0],
    geometry: Geometry = GEOMETRY,
    max_tokens: int = 4096,
    **extras: Any,
) -> ZoneStore:
    """An empty store; `extras` go to ZoneStore."""
    extras.setdefault("rotary", rotary_for(geometry))
    return ZoneStore(geometry, KVSpec.parse(spec), ops, max_tokens, **extras)


def prefill(store: ZoneStore, prompt: Prompt) -> None:
    """Add tokens as a prompt's end does: compressed, where they are more than the budget."""
    with store.extending(len(prompt)):
        for layer in range(store.geometry.num_layers):
            compress_layer(store, prompt, layer)


def compress_layer(store: ZoneStore, prompt: Prompt, layer: int) -> None:
    asked = on_device(store, prompt.queries[layer])
    # Copies: a store may round the values that it is given.
    sides = (on_device(store, side[layer]).copy() for side in prompt.tokens)
    store.compress(layer, *sides, lambda rows: asked[rows].copy())


def decoded(segment: Segment, head: int, head_dim: int) -> Head:
    """The packed tokens of a head in the order of its blocks, f64."""
    data = np.asarray(segment.data)
    parts = [
        _block(data, row, head_dim)
        for row, owner in zip(segment.units, segment.heads, strict=True)
        if owner == head
    ]
    empty = np.zeros((0, head_dim))
    keys, values = zip(*parts, strict=True) if parts else ((), ())
    return Head(np.concatenate([empty, *keys]), np.concatenate([empty, *values]))


def _block(data: np.ndarray, row: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values (n, dim) f64 of one block."""
    at, order_at = int(row[0]), int(row[1])
    tokens, channels = ([int(row[i]) >> 16 * w & 0xFFFF for w in range(4)] for i in (2, 3))
    count, kept = sum(tokens), sum(channels)
    room = -(-count // 4) * 4
    codes, sizes = [], []
    for counts, length in ((tokens, dim), (channels, room)):
        widths = np.repeat((16, 8, 4, 2), counts)
        sizes.append(sum(int(width) * length // 8 for width in widths))
        codes.append((widths, length))
    metas = [4 * sum(counts[1:]) for counts in (tokens, channels)]
    value_meta = at + sizes[0]
    key_codes = value_meta + sum(metas)
    values = _rows(data, at, value_meta, *codes[0])
    by_channel = _rows(data, key_codes, value_meta + metas[0], *codes[1])  # (kept, room)
    keys = np.zeros((count, dim))
    keys[:, data[order_at : order_at + kept]] = by_channel[:, :count].T
    return keys, values


def _rows(data: np.ndarray, at: int, meta_at: int, widths: np.ndarray, length: int) -> np.ndarray:
    """Rows (len(widths), length) f64 of `length` numbers each, of these widths."""
    out = np.zeros((len(widths), length))
    for row, width in zip(out, widths.tolist(), strict=True):
        raw = data[at : at + width * length // 8]
        at += len(raw)
        if width == 16:
            row[:] = raw.view(np.float16)
            continue
        bits = np.unpackbits(raw, bitorder="little").reshape(length, width)
        scale, minimum = data[meta_at : meta_at + 4].view(np.float16).astype(np.float64)
        row[:] = bits @ (1 << np.arange(width)) * scale + minimum
        meta_at += 4
    return out


def held_by(store: ZoneStore, layer: int) -> list[Head]:
    """What each head holds, f64: packed tokens, segment after segment, then the exact ones."""
    return held_in(store.parts(), layer)


def held_in(state: State, layer: int) -> list[Head]:
    zones, heads = state.layers[layer], []
    for head in range(len(zones.keys)):
        sides = [decoded(segment, head, zones.keys.shape[2]) for segment in zones.segments]
        sides.append(Head(zones.keys[head, : state.rows], zones.values[head, : state.rows]))
        keys, values = (np.concatenate(s, dtype=np.float64) for s in zip(*sides, strict=True))
        if state.rotated:  # the transform is its own inverse
            block = keys.shape[1] & -keys.shape[1]
            values = (values.reshape(-1, block) @ hadamard_matrix(block)).reshape(values.shape)
        heads.append(Head(keys, values))
    return heads


def read_heads(store: ZoneStore, layer: int) -> list[Head]:
    """The same by `ZoneStore.read`; where there are no tokens it must not have written."""
    shape = (store.held, store.geometry.num_kv_heads, store.geometry.head_dim)
    keys, values = (on_device(store, np.full(shape, np.nan, np.float32)) for _ in range(2))
    firsts = store.read(layer, keys, values)
    keys, values = store.ops.to_host(keys), store.ops.to_host(values)
    for head, first in enumerate(firsts):
        assert np.isnan(keys[:first, head]).all() and np.isnan(values[:first, head]).all()
    return [Head(keys[first:, h], values[first:, h]) for h, first in enumerate(firsts)]


def kept_values(store: ZoneStore, values: np.ndarray, rotated: bool = True) -> np.ndarray:
    """values (..., kv_heads, head_dim) f32 as a store keeps them once some were compressed."""
    if not rotated or not POLICIES[store.compression.name].rotates:
        return values
    out, dim = values.copy(), values.shape[-1]
    store.ops.change_basis(out.reshape(-1, *values.shape[-2:]), True, hadamard=dim & -dim)
    return out


def contents(store: ZoneStore) -> dict[str, str]:
    """What holds tokens: blocks, the rows of the directory, exact tokens, as hashes; counts."""
    state, host = store.parts(), store.ops.to_host
    segments = [segment for zones in state.layers for segment in zones.segments]
    exact = [side for zones in state.layers for side in (zones.keys, zones.values)]
    return {
        "blocks": digest(host(segment.data) for segment in segments),
        "units": digest(part for segment in segments for part in (segment.units, segment.heads)),
        "channels": digest(segment.channels for segment in segments),
        "exact": digest(host(array)[:, : state.rows] for array in exact),
        "counts": repr((state.length, state.frozen, state.rows, store.view(0).extent.tail_tokens)),
        "widths": repr([store.widths(layer) for layer in range(len(state.layers))]),
    }


PROMPT = random_prompt(300)
MORE = random_prompt(400, seed=5)
OTHERS = random_tokens(400, GEOMETRY, seed=6)


def filled(ops: Ops, spec: str = SPECS[0], steps: int = 0, **extras: Any) -> ZoneStore:
    """A store of PROMPT, and some exact tokens."""
    store = new_store(ops, spec, **extras)
    prefill(store, PROMPT)
    append(store, OTHERS.part(0, steps))
    return store


PROMPTS = random_prompt(300), random_prompt(150, seed=1)
TOKENS = random_tokens(80, GEOMETRY, seed=2)


def add_two_prompts(store: ZoneStore) -> None:
    """PROMPTS, each with a few exact tokens behind it."""
    prefill(store, PROMPTS[0])
    append(store, TOKENS.part(0, 9))
    prefill(store, PROMPTS[1])
    append(store, TOKENS.part(9, 12))


def same(got: list[Head], want: list[Head]) -> bool:
    return all(
        np.array_equal(a, b)
        for one, other in zip(got, want, strict=True)
        for a, b in zip(one, other, strict=True)
    )
