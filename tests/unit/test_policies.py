"""Policies: weights, distortions and head budgets, against plain loops."""

import numpy as np
import pytest

from kvrt.trizone.policies import POLICIES, query_energy

RDKV, PAPER = POLICIES["rdkv"], POLICIES["rdkv:paper"]
BITS = (2, 4, 8)


def attention(q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Softmax weights (n, heads, T) of the last n queries (n, heads, dim), causal."""
    n, heads, dim = q.shape
    tokens, kv_heads, _ = keys.shape
    out = np.zeros((n, heads, tokens))
    for i in range(n):
        seen = tokens - n + i + 1
        for h in range(heads):
            scores = keys[:seen, h // (heads // kv_heads)] @ q[i, h] / np.sqrt(dim)
            out[i, h, :seen] = np.exp(scores - scores.max())
            out[i, h] /= out[i, h].sum()
    return out


def received(tokens: int, queries: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The attention (n, 4, tokens) of n queries, and its sums for 2 KV heads, (2, tokens) f32."""
    rng = np.random.default_rng(seed)
    q, keys = rng.standard_normal((queries, 4, 8)), rng.standard_normal((tokens, 2, 8))
    weights = attention(2 * q, keys)
    return weights, weights.sum(0).reshape(2, 2, tokens).sum(1).astype(np.float32)


def neighbours(x: np.ndarray, width: int) -> np.ndarray:
    """Means over `width` neighbours of the last axis, mirrored at the ends."""
    half = width // 2
    padded = np.pad(x, ((0, 0), (half, half)), mode="reflect")
    return np.stack([padded[:, k : k + width].mean(1) for k in range(x.shape[1])], axis=1)


@pytest.mark.parametrize("name", ["rdkv", "rdkv:paper", "snapkv", "adakv", "h2o"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 31, 32, 33, 90])
def test_weights_are_the_attention_of_the_queries_that_see_a_token(name: str, tokens: int) -> None:
    policy = POLICIES[name]
    asked = policy.asks(tokens)
    assert asked == (tokens if name == "h2o" else min(tokens, 32))
    each, sums = received(tokens, asked)
    want = each.reshape(asked, 2, 2, tokens).sum((0, 2))  # (kv_heads, tokens)
    if name not in ("snapkv", "adakv"):
        last = np.arange(tokens - asked, tokens)  # positions of the queries
        want /= [(last >= t).sum() for t in range(tokens)]
    candidates = slice(min(4, tokens - 1), max(tokens - 8, min(4, tokens - 1) + 1))
    if name == "rdkv":  # half of a weight is shared among 15 candidates, and each gets a floor
        want = want[:, candidates]
        want = (want + neighbours(want, 15)) / 2
        want += 0.3 * want.mean(1, keepdims=True)
    else:
        want = (want if name == "h2o" else neighbours(want, 5))[:, candidates]
    got = policy.token_weights(np, sums, candidates)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)


def value_errors(tokens: int, seed: int) -> np.ndarray:
    """(4, 2, tokens) f32, as a backend measures them: each width's error under the one before."""
    rng = np.random.default_rng(seed)
    shares = rng.uniform(0.01, 0.3, (4, 2, tokens))
    shares[0] *= 1000
    return shares.cumprod(axis=0).astype(np.float32)


def test_rdkv_counts_a_token_by_its_relative_errors() -> None:
    weights = np.random.default_rng(0).lognormal(0, 3, (2, 40)).astype(np.float32)
    errors = value_errors(40, 1)
    errors[:, 1, 7] = 0  # a token whose values are 0 needs no byte
    got = RDKV.token_distortion(np, weights, errors)
    assert got.shape == (len(RDKV.widths), 2, 40) and got.dtype == np.float32
    want = weights * np.insert(errors[1:] / np.where(errors[0] > 0, errors[0], 1), 0, 1, axis=0)
    want[:, 1, 7] = 0
    np.testing.assert_allclose(got[:4], want, rtol=1e-6)
    assert not got[4].any()


def test_rdkv_counts_a_channel_by_what_its_errors_add_to_scores() -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((32, 4, 8)).astype(np.float32)
    keys, wrong = rng.standard_normal((2, 50, 2, 8))  # (tokens, kv_heads, dim) each
    kept = np.array([50, 20])
    inside = np.arange(50)[:, None] < kept  # (tokens, kv_heads)
    errors = np.zeros((2, 8, 4))
    errors[:, :, 0] = (np.square(keys) * inside[:, :, None]).sum(0)
    for column, size in enumerate((0.3, 0.1, 0.01), start=1):
        errors[:, :, column] = (np.square(size * wrong) * inside[:, :, None]).sum(0)
    energy = query_energy(np, q, 2)
    assert energy.dtype == np.float32
    got = RDKV.channel_distortion(np, energy, errors, kept)
    assert got.shape == (len(RDKV.key_widths), 2, 8) and got.dtype == np.float32
    for head in range(2):
        queries = q[:, 2 * head : 2 * head + 2].reshape(-1, 8).astype(np.float64)
        for row, left in enumerate((keys, 0.3 * wrong, 0.1 * wrong, 0.01 * wrong, 0 * wrong)):
            # (queries, tokens, dim): what a channel's error adds to each score
            added = queries[:, None] * left[inside[:, head], head]
            np.testing.assert_allclose(got[row, head], np.square(added).mean((0, 1)), rtol=1e-6)


def quantized(x: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """x at one scale and minimum for each row along an axis."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    return np.rint((x - low) / scale) * scale + low


def test_the_papers_form_is_weight_times_sigma_times_a_power_of_two() -> None:
    """sigma = range / (2 sqrt 3): of V tokens as it is, of K channels relative to their size."""
    rng = np.random.default_rng(0)
    scale = rng.lognormal(0, 1, (2, 30, 1))
    values = rng.uniform(-1, 1, (2, 30, 4096)) * scale  # (kv_heads, tokens, dim)
    squared = [np.square(values).sum(2)]
    squared += [np.square(values - quantized(values, bits, 2)).sum(2) for bits in BITS]
    weights = rng.lognormal(0, 2, (2, 30)).astype(np.float32)
    got = PAPER.token_distortion(np, weights, np.stack(squared).astype(np.float32))
    assert got.dtype == np.float32
    for row, width in enumerate(PAPER.widths):
        np.testing.assert_allclose(got[row], got[0] * 2.0**-width, rtol=1e-6)
    shares = got[0] / (weights * np.ptp(values, axis=2))
    np.testing.assert_allclose(shares, shares.mean(), rtol=0.03)

    keys = rng.uniform(-1, 1, (2, 16, 4096)) + rng.uniform(0, 3, (2, 16, 1))  # (..., dim, tokens)
    columns = [np.square(keys).sum(2)]
    columns += [np.square(keys - quantized(keys, bits, 2)).sum(2) for bits in BITS]
    energy = rng.lognormal(0, 1, (2, 16)).astype(np.float32)
    kept = np.array([4096, 4096])
    got = PAPER.channel_distortion(np, energy, np.stack(columns, axis=-1), kept)
    assert got.dtype == np.float32
    for row, width in enumerate(PAPER.key_widths):
        np.testing.assert_allclose(got[row], got[0] * 2.0**-width, rtol=1e-6)
    mean_square = np.square(keys).mean(2)
    sigma = np.ptp(keys, axis=2) / (2 * np.sqrt(3)) / np.sqrt(mean_square)
    np.testing.assert_allclose(got[0], energy * mean_square * sigma / 255, rtol=0.03)


@pytest.mark.parametrize("name", ["rdkv", "rdkv:paper"])
def test_a_head_that_keeps_no_token_has_channels_without_distortion(name: str) -> None:
    errors, kept = np.zeros((2, 8, 4)), np.zeros(2, np.int64)
    got = POLICIES[name].channel_distortion(np, np.ones((2, 8), np.float32), errors, kept)
    assert got.shape == (5, 2, 8) and not got.any()


@pytest.mark.parametrize("name", ["snapkv", "adakv", "h2o"])
def test_evictions_keep_a_token_whole_or_not_at_all(name: str) -> None:
    policy = POLICIES[name]
    assert (policy.widths, policy.key_widths) == ((0, 16), (16,))
    weights = np.random.default_rng(0).lognormal(0, 3, (2, 40)).astype(np.float32)
    got = policy.token_distortion(np, weights, value_errors(40, 1))
    np.testing.assert_array_equal(got, np.stack([weights, 0 * weights]))
    errors = np.ones((2, 8, 4))
    left = policy.channel_distortion(np, np.ones((2, 8), np.float32), errors, np.array([3, 3]))
    assert left.shape == (1, 2, 8) and not left.any()


@pytest.mark.parametrize("name", ["rdkv", "rdkv:paper", "snapkv", "h2o"])
def test_budgets_of_heads_stay_as_they_are(name: str) -> None:
    weights = np.random.default_rng(0).lognormal(0, 3, (3, 40)).astype(np.float32)
    budgets = np.array([500, 500, 500])
    got = POLICIES[name].head_budgets(np, weights, budgets, 10)
    np.testing.assert_array_equal(got, [500, 500, 500])


def best_by_head(weights: np.ndarray, total: int) -> np.ndarray:
    """How many of the `total` largest each head has; of equal ones the first count."""
    heads, n = weights.shape
    order = sorted((-weights[h, t], h, t) for h in range(heads) for t in range(n))
    return np.bincount([h for _, h, _ in order[:total]], minlength=heads)


@pytest.mark.parametrize("values", [3, 10_000])
@pytest.mark.parametrize("tokens", [0, 1, 7, 20, 39, 40, 60])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_adakv_gives_heads_what_they_have_of_the_best(heads: int, tokens: int, values: int) -> None:
    """With few values there are ties. What is no whole token stays where it was."""
    rng = np.random.default_rng(heads * 100 + tokens)
    weights = rng.integers(0, values, (heads, 40)) * np.linspace(1, 3, heads).round()[:, None]
    budgets = np.full(heads, 512 * tokens + 300)
    got = POLICIES["adakv"].head_budgets(np, weights.astype(np.float32), budgets, 512)
    assert got.sum() == budgets.sum()
    mean = min(int(budgets.sum()) // (512 * heads), 40)
    share = 0.8 * best_by_head(weights, heads * mean) + 0.2 * mean  # tokens, with fractions
    given = mean + (got - budgets) / 512
    np.testing.assert_array_equal(given, given.round())
    assert (np.abs(given - share) < 1).all()
    assert (given <= 40).all()


def test_adakv_rounds_to_the_nearest_share_the_first_of_equals_up() -> None:
    weights = np.array([[9, 8, 7, 6], [5, 1, 1, 1], [4, 1, 1, 1]], np.float32)
    # Of the best 6, the heads have 4, 1 and 1: 3.6, 1.2 and 1.2 tokens with the floor.
    got = POLICIES["adakv"].head_budgets(np, weights, np.array([20, 20, 20]), 10)
    np.testing.assert_array_equal(got, [40, 10, 10])
    # Of the best 3 the first has all: 2.6, 0.2 and 0.2.
    got = POLICIES["adakv"].head_budgets(np, weights, np.array([10, 10, 10]), 10)
    np.testing.assert_array_equal(got, [30, 0, 0])
    # Of the best 6, the heads have 0, 0 and 6: 0.4, 0.4 and 5.2.
    weights = np.array([[1] * 6, [1] * 6, [2] * 6], np.float32)
    got = POLICIES["adakv"].head_budgets(np, weights, np.array([20, 20, 20]), 10)
    np.testing.assert_array_equal(got, [10, 0, 50])


def test_adakv_takes_broken_weights_for_none() -> None:
    weights = np.array([[np.nan] * 4, [1, 2, 3, 4]], np.float32)
    got = POLICIES["adakv"].head_budgets(np, weights, np.array([20, 20]), 10)
    np.testing.assert_array_equal(got, [0, 40])
