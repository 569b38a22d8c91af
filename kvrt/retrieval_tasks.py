"""What retrieval is tested with: a number hidden in a text, or the value of one key among many.

An `Exercise` is a long context and what is asked of it, in the model's chat format. It follows from
the seed, its length, its depth and the number of its sample alone, so that every format gets the
same ones, whatever else is measured beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .errors import UnsupportedError, UsageError
from .haystack import filler, sentences
from .session import common_prefix

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

ANSWER_TOKENS = 12
"""An answer, once begun, has so many tokens at most; an exercise has room for them."""

_CITIES = (
    "Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Prague", "Lisbon", "Dublin", "Oslo",
    "Athens", "Warsaw", "Cairo", "Tokyo", "Sydney", "Boston", "Chicago", "Toronto", "Mumbai",
    "Nairobi", "Havana", "Lima", "Seoul", "Geneva",
)  # fmt: skip
# What is hidden, and how it is asked for.
_NEEDLES = (
    ("The special magic number for {city} is", "What is the special magic number for {city}?"),
    ("The secret code for {city} is", "What is the secret code for {city}?"),
    ("The access key for {city} is", "What is the access key for {city}?"),
)
_PAIR_QUESTION = "Which of these lines begin with {others} and {key}?"
_SHOWN = 4  # lines that an answer begins with
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
# So many at least, in any vocabulary.
_SENTENCE_TOKENS = 8  # of a sentence of the filler
_LINE_TOKENS = 4  # of a line of pairs


@dataclass(frozen=True)
class _Asked:
    """A question and its answer in words: what the answer begins with, and its number."""

    depth: float
    question: str
    begun: str
    number: str


_Write = Callable[[int], tuple[str, list[_Asked]]]
"""The context made of so many units (sentences, lines), and what is asked of it."""


@dataclass(frozen=True)
class Question:
    """One thing that is asked: the token ids of the whole prompt, and the number that answers it.

    The prompt begins the answer, so that the number is what comes next: small models ramble.
    `depth` is where the answer stands, from 0 (the context's beginning) to 100 (its end).
    """

    depth: float
    ids: Sequence[int]
    answer: str


@dataclass(frozen=True)
class Exercise:
    """Questions of one context, which is the first `shared` tokens of each of their prompts.

    `length`: the tokens that were asked for, which a prompt and its answer fill but for a rest.
    """

    length: int
    shared: int
    questions: Sequence[Question]


class Task(Protocol):
    """Makes exercises for the tokenizer of one model."""

    @property
    def name(self) -> str: ...

    def exercises(
        self, length: int, depths: Sequence[float], sample: int, seed: int
    ) -> Iterator[Exercise]:
        """The exercises of one sample, which together ask one question for each of `depths`.

        Depths are 0 ... 100. Raises UsageError for a length without room, or without enough text.
        """
        ...


class Needle:
    """A sentence with a number of seven digits in a long text, as in "needle in a haystack"."""

    name = "needle"

    def __init__(self, tokenizer: Tokenizer, longest: int, text: str | None = None) -> None:
        """`text` is the haystack, read from a random sentence on; without it, one is made up.

        `longest`: the tokens of the longest exercise. Raises UnsupportedError for a tokenizer
        without a chat template.
        """
        self._tokenizer = _chatting(tokenizer)
        if text is None:
            self._sentences = filler(longest // _SENTENCE_TOKENS + 1, np.random.default_rng(0))
        else:
            self._sentences = sentences(text)
        self._counts = _token_counts(tokenizer, [f" {one}" for one in self._sentences])

    def exercises(
        self, length: int, depths: Sequence[float], sample: int, seed: int
    ) -> Iterator[Exercise]:
        """One for each depth, each with a haystack and a needle of its own."""
        for depth in depths:
            yield self._exercise(length, depth, _generator(seed, length, sample, [depth]))

    def _exercise(self, length: int, depth: float, rng: np.random.Generator) -> Exercise:
        said, asked = _NEEDLES[rng.integers(len(_NEEDLES))]
        city = _CITIES[rng.integers(len(_CITIES))]
        number = str(rng.integers(1_000_000, 10_000_000))
        begun, question = said.format(city=city), asked.format(city=city)
        start = int(rng.integers(len(self._sentences))) if self._sentences else 0
        hay = self._sentences[start:] + self._sentences[:start]

        def write(taken: int) -> tuple[str, list[_Asked]]:
            place = round(depth / 100 * taken)
            context = " ".join([*hay[:place], f"{begun} {number}.", *hay[place:taken]])
            return context, [_Asked(depth, question, begun, number)]

        return _fitted(self._tokenizer, length, np.roll(self._counts, -start), write)


class Pairs:
    """Lines of keys and values: the value of a key, a number of five digits, is asked for.

    Four other lines are asked for with it, and the answer begins with them: shown what an answer
    looks like, even a small model looks keys up (SmolLM2-135M finds three in four of 150 lines, and
    hardly any without).
    """

    name = "kvretrieval"

    def __init__(self, tokenizer: Tokenizer, several: bool = False) -> None:
        """`several`: a sample is one list, asked for a key at each depth, not one list for each.

        Raises UnsupportedError for a tokenizer without a chat template.
        """
        self._tokenizer = _chatting(tokenizer)
        self._several = several

    def exercises(
        self, length: int, depths: Sequence[float], sample: int, seed: int
    ) -> Iterator[Exercise]:
        """One for all depths where several keys are asked for, else one for each depth."""
        for asked in [depths] if self._several else [[depth] for depth in depths]:
            yield self._exercise(length, asked, _generator(seed, length, sample, asked))

    def _exercise(self, length: int, depths: Sequence[float], rng: np.random.Generator) -> Exercise:
        keys = _keys(length // _LINE_TOKENS + _SHOWN + 1, rng)
        values = rng.integers(10_000, 100_000, len(keys)).tolist()
        lines = [f"{key}: {value}\n" for key, value in zip(keys, values)]

        def write(taken: int) -> tuple[str, list[_Asked]]:
            count = max(taken, _SHOWN + 1)  # of fewer, only the size of questions is of use
            asked = []
            for depth in depths:
                place = round(depth / 100 * (count - 1))
                # Evenly over all lines but the one in question.
                steps = [(2 * i + 1) * (count - 1) // (2 * _SHOWN) for i in range(_SHOWN)]
                shown = [(place + 1 + step) % count for step in steps]
                others = ", ".join(keys[other] for other in shown)
                question = _PAIR_QUESTION.format(others=others, key=keys[place])
                begun = "".join(lines[other] for other in shown) + f"{keys[place]}:"
                asked.append(_Asked(depth, question, begun, str(values[place])))
            return "".join(lines[:taken]).rstrip(), asked

        counts = _token_counts(self._tokenizer, lines)
        return _fitted(self._tokenizer, length, counts, write, _SHOWN + 1)


def _chatting(tokenizer: Tokenizer) -> Tokenizer:
    if tokenizer.template is None:
        raise UnsupportedError(
            "this model has no chat template, so nothing can be asked of it; "
            "`kvrt eval ppl` measures formats without one"
        )
    return tokenizer


def _generator(seed: int, length: int, sample: int, depths: Sequence[float]) -> np.random.Generator:
    return np.random.default_rng([seed, length, sample, *(round(100 * at) for at in depths)])


def _keys(count: int, rng: np.random.Generator) -> list[str]:
    """So many different words of three syllables, or all there are: 343,000."""
    base = len(_SYLLABLES)
    return [
        _SYLLABLES[number // base**2]
        + _SYLLABLES[number // base % base]
        + _SYLLABLES[number % base]
        for number in rng.permutation(base**3)[:count].tolist()
    ]


def _token_counts(tokenizer: Tokenizer, units: Sequence[str]) -> np.ndarray:
    """About how many tokens each unit (a sentence, a line) adds to a context, (units,) i64."""
    return np.array([len(tokenizer.encode(unit)) for unit in units], np.int64)


def _fitted(
    tokenizer: Tokenizer, length: int, counts: np.ndarray, write: _Write, least: int = 1
) -> Exercise:
    """The exercise of as many units as `length` has room for, `least` of them at least.

    counts (units,) i64 are their tokens, about.
    """

    def prompts(taken: int) -> tuple[str, list[_Asked], list[list[int]]]:
        context, asked = write(taken)
        ids = [
            _chat_ids(tokenizer, f"{context}\n\n{one.question}") + tokenizer.encode(one.begun)
            for one in asked
        ]
        return context, asked, ids

    room = length - ANSWER_TOKENS
    bare = max(map(len, prompts(0)[2]))
    taken = int(np.searchsorted(np.cumsum(counts), room - bare, side="right"))
    if taken == len(counts):
        raise UsageError(
            f"the text has about {counts.sum():,} tokens, too few for prompts of {length:,} "
            "(a longer text works, or none)"
        )
    context, asked, ids = prompts(taken)
    while taken >= least and max(map(len, ids)) > room:  # tokens may be more where units meet
        taken -= 1
        context, asked, ids = prompts(taken)
    if taken < least:
        raise UsageError(
            f"a length of {length:,} tokens is too short: question and answer alone take "
            f"{bare + ANSWER_TOKENS:,}"
        )
    # What a prompt without the question has in common with one with it ends with the context.
    shared = common_prefix(_chat_ids(tokenizer, context), ids[0])
    questions = [Question(one.depth, own, one.number) for one, own in zip(asked, ids)]
    return Exercise(length, shared, questions)


def _chat_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_chat([{"role": "user", "content": text}])
