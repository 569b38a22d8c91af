"""What every choice of a token must satisfy, whatever the logits and the settings."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrt.sampler import Sampler, SamplingParams

# Multiples of 1/8 make ties common, and sums of them exact.
LOGITS = st.lists(st.integers(-80, 80).map(lambda n: n / 8), min_size=1, max_size=40)
RECENT = st.lists(st.integers(0, 39), max_size=20)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(-1, 50),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    repeat_penalty=st.floats(0.5, 2.0),
    repeat_last_n=st.integers(-1, 10),
    presence_penalty=st.floats(-1.0, 1.0),
    frequency_penalty=st.floats(-1.0, 1.0),
    seed=st.integers(0, 2**64 - 1),
)


def sample(params: SamplingParams, logits: list[float], recent: list[int]) -> int:
    known = [token for token in recent if token < len(logits)]
    return Sampler(params).sample(np.array(logits, np.float32), known)


@settings(deadline=None)
@given(PARAMS, LOGITS, RECENT)
def test_a_token_of_the_vocabulary_and_the_same_each_time(
    params: SamplingParams, logits: list[float], recent: list[int]
) -> None:
    token = sample(params, logits, recent)
    assert 0 <= token < len(logits)
    assert token == sample(params, logits, recent)


@settings(deadline=None)
@given(LOGITS, st.integers(0, 50), st.integers(0, 2**64 - 1))
def test_top_k_keeps_the_k_largest(logits: list[float], k: int, seed: int) -> None:
    params = SamplingParams(temperature=5.0, top_k=k, top_p=1.0, min_p=0.0, seed=seed)
    token = sample(params, logits, [])
    better = [i for i, value in enumerate(logits) if (-value, i) < (-logits[token], token)]
    assert k == 0 or len(better) < k


@settings(deadline=None)
@given(LOGITS, st.floats(0.0, 0.999), st.integers(0, 2**64 - 1), st.booleans())
def test_what_is_above_a_token_does_not_reach_top_p(
    logits: list[float], top_p: float, seed: int, with_top_k: bool
) -> None:
    """The kept mass is at least top_p, and no token stays that is not needed for it."""
    top_k = len(logits) - 1 if with_top_k else 0
    params = SamplingParams(temperature=5.0, top_k=top_k, top_p=top_p, min_p=0.0, seed=seed)
    token = sample(params, logits, [])
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = [math.exp(logits[i] - max(logits)) for i in order[: top_k or None]]
    above = sum(weights[: order.index(token)]) / sum(weights)
    assert above < top_p + 1e-9 or token == order[0]  # rounding of two ways to sum


@settings(deadline=None)
@given(LOGITS, st.floats(0.01, 1.0), st.integers(0, 2**64 - 1))
def test_min_p_keeps_the_share_of_the_best(logits: list[float], min_p: float, seed: int) -> None:
    params = SamplingParams(temperature=5.0, top_k=0, top_p=1.0, min_p=min_p, seed=seed)
    token = sample(params, logits, [])
    assert math.exp(logits[token] - max(logits)) >= min_p * (1 - 1e-9)


@settings(deadline=None)
@given(LOGITS, st.integers(0, 50), st.floats(0, 1), st.floats(0, 1))
def test_temperature_zero_is_the_first_maximum(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=0.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assert sample(params, logits, []) == logits.index(max(logits))


@settings(deadline=None)
@given(PARAMS, LOGITS, RECENT)
def test_logits_and_history_stay_as_they_are(
    params: SamplingParams, logits: list[float], recent: list[int]
) -> None:
    array = np.array(logits, np.float32)
    known = [token for token in recent if token < len(logits)]
    before, history = array.copy(), list(known)
    Sampler(params).sample(array, known)
    np.testing.assert_array_equal(array, before)
    assert known == history
