"""Whether a model still finds things in its cache: exact answers to questions about long contexts.

A question is answered greedily, through the cache as `generate` would have it. It comes in one of
two forms. "inside": context and question are one prompt, so a format that packs at a prompt's end
may look at the question. "after": the context is a prompt by itself, and the question comes as a
later one on that cache, as in a conversation about a document.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from .errors import UsageError
from .progress import Progress, silent
from .retrieval_tasks import ANSWER_TOKENS, Exercise, Question, Task
from .sampler import SamplingParams
from .session import Session

if TYPE_CHECKING:
    from .generate import Model
    from .kvstore import KVSpec

Form = Literal["inside", "after"]
FORMS: tuple[Form, ...] = ("inside", "after")

_Layers = Callable[[int, int], None]


@dataclass(frozen=True)
class Recall:
    """How often a format led to the right answer, for one length and depth.

    `exact_match`: per cent of `samples` answers that hold the right number; `exact_match_se`: its
    standard error, None for a single sample. `length` in tokens, `depth` in per cent of the
    context. `prompt_tokens`, `cache_bytes` (with the answer) and `bits_per_element` are means,
    `seconds` is all the time taken.
    """

    kv: str
    task: str
    question: Form
    length: int
    depth: float
    exact_match: float
    exact_match_se: float | None
    samples: int
    prompt_tokens: float
    cache_bytes: float
    bits_per_element: float
    seconds: float


def even_depths(count: int) -> list[float]:
    """So many depths in per cent from the first to the last, 0 ... 100; one is in the middle.

    Raises UsageError for less than one.
    """
    if count < 1:
        raise UsageError(f"the number of depths must be at least 1, got {count}")
    if count == 1:
        return [50.0]
    return [100 * place / (count - 1) for place in range(count)]


def measure_retrieval(
    model: Model,
    specs: Sequence[KVSpec],
    task: Task,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    forms: Sequence[Form] = ("inside",),
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Recall]:
    """One row for each format, form, length and depth, in this order.

    All formats answer the same questions. `progress` counts tokens, about. Raises UsageError for
    lengths beyond the context limit, for no samples, and for what `task` has no text for.
    """
    if samples < 1:
        raise UsageError(f"the number of samples must be at least 1, got {samples}")
    for length in lengths:
        if length > model.max_context:
            raise UsageError(
                f"a length of {length:,} tokens is beyond the context limit of "
                f"{model.max_context:,}"
            )
    for spec in specs:
        model.new_store(spec)  # refuses what the model cannot have, before any work
    cells = {
        (spec, form, length, depth): _Cell()
        for spec in specs for form in forms for length in lengths for depth in depths
    }  # fmt: skip
    total = sum(samples * length for _, _, length, _ in cells)
    done = 0

    def layers(layer: int, layers: int) -> None:
        progress("measure", done + length * layer // layers, total)

    for sample in range(samples):
        for length in lengths:
            for exercise in task.exercises(length, depths, sample, seed):
                for spec in specs:
                    for form in forms:
                        for asked, found in _FORMS[form](model, spec, exercise, layers):
                            cells[spec, form, length, asked.depth].add(found)
                            done += length
    return [
        cell.row(str(spec), task.name, form, length, depth)
        for (spec, form, length, depth), cell in cells.items()
    ]


def overall(rows: Sequence[Recall]) -> tuple[float, float | None]:
    """The exact match of several rows together, in per cent, and its standard error.

    Answers count as independent.
    """
    samples = sum(row.samples for row in rows)
    share = sum(row.exact_match * row.samples for row in rows) / (100 * samples)
    return 100 * share, _standard_error(share, samples)


def holds(text: str, number: str) -> bool:
    """Whether a text has a number of just these digits in it; commas between thousands may be."""
    return number in re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d{3})", "", text))


@dataclass(frozen=True)
class _Answer:
    right: bool
    prompt_tokens: int
    cache_bytes: int
    bits_per_element: float
    seconds: float


@dataclass
class _Cell:
    """The answers of one row."""

    answers: list[_Answer] = field(default_factory=list)

    def add(self, answer: _Answer) -> None:
        self.answers.append(answer)

    def row(self, kv: str, task: str, form: Form, length: int, depth: float) -> Recall:
        count = len(self.answers)
        share = sum(answer.right for answer in self.answers) / count
        return Recall(
            kv=kv,
            task=task,
            question=form,
            length=length,
            depth=depth,
            exact_match=100 * share,
            exact_match_se=_standard_error(share, count),
            samples=count,
            prompt_tokens=sum(answer.prompt_tokens for answer in self.answers) / count,
            cache_bytes=sum(answer.cache_bytes for answer in self.answers) / count,
            bits_per_element=sum(answer.bits_per_element for answer in self.answers) / count,
            seconds=sum(answer.seconds for answer in self.answers),
        )


def _standard_error(share: float, count: int) -> float | None:
    """Of a mean of `count` numbers that are 0 or 100, so many of them 100; in per cent."""
    return None if count < 2 else 100 * math.sqrt(share * (1 - share) / (count - 1))


_Found = Iterator[tuple[Question, _Answer]]


def _ask_inside(model: Model, spec: KVSpec, exercise: Exercise, layers: _Layers) -> _Found:
    """Context and question as one prompt, each question with a cache of its own."""
    for question in exercise.questions:
        yield question, _answer(model, _session(model, spec), question, layers)


def _ask_after(model: Model, spec: KVSpec, exercise: Exercise, layers: _Layers) -> _Found:
    """The context as a prompt, then each question as another one, none seeing those before it."""
    started = perf_counter()
    session = _session(model, spec)
    session.feed(exercise.questions[0].ids[: exercise.shared], progress=layers)
    seconds = (perf_counter() - started) / len(exercise.questions)
    for question in exercise.questions:
        # The last one may have the cache itself.
        own = session if question is exercise.questions[-1] else session.fork()
        yield question, _answer(model, own, question, None, seconds)


_FORMS = {"inside": _ask_inside, "after": _ask_after}


def _session(model: Model, spec: KVSpec) -> Session:
    return Session(model.decoder, model.tokenizer, model.new_store(spec))


def _answer(
    model: Model,
    session: Session,
    question: Question,
    layers: _Layers | None,
    seconds: float = 0.0,
) -> _Answer:
    """Answer a question on what its session has cached; `seconds` were spent on that."""
    started = perf_counter()
    sampler = model.new_sampler(SamplingParams.greedy())
    text = ""
    for step in session.run(question.ids, ANSWER_TOKENS, sampler, progress=layers):
        text += step.text
        if holds(text[:-1], question.answer):  # its last digit may go on in the next token
            break
    stats = session.store.stats()
    return _Answer(
        right=holds(text, question.answer),
        prompt_tokens=len(question.ids),
        cache_bytes=stats.bytes,
        bits_per_element=stats.bits_per_element,
        seconds=seconds + perf_counter() - started,
    )
