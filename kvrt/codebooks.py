"""Training codebooks of residual vector quantisation: SimVQ as a start, then free entries.

Stage by stage: entries e_j are fitted to what the stages before have left, r, and each r is
replaced by r - e_j of its nearest entry (the least 0.5 |e|^2 - r . e, ties to the lowest index).
SimVQ (arXiv 2411.02038): e_j = c_j W with a frozen random c_j ~ N(0, 1/d). With codes fixed, W is a
least squares solution of two small matrices, so no gradients are needed. Few samples cannot
overfit W, but clustered vectors are far from any c_j W: mode "free" therefore only starts there and
goes on with Lloyd's rounds. Entries are rounded to f16 all along, as codecs keep them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from threadpoolctl import threadpool_limits

from .backends.cpu import available_threads
from .codebook_rows import Rows, Sweep
from .errors import UsageError
from .progress import Progress, silent

Mode = Literal["free", "simvq"]
Step = Callable[[Sweep, np.ndarray], np.ndarray]

_START_ROUNDS = 8
"""Rounds of least squares for W, on some of the samples."""

_ROUNDS = 24
"""Rounds on all samples at most."""

_SPELLS, _SPELL_ROUNDS = 5, 4
"""Idle entries are moved so often; Lloyd's rounds after each time. On some of the samples."""

_SETTLED = 1e-4
"""Rounds end when the error falls by a smaller share."""

_SOME = 128
"""Samples for each entry that the early rounds see."""

_HELD_OUT, _MOST_HELD_OUT = 32, 1 << 14
"""One sample of so many only measures, but no more than that."""

_SHRINK = 0.6
"""Entries spread less than residuals: the means of cells."""

_F16_MAX = 65504.0

# What a stage draws random numbers for.
_FROZEN, _MOVES, _ORDER = range(3)


@dataclass(frozen=True)
class Stage:
    """How one stage came out."""

    error: float  # of held-out samples: weighted |r|^2 after this stage over |x|^2
    used: float  # share of the entries that a training sample uses


@dataclass(frozen=True)
class Books:
    """Trained entries of all stages; the first stages serve a codec that has fewer."""

    entries: np.ndarray  # (stages, E, d) f16
    stages: tuple[Stage, ...]
    seed: int
    projections: np.ndarray | None  # W (stages, d, d) f16, mode "simvq": see simvq_entries


def train_books(
    samples: Any,
    weights: Any,
    stages: int,
    entries: int,
    *,
    seed: int,
    xp: Any = np,
    mode: Mode = "free",
    progress: Progress = silent,
) -> Books:
    """Fit `stages` codebooks of `entries` vectors to samples (n, d) f32.

    weights (n,) f32, not negative, or None: what a sample's squared error counts. Arrays may be
    numpy's or `xp`'s; with xp = cupy the work is done on the GPU. One copy of the samples is held.
    A stage depends on the seed and the stages before alone. Raises UsageError on numbers that are
    not finite or too large for f16, and on weights that are negative or all 0.
    """
    if mode not in ("free", "simvq"):
        raise UsageError(f"mode {mode!r} of codebooks: it is free or simvq")
    if xp is not np:
        return _train(_shuffled(samples, weights, seed, xp), stages, entries, seed, mode, progress)
    # BLAS's own threads would spin between products that are this small.
    limit = threadpool_limits(1, user_api="blas")
    with limit, ThreadPoolExecutor(available_threads()) as pool:
        rows = _shuffled(samples, weights, seed, xp, pool)
        return _train(rows, stages, entries, seed, mode, progress)


def _train(
    rows: Rows, stages: int, entries: int, seed: int, mode: Mode, progress: Progress
) -> Books:
    """As `train_books`, of samples that `_shuffled` made."""
    held = min(len(rows) // _HELD_OUT, _MOST_HELD_OUT)
    train, test = rows.part(held, len(rows)), rows.part(0, held or len(rows))
    early = train.part(0, entries * _SOME)
    power = test.power() or 1.0  # all samples are 0: so is the error
    made, reports, projections = [], [], []
    for stage in range(stages):
        progress("codebooks", stage, stages)
        book, projection = _simvq(early, train, entries, (seed, stage), mode)
        if mode == "free":
            book = _free(early, train, book, (seed, stage))
        used = train.subtract(book)
        if held:
            test.subtract(book)
        made.append(book)
        projections.append(projection)
        reports.append(Stage(test.power() / power, float((used > 0).mean())))
    progress("codebooks", stages, stages)
    kept = np.stack(projections) if mode == "simvq" else None
    return Books(np.stack(made), tuple(reports), seed, kept)


def simvq_entries(seed: int, projections: np.ndarray, entries: int) -> np.ndarray:
    """The entries (stages, E, d) f16 of mode "simvq", from its seed and W (stages, d, d) f16.

    The same on every machine: in f64, products of f16 numbers are exact, and the order of sums
    changes them by far less than f16 tells apart.
    """
    dim = projections.shape[-1]
    return np.stack(
        [
            _f16(_frozen((seed, stage), entries, dim) @ projection.astype(np.float64))
            for stage, projection in enumerate(projections)
        ]
    )


def _shuffled(samples: Any, weights: Any, seed: int, xp: Any, pool: Executor | None = None) -> Rows:
    """A copy of the samples in random order, so that any part of them stands for all."""
    if samples.ndim != 2 or 0 in samples.shape:
        raise UsageError(f"samples of shape {samples.shape}: codebooks are fitted to (n, d)")
    count, dim = samples.shape
    order = np.argsort(_bits((seed, 0), _ORDER, count), kind="stable")
    data = xp.ones((count, dim + 1), np.float32)
    for start in range(0, count, step := max(1, (1 << 22) // dim)):
        block = slice(start, start + step)
        data[block, :-1] = xp.asarray(_picked(samples, order[block], xp), np.float32)
        top = float(abs(data[block]).max())
        if not np.isfinite(top):
            raise UsageError("samples hold NaN or infinity: codebooks are fitted to finite numbers")
        if top > _F16_MAX:
            raise UsageError(f"samples reach {top:.3g}: entries are f16, up to {_F16_MAX:.0f}")
    if weights is None:
        return Rows(xp, data, None, pool)
    if weights.shape != (count,):
        raise UsageError(f"weights of shape {weights.shape} for {count} samples: one each")
    turned = xp.asarray(_picked(weights, order, xp), np.float32)
    low, total = float(turned.min()), float(turned.sum(dtype=np.float64))
    if not (low >= 0.0 and 0.0 < total < np.inf):
        raise UsageError("weights of samples: finite, none negative, some above 0")
    return Rows(xp, data, turned / (total / count), pool)


def _picked(array: Any, order: np.ndarray, xp: Any) -> Any:
    return array[order if isinstance(array, np.ndarray) else xp.asarray(order)]


def _simvq(
    early: Rows, train: Rows, count: int, key: tuple[int, int], mode: Mode
) -> tuple[np.ndarray, np.ndarray]:
    """Entries (count, d) f16, c_j W, and W (d, d) f16; in mode "free" the mean is added."""
    weight, total, square = early.moments()
    weight = max(weight, 1e-30)
    dim = len(total)
    mean = total / weight if mode == "free" else np.zeros(dim)
    values, vectors = np.linalg.eigh(square / weight - np.outer(mean, mean))
    root = (vectors * np.sqrt(np.maximum(values, 0.0))).T  # z root is spread like the rows
    frozen = _frozen(key, count, dim)

    def book(projection: np.ndarray) -> np.ndarray:
        return _f16(frozen @ projection.astype(np.float64) + mean)

    def solved(sweep: Sweep, _: np.ndarray) -> np.ndarray:
        """The W of least sum of weight * |r - mean - c W|^2, the codes being fixed."""
        square = (frozen.T * sweep.counts) @ frozen
        wanted = frozen.T @ (sweep.sums - sweep.counts[:, None] * mean)
        # So that codes of too few different c can be solved for.
        ridge = np.eye(dim) * max(1e-6 * float(np.trace(square)) / dim, 1e-30)
        return _f16(np.linalg.solve(square + ridge, wanted))

    start = _f16(_SHRINK * np.sqrt(dim) * root)
    projection, _ = _rounds(early, start, solved, _START_ROUNDS, book)
    if mode == "simvq":
        projection, _ = _rounds(train, projection, solved, _ROUNDS, book)
    return book(projection), projection


def _free(early: Rows, train: Rows, book: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Entries (E, d) f16 with Lloyd's rounds, from a start `book`; idle entries are moved."""
    best, least = _rounds(early, book, _means, _SPELL_ROUNDS)
    for draw in _bits(key, _MOVES, _SPELLS) / 2.0**64:
        moved = _moved(early, best, float(draw))
        if moved is None:
            break
        book, error = _rounds(early, moved, _means, _SPELL_ROUNDS)
        if error < least:
            best, least = book, error
    return _rounds(train, best, _means, _ROUNDS)[0]


def _same(book: np.ndarray) -> np.ndarray:
    return book


def _rounds(
    rows: Rows,
    fitted: np.ndarray,
    step: Step,
    rounds: int,
    book: Callable[[np.ndarray], np.ndarray] = _same,
) -> tuple[np.ndarray, float]:
    """Codes and what is fitted take turns; the best met, and its error.

    `book` makes the entries (E, d) f16 of what is fitted: entries themselves, or W.
    """
    best, least, power = fitted, np.inf, rows.power()
    for turn in range(rounds + 1):
        sweep = rows.sweep(book(fitted))
        error = max(0.0, power + sweep.change)
        settled = not error < least * (1.0 - _SETTLED)
        if error < least:
            best, least = fitted, error
        if settled or turn == rounds:
            break
        fitted = step(sweep, fitted)
    return best, least


def _means(sweep: Sweep, book: np.ndarray) -> np.ndarray:
    """The mean of each code's rows; an entry without rows stays."""
    counts = sweep.counts[:, None]
    means = sweep.sums / np.where(counts > 0, counts, 1.0)
    return _f16(np.where(counts > 0, means, book))


def _moved(rows: Rows, book: np.ndarray, draw: float) -> np.ndarray | None:
    """Entries of which idle ones now are rows, drawn by their errors; None: there are none.

    Errors of d dimensions fall like E^(-2/d): one more entry saves 2/d of an entry's share. One
    that saves less is dead, or in too dense a place. One that saves much is not idle, however rare:
    it may be for the few that are far from all others.
    """
    saved, errors = rows.savings(book)
    count, dim = book.shape
    total = errors.cumsum()
    # An eighth at a time, for each move changes what the others save; the dead all at once.
    idle = np.flatnonzero(saved < 2 / dim * total[-1] / count)
    dead = int((saved <= 0).sum())
    idle = idle[np.argsort(saved[idle], kind="stable")][: max(dead, count // 8)]
    if len(idle) == 0 or not total[-1] > 0:
        return None
    # Evenly spaced draws: no row twice, unless one has more than its share of the error.
    points = (np.arange(len(idle)) + draw) / len(idle) * total[-1]
    book = book.copy()
    book[idle] = rows.take(np.searchsorted(total, points, side="right").clip(max=len(rows) - 1))
    return book


def _frozen(key: tuple[int, int], count: int, dim: int) -> np.ndarray:
    """c (count, dim) f64 ~ N(0, 1 / dim), f16 numbers, the same ones on every machine.

    By Box and Muller from raw bits: numpy promises those, but not its normal numbers, for ever.
    """
    bits = _bits(key, _FROZEN, 2 * count * dim).reshape(2, count, dim)
    first, second = (bits >> np.uint64(11)) * 2.0**-53 + 2.0**-54
    normal = np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second)
    return (normal / np.sqrt(dim)).astype(np.float16).astype(np.float64)


def _f16(numbers: np.ndarray) -> np.ndarray:
    return numbers.clip(-_F16_MAX, _F16_MAX).astype(np.float16)


def _bits(key: tuple[int, int], purpose: int, count: int) -> np.ndarray:
    """Random words (count,) u64, counted from 0 for each (seed, stage) and purpose."""
    key_words = np.array(key, np.uint64)
    return np.random.Philox(key=key_words, counter=[0, 0, 0, purpose]).random_raw(count)
