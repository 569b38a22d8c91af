"""The progress of a long job, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from ..progress import Progress, silent
from .console import format_bytes, note

if TYPE_CHECKING:
    from rich.console import Console

_REDRAW_S = 0.1
_LONG_S = 1.0
_BAR_WIDTH = 32


class ConsoleProgress:
    """A kvrt Progress: a bar on a terminal, else one line a stage.

    `amount` puts a count of the job's units into words; a stage that ends within `delay_s` is not
    shown. As a context manager it takes the bar away at the end, after an error too.
    """

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = monotonic,
        amount: Callable[[int], str] = format_bytes,
        delay_s: float = 0.0,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._amount = amount
        self._delay_s = delay_s
        self._began_at = 0.0
        self._stage = ""
        self._drawn_at = float("-inf")
        self._console: Console | None = None

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Show how far a stage is; `done` and `total` in the job's units."""
        new = stage != self._stage
        self._stage = stage
        if not self._stream.isatty():
            if new:
                note(f"kvrt: {stage}" + (f" ({self._amount(total)})" if total else ""))
            return
        now = self._clock()
        if new:
            self._began_at = now
        if now - self._began_at < self._delay_s:
            return
        finished = total is not None and done >= total
        if new or finished or now - self._drawn_at >= _REDRAW_S:
            self._drawn_at = now
            self._draw(stage, done, total)

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._console is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._console = None

    def _draw(self, stage: str, done: int, total: int | None) -> None:
        from rich.console import Console
        from rich.text import Text

        if self._console is None:
            self._console = Console(file=self._stream, highlight=False)
        line = Text(f"{stage:<9} ", no_wrap=True, overflow="crop")
        if total:
            filled = _BAR_WIDTH * done // total
            line.append("━" * filled, "green")
            line.append("━" * (_BAR_WIDTH - filled), "bright_black")
            line.append(
                f" {100 * done // total:3d} %  {self._amount(done)} of {self._amount(total)}"
            )
        # Each line ends at its own start, so that whatever is printed next replaces it.
        self._stream.write("\r\x1b[K")
        self._console.print(line, end="\r", crop=True)


def console_progress(amount: Callable[[int], str] = format_bytes) -> ConsoleProgress:
    """The progress of a long job for the person at the terminal, on stderr."""
    return ConsoleProgress(sys.stderr, amount=amount)


def loading_progress() -> AbstractContextManager[Progress]:
    """The progress of a load that takes long, for a person at a terminal alone."""
    if not sys.stderr.isatty():
        return nullcontext(silent)
    return ConsoleProgress(sys.stderr, delay_s=_LONG_S)


def tokens(count: int) -> str:
    """An amount of tokens."""
    return f"{count:,} tokens"
