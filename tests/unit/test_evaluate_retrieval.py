"""Retrieval: what prompts hold, and that rows say what a cache really kept of them.

Tokens are bytes here. The model is one that reads: it goes on as the text did where it stood
before, like an induction head; its caches lose what a format of that name loses.
"""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvrt.errors import UnsupportedError, UsageError
from kvrt.evaluate_retrieval import Recall, even_depths, holds, measure_retrieval, overall
from kvrt.generate import Model
from kvrt.haystack import filler, sentences
from kvrt.retrieval_tasks import ANSWER_TOKENS, Exercise, Needle, Pairs, Task
from tests.helpers.fake_model import IM_END, FakeDecoder, FakeStore, FakeTokenizer, fake_model

DEPTHS = [0.0, 25.0, 50.0, 75.0, 100.0]
TEXT = "It was a dark night! Nobody came.  Was it late?\n\nThe wind\nblew on the hill. " * 40
ZERO = ord("0")


class Bytes(FakeTokenizer):
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER: Any = Bytes()


def text_of(ids: Sequence[int]) -> str:
    return bytes(i if i < 256 else 0 for i in ids).decode()


def last_line(text: str) -> str:
    """The answer's last line, as far as it has come."""
    return text.rpartition("assistant>")[2].rpartition("\n")[2]


def read_on(ids: Sequence[int]) -> int:
    """What came after the answer so far where the same words stood first; then the end."""
    text = text_of(ids)
    said = last_line(text)
    place = text.find(said) + len(said)
    return IM_END if place >= len(text) or text[place] in ".\n" else ord(text[place])


class LossyStore(FakeStore):
    """Zeros for digits, once a prompt ends: all of them, those without a question, or the first."""

    def __init__(self, name: str, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self.name = name

    def pack(self) -> None:
        end = len(self.ids)
        if self.name == "aware" and "\n\nWh" in text_of(self.ids):
            end = 0
        if self.name == "half":
            end //= 2
        if self.name != "exact":
            self.ids[:end] = [ZERO if 48 <= i < 58 else i for i in self.ids[:end]]

    def fork(self) -> "LossyStore":
        other = LossyStore(self.name, self.max_tokens)
        other.ids = list(self.ids)
        return other


class PackingDecoder(FakeDecoder):
    """Packs what is the first prompt of a cache."""

    def prefill(
        self, token_ids: Sequence[int], store: Any, *, progress: Any = None, **_: Any
    ) -> np.ndarray:
        self.calls.append(("prefill", len(token_ids)))
        first = not store.ids
        store.ids += token_ids
        if progress is not None:
            progress(1, 2)
            progress(2, 2)
        logits = self._logits(store)  # of the last token alone, which sees all of them exactly
        if first:
            store.pack()
        return logits


@pytest.fixture
def model() -> Model:
    model = fake_model(max_context=2000)
    model.tokenizer = TOKENIZER
    fake: Any = model
    fake.decoder = PackingDecoder(read_on, vocab_size=260)
    fake._new_store = lambda spec: LossyStore(str(spec), 2000)
    return model


def calls_of(model: Model) -> list[tuple[str, int]]:
    decoder: Any = model.decoder
    return [call for call in decoder.calls if call[0] == "prefill"]


def all_of(task: Task, length: int, depths: Sequence[float] = DEPTHS) -> list[Exercise]:
    return list(task.exercises(length, depths, 0, 0))


def tasks(longest: int = 2000) -> list[Task]:
    return [
        Needle(TOKENIZER, longest),
        Needle(TOKENIZER, longest, TEXT),
        Pairs(TOKENIZER),
        Pairs(TOKENIZER, several=True),
    ]


# --- prompts ---


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("length", [400, 1024, 1999])
def test_a_prompt_fills_its_length_and_holds_its_answer_once(index: int, length: int) -> None:
    questions = [
        (exercise, question)
        for exercise in all_of(tasks()[index], length)
        for question in exercise.questions
    ]
    assert [question.depth for _, question in questions] == DEPTHS
    for exercise, question in questions:
        assert exercise.length == length
        room = length - ANSWER_TOKENS - len(question.ids)
        assert 0 <= room < 130  # less than a sentence
        text, context = text_of(question.ids), text_of(question.ids[: exercise.shared])
        begun = last_line(text)
        assert re.findall(rf"(?<!\d){question.answer}(?!\d)", text) == [question.answer]
        assert text.count(begun) == 2  # where it is said, and as the answer's beginning
        assert f"{begun} {question.answer}" in context
        assert text[len(context) :].startswith(("\n\nWhat is the ", "\n\nWhich of "))
        assert context.startswith("\0user>") and context[-1] not in " \n"


@pytest.mark.parametrize("index", range(4))
def test_the_answer_stands_at_its_depth(index: int) -> None:
    for exercise in all_of(tasks()[index], 1999):
        for question in exercise.questions:
            context = text_of(question.ids[: exercise.shared])[len("\0user>") :]
            begun = last_line(text_of(question.ids))
            place = context.index(begun)
            last = len(context) - len(f"{begun} {question.answer}")
            if question.depth == 0:
                assert place == 0
            elif question.depth == 100:
                assert last - place <= 1  # a full stop
            else:
                assert abs(100 * place / last - question.depth) < 7


@pytest.mark.parametrize("index", range(3))
def test_a_prompt_is_the_same_whatever_else_is_asked(index: int) -> None:
    task = tasks()[index]
    alone = all_of(task, 600, [75.0])
    assert alone == all_of(task, 600)[3:4] == all_of(tasks()[index], 600, [75.0])
    (other,) = task.exercises(600, [75.0], 1, 0)
    (seeded,) = task.exercises(600, [75.0], 0, 1)
    answers = {one.questions[0].answer for one in (alone[0], other, seeded)}
    assert len(answers) == 3


def test_several_keys_are_asked_of_one_list() -> None:
    (exercise,) = all_of(Pairs(TOKENIZER, several=True), 1000)
    contexts = {tuple(question.ids[: exercise.shared]) for question in exercise.questions}
    assert len(contexts) == 1
    assert len({question.answer for question in exercise.questions}) == 5
    assert len(all_of(Pairs(TOKENIZER), 1000)) == 5


@pytest.mark.parametrize("several", [False, True])
def test_an_answer_begins_with_other_lines_of_the_list(several: bool) -> None:
    for exercise in all_of(Pairs(TOKENIZER, several), 700):
        for question in exercise.questions:
            lines = text_of(question.ids[: exercise.shared])[len("\0user>") :].split("\n")
            rest = text_of(question.ids[exercise.shared :])
            *shown, key = rest.rpartition("assistant>")[2].split("\n")
            assert len(set(shown)) == 4 and set(shown) < set(lines)
            assert f"{key} {question.answer}" in lines
            assert f"{key} {question.answer}" not in shown
            names = re.findall(r"\w{6}(?=[,?]| and )", rest)
            assert names == [line[:6] for line in (*shown, key)]


def test_keys_are_all_different() -> None:
    (exercise,) = all_of(Pairs(TOKENIZER), 60_000, [50])
    lines = text_of(exercise.questions[0].ids[: exercise.shared])[len("\0user>") :].split("\n")
    keys = [line.partition(": ")[0] for line in lines]
    assert len(set(keys)) == len(keys) > 3000


def test_a_text_of_ones_own_is_cut_at_sentences() -> None:
    assert sentences(TEXT)[:5] == [
        "It was a dark night!", "Nobody came.", "Was it late?", "The wind blew on the hill.",
        "It was a dark night!",
    ]  # fmt: skip
    assert [len(part.split()) for part in sentences("word " * 95)] == [40, 40, 15]
    assert sentences(" \n\n ") == []
    for exercise in all_of(Needle(TOKENIZER, 900, TEXT), 900):
        context = text_of(exercise.questions[0].ids[: exercise.shared])[len("\0user>") :]
        own = [part for part in sentences(context) if exercise.questions[0].answer not in part]
        assert set(own) == set(sentences(TEXT))


def test_made_up_sentences_hold_no_number_and_vary() -> None:
    made = filler(3000, np.random.default_rng(1))
    assert not any(letter.isdigit() for letter in "".join(made))
    assert len(set(made)) > 2900 and all(len(one.split()) >= 9 for one in made)
    assert made == filler(3000, np.random.default_rng(1)) and sentences(" ".join(made)) == made


@pytest.mark.parametrize("text", ["It was night. It was day.", " \n "])
def test_a_text_that_is_too_short_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"too few for prompts of 400 \(a longer text works"):
        all_of(Needle(TOKENIZER, 400, text), 400)


def test_a_length_without_room_is_refused() -> None:
    for task in tasks():
        with pytest.raises(UsageError, match=r"a length of 60 tokens is too short: question and"):
            all_of(task, 60)


def test_a_model_without_a_chat_template_is_refused() -> None:
    plain: Any = Bytes(template=False)
    for make in (lambda: Needle(plain, 400), lambda: Pairs(plain)):
        with pytest.raises(UnsupportedError, match="no chat template"):
            make()


# --- answers ---


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1234567", True), (" 1234567.", True), ("It is 1,234,567!", True), ("x1234567y", True),
        ("12345678", False), ("01234567", False), ("123456", False), ("1234 567", False),
        ("1,234,567,8", True), ("1,234,567,890", False), ("", False),
    ],
)  # fmt: skip
def test_only_the_whole_number_counts(text: str, found: bool) -> None:
    assert holds(text, "1234567") == found


def measure(
    model: Model, names: Sequence[str], task: Task, samples: int = 3, **options: Any
) -> list[Recall]:
    specs: Any = names
    return measure_retrieval(model, specs, task, [400, 600], [0.0, 100.0], samples, **options)


@pytest.mark.parametrize("index", range(4))
def test_rows_say_what_was_kept(model: Model, index: int) -> None:
    names = ["exact", "none", "aware", "half"]
    rows = measure(model, names, tasks()[index], forms=("inside", "after"))
    found = {(row.kv, row.question, row.length, row.depth): row.exact_match for row in rows}
    assert len(found) == len(rows) == 4 * 2 * 2 * 2
    for (kv, question, _, depth), share in found.items():
        right = {
            "exact": True,
            "none": False,
            "aware": question == "inside",  # the prompt that it packs has the question in it
            "half": depth == 100,
        }
        assert share == 100 * right[kv], (kv, question, depth)
    assert [row.kv for row in rows[::8]] == names
    assert [(row.question, row.length, row.depth) for row in rows[:3]] == [
        ("inside", 400, 0), ("inside", 400, 100), ("inside", 600, 0),
    ]  # fmt: skip
    for row in rows:
        assert (row.task, row.samples) == (["needle", "kvretrieval"][index // 2], 3)
        assert row.length - 150 < row.prompt_tokens <= row.length - ANSWER_TOKENS
        assert row.cache_bytes > 10 * row.prompt_tokens and row.bits_per_element == 16
        assert row.seconds > 0


def test_a_share_and_its_standard_error(model: Model) -> None:
    """A reader that is wrong about cities with an o in their names."""

    def poor(ids: Sequence[int]) -> int:
        city = text_of(ids).rpartition("assistant>")[2].split(" is")[0].rpartition(" ")[2]
        return ord("x") if "o" in city else read_on(ids)

    decoder: Any = model.decoder
    decoder.script = poor
    task = Needle(TOKENIZER, 600)
    rows = measure(model, ["exact"], task, samples=12)
    for row in rows:
        answers = [
            "o" not in text_of(one.questions[0].ids).rpartition(" for ")[2]
            for sample in range(12)
            for one in task.exercises(row.length, [row.depth], sample, 0)
        ]
        assert 0 < sum(answers) < 12
        assert row.exact_match == pytest.approx(100 * np.mean(answers))
        error = 100 * np.std(answers, ddof=1) / math.sqrt(12)
        assert row.exact_match_se == pytest.approx(error)
    mean, error = overall(rows)
    assert mean == pytest.approx(np.mean([row.exact_match for row in rows]))
    assert error == pytest.approx(math.sqrt(mean * (100 - mean) / 47))
    assert measure(model, ["exact"], task, samples=1)[0].exact_match_se is None


def test_a_question_inside_is_one_prompt_and_after_it_is_two(model: Model) -> None:
    task = Pairs(TOKENIZER, several=True)
    measure(model, ["exact"], task, samples=1, forms=("inside",))
    exercises = [one for n in (400, 600) for one in task.exercises(n, [0.0, 100.0], 0, 0)]
    asked = [len(question.ids) for one in exercises for question in one.questions]
    assert [count for _, count in calls_of(model)] == asked
    before = len(calls_of(model))
    measure(model, ["exact"], task, samples=1, forms=("after",))
    expected = []
    for one in exercises:
        expected += [one.shared, *(len(question.ids) - one.shared for question in one.questions)]
    assert [count for _, count in calls_of(model)[before:]] == expected


def test_an_answer_ends_with_its_number_and_before_it_gets_long(model: Model) -> None:
    decoder: Any = model.decoder
    specs: Any = ["exact"]
    decoder.script = lambda ids: read_on(ids) if read_on(ids) != IM_END else ord(",")
    measure_retrieval(model, specs, Needle(TOKENIZER, 400), [400], [50], 1)
    # A space, seven digits and what ends them are drawn; the last one is not computed.
    assert len(decoder.calls) == 1 + 8
    decoder.calls.clear()
    decoder.script = lambda ids: ord("x")
    measure_retrieval(model, specs, Needle(TOKENIZER, 400), [400], [50], 1)
    assert len(decoder.calls) == ANSWER_TOKENS


def test_progress_counts_up_to_all_tokens(model: Model) -> None:
    seen: list[tuple[str, int, int | None]] = []
    measure(model, ["exact", "none"], Pairs(TOKENIZER), progress=lambda *it: seen.append(it))
    done = [count for _, count, _ in seen]
    assert {total for _, _, total in seen} == {2 * 3 * 2 * (400 + 600)}
    assert done[-1] == 12_000 and all(a <= b for a, b in pairwise(done))


def test_what_cannot_be_measured_is_refused(model: Model) -> None:
    task = Pairs(TOKENIZER)
    with pytest.raises(UsageError, match="a length of 2,001 tokens is beyond the context limit of"):
        measure_retrieval(model, [], task, [400, 2001], [50], 1)
    with pytest.raises(UsageError, match="samples must be at least 1, got 0"):
        measure_retrieval(model, [], task, [400], [50], 0)
    with pytest.raises(UsageError, match="depths must be at least 1, got 0"):
        even_depths(0)


def test_depths_are_even() -> None:
    assert even_depths(1) == [50] and even_depths(2) == [0, 100] and even_depths(5) == DEPTHS


def test_a_row_is_an_interface() -> None:
    """Scripts read these names."""
    names = ["kv", "task", "question", "length", "depth", "exact_match", "exact_match_se"]
    assert list(Recall.__dataclass_fields__)[:8] == [*names, "samples"]
