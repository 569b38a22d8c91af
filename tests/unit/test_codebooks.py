"""Codebooks of residual vector quantisation: as good as k-means, determined, and well used."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from kvrt import codebooks
from kvrt.codebook_rows import Rows
from kvrt.codebooks import Books, simvq_entries, train_books
from kvrt.errors import UsageError
from tests.helpers.rvq import kmeans_rvq, nearest, relative_errors, vectors

DIM, ENTRIES, STAGES = 16, 64, 3


def rows_of(samples: np.ndarray, weights: np.ndarray | None = None) -> Rows:
    ones = np.ones((len(samples), 1), np.float32)
    return Rows(np, np.concatenate([samples, ones], 1), weights)


def trained(samples: np.ndarray, stages: int = 1, entries: int = ENTRIES, seed: int = 3) -> Books:
    return train_books(samples, None, stages, entries, seed=seed)


# --- errors ---


@pytest.mark.parametrize("count", [6_000, 30_000])
@pytest.mark.parametrize("dim", [8, 32])
def test_gaussian_vectors_are_coded_as_well_as_by_kmeans(dim: int, count: int) -> None:
    samples, unseen = (vectors("gaussian", n, dim, seed) for n, seed in ((count, 0), (8000, 1)))
    ours = relative_errors(trained(samples, STAGES).entries, unseen)
    theirs = relative_errors(kmeans_rvq(samples, STAGES, ENTRIES), unseen)
    assert (ours <= theirs * 1.005).all(), (ours, theirs)


def test_clusters_are_found_that_kmeans_misses() -> None:
    samples, unseen = (vectors("clusters", n, 32, seed) for n, seed in ((20_000, 0), (8000, 1)))
    ours = relative_errors(trained(samples, 2, 256).entries, unseen)
    theirs = relative_errors(kmeans_rvq(samples, 2, 256), unseen)
    assert (ours < theirs).all(), (ours, theirs)
    assert ours[0] < 0.22 < theirs[0]  # sqrt(0.04 / 1.04) = 0.196 is the spread inside clusters


def test_few_samples_cannot_overfit_a_projection() -> None:
    samples, unseen = (vectors("gaussian", n, 32, seed) for n, seed in ((1500, 0), (8000, 1)))
    simvq = train_books(samples, None, STAGES, ENTRIES, seed=3, mode="simvq")
    ours = relative_errors(simvq.entries, unseen)
    theirs = relative_errors(kmeans_rvq(samples, STAGES, ENTRIES), unseen)
    assert ours[-1] < theirs[-1]


@pytest.mark.parametrize("mode", ["free", "simvq"])
def test_report_is_of_samples_that_were_not_trained_on(mode: str) -> None:
    samples, unseen = (vectors("gaussian", n, DIM, seed) for n, seed in ((30_000, 0), (30_000, 1)))
    books = train_books(samples, None, STAGES, ENTRIES, seed=3, mode=mode)  # type: ignore[arg-type]
    said = np.sqrt([stage.error for stage in books.stages])
    np.testing.assert_allclose(said, relative_errors(books.entries, unseen), rtol=0.02)
    assert all(stage.used > 0.95 for stage in books.stages)


def test_weights_say_whose_errors_count() -> None:
    samples = vectors("gaussian", 20_000, DIM, 0)
    mine = samples[:, 0] > 0.5
    weights = np.where(mine, 50.0, 1.0).astype(np.float32)
    even, uneven = (
        train_books(samples, part, 1, ENTRIES, seed=3).entries for part in (None, weights)
    )
    for part, better, worse in ((mine, uneven, even), (~mine, even, uneven)):
        assert relative_errors(better, samples[part]) < relative_errors(worse, samples[part])
    scaled = train_books(samples, weights * np.float32(8), 1, ENTRIES, seed=3)
    np.testing.assert_array_equal(scaled.entries, uneven)


def test_samples_of_weight_nothing_are_as_if_absent() -> None:
    samples = vectors("gaussian", 8000, DIM, 0)
    weights = np.ones(len(samples), np.float32)
    samples[::2] += 100.0
    weights[::2] = 0.0
    book = train_books(samples, weights, 1, ENTRIES, seed=3).entries
    assert np.abs(book).max() < 10
    assert relative_errors(book, samples[1::2])[0] < 0.8


# --- determinism ---


@pytest.mark.parametrize("mode", ["free", "simvq"])
def test_a_seed_gives_the_same_bits_and_stages_are_nested(mode: str) -> None:
    samples = vectors("clusters", 6000, DIM, 0)
    before = samples.copy()
    long, again, short, other = (
        train_books(samples, None, stages, ENTRIES, seed=seed, mode=mode)  # type: ignore[arg-type]
        for stages, seed in ((3, 3), (3, 3), (2, 3), (1, 4))
    )
    assert long.entries.dtype == np.float16 and long.entries.shape == (3, ENTRIES, DIM)
    assert long.entries.tobytes() == again.entries.tobytes() and long.stages == again.stages
    np.testing.assert_array_equal(long.entries[:2], short.entries)
    assert long.stages[:2] == short.stages
    assert (long.entries[0] != other.entries[0]).any()
    np.testing.assert_array_equal(samples, before)


def test_seed_and_projection_regenerate_entries() -> None:
    books = train_books(vectors("gaussian", 6000, DIM, 0), None, 3, ENTRIES, seed=7, mode="simvq")
    assert books.projections is not None and books.projections.shape == (3, DIM, DIM)
    assert books.projections.dtype == np.float16
    again = simvq_entries(7, books.projections, ENTRIES)
    assert again.tobytes() == books.entries.tobytes()
    assert (simvq_entries(8, books.projections, ENTRIES) != again).any()
    assert trained(vectors("gaussian", 500, DIM, 0)).projections is None


def test_frozen_vectors_are_normal_and_never_change() -> None:
    frozen = simvq_entries(5, np.eye(DIM, dtype=np.float16)[None], 4096)[0].astype(np.float64)
    assert abs(frozen.mean()) < 0.003
    np.testing.assert_allclose(frozen.T @ frozen / 4096, np.eye(DIM) / DIM, atol=0.006)
    # Kept artefacts depend on these numbers.
    expected = [-0.05322265625, -0.1300048828125, 0.218017578125]
    np.testing.assert_array_equal(frozen[0, :3], expected)


# --- rows ---


def test_ties_go_to_the_lowest_index() -> None:
    book = vectors("gaussian", ENTRIES, DIM, 0).astype(np.float16)
    book[40:] = book[:24]
    samples = vectors("gaussian", 5000, DIM, 1)
    codes = rows_of(samples).codes(book)
    assert codes.max() < 40
    np.testing.assert_array_equal(codes, nearest(samples, book.astype(np.float32)))
    assert (rows_of(np.zeros((9, DIM), np.float32)).codes(np.zeros_like(book)) == 0).all()


def test_a_sweep_sums_errors_and_rows_by_code() -> None:
    samples, book = vectors("gaussian", 20_000, DIM, 0), vectors("gaussian", ENTRIES, DIM, 1)
    weights = np.random.default_rng(2).random(len(samples), np.float32)
    rounded = book.astype(np.float16)
    rows = rows_of(samples.copy(), weights)
    found = rows.sweep(rounded)
    error = rows.power() + found.change
    exact, wide = rounded.astype(np.float64), samples.astype(np.float64)
    distances = np.square(wide[:, None] - exact).sum(-1)
    codes = distances.argmin(1)
    np.testing.assert_allclose(error, weights @ distances.min(1), rtol=1e-5)
    np.testing.assert_allclose(found.counts, np.bincount(codes, weights, ENTRIES), rtol=1e-4)
    sums = np.stack([np.bincount(codes, weights * column, ENTRIES) for column in wide.T], 1)
    np.testing.assert_allclose(found.sums, sums, rtol=1e-3, atol=1e-3)
    saved, errors = rows.savings(rounded)
    second = np.partition(distances, 1, 1)[:, 1]
    gains = np.bincount(codes, weights * (second - distances.min(1)), ENTRIES)
    np.testing.assert_allclose(saved, gains, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(errors, weights * distances.min(1), rtol=1e-3, atol=1e-5)
    used = rows.subtract(rounded)
    np.testing.assert_array_equal(used, np.bincount(codes, minlength=ENTRIES))
    np.testing.assert_allclose(rows.power(), error, rtol=1e-5)


def test_dead_and_doubled_entries_are_put_to_use() -> None:
    samples = vectors("gaussian", 8000, DIM, 0)
    start = vectors("gaussian", ENTRIES, DIM, 1).astype(np.float16)
    start[:20] = 1000.0  # nearest to nothing
    start[20:30] = start[30:40]  # never the first of two
    rows = rows_of(samples.copy())
    book = codebooks._free(rows, rows, start, (3, 0))
    assert len(np.unique(rows.codes(book))) == ENTRIES and np.abs(book).max() < 100
    again = relative_errors(book[None], samples)[0]
    assert again <= relative_errors(kmeans_rvq(samples, 1, ENTRIES), samples)[0] * 1.01


def test_a_rare_entry_far_away_stays() -> None:
    samples = vectors("gaussian", 8000, DIM, 0)
    samples[:40] += 200.0
    book = trained(samples).entries[0]
    far = book.astype(np.float32).mean(1) > 100
    assert 1 <= far.sum() <= 20  # as 40 of 8000 samples they would get none by their number


# --- unusual samples ---


@pytest.mark.parametrize("mode", ["free", "simvq"])
@pytest.mark.parametrize("count", [1, 2, 20, 63])
def test_fewer_samples_than_entries(count: int, mode: str) -> None:
    samples = vectors("gaussian", count, DIM, 0)
    books = train_books(samples, None, 2, ENTRIES, seed=3, mode=mode)  # type: ignore[arg-type]
    assert np.isfinite(books.entries).all() and books.entries.shape == (2, ENTRIES, DIM)
    assert 0 < books.stages[0].used <= count / ENTRIES
    if mode == "free":
        assert relative_errors(books.entries, samples[:count])[1] < 0.5


@pytest.mark.parametrize("mode", ["free", "simvq"])
@pytest.mark.parametrize("value", [0.0, 0.1, -3.0, 60_000.0])
def test_constant_samples(value: float, mode: str) -> None:
    samples = np.full((3000, DIM), value, np.float32)
    books = train_books(samples, None, 2, ENTRIES, seed=3, mode=mode)  # type: ignore[arg-type]
    assert np.isfinite(books.entries).all()
    assert books.stages[1].error < (1e-6 if mode == "free" else 0.2)


def test_an_offset_costs_nothing() -> None:
    samples = vectors("gaussian", 20_000, DIM, 0)
    plain, moved = (np.sqrt(trained(part).stages[0].error) for part in (samples, samples + 100))
    sizes = [np.square(part).sum() ** 0.5 for part in (samples, samples + 100)]
    assert moved * sizes[1] < plain * sizes[0] * 1.05


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    samples, weights = vectors("gaussian", 900, DIM, 0), np.ones(900, np.float32)
    weights[5] = bad
    with pytest.raises(UsageError, match="weights of samples"):
        train_books(samples, weights, 1, ENTRIES, seed=3)
    samples[700, 3] = bad
    with pytest.raises(UsageError, match="NaN or infinity"):
        trained(samples)


def test_other_requests_that_cannot_be_met() -> None:
    samples = vectors("gaussian", 900, DIM, 0)
    with pytest.raises(UsageError, match="up to 65504"):
        trained(samples * 1e6)
    with pytest.raises(UsageError, match=r"\(0, 16\)"):
        trained(samples[:0])
    with pytest.raises(UsageError, match="one each"):
        train_books(samples, np.ones(899, np.float32), 1, ENTRIES, seed=3)
    for weights in (np.zeros(900, np.float32), np.linspace(-1, 1, 900, dtype=np.float32)):
        with pytest.raises(UsageError, match="none negative"):
            train_books(samples, weights, 1, ENTRIES, seed=3)
    with pytest.raises(UsageError, match="free or simvq"):
        train_books(samples, None, 1, ENTRIES, seed=3, mode="other")  # type: ignore[arg-type]


def test_memory_is_a_copy_of_the_samples_and_some_blocks() -> None:
    samples = vectors("gaussian", 60_000, 8, 0)
    tracemalloc.start()
    trained(samples, 1, 256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * samples.nbytes + (8 << 20)  # all distances would take 61 MB


def test_progress_tells_of_stages() -> None:
    told: list[tuple[str, int, int | None]] = []
    samples = vectors("gaussian", 500, DIM, 0)
    train_books(samples, None, 2, 8, seed=3, progress=lambda *words: told.append(words))
    assert told == [("codebooks", done, 2) for done in range(3)]


class OtherArrays:
    """numpy under another name: what is done with CuPy's arrays, without a GPU."""

    def __getattr__(self, name: str) -> Any:
        assert name in COMMON, f"{name}: has CuPy got it?"
        return getattr(np, name)

    def asnumpy(self, array: np.ndarray) -> np.ndarray:
        return array.copy()


COMMON = ("arange", "asarray", "bincount", "concatenate", "empty", "matmul", "ones", "square")


@pytest.mark.parametrize("mode", ["free", "simvq"])
def test_sums_made_by_a_product_train_books_as_good(mode: str) -> None:
    samples = vectors("clusters", 8000, DIM, 0)
    weights = np.random.default_rng(2).random(len(samples), np.float32)
    books = [
        train_books(samples, weights, 2, ENTRIES, seed=3, xp=xp, mode=mode)  # type: ignore[arg-type]
        for xp in (np, OtherArrays())
    ]
    errors = [np.sqrt([stage.error for stage in part.stages]) for part in books]
    np.testing.assert_allclose(errors[1], errors[0], rtol=0.05)


def test_threads_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = vectors("gaussian", 50_000, DIM, 0)
    books = []
    for threads in (1, 5):
        monkeypatch.setattr(codebooks, "available_threads", lambda count=threads: count)
        books.append(trained(samples).entries.tobytes())
    assert books[0] == books[1]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["free", "simvq"])
def test_a_gpu_trains_books_as_good_and_always_the_same(mode: str) -> None:
    import cupy

    samples = vectors("clusters", 100_000, DIM, 0)
    weights = np.random.default_rng(2).random(len(samples), np.float32)
    moved, heavy = cupy.asarray(samples), cupy.asarray(weights)
    host, first, again = (
        train_books(part, weight, STAGES, ENTRIES, seed=3, xp=xp, mode=mode)  # type: ignore[arg-type]
        for xp, part, weight in (
            (np, samples, weights),
            (cupy, samples, weights),
            (cupy, moved, heavy),
        )
    )
    assert first.entries.tobytes() == again.entries.tobytes() and first.stages == again.stages
    errors = [np.sqrt([stage.error for stage in books.stages]) for books in (host, first)]
    np.testing.assert_allclose(errors[1], errors[0], rtol=0.05)


@pytest.mark.gpu
def test_ties_go_to_the_lowest_index_on_a_gpu() -> None:
    import cupy

    book = vectors("gaussian", ENTRIES, DIM, 0).astype(np.float16)
    book[40:] = book[:24]
    data = cupy.ones((300_000, DIM + 1), np.float32)
    data[:, :-1] = cupy.asarray(vectors("gaussian", len(data), DIM, 1))
    assert Rows(cupy, data, None).codes(book).max() < 40
