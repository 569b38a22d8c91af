"""Sessions and models on a scripted decoder: reuse, stops, limits, interruptions, timings."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvrt.errors import ConfigError, ContextFullError, KvrtError, UsageError
from kvrt.generate import Model
from kvrt.recommended import recommended_sampling
from kvrt.sampler import Sampler, SamplingParams
from kvrt.session import Session, StopStrings, Timings
from kvrt.tokenizer import Tokenizer
from tests.helpers.fake_model import (
    ENDOFTEXT,
    HELLO,
    IM_END,
    VOCAB_SIZE,
    FakeDecoder,
    FakeStore,
    FakeTokenizer,
    fake_model,
    reply,
)
from tests.helpers.tiny_tokenizers import config, sentence_piece
from tests.helpers.tiny_tokenizers import load as load_tokenizer

GREEDY = SamplingParams(temperature=0.0)


def session_of(script=HELLO, max_tokens: int = 100) -> tuple[Session, FakeDecoder]:
    decoder = FakeDecoder(script)
    return Session(decoder, FakeTokenizer(), FakeStore(max_tokens)), decoder


def assert_agree(session: Session) -> None:
    assert session.tokens == session.store.ids


# --- feed ---


def test_feed_keeps_the_common_prefix_and_computes_the_rest() -> None:
    session, decoder = session_of(lambda ids: ids[-1])
    session.feed([1, 2, 3, 4])
    logits = session.feed([1, 2, 9, 8, 7])
    assert decoder.calls == [("prefill", 4), ("prefill", 3)]
    assert session.timings.reused_tokens == 2
    assert session.tokens == [1, 2, 9, 8, 7]
    assert int(logits.argmax()) == 7
    assert_agree(session)


def test_feeding_the_same_again_computes_one_token_for_its_logits() -> None:
    session, decoder = session_of(lambda ids: ids[-1])
    session.feed([1, 2, 3])
    logits = session.feed([1, 2, 3])
    assert decoder.calls == [("prefill", 3), ("decode", 1)]
    assert int(logits.argmax()) == 3
    assert_agree(session)


def test_feeding_a_shorter_prefix_truncates_the_store() -> None:
    session, _ = session_of(len)
    session.feed([1, 2, 3, 4, 5])
    assert int(session.feed([1, 2]).argmax()) == 2
    assert session.tokens == [1, 2]
    assert_agree(session)


def test_feed_refuses_too_much_and_nothing_before_any_change() -> None:
    session, _ = session_of(max_tokens=4)
    session.feed([1, 2, 62, 3])
    with pytest.raises(ContextFullError, match="5 tokens, more than the context limit of 4"):
        session.feed([1, 2, 3, 4, 5])
    with pytest.raises(UsageError, match="empty"):
        session.feed([])
    assert session.tokens == [1, 2, 62, 3]
    assert_agree(session)


def test_a_failed_feed_keeps_the_timings_of_the_last_one() -> None:
    session, _ = session_of(len)
    session.feed([1, 2, 3])
    last = session.timings

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.feed([4, 5, 6, 7], progress=fail)
    assert session.timings is last
    assert last.prompt_tokens == 3
    assert last.prefill_s > 0


# --- run ---


def texts(steps) -> list[str]:
    return [step.text for step in steps]


def run(session: Session, prompt: str, max_tokens: int | None = None, **options):
    sampler = Sampler(GREEDY)
    return session.run(list(prompt.encode()), max_tokens, sampler, **options)


def test_run_ends_at_a_stop_id_and_leaves_it_out() -> None:
    session, _ = session_of(reply("hey"))
    steps = list(run(session, "a>"))
    assert [step.token_id for step in steps] == [*b"hey", None]
    assert texts(steps) == ["h", "e", "y", ""]
    assert [step.finish_reason for step in steps] == [None, None, None, "stop"]
    assert bytes(session.tokens) == b"a>hey"
    assert_agree(session)


def test_endoftext_stops_too() -> None:
    session, _ = session_of(lambda ids: ENDOFTEXT)
    assert list(run(session, "a"))[-1].finish_reason == "stop"


def test_run_ends_at_the_length_without_a_needless_decode() -> None:
    session, decoder = session_of(reply("hello"))
    steps = list(run(session, "a>", 3))
    assert "".join(texts(steps)) == "hel"
    assert steps[-1].token_id == ord("l")
    assert steps[-1].finish_reason == "length"
    assert decoder.calls == [("prefill", 2), ("decode", 1), ("decode", 1)]


def test_zero_tokens_only_feeds_the_prompt() -> None:
    session, decoder = session_of()
    steps = list(run(session, "a>", 0))
    assert [(s.token_id, s.text, s.finish_reason) for s in steps] == [(None, "", "length")]
    assert decoder.calls == [("prefill", 2)]


def test_run_ends_when_the_context_is_full_and_the_session_goes_on() -> None:
    session, _ = session_of(reply("hello"), max_tokens=5)
    steps = list(run(session, "abc>"))
    # 4 prompt tokens and one more fit; the token drawn from the last position needs no place.
    assert "".join(texts(steps)) == "he"
    assert steps[-1].finish_reason == "context"
    assert len(session.store) == 5
    assert "".join(texts(run(session, "b>"))) == "hell"


def test_a_prompt_that_fills_the_context_still_gets_its_next_token() -> None:
    session, _ = session_of(reply("hello"), max_tokens=4)
    steps = list(run(session, "abc>"))
    assert [(s.text, s.finish_reason) for s in steps] == [("h", "context")]


def test_run_refuses_before_the_first_step() -> None:
    session, decoder = session_of(max_tokens=3)
    with pytest.raises(ContextFullError):
        run(session, "abcd")
    with pytest.raises(UsageError, match="empty"):
        run(session, "")
    with pytest.raises(UsageError, match="max_tokens"):
        run(session, "a", -1)
    with pytest.raises(UsageError, match="one string"):
        run(session, "a", stop="x")
    with pytest.raises(UsageError, match="stop string"):
        run(session, "a", stop=[""])
    assert decoder.calls == []


def test_multi_byte_characters_come_whole() -> None:
    session, _ = session_of(reply("é€𝄞"))
    assert [text for text in texts(run(session, "a>")) if text] == ["é", "€", "𝄞"]


def test_a_character_cut_by_the_length_is_replaced_once() -> None:
    session, _ = session_of(reply("a€"))
    assert "".join(texts(run(session, "a>", 3))) == "a\ufffd"


def test_penalties_see_prompt_and_generated_tokens() -> None:
    class Spy:
        takes_best = False

        def __init__(self) -> None:
            self.recent: list[list[int]] = []

        def sample(self, logits: np.ndarray, recent: Sequence[int]) -> int:
            self.recent.append(list(recent))
            return 7

    spy = Spy()
    session, _ = session_of(lambda ids: 7)
    list(session.run([1, 2], 3, spy))
    assert spy.recent == [[1, 2], [1, 2, 7], [1, 2, 7, 7]]


def test_timings_count_tokens_and_reuse() -> None:
    session, _ = session_of(reply("hello"))
    list(run(session, "a>", 3))
    list(run(session, "a>he", 2))
    timings = session.timings
    assert (timings.prompt_tokens, timings.reused_tokens, timings.generated_tokens) == (4, 3, 2)
    assert timings.prefill_s > 0
    assert timings.tokens_per_s == pytest.approx(2 / timings.decode_s)


def test_speeds_are_defined_where_nothing_was_decoded() -> None:
    assert Timings().tokens_per_s == 0.0
    assert Timings(generated_tokens=1, decode_s=1e-6).tokens_per_s == 0.0
    assert Timings(generated_tokens=3, decode_s=1.5).tokens_per_s == 2.0
    assert Timings().prompt_tokens_per_s == 0.0
    assert Timings(prompt_tokens=9, reused_tokens=3, prefill_s=2.0).prompt_tokens_per_s == 3.0


# --- interruption ---


def test_cancel_between_tokens_keeps_what_was_said() -> None:
    session, _ = session_of(reply("hello"))
    said: list[str] = []
    steps = run(session, "a>", cancel=lambda: len(said) == 2)
    reasons = []
    for step in steps:
        said.append(step.text)
        reasons.append(step.finish_reason)
    assert "".join(said) == "he"
    assert reasons[-1] == "interrupted"
    assert_agree(session)
    assert "".join(texts(run(session, "a>"))) == "hello"


def test_cancel_during_the_prefill_leaves_the_old_cache() -> None:
    session, _ = session_of(reply("hello"))
    session.feed([*b"ab"])
    layers: list[int] = []
    steps = list(
        run(
            session,
            "abcde>",
            cancel=lambda: len(layers) == 2,
            progress=lambda done, total: layers.append(done),
        )
    )
    assert [(s.token_id, s.text, s.finish_reason) for s in steps] == [(None, "", "interrupted")]
    assert layers == [1, 2]
    assert bytes(session.tokens) == b"ab"
    assert_agree(session)
    assert "".join(texts(run(session, "abcde>"))) == "hello"


def test_a_keyboard_interrupt_anywhere_is_repaired_by_the_next_feed() -> None:
    class Interrupted(FakeDecoder):
        """Raises after the token is in the store but before the session can note its id."""

        def decode(self, token_id, store):
            logits = super().decode(token_id, store)
            if self.calls == [("prefill", 2), ("decode", 1), ("decode", 1)]:
                raise KeyboardInterrupt
            return logits

    decoder = Interrupted(reply("hello"))
    session = Session(decoder, FakeTokenizer(), FakeStore(50))
    with pytest.raises(KeyboardInterrupt):
        list(run(session, "a>"))
    assert len(session.store) == 4
    assert len(session.tokens) == 3
    session.feed([*b"a>hx"])
    assert bytes(session.tokens) == b"a>hx"
    assert_agree(session)


def test_a_reader_who_stops_listening_leaves_a_usable_session() -> None:
    session, _ = session_of(reply("hello"))
    steps = run(session, "a>")
    next(steps)
    steps.close()
    assert_agree(session)
    assert "".join(texts(run(session, "a>"))) == "hello"


# --- stop strings ---


@pytest.mark.parametrize(
    ("pieces", "stop", "shown"),
    [
        (["hel", "lo wo", "rld"], ["o w"], "hell"),
        (["a", "b", "c", "d"], ["bcd"], "a"),
        (["a", "b", "c", "x"], ["bcd"], "abcx"),
        (["aab", "aac"], ["aac"], "aab"),
        (["aaa", "ab"], ["aab"], "aa"),
        (["aa", "b"], ["aab"], ""),
        (["abc"], ["c", "b"], "a"),
        (["ab"], ["abc"], "ab"),
        (["x"], [], "x"),
        (["<", "/", "s", ">", "more"], ["</s>", "User:"], ""),
    ],
)
def test_stop_strings_across_pieces(pieces: list[str], stop: list[str], shown: str) -> None:
    stops = StopStrings(stop)
    out = ""
    for piece in pieces:
        text, met = stops.push(piece)
        out += text
        if met:
            break
    else:
        out += stops.finish("")
    assert out == shown


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["<end>"])
    assert stops.push("hi <e") == ("hi ", False)
    assert stops.push("h") == ("<eh", False)


def test_a_stop_string_ends_a_run_and_is_never_shown() -> None:
    session, _ = session_of(reply("hello world"))
    steps = list(run(session, "a>", stop=["o w"]))
    assert "".join(texts(steps)) == "hell"
    assert steps[-1].finish_reason == "stop"


def test_a_held_back_text_comes_out_at_the_end() -> None:
    session, _ = session_of(reply("hello"))
    assert "".join(texts(run(session, "a>", stop=["low"]))) == "hello"
    assert "".join(texts(run(session, "a>", 4, stop=["low"]))) == "hell"


# --- Model ---


def test_generate_gives_text_ids_and_figures() -> None:
    model = fake_model(reply("hello"))
    made = model.generate("a>", sampling=GREEDY)
    assert made.text == "hello"
    assert bytes(made.token_ids) == b"hello"
    assert made.prompt_tokens == 2
    assert made.finish_reason == "stop"
    assert made.kv == "f16"
    assert made.cache_bytes == 10 * 7
    assert made.peak_bytes > 0
    assert made.tokens_per_s == pytest.approx(5 / made.decode_s)


def test_generate_takes_token_ids_of_any_integer_type() -> None:
    model = fake_model(reply("hello"))
    assert model.generate(np.array([*b"a>"]), 2, GREEDY).text == "he"


def test_stream_gives_the_same_text_in_pieces() -> None:
    model = fake_model(reply("hé!"))
    assert list(model.stream("a>", sampling=GREEDY)) == ["h", "é", "!"]


def test_logits_have_a_row_for_each_id() -> None:
    model = fake_model(lambda ids: ids[-1])
    logits = model.logits([5, 6, 7])
    assert logits.shape == (3, VOCAB_SIZE)
    assert logits.argmax(axis=1).tolist() == [5, 6, 7]


@pytest.mark.parametrize("bad", [[], [VOCAB_SIZE], [-1], [1.5], ["a"]])
def test_ids_outside_the_vocabulary_are_refused(bad) -> None:
    model = fake_model()
    with pytest.raises(UsageError):
        model.logits(bad)
    with pytest.raises(UsageError):
        model.generate(bad)
    assert model.decoder.calls == []


def test_more_ids_than_the_context_are_refused_before_compute() -> None:
    model = fake_model(max_context=3)
    for call in (model.logits, model.generate):
        with pytest.raises(ContextFullError):
            call([1, 2, 3, 4])
    assert model.decoder.calls == []


def test_a_logit_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="logit bias holds token id 260"):
        fake_model().generate("a", sampling=SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)))


# --- the text goes on from the prompt ---


def sentence_piece_model(folder: Path, says: str) -> tuple[Model, Tokenizer]:
    """A scripted model with a SentencePiece tokenizer whose next token is always `says`."""
    library = sentence_piece()
    wanted = library.token_to_id(says)
    model = fake_model(lambda ids: wanted)
    tokenizer = load_tokenizer(folder, library, {"bos_token": "<s>", "add_bos_token": True})
    model.tokenizer = tokenizer
    model.config = config()
    model.decoder = FakeDecoder(lambda ids: wanted, vocab_size=model.config.vocab_size)
    return model, tokenizer


def test_a_continuation_keeps_its_leading_space(tmp_path: Path) -> None:
    model, _ = sentence_piece_model(tmp_path, "▁he")
    assert model.generate("she", 2, GREEDY).text == " he he"
    assert "".join(model.stream("she", 2, GREEDY)) == " he he"
    # After a space of the prompt's own too: the prompt's text and this one are one text.
    assert model.generate("she ", 1, GREEDY).text == " he"


def test_a_text_that_begins_has_no_leading_space(tmp_path: Path) -> None:
    model, tokenizer = sentence_piece_model(tmp_path, "▁he")
    assert tokenizer.bos_id is not None
    assert model.generate([tokenizer.bos_id], 2, GREEDY).text == "he he"
    assert model.generate(tokenizer.encode("she"), 2, GREEDY).text == " he he"


def test_an_answer_begins_a_text(tmp_path: Path) -> None:
    model, tokenizer = sentence_piece_model(tmp_path, "▁he")
    session = model.new_session()
    steps = session.run(tokenizer.encode_prompt("she"), 2, Sampler(GREEDY))
    assert "".join(texts(steps)) == "he he"


# --- the model's own sampling ---


def test_without_sampling_the_models_own_counts() -> None:
    wild = SamplingParams(temperature=90.0, top_k=3, top_p=1.0, min_p=0.0, seed=1)
    model = fake_model(lambda ids: 65, sampling=wild)
    assert len(set(model.generate("a", 30).text)) == 3
    assert len(set("".join(model.stream("a", 30)))) == 3
    chat = model.chat()
    assert chat.sampling == model.sampling
    chat.max_tokens = 30
    assert len(set("".join(chat.send("a")))) == 3
    assert model.generate("a", 30, GREEDY).text == 30 * "A"
    assert model.chat(sampling=GREEDY).sampling == GREEDY


def recommended(folder: Path, **data: object) -> SamplingParams:
    (folder / "generation_config.json").write_text(json.dumps(data), encoding="utf-8")
    return recommended_sampling(folder)


def test_a_model_recommends_some_and_llama_cpp_the_rest(tmp_path: Path) -> None:
    assert recommended_sampling(tmp_path) == SamplingParams()
    for data in ({}, {"do_sample": False}, {"temperature": None, "do_sample": True}):
        assert recommended(tmp_path, **data) == SamplingParams()
    assert SamplingParams() == SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.0
    )
    assert recommended(tmp_path, temperature=0.2, top_p=0.9) == SamplingParams(
        temperature=0.2, top_p=0.9
    )
    given = {"temperature": 0.6, "top_k": 20, "top_p": 1, "min_p": 0.0, "repetition_penalty": 1.1}
    assert recommended(tmp_path, **given, do_sample=False, eos_token_id=2) == SamplingParams(
        temperature=0.6, top_k=20, top_p=1, min_p=0.0, repeat_penalty=1.1
    )
    assert recommended(tmp_path, temperature=0).temperature == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", 10**400),
        ("temperature", math.inf),
        ("temperature", [0.2]),
        ("top_k", 1.5),
        ("top_k", "40"),
        ("top_p", 1.5),
        ("top_p", {}),
        ("min_p", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
    ],
)
def test_impossible_recommendations_are_one_line(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(
        ConfigError, match=rf"generation_config\.json: key '{key}': got .*, exp"
    ) as e:
        recommended(tmp_path, **{key: value})
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 100 + len(str(tmp_path)) + 80


def test_control_tokens_stop_chat_and_generate_alike() -> None:
    assert fake_model(lambda ids: IM_END).generate("a", sampling=GREEDY).text == ""


@pytest.mark.parametrize("logit", [np.nan, np.inf, -np.inf])
def test_the_likeliest_token_is_checked_as_one_of_all_logits_is(logit: float) -> None:
    class Broken(FakeDecoder):
        def decode_best(self, token_id, store):
            super().decode_best(token_id, store)
            return 3, logit

    session = Session(Broken(reply("hello")), FakeTokenizer(), FakeStore(50))
    with pytest.raises(KvrtError, match="logit"):
        list(session.run([*b"a>"], 5, Sampler(SamplingParams.greedy())))


@pytest.mark.parametrize(
    ("params", "asked"),
    [
        (SamplingParams.greedy(), True),
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=0.0, repeat_penalty=1.1), False),
        (SamplingParams(temperature=0.0, logit_bias=((104, 1.0),)), False),
        (SamplingParams(temperature=0.5, seed=1), False),
    ],
)
def test_who_chooses_the_token(params: SamplingParams, asked: bool) -> None:
    """The device, where nothing but the likeliest one counts; the text is the same."""

    class Counting(FakeDecoder):
        asked = 0

        def decode_best(self, token_id, store):
            self.asked += 1
            return super().decode_best(token_id, store)

    decoder = Counting(reply("hello"))
    session = Session(decoder, FakeTokenizer(), FakeStore(50))
    steps = list(session.run([*b"a>"], 9, Sampler(params)))
    assert "".join(step.text for step in steps) == "hello"
    assert bool(decoder.asked) == asked
