"""The commands of `kvrt chat`: one function each, and the table that names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..conversation import is_text
from ..errors import UsageError
from .console import format_bytes, note, read_text_file, timing_lines, user_path
from .options import SAMPLING, sampling_with
from .widths import width_lines

if TYPE_CHECKING:
    from .chat import Talk

# Name in /set -> field of SamplingParams.
SETTINGS = {words[0].lstrip("-"): field for words, field, _, _ in SAMPLING} | {"seed": "seed"}


class Leave(Exception):
    """Raised by /exit: the conversation is over."""


@dataclass(frozen=True)
class ChatCommand:
    """A command: the word, the argument's name in the help ("" for none), what it does."""

    word: str
    argument: str
    help: str
    call: Callable[[Talk, str], None]


def run_command(talk: Talk, line: str) -> None:
    """Run a line that begins with "/". Raises UsageError for unknown ones, Leave for /exit."""
    word, _, argument = line.strip().partition(" ")
    command = next((entry for entry in COMMANDS if entry.word == word), None)
    if command is None:
        raise UsageError(
            f"unknown command {word}; /help lists them "
            "(a space before the / sends the line as a message)"
        )
    argument = argument.strip()
    if argument and not command.argument:
        raise UsageError(f"{word} takes no argument, got {argument!r}")
    command.call(talk, argument)


def _help(talk: Talk, _: str) -> None:
    for command in COMMANDS:
        note(f"{f'{command.word} {command.argument}':<20} {command.help}")
    note('"""                  begins and ends a message of several lines')
    note("Ctrl-C stops an answer, Ctrl-D leaves")


def _exit(talk: Talk, _: str) -> None:
    raise Leave


def _clear(talk: Talk, _: str) -> None:
    talk.chat.clear()
    talk.attached.clear()
    note("the conversation is empty" + ("; the system message stays" if talk.chat.system else ""))


def _regen(talk: Talk, _: str) -> None:
    talk.again()


def _system(talk: Talk, text: str) -> None:
    default = "none is set; the model's template may have one of its own"
    if not text:
        note(f"system message: {talk.chat.system!r}" if talk.chat.system else default)
        return
    talk.chat.set_system(None if text == '""' else text)
    note("the system message is set" if talk.chat.system else f"system message: {default}")


def _read(talk: Talk, path: str) -> None:
    text = read_text_file(_needed(path, "/read"), "/read")
    if not text:
        raise UsageError(f"/read: {path} is empty")
    talk.attached.append(text)
    note(f"{len(text):,} characters of {path} go before your next message")


def _save(talk: Talk, path: str) -> None:
    target = user_path(_needed(path, "/save"), "/save")
    talk.chat.save(target)
    cache = "" if is_text(target) else f" and their cache ({format_bytes(target.stat().st_size)})"
    note(f"saved {len(talk.chat.messages)} messages{cache} to {target}")


def _load(talk: Talk, path: str) -> None:
    before = talk.chat.session
    talk.chat.load(user_path(_needed(path, "/load"), "/load"))
    session = talk.chat.session
    cache = "" if session is before else f" and a cache of {len(session.tokens):,} tokens"
    note(f"loaded {len(talk.chat.messages)} messages{cache} from {path}")


def _stats(talk: Talk, _: str) -> None:
    stats = talk.chat.stats()
    note(
        f"context: {stats.cached_tokens:,} of {stats.max_context:,} tokens in the cache, "
        f"{stats.messages} messages"
    )
    spec, bits = talk.chat.model.spec, stats.bits_per_element
    note(f"cache: {spec}, {format_bytes(stats.cache_bytes)}, {bits:.2f} bits per element")
    for line in timing_lines(stats.timings, stats.cache_bytes, stats.peak_bytes):
        note(line)
    for line in width_lines(stats.widths):
        note(line)


def _set(talk: Talk, text: str) -> None:
    name, _, value = text.partition(" ")
    name = name.lstrip("-").replace("_", "-")
    if name and name not in SETTINGS and name != "n":
        raise UsageError(f"/set: no setting {name!r}; there are {', '.join([*SETTINGS, 'n'])}")
    if value.strip():
        _set_one(talk, name, value.strip())
    for known in [name] if name else [*SETTINGS, "n"]:
        note(f"{known} = {_setting(talk, known)}")


def _set_one(talk: Talk, name: str, value: str) -> None:
    if name != "n":
        sampling = sampling_with(talk.chat.sampling, SETTINGS[name], value)
        talk.chat.set_sampling(sampling)
        return
    try:
        count = int(value)
    except ValueError:
        count = -2
    if count < -1:
        raise UsageError(f"n must be a whole number from -1 (no limit), got {value!r}")
    talk.chat.max_tokens = None if count == -1 else count


def _setting(talk: Talk, name: str) -> Any:
    chat = talk.chat
    value = chat.max_tokens if name == "n" else getattr(chat.sampling, SETTINGS[name])
    return -1 if value is None else value


def _needed(path: str, command: str) -> str:
    if not path:
        raise UsageError(f"{command} needs a file: {command} FILE")
    return path


COMMANDS = (
    ChatCommand("/help", "", "this list", _help),
    ChatCommand("/exit", "", "leave", _exit),
    ChatCommand("/clear", "", "forget the conversation", _clear),
    ChatCommand("/regen", "", "answer the last message once more", _regen),
    ChatCommand("/system", "TEXT", 'set the system message; "" removes it', _system),
    ChatCommand("/read", "FILE", "put a text file before the next message", _read),
    ChatCommand("/save", "FILE", "save with the cache; as text alone to FILE.json", _save),
    ChatCommand("/load", "FILE", "go on with a saved conversation", _load),
    ChatCommand("/stats", "", "speed, cache and memory", _stats),
    ChatCommand("/set", "NAME VALUE", "change a sampling parameter or n; alone: show them", _set),
)
