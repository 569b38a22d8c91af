"""Plain residual vector quantisation to compare trained codebooks with, and vectors to train on."""

import numpy as np
from threadpoolctl import threadpool_limits

CLUSTERS = 200


def vectors(kind: str, count: int, dim: int, seed: int) -> np.ndarray:
    """(count, dim) f32: "white", normal; "gaussian", the spread of channels falling like
    (c + 1)^-0.75; or "clusters", of spread 0.2 around 200 normal centres, the same for all seeds.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((count, dim), np.float32)
    if kind == "white":
        return drawn
    if kind == "gaussian":
        return drawn * (np.arange(dim) + 1.0).astype(np.float32) ** np.float32(-0.75)
    centres = np.random.default_rng(99).standard_normal((CLUSTERS, dim), np.float32)
    return centres[rng.integers(CLUSTERS, size=count)] + np.float32(0.2) * drawn


def nearest(rows: np.ndarray, book: np.ndarray) -> np.ndarray:
    """The index of the entry (E, d) f32 nearest to each row (n, d), in blocks."""
    norms = np.square(book).sum(1) * np.float32(0.5)
    blocks = np.array_split(rows, -(-len(rows) // 4096))
    return np.concatenate([(norms - block @ book.T).argmin(1) for block in blocks])


def kmeans_rvq(
    samples: np.ndarray, stages: int, entries: int, rounds: int = 25, seed: int = 0
) -> np.ndarray:
    """k-means from sampled points, stage by stage on residuals: (stages, entries, d) f16."""
    with threadpool_limits(1, user_api="blas"):  # threads of small products spin
        return _kmeans_rvq(samples, stages, entries, rounds, np.random.default_rng(seed))


def _kmeans_rvq(
    samples: np.ndarray, stages: int, entries: int, rounds: int, rng: np.random.Generator
) -> np.ndarray:
    rest, made = samples.copy(), []
    for _ in range(stages):
        book = rest[rng.choice(len(rest), entries, replace=False)].copy()
        for _ in range(rounds):
            codes = nearest(rest, book)
            counts = np.bincount(codes, minlength=entries)[:, None]
            sums = np.stack([np.bincount(codes, column, entries) for column in rest.T], 1)
            book = np.where(counts > 0, sums / np.maximum(counts, 1), book).astype(np.float32)
        made.append(book.astype(np.float16))
        book = made[-1].astype(np.float32)
        rest -= book[nearest(rest, book)]
    return np.stack(made)


def relative_errors(books: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """sqrt(|r|^2 / |x|^2) over all samples after each stage of books (stages, E, d)."""
    rest, errors = samples.astype(np.float32), []
    for book in books.astype(np.float32):
        rest = rest - book[nearest(rest, book)]
        errors.append(np.square(rest).sum(dtype=np.float64))
    return np.sqrt(np.array(errors) / np.square(samples).sum(dtype=np.float64))
