"""Chat on a scripted decoder: history, cache reuse, regen, interruptions, limits, files."""

import json
import os
from pathlib import Path
from types import CodeType

import pytest

import kvrt
from kvrt import chat as chat_module
from kvrt import session as session_module
from kvrt.chat import Chat
from kvrt.conversation import to_json
from kvrt.errors import (
    ContextFullError,
    KvrtError,
    StorageError,
    TemplateError,
    UnsupportedError,
    UsageError,
)
from kvrt.generate import Model
from kvrt.kvstore import serialize
from kvrt.sampler import SamplingParams
from tests.helpers.fake_model import HELLO, fake_model, reply
from tests.helpers.interrupts import interrupt_at
from tests.helpers.stores import contents
from tests.helpers.tiny_model import write_tiny_model

GREEDY = SamplingParams(temperature=0.0)


def chat_of(script=HELLO, **options) -> Chat:
    model = fake_model(script, **options)
    return model.chat(sampling=GREEDY)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def test_send_streams_and_remembers() -> None:
    chat = chat_of()
    assert list(chat.send("hi")) == list("hello")
    assert chat.messages == [user("hi"), assistant("hello")]
    assert chat.finish_reason == "stop"


def test_a_second_turn_reuses_the_cache() -> None:
    chat = chat_of()
    list(chat.send("hi"))
    cached = len(chat.session.tokens)
    list(chat.send("again"))
    # All of the first turn is kept; only the end of its answer's turn and the new one are new.
    assert chat.session.timings.reused_tokens == cached
    assert chat.messages[-1] == assistant("hello")


def test_a_second_turn_computes_what_one_prompt_would() -> None:
    chat = chat_of()
    list(chat.send("hi"))
    list(chat.send("again"))
    fresh = chat_of()
    fresh.messages = chat.messages[:3]
    ids = fresh.model.tokenizer.encode_chat(chat.messages[:3], add_generation_prompt=True)
    assert chat.session.tokens[: len(ids)] == ids
    assert chat.session.store.ids == chat.session.tokens


def test_an_empty_answer_that_ended_by_itself_is_an_answer() -> None:
    chat = chat_of(reply(""))
    assert list(chat.send("hi")) == []
    assert chat.finish_reason == "stop"
    assert chat.messages == [user("hi"), assistant("")]


def test_regen_replaces_the_last_answer() -> None:
    answers = iter(["first", "other"])
    model = fake_model()
    chat = model.chat(sampling=GREEDY)
    model.decoder.script = reply(next(answers))
    list(chat.send("hi"))
    model.decoder.script = reply(next(answers))
    assert "".join(chat.regen()) == "other"
    assert chat.messages == [user("hi"), assistant("other")]


def test_regen_twice_is_equal_at_temperature_0() -> None:
    chat = chat_of()
    list(chat.send("hi"))
    assert "".join(chat.regen()) == "".join(chat.regen()) == "hello"


def test_regen_without_an_answer_is_refused() -> None:
    with pytest.raises(UsageError, match="no answer"):
        chat_of().regen()


def test_an_interrupted_answer_is_kept_in_part() -> None:
    chat = chat_of()
    said: list[str] = []
    for piece in chat.send("hi", cancel=lambda: len(said) == 2):
        said.append(piece)
    assert chat.finish_reason == "interrupted"
    assert chat.messages == [user("hi"), assistant("he")]
    assert "".join(chat.send("more")) == "hello"


def test_an_answer_interrupted_before_it_began_changes_nothing() -> None:
    chat = chat_of()
    list(chat.send("hi"))
    before = list(chat.messages)
    assert list(chat.send("more", cancel=lambda: True)) == []
    assert chat.finish_reason == "interrupted"
    assert chat.messages == before
    assert list(chat.regen(cancel=lambda: True)) == []
    assert chat.messages == before


def test_a_keyboard_interrupt_keeps_the_partial_answer() -> None:
    chat = chat_of()
    pieces = chat.send("hi")
    next(pieces)
    with pytest.raises(KeyboardInterrupt):
        pieces.throw(KeyboardInterrupt)
    assert chat.messages == [user("hi"), assistant("h")]
    assert chat.finish_reason == "interrupted"


def test_a_failing_decoder_leaves_the_history() -> None:
    def fails(ids):
        raise RuntimeError("boom")

    chat = chat_of(fails)
    with pytest.raises(RuntimeError):
        list(chat.send("hi"))
    assert chat.messages == []


def test_a_full_context_ends_the_answer_and_keeps_it() -> None:
    chat = chat_of(reply("x" * 500), max_context=40)
    answer = "".join(chat.send("hi"))
    assert chat.finish_reason == "context"
    assert 0 < len(answer) < 40
    assert chat.messages == [user("hi"), assistant(answer)]
    before = list(chat.messages)
    with pytest.raises(ContextFullError, match="was not added"):
        chat.send("more")
    assert chat.messages == before
    chat.clear()
    assert "".join(chat.send("hi")) == answer


def test_the_system_message_comes_first_and_survives_clear() -> None:
    chat = chat_of()
    list(chat.send("hi"))
    chat.set_system("be brief")
    assert chat.messages == [system("be brief"), user("hi"), assistant("hello")]
    chat.set_system("be kind")
    assert chat.system == "be kind"
    chat.clear()
    assert chat.messages == [system("be kind")]
    assert len(chat.session.store) == 0
    chat.set_system(None)
    assert chat.messages == []


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        chat_of().send("  \n")


def test_max_tokens_limits_an_answer() -> None:
    chat = chat_of()
    chat.max_tokens = 2
    assert "".join(chat.send("hi")) == "he"
    assert chat.finish_reason == "length"


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="kvrt generate"):
        chat_of(template=False)


def test_save_and_load_give_the_same_conversation(tmp_path: Path) -> None:
    chat = chat_of(reply("hé"))
    chat.set_system("sys")
    list(chat.send("你好"))
    chat.save(tmp_path / "c.json")
    other = chat_of()
    other.load(tmp_path / "c.json")
    assert other.messages == [system("sys"), user("你好"), assistant("hé")]
    assert "你好" in (tmp_path / "c.json").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"format": "kvrt-chat", "version": 2, "messages": []}',
        b'{"format": "kvrt-chat", "version": 1}',
        b'{"format": "kvrt-chat", "version": 1, "messages": [3]}',
        b'{"format": "kvrt-chat", "version": 1, "messages": [{"role": "user", "content": 1}]}',
        b'{"format": "kvrt-chat", "version": 1, "messages": [{"role": "user", "content": "a"}]}',
        b'{"format": "kvrt-chat", "version": 1, "messages": [{"role": "bot", "content": "a"}]}',
        b"[" * 100_000,
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    chat = chat_of()
    list(chat.send("hi"))
    with pytest.raises(StorageError, match=r"bad\.json") as caught:
        chat.load(path)
    assert "\n" not in str(caught.value)
    assert chat.messages == [user("hi"), assistant("hello")]


def test_two_users_in_a_row_are_no_conversation(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    messages = [user("a"), user("b"), assistant("c")]
    data = {"format": "kvrt-chat", "version": 1, "messages": messages}
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(StorageError, match="message 2 should be text by the assistant"):
        chat_of().load(path)


def test_missing_and_unwritable_files_are_said(tmp_path: Path) -> None:
    chat = chat_of()
    with pytest.raises(StorageError, match=r"nowhere\.json"):
        chat.load(tmp_path / "nowhere.json")
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    with pytest.raises(StorageError):
        chat.save(tmp_path / "file" / "c.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_seed_repeats_a_conversation() -> None:
    def flat(ids):
        return 65 + len(ids) % 3

    runs = []
    for _ in range(2):
        chat = fake_model(flat).chat(sampling=SamplingParams(seed=3, temperature=90.0, top_k=5))
        chat.max_tokens = 8
        runs.append(["".join(chat.send("hi")), "".join(chat.send("more"))])
    assert runs[0] == runs[1]


def test_stats_tell_the_cache_and_the_last_answer() -> None:
    chat = chat_of()
    list(chat.send("hi"))
    stats = chat.stats()
    assert stats.messages == 2
    assert stats.cached_tokens == len(chat.session.tokens)
    assert stats.cache_bytes == 10 * stats.cached_tokens
    assert stats.timings.generated_tokens == 5
    assert stats.peak_bytes > 0


# Saved with the cache, on real (tiny) models


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, max_context=1000, vocab_size=259, head_dim=32)
    return folder


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Model:
    return kvrt.load(str(model_dir), kv="k=int4:channel:g32,v=int4:token:g32,sink=4", threads=1)


LETTERS = SamplingParams(seed=1, logit_bias=tuple((letter, 100.0) for letter in range(97, 123)))
"""Answers of letters alone, which are the same tokens when they are read again."""


def told(model: Model, *texts: str, sampling: SamplingParams = LETTERS) -> Chat:
    """A chat that was told these, with short answers."""
    chat = Chat(model, "sys", sampling, max_tokens=40)
    for text in texts:
        list(chat.send(text))
    return chat


def test_a_chat_goes_on_from_its_cache_as_if_it_had_never_stopped(
    model: Model, tmp_path: Path
) -> None:
    chat = told(model, "one", "two é 😀\0")
    chat.save(tmp_path / "c.kv")
    other = Chat(model, max_tokens=40)
    other.load(tmp_path / "c.kv")
    assert other.messages == chat.messages and len(other.messages) == 5
    cached = len(chat.session.tokens)
    assert other.session.tokens == chat.session.tokens and cached > 140
    assert contents(other.session.store) == contents(chat.session.store)
    assert_goes_on_alike(other, chat)
    assert other.session.timings.reused_tokens == cached


def assert_goes_on_alike(chat: Chat, other: Chat) -> None:
    for each in (chat, other):
        each.set_sampling(SamplingParams(seed=5))  # no file holds a sampler's state
    assert list(chat.send("and then?")) == list(other.send("and then?"))
    assert chat.session.timings.reused_tokens == other.session.timings.reused_tokens > 0
    assert chat.session.tokens == other.session.tokens
    assert contents(chat.session.store) == contents(other.session.store)


def test_an_answer_that_reads_as_other_tokens_is_computed_again(
    model: Model, tmp_path: Path
) -> None:
    """As it is without saving: random bytes are no UTF-8, so their text has other ids."""
    chat = told(model, "one", "two", sampling=SamplingParams(seed=1))
    chat.save(tmp_path / "c.kv")
    other = Chat(model, max_tokens=40)
    other.load(tmp_path / "c.kv")
    assert 0 < len(other.session.tokens) < len(chat.session.tokens)
    assert_goes_on_alike(other, chat)


def test_saving_changes_nothing(model: Model, tmp_path: Path) -> None:
    chat, never = told(model, "one"), told(model, "one")
    before, tokens = contents(chat.session.store), list(chat.session.tokens)
    chat.set_system("another")  # so that most of the cache is not of this conversation
    chat.save(tmp_path / "c.kv")
    assert contents(chat.session.store) == before and chat.session.tokens == tokens
    never.set_system("another")
    assert list(chat.send("two")) == list(never.send("two"))


def test_an_empty_chat_is_saved_and_loaded(model: Model, tmp_path: Path) -> None:
    chat = model.chat()
    chat.save(tmp_path / "c.kv")
    other = told(model, "one")
    other.load(tmp_path / "c.kv")
    assert other.messages == [] and other.session.tokens == []


def test_what_a_file_is_is_told_by_its_content(model: Model, tmp_path: Path) -> None:
    chat = told(model, "one")
    chat.save(tmp_path / "c.json")
    chat.save(tmp_path / "c.kv")
    (tmp_path / "c.json").rename(tmp_path / "text")
    (tmp_path / "c.kv").rename(tmp_path / "cache.json")
    for name, cached in (("text", 0), ("cache.json", len(chat.session.tokens))):
        other = model.chat()
        other.load(tmp_path / name)
        assert other.messages == chat.messages
        assert len(other.session.tokens) == cached


def test_a_text_keeps_the_cache_that_it_has_in_common(model: Model, tmp_path: Path) -> None:
    chat = told(model, "one", "two")
    chat.save(tmp_path / "c.JSON")
    session = chat.session
    chat.load(tmp_path / "c.JSON")
    assert chat.session is session
    list(chat.send("three"))
    assert chat.session.timings.reused_tokens > 100


def test_a_former_conversation_is_not_saved_with_the_next(model: Model, tmp_path: Path) -> None:
    """Its ids, keys and values are still in the cache until the next answer."""
    told(model, "harmless").save(tmp_path / "other.json")
    chat = told(model, "a secret")
    chat.load(tmp_path / "other.json")
    chat.save(tmp_path / "c.kv")
    other = model.chat()
    other.load(tmp_path / "c.kv")
    text = model.tokenizer.decode(other.session.tokens)
    assert "sys" in text and "secret" not in text
    assert "secret" in model.tokenizer.decode(chat.session.tokens)
    chat.set_system(None)
    chat.clear()
    chat.save(tmp_path / "c.kv")
    other.load(tmp_path / "c.kv")
    assert other.session.tokens == []


def test_a_conversation_that_the_template_refuses_is_saved_without_a_cache(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = told(model, "one")

    def refuse(*_: object, **how: object) -> None:
        raise TemplateError("no")

    with monkeypatch.context() as patch:
        patch.setattr(model.tokenizer, "encode_chat", refuse)
        chat.save(tmp_path / "c.kv")
    other = model.chat()
    other.load(tmp_path / "c.kv")
    assert other.messages == chat.messages and other.session.tokens == []


def test_an_interrupted_answer_is_saved_in_part(model: Model, tmp_path: Path) -> None:
    chat = told(model, "one")
    pieces = chat.send("two")
    for _ in range(5):
        next(pieces)
    with pytest.raises(KeyboardInterrupt):
        pieces.throw(KeyboardInterrupt)
    chat.save(tmp_path / "c.kv")
    other = model.chat()
    other.load(tmp_path / "c.kv")
    assert other.messages == chat.messages
    assert len(other.session.store) == len(other.session.tokens) > 50


def refused(chat: Chat, path: Path, error: type[KvrtError]) -> str:
    """The message, on one line; the chat goes on as if it had not been asked."""
    messages, session = chat.messages, chat.session
    tokens, held = list(session.tokens), contents(session.store)
    with pytest.raises(error) as caught:
        chat.load(path)
    assert type(caught.value) is error
    message = str(caught.value)
    assert path.name in message and "\n" not in message
    assert chat.messages is messages and chat.session is session
    assert session.tokens == tokens and contents(session.store) == held
    return message


def test_the_cache_of_another_format_is_refused_and_the_chat_goes_on(
    model: Model, model_dir: Path, tmp_path: Path
) -> None:
    other = kvrt.load(str(model_dir), kv="q8_0", threads=1)
    chat, never = told(other, "one"), told(other, "one")
    told(model, "else").save(tmp_path / "c.kv")
    message = refused(chat, tmp_path / "c.kv", UnsupportedError)
    assert f"start with --kv {model.spec}" in message and "saved as .json" in message
    assert list(chat.send("two")) == list(never.send("two"))
    assert contents(chat.session.store) == contents(never.session.store)


def test_the_cache_of_another_model_is_refused(model: Model, tmp_path: Path) -> None:
    write_tiny_model(
        tmp_path / "m", tokenizer=True, max_context=1000, vocab_size=259, head_dim=32, seed=1
    )
    other = kvrt.load(str(tmp_path / "m"), kv=str(model.spec), threads=1)
    assert other.fingerprint != model.fingerprint
    told(other, "one").save(tmp_path / "c.kv")
    message = refused(told(model, "one"), tmp_path / "c.kv", UnsupportedError)
    assert "saved with another model" in message and f"start with -m {tmp_path / 'm'}" in message


def test_a_cache_beyond_the_context_limit_is_refused(
    model: Model, model_dir: Path, tmp_path: Path
) -> None:
    small = kvrt.load(str(model_dir), kv=str(model.spec), threads=1, max_context=100)
    chat = told(model, "one", "two")
    chat.save(tmp_path / "c.kv")
    message = refused(small.chat(), tmp_path / "c.kv", ContextFullError)
    assert f"{len(chat.session.tokens)} tokens, more than the context limit of 100" in message


def test_caches_that_are_no_conversations_are_refused(model: Model, tmp_path: Path) -> None:
    path, chat = tmp_path / "c.kv", told(model, "one")
    session = chat.session
    session.save(path)
    assert "a cache without a conversation" in refused(chat, path, StorageError)
    session.save(path, {"conversation": "[]"})
    assert "not a saved conversation" in refused(chat, path, StorageError)
    beyond = session.fork()
    beyond.tokens[0] = 259
    beyond.save(path, {"conversation": to_json(chat.messages, "m")})
    assert "beyond the vocabulary of 259" in refused(chat, path, StorageError)
    write_tiny_model(tmp_path / "m")
    assert "no saved cache" in refused(chat, tmp_path / "m" / "model.safetensors", StorageError)
    chat.save(path)
    for size in (9, 500, path.stat().st_size - 1):
        os.truncate(path, size)
        refused(chat, path, StorageError)
        chat.save(path)


def test_a_save_that_fails_leaves_the_old_file_and_the_chat(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, chat = tmp_path / "c.kv", told(model, "one")
    chat.save(path)
    old, messages = path.read_bytes(), list(chat.messages)
    list(chat.send("two"))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.save(path)
    assert path.read_bytes() == old and [each.name for each in tmp_path.iterdir()] == ["c.kv"]
    other = model.chat()
    other.load(path)
    assert other.messages == messages
    chat.save(path)
    other.load(path)
    assert other.messages == chat.messages


def in_the_loading(code: CodeType) -> bool:
    return code.co_filename in (chat_module.__file__, session_module.__file__, serialize.__file__)


# A file that is interrupted while it is opened is closed by the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_load_leaves_one_conversation_or_the_other(
    model: Model, tmp_path: Path
) -> None:
    """And ids that agree with the cache."""
    first, second = told(model, "one"), told(model, "two")
    second.save(tmp_path / "c.kv")
    held = [(each.session.tokens, contents(each.session.store)) for each in (first, second)]
    chat = told(model)
    for line in range(1, 1000):
        chat.messages, chat.session = first.messages, first.session.fork()
        came = interrupt_at(line, lambda: chat.load(tmp_path / "c.kv"), in_the_loading)
        assert chat.messages in (first.messages, second.messages)
        assert (chat.session.tokens, contents(chat.session.store)) in held
        if not came:
            break
    assert 40 < line < 999
    assert chat.messages == second.messages and chat.session.tokens == second.session.tokens
