"""Chat on a scripted decoder: history, cache reuse, regen, interruptions, limits, files."""

import json
from pathlib import Path

import pytest

from kvrt.chat import Chat
from kvrt.errors import ContextFullError, StorageError, UnsupportedError, UsageError
from kvrt.sampler import SamplingParams
from tests.helpers.fake_model import HELLO, fake_model, reply

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
