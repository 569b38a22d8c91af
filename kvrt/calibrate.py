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
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from .calibrate_codebooks import BOOK_SAMPLE_BYTES, BookOptions, BookTrainer, Report, ignored
from .calibrate_sample import SAMPLE_BYTES, LayerSample, collect, in_form
from .calibration import (
    BITS,
    ROPES,
    SHARES,
    Calibration,
    Origin,
    expected_tensors,
    middle_and_half,
)
from .calibration_parts import NUQ, needed_parts
from .generate import cache_geometry
from .kvstore.codecs import Nuq
from .kvstore.rotary import Rotary
from .levels import optimal_levels, refined_levels, rounded
from .progress import Progress, silent

if TYPE_CHECKING:
    from .generate import Model
    from .kvstore import Geometry

_REFINED = 1024
"""So many tokens refine the levels of values."""

_NORMAL_TOKENS = 2048
"""Quantiles that stand for the keys of `normal_calibration`."""


def calibrate(
    model: Model,
    documents: Sequence[Sequence[int]],
    texts: Sequence[str],
    *,
    tokens: int = 16_384,
    context: int = 2048,
    lookup: Sequence[int] = (),
    books: BookOptions | None = None,
    report: Report = ignored,
    progress: Progress = silent,
) -> Calibration:
    """Fit a calibration of a model on windows of `context` tokens, `tokens` of them at most.

    `documents` are token ids of each text, `texts` their sha256; the windows are evenly spread over
    them. The first token of a window, which attention uses as a sink, is left out. It has the
    tables of nuq, or what the format of `books` needs; `report` is told how each codebook came out.
    `lookup` are token ids of a further text, of which half of the windows are (`lookup_text`).
    Raises UsageError where no window is filled.
    """
    from threadpoolctl import threadpool_limits

    geometry = cache_geometry(model.config)
    trainer = None if books is None else BookTrainer(model, books, progress)
    sample = collect(
        model, documents, tokens=tokens, context=context, lookup=lookup,
        sample_bytes=SAMPLE_BYTES if trainer is None else BOOK_SAMPLE_BYTES,
        transformed=() if trainer is None else trainer.transformed,
        progress=progress,
    )  # fmt: skip
    wants_nuq = books is None or NUQ in needed_parts(books.spec, geometry)
    tensors: dict[str, list[np.ndarray]] = {}
    for index, layer in enumerate(sample.layers):
        if trainer is None:
            progress("fit", index, len(sample.layers))
        if wants_nuq:
            gains = np.square(model.decoder.output_gains(index))  # (heads, head_dim) f32
            # BLAS's idle threads would spin between these small products.
            with threadpool_limits(1, user_api="blas"):
                for name, array in _fit_layer(layer, gains, model.decoder.rotary, sample.positions):
                    tensors.setdefault(name, []).append(array)
        if trainer is not None:
            for name, array in trainer.fit(layer, sample.positions):
                tensors.setdefault(name, []).append(array)
        sample.layers[index] = LayerSample()  # what it held is not needed any more
    seeds = {}
    if trainer is None:
        progress("fit", len(sample.layers), len(sample.layers))
    else:
        seeds = trainer.seeds
        for found in trainer.reports():
            report(found)
    origin = Origin(model.name, model.fingerprint, geometry, tuple(texts), sample.tokens)
    stacked = {name: np.stack(parts) for name, parts in tensors.items()}
    return Calibration(origin, stacked, seeds=seeds)


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


def _fit_layer(
    layer: LayerSample, gains: np.ndarray, rotary: Rotary, positions: np.ndarray
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
        turned = in_form(keys, rope, rotary, positions)
        yield from _fit_keys(f"k.{rope}", turned, received[:, :, None] * by_channel)
    gains = gains.reshape(by_group)  # (kv_heads, group, head_dim)
    importance = np.einsum("nkg,kgd->nkd", squared.reshape(len(keys), kv_heads, -1), gains)
    yield from _fit_values(values, importance, gains.sum(1), float(np.clip(alone.mean(), 0.02, 1)))


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
