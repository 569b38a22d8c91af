"""What every command reads and writes: data to stdout, all else to stderr, text always UTF-8."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import KvrtError, StorageError, UsageError

if TYPE_CHECKING:
    from ..session import Timings

DIM = "2"
_TEXT_LIMIT = 64 << 20  # bytes of a text file; far beyond any context
_ERROR_LIMIT = 600  # characters of an error line, whatever a broken file put into it


def prepare_streams() -> None:
    """Make the standard streams UTF-8 whatever the locale, and usable even when closed."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream, errors in (
        (sys.stdin, "surrogateescape"),  # what is typed; kept, for an error that names the place
        (sys.stdout, "replace"),
        (sys.stderr, "backslashreplace"),
    ):
        reconfigure = getattr(stream, "reconfigure", None)  # absent on a test's capture
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors=errors)


def show_log(verbose: bool) -> None:
    """Send the library's messages (a first kernel compile, a warning) to stderr."""
    logger = logging.getLogger("kvrt")
    logger.handlers = [_LogToStderr()]
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.propagate = False


class _LogToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(f"kvrt: {record.getMessage()}")


def emit(text: str) -> None:
    """Write data to stdout at once. BrokenPipeError means that the reader has left."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise output_error(error) from error


def output_error(error: OSError) -> Exception:
    """What a failed write to stdout means: a reader who left, or a real failure."""
    if isinstance(error, BrokenPipeError) or error.errno == errno.EPIPE:
        return BrokenPipeError(error.errno, "stdout is closed")
    return StorageError(f"cannot write to stdout: {error.strerror or error}")


def emit_json(data: Any) -> None:
    """Write one JSON object, and a newline, to stdout."""
    emit(json.dumps(data, ensure_ascii=False) + "\n")


def note(text: str, style: str = "", *, colour: bool = False) -> None:
    """Write a line for the person at the terminal, to stderr."""
    print(paint(text, style) if colour and style else text, file=sys.stderr, flush=True)


def error_line(text: str) -> None:
    """Write `kvrt: error: TEXT` to stderr, on one line whatever the text holds."""
    line = " ".join(text.split())
    note(f"kvrt: error: {line if len(line) <= _ERROR_LIMIT else line[:_ERROR_LIMIT] + '...'}")


def paint(text: str, style: str) -> str:
    """The text in a terminal style (ANSI codes)."""
    return f"\x1b[{style}m{text}\x1b[0m"


def wants_colour(choice: bool | None, stream: TextIO) -> bool:
    """Whether to colour a stream: never when it is not a terminal, else as asked.

    Without --color or --no-color, NO_COLOR and TERM=dumb are respected.
    """
    if not stream.isatty() or choice is False:
        return False
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return choice is True or not plain


def user_path(text: str, option: str) -> Path:
    """A path as a person typed it, with `~` expanded. UsageError for one that no file can have."""
    if not text:
        raise UsageError(f"{option}: the path is empty")
    try:
        path = Path(text).expanduser()
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # whether it has to be there is the caller's matter
    except (OSError, ValueError, RuntimeError) as error:  # too long; a NUL; no such ~user
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{option}: {text!r:.80} is no possible path: {reason}") from None
    return path


def read_text_file(path: str, option: str) -> str:
    """Text of a UTF-8 file, less one last newline.

    Raises UsageError if it cannot be read, KvrtError naming the place if it is not UTF-8.
    """
    try:
        with user_path(path, option).open("rb") as file:
            data = file.read(_TEXT_LIMIT + 1)
    except OSError as error:
        raise UsageError(f"{option}: cannot read {path}: {error.strerror or error}") from error
    if len(data) > _TEXT_LIMIT:
        raise UsageError(f"{option}: {path} is more than {_TEXT_LIMIT >> 20} MiB of text")
    return _decode(data, path)


def read_stdin() -> str:
    """All of stdin as UTF-8 text, less one last newline; empty if stdin is closed."""
    if sys.stdin is None:
        return ""
    return _decode(sys.stdin.buffer.read(), "stdin")


def stdin_is_terminal() -> bool:
    """Whether a person can answer on stdin."""
    return sys.stdin is not None and sys.stdin.isatty()


def check_unicode(text: str, option: str) -> str:
    """The text of an argument, refused if the shell handed over bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise KvrtError(f"{option} is not valid UTF-8 at character {error.start}") from None
    return text


def _decode(data: bytes, source: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KvrtError(
            f"{source} is not valid UTF-8: byte 0x{data[error.start]:02x} at position "
            f"{error.start} ({error.reason})"
        ) from None
    text = text.removeprefix("\ufeff")
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def format_bytes(count: float) -> str:
    """A byte count for people: `1.4 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def timing_lines(timings: Timings, cache_bytes: int, peak_bytes: int) -> list[str]:
    """The lines of `/stats` and `--verbose` about one run."""
    computed = timings.prompt_tokens - timings.reused_tokens
    return [
        f"prompt: {computed:,} tokens in {timings.prefill_s:.2f} s "
        f"({timings.prompt_tokens_per_s:.1f} tokens/s), {timings.reused_tokens:,} from the cache",
        f"answer: {timings.generated_tokens:,} tokens in {timings.decode_s:.2f} s "
        f"({timings.tokens_per_s:.1f} tokens/s)",
        f"memory: cache {format_bytes(cache_bytes)}, peak {format_bytes(peak_bytes)}",
    ]


@dataclass
class PromptProgress:
    """Shows how far a long prompt is, on one terminal line that goes away when it is done."""

    stream: TextIO
    clock: Callable[[], float] = monotonic
    delay_s: float = 1.0
    _started: float = field(init=False)
    _shown: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def __call__(self, done: int, total: int) -> None:
        """Progress of a prefill, in units of the decoder's own."""
        percent = 100 * done // max(total, 1)
        if self.clock() - self._started >= self.delay_s and percent != self._shown:
            self._shown = percent
            self.stream.write(f"\rreading the prompt: {percent:3d} %")
            self.stream.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self._shown >= 0:
            self.stream.write("\r" + " " * 28 + "\r")
            self.stream.flush()
            self._shown = -1
