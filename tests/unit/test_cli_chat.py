"""`kvrt chat` at a real terminal (a pty): prompt, keys, commands, interruptions."""

import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrt.backends import get_ops
from kvrt.cli.chat import Talk
from kvrt.paths import kernels_dir
from tests.helpers.fake_model import FakeDecoder, fake_model, reply
from tests.helpers.tiny_model import write_tiny_model

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)
import pexpect

ROOT = Path(__file__).resolve().parents[2]
ONLY_A = ("-l", "65+1000")  # the model then says AAAA... for ever
Start = Callable[..., pexpect.spawn]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, max_context=200_000)
    return str(folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A KVRT_HOME of its own for the history, with the kernels that are compiled already."""
    get_ops("cpu")
    folder = tmp_path_factory.mktemp("home")
    (folder / "kernels").symlink_to(kernels_dir())
    return folder


@pytest.fixture
def start(model: str, home: Path) -> Iterator[Start]:
    """Start `kvrt chat` on the tiny model and wait for its prompt."""
    children: list[pexpect.spawn] = []

    def begin(*args: str, shell: str = "") -> pexpect.spawn:
        environment = {
            **os.environ,
            "KVRT_HOME": str(home),
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody answers a cursor position request here
            "TERM": "xterm",
        }
        command = [sys.executable, "-m", "kvrt", "chat", "-m", model, *args]
        if shell:
            command = ["sh", "-c", '"$@" ' + shell, "sh", *command]
        child = pexpect.spawn(
            command[0], command[1:], cwd=str(ROOT), env=environment, encoding="utf-8", timeout=60
        )
        child.logfile_read = io.StringIO()
        children.append(child)
        child.expect_exact("/help lists the commands")
        at_prompt(child)
        return child

    yield begin
    for child in children:
        child.close(force=True)


def at_prompt(child: pexpect.spawn) -> None:
    child.expect("> |>\x08\x1b\\[2C")  # without colour the space is a move of the cursor


def leave(child: pexpect.spawn) -> int:
    """Ctrl-D at the prompt (never while an answer runs: it would be lost); gives the exit code."""
    child.sendeof()
    return exit_code(child)


def exit_code(child: pexpect.spawn) -> int:
    child.expect(pexpect.EOF)
    child.close()
    assert child.signalstatus is None
    return child.exitstatus


def saved(child: pexpect.spawn, path: Path) -> list[tuple[str, str]]:
    """The history, by way of /save."""
    child.send(f"/save {path}\r")
    child.expect_exact("saved ")
    at_prompt(child)
    messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
    return [(message["role"], message["content"]) for message in messages]


def test_a_conversation_and_ctrl_d(start: Start, home: Path, tmp_path: Path) -> None:
    child = start(*ONLY_A, "-n", "3")
    child.send("hello there\r")
    child.expect_exact("AAA\r\n")
    at_prompt(child)
    child.send("and again\r")
    child.expect_exact("AAA\r\n")
    at_prompt(child)
    assert saved(child, tmp_path / "c.json") == [
        ("user", "hello there"),
        ("assistant", "AAA"),
        ("user", "and again"),
        ("assistant", "AAA"),
    ]
    assert leave(child) == 0
    history = home / "chat_history"
    assert "+hello there\n" in history.read_text(encoding="utf-8")
    assert history.stat().st_mode & 0o077 == 0


def test_ctrl_c_while_answering_keeps_the_part(start: Start, tmp_path: Path) -> None:
    child = start(*ONLY_A)
    child.send("hi\r")
    child.expect_exact("AAAAAAAA")
    child.sendintr()
    child.expect_exact("(stopped; the answer so far is kept)")
    at_prompt(child)
    messages = saved(child, tmp_path / "c.json")
    assert [role for role, _ in messages] == ["user", "assistant"]
    answer = messages[1][1]
    assert len(answer) >= 8
    assert set(answer) == {"A"}
    # The conversation goes on from there.
    child.send("/set n 2\r")
    child.expect_exact("n = 2")
    at_prompt(child)
    child.send("more\r")
    child.expect_exact("AA\r\n")
    at_prompt(child)
    messages = saved(child, tmp_path / "c.json")
    assert messages[1:] == [("assistant", answer), ("user", "more"), ("assistant", "AA")]
    assert leave(child) == 0


def test_ctrl_c_at_the_prompt_gives_a_hint_and_stays(start: Start) -> None:
    child = start(*ONLY_A, "-n", "2")
    child.send("half a li")
    child.expect_exact("half a li")
    child.sendintr()
    child.expect_exact("Ctrl-D or /exit leaves")
    at_prompt(child)
    child.send("hi\r")
    child.expect_exact("AA\r\n")
    at_prompt(child)
    assert leave(child) == 0


def test_several_lines_by_fence_and_by_paste(start: Start, tmp_path: Path) -> None:
    child = start(*ONLY_A, "-n", "1")
    child.send('"""/one\r')
    child.expect_exact(". ")
    child.send("  two\r")
    child.expect_exact(". ")
    child.send('three"""\r')
    child.expect_exact("A\r\n")
    at_prompt(child)
    child.send("\x1b[200~pasted\nlines\x1b[201~\r")
    child.expect_exact("A\r\n")
    at_prompt(child)
    messages = saved(child, tmp_path / "c.json")
    assert messages[0] == ("user", "/one\n  two\nthree")
    assert messages[2] == ("user", "pasted\nlines")
    assert leave(child) == 0


def test_ctrl_c_within_a_fence_drops_it(start: Start) -> None:
    child = start(*ONLY_A, "-n", "2")
    child.send('"""one\r')
    child.expect_exact(". ")
    child.sendintr()
    child.expect_exact("Ctrl-D or /exit leaves")
    at_prompt(child)
    child.send("/stats\r")
    child.expect_exact("0 messages")
    at_prompt(child)
    assert leave(child) == 0


def test_every_command(start: Start, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("from the file\n", encoding="utf-8")
    child = start(*ONLY_A, "-n", "3", "-sys", "be brief")

    def say(line: str, answer: str) -> None:
        child.send(line + "\r")
        child.expect_exact(answer)
        at_prompt(child)

    say("/help", "/regen")
    say("/system", "system message: 'be brief'")
    say("/system be kind", "the system message is set")
    say(f"/read {tmp_path / 'note.txt'}", "13 characters")
    say("what is it?", "AAA\r\n")
    say("/set", "temp = 0.8")
    say("/set temp 0", "temp = 0.0")
    say("/set n 4", "n = 4")
    say("/set logit_bias 1", "no setting 'logit-bias'")
    say("/regen", "AAAA\r\n")
    say("/stats", "3 messages")
    assert saved(child, tmp_path / "c.json") == [
        ("system", "be kind"),
        ("user", "from the file\n\nwhat is it?"),
        ("assistant", "AAAA"),
    ]
    say("/clear", "the conversation is empty")
    assert saved(child, tmp_path / "d.json") == [("system", "be kind")]
    say(f"/load {tmp_path / 'c.json'}", "loaded 3 messages")
    say('/system ""', "none is set; the model")
    say("/stats", "2 messages")
    say(" /not a command", "AAAA\r\n")
    say("/stats", "4 messages")
    child.send("/exit\r")
    assert exit_code(child) == 0


def test_set_shows_what_is_in_effect(start: Start, model: str, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    data = {"eos_token_id": 258, "temperature": 0.25, "top_k": 7, "repetition_penalty": 1.5}
    (copy / "generation_config.json").write_text(json.dumps(data), encoding="utf-8")
    child = start("-m", str(copy), "--top-k", "9", "--seed", "3")
    child.send("/set\r")
    for line in ("temp = 0.25", "top-k = 9", "top-p = 0.95", "repeat-penalty = 1.5", "seed = 3"):
        child.expect_exact(line + "\r\n")
    at_prompt(child)
    child.send("/set temp 0.5\r")
    child.expect_exact("temp = 0.5")
    at_prompt(child)
    child.send("/set\r")
    for line in ("temp = 0.5", "top-k = 9"):
        child.expect_exact(line + "\r\n")
    at_prompt(child)
    assert leave(child) == 0


WRONG = (
    ("/nonsense", "unknown command /nonsense; /help lists them"),
    ("/load /nowhere/x.json", "cannot read /nowhere/x.json"),
    ("/load", "/load needs a file"),
    ("/read /nowhere/x.txt", "cannot read /nowhere/x.txt"),
    ("/save /dev/null/x.json", "kvrt: error:"),
    ("/set temp hot", "temperature must be a number"),
    ("/set temp -1", "temperature"),
    ("/set n x", "n must be a whole number"),
    ("/regen now", "/regen takes no argument"),
)


def test_a_wrong_command_leaves_all_as_it_was(start: Start, tmp_path: Path) -> None:
    child = start(*ONLY_A, "-n", "2")
    child.send("hi\r")
    child.expect_exact("AA\r\n")
    at_prompt(child)
    for line, said in WRONG:
        child.send(line + "\r")
        child.expect_exact(said)
        at_prompt(child)
        assert saved(child, tmp_path / "c.json") == [("user", "hi"), ("assistant", "AA")]
    child.send("/set\r")
    child.expect_exact("temp = 0.8")
    at_prompt(child)
    assert leave(child) == 0


def test_a_full_context_is_said_and_the_history_kept(start: Start, tmp_path: Path) -> None:
    child = start(*ONLY_A, "-c", "64")
    child.send("hi\r")
    child.expect_exact("the context of 64 tokens is full")
    at_prompt(child)
    before = saved(child, tmp_path / "c.json")
    assert len(before) == 2
    child.send("more\r")
    child.expect_exact("context limit of 64; the message was not added; /clear starts afresh")
    at_prompt(child)
    assert saved(child, tmp_path / "c.json") == before
    child.send("/clear\r")
    child.expect_exact("the conversation is empty")
    at_prompt(child)
    child.send("hi\r")
    child.expect_exact("the context of 64 tokens is full")
    at_prompt(child)
    assert leave(child) == 0


class Stopped(FakeDecoder):
    """A decoder during whose next prompt someone presses Ctrl-C."""

    stop = True

    def prefill(self, *args: Any, **how: Any) -> np.ndarray:
        if self.stop:
            self.stop = False
            os.kill(os.getpid(), signal.SIGINT)
        return super().prefill(*args, **how)


def test_a_stopped_prompt_keeps_what_was_read(capsys) -> None:
    model = fake_model()
    model.decoder = Stopped(reply("hello"))
    talk = Talk(model.chat(), verbose=False, colour=False, interactive=True)
    talk.attached.append("from a file")
    talk.say("what?")
    kept = "what /read brought still goes before your next message"
    assert capsys.readouterr() == ("", f"(stopped; nothing was added; {kept})\n")
    assert talk.chat.messages == []
    talk.say("again?")
    assert capsys.readouterr().out == "hello\n"
    assert talk.chat.messages[0]["content"] == "from a file\n\nagain?"
    talk.say("more?")
    assert talk.chat.messages[2]["content"] == "more?"


def test_what_was_read_is_dropped_with_a_message_that_does_not_fit(
    start: Start, tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    long.write_text("word " * 100, encoding="utf-8")
    child = start(*ONLY_A, "-n", "2", "-c", "100")
    child.send(f"/read {long}\r")
    child.expect_exact("go before your next message")
    at_prompt(child)
    child.send("what?\r")
    child.expect_exact("the message was not added")
    at_prompt(child)
    child.send("hi\r")
    child.expect_exact("AA\r\n")
    at_prompt(child)
    assert saved(child, tmp_path / "c.json") == [("user", "hi"), ("assistant", "AA")]
    assert leave(child) == 0


def test_text_is_utf8_under_any_locale(start: Start, tmp_path: Path, monkeypatch) -> None:
    for name, value in (("LC_ALL", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")):
        monkeypatch.setenv(name, value)
    child = start(*ONLY_A, "-n", "2")
    child.send("日本 é 🎉\r")
    child.expect_exact("AA\r\n")
    at_prompt(child)
    os.write(child.child_fd, b"caf\xe9\r")  # not UTF-8: refused, and the conversation goes on
    child.expect_exact("the user message is not valid Unicode at character 3")
    at_prompt(child)
    assert saved(child, tmp_path / "c.json") == [("user", "日本 é 🎉"), ("assistant", "AA")]
    assert leave(child) == 0


@pytest.mark.parametrize(("wish", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_at_a_terminal(start: Start, monkeypatch, wish: dict[str, str], coloured) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in wish.items():
        monkeypatch.setenv(name, value)
    child = start(*ONLY_A, "-n", "2")
    child.send("hi\r")
    child.expect_exact("AA\r\n")
    at_prompt(child)
    assert leave(child) == 0
    shown = child.logfile_read.getvalue()
    assert ("\x1b[2mkvrt" in shown) is coloured  # the banner is dim
    assert bool(re.search("\x1b\\[[0-9;]*32[0-9;]*m", shown)) is coloured  # the prompt is green


def test_a_history_that_cannot_be_kept_is_said(start: Start, home: Path) -> None:
    (home / "chat_history").unlink(missing_ok=True)
    (home / "chat_history").mkdir()
    try:
        child = start(*ONLY_A, "-n", "2")
        assert "no history is kept" in child.logfile_read.getvalue()
        child.send("hi\r")
        child.expect_exact("AA\r\n")
        at_prompt(child)
        assert leave(child) == 0
    finally:
        (home / "chat_history").rmdir()


def test_a_session_file_goes_on(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    child = start(*ONLY_A, "-n", "2", "--session", str(path))
    child.send("one\r")
    child.expect_exact("AA\r\n")
    at_prompt(child)
    # Saved after each turn, so that even a killed terminal loses nothing.
    assert len(json.loads(path.read_text(encoding="utf-8"))["messages"]) == 2
    assert leave(child) == 0
    child = start(*ONLY_A, "-n", "2", "--session", str(path))
    child.send("/regen\r")
    child.expect_exact("AA\r\n")
    at_prompt(child)
    assert leave(child) == 0
    assert len(json.loads(path.read_text(encoding="utf-8"))["messages"]) == 2


def test_answers_to_a_file_while_a_person_types(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    child = start(*ONLY_A, "-n", "3", "-v", shell=f"> {out}")
    child.send("hi\r")
    child.expect_exact("answer: 3 tokens")
    at_prompt(child)
    assert leave(child) == 0
    assert out.read_bytes() == b"AAA\n"


def test_a_killed_sigint_to_a_waiting_prompt_does_not_end_it(start: Start) -> None:
    child = start(*ONLY_A, "-n", "2")
    os.kill(child.pid, 2)
    child.expect_exact("Ctrl-D or /exit leaves")
    at_prompt(child)
    assert leave(child) == 0
