"""What `kvrt bench` asks of a GPU, on devices that only say what they were asked."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvrt
from kvrt import backends
from kvrt.backends import nvrtc
from kvrt.backends.cuda import CudaOps
from kvrt.bench import gpu
from kvrt.bench.budget import needed_bytes
from kvrt.bench.case import Case, Settings
from kvrt.bench.environment import commit
from kvrt.bench.measure import Bench, Job
from kvrt.bench.rows import Setup, case_row
from kvrt.errors import KernelError
from kvrt.generate import Model
from kvrt.kvstore import KVSpec, estimate
from kvrt.models.decoder import Decoder
from kvrt.shapes import SHAPES
from tests.emulator import COMPILER
from tests.helpers.emulated_device import EmulatedDevice, emulated_ops
from tests.helpers.tiny_model import write_tiny_model

F16, NUQ = KVSpec.parse("f16"), KVSpec.parse("kvquant2")


class Pool:
    limit: int | None = None

    def set_limit(self, *, size: int) -> None:
        self.limit = size


class Device(EmulatedDevice):
    """A GPU by its facts, whose work goes on until it is waited for."""

    compute_capability = (9, 0)
    driver_version = (13, 0)

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.handle = nullcontext()
        self.waited = 0
        self.emptied = 0
        self.xp = SimpleNamespace(get_default_memory_pool=lambda: self.pool)  # type: ignore[assignment]

    def memory(self) -> tuple[int, int]:
        return 30 << 30, 80 << 30

    def synchronize(self) -> None:
        self.waited += 1

    def reset_peak(self) -> bool:
        self.emptied += 1
        return True


@pytest.fixture
def model(tmp_path: Path) -> Model:
    write_tiny_model(tmp_path / "tiny", tokenizer=True, head_dim=64, max_context=1024)
    return kvrt.load(str(tmp_path / "tiny"), threads=1)


@pytest.fixture
def device(model: Model, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The model computes on the CPU and believes that it is on a GPU."""
    found = Device()
    monkeypatch.setattr(type(model.ops), "name", "cuda")
    monkeypatch.setattr(type(model.ops), "device", found, raising=False)
    monkeypatch.setattr(gpu, "driver_version", lambda: "580.1")
    monkeypatch.setattr(nvrtc, "find_compiler", lambda newest: SimpleNamespace(version=(newest, 1)))
    return found


def test_a_cpu_is_asked_nothing(model: Model) -> None:
    ops = model.ops
    assert gpu.device_of(ops) is None
    gpu.settle(ops)
    gpu.limit_memory(ops, 1)
    assert gpu.used_memory(ops) is None
    assert gpu.gpu_fields(ops) == {"driver": None, "compute_capability": None}
    assert gpu.gpu_versions(ops) == {}


def test_facts_of_a_gpu(device: Device) -> None:
    ops = CudaOps(device)
    assert gpu.device_of(ops) is device
    assert gpu.gpu_fields(ops) == {"driver": "580.1", "compute_capability": "9.0"}
    assert gpu.gpu_versions(ops) == {"cuda-driver": "13.0", "nvrtc": "13.1"}


def test_a_compiler_that_is_not_there_has_no_version(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(newest: int) -> Any:
        raise KernelError("no CUDA compiler")

    monkeypatch.setattr(nvrtc, "find_compiler", missing)
    assert gpu.gpu_versions(CudaOps(device)) == {"cuda-driver": "13.0"}


def test_a_limit_is_the_allocator_s(device: Device) -> None:
    gpu.limit_memory(CudaOps(device), 48 << 30)
    assert (device.pool.limit, device.emptied) == (48 << 30, 1)


class Library:
    """NVML, or one that fails at a call."""

    def __init__(self, fails: str = "") -> None:
        self.called: list[str] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name == "nvmlSystemGetDriverVersion":
                arguments[0].value = b"580.159.04"
            return int(name == self.fails)

        return call


@pytest.mark.parametrize(
    ("fails", "said"),
    [("", "580.159.04"), ("nvmlInit_v2", None), ("nvmlSystemGetDriverVersion", None)],
)
def test_the_driver_says_its_version(
    monkeypatch: pytest.MonkeyPatch, fails: str, said: str | None
) -> None:
    library = Library(fails)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert gpu.driver_version() == said
    assert ("nvmlShutdown" in library.called) == (fails != "nvmlInit_v2")


def test_without_a_driver_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpu.driver_version() is None


# --- what is timed ---


def test_the_clock_waits_for_the_device(model: Model, device: Device) -> None:
    """It starts when nothing is left to do from before, and stops when nothing is left to do."""
    waited_at: list[int] = []

    def clock() -> float:
        waited_at.append(device.waited)
        return float(len(waited_at))

    bench = Bench(model, Settings(2), clock)
    list(bench.run([Job(F16, (Case(0, 3, 70),))]))
    starts, ends = waited_at[::2], waited_at[1::2]
    assert len(starts) == 3  # the warm-up and two repetitions
    assert [end - start for start, end in zip(starts, ends)] == [1, 1, 1]
    assert [start - end for start, end in zip(starts[1:], ends)] == [1, 1]


@pytest.mark.parametrize("warmup", [True, False])
def test_the_first_tokens_of_a_cache_are_not_timed(
    model: Model, device: Device, monkeypatch: pytest.MonkeyPatch, warmup: bool
) -> None:
    seen: list[tuple[int, int]] = []
    decode = Decoder.decode

    def noted(self: Decoder, token_id: int, store: Any) -> Any:
        seen.append((id(store), len(store)))
        return decode(self, token_id, store)

    monkeypatch.setattr(Decoder, "decode", noted)
    ticks = iter(range(100))

    def clock() -> float:
        seen.append((0, -1))
        return float(next(ticks))

    bench = Bench(model, Settings(1, warmup=warmup), clock)
    ((_, found),) = bench.run([Job(F16, (Case(0, 2, 70),))])
    lengths = [length for _, length in seen]
    once = [-1, 70, 71, -1]
    assert lengths == (once + [70, 70] + once if warmup else once + once)
    assert found.stats.tokens == 72


# --- rows ---


def test_rows_name_driver_limit_and_tables(model: Model, device: Device) -> None:
    bench = Bench(model, Settings(1))
    ((_, found),) = bench.run([Job(F16, (Case(4, 0),))])
    setup = Setup(model, "prefill", None, 1e9, {"versions": {"numpy": "2"}}, 48 << 30, False)
    row = case_row("f16", found, setup, None)
    assert (row["driver"], row["compute_capability"]) == ("580.1", "9.0")
    assert row["versions"] == {"numpy": "2", "cuda-driver": "13.0", "nvrtc": "13.1"}
    assert (row["limit_bytes"], row["device_used_bytes"]) == (48 << 30, 50 << 30)
    assert not any("tables" in remark for remark in row["remarks"])
    remarks = case_row("nuq", replace(found, asked=NUQ), setup, None)["remarks"]
    assert "tables for normally distributed numbers, fitted to no model" in remarks
    fitted = replace(setup, fitted=True)
    remarks = case_row("nuq", replace(found, asked=NUQ), fitted, None)["remarks"]
    assert not any("tables" in remark for remark in remarks)


def test_a_copy_of_the_sources_is_told_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is often elsewhere than the repository."""
    (tmp_path / "__init__.py").write_text("")
    assert commit(tmp_path) is None
    monkeypatch.setenv("KVRT_COMMIT", "abc1234")
    assert commit(tmp_path) == "abc1234"


# --- memory that is planned for ---


@pytest.mark.parametrize("spec", [F16, KVSpec.parse("kvrt2")], ids=str)
def test_decoding_needs_a_bound_beside_the_cache(spec: KVSpec) -> None:
    """Behind any context it is the same, and small: a scan to a million tokens is not refused."""
    shape = SHAPES["llama-3.1-8b"]
    config, geometry = shape.config, shape.geometry
    assert config is not None
    beside = []
    for depth in (8192, 1 << 20):
        case = Case(0, 16, depth)
        needed = needed_bytes(config, geometry, spec, case, "synthetic", gpu=True)
        beside.append(needed - estimate(geometry, spec, case.context))
    assert beside[0] == beside[1] < 200e6


def test_a_prefill_on_a_gpu_needs_16_bit_copies_too() -> None:
    shape = SHAPES["llama-3.1-8b"]
    config, geometry = shape.config, shape.geometry
    assert config is not None
    tokens, case = 8192, Case(8192, 0)
    needed = [
        needed_bytes(config, geometry, F16, case, "prefill", gpu=on_gpu) for on_gpu in (False, True)
    ]
    assert needed[1] - needed[0] > 2 * tokens * (32 + 2 * 8) * 128


def test_a_million_tokens_fit_where_they_must() -> None:
    """The 8B shape with kvrt2 into 48 GiB, LLaMA-7B with 2-bit nuq into 80 GB."""
    for name, kv, tokens, room in (
        ("llama-3.1-8b", "kvrt2", 1 << 20, 48 << 30),
        ("llama-7b", "kvquant2", 1_000_000, 80 * 10**9),
    ):
        shape, spec = SHAPES[name], KVSpec.parse(kv)
        assert shape.config is not None
        case = Case(0, 16, tokens - 16)
        beside = needed_bytes(shape.config, shape.geometry, spec, case, "synthetic", gpu=True)
        assert shape.weight_bytes + beside <= room, f"{name}: {shape.weight_bytes + beside:,}"


# --- the CUDA backend itself, emulated ---


@pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")
def test_a_model_on_the_cuda_backend_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_tiny_model(tmp_path / "tiny", tokenizer=True, num_heads=2, head_dim=64)
    monkeypatch.setattr(backends, "get_ops", lambda device, threads: emulated_ops())
    model = kvrt.load(str(tmp_path / "tiny"), device="cpu")
    assert model.ops.name == "cuda"
    spec = KVSpec.parse("k=int4:channel:g64,v=int4:token:g64")
    tests = (Case(8, 0, 70), Case(0, 2, 70), Case(0, 1, 140))
    bench = Bench(model, Settings(1, fill="synthetic"))
    setup = Setup(model, "synthetic", None, 1e9, {})
    for (_, found), case in zip(bench.run([Job(spec, tests)]), tests, strict=True):
        row = case_row("int4", found, setup, None)
        assert (row["backend"], row["device"], row["threads"]) == ("cuda", "emulator", 1)
        assert row["cache_bytes"] == row["estimated_bytes"] == found.stats.bytes
        assert found.stats.tokens == case.context and row["remarks"] == []
        assert row["parameters"] == config.parameters()
