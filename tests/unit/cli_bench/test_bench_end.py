"""`kvrt bench`: what an early end leaves of tests and scans, in every form of output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvrt.bench import plot
from kvrt.bench.plot import Series
from kvrt.cli import bench as cli_bench
from kvrt.cli.main import run
from kvrt.kvstore import KVStore
from tests.helpers.bench_cli import (
    FORMS,
    SCAN,
    form,
    on_decode,
    parsed,
    printed,
    tables_of,
    without_notes,
)

ROOT = Path(__file__).resolve().parents[3]
SCANNED = ("f16", "kvrt2", "q8_0")  # by SCAN, in this order
ALONE, ROUNDS = 3 * 4 * 4, 3 * 2 * 4
"""Tokens that SCAN decodes in its first pass, and at each context in its second."""


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C inside the decoder once so many tokens were decoded."""
    left = iter(range(after))

    def count(store: KVStore) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    on_decode(monkeypatch, count)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("output", FORMS)
@pytest.mark.parametrize(
    ("after", "done"),
    [(5, 0), (16 + 15, 0), (16 + 16, 2), (16 + 31, 2)],
    ids=["alone", "first-depth", "second-depth", "last-token"],
)
def test_ctrl_c_keeps_the_depths_that_are_done(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, output: str, after: int, done: int
) -> None:
    """2 formats at 2 depths decode 4 tokens each alone, then 2 * 2 * 4 at a depth in rounds."""
    args = ["-p", "0", "-n", "4", "-r", "2", "-d", "0,64", "--kv", "kvrt2,f16", "-t", "1"]
    interrupt(monkeypatch, after)
    assert run(["bench", *args, "-m", model, *form(output)]) == 130
    out, err = capsys.readouterr()
    assert all(line.startswith("kvrt: ") and "error" not in line for line in err.splitlines())
    names = ["f16", "kvrt2"][:done]
    if output in ("md", "table"):
        lines = out.splitlines()[2 if output == "md" else 1 :]
        assert [name for line in lines for name in names if name in line.split()] == names
        assert [line.count("tg4") for line in lines] == [1] * done
        assert "d64" not in out
    else:
        assert [(row["kv"], row["test"]) for row in parsed(output, out)] == [
            (name, "tg4") for name in names
        ]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("output", FORMS)
@pytest.mark.parametrize("more", [0, ROUNDS - 1], ids=["first-token", "last-token"])
def test_ctrl_c_at_the_third_context_keeps_two_of_every_format(
    model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, output: str, more: int
) -> None:
    path = tmp_path / "scan.svg"
    drawn: list[Series] = []
    write_plot = plot.write_plot

    def seen(path: Path, series: Sequence[Series], *rest: str) -> None:
        drawn.extend(series)
        write_plot(path, series, *rest)

    monkeypatch.setattr(plot, "write_plot", seen)
    interrupt(monkeypatch, ALONE + 2 * ROUNDS + more)
    assert run(["bench", *SCAN, "-m", model, "-t", "1", *form(output), "--plot", str(path)]) == 130
    out, err = capsys.readouterr()
    assert "kvrt: error" not in err and "Traceback" not in err
    assert ElementTree.fromstring(path.read_bytes()).tag.endswith("svg")
    assert [(one.name, list(one.contexts)) for one in drawn] == [
        (name, [64, 128]) for name in SCANNED
    ]
    assert all(one.line is not None and len(one.decode_us) == 2 for one in drawn)
    if output == "table":
        points, trends = (part.splitlines()[1:] for part in out.split("\n\n"))
        assert [line.split()[0] for line in points] == [*SCANNED] * 2
        assert [line.split()[0] for line in trends] == [*SCANNED]
    elif output == "md":
        found, fitted = tables_of(out)
        assert [(row["context"], row["kv"]) for row in found] == [*product(["64", "128"], SCANNED)]
        assert [trend["kv"] for trend in fitted] == [*SCANNED]
        assert all(trend["us per 1k tokens"] != "" for trend in fitted)
    else:
        rows = parsed(output, out)
        assert [(row["kv"], int(row["context"])) for row in rows] == [*product(SCANNED, [64, 128])]
        assert all(row["slope_us_per_1k"] not in ("", None) for row in rows)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("output", FORMS)
def test_ctrl_c_at_a_tests_peak_keeps_the_formats_before_it_without_a_warm_up(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    """Formats follow each other: 2 * 2 * 4 tokens of repetitions, then 2 * 4 for the peaks."""
    args = ["-p", "0", "-n", "4", "-r", "2", "-d", "0,64", "--kv", "f16,kvrt2", "-t", "1"]
    interrupt(monkeypatch, 2 * (16 + 8) - 1)
    assert run(["bench", *args, "--no-warmup", "-m", model, *form(output)]) == 130
    out, _ = capsys.readouterr()
    if output in ("md", "table"):
        lines = out.splitlines()[2 if output == "md" else 1 :]
        assert ["d64" in line for line in lines] == [False, True]
        assert all("f16" in line.split() for line in lines)
    else:
        assert [(row["kv"], row["test"]) for row in parsed(output, out)] == [
            ("f16", "tg4"),
            ("f16", "tg4 @ d64"),
        ]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("after", [3, ALONE, ALONE + ROUNDS - 1])
def test_ctrl_c_before_the_first_context_is_done_draws_nothing(
    model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    path = tmp_path / "scan.svg"
    args = [*SCAN, "-m", model, "-t", "1", "--plot", str(path)]
    for output, nothing in (("json", "[]\n"), ("md", "")):
        with monkeypatch.context() as patch:
            interrupt(patch, after)
            assert printed(capsys, args, output, 130) == nothing
    assert not path.exists()


def test_a_reader_that_leaves_ends_it_quietly(model: str) -> None:
    """200 rows are more than a pipe holds, so that one of them finds no reader."""
    args = ["-m", model, "-p", "1-100", "-n", "0", "-r", "1", "--no-warmup", "-t", "1"]
    command = [sys.executable, "-m", "kvrt", "bench", *args, "-o", "jsonl"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["test"] == "pp1"
        process.stdout.close()
        err = process.stderr.read().decode("utf-8")
    assert process.returncode == 1
    assert len(err.splitlines()) == 2
    assert all(line.startswith("kvrt: ") and "error" not in line for line in err.splitlines())


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("output", ["md", "jsonl"])
def test_a_reader_that_leaves_takes_nothing_else_along(
    model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    """Rows on stderr are whole, and what was measured is drawn."""
    path = tmp_path / "scan.svg"
    left = iter(range(2))

    def gone(text: str) -> None:
        if next(left, None) is None:
            raise BrokenPipeError(32, "stdout is closed")

    monkeypatch.setattr(cli_bench, "emit", gone)
    args = [*SCAN, "-m", model, "-t", "1", "-o", output, "-oe", "json", "--plot", str(path)]
    assert run(["bench", *args]) == 1
    err = capsys.readouterr().err
    assert "kvrt: error" not in err and "Traceback" not in err
    assert isinstance(json.loads(without_notes(err)), list)
    assert path.exists()
