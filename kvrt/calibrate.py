"""Fitting a calibration: thresholds and levels of the non-uniform formats, from a text.

KVQuant (arXiv 2401.18079) weighs errors by gradients of a loss; here attention says what they cost,
without any. An error d of a key moves the score of a query q by q . d and, to second order, the
divergence of its softmax by a * (q . d)^2, a being the attention that the token gets: numbers of a
key count by the attention their token receives and by E[q_c^2]. (Without the first factor 2-bit
keys lose much more: what queries look for is among the extremes.) An error of a value moves the
output by a * d, projected: values count by a^2 and by the norm of the output projection's column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from .backends.ops import PAGE_TOKENS
from .calibration import (
    BITS,
    ROPES,
    SHARES,
    Calibration,
    Origin,
    expected_tensors,
    middle_and_half,
)
from .generate import cache_geometry
from .kvstore.codecs import Nuq
from .kvstore.rotary import Rotary
from .levels import optimal_levels, refined_levels, rounded
from .progress import Progress, silent

if TYPE_CHECKING:
    from .generate import Model
    from .kvstore import Geometry
    from .kvstore.grammar import Rope

SAMPLE_BYTES = 256 << 20
"""Keys and values that are kept for the fit: f16, evenly spread over the text."""

_QUERIES = 256
"""So many queries of a window, evenly spread, say which tokens attention looks at."""

_REFINED = 1024
"""So many tokens refine the levels of values."""

_NORMAL_TOKENS = 2048
"""Quantiles that stand for the keys of `normal_calibration`."""


@dataclass
class _Layer:
    """What a text leaves behind in one layer; lists have an array for each window."""

    keys: list[np.ndarray] = field(default_factory=list)  # (n, kv_heads, head_dim) f16, after RoPE
    values: list[np.ndarray] = field(default_factory=list)  # (n, kv_heads, head_dim) f16
    received: list[np.ndarray] = field(default_factory=list)  # (n, kv_heads) f32: sums of a
    squared: list[np.ndarray] = field(default_factory=list)  # (n, heads) f32: sums of a^2
    alone: list[np.ndarray] = field(default_factory=list)  # (heads,): means over queries of sum a^2
    queries: list[np.ndarray] = field(default_factory=list)  # (heads, head_dim): means of q^2


def calibrate(
    model: Model,
    documents: Sequence[Sequence[int]],
    texts: Sequence[str],
    *,
    tokens: int = 16_384,
    context: int = 2048,
    progress: Progress = silent,
) -> Calibration:
    """Fit a calibration of a model on windows of `context` tokens, `tokens` of them at most.

    `documents` are token ids of each text, `texts` their sha256; the windows are evenly spread over
    them. The first token of a window, which attention uses as a sink, is left out. Raises
    UsageError where no window is filled.
    """
    from threadpoolctl import threadpool_limits

    from .evaluate import cut_windows

    windows = cut_windows(documents, context)
    count = max(1, min(len(windows), tokens // context))
    windows = windows[(np.arange(count) * 2 + 1) * len(windows) // (2 * count)]  # (count, context)
    geometry = cache_geometry(model.config)
    per_token = 4 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
    stride = -(-windows.size * per_token // SAMPLE_BYTES)
    # From the second token on; an odd stride meets every offset in a page.
    kept = np.arange(1, context, stride // 2 * 2 + 1)  # (n,) positions
    layers = [_Layer() for _ in range(geometry.num_layers)]
    collect = _Collector(model, kept)
    # BLAS's idle threads would spin between these small products.
    with threadpool_limits(1, user_api="blas"):
        for number, ids in enumerate(windows):
            progress("read", number * context, windows.size)
            model.decoder.trace(ids, lambda index, *parts: collect(layers[index], index, *parts))
        progress("read", windows.size, windows.size)
        positions = np.tile(kept, count)
        tensors: dict[str, list[np.ndarray]] = {}
        for index, layer in enumerate(layers):
            progress("fit", index, len(layers))
            gains = np.square(model.decoder.output_gains(index))  # (heads, head_dim) f32
            for name, array in _fit_layer(layer, gains, model.decoder.rotary, positions):
                tensors.setdefault(name, []).append(array)
            layers[index] = _Layer()  # its sample is not needed any more
        progress("fit", len(layers), len(layers))
    origin = Origin(model.name, model.fingerprint, geometry, tuple(texts), windows.size)
    return Calibration(origin, {name: np.stack(parts) for name, parts in tensors.items()})


def normal_calibration(model: str, model_fingerprint: str, geometry: Geometry) -> Calibration:
    """What random weights get in place of a fit: tables for normally distributed numbers.

    Keys and values of spread 1, every channel and layer alike; for memory and speed alone. No text
    was read (`Origin.tokens` is 0), and no number is drawn: the quantiles stand for a sample.
    """
    heads, dim = geometry.num_kv_heads, geometry.head_dim
    keys = _normal_quantiles(_NORMAL_TOKENS)[:, None, None]  # (n, 1, 1), the same in all forms
    token = _normal_quantiles(heads * dim).reshape(1, heads, dim)
    even = np.ones((heads, dim), np.float32)
    fitted = {"k.sensitivity": even, "v.sensitivity": even}
    for rope in ROPES:
        fitted |= _fit_keys(f"k.{rope}", keys, np.ones_like(keys))
    fitted |= _fit_values(token, even[None], even, 1.0)
    tensors = {}
    for name, (shape, dtype) in expected_tensors(geometry).items():
        tensors[name] = np.broadcast_to(fitted[name].astype(dtype), shape).copy()
    return Calibration(Origin(model, model_fingerprint, geometry, (), 0), tensors)


def _normal_quantiles(count: int) -> np.ndarray:
    """Numbers (count,) f32, growing, that share the normal distribution evenly among them."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / count) for i in range(count)], np.float32)


class _Collector:
    """Adds to a layer what `Decoder.trace` shows of a window; `kept` are the sampled positions."""

    def __init__(self, model: Model, kept: np.ndarray):
        config, decoder = model.config, model.decoder
        self._to_host = model.ops.to_host
        self._windows = config.windows
        self._kept = kept
        self._rotary = decoder.rotary
        biases = decoder.key_biases if config.has_constant_key_bias else None
        self._biases = None if biases is None else [self._to_host(bias) for bias in biases]

    def __call__(self, layer: _Layer, index: int, q: Any, k: Any, v: Any) -> None:
        """q (n, heads, head_dim), k, v (n, kv_heads, head_dim) f32, after RoPE."""
        q, k, v = (self._to_host(part) for part in (q, k, v))
        keys = k[self._kept]
        if self._biases is not None:  # caches leave it out of what they pack
            bias = np.broadcast_to(self._biases[index], keys.shape)
            keys = keys - self._rotary.rotate(bias, self._kept)
        layer.keys.append(keys.astype(np.float16))
        layer.values.append(v[self._kept].astype(np.float16))
        layer.queries.append(np.square(q).mean(0, dtype=np.float64))
        received, squared, alone = _attention(q, k, self._windows[index])
        layer.received.append(received[self._kept])
        layer.squared.append(squared[self._kept])
        layer.alone.append(alone)


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


def _fit_layer(
    layer: _Layer, gains: np.ndarray, rotary: Rotary, positions: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one layer, by name; see `calibration`. gains (heads, head_dim)."""
    keys = np.concatenate(layer.keys).astype(np.float32)  # (n, kv_heads, head_dim)
    values = np.concatenate(layer.values).astype(np.float32)
    received, squared = np.concatenate(layer.received), np.concatenate(layer.squared)
    alone = np.mean(layer.alone, axis=0)  # (heads,)
    kv_heads, dim = keys.shape[1:]
    by_group = (kv_heads, -1, dim)
    queries = np.mean(layer.queries, axis=0).reshape(by_group).sum(1)  # (kv_heads, head_dim)
    yield "k.sensitivity", queries.astype(np.float32)
    yield "v.sensitivity", (gains * alone[:, None]).reshape(by_group).sum(1).astype(np.float32)
    # Before RoPE an error of a channel reaches either channel of its pair.
    pairs = (queries + np.roll(queries, dim // 2, -1)) / 2
    for rope in ROPES:
        by_channel = (queries if rope == "post" else pairs).astype(np.float32)
        turned = _in_form(keys, rope, rotary, positions)
        yield from _fit_keys(f"k.{rope}", turned, received[:, :, None] * by_channel)
    gains = gains.reshape(by_group)  # (kv_heads, group, head_dim)
    importance = np.einsum("nkg,kgd->nkd", squared.reshape(len(keys), kv_heads, -1), gains)
    yield from _fit_values(values, importance, gains.sum(1), float(np.clip(alone.mean(), 0.02, 1)))


def _in_form(keys: np.ndarray, rope: Rope, rotary: Rotary, positions: np.ndarray) -> np.ndarray:
    """keys (n, kv_heads, head_dim) f32, kept after RoPE, in one of the three forms."""
    if rope == "post":
        return keys
    if rope == "pre":
        return rotary.rotate(keys, positions, inverse=True)
    turned = Rotary(rotary.frequencies)  # the amplitude stays with the offset in the page
    return turned.rotate(keys, positions // PAGE_TOKENS * PAGE_TOKENS, inverse=True)


def _fit_keys(name: str, keys: np.ndarray, weights: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Thresholds of each channel and levels, for keys (n, kv_heads, head_dim) in one form."""
    ordered = np.sort(keys, axis=0)
    for share in SHARES:
        outside = round(len(keys) * 0.005) if share == "1%" else 0
        low, high = (ordered[i].astype(np.float16) for i in (outside, -1 - outside))
        yield f"{name}.{share}.low", low
        yield f"{name}.{share}.high", high
        middle, half = middle_and_half(low.astype(np.float32), high.astype(np.float32))
        numbers = (keys - middle) / half
        inside = np.abs(numbers) <= 1.0
        shares = weights * np.square(half)
        found = optimal_levels(numbers[inside], shares[inside], [2**bits for bits in BITS])
        yield from _named(f"{name}.{share}", numbers[inside], found)


def _fit_values(
    values: np.ndarray, weights: np.ndarray, gains: np.ndarray, alone: float
) -> Iterator[tuple[str, np.ndarray]]:
    """Levels of values (n, kv_heads, head_dim), whose thresholds are each token's own.

    `gains` (kv_heads, head_dim) and `alone` are as `refined_levels` takes them.
    """
    kv_heads, dim = gains.shape
    flat = values.reshape(len(values), -1)  # (n, kv_heads * head_dim)
    ordered = np.sort(flat, axis=1)
    for share in SHARES:
        outside = Nuq(2, share == "1%").value_slots(kv_heads, dim)
        low, high = ordered[:, outside, None], ordered[:, -1 - outside, None]
        half = np.maximum((high - low) / 2, np.float32(1e-12))
        numbers = (flat - (high + low) / 2) / half
        inside = np.abs(numbers) <= 1.0 + 1e-6
        shares = weights.reshape(flat.shape) * np.square(half)
        found = optimal_levels(numbers[inside], shares[inside], [2**bits for bits in BITS])
        some = slice(None, None, max(1, len(flat) // _REFINED))
        sizes = half[some] * inside[some]  # outliers make no error
        for size in found:
            found[size] = refined_levels(numbers[some], sizes, found[size], gains.ravel(), alone)
        yield from _named(f"v.{share}", numbers[inside], found)


def _named(
    name: str, numbers: np.ndarray, found: dict[int, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """The levels of each width, and those that keep mean and spread of the numbers (n,)."""
    for bits in BITS:
        levels = found[2**bits]
        near = levels[rounded(numbers, levels)]
        spread = float(near.std())
        stretch = float(numbers.std()) / spread if spread > 0 else 1.0
        read = (levels - near.mean()) * stretch + numbers.mean()
        yield f"{name}.{bits}.levels", levels.astype(np.float32)
        yield f"{name}.{bits}.read_levels", read.astype(np.float32)
