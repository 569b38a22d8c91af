"""`kvrt bench`: rows of tests, and that every form of output holds the same."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from datetime import datetime
from itertools import product
from typing import Any

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.bench.axes import bytes_word
from kvrt.cli.main import run
from kvrt.kvstore import KVSpec, KVStore, estimate
from kvrt.models.decoder import Decoder
from kvrt.source import find_shape
from tests.helpers.bench_cli import (
    FORMS,
    SCAN,
    TESTS,
    form,
    on_decode,
    parsed,
    printed,
    rows_of,
    table_of,
    without_notes,
)
from tests.helpers.fake_clock import BANDWIDTH, FakeClock

FACTS = {
    "model", "model_type", "parameters", "effective_kv", "estimated_bytes", "peak_is_own",
    "read_share", "device_read_GBps", "backend", "kernels", "threads", "n_batch", "n_ubatch",
    "warmup", "repetitions", "remarks", "check_kld", "check_top1", "check_tokens", "version",
    "versions", "commit", "date", "bits_per_element", "cache_bytes", "peak_bytes", "weight_bytes",
    "read_GBps", "device", "fill", "driver", "compute_capability", "limit_bytes",
    "device_used_bytes",
}  # fmt: skip
TEST_KEYS = FACTS | {
    "test", "kv", "n_prompt", "n_gen", "depth", "mean_tokens_per_s", "std_tokens_per_s",
    "samples", "samples_s",
}  # fmt: skip


# --- rows ---


@pytest.mark.usefixtures("clock")
def test_rows_of_tests(model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuOps, "read_bandwidth", lambda self: 4 * BANDWIDTH)
    rows = rows_of(capsys, [*TESTS, "-m", model, "-t", "1"])
    names = ["pp64", "tg4", "pp32+tg2"]
    names += [f"{name} @ d100" for name in names]
    short, deep = names[:3], names[3:]
    assert [(row["kv"], row["test"]) for row in rows] == [
        *product(["f16", "kvrt2"], short), *product(["f16", "kvrt2"], deep)
    ]  # fmt: skip
    ops, shape = CpuOps(1), find_shape(model)
    for row in rows:
        assert set(row) == TEST_KEYS
        spec = KVSpec.parse(row["kv"])
        numbers = row["n_prompt"], row["n_gen"], row["depth"]
        assert numbers[:2] in [(64, 0), (0, 4), (32, 2)]
        assert numbers[2] == 100 * ("d100" in row["test"])
        # What was effective.
        assert KVSpec.parse(row["effective_kv"]) == spec
        assert row["bits_per_element"] == {"f16": 16.0, "kvrt2": 3.0}[row["kv"]]
        size = estimate(shape.geometry, spec, sum(numbers))
        assert row["cache_bytes"] == row["estimated_bytes"] == size
        assert row["peak_bytes"] > row["weight_bytes"] == shape.weight_bytes
        assert row["parameters"] == shape.parameters and row["model_type"] == "llama"
        facts = {
            "model": model, "device": ops.hardware, "backend": "cpu", "kernels": ops.build,
            "threads": 1, "n_batch": None, "n_ubatch": 256, "fill": "prefill", "warmup": True,
            "repetitions": 3, "check_kld": None,
            "device_read_GBps": 4 * BANDWIDTH / 1e9, "driver": None, "compute_capability": None,
            "limit_bytes": None,
        }  # fmt: skip
        assert facts.items() <= row.items()
        packed = spec.sink + spec.window + 64 <= sum(numbers)
        plain = packed or row["kv"] == "f16"
        assert row["remarks"] == ([] if plain else ["nothing packed in so few tokens"])
        assert row["versions"]["numpy"] == np.__version__
        assert datetime.fromisoformat(row["date"]).tzinfo is not None
        # Speed.
        tokens = row["n_prompt"] + row["n_gen"]
        assert row["samples"] == [tokens / seconds for seconds in row["samples_s"]]
        assert len(row["samples"]) == 3
        assert row["mean_tokens_per_s"] == statistics.fmean(row["samples"])
        assert row["std_tokens_per_s"] == statistics.stdev(row["samples"])
        if row["n_gen"] == 0:
            assert row["mean_tokens_per_s"] == pytest.approx(1000)  # of the fake clock
        if row["n_prompt"]:
            assert row["read_GBps"] is row["read_share"] is None
        else:
            assert row["read_GBps"] == pytest.approx(BANDWIDTH / 1e9)
            assert row["read_share"] == pytest.approx(0.25)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("args", "names"),
    [
        ([], ["pp512", "tg128"]),
        (["-p", "8"], ["pp8", "tg128"]),
        (["-p", "8,3", "-p", "5", "-n", "0"], ["pp8", "pp3", "pp5"]),
        (["-p", "4-16*2", "-n", "1-2"], ["pp4", "pp8", "pp16", "tg1", "tg2"]),
        (["-p", "0", "-n", "2", "-d", "64,0", "-d", "0-20+10"],
         ["tg2", "tg2 @ d10", "tg2 @ d20", "tg2 @ d64"]),
        (["-p", "0", "-n", "0", "-pg", "8,2", "-pg", "4,0"], ["pp8+tg2", "pp4"]),
        (["-p", "1k", "-n", "0"], ["pp1024"]),  # all of the model's context
    ],
)  # fmt: skip
def test_lists_and_ranges_of_tests(
    model: str, capsys: Any, args: list[str], names: list[str]
) -> None:
    rows = rows_of(capsys, [*args, "-m", model, "-t", "1", "-r", "1", "--kv", "f16"])
    assert [row["test"] for row in rows] == names


@pytest.mark.usefixtures("clock")
def test_every_combination_of_threads_and_batches(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    prefill = Decoder.prefill

    def seen(self: Decoder, token_ids: Any, store: Any, **rest: Any) -> Any:
        calls.append((self.ops.threads, len(token_ids), self.chunk_tokens))
        return prefill(self, token_ids, store, **rest)

    monkeypatch.setattr(Decoder, "prefill", seen)
    args = ["-m", model, "-p", "48", "-n", "0", "-r", "1", "--no-warmup", "--kv", "f16"]
    lists = ["-t", "1", "-t", "2", "-b", "16,48", "-ub", "8,32"]
    rows = rows_of(capsys, [*args, *lists])
    combined = list(product([1, 2], [16, 48], [8, 32]))
    fields = ("threads", "n_batch", "n_ubatch")
    assert [tuple(row[field] for field in fields) for row in rows] == combined
    # Timed once, and once more for the peak.
    pieces = [(t, b, ub) for t, b, ub in combined for _ in range(2 * 48 // b)]
    assert [call for call in calls if call[1]] == pieces
    # People see a column for what varies, and for nothing else.
    for given, heads in ((lists, list(fields)), (["-t", "1", "-b", "8", "-ub", "8"], [])):
        table = table_of(printed(capsys, [*args, *given], "md"))
        assert [head for head in table[0] if head in fields] == heads
        assert [row["kv"] for row in table] == ["f16"] * len(table)
        for row, values in zip(table, combined):
            assert [row[head] for head in heads] == [str(value) for value in values][: len(heads)]


@pytest.mark.parametrize(("more", "repetitions"), [([], 5), (["-r", "1"], 1)])
@pytest.mark.parametrize("warm", [True, False])
def test_repetitions_and_the_warm_up(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, clock: FakeClock, more: list[str],
    repetitions: int, warm: bool,
) -> None:  # fmt: skip
    """The whole test runs once more than it is timed: before it, or after it for the peak alone."""
    steps: list[int] = []

    def step(store: KVStore) -> None:
        clock.wait(len(steps))  # so that the times say which steps were timed
        steps.append(len(store))

    on_decode(monkeypatch, step)
    args = ["-m", model, "-p", "0", "-n", "10", "--kv", "f16", "-t", "1", *more]
    (row,) = rows_of(capsys, args if warm else [*args, "--no-warmup"])
    assert steps == list(range(1, 11)) * (1 + repetitions)
    passes = range(warm, repetitions + warm)
    waits = [sum(range(10 * number, 10 * number + 10)) for number in passes]
    assert row["samples_s"] == pytest.approx(waits, abs=0.1)  # 4 ms more for the bytes
    assert row["repetitions"] == len(row["samples"]) == repetitions
    assert row["warmup"] == warm
    if repetitions == 1:
        assert row["std_tokens_per_s"] == 0.0


@pytest.mark.usefixtures("clock")
def test_equal_repetitions_have_no_deviation(model: str, capsys: Any) -> None:
    args = ["-m", model, "-p", "0", "-n", "10", "--kv", "f16", "-t", "1"]
    (row,) = rows_of(capsys, args)
    # Differences of a growing clock are rounded.
    assert row["std_tokens_per_s"] == pytest.approx(0, abs=1e-6 * row["mean_tokens_per_s"])


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("command", [["-p", "0", "-n", "2", "-d", "200"], ["--scan", "202"]])
@pytest.mark.parametrize("fill", ["prefill", "synthetic", None])
def test_what_fills_the_cache(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, command: list[str], fill: str | None
) -> None:
    filled: list[int] = []
    prefill = Decoder.prefill

    def seen(self: Decoder, token_ids: Any, store: Any, **rest: Any) -> Any:
        filled.append(len(token_ids))
        return prefill(self, token_ids, store, **rest)

    monkeypatch.setattr(Decoder, "prefill", seen)
    args = [*command, "-n", "2", "-m", model, "-t", "1", "-r", "1", "--kv", "kvrt2"]
    (row,) = rows_of(capsys, [*args, "--fill", fill] if fill else args)
    expected = fill or ("synthetic" if command[0] == "--scan" else "prefill")
    assert row["fill"] == expected
    assert (200 in filled) == (expected == "prefill")
    assert row["cache_bytes"] == row["estimated_bytes"]
    assert table_of(printed(capsys, args, "md"))[0]["fill"] in (
        "prefill",
        "synthetic",
    )


# --- forms ---


@pytest.mark.parametrize(
    ("command", "columns"),
    [
        (TESTS, {
            "kv": lambda row: row["kv"],
            "test": lambda row: row["test"],
            "bits": lambda row: f"{row['bits_per_element']:.2f}",
            "t/s": lambda row: f"{row['mean_tokens_per_s']:.2f} ± {row['std_tokens_per_s']:.2f}",
            "cache": lambda row: bytes_word(row["cache_bytes"]),
            "peak": lambda row: bytes_word(row["peak_bytes"]),
            "GB/s": lambda row: "" if row["n_prompt"] else f"{row['read_GBps']:.1f}",
            "of device": lambda row: "" if row["n_prompt"] else "100 %",
            "fill": lambda row: row["fill"],
        }),
        (SCAN, {
            "context": lambda row: f"{row['context']:,}",
            "us a token": lambda row: f"{row['decode_us']:,.0f} ± {row['std_us']:,.0f}",
            "cache": lambda row: bytes_word(row["cache_bytes"]),
            "GB/s": lambda row: f"{row['read_GBps']:.1f}",
        }),
        (("--dry-run", "-p", "64,4k", "-n", "0", "--batch", "3", "--limit", "50MB"), {
            "test": lambda row: row["test"],
            "context": lambda row: f"{row['context']:,}",
            "batch": lambda row: "3",
            "weights": lambda row: bytes_word(row["weight_bytes"]),
            "tokens alone": lambda row: bytes_word(row["token_bytes"]),
            "cache": lambda row: bytes_word(row["cache_bytes"]),
            "together": lambda row: bytes_word(row["total_bytes"]),
            "weights %": lambda row: f"{100 * row['weight_share']:.1f}",
            "cache %": lambda row: f"{100 * row['cache_share']:.1f}",
            "tokens that fit": lambda row: f"{row['fits_tokens']:,}",
        }),
    ],
    ids=["tests", "scan", "dry-run"],
)  # fmt: skip
def test_every_form_holds_the_same_numbers(
    model: str,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    clock: FakeClock,
    command: tuple[str, ...],
    columns: dict[str, Callable[[dict[str, Any]], str]],
) -> None:
    monkeypatch.setattr(CpuOps, "peak_bytes", lambda self: 123_456_789)  # the only other variable
    args = [*command, "-m", model, "-t", "1"]

    def again(output: str) -> str:
        clock.now = 0.0  # so that equal times are rounded alike
        return printed(capsys, args, output)

    rows = parsed("json", again("json"))
    assert len(rows) >= 4
    for output in ("json", "jsonl", "csv", "object"):
        found = parsed(output, again(output))
        for row, other in zip(rows, found, strict=True):
            assert list(row) == list(other)
            for key in row.keys() - {"date"}:
                value = row[key]
                if output == "csv" and not isinstance(value, str):
                    value = "" if value is None else json.dumps(value)
                assert other[key] == value, key
    shown = table_of(again("md"))
    # People see a scan grow context by context, with all formats in the order of the rows.
    order = sorted(rows, key=lambda row: row["context"]) if command == SCAN else rows
    for row, cells in zip(order, shown, strict=True):
        for head, cell in columns.items():
            assert cells[head] == cell(row), head
    lines = again("table").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(("model ", "kv ")))
    for cells, line in zip(shown, lines[first + 1 :]):
        assert line.split() == " ".join(cell for cell in cells.values() if cell).split()


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("output", FORMS)
@pytest.mark.parametrize("command", [TESTS, SCAN], ids=["tests", "scan"])
def test_rows_on_stderr_too(model: str, capsys: Any, command: tuple[str, ...], output: str) -> None:
    """Of one and the same run, so with peaks and all."""
    assert run(["bench", *command, "-m", model, "-t", "1", *form(output), "-oe", "json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(without_notes(err))
    if output in ("json", "jsonl", "object"):
        assert parsed(output, out) == rows
    elif output == "csv":
        assert [float(row["peak_bytes"]) for row in parsed("csv", out)] == [
            row["peak_bytes"] for row in rows
        ]
    else:
        assert all(bytes_word(row["peak_bytes"]) in out for row in rows)


@pytest.mark.usefixtures("clock")
def test_what_is_said_beside_the_rows(model: str, capsys: Any) -> None:
    args = ["-m", model, "-p", "64", "-n", "16", "-r", "2", "-d", "0,10", "--kv", "f16,kvrt2"]
    assert run(["bench", *args, "-t", "1"]) == 0
    _, err = capsys.readouterr()
    ops = CpuOps(1)
    total = 2 * (2 * 10 + 2 * (1 + 2) * (64 + 16))  # filled twice; once alone, then repetitions
    assert err.splitlines() == [
        f"kvrt: {ops.hardware}, {ops.device_name}: memory is read at 1.0 GB/s",
        f"kvrt: measure ({total:,} tokens)",
    ]


def test_help(capsys: Any) -> None:
    assert run(["bench", "--help"]) == 0
    out, err = capsys.readouterr()
    words = (
        "-p, --n-prompt", "-n, --n-gen", "-pg", "-d, --n-depth", "--scan A:B", "-r, --repetitions",
        "--fill", "-b, --batch-size", "-ub, --ubatch-size", "-t, --threads", "--no-warmup",
        "--check", "--dry-run", "--batch B", "--limit BYTES", "--plot FILE", "-oe, --output-err",
        "-o, --output [table|md|csv|json|jsonl]", "--json", "--kv SPEC", "--device",
    )  # fmt: skip
    assert err == "" and [word for word in words if word not in out] == []
    assert "[default: md]" in " ".join(out.split())
