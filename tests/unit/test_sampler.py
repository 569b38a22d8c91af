"""Each stage against a naive one, the draw against its distribution, bad values refused."""

import math
from typing import Any

import numpy as np
import pytest

from kvrt.errors import KvrtError, UsageError
from kvrt.sampler import Sampler, SamplingParams

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
GRID = 1000


class Uniform:
    """Every (i + 1/2) / GRID once: the shares of the draws are the probabilities, to 1 / GRID."""

    def __init__(self) -> None:
        self.drawn = 0

    def random(self) -> float:
        self.drawn += 1
        return (self.drawn - 0.5) / GRID


def shares(logits: list[float], recent: tuple[int, ...] = (), **values: Any) -> list[float]:
    """How often each token is drawn, over all possible draws."""
    sampler = Sampler(SamplingParams(**{**OFF, **values}))
    sampler._random = Uniform()  # type: ignore[assignment]
    array = np.array(logits, np.float32)  # (vocab_size,)
    drawn = [sampler.sample(array, recent) for _ in range(GRID)]
    return [drawn.count(token) / GRID for token in range(len(logits))]


def softmax(logits: list[float], kept: set[int], temperature: float = 1.0) -> list[float]:
    largest = max(logits[i] for i in kept)
    weights = [
        math.exp((value - largest) / temperature) if i in kept else 0.0
        for i, value in enumerate(logits)
    ]
    return [weight / sum(weights) for weight in weights]


def top_k_kept(logits: list[float], k: int) -> set[int]:
    return set(sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: k if k > 0 else None])


def top_p_kept(logits: list[float], kept: set[int], p: float) -> set[int]:
    probabilities = softmax(logits, kept)
    chosen: set[int] = set()
    for i in sorted(kept, key=lambda i: (-logits[i], i)):
        chosen.add(i)
        if p < 1 and sum(probabilities[j] for j in chosen) >= p:
            break
    return chosen


def min_p_kept(logits: list[float], kept: set[int], p: float) -> set[int]:
    probabilities = softmax(logits, kept)
    return {i for i in kept if probabilities[i] >= p * max(probabilities)}


def naive(
    logits: list[float], k: int, top_p: float, min_p: float, temperature: float
) -> list[float]:
    kept = min_p_kept(logits, top_p_kept(logits, top_k_kept(logits, k), top_p), min_p)
    return softmax(logits, kept, temperature)


LOGITS = [0.3, 2.0, -1.0, 2.0, 1.9, -4.0, 0.0, 1.0, -0.5, 3.0]


@pytest.mark.parametrize(
    ("k", "top_p", "min_p", "temperature"),
    [
        (0, 1.0, 0.0, 1.0),
        (-3, 1.0, 0.0, 0.5),
        (99, 1.0, 0.0, 3.0),
        (1, 1.0, 0.0, 1.0),
        (2, 1.0, 0.0, 1.0),  # cuts between two equal logits: the lower id stays
        (5, 1.0, 0.0, 0.7),
        (0, 0.8, 0.0, 1.0),
        (0, 0.0, 0.0, 1.0),
        (0, 1.0, 0.3, 1.0),
        (0, 1.0, 1.0, 1.0),
        (6, 0.9, 0.2, 1.3),
        (0, 0.9, 0.4, 0.4),
        (6, 1.0, 0.37, 1.0),  # 2.0 is just below 0.37 of 3.0
        (0, 1.0, 0.37, 1.0),
    ],
)
def test_stages_against_naive(k: int, top_p: float, min_p: float, temperature: float) -> None:
    got = shares(LOGITS, top_k=k, top_p=top_p, min_p=min_p, temperature=temperature)
    want = naive(LOGITS, k, top_p, min_p, temperature)
    # Each interval of the cumulative sum holds its share of the grid, give or take one at each end.
    assert max(abs(a - b) for a, b in zip(got, want)) <= 1.5 / GRID
    assert all(a == 0 for a, b in zip(got, want) if b == 0)


def test_filters_look_at_probabilities_before_temperature() -> None:
    cold = shares(LOGITS, min_p=0.3, temperature=0.3)
    hot = shares(LOGITS, min_p=0.3, temperature=30.0)
    assert [share > 0 for share in cold] == [share > 0 for share in hot]
    assert hot[9] < cold[9]


def test_top_p_widens_until_it_is_reached() -> None:
    """The first candidates hold 256 of 5000 equal tokens: not the 0.5 that is asked for."""
    sampler = Sampler(SamplingParams(**{**OFF, "top_p": 0.5}))
    sampler._random = Uniform()  # type: ignore[assignment]
    drawn = [sampler.sample(np.zeros(5000, np.float32), ()) for _ in range(GRID)]
    # Draw i of GRID falls into token (i + 1/2) * 2500 / GRID of the 2500 that are kept.
    assert drawn == [(2 * i + 1) * 2500 // (2 * GRID) for i in range(GRID)]


def greedy(logits: list[float], recent: tuple[int, ...] = (), **values: Any) -> int:
    params = SamplingParams(**{"temperature": 0.0, **values})
    return Sampler(params).sample(np.array(logits, np.float32), recent)


def test_temperature_zero_is_argmax() -> None:
    assert greedy([1.0, 3.0, 3.0, 2.0]) == 1  # the lower of equals
    assert greedy([1.0, 3.0, 3.0, 2.0], top_k=1, top_p=0.0, min_p=1.0) == 1
    assert greedy([1.0, 3.0], logit_bias=((0, 2.5),)) == 0
    assert greedy([1.0, 3.0], (1,), presence_penalty=2.5) == 0
    assert SamplingParams.greedy().temperature == 0
    assert not SamplingParams.greedy().penalizes


def test_penalties_against_naive() -> None:
    logits, recent = [2.0, -2.0, 1.0, 0.5, -0.25], (0, 1, 1, 1, 3, 4, 0)
    for last_n in (-1, 3, 1, 0, 100):
        window = recent if last_n < 0 else recent[len(recent) - min(last_n, len(recent)) :]
        expected = list(logits)
        for i in set(window):
            value = expected[i]
            value = value / 1.3 if value > 0 else value * 1.3
            expected[i] = value - 0.4 * window.count(i) - 0.2
        got = shares(
            logits,
            recent,
            repeat_penalty=1.3,
            frequency_penalty=0.4,
            presence_penalty=0.2,
            repeat_last_n=last_n,
        )
        want = softmax(expected, set(range(5)))
        assert max(abs(a - b) for a, b in zip(got, want)) <= 1.5 / GRID, last_n


def test_bias() -> None:
    got = shares([0.0, 0.0, 0.0], logit_bias=((0, math.log(2.0)), (2, -math.inf)))
    assert got == pytest.approx([2 / 3, 1 / 3, 0], abs=1.5 / GRID)
    with pytest.raises(UsageError, match="logit_bias token id is 3, expected 0 to 2"):
        greedy([0.0, 0.0, 0.0], logit_bias=((3, 1.0),))


def test_logits_are_not_modified() -> None:
    logits = np.arange(50, dtype=np.float32)
    kept = logits.copy()
    logits.setflags(write=False)
    Sampler(SamplingParams(repeat_penalty=2.0, logit_bias=((3, 1.0),))).sample(logits, [1, 2, 3])
    np.testing.assert_array_equal(logits, kept)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("logits", "words"),
    [
        ([0.0, math.nan, 1.0], "NaN"),
        ([-math.inf, -math.inf], "no token is left"),
        ([0.0, math.inf], "infinite"),
    ],
)
def test_bad_logits(temperature: float, logits: list[float], words: str) -> None:
    with pytest.raises(KvrtError, match=words) as caught:
        greedy(logits, temperature=temperature)
    assert caught.value.exit_code == 1


def test_all_banned() -> None:
    with pytest.raises(KvrtError, match="no token is left"):
        greedy([0.0, 1.0], logit_bias=((0, -math.inf), (1, -math.inf)))


def test_overflow_of_a_penalty_is_an_error_not_a_warning() -> None:
    with pytest.raises(KvrtError, match="infinite"):
        greedy([1.0, 2.0], (1,), repeat_penalty=1e-320)


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    got = shares([0.0, 1.0, -math.inf], temperature=temperature)
    assert got == ([0, 1, 0] if temperature < 1 else [0.5, 0.5, 0])


@pytest.mark.parametrize("draw", [0.0, 1.0])  # 1: the product with the sum can round up to it
def test_banned_tokens_are_never_drawn_even_at_the_ends(draw: float) -> None:
    class Fixed:
        def random(self) -> float:
            return draw

    sampler = Sampler(SamplingParams(**OFF))
    sampler._random = Fixed()  # type: ignore[assignment]
    logits = np.array([-np.inf, 0.0, 0.0, -np.inf], np.float32)
    assert sampler.sample(logits, ()) == (1 if draw == 0 else 2)


def test_seed_repeats_on_every_platform() -> None:
    logits = (np.arange(1000) * 7919 % 1000 / 100).astype(np.float32)  # (1000,) exact inputs
    sampler = Sampler(SamplingParams(seed=1234))
    drawn = [sampler.sample(logits, ()) for _ in range(10)]
    assert drawn == [531, 741, 25, 531, 741, 272, 593, 605, 963, 605]
    assert sampler.seed == 1234


def test_a_drawn_seed_can_be_used_again() -> None:
    logits = np.zeros(1000, np.float32)
    for given in (None, -1):
        first = Sampler(SamplingParams(seed=given, **OFF))
        again = Sampler(SamplingParams(seed=first.seed, **OFF))
        assert [first.sample(logits, ()) for _ in range(5)] == [
            again.sample(logits, ()) for _ in range(5)
        ]
    assert Sampler(SamplingParams()).seed != Sampler(SamplingParams()).seed


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, "0 or more"),
        ("temperature", math.nan, "0 or more"),
        ("temperature", math.inf, "0 or more"),
        ("temperature", "hot", "0 or more"),
        ("temperature", True, "0 or more"),
        ("top_p", 1.01, "0 to 1"),
        ("top_p", -0.5, "0 to 1"),
        ("min_p", 2, "0 to 1"),
        ("min_p", math.nan, "0 to 1"),
        ("repeat_penalty", 0.0, "above 0"),
        ("repeat_penalty", -1.0, "above 0"),
        ("presence_penalty", math.inf, "a finite number"),
        ("frequency_penalty", math.nan, "a finite number"),
        ("top_k", 1.5, "a whole number"),
        ("repeat_last_n", -2, "-1"),
        ("seed", -2, r"0 to 2\*\*64 - 1"),
        ("seed", 2**64, r"0 to 2\*\*64 - 1"),
        ("seed", 1.0, r"0 to 2\*\*64 - 1"),
    ],
)
def test_values_out_of_range(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=f"^{name} is .*, expected {expected}") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "bias", [(1,), ((1, 2, 3),), ((-1, 0.0),), ((1, math.nan),), ((1, math.inf),)]
)
def test_bad_bias(bias: Any) -> None:
    with pytest.raises(UsageError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_recent_outside_the_vocabulary() -> None:
    for recent in ((5,), (-1,)):
        with pytest.raises(UsageError, match="recent token id"):
            greedy([0.0, 1.0], recent, repeat_penalty=1.1)


def test_defaults_are_llama_cpps() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.repeat_penalty, params.repeat_last_n) == (1.0, 64)
