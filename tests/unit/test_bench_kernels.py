"""tools/bench_kernels.py: what it asks of the kernels, and what it says of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.cli.kv_options import Format
from kvrt.errors import UnsupportedError
from kvrt.kvstore import Geometry, KVSpec, KVStore
from kvrt.kvstore.stats import read_bytes
from tests.emulator import COMPILER
from tests.helpers.emulated_device import emulated_ops

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import bench_kernels as tool
from torch_attention import TorchAttention

SHAPE = tool.Shape(heads=4, kv_heads=2, head_dim=64, hidden=64, inner=128, vocab=300)
CONTEXT = 400


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "COLD_BYTES", 1 << 20)


def named(name: str) -> Format:
    return Format(name, KVSpec.parse(name))


def once(calls: Sequence[Callable[[], None]]) -> list[float]:
    for call in calls:
        call()
    return [4.0, 2.0, 3.0]


@pytest.mark.parametrize("name", ["f16", "kvrt2", "k=int4:channel:g64:pre,v=int4:token:g64"])
def test_attention_reads_all_layers_in_turn(
    ops: CpuOps, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    attend = CpuOps.attend

    def noted(self: CpuOps, q: Any, view: Any, scale: float, window: Any, out: Any) -> None:
        attend(self, q, view, scale, window, out)
        seen.append((view.address, view.extent.pages))
        assert scale == 64**-0.5 and window is None
        assert np.isfinite(out).all() and np.abs(out).max() > 0.01

    monkeypatch.setattr(CpuOps, "attend", noted)
    work = tool.attention(ops, SHAPE, named(name), CONTEXT)
    once(work.calls)
    spec = KVSpec.parse(name)
    (cache,) = read_bytes(Geometry(1, 2, 64), spec, [CONTEXT], [None])
    assert work.nbytes == cache + 2 * 4 * 64 * 4
    assert len({address for address, _ in seen}) == len(seen) == work.row["in_turn"]
    assert cache * len(seen) >= 1 << 20
    assert {pages for _, pages in seen} == {max(CONTEXT - spec.sink - spec.window, 0) // 64}
    assert work.row["effective_kv"] == str(spec) and work.row["context"] == CONTEXT
    assert work.row["bits_per_element"] == pytest.approx(16 if name == "f16" else 3, abs=1.5)


def test_projections_are_those_of_a_decode_step(ops: CpuOps) -> None:
    works = {work.row["name"]: work for work in tool.projections(ops, SHAPE)}
    sizes = {name: (work.row["rows"], work.row["cols"]) for name, work in works.items()}
    assert sizes == {
        "qkv": (256 + 2 * 128, 64), "o": (64, 256), "gate_up": (256, 64), "down": (64, 128),
        "head": (300, 64),
    }  # fmt: skip
    for name, work in works.items():
        rows, cols = sizes[name]
        once(work.calls)
        assert work.nbytes >= rows * cols * 2
        # A larger one is used fewer times; what is cold is beyond the limit, or of many copies.
        assert len(work.calls) == tool.in_turn(rows * cols * 2)


def test_buffers_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "COLD_BYTES", 100)
    assert [tool.in_turn(size) for size in (1, 10, 11, 50, 1000)] == [64, 10, 10, 2, 2]


def test_rows_have_the_median_and_the_share() -> None:
    row = tool.finished_row({"kernel": "x"}, 4_000_000, [4.0, 1.0, 2.0], 4e12)
    assert row == {
        "kernel": "x", "us": 2.0, "samples_us": [4.0, 1.0, 2.0], "bytes": 4_000_000,
        "GBps": pytest.approx(2000.0), "share": pytest.approx(0.5),
    }  # fmt: skip


def test_a_format_that_the_device_refuses_is_left_out(
    ops: CpuOps, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    attend = CpuOps.attend

    def picky(self: CpuOps, q: Any, view: Any, *rest: Any) -> None:
        if view.surveys != ("never", "never"):
            raise UnsupportedError("this one is not for the GPU")
        attend(self, q, view, *rest)

    monkeypatch.setattr(CpuOps, "attend", picky)
    rows: list[dict[str, Any]] = []
    asked: list[int] = []

    def peer(context: int) -> Any:
        asked.append(context)
        yield {"kernel": "attention", "side": "torch", "context": context}

    formats = [named("f8"), named("f16")]
    tool.measure(ops, SHAPE, formats, [100, 200], once, 1e9, rows.append, peer)
    told = [(row.get("kv", row.get("name", row["side"])), row.get("context")) for row in rows]
    assert told == [
        ("f16", 100), ("torch", 100), ("f16", 200), ("torch", 200), ("qkv", None), ("o", None),
        ("gate_up", None), ("down", None), ("head", None),
    ]  # fmt: skip
    assert asked == [100, 200]
    assert capsys.readouterr().out.count("not measured: f8: this one is not for the GPU") == 1


def test_rows_are_appended_with_what_they_ran_on(
    ops: CpuOps, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRT_COMMIT", "abc1234")
    facts = tool.facts_of(ops, 2e9)
    path = tmp_path / "results" / "kernels.jsonl"
    for _ in range(2):
        report = tool.Report(path, facts)
        tool.measure(ops, SHAPE, [named("f16")], [100], once, 2e9, report.add, None)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 2 * 6
    for row in rows:
        assert {"device", "driver", "kernels", "commit", "date", "versions"} <= set(row)
        assert row["commit"] == "abc1234" and row["device_read_GBps"] == 2.0
    out = capsys.readouterr().out
    assert "kvrt f16" in out and "kvrt gate_up" in out


class Events:
    """CuPy's streams, graphs and events, whose clock is the number of calls that were replayed."""

    def __init__(self) -> None:
        self.called = 0
        self.capturing = False
        self.captured = 0
        self.launched = 0.0
        self.cuda = SimpleNamespace(
            Stream=lambda non_blocking: self,
            Device=lambda: self,
            Event=lambda: SimpleNamespace(at=0.0, record=None, synchronize=lambda: None),
            get_elapsed_time=lambda begin, end: end.at - begin.at,
        )
        self.cuda.Event = self._event

    def _event(self) -> Any:
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda stream: setattr(event, "at", self.launched)
        return event

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def synchronize(self) -> None:
        assert not self.capturing

    def begin_capture(self) -> None:
        self.capturing, self.captured = True, 0

    def end_capture(self) -> Any:
        self.capturing = False
        return self

    def launch(self, stream: Any) -> None:
        self.launched += 0.5 * self.captured

    def call(self) -> None:
        self.called += 1
        self.captured += self.capturing


def test_a_replay_that_differs_is_no_measurement(ops: CpuOps, capsys: Any) -> None:
    def spoiling(calls: Sequence[Callable[[], None]]) -> list[float]:
        once(calls)
        partial: Any = calls[-1]
        if hasattr(partial, "args") and len(partial.args) == 5:  # attention
            partial.args[4][0] = np.nan
        return [1.0]

    rows: list[dict[str, Any]] = []
    tool.measure(ops, SHAPE, [named("f16")], [100], spoiling, 1e9, rows.append, None)
    assert {row["kernel"] for row in rows} == {"projection"}
    assert "not measured: f16: a replay differs from a call by nan" in capsys.readouterr().out


def test_without_torch_or_its_gpu_there_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert TorchAttention.found(SHAPE, 1, 1, 11) is None
    cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    assert TorchAttention.found(SHAPE, 1, 1, 11) is None
    cuda.is_available = lambda: True
    assert TorchAttention.found(SHAPE, 1, 1, 11) is not None


@pytest.mark.parametrize("device", ["cpu", "cuda:999", "tpu"])
def test_it_is_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--device", device])
    with pytest.raises(SystemExit) as exit_of:
        tool.main()
    assert device in capsys.readouterr().err + str(exit_of.value)
    assert exit_of.value.code not in (0, None)


@pytest.mark.parametrize(("option", "value"), [("--kv", "nonsense"), ("--contexts", "x")])
def test_wrong_usage_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", option, value])
    with pytest.raises(SystemExit) as exit_of:
        tool.main()
    assert exit_of.value.code == 2
    assert value in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 5, 64, 70])
def test_a_graph_is_timed_after_all_was_called_once(count: int) -> None:
    events = Events()
    samples = tool.graph_timer(events, 11)([events.call] * count)
    assert samples == pytest.approx([500.0] * 11)  # half a millisecond a call
    assert events.captured >= 64 and events.captured % count == 0
    assert events.called == count + events.captured


def test_the_options_name_formats_that_there_are() -> None:
    for name in (*tool.PRESETS, *tool.FORMS, *tool.QUICK):
        KVSpec.parse(name).check(Geometry(1, 8, 128))
    options = tool.parser().parse_args([])
    assert (options.heads, options.kv_heads, options.head_dim) == (32, 8, 128)


def test_a_store_that_is_filled_reads_like_the_model_s(ops: CpuOps) -> None:
    """The cache that is measured is full: its length is the context."""
    work = tool.attention(ops, SHAPE, named("kvrt4"), CONTEXT)
    store: KVStore = work.held[0]
    assert len(store) == CONTEXT and store.stats().sealed_tokens == 256


@pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")
@pytest.mark.parametrize("name", ["f16", "kvrt4"])
def test_the_cuda_backend_attends_as_the_cpu_does(
    ops: CpuOps, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls work by themselves, outside of a decode step."""
    monkeypatch.setattr(tool, "COLD_BYTES", 1)
    outs = []
    for backend in (ops, emulated_ops()):
        work = tool.attention(backend, SHAPE, named(name), CONTEXT)
        once(work.calls)
        outs.append(np.array(work.held[2]))
    assert np.linalg.norm(outs[0] - outs[1]) < 5e-3 * np.linalg.norm(outs[0])
