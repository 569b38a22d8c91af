"""`kvrt bench --scan`: trends, pictures; and what shows in tests and scans that is not as asked."""

from __future__ import annotations

import io
import json
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.cli.main import run
from kvrt.generate import Model
from kvrt.kvstore import KVSpec, KVStore, estimate
from kvrt.kvstore.stats import read_bytes
from kvrt.source import find_shape
from tests.helpers.bench_cli import (
    SCAN,
    TESTS,
    error_of,
    on_decode,
    parsed,
    printed,
    rows_of,
    table_of,
    tables_of,
)
from tests.helpers.fake_clock import BANDWIDTH, FakeClock, time_by_bytes
from tests.helpers.tiny_model import write_tiny_model

SCAN_KEYS = {
    "context", "kv", "decode_us", "std_us", "samples_us", "slope_us_per_1k", "intercept_us",
    "break_even_tokens", "fits_tokens", "cache_bytes", "peak_bytes", "effective_kv", "fill",
    "bits_per_element", "weight_bytes", "read_GBps", "device", "remarks", "commit",
}  # fmt: skip


# --- scans ---


@pytest.mark.usefixtures("clock")
def test_rows_of_a_scan(model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[KVSpec, int]] = []
    on_decode(monkeypatch, lambda store: steps.append((store.spec, len(store))))
    rows = rows_of(capsys, [*SCAN, "-m", model, "-t", "1", "--limit", "4MB"])
    contexts = [64, 128, 256, 512]
    assert [(row["kv"], row["context"]) for row in rows] == [
        *product(["f16", "kvrt2", "q8_0"], contexts)  # f16 first, the others as they were given
    ]
    # The last token of a repetition fills the context: once alone, then two rounds of all, of which
    # the first is as much earlier, so that they meet the places where pages are sealed in turn.
    formats = [KVSpec.parse(name) for name in ("f16", "kvrt2", "q8_0")]
    alone = [*product(formats, contexts)]
    timed = [(spec, end - back) for end in contexts for back in (4, 0) for spec in formats]
    assert steps == [
        (spec, context + step) for spec, context in alone + timed for step in range(-3, 1)
    ]
    shape = find_shape(model)
    windows = shape.config.windows if shape.config else ()
    # All weights but the embedding and five gains of norms, in f16.
    weights = shape.weight_bytes - 320 * 64 * 2 - 5 * 64 * 2
    lines = {}
    for name in ("f16", "kvrt2", "q8_0"):
        spec = KVSpec.parse(name)
        times = []
        found = [row for row in rows if row["kv"] == name]
        for row in found:
            assert row.keys() >= SCAN_KEYS and row["fill"] == "synthetic"
            context = row["context"]
            size = estimate(shape.geometry, spec, context)
            assert row["cache_bytes"] == row["estimated_bytes"] == size
            samples = []
            for end in (context - 4, context):
                read = read_bytes(shape.geometry, spec, range(end - 3, end + 1), windows)
                samples.append((weights + statistics.fmean(read)) / BANDWIDTH * 1e6)
            times.append(statistics.fmean(samples))
            assert row["decode_us"] == pytest.approx(times[-1])
            assert row["samples_us"] == pytest.approx(samples)
            assert row["std_us"] == pytest.approx(statistics.stdev(samples), abs=1e-6)
            assert row["read_share"] == pytest.approx(1.0)
        slope, intercept = np.polyfit(contexts, times, 1)
        lines[name] = slope, intercept
        (fits,) = {row["fits_tokens"] for row in found}
        room = 4_000_000 - shape.weight_bytes
        sizes = [estimate(shape.geometry, spec, tokens) for tokens in (fits, fits + 1)]
        assert sizes[0] <= room < sizes[1]
        for row in found:  # a trend is in all rows of its format
            assert row["slope_us_per_1k"] == pytest.approx(slope * 1000)
            assert row["intercept_us"] == pytest.approx(intercept)
            if name == "f16":
                assert row["break_even_tokens"] is row["slopes_differ"] is None
                continue
            assert row["slopes_differ"] is True
            lead = intercept - lines["f16"][1]
            gain = lines["f16"][0] - slope
            crossing = np.ceil(max(0, lead / gain))
            assert row["break_even_tokens"] == pytest.approx(crossing, abs=1)
    assert lines["kvrt2"][0] < lines["q8_0"][0] < lines["f16"][0]
    assert rows[-1]["break_even_tokens"] > 0


def test_times_are_means_and_one_slow_repetition_shows(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    """A decoded token reads less than 1 ms of bytes here; the rest is what it waits."""
    waits = iter([0.0, 1.0, 2.0, 6.0])  # a warm-up, three repetitions
    on_decode(monkeypatch, lambda store: clock.wait(next(waits)))
    args = ["--scan", "20", "-n", "1", "-r", "3", "-m", model, "-t", "1", "--kv", "f16"]
    (row,) = rows_of(capsys, args)
    assert row["samples_us"] == pytest.approx([1e6, 2e6, 6e6], rel=1e-3)
    assert row["decode_us"] == statistics.fmean(row["samples_us"])
    assert row["std_us"] == statistics.stdev(row["samples_us"])
    read = row["decode_us"] / 1e6 - 3.0  # seconds, at BANDWIDTH
    assert row["read_GBps"] == pytest.approx(read * BANDWIDTH / 3.0 / 1e9, rel=1e-3)
    assert row["remarks"] == ["unsteady: deviation 88%"]


@pytest.mark.usefixtures("clock")
def test_trends_for_people(model: str, capsys: Any) -> None:
    args = [*SCAN, "-m", model, "-t", "1", "--limit", "3MB"]
    rows = {row["kv"]: row for row in rows_of(capsys, args)}
    points, trends = tables_of(printed(capsys, args, "md"))
    assert len(points) == 12 and [trend["kv"] for trend in trends] == list(rows)
    for trend in trends:
        row = rows[trend["kv"]]
        error = row["slope_error_us_per_1k"]
        assert trend["us per 1k tokens"] == f"{row['slope_us_per_1k']:,.0f} ± {error:,.0f}"
        assert trend["us at 0"] == f"{row['intercept_us']:,.0f}"
        assert trend["tokens that fit"] == f"{row['fits_tokens']:,}"
        word = "" if trend["kv"] == "f16" else f"from {row['break_even_tokens']:,}"
        assert trend["faster than f16"] == word


@pytest.mark.usefixtures("clock")
def test_a_scan_without_f16_has_no_break_even(model: str, capsys: Any) -> None:
    args = ["--scan", "64:256", "-m", model, "-t", "1", "-r", "1", "-n", "2", "--kv", "q8_0"]
    assert [row["break_even_tokens"] for row in rows_of(capsys, args)] == [None] * 3
    _, trends = tables_of(printed(capsys, args, "md"))
    assert [trend["faster than f16"] for trend in trends] == [""]


@pytest.mark.usefixtures("clock")
def test_f16_is_the_first_under_any_name(model: str, capsys: Any) -> None:
    args = ["--scan", "64:256", "-m", model, "-t", "1", "-r", "1", "-n", "2"]
    rows = rows_of(capsys, [*args, "--kv", "q8_0", "--kv", "k=f16,v=f16"])
    assert [row["kv"] for row in rows] == ["k=f16,v=f16"] * 3 + ["q8_0"] * 3
    assert rows[0]["break_even_tokens"] is None and rows[-1]["break_even_tokens"] > 0


@pytest.mark.usefixtures("clock")
def test_one_context_has_no_trend(model: str, capsys: Any) -> None:
    """And a context of fewer tokens than are decoded begins with none; -n is 16 by default."""
    args = ["--scan", "3", "-m", model, "-t", "1", "-r", "1", "--kv", "f16,q8_0"]
    for row in rows_of(capsys, args):
        assert row["context"] == 3 and row["decode_us"] > 0
        assert row["slope_us_per_1k"] is row["intercept_us"] is row["break_even_tokens"] is None
    _, trends = tables_of(printed(capsys, args, "md"))
    assert [trend["us per 1k tokens"] for trend in trends] == ["", ""]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("fill", ["prefill", "synthetic"])
def test_contexts_up_to_the_models_limit(model: str, capsys: Any, fill: str) -> None:
    args = ["--scan", "1000,1k", "-m", model, "-t", "1", "-r", "1", "--kv", "f16", "--fill", fill]
    assert [row["context"] for row in rows_of(capsys, args)] == [1000, 1024]


@pytest.mark.usefixtures("clock")
def test_contexts_that_do_not_fit_are_left_out_with_a_word(model: str, capsys: Any) -> None:
    """Weights 353 kB; f16 holds 591 kB at 512, and 524 kB are K and V on their way into it."""
    args = ["--scan", "128:1k", "-m", model, "-t", "1", "-r", "1", "-n", "2", "--kv", "kvrt2,f16"]
    assert run(["bench", *args, "--limit", "1200kB", "-o", "json"]) == 0
    out, err = capsys.readouterr()
    found = [(row["kv"], row["context"]) for row in json.loads(out)]
    assert found == [("f16", 128), ("f16", 256), *(("kvrt2", c) for c in (128, 256, 512))]
    said = [line for line in err.splitlines() if "left out" in line]
    assert len(said) == 2
    assert said[0].startswith("kvrt: f16: contexts from 512 on are left out, they need 1.4")
    assert said[1].startswith("kvrt: kvrt2: contexts from 1,024 on are left out, they need 1.")
    assert all(line.endswith(" of 1.20 MB") for line in said)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("command", [["-p", "4", "-n", "0"], ["--scan", "8,9"]])
def test_a_default_format_that_does_not_fit_the_model_is_left_out_with_a_word(
    tmp_path: Path, capsys: Any, command: list[str]
) -> None:
    write_tiny_model(tmp_path / "narrow", tokenizer=True)  # head_dim 16
    args = [*command, "-m", str(tmp_path / "narrow"), "-t", "1", "-r", "1", "-o", "json"]
    assert run(["bench", *args]) == 0
    out, err = capsys.readouterr()
    assert {row["kv"] for row in json.loads(out)} == {"f16"}
    assert "kvrt: the default cache format kvrt4 does not fit this model (" in err
    assert "groups of 64 do not divide" in error_of(capsys, [*args, "--kv", "f16,kvrt4"])


def test_a_scan_is_drawn_into_a_file(
    model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scan.svg"
    path.write_text("old")
    args = [*SCAN, "-m", model, "-t", "1", "--plot", str(path), "-o", "json"]
    monkeypatch.setattr(CpuOps, "peak_bytes", lambda self: 123_456_789)
    pictures = []
    for slow in (1.0, 1.0, 5.0):
        with monkeypatch.context() as patch:
            time_by_bytes(patch, BANDWIDTH, lambda spec, slow=slow: slow)
            assert run(["bench", *args]) == 0
        out, err = capsys.readouterr()
        assert len(json.loads(out)) == 12 and f"kvrt: drawn into {path}\n" in err
        pictures.append(path.read_bytes())
        assert ElementTree.fromstring(pictures[-1]).tag == "{http://www.w3.org/2000/svg}svg"
    assert pictures[0] == pictures[1] != pictures[2]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("clock")
def test_a_scan_is_drawn_on_the_terminal(model: str, capsys: Any) -> None:
    args = [*SCAN, "-m", model, "-t", "1"]
    assert run(["bench", *args, "--plot", "-", "-o", "jsonl"]) == 0
    out, err = capsys.readouterr()
    assert len(parsed("jsonl", out)) == 12
    assert "decode time per token" in err and "KV cache at 512 tokens" in err
    bars = err.split("KV cache at 512 tokens")[1]
    assert [line.split()[1] for line in bars.splitlines() if line] == ["f16", "kvrt2", "q8_0"]
    assert "\x1b" not in err  # no terminal, no colour
    assert run(["bench", *args]) == 0
    assert "decode time per token" not in capsys.readouterr().err  # no terminal, nothing asked


@pytest.mark.usefixtures("clock")
def test_lines_of_a_picture_are_told_apart_by_what_varies(model: str, capsys: Any) -> None:
    """And each combination is compared with its own f16."""
    args = ["--scan", "64,256", "-m", model, "-r", "1", "-n", "2", "--kv", "q8_0,f16"]
    args += ["-t", "1,2", "--plot", "-", "-o", "json"]
    assert run(["bench", *args]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    runs = [(threads, kv) for threads in (1, 2) for kv in ("f16", "q8_0") for _ in range(2)]
    assert [(row["threads"], row["kv"]) for row in rows] == runs
    crossings = [row["break_even_tokens"] for row in rows if row["kv"] == "q8_0"]
    assert min(crossings) > 0 and max(crossings) - min(crossings) <= 1  # of rounded times
    for threads, kv in runs:
        assert f" {kv}, threads {threads} " in err
    _, trends = tables_of(printed(capsys, [*args[:-2], "--limit", "1GB"], "md"))
    told = [(int(trend["threads"]), trend["kv"]) for trend in trends]
    assert told == runs[::2]


class Terminal(io.StringIO):
    """A stream to a terminal that both streams share."""

    def __init__(self, name: str, written: list[tuple[str, str]]) -> None:
        super().__init__()
        self._to = name
        self._written = written

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._written.append((self._to, text))
        return len(text)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("command", [TESTS, SCAN], ids=["tests", "scan"])
def test_on_a_terminal_the_bar_goes_away_for_rows_and_a_scan_is_drawn(
    model: str, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    written: list[tuple[str, str]] = []
    monkeypatch.setattr(sys, "stdout", Terminal("out", written))
    monkeypatch.setattr(sys, "stderr", Terminal("err", written))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert run(["bench", *command, "-m", model, "-t", "1"]) == 0
    bar = False
    for stream, text in written:
        assert not (bar and stream == "out" and text), text
        if stream == "err" and text:
            bar = not text.endswith(("\x1b[K", "\n"))
    shown = "".join(text for stream, text in written if stream == "err")
    assert "100 %" in shown and not bar
    drawn = "KV cache at 512 tokens" in shown and "\x1b[38;5;" in shown
    assert drawn == (command == SCAN)


# --- honesty ---


def test_a_slowed_kernel_shows(model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["--scan", "256:1k", "-m", model, "-t", "1", "-r", "2", "--kv", "f16,kvrt2"]
    args += ["--limit", "1GB"]  # what is free differs between runs
    found = {}
    for slow in (1.0, 20.0):
        with monkeypatch.context() as patch:
            kvrt2 = str(KVSpec.parse("kvrt2"))
            slowness = {kvrt2: slow}
            time_by_bytes(patch, BANDWIDTH, lambda spec, of=slowness: of.get(spec, 1.0))
            points, trends = tables_of(printed(capsys, args, "md"))
            found[slow] = (rows_of(capsys, args)[-1], points[-1], trends)
    (sound, sound_point, sound_trends), (slowed, slowed_point, trends) = found.values()
    assert sound["read_share"] == pytest.approx(1.0) and slowed["read_share"] < 0.2
    assert slowed["slope_us_per_1k"] > 10 * sound["slope_us_per_1k"]
    assert sound["break_even_tokens"] is not None and slowed["break_even_tokens"] is None
    assert sound_point["of device"] == "100 %"
    assert int(slowed_point["of device"].removesuffix(" %")) < 20
    assert sound_trends[1]["faster than f16"].startswith("from ")
    assert trends[1]["faster than f16"] == "never"
    assert trends[0] == sound_trends[0]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("command", [["-p", "0", "-n", "2", "-d", "300"], ["--scan", "256,302"]])
def test_a_format_that_falls_back_in_silence_shows(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    new_store, f16 = Model.new_store, KVSpec.parse("f16")
    monkeypatch.setattr(Model, "new_store", lambda self, spec=None: new_store(self, f16))
    args = [*command, "-m", model, "-t", "1", "-r", "1", "--kv", "f16,kvrt2"]
    rows = rows_of(capsys, args)
    last = rows[-1]
    assert last["kv"] == "kvrt2" and last["effective_kv"] == "f16"
    assert last["bits_per_element"] == 16.0 and last["cache_bytes"] != last["estimated_bytes"]
    said = f"asked for {KVSpec.parse('kvrt2')}, ran f16"
    assert said in last["remarks"] and rows[0]["remarks"] == []
    cells = table_of(printed(capsys, args, "md"))
    assert cells[-1]["bits"] == "16.00" and said in cells[-1]["remarks"]
    assert "its format" in cells[-1]["remarks"] and cells[0]["remarks"] == ""


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("command", [["-p", "8", "-n", "2"], ["--scan", "9,20", "-n", "2"]])
def test_a_run_without_a_warm_up_shows(model: str, capsys: Any, command: list[str]) -> None:
    args = [*command, "-m", model, "-t", "1", "-r", "3", "--kv", "f16"]
    for more, remarks in (([], []), (["--no-warmup"], ["no warm-up"])):
        for row in rows_of(capsys, [*args, *more]):
            assert row["remarks"] == remarks and row["warmup"] == (not remarks)
        for cells in table_of(printed(capsys, [*args, *more], "md")):
            assert cells["remarks"] == "".join(remarks)


@pytest.mark.parametrize("command", [["-p", "0", "-n", "2"], ["--scan", "20", "-n", "2"]])
def test_a_first_repetition_that_was_cold_shows(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, clock: FakeClock, command: list[str]
) -> None:
    steps = iter(range(6))
    on_decode(monkeypatch, lambda store: clock.wait(1.0) if next(steps, 5) < 3 else None)
    args = [*command, "-m", model, "-t", "1", "-r", "3", "--kv", "f16", "-oe", "jsonl"]
    (cells,) = table_of(printed(capsys, args, "md"))
    assert "not warmed up" in cells["remarks"]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("command", [["-p", "0", "-n", "1"], ["--scan", "8,9", "-n", "1"]])
def test_a_broken_decode_kernel_shows_in_the_check(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    args = [*command, "-m", model, "-t", "1", "-r", "1", "--kv", "f16,q8_0"]
    assert {row["check_kld"] for row in rows_of(capsys, args)} == {None}
    assert "KLD" not in printed(capsys, args, "md")
    args.append("--check")
    f16, *_, sound = rows_of(capsys, args)
    assert (f16["check_kld"], f16["check_top1"], f16["check_tokens"]) == (0.0, 100.0, 64)
    assert 0 < sound["check_kld"] < 0.05 and sound["check_tokens"] == 64
    running: list[str] = []
    attend, new_store = CpuOps.attend, Model.new_store

    def broken(self: CpuOps, q: Any, view: Any, *rest: Any) -> None:
        attend(self, q, view, *rest)
        if running[-1] == "q8_0":
            rest[-1][...] = 0.0

    def told(self: Model, spec: KVSpec | None = None) -> KVStore:
        running.append(str(spec or self.spec))
        return new_store(self, spec)

    monkeypatch.setattr(CpuOps, "attend", broken)
    monkeypatch.setattr(Model, "new_store", told)
    f16, *_, ill = rows_of(capsys, args)
    assert f16["check_kld"] == 0.0
    assert ill["check_kld"] > 100 * sound["check_kld"] and ill["check_top1"] < sound["check_top1"]
    cells = table_of(printed(capsys, args, "md"))
    assert (cells[0]["KLD"], cells[0]["top-1 %"]) == ("0.0000", "100.0")
    assert cells[-1]["KLD"] == f"{ill['check_kld']:.4f}"
    assert cells[-1]["top-1 %"] == f"{ill['check_top1']:.1f}"
