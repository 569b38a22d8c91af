"""Which device computes: names, the default, what is free, and what the commands say."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

import kvrt
from kvrt import backends
from kvrt.backends import (
    available_memory,
    check_device,
    check_device_name,
    check_threads,
    cuda_device,
    default_device,
    get_ops,
    nvrtc,
)
from kvrt.backends.cuda import CudaOps
from kvrt.cli.main import run
from kvrt.errors import KernelError, UnsupportedError, UsageError
from tests.helpers.fake_cupy import FREE, SHARED, TOTAL, FakeCupy, FakeGpu, installed
from tests.helpers.tiny_model import write_tiny_model


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(backends, "_has_cupy", lambda: False)
    monkeypatch.setattr(cuda_device.importlib, "import_module", missing)
    cuda_device.get_device.cache_clear()
    yield
    cuda_device.get_device.cache_clear()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    yield from installed(monkeypatch)


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:0", "cuda:15"])
def test_names_of_devices(name: str) -> None:
    check_device_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "tpu", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:1.0", "cuda:٣", "cuda: 0", "cuda:0 "],
)
def test_other_names_say_what_works(cupy: FakeCupy, name: str) -> None:
    for check in (check_device_name, check_device, get_ops, available_memory):
        with pytest.raises(UnsupportedError) as caught:
            check(name)
        assert repr(name) in str(caught.value)
        assert "what works: cpu, cuda, cuda:N" in str(caught.value)


@pytest.mark.usefixtures("no_cupy")
def test_without_cupy_it_is_the_cpu() -> None:
    assert default_device() == "cpu"
    for use in (check_device, get_ops, available_memory):
        with pytest.raises(UnsupportedError) as caught:
            use("cuda")
        (line,) = [words for name, _, words in backends.doctor_cuda() if name == "CUDA device"]
        assert str(caught.value) == f"device 'cuda': {line}; what works: cpu"
        assert "kvrt[cuda13]" in line


def test_the_default_asks_for_no_cupy_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(cuda_device.importlib, "import_module", refuse)
    monkeypatch.setattr(backends.util, "find_spec", lambda name: None)
    assert default_device() == "cpu"


def test_with_a_gpu_it_is_the_first(cupy: FakeCupy) -> None:
    assert default_device() == "cuda"
    ops = get_ops("cuda")
    assert isinstance(ops, CudaOps)
    assert ops.device_name == get_ops("cuda:0").device_name == "cuda:0, A GPU"
    assert FakeGpu.current == 0
    assert get_ops("cuda:1").device_name == "cuda:1, A GPU"
    assert FakeGpu.current == 1
    with pytest.raises(UnsupportedError, match=r"no device cuda:2; there are 2.*what works: cpu"):
        get_ops("cuda:2")


def test_a_gpu_that_cannot_be_used_is_not_the_default(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(newest: int | None = None) -> Any:
        raise KernelError("no CUDA compiler")

    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "find_compiler", no_compiler)
        assert default_device() == "cpu"
        with pytest.raises(UnsupportedError, match="device 'cuda': no CUDA compiler"):
            check_device("cuda")
    assert default_device() == "cuda"
    cuda_device.get_device.cache_clear()
    monkeypatch.setattr(FakeGpu, "compute_capability", "75")
    assert default_device() == "cpu"


def test_threads_are_the_cpus(cupy: FakeCupy) -> None:
    check_threads("cuda", None)
    check_threads("cpu", 1)
    for check in (check_threads, get_ops):
        with pytest.raises(UsageError, match="2 threads: they are for the CPU, and cuda:1"):
            check("cuda:1", 2)


def test_what_is_free_on_a_gpu(cupy: FakeCupy) -> None:
    assert available_memory("cuda") == FREE
    cupy.pool.used, cupy.pool.unused = 5000, 700
    assert available_memory("cuda") == FREE + 700
    cupy.pool.limit = 8000
    assert available_memory("cuda") == 3000
    cupy.pool.limit = 5000
    assert available_memory("cuda") == 1  # 0 would mean: unknown


# --- load ---


@pytest.fixture
def tiny(tmp_path: Any) -> str:
    write_tiny_model(tmp_path / "m", tokenizer=True)
    return str(tmp_path / "m")


def test_load_takes_the_default_device(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def record(device: str, threads: int | None) -> None:
        asked.append(device)
        raise UsageError("seen")

    monkeypatch.setattr(backends, "get_ops", record)
    monkeypatch.setattr(backends, "available_memory", lambda device: 0)
    monkeypatch.setattr(backends, "check_device", lambda device: None)
    monkeypatch.setattr(backends, "shared_memory", lambda device: SHARED)
    for default in ("cpu", "cuda"):
        monkeypatch.setattr(backends, "default_device", lambda default=default: default)
        for device in (None, "cpu"):
            with pytest.raises(UsageError, match="seen"):
                kvrt.load(tiny, device=device)
    assert asked == ["cpu", "cpu", "cuda", "cpu"]


def test_load_tells_how_far_it_is(tiny: str) -> None:
    told: list[tuple[str, int, int | None]] = []
    model = kvrt.load(tiny, device="cpu", progress=lambda *how: told.append(how))
    stages, done, totals = zip(*told)
    assert set(stages) == {"load"} and set(totals) == {model.weight_bytes}
    assert list(done) == sorted(done) and (done[0], done[-1]) == (0, model.weight_bytes)
    assert len(told) > 10


# --- the command line ---


@pytest.mark.usefixtures("no_cupy")
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_cuda_without_cuda_is_one_line(command: str, tiny: str, capsys: Any) -> None:
    assert run([command, "-m", tiny, "-p", "a", "--device", "cuda"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("kvrt: error: device 'cuda': no CUDA: CuPy is not installed")


@pytest.mark.usefixtures("no_cupy")
def test_cuda_without_cuda_stops_a_bench(tiny: str, capsys: Any) -> None:
    words = ["bench", "-m", tiny, "--kv", "f16", "--device"]
    assert run([*words, "cuda:1"]) == 2
    assert capsys.readouterr().err.startswith("kvrt: error: device 'cuda:1': no CUDA")
    assert run([*words, "cuda:1", "--dry-run"]) == 0  # only arithmetic
    assert run([*words, "tpu", "--dry-run"]) == 2


def test_threads_and_cuda_are_refused(cupy: FakeCupy, tiny: str, capsys: Any) -> None:
    assert run(["generate", "-m", tiny, "-p", "a", "--device", "cuda", "-t", "2"]) == 2
    assert "2 threads: they are for the CPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["info", "synthetic:smollm2-135m"], 0),
        (["pull", "no-such-model"], 2),
        (["convert", "/nowhere/file.gguf", "/nowhere/folder"], 2),
    ],
)
def test_commands_that_compute_nothing_look_for_no_device(
    words: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a device was looked for")

    monkeypatch.setattr(backends, "_has_cupy", refuse)
    monkeypatch.setattr(backends, "_cuda", refuse)
    monkeypatch.setattr(backends, "default_device", refuse)
    for device in ([], ["--device", "cuda"]):
        assert run([*words, *device]) == code
        assert "internal error" not in capsys.readouterr().err
    assert run([*words, "--device", "tpu"]) == 2
    assert "'tpu'" in capsys.readouterr().err


def checks(capsys: Any) -> dict[str, Any]:
    assert run(["doctor", "--json"]) == 0
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


@pytest.mark.usefixtures("no_cupy")
def test_doctor_without_cuda(capsys: Any) -> None:
    found = checks(capsys)
    assert (found["CUDA device"]["ok"], found["CUDA device"]["needed"]) == (False, False)
    assert "CuPy is not installed" in found["CUDA device"]["detail"]
    assert run(["doctor"]) == 0
    assert "--    CUDA device" in capsys.readouterr().out


def test_doctor_with_cuda(cupy: FakeCupy, capsys: Any) -> None:
    found = checks(capsys)
    free, total = FREE >> 30, TOTAL >> 30
    for name in ("cuda:0", "cuda:1"):
        assert found[name]["ok"] and not found[name]["needed"]
        assert found[name]["detail"] == f"A GPU, sm_90, {free}.0 of {total}.0 GiB free"
    assert found["CUDA compiler"]["detail"] == "NVRTC 13.0: here"
    assert found["CuPy"]["detail"] == "14.2.0; the driver takes CUDA 13.2"


def test_doctor_names_the_default(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(backends, "default_device", lambda device=device: device)
        assert checks(capsys)["default device"]["detail"] == device


@pytest.mark.parametrize("broken", ["use", "mem_info", "compute_capability", "__init__"])
def test_a_device_that_cannot_be_used_is_no_default(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Busy, in exclusive mode, or half an installation."""

    def fail(self: Any) -> None:
        raise RuntimeError("cudaErrorDevicesUnavailable:\nbusy")

    if broken == "__init__":
        monkeypatch.setattr(FakeGpu, broken, fail_at_once)
    else:
        monkeypatch.setattr(FakeGpu, broken, fail if broken == "use" else property(fail))
    cuda_device.get_device.cache_clear()
    assert backends.default_device() == "cpu"
    with pytest.raises(UnsupportedError, match=r"cuda:0 cannot be used: .*busy"):
        backends.check_device("cuda")
    if broken != "use":  # doctor looks without taking it
        lines = cuda_device.describe()
        assert any(not ok and "busy" in words for _, ok, words in lines)
    cuda_device.get_device.cache_clear()


def fail_at_once(self: FakeGpu, index: int) -> None:
    raise RuntimeError("busy")


@pytest.mark.parametrize("device", [1, True, b"cuda", ["cpu"], ("cuda", 0)])
def test_a_device_that_is_no_name(device: Any) -> None:
    with pytest.raises(UsageError, match="device must be a name"):
        backends.check_device(device)
