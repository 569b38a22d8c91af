"""`kvrt chat`: a conversation in the terminal, or one answer for -p, -f or a pipe."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import __version__
from ..errors import ContextFullError, KvrtError, OutOfMemoryError, UsageError
from .chat_commands import Leave, run_command
from .console import (
    DIM,
    PromptProgress,
    check_unicode,
    emit,
    error_line,
    format_bytes,
    note,
    timing_lines,
    user_path,
    wants_colour,
)
from .line_reader import LineReader, terminal_reader
from .main import CommandState
from .options import (
    ModelChoice,
    SamplingFlags,
    model_options_with,
    open_model,
    predict_option,
    prompt_options,
    read_prompt,
    sampling_options,
)

if TYPE_CHECKING:
    from ..chat import Chat
    from ..generate import Model

AT_THE_PROMPT = "(Ctrl-D or /exit leaves; Ctrl-C stops an answer)"


@click.command("chat")
@model_options_with(default_kv="kvrt4")
@prompt_options
@click.option("-sys", "--system-prompt", "system", metavar="TEXT", help="The system message.")
@predict_option(default=-1)
@sampling_options
@click.option(
    "--session",
    metavar="FILE",
    help="Go on with this conversation, and save it there again (.json: its text alone).",
)
@click.option("--color/--no-color", "color", default=None, help="Colour, where it is a terminal.")
@click.pass_context
def command(
    context: click.Context,
    choice: ModelChoice,
    prompt: str | None,
    file: str | None,
    system: str | None,
    predict: int,
    sampling: SamplingFlags,
    session: str | None,
    color: bool | None,
    verbose: bool,
) -> None:
    """Talk with a model.

    With -p, -f or a piped stdin: one answer, to stdout. /help in the conversation lists its
    commands.
    """
    question = read_prompt(prompt, file)
    if question is not None and not question.strip():
        if prompt is not None or file is not None:
            raise UsageError("the prompt is empty")
        note("kvrt: nothing on stdin, nothing to answer")
        return
    session_file = _session_file(session)
    remarks: list[str] = []
    model = open_model(choice, remarks.append)
    # The default None would hide that -sys "" asks for no system message.
    chat = model.chat(sampling=sampling.over(model.sampling))
    chat.max_tokens = None if predict == -1 else predict
    if session_file is not None and session_file.exists():
        chat.load(session_file)
    if system is not None:
        chat.set_system(check_unicode(system, "-sys"))
    interactive = question is None
    colour = wants_colour(color, sys.stderr)
    talk = Talk(chat, verbose=verbose, colour=colour, interactive=interactive)
    for line in (*remarks, banner(model, chat, interactive=interactive)):
        note(line, DIM, colour=colour)
    with saved_at_exit(chat, session_file) as save:
        if question is not None:
            talk.say(question)
        else:
            debug = context.ensure_object(CommandState).debug
            converse(talk, _reader(colour), after_turn=save, debug=debug)


class Talk:
    """A chat at the terminal: streams answers to stdout and says on stderr how they ended.

    `attached` holds the texts that /read put before the next message. They stay if that message is
    stopped before it is part of the conversation, but not if it is refused: it would be so again.
    """

    def __init__(self, chat: Chat, *, verbose: bool, colour: bool, interactive: bool) -> None:
        self.chat = chat
        self.attached: list[str] = []
        self._verbose = verbose
        self._colour = colour
        self._interactive = interactive

    def say(self, text: str) -> None:
        """Send a message and show the answer."""
        message = "\n\n".join([*self.attached, text])
        before = self.chat.messages
        refused = False
        try:
            self._show(lambda **how: self.chat.send(message, **how))
        except KvrtError:
            refused = True
            raise
        finally:
            if refused or self.chat.messages is not before:
                self.attached.clear()

    def again(self) -> None:
        """Show another answer to the last message."""
        self._show(lambda **how: self.chat.regen(**how))

    def _show(self, start: Callable[..., Generator[str, None, None]]) -> None:
        progress = PromptProgress(sys.stderr) if sys.stderr.isatty() else None
        how: dict[str, Any] = {"progress": progress}
        shown = False
        try:
            with ExitStack() as stack:
                if self._interactive:
                    how["cancel"] = stack.enter_context(Interrupt())
                # Closed here and now, so that the history holds the answer whatever ends it.
                for piece in stack.enter_context(closing(start(**how))):
                    _clear(progress)
                    shown = True
                    emit(piece)
        except KvrtError:
            if shown:
                emit("\n")  # the message begins a line of its own
            raise
        finally:
            _clear(progress)
        if shown:
            emit("\n")
        self._say_how_it_ended(shown)

    def _say_how_it_ended(self, shown: bool) -> None:
        limit = self.chat.model.max_context
        reason = self.chat.finish_reason
        if reason == "interrupted":
            kept = "the answer so far is kept" if shown else "nothing was added"
            if self.attached:
                kept += "; what /read brought still goes before your next message"
            self._remark(f"(stopped; {kept})")
        elif reason == "context":
            advice = "; /clear starts afresh" if self._interactive else ""
            self._remark(f"(the context of {limit:,} tokens is full: the answer ends here{advice})")
        elif reason == "length" and self._interactive:
            self._remark(f"(stopped after {self.chat.max_tokens} tokens, as -n asks)")
        if self._verbose:
            stats = self.chat.stats()
            for line in timing_lines(stats.timings, stats.cache_bytes, stats.peak_bytes):
                self._remark(line)

    def _remark(self, text: str) -> None:
        note(text, DIM, colour=self._colour)


class Interrupt:
    """While entered, the first Ctrl-C only sets a flag that is asked for between tokens.

    So no computation is cut in two. A second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self._met = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self) -> bool:
        return self._met

    def _on_signal(self, number: int, frame: object) -> None:
        if self._met:
            raise KeyboardInterrupt
        self._met = True


def converse(
    talk: Talk, reader: LineReader, *, after_turn: Callable[[], None], debug: bool = False
) -> None:
    """The loop of the conversation: it ends by Ctrl-D or /exit, never by an error in a turn."""
    while True:
        try:
            message = reader.read()
        except KeyboardInterrupt:
            note(AT_THE_PROMPT)
            continue
        except EOFError:
            return
        if not message.text.strip():
            continue
        try:
            if message.text.startswith("/") and not message.fenced:
                run_command(talk, message.text)
            else:
                talk.say(message.text if message.fenced else message.text.strip())
            after_turn()
        except Leave:
            return
        except KeyboardInterrupt:
            note("\n(stopped)")
        except BrokenPipeError:
            raise
        except (ContextFullError, OutOfMemoryError) as error:
            error_line(f"{error}; /clear starts afresh")
        except KvrtError as error:
            error_line(str(error))
        except Exception as error:  # a defect of ours must not cost the conversation
            if debug:
                traceback.print_exc()
            error_line(f"internal error: {type(error).__name__}: {error}")


@contextmanager
def saved_at_exit(chat: Chat, path: Path | None) -> Iterator[Callable[[], None]]:
    """Save the conversation however the block ends; gives a function that saves it at once.

    What is in the file already is not written again. An error that ends the block is not hidden by
    one of the saving.
    """
    saved: list[Any] = []

    def save() -> None:
        state = [chat.messages, list(chat.session.tokens)]
        if path is not None and not (state == saved and path.exists()):
            chat.save(path)
            saved[:] = state

    try:
        yield save
    except BaseException:
        try:
            save()
        except KvrtError as error:
            error_line(str(error))
        raise
    save()


def banner(model: Model, chat: Chat, *, interactive: bool) -> str:
    """Model, device, threads, cache format and its cost, context limit in tokens."""
    config, room = model.config, model.room()
    short = "" if room is None or room >= model.max_context else f", memory for about {room:,}"
    lines = [
        f"kvrt {__version__}: {model.name} ({config.model_type}, "
        f"{config.parameters() / 1e6:,.1f} M parameters) on {model.ops.device_name}",
        f"cache {model.spec}: {_cost(model)}; context limit {model.max_context:,}{short}",
    ]
    if chat.messages and interactive:
        lines.append(f"{len(chat.messages)} messages so far")
    if interactive:
        lines.append("/help lists the commands, Ctrl-D leaves")
    return "\n".join(lines)


def _cost(model: Model) -> str:
    """What the cache takes, in words."""
    from ..generate import cache_geometry
    from ..kvstore import bits_per_element, bytes_per_token, estimate

    geometry, spec = cache_geometry(model.config), model.spec
    if spec.compression is not None:
        most = format_bytes(estimate(geometry, spec, model.max_context))
        return f"prompts are compressed at their end, one that fills the context to {most}"
    return (
        f"{bits_per_element(geometry, spec):.2f} bits per element, "
        f"{bytes_per_token(geometry, spec):,.0f} bytes per token"
    )


def _session_file(session: str | None) -> Path | None:
    """The path of --session, refused now rather than at the end if it can never be written."""
    if session is None:
        return None
    from ..paths import NOT_REPLACEABLE, is_replaceable

    path = user_path(session, "--session")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--session: {path} is not a file in an existing folder")
    if not is_replaceable(path):
        raise UsageError(f"--session: {path} is {NOT_REPLACEABLE}")
    return path


def _reader(colour: bool) -> LineReader:
    from ..paths import home

    return terminal_reader(home() / "chat_history", colour=colour)


def _clear(progress: PromptProgress | None) -> None:
    if progress is not None:
        progress.clear()
