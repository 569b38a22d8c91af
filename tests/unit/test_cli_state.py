"""`kvrt chat` keeps cache and conversation: --session, /save, /load."""

import os
from pathlib import Path

import pytest

import kvrt
from kvrt.cli.chat import Talk, saved_at_exit
from kvrt.cli.chat_commands import run_command
from kvrt.cli.main import run
from kvrt.errors import StorageError
from kvrt.generate import Model
from tests.helpers.tiny_model import write_tiny_model

ONLY_A = ("-l", "65+1000", "-n", "3", "-t", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, head_dim=64, max_context=2000)
    return str(folder)


@pytest.fixture(scope="module")
def model(folder: str) -> Model:
    return kvrt.load(folder, kv="kvrt3", threads=1)


def talk_of(model: Model) -> Talk:
    talk = Talk(model.chat(), verbose=False, colour=False, interactive=False)
    talk.chat.max_tokens = 4
    return talk


def test_a_session_file_keeps_the_cache(folder: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "s.kv"
    args = ["chat", "-m", folder, *ONLY_A, "--session", str(path), "-v"]
    assert run([*args, "-p", "one " * 50]) == 0
    assert ", 0 from the cache" in capsys.readouterr().err
    first = path.stat().st_size
    assert run([*args, "-p", "two"]) == 0
    assert "221 from the cache" in capsys.readouterr().err
    assert path.stat().st_size > first
    whole = path.read_bytes()
    assert run([*args, "-p", "three", "--kv", "q8_0"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert 'got "kvrt4", expected "q8_0"; start with --kv kvrt4 (saved as .json' in err
    assert path.read_bytes() == whole
    os.truncate(path, 1000)
    assert run([*args, "-p", "three"]) == 1
    assert "truncated" in capsys.readouterr().err
    assert path.stat().st_size == 1000


def test_save_and_load_say_what_they_did(model: Model, tmp_path: Path, capsys) -> None:
    talk = talk_of(model)
    talk.say("hello")
    capsys.readouterr()
    run_command(talk, f"/save {tmp_path / 'c.kv'}")
    err = capsys.readouterr().err
    assert err.startswith("saved 2 messages and their cache (") and err.endswith("c.kv\n")
    run_command(talk, f"/save {tmp_path / 'c.json'}")
    assert capsys.readouterr().err == f"saved 2 messages to {tmp_path / 'c.json'}\n"
    other = talk_of(model)
    run_command(other, f"/load {tmp_path / 'c.json'}")
    assert capsys.readouterr().err == f"loaded 2 messages from {tmp_path / 'c.json'}\n"
    run_command(other, f"/load {tmp_path / 'c.kv'}")
    count = len(other.chat.session.tokens)
    said = f"loaded 2 messages and a cache of {count} tokens from {tmp_path / 'c.kv'}\n"
    assert capsys.readouterr().err == said and count > 20


def test_a_session_is_written_when_it_has_changed(model: Model, tmp_path: Path) -> None:
    path, chat = tmp_path / "s.kv", talk_of(model).chat
    with saved_at_exit(chat, path) as save:
        save()
        first = path.stat().st_ino
        save()
        assert path.stat().st_ino == first
        list(chat.send("hello"))
        save()
        second = path.stat().st_ino
        assert second != first
        chat.set_system("brief")
        save()
        assert path.stat().st_ino != second
        path.unlink()
        save()
        assert path.exists()
        list(chat.send("more"))
        before = path.read_bytes()
    assert path.read_bytes() != before  # at the end, too


def test_a_session_that_cannot_be_saved_is_tried_again(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, chat = tmp_path / "s.kv", talk_of(model).chat

    def full(*_: object) -> None:
        raise OSError(28, "full")

    with saved_at_exit(chat, path) as save:
        save()
        before = path.read_bytes()
        list(chat.send("hello"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            with pytest.raises(StorageError, match="no space left"):
                save()
        assert path.read_bytes() == before
        save()
        assert path.read_bytes() != before
