"""Reads messages at the terminal: line editing, a history file, \"\"\" for several lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .console import note

if TYPE_CHECKING:
    from prompt_toolkit.history import History

FENCE = '"""'


@dataclass(frozen=True)
class Message:
    """What was typed; text within a fence is never a command."""

    text: str
    fenced: bool = False


class LineReader:
    """One message a call. EOFError is Ctrl-D, KeyboardInterrupt is Ctrl-C at the prompt."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        """`ask` shows a prompt and gives a line (or pasted lines)."""
        self._ask = ask

    def read(self) -> Message:
        """The next message: a line, or the lines between two fences."""
        line = self._ask("> ")
        if not line.lstrip().startswith(FENCE):
            return Message(line)
        line = line.lstrip()[len(FENCE) :]
        lines = []
        while not line.rstrip().endswith(FENCE):
            lines.append(line)
            line = self._ask(". ")
        lines.append(line.rstrip()[: -len(FENCE)])
        return Message("\n".join(lines).strip("\n"), fenced=True)


def terminal_reader(history_file: Path, *, colour: bool) -> LineReader:
    """A reader with prompt_toolkit's editing, bracketed paste and history."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    # Answers may go to a file while a person types: the prompt then belongs on stderr.
    output = create_output(sys.stdout if sys.stdout.isatty() else sys.stderr)
    session: PromptSession[str] = PromptSession(history=_history(history_file), output=output)
    style = "bold ansigreen" if colour else ""
    return LineReader(lambda prompt: session.prompt([(style, prompt)]))


def _history(path: Path) -> History:
    """The history file, readable by its owner alone; without a writable one, only in memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        note(f"kvrt: no history is kept: {path}: {error.strerror or error}")
        return InMemoryHistory()
    return FileHistory(str(path))
