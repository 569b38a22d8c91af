"""The progress display: a bar on a terminal, plain lines elsewhere."""

import io
import re
import sys

import pytest

from kvrt.cli.progress import ConsoleProgress, loading_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;]*[mK]", "", stream.getvalue())


def test_a_terminal_gets_one_line_that_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    stream, time = Terminal(), iter([0.0, 0.05, 0.2, 0.21])
    with ConsoleProgress(stream, clock=lambda: next(time)) as progress:
        progress("download", 0, 2048)
        progress("download", 1, 2048)  # too soon to be drawn
        progress("download", 1024, 2048)
        progress("download", 2048, 2048)  # the end is always drawn
    frames = [frame.strip() for frame in shown(stream).split("\r") if frame.strip()]
    assert [frame.split("━")[-1].strip() for frame in frames] == [
        "0 %  0 B of 2.0 KiB",
        "50 %  1.0 KiB of 2.0 KiB",
        "100 %  2.0 KiB of 2.0 KiB",
    ]
    assert "\n" not in stream.getvalue() and stream.getvalue().endswith("\r\x1b[K")


def test_the_bar_goes_away_after_an_error_too(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    try:
        with ConsoleProgress(stream) as progress:
            progress("wait for another pull", 0, None)
            raise ValueError
    except ValueError:
        pass
    assert "wait for another pull" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_elsewhere_a_line_a_stage(capsys):
    progress = ConsoleProgress(io.StringIO())
    for done in range(3):
        progress("download", done, 2048)
    progress("convert", 1, None)
    progress.close()
    assert capsys.readouterr().err == "kvrt: download (2.0 KiB)\nkvrt: convert\n"


def test_what_ends_soon_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for times, drawn in (([0.0, 0.4, 0.9], False), ([0.0, 0.9, 1.1], True)):
        stream, clock = Terminal(), iter(times)
        with ConsoleProgress(stream, lambda clock=clock: next(clock), delay_s=1.0) as progress:
            for done in (0, 1024, 2048):
                progress("load", done, 2048)
        assert ("2.0 KiB of 2.0 KiB" in stream.getvalue()) == drawn
        assert bool(stream.getvalue()) == drawn


def test_loading_is_shown_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with loading_progress() as progress:
        progress("load", 0, 10)
        progress("load", 10, 10)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(loading_progress(), ConsoleProgress)
