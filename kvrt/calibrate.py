"""Fitting a calibration: thresholds and levels of the non-uniform formats, from a text.

KVQuant (arXiv 2401.18079) with sensitivities that need no gradients: an error of a key's channel
counts by E[q_c^2], one of a value's by how much attention its token gets and by how strongly the
output projection passes its channel on. Levels are the optimal weighted 1-D clustering of numbers
normalised by their thresholds (dynamic programming over a histogram), so that a fit has no seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from .backends.ops import PAGE_TOKENS
from .calibration import BITS, ROPES, SHARES, Calibration, Origin, middle_and_half
from .kvstore.layout import Geometry
from .kvstore.rotary import Rotary
from .progress import Progress, silent

if TYPE_CHECKING:
    from .generate import Model

SAMPLE_BYTES = 256 << 20
"""Keys and values that are kept for the fit: f16, evenly spread over the text."""

_QUERIES = 64
"""The last queries of a window, whose attention says how much a token counts."""

_BINS = 512
_REFINED = 1024
"""Tokens that refine the levels of values, in so many rounds."""
_ROUNDS = 12


@dataclass
class _Layer:
    """What a text leaves behind in one layer: one array for each window."""

    keys: list[np.ndarray] = field(default_factory=list)  # (n, kv_heads, head_dim) f16, after RoPE
    values: list[np.ndarray] = field(default_factory=list)  # (n, kv_heads, head_dim) f16
    attention: list[np.ndarray] = field(default_factory=list)  # (n, heads) f32, squared, summed
    queries: np.ndarray | float = 0.0  # (kv_heads, head_dim) f64, squares summed over queries
    count: int = 0


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

    `documents` are token ids of each text, `texts` their sha256. The first token of a window, which
    attention uses as a sink, is left out. Raises UsageError where no window is filled.
    """
    from .evaluate import cut_windows

    windows = cut_windows(documents, context, tokens)
    geometry = _geometry(model)
    layers = [_Layer() for _ in range(geometry.num_layers)]
    per_token = 4 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
    stride = -(-windows.size * per_token // SAMPLE_BYTES)
    # From the second token on; an odd stride meets every offset in a page.
    kept = np.arange(1, context, stride | 1 if stride > 1 else 1)  # (n,) positions

    def visit(index: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        _collect(layers[index], q, k, v, kept)

    for number, ids in enumerate(windows):
        progress("read", number * context, windows.size)
        model.decoder.trace(ids, visit)
    progress("read", windows.size, windows.size)
    positions = np.tile(kept, len(windows))
    tensors: dict[str, list[np.ndarray]] = {}
    for index, layer in enumerate(layers):
        progress("fit", index, len(layers))
        passed_on = model.decoder.output_gains(index)  # (heads, head_dim) f32
        for name, array in _fit_layer(layer, passed_on, model.decoder.rotary, positions):
            tensors.setdefault(name, []).append(array)
        layers[index] = _Layer()  # its sample is not needed any more
    progress("fit", len(layers), len(layers))
    origin = Origin(model.name, model.fingerprint, geometry, tuple(texts), windows.size)
    return Calibration(origin, {name: np.stack(parts) for name, parts in tensors.items()})


def _geometry(model: Model) -> Geometry:
    config = model.config
    return Geometry(config.num_layers, config.num_kv_heads, config.head_dim)


def _collect(layer: _Layer, q: np.ndarray, k: np.ndarray, v: np.ndarray, kept: np.ndarray) -> None:
    """Add a window's q (n, heads, head_dim), k, v (n, kv_heads, head_dim) f32 to a layer."""
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    layer.keys.append(k[kept].astype(np.float16))
    layer.values.append(v[kept].astype(np.float16))
    squares = np.square(q).sum(0, dtype=np.float64)  # (heads, head_dim)
    layer.queries = layer.queries + squares.reshape(kv_heads, -1, dim).sum(1)
    layer.count += n
    seen = np.tri(n, dtype=bool)[-_QUERIES:]  # (queries, n)
    attention = np.empty((len(kept), heads), np.float32)
    for head in range(heads):
        scores = q[-_QUERIES:, head] @ k[:, head // (heads // kv_heads)].T / np.sqrt(dim)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))  # (queries, n)
        weights /= weights.sum(-1, keepdims=True)
        attention[:, head] = np.square(weights).sum(0)[kept]
    layer.attention.append(attention)


def _fit_layer(
    layer: _Layer, passed_on: np.ndarray, rotary: Rotary, positions: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one layer, by name; see `calibration`."""
    keys, values = np.concatenate(layer.keys), np.concatenate(layer.values)
    attention = np.concatenate(layer.attention)  # (n, heads)
    sensitivity = np.asarray(layer.queries / layer.count)  # (kv_heads, head_dim) f64
    group = passed_on.shape[0] // keys.shape[1]
    by_head = np.square(passed_on) * attention.mean(0)[:, None]  # (heads, head_dim)
    yield "k.sensitivity", sensitivity.astype(np.float32)
    yield "v.sensitivity", by_head.reshape(-1, group, keys.shape[2]).sum(1).astype(np.float32)
    # Before RoPE an error of a channel reaches either channel of its pair.
    pairs = (sensitivity + np.roll(sensitivity, keys.shape[2] // 2, -1)) / 2
    for rope in ROPES:
        weights = sensitivity if rope == "post" else pairs
        yield from _fit_keys(f"k.{rope}", _in_form(keys, rope, rotary, positions), weights)
    importance = np.einsum(
        "nkg,kgd->nkd", attention.reshape(len(keys), -1, group),
        np.square(passed_on).reshape(-1, group, keys.shape[2]),
    )  # (n, kv_heads, head_dim)  # fmt: skip
    # What attention averages over is a token's share of the error; what all tokens have in common
    # stays. The sum of squared weights says how few tokens a query averages over.
    alone = float(np.clip(attention.mean() * len(keys) / (_QUERIES * len(layer.keys)), 0.02, 1.0))
    gains = np.square(passed_on).reshape(-1, group, keys.shape[2]).sum(1).ravel()
    yield from _fit_values(values.astype(np.float32), importance, gains, alone)


def _in_form(keys: np.ndarray, rope: str, rotary: Rotary, positions: np.ndarray) -> np.ndarray:
    """keys (n, kv_heads, head_dim), kept after RoPE, in one of the three forms: f32."""
    if rope == "post":
        return keys.astype(np.float32)
    if rope == "pre":
        return rotary.rotate(keys.astype(np.float32), positions, inverse=True)
    turned = Rotary(rotary.frequencies)  # the amplitude stays with the offset in the page
    return turned.rotate(
        keys.astype(np.float32), positions // PAGE_TOKENS * PAGE_TOKENS, inverse=True
    )


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
        shares = np.broadcast_to(weights * np.square(half), numbers.shape)
        yield from _levels(f"{name}.{share}", numbers[inside], shares[inside])


def _fit_values(
    values: np.ndarray, importance: np.ndarray, gains: np.ndarray, alone: float
) -> Iterator[tuple[str, np.ndarray]]:
    """Levels of values (n, kv_heads, head_dim), whose thresholds are each token's own.

    They start from the weighted clustering and are then refined for the error of an average of
    tokens: `alone` times the mean square of a token's error, the rest its squared mean, in each
    channel by its gain (kv_heads * head_dim,).
    """
    flat = values.reshape(len(values), -1)  # (n, kv_heads * head_dim)
    ordered = np.sort(flat, axis=1)
    for share in SHARES:
        outside = max(1, (flat.shape[1] + 100) // 200) if share == "1%" else 0
        low, high = ordered[:, outside, None], ordered[:, -1 - outside, None]
        half = np.maximum((high - low) / 2, np.float32(1e-12))
        numbers = (flat - (high + low) / 2) / half
        inside = np.abs(numbers) <= 1.0
        shares = importance.reshape(flat.shape) * np.square(half)
        sample = slice(None, None, max(1, len(flat) // _REFINED))
        refine = partial(
            _refined, numbers[sample], half[sample] * inside[sample], gains=gains, alone=alone
        )
        yield from _levels(f"v.{share}", numbers[inside], shares[inside], refine)


def _refined(
    numbers: np.ndarray,
    sizes: np.ndarray,
    levels: np.ndarray,
    *,
    gains: np.ndarray,
    alone: float,
) -> np.ndarray:
    """Levels that lessen alone * E[d^2] + (1 - alone) * E[d]^2, d = size * (level - number).

    numbers, sizes (n, channels). Codes and levels take turns; the best levels met are kept.
    """
    best, least = levels, np.inf
    for _ in range(_ROUNDS):
        codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, numbers)
        error = sizes * (levels[codes] - numbers)  # (n, channels)
        cost = np.square(error).mean(0) * alone + np.square(error.mean(0)) * (1.0 - alone)
        if (total := float(cost @ gains)) < least:
            best, least = levels, total
        mine = [codes == code for code in range(len(levels))]
        squares = np.stack(
            [(np.square(sizes) * part).mean(0) for part in mine]
        )  # (levels, channels)
        means = np.stack([(sizes * part).mean(0) for part in mine])
        products = np.stack([(np.square(sizes) * numbers * part).mean(0) for part in mine])
        matrix = np.diag(squares @ gains) * alone + (means * gains) @ means.T * (1.0 - alone)
        matrix += np.eye(len(levels)) * 1e-9 * max(np.trace(matrix), 1e-30)
        wanted = products @ gains * alone
        wanted += (means * gains) @ (sizes * numbers).mean(0) * (1.0 - alone)
        levels = np.sort((levels + np.linalg.solve(matrix, wanted)) / 2)
    return best


def _levels(
    name: str,
    numbers: np.ndarray,
    weights: np.ndarray,
    refine: Callable[[np.ndarray], np.ndarray] = lambda levels: levels,
) -> Iterator[tuple[str, np.ndarray]]:
    """The levels of each width for numbers from -1 to 1, and those that keep mean and spread."""
    found = optimal_levels(numbers, weights, [2**bits for bits in BITS])
    for bits in BITS:
        levels = refine(found[2**bits])
        rounded = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, numbers)]
        spread = float(rounded.std())
        stretch = float(numbers.std()) / spread if spread > 0 else 1.0
        read = (levels - rounded.mean()) * stretch + numbers.mean()
        yield f"{name}.{bits}.levels", levels.astype(np.float32)
        yield f"{name}.{bits}.read_levels", read.astype(np.float32)


def optimal_levels(
    numbers: np.ndarray, weights: np.ndarray, sizes: Sequence[int]
) -> dict[int, np.ndarray]:
    """The levels of least weighted squared error, growing, for each number of levels.

    numbers, weights (n,); numbers are from -1 to 1. Exact but for a histogram of 512 bins.
    """
    place = np.clip(((numbers + 1.0) * (_BINS / 2)).astype(np.int64), 0, _BINS - 1)
    sums = [
        np.concatenate([[0.0], np.cumsum(np.bincount(place, weights * numbers**power, _BINS))])
        for power in (0, 1, 2)
    ]  # three of (bins + 1,)
    weight, first, second = (part[None, :] - part[:, None] for part in sums)  # (bins + 1, bins + 1)
    safe = np.where(weight > 0, weight, 1.0)
    cost = np.maximum(np.where(weight > 0, second - first * first / safe, 0.0), 0.0)
    cost[np.tril_indices(_BINS + 1, -1)] = np.inf  # of putting bins i ... j - 1 on one level
    best, cuts, found = cost[0], [], {}
    for size in range(2, max(sizes) + 1):
        total = best[:, None] + cost
        cuts.append(total.argmin(0))
        best = total[cuts[-1], np.arange(_BINS + 1)]
        if size in sizes:
            found[size] = _centres(cuts, sums)
    return found


def _centres(cuts: Sequence[np.ndarray], sums: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of each cluster, following the cuts back from the last bin."""
    edges = [_BINS]
    for cut in reversed(cuts):
        edges.append(int(cut[edges[-1]]))
    edges = [0, *edges[::-1]] if edges[-1] else edges[::-1]
    levels = []
    for start, end in pairwise(edges):
        weight = sums[0][end] - sums[0][start]
        middle = (start + end) / _BINS - 1.0
        levels.append((sums[1][end] - sums[1][start]) / weight if weight > 0 else middle)
    while len(levels) < len(cuts) + 1:  # fewer different numbers than levels
        levels.append(levels[-1])
    return np.sort(np.array(levels))
