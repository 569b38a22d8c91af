"""What calibrations are fitted to: keys, values, queries and attention of a text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .backends.ops import PAGE_TOKENS
from .generate import cache_geometry
from .kvstore.rotary import Rotary
from .progress import Progress, silent

if TYPE_CHECKING:
    from .generate import Model
    from .kvstore.grammar import Rope

SAMPLE_BYTES = 256 << 20
"""Keys and values that are kept for the fit: f16, evenly spread over the text."""

_QUERIES = 256
"""So many queries of a window, evenly spread, say which tokens attention looks at."""

_GOLDEN = 0.6180339887
"""A query of position p stands for those that look at a page from p times this on."""


@dataclass
class LayerSample:
    """What a text leaves behind in one layer; lists have an array for each window."""

    keys: list[np.ndarray] = field(default_factory=list)  # (n, kv_heads, head_dim) f16, after RoPE
    values: list[np.ndarray] = field(default_factory=list)  # (n, kv_heads, head_dim) f16
    received: list[np.ndarray] = field(default_factory=list)  # (n, kv_heads) f32: sums of a
    squared: list[np.ndarray] = field(default_factory=list)  # (n, heads) f32: sums of a^2
    alone: list[np.ndarray] = field(default_factory=list)  # (heads,): means over queries of sum a^2
    queries: list[np.ndarray] = field(default_factory=list)  # (heads, head_dim): means of q^2
    # The same of Hadamard-transformed queries, by the form of the keys.
    transformed: dict[Rope, list[np.ndarray]] = field(default_factory=dict)


@dataclass
class Sample:
    """What a text leaves behind. `positions` (n,) are those of the keys and values of a layer."""

    layers: list[LayerSample]
    positions: np.ndarray
    tokens: int  # that were read


def collect(
    model: Model,
    documents: Sequence[Sequence[int]],
    *,
    tokens: int,
    context: int,
    lookup: Sequence[int] = (),
    sample_bytes: int = SAMPLE_BYTES,
    transformed: Collection[Rope] = (),
    progress: Progress = silent,
) -> Sample:
    """Run a model over windows of `context` tokens, `tokens` of them at most, spread over a text.

    The first token of a window, which attention uses as a sink, is left out. `lookup`: a further
    text, half of the windows are of it. `transformed`: forms of keys for which queries are looked
    at Hadamard-transformed too. Raises UsageError where no window is filled.
    """
    from threadpoolctl import threadpool_limits

    from .evaluate import cut_windows

    count = max(1, tokens // context)
    windows = _spread(cut_windows(documents, context), count - count // 2 if lookup else count)
    wanted = min(len(windows), count - len(windows))
    if wanted and len(lookup) >= context:
        windows = np.concatenate([windows, _spread(cut_windows([lookup], context), wanted)])
    geometry = cache_geometry(model.config)
    per_token = 4 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
    stride = -(-windows.size * per_token // sample_bytes)
    # From the second token on; an odd stride meets every offset in a page.
    kept = np.arange(1, context, stride // 2 * 2 + 1)  # (n,) positions
    layers = [LayerSample() for _ in range(geometry.num_layers)]
    show = _Collector(model, kept, transformed)
    # BLAS's idle threads would spin between these small products.
    with threadpool_limits(1, user_api="blas"):
        for number, ids in enumerate(windows):
            progress("read", number * context, windows.size)
            model.decoder.trace(ids, lambda index, *parts: show(layers[index], index, *parts))
    progress("read", windows.size, windows.size)
    return Sample(layers, np.tile(kept, len(windows)), windows.size)


def _spread(windows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of windows (n, context), evenly spread."""
    count = min(len(windows), count)
    return windows[(np.arange(count) * 2 + 1) * len(windows) // (2 * max(count, 1))]


def in_form(keys: np.ndarray, rope: Rope, rotary: Rotary, positions: np.ndarray) -> np.ndarray:
    """keys (n, kv_heads, head_dim) f32, kept after RoPE, in one of the three forms."""
    if rope == "post":
        return keys
    if rope == "pre":
        return rotary.rotate(keys, positions, inverse=True)
    turned = Rotary(rotary.frequencies)  # the amplitude stays with the offset in the page
    return turned.rotate(keys, positions // PAGE_TOKENS * PAGE_TOKENS, inverse=True)


def hadamard(rows: np.ndarray) -> np.ndarray:
    """rows (..., head_dim) f32 transformed as `had` does it: a new array; its own inverse."""
    dim = rows.shape[-1]
    block = dim & -dim
    x = rows.astype(np.float32).reshape(-1, block)
    half = 1
    while half < block:
        pairs = x.reshape(-1, 2, half)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        half *= 2
    return (x / np.float32(np.sqrt(block))).reshape(rows.shape)


class _Collector:
    """Adds to a layer what `Decoder.trace` shows of a window; `kept` are the sampled positions."""

    def __init__(self, model: Model, kept: np.ndarray, transformed: Collection[Rope] = ()):
        config, decoder = model.config, model.decoder
        self._to_host = model.ops.to_host
        self._windows = config.windows
        self._kept = kept
        self._transformed = transformed
        self._rotary = decoder.rotary
        biases = decoder.key_biases if config.has_constant_key_bias else None
        self._biases = None if biases is None else [self._to_host(bias) for bias in biases]

    def __call__(self, layer: LayerSample, index: int, q: Any, k: Any, v: Any) -> None:
        """q (n, heads, head_dim), k, v (n, kv_heads, head_dim) f32, after RoPE."""
        q, k, v = (self._to_host(part) for part in (q, k, v))
        keys = k[self._kept]
        if self._biases is not None:  # caches leave it out of what they pack
            bias = np.broadcast_to(self._biases[index], keys.shape)
            keys = keys - self._rotary.rotate(bias, self._kept)
        layer.keys.append(keys.astype(np.float16))
        layer.values.append(v[self._kept].astype(np.float16))
        layer.queries.append(np.square(q).mean(0, dtype=np.float64))
        for rope in self._transformed:
            seen = hadamard(_against(q, rope, self._rotary))
            squares = np.square(seen).mean(0, dtype=np.float64)
            layer.transformed.setdefault(rope, []).append(squares)
        received, squared, alone = _attention(q, k, self._windows[index])
        layer.received.append(received[self._kept])
        layer.squared.append(squared[self._kept])
        layer.alone.append(alone)


def _against(q: np.ndarray, rope: Rope, rotary: Rotary) -> np.ndarray:
    """Queries (n, heads, head_dim) as keys of a form meet them; each meets one earlier page."""
    if rope == "post":
        return q
    pages = (np.arange(len(q)) * _GOLDEN).astype(np.int64) // PAGE_TOKENS * PAGE_TOKENS
    return Rotary(rotary.frequencies).rotate(q, pages, inverse=True)


def _attention(
    q: np.ndarray, k: np.ndarray, window: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What some of the queries q (n, heads, head_dim) make of the keys k (n, kv_heads, head_dim).

    Sums over queries of the attention a that a token gets, over the queries of its KV head too,
    (n, kv_heads) f32; of a^2, (n, heads) f32; and the mean over queries of the sum of a^2 over all
    tokens but the first, (heads,) f32.
    """
    n, heads, dim = q.shape
    group = heads // k.shape[1]
    asking = np.arange(n - 1, 0, -max(1, n // _QUERIES))  # (queries,) positions
    distance = asking[:, None] - np.arange(n)  # (queries, n)
    hidden = (distance < 0) | (distance >= (window or n))
    received = np.zeros((n, k.shape[1]), np.float32)
    squared = np.empty((n, heads), np.float32)
    for head in range(heads):
        scores = q[asking, head] @ k[:, head // group].T / np.float32(np.sqrt(dim))
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))  # (queries, n)
        weights /= weights.sum(-1, keepdims=True)
        received[:, head // group] += weights.sum(0)
        squared[:, head] = np.square(weights).sum(0)
    return received, squared, squared[1:].sum(0) / len(asking)
