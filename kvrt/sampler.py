"""From logits to the next token: llama.cpp's sampling stages, in its order.

Bias, penalties, top-k, top-p, min-p, temperature, draw. top-p and min-p look at the probabilities
before temperature. Ties are broken by the lower id, and the draw is one Philox uniform searched in
a float64 cumulative sum, so a seed gives the same tokens on every platform.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import KvrtError, UsageError

_GROWTH = 8  # how much wider top-p looks when the candidates so far do not reach it
_FIRST_CANDIDATES = 256


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; llama.cpp's names, ranges and defaults.

    temperature: 0 takes the most probable token, whatever the filters say; larger is more random.
    top_k: keep the k most probable; 0 or less keeps all.
    top_p: keep the most probable until their sum reaches it; 1 keeps all.
    min_p: drop what is less probable than this share of the most probable; 0 keeps all.
    repeat_penalty: divides positive, multiplies negative logits of recent tokens; 1 is off.
    repeat_last_n: how many recent tokens the penalties look at; 0 none, -1 all.
    presence_penalty, frequency_penalty: subtracted once, and per occurrence; 0 is off.
    logit_bias: (token id, added to its logit); -inf bans a token.
    seed: 0 to 2**64 - 1; None or -1 draws one.

    Raises UsageError for a value outside its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, math.inf, "0 or more")
        _check_number("top_p", self.top_p, 0.0, 1.0, "0 to 1")
        _check_number("min_p", self.min_p, 0.0, 1.0, "0 to 1")
        _check_number("repeat_penalty", self.repeat_penalty, 5e-324, math.inf, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -math.inf, math.inf, "a finite number")
        _check_integer("top_k", self.top_k, None, None, "a whole number, 0 or less for all")
        _check_integer("repeat_last_n", self.repeat_last_n, -1, None, "-1 (all), 0 (off) or more")
        if self.seed is not None:
            _check_integer("seed", self.seed, -1, 2**64 - 1, "0 to 2**64 - 1, or -1 for any")
        for entry in self.logit_bias:
            if not isinstance(entry, tuple) or len(entry) != 2:
                raise UsageError(f"logit_bias must hold pairs (token id, bias), got {entry!r}")
            _check_integer("logit_bias token id", entry[0], 0, None, "0 or more")
            if entry[1] != -math.inf:
                expected = "a finite number, or -inf to ban the token"
                _check_number("logit_bias", entry[1], -math.inf, math.inf, expected)

    @classmethod
    def greedy(cls) -> SamplingParams:
        """Always the most probable token, without penalties."""
        return cls(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)

    @property
    def penalizes(self) -> bool:
        """Whether recent tokens change the logits."""
        return self.repeat_last_n != 0 and (
            (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        )


class Sampler:
    """Draws tokens. `seed` is the one in use, so that a run without a given seed can be repeated.

    One sampler is one sequence of random numbers: one uniform per drawn token, none at
    temperature 0.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        given = params.seed
        self.seed: int = secrets.randbits(64) if given is None or given < 0 else given
        self._random = np.random.Generator(np.random.Philox(key=self.seed))

    def sample(self, logits: NDArray[np.float32], recent: Sequence[int]) -> int:
        """The next token.

        logits: (vocab_size,) f32, left as they are; -inf bans a token.
        recent: the tokens so far, prompt included; the penalties look at the last of them.

        UsageError for a logit_bias outside the vocabulary; KvrtError for NaN or infinite logits,
        or when no token is left.
        """
        params = self.params
        logits = _with_bias(logits, params.logit_bias)  # (vocab_size,)
        if params.penalizes:
            logits = _with_penalties(logits, recent, params)  # (vocab_size,)
        best = int(logits.argmax())  # the first of equals; a NaN, if there is one
        _check_best(float(logits[best]))
        if params.temperature == 0:
            return best
        ids, values = _candidates(logits, params)  # (n,) ids or None, (n,) f64 ready to draw from
        drawn = self._draw(values)
        return drawn if ids is None else int(ids[drawn])

    @property
    def takes_best(self) -> bool:
        """Whether the likeliest token is always it, so that nobody else's logit matters."""
        params = self.params
        return params.temperature == 0 and not params.logit_bias and not params.penalizes

    def take(self, best: int, logit: float) -> int:
        """The next token where `takes_best`: the likeliest, which has this logit; as `sample`."""
        _check_best(logit)
        return best

    def _draw(self, values: NDArray[np.float64]) -> int:
        """An index with probability softmax(values / temperature)."""
        with np.errstate(over="ignore"):  # a tiny temperature: -inf, so probability 0, is right
            scaled = (values - values.max()) / self.params.temperature  # (n,) f64
        cumulative = np.cumsum(np.exp(scaled))  # (n,) f64
        target = self._random.random() * cumulative[-1]
        index = int(np.searchsorted(cumulative, target, side="right"))
        if index < len(cumulative):
            return index
        return int(np.flatnonzero(scaled > -math.inf)[-1])  # the product rounded up to the sum


def _candidates(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.intp] | None, NDArray[np.float64]]:
    """What top-k, top-p and min-p leave: ids and their logits (n,) f64.

    ids is None if no filter is on: then the logits are all of them, in order.
    """
    size = len(logits)
    keep = params.top_k if 0 < params.top_k < size else size
    if keep < size:
        ids = _top(logits, keep)  # (keep,)
        values = logits[ids].astype(np.float64)
        count = _top_p_count(values, _weights(values).sum(), params.top_p)
    elif params.top_p < 1:
        ids, count = _widen(logits, params.top_p)
        values = logits[ids].astype(np.float64)
    elif params.min_p > 0:
        floor = float(logits.max()) + math.log(params.min_p)
        # In order of id, which the draw does not mind; f32 cannot tell the floor itself.
        below = np.nextafter(np.float32(floor), np.float32(-np.inf))
        ids = np.flatnonzero(logits >= below)  # (n or more,)
        values = logits[ids].astype(np.float64)
        within = values >= floor
        return ids[within], values[within]
    else:
        return None, logits.astype(np.float64)
    ids, values = ids[:count], values[:count]
    if params.min_p > 0:
        count = int(np.count_nonzero(values >= values[0] + math.log(params.min_p)))
        ids, values = ids[:count], values[:count]
    return ids, values


def _widen(logits: NDArray[np.float32], top_p: float) -> tuple[NDArray[np.intp], int]:
    """top-p over the whole vocabulary, sorting only as many as it takes."""
    total = _weights(logits.astype(np.float64)).sum()
    keep = min(_FIRST_CANDIDATES, len(logits))
    while True:
        ids = _top(logits, keep)
        count = _top_p_count(logits[ids].astype(np.float64), total, top_p)
        if count < keep or keep == len(logits):
            return ids, count
        keep = min(keep * _GROWTH, len(logits))


def _top_p_count(values: NDArray[np.float64], total: float, top_p: float) -> int:
    """How many of the sorted values it takes to reach top_p of `total`; all if they do not."""
    if top_p >= 1:
        return len(values)
    reached = np.cumsum(_weights(values)) >= top_p * total
    return int(reached.argmax()) + 1 if reached[-1] else len(values)


def _weights(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(values - values.max())  # (n,) f64, the largest is 1
    return weights


def _top(logits: NDArray[np.float32], keep: int) -> NDArray[np.intp]:
    """Ids of the `keep` largest, largest first, equals by id."""
    size = len(logits)
    if keep < size:
        # The smallest kept value, then all ids that reach it: argpartition would choose among
        # equals as the platform likes.
        threshold = np.partition(logits, size - keep)[size - keep]
        ids = np.flatnonzero(logits >= threshold)  # (keep or more,)
    else:
        ids = np.arange(size)
    order = np.argsort(-logits[ids], kind="stable")[:keep]
    return ids[order]


def _with_bias(
    logits: NDArray[np.float32], bias: tuple[tuple[int, float], ...]
) -> NDArray[np.float32]:
    if not bias:
        return logits
    logits = logits.copy()
    with np.errstate(over="ignore"):  # an infinite sum is reported when a token is chosen
        for token, added in bias:
            if token >= len(logits):
                raise UsageError(f"logit_bias token id is {token}, expected 0 to {len(logits) - 1}")
            logits[token] += added
    return logits


def _with_penalties(
    logits: NDArray[np.float32], recent: Sequence[int], params: SamplingParams
) -> NDArray[np.float32]:
    window = recent if params.repeat_last_n < 0 else recent[-params.repeat_last_n :]
    if not len(window):
        return logits
    ids, counts = np.unique(np.asarray(window, dtype=np.int64), return_counts=True)
    if ids[0] < 0 or ids[-1] >= len(logits):
        bad = ids[0] if ids[0] < 0 else ids[-1]
        raise UsageError(f"recent token id is {bad}, expected 0 to {len(logits) - 1}")
    values = logits[ids].astype(np.float64)  # (n,)
    logits = logits.copy()
    with np.errstate(over="ignore"):  # an infinite logit is reported when a token is chosen
        repeat = params.repeat_penalty
        values = np.where(values > 0, values / repeat, values * repeat)
        values -= counts * params.frequency_penalty + params.presence_penalty
        logits[ids] = values
    return logits


def _check_best(value: float) -> None:
    if math.isnan(value):
        raise KvrtError("the model gave NaN logits; no token can be chosen")
    if value == -math.inf:
        raise KvrtError("every logit is -inf: no token is left to choose")
    if value == math.inf:
        raise KvrtError("the model gave an infinite logit; no token can be chosen")


def _check_number(name: str, value: Any, low: float, high: float, expected: str) -> None:
    is_number = isinstance(value, (int, float, np.floating, np.integer))
    is_number = is_number and not isinstance(value, bool)
    if not is_number or not _is_finite(value) or not low <= value <= high:
        raise UsageError(f"{name} is {value!r:.60}, expected {expected}")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _check_integer(name: str, value: Any, low: int | None, high: int | None, expected: str) -> None:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or (low is not None and value < low) or (high is not None and value > high):
        raise UsageError(f"{name} is {value!r}, expected {expected}")
