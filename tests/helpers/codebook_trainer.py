"""A trainer of codebooks in a moment, in place of `kvrt.codebooks`: entries are some samples."""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest


@dataclass(frozen=True)
class Stage:
    error: float
    used: float


@dataclass(frozen=True)
class Trained:
    entries: np.ndarray
    stages: tuple[Stage, ...]
    seed: int
    projections: np.ndarray | None


@dataclass(frozen=True)
class Call:
    """What `train_books` was given."""

    samples: np.ndarray
    weights: np.ndarray | None
    stages: int
    entries: int
    seed: int
    mode: str


def frozen(seed: int, stage: int, entries: int, dim: int) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox(key=seed + 1000 * stage))
    return rng.standard_normal((entries, dim)) / np.sqrt(dim)


def simvq_entries(seed: int, projections: np.ndarray, entries: int) -> np.ndarray:
    dim = projections.shape[-1]
    made = [
        frozen(seed, stage, entries, dim) @ projection.astype(np.float64)
        for stage, projection in enumerate(projections)
    ]
    return np.stack(made).astype(np.float16)


def install(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Let `kvrt.codebooks` be this; what it is called with is kept in the list."""
    calls: list[Call] = []

    def train_books(
        samples: np.ndarray, weights: np.ndarray | None, stages: int, entries: int, *, seed: int,
        xp: Any = np, mode: str = "free", **_: Any,
    ) -> Trained:  # fmt: skip
        calls.append(Call(samples, weights, stages, entries, seed, mode))
        assert xp is np and samples.dtype == np.float32 and samples.ndim == 2
        assert weights is None or (weights.shape == samples.shape[:1])
        left, books, reports = samples.copy(), [], []
        projections = None
        if mode == "simvq":
            eye = np.eye(samples.shape[1])
            projections = np.stack([eye * samples.std() / (2 + s) for s in range(stages)])
            projections = projections.astype(np.float16)
            all_books = simvq_entries(seed, projections, entries)
        for stage in range(stages):
            if projections is not None:
                book = all_books[stage]
            else:
                pick = np.random.default_rng([seed, stage]).integers(0, len(left), entries)
                book = (left[pick] * np.float32(0.7)).astype(np.float16)
            far = (np.square(book.astype(np.float32)).sum(1) / 2) - left @ book.T.astype(np.float32)
            codes = far.argmin(1)
            left -= book[codes]
            books.append(book)
            share = float(np.square(left).sum() / np.square(samples).sum())
            reports.append(Stage(share, len(np.unique(codes)) / entries))
        return Trained(np.stack(books), tuple(reports), seed, projections)

    module = ModuleType("kvrt.codebooks")
    module.train_books, module.simvq_entries = train_books, simvq_entries  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvrt.codebooks", module)
    return calls
