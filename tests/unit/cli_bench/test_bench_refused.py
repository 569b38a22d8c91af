"""`kvrt bench`: what is refused before anything is loaded, and what needs no loading."""

from __future__ import annotations

import importlib.util
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrt import backends, generate
from kvrt.backends.cpu import CpuOps
from kvrt.kvstore import KVSpec, estimate
from kvrt.shapes import SHAPES, Shape
from tests.helpers.bench_cli import (
    error_of,
    printed,
    rows_of,
    table_of,
)
from tests.helpers.tiny_model import write_tiny_model


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is a model loaded nor a weight made."""
    monkeypatch.setattr(generate, "load", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(CpuOps, "matrix", lambda *_: pytest.fail("made a weight"))
    monkeypatch.setattr(CpuOps, "read_bandwidth", lambda _: pytest.fail("measured"))


# --- what is refused ---


@pytest.fixture
def tiny_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shape:
    """synthetic:tiny, small enough to run."""
    config = write_tiny_model(tmp_path / "shape", head_dim=64)
    shape = Shape.of("tiny", config, np.dtype("<f2"))
    monkeypatch.setitem(SHAPES, "tiny", shape)  # type: ignore[arg-type]
    return shape


@pytest.mark.usefixtures("no_model", "tiny_shape")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-m", "/nowhere/model"], "/nowhere/model"),
        (["-m", "nosuch"], "no model folder or pulled model 'nosuch'"),
        (["-m", "synthetic:llama7b"], "did you mean synthetic:llama-7b?"),
        (["-m", "synthetic:opt-175b"], "is for memory only"),
        (["-m", "synthetic:mixtral-8x7b", "--scan", "1k:4k"], "is for memory only"),
        (["-m", "synthetic:tiny", "--check"], "--check: synthetic:tiny has random weights"),
        (["--kv", "f17"], "--kv: unknown cache format 'f17'"),
        (["--kv", "f16,kvrt5"], "--kv: unknown cache format 'kvrt5'"),
        (["-ctk", "q5_0"], "--kv-k: "),
        (["--kv", "f16,layers[2]=f8"], "layers[2] goes beyond this model"),
        (["-p", "4-8+0"], "-p: '4-8+0' never ends"),
        (["-d", "0-8*2"], "-d: '0-8*2' never ends"),
        (["-n", "4-8*1"], "-n: '4-8*1' never ends"),
        (["--scan", "64-512*1"], "--scan: '64-512*1' never ends"),
        (["--scan", "0:512"], "--scan: expected 1 to "),
        (["-d", "1-2000"], "-d: more than 1,000 values"),
        (["-p", "8-4"], "-p: '8-4' goes backwards"),
        (["--scan", "512:64"], "--scan: '512:64' goes backwards"),
        (["-p", ""], "-p: '' is neither"),
        (["-n", "1,,2"], "-n: '' is neither"),
        (["--scan", ""], "--scan: '' is neither"),
        (["-b", "0"], "-b: expected 1 to "),
        (["-ub", "0"], "-ub: expected 1 to "),
        (["-b", "x"], "-b: 'x' is neither"),
        (["-t", "0"], "-t: expected 1 to "),
        (["-t", "-1"], "-t: "),
        (["-t", "1,100000"], "100000"),
        (["-pg", "4"], "-pg: expected P,N"),
        (["-pg", "4,2,1"], "-pg: expected P,N"),
        (["-pg", "1-2,4"], "-pg: expected P,N"),
        (["-p", "0", "-n", "0"], "-p and -n are 0"),
        (["-p", "0", "-n", "0", "-pg", "0,0"], "nothing to measure"),
        (["-p", "1025", "-n", "0"], "a context of 1,025 tokens is beyond this model's limit of"),
        (["-p", "0", "-n", "24", "-d", "1001"], "-d, -p and -n: a context of 1,025 tokens"),
        (["-pg", "1000,25"], "a context of 1,025 tokens"),
        (["--scan", "1k:2k"], "--scan: a context of 2,048 tokens is beyond this model's limit of"),
        (["-m", "synthetic:tiny", "--scan", "32M"], "limit of 16,777,216"),
        (["--scan", "64:128", "-n", "0"], "-n: expected 1 to "),
        (["--scan", "64:128", "-n", "1,2"], "-n: a scan takes one number of tokens"),
        (["--scan", "64:128", "-p", "4"], "-p and --scan exclude each other"),
        (["--scan", "64:128", "-d", "4"], "-d and --scan exclude each other"),
        (["--scan", "64:128", "-pg", "4,2"], "-pg and --scan exclude each other"),
        (["--limit", "1MB"], "no space for 512 tokens in f16: "),
        (["--limit", "1MB", "-d", "0,9", "-p", "0", "-n", "1,800"], "no space for 800 tokens"),
        (["--limit", "400kB", "--scan", "64:128"], "no space for 64 tokens in f16: "),
        (["--limit", "0"], "--limit: expected 1 byte"),
        (["--limit", "much"], "--limit: expected a number of bytes"),
        (["--plot", "out.svg"], "--plot draws a scan: it needs --scan A:B"),
        (["--plot", "-"], "--plot draws a scan: it needs --scan A:B"),
        (["--scan", "64:128", "--plot", "out.pdf"], "ends in .png or .svg"),
        (["--scan", "64:128", "--plot", "/nowhere/out.svg"], "there is no folder /nowhere"),
        (["--scan", "64:128", "--plot", ""], "--plot: the path is empty"),
        (["--batch", "2"], "--batch is for --dry-run"),
        (["--dry-run", "--batch", "0"], "'--batch'"),
        (["-o", "sql"], "'--output'"),
        (["-oe", "object"], "'--output-err'"),
        (["--json", "-o", "csv"], "--json and -o exclude each other"),
        (["--fill", "zeros"], "'--fill'"),
        (["-r", "0"], "'--repetitions'"),
        (["-r", "x"], "'--repetitions'"),
        (["--device", "tpu"], "device 'tpu' is not supported"),
        (["--dry-run", "--device", "cuda:x"], "device 'cuda:x' is not supported"),
        (["--calibration", ""], "--calibration: the path is empty"),
        (["more"], "more"),
    ],
)  # fmt: skip
def test_wrong_requests(model: str, capsys: Any, args: list[str], said: str) -> None:
    assert said in error_of(capsys, ["-m", model, *args])


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("command", [["-p", "512"], ["--scan", "512:1k"]])
def test_no_space_is_said_before_anything_is_loaded(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(backends, "available_memory", lambda device: 1_000_000)
    error = error_of(capsys, ["-m", model, *command])
    assert "no space for 512 tokens in f16: " in error and "there are 1.00 MB" in error


@pytest.mark.usefixtures("no_model")
def test_a_plot_without_matplotlib_is_refused(
    model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec

    def lacking(name: str, package: str | None = None) -> Any:
        return None if name == "matplotlib" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", lacking)
    args = ["-m", model, "--scan", "64:128", "--plot", str(tmp_path / "a.svg")]
    assert "pip install 'kvrt[plot]'" in error_of(capsys, args)


def test_what_a_calibration_lacks_is_missed_before_a_weight_is_read(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuOps, "matrix", lambda *_: pytest.fail("read a weight"))
    error = error_of(capsys, ["-m", model, "--kv", "f16,kvquant3"])
    assert "needs a calibration" in error


def test_an_exact_part_beyond_the_context_is_refused_wherever_it_stands(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuOps, "matrix", lambda *_: pytest.fail("read a weight"))
    long = "k=q8_0,v=q8_0,window=2000"
    for formats in (long, f"f16,{long}"):
        assert "sink + window" in error_of(capsys, ["-m", model, "--kv", formats])


# --- models of random weights ---


@pytest.mark.usefixtures("clock", "tiny_shape")
def test_a_model_of_random_weights_is_measured_beyond_its_context(capsys: Any) -> None:
    args = ["-m", "synthetic:tiny", "--scan", "200,300", "-t", "1", "-r", "1", "--kv", "kivi2"]
    rows = rows_of(capsys, args)
    assert [row["context"] for row in rows] == [200, 300]
    assert all(row["model"] == "synthetic:tiny" and row["remarks"] == [] for row in rows)


# --- the arithmetic alone ---


@pytest.mark.usefixtures("no_model")
def test_llama_7b_at_512_and_at_128k_tokens(capsys: Any) -> None:
    args = ["--dry-run", "-m", "synthetic:llama-7b", "-p", "512,128k", "-n", "0", "--kv", "f16"]
    short, long = rows_of(capsys, args)
    assert (short["context"], long["context"]) == (512, 131_072)
    for row, weights in ((short, 0.98), (long, 0.16)):
        assert row["weight_share"] == pytest.approx(weights, abs=0.01)
        assert row["cache_share"] == pytest.approx(1 - weights, abs=0.01)
        assert row["token_bytes"] == row["context"] * 32 * 2 * 4096 * 2
        assert row["total_bytes"] == row["weight_bytes"] + row["cache_bytes"]
        assert row["weight_bytes"] == 2 * 6_738_415_616
    cells = table_of(printed(capsys, args, "md"))
    assert [(row["weights %"], row["cache %"]) for row in cells] == [
        ("97.8", "2.2"), ("16.4", "83.6"),
    ]  # fmt: skip


@pytest.mark.usefixtures("no_model")
def test_opt_175b_at_a_batch_of_512(capsys: Any) -> None:
    args = ["--dry-run", "-m", "synthetic:opt-175b", "-p", "512", "-n", "0", "--batch", "512"]
    row, packed = rows_of(capsys, args)
    assert row["token_bytes"] == 512 * 512 * 96 * 2 * 12_288 * 2  # 1.24e12
    assert round(row["token_bytes"] / 1e12, 2) == 1.24 and row["batch"] == 512
    assert (packed["kv"], packed["token_bytes"] / row["token_bytes"]) == ("kvrt4", 4.5 / 16)
    out = printed(capsys, args, "md")
    assert out.startswith("synthetic:opt-175b: 174.60 G parameters, 349 GB; nothing was run\n\n")
    assert [row["tokens alone"] for row in table_of(out)] == ["1.24 TB", "348 GB"]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", SHAPES)
def test_the_memory_of_every_shape(capsys: Any, name: str) -> None:
    shape, room = SHAPES[name], 50 * 10**9
    args = ["--dry-run", "-m", f"synthetic:{name}", "--scan", "1k,1M", "--batch", "3"]
    args += ["--limit", str(shape.weight_bytes + room), "--kv", "q4_0,f16"]
    rows = rows_of(capsys, args)
    contexts = [1 << 10, 1 << 20]
    assert [(row["kv"], row["context"]) for row in rows] == [*product(["f16", "q4_0"], contexts)]
    for row in rows:
        sizes = [
            3 * estimate(shape.geometry, KVSpec.parse(row["kv"]), tokens)
            for tokens in (row["context"], row["fits_tokens"], row["fits_tokens"] + 1)
        ]
        assert sizes[0] == row["cache_bytes"] and sizes[1] <= room < sizes[2]
        assert row["total_bytes"] == shape.weight_bytes + sizes[0]
        assert row["parameters"] == shape.parameters and row["model"] == shape.name


@pytest.mark.usefixtures("no_model")
def test_a_dry_run_knows_no_limit_but_that_which_is_named(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same on any machine, of a folder too: beyond its context, and beyond all memory."""
    monkeypatch.setattr(backends, "available_memory", lambda device: 1)
    monkeypatch.setattr(backends, "get_ops", lambda *_: pytest.fail("asked for a device"))
    args = ["--dry-run", "-m", model, "-p", "0", "-n", "1", "-d", "0,1M", "--kv", "f16"]
    rows = rows_of(capsys, args)
    assert [(row["test"], row["context"]) for row in rows] == [
        ("tg1", 1), ("tg1 @ d1048576", 1_048_577),
    ]  # fmt: skip
    assert [row["fits_tokens"] for row in rows] == [None, None]
    assert [row["fits_tokens"] for row in rows_of(capsys, [*args, "--limit", "1kB"])] == [0, 0]


@pytest.mark.usefixtures("no_model")
def test_a_dry_run_takes_no_time(capsys: Any) -> None:
    """A fifth of a second of a processor; to make these weights would take several."""
    args = ["--dry-run", "-m", "synthetic:llama-7b", "--scan", "1k:1M", "--limit", "48GB"]
    started = time.process_time()
    assert len(rows_of(capsys, [*args, "--kv", "f16,kvrt4,kvrt2"])) == 3 * 11
    assert time.process_time() - started < 2
