"""CUDA kernels are compiled without a GPU, kept on disk, and launched with checked arguments."""

import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from kvrt import paths
from kvrt.backends import cubin_cache, cuda_device, nvrtc
from kvrt.backends.cubin_cache import cache_name, get_cubin
from kvrt.backends.cuda_device import CudaDevice
from kvrt.backends.nvrtc import Compiler, Cubin, Resources, parse_resources
from kvrt.backends.variants import ARCHITECTURES, Variant, variants
from kvrt.errors import KernelError, UnsupportedError

KERNELS = """
#include "part.cuh"
extern "C" __global__ void __launch_bounds__(64) fill(float* x, int n, float value) {
  __shared__ float all[64];
  all[threadIdx.x] = value + PART;
  __syncthreads();
  if (threadIdx.x < n) x[threadIdx.x] = all[63 - threadIdx.x] * MORE;
}
extern "C" __global__ void other(i64* x) { *x = VIEW_LAYER_SETTINGS; }
"""
PART = "using i64 = long long;\n#define PART 1\n"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources, and an empty cache."""
    monkeypatch.setenv("KVRT_HOME", str(tmp_path / "home"))
    for say in (
        cubin_cache._say_compiling, cubin_cache._say_waiting, cubin_cache._say_not_kept,
    ):  # fmt: skip
        say.cache_clear()
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "fill.cu").write_text(KERNELS)
    (folder / "part.cuh").write_text(PART)
    return folder


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    try:
        return nvrtc.find_compiler()
    except KernelError as error:
        pytest.skip(str(error))


class CountingCompiler:
    """Stands for a Compiler: no NVRTC is needed to test what is kept and when."""

    version = (13, 0)
    where = "nowhere"

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any], str]] = []
        self.entered = threading.Event()
        self.slow = threading.Event()
        self.slow.set()

    def compile(self, name: str, defines: Any, arch: str, folder: Path) -> Cubin:
        self.calls.append((name, dict(defines), arch))
        self.entered.set()
        self.slow.wait(10)
        return Cubin(f"{len(self.calls)}\n{arch}".encode(), {"fill": Resources(8, 256, 0, 0)})


# Compiling


def test_a_source_becomes_machine_code(compiler: Compiler, sources: Path) -> None:
    for arch in ARCHITECTURES:
        cubin = compiler.compile("fill.cu", {"MORE": 2}, arch, sources)
        assert cubin.code.startswith(b"\x7fELF")
        assert set(cubin.kernels) == {"fill", "other"}
        fill = cubin.kernels["fill"]
        assert 0 < fill.registers < 64
        assert (fill.shared, fill.stack, fill.spills) == (256, 0, 0)


def test_an_error_carries_the_log(compiler: Compiler, sources: Path) -> None:
    with pytest.raises(KernelError, match=r'(?s)fill.cu -DLESS=2 for sm_90.*"MORE" is undefined'):
        compiler.compile("fill.cu", {"LESS": 2}, "sm_90", sources)
    with pytest.raises(KernelError, match=r"for sm_1 failed: .*arch"):
        compiler.compile("fill.cu", {"MORE": 2}, "sm_1", sources)
    with pytest.raises(KernelError, match=r"CUDA source gone.cu cannot be read: No such file"):
        compiler.compile("gone.cu", {}, "sm_90", sources)


def test_only_what_is_compared_by_bytes_rounds_products_before_sums() -> None:
    assert "-fmad=false" in nvrtc.options("store.cu", {}, "sm_90")
    options = nvrtc.options("gemv.cu", {"KIND": 2}, "sm_90")
    assert "-fmad=false" not in options and "-DKIND=2" in options and "-arch=sm_90" in options
    assert not any("fast" in option for option in options)


def test_spills_are_read_from_the_log() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas info    : Function properties for one
    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 512 bytes smem, 384 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas info    : Function properties for two
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers
ptxas info    : Function properties for helper
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
"""
    assert parse_resources(log) == {
        "one": Resources(255, 512, 24, 20),
        "two": Resources(10, 0, 16, 8),
    }
    assert parse_resources("") == {}


@pytest.mark.parametrize("place", ["wheel-13", "wheel-12", "toolkit"])
def test_places_of_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder, file = {
        "wheel-13": ("nvidia/cu13/lib", "libnvrtc.so.13"),
        "wheel-12": ("nvidia/cuda_nvrtc/lib", "libnvrtc.so.12"),
        "toolkit": ("lib64", "libnvrtc.so.12"),
    }[place]
    (tmp_path / folder).mkdir(parents=True)
    for name in (file, "libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13", f"{file}.0.1"):
        (tmp_path / folder / name).touch()
    monkeypatch.setattr("sys.path", [] if place == "toolkit" else [str(tmp_path)])
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path) if place == "toolkit" else "")
    found = list(nvrtc.candidates())
    assert found[0] == str(tmp_path / folder / file)
    assert [path for path in found if str(tmp_path) in path] == found[:1]
    assert found[-1] == "libnvrtc.so"


def test_without_a_compiler_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libnvrtc.so.13").write_text("not a library")
    monkeypatch.setattr(nvrtc, "candidates", lambda: [str(tmp_path / "libnvrtc.so.13")])
    nvrtc._find_compiler.cache_clear()
    try:
        with pytest.raises(KernelError, match=re.escape("pip install 'kvrt[cuda13]'")):
            nvrtc.find_compiler()
    finally:
        nvrtc._find_compiler.cache_clear()


def test_a_compiler_newer_than_the_driver_is_not_taken(compiler: Compiler) -> None:
    major = compiler.version[0]
    assert nvrtc.find_compiler(newest=major).version == compiler.version
    with pytest.raises(KernelError, match=r"but the driver takes code of CUDA 5 and older"):
        nvrtc.find_compiler(newest=5)


# The cache


def test_the_second_time_nothing_is_compiled(
    sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = CountingCompiler()
    first = get_cubin(compiler, "fill.cu", {"MORE": 1}, "sm_90", sources)
    again = get_cubin(compiler, "fill.cu", {"MORE": 1}, "sm_90", sources)
    assert first == again == Cubin(b"1\nsm_90", {"fill": Resources(8, 256, 0, 0)})
    assert len(compiler.calls) == 1
    get_cubin(compiler, "fill.cu", {"MORE": 2}, "sm_90", sources)
    get_cubin(compiler, "fill.cu", {"MORE": 1}, "sm_80", sources)
    compiler.version = (13, 1)
    get_cubin(compiler, "fill.cu", {"MORE": 1}, "sm_90", sources)
    assert len(compiler.calls) == 4
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert said == ["compiling CUDA kernels, once for this version (under a minute)"]


def test_any_changed_source_changes_the_key(sources: Path) -> None:
    names = set()

    def add() -> int:
        names.add(cache_name(CountingCompiler(), "fill.cu", {"MORE": 1}, "sm_90", sources))
        return len(names)

    assert (add(), add()) == (1, 1)
    (sources / "part.cuh").write_text(PART.replace("1", "2"))
    assert add() == 2
    (sources / "fill.cu").write_text(KERNELS + "\n")
    assert add() == 3
    (sources / "more.cuh").touch()
    assert add() == 4
    (sources / "notes.txt").touch()
    assert add() == 4


def test_the_real_compiler_reads_a_changed_include(compiler: Compiler, sources: Path) -> None:
    first = get_cubin(compiler, "fill.cu", {"MORE": 1}, "sm_90", sources)
    assert get_cubin(compiler, "fill.cu", {"MORE": 1}, "sm_90", sources) == first
    (sources / "part.cuh").write_text(PART.replace("1", "7"))
    assert get_cubin(compiler, "fill.cu", {"MORE": 1}, "sm_90", sources).code != first.code


def test_two_threads_compile_it_once(sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = CountingCompiler()
    compiler.slow.clear()
    results: list[Cubin] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(get_cubin(compiler, "fill.cu", {}, "sm_90", sources))
        )
        for _ in range(2)
    ]
    threads[0].start()
    assert compiler.entered.wait(10)
    threads[1].start()
    while not any("waiting for another process" in r.message for r in caplog.records):
        assert threads[1].is_alive()
    compiler.slow.set()
    for thread in threads:
        thread.join(10)
    assert len(compiler.calls) == 1 and len(results) == 2 and results[0] == results[1]


@pytest.mark.parametrize("damage", ["empty", "shorter", "changed"])
def test_a_damaged_file_is_compiled_again(sources: Path, damage: str) -> None:
    compiler = CountingCompiler()
    get_cubin(compiler, "fill.cu", {}, "sm_90", sources)
    (kept,) = paths.kernels_dir().glob("cuda-*.bin")
    data = bytearray(kept.read_bytes())
    if damage == "changed":
        data[-1] ^= 1
    kept.write_bytes(data[: {"empty": 0, "shorter": len(data) - 1}.get(damage, len(data))])
    assert get_cubin(compiler, "fill.cu", {}, "sm_90", sources).code.startswith(b"2")
    get_cubin(compiler, "fill.cu", {}, "sm_90", sources)
    assert len(compiler.calls) == 2


def test_where_nothing_can_be_kept_it_is_compiled_for_this_run(
    sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = paths.home()
    home.mkdir()
    paths.kernels_dir().write_text("a file where the folder should be")
    compiler = CountingCompiler()
    assert get_cubin(compiler, "fill.cu", {}, "sm_90", sources).code.startswith(b"1")
    get_cubin(compiler, "fill.cu", {}, "sm_90", sources)
    assert len(compiler.calls) == 2
    (said,) = {r.message for r in caplog.records}
    assert said.startswith("compiling CUDA kernels for this run only") and str(home) in said


def test_a_full_disk_costs_no_second_compilation(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise paths.storage_error(path, OSError(28, "No space left"))

    monkeypatch.setattr(paths, "atomic_write", full)
    compiler = CountingCompiler()
    assert get_cubin(compiler, "fill.cu", {}, "sm_90", sources).code.startswith(b"1")
    assert len(compiler.calls) == 1


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_folder_without_write_permission(sources: Path) -> None:
    folder = paths.kernels_dir()
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    try:
        compiler = CountingCompiler()
        assert get_cubin(compiler, "fill.cu", {}, "sm_90", sources).code.startswith(b"1")
    finally:
        folder.chmod(0o700)


def test_old_variants_of_other_sources_are_forgotten(sources: Path) -> None:
    compiler = CountingCompiler()
    get_cubin(compiler, "fill.cu", {}, "sm_90", sources)
    (same,) = paths.kernels_dir().glob("cuda-*.bin")
    old = same.with_name("cuda-0123456789ab-0123456789abcdef.bin")
    young = same.with_name("cuda-ba9876543210-0123456789abcdef.bin")
    for path in (old, young):
        path.touch()
    for path in (old, same):
        os.utime(path, (0, 0))
    get_cubin(compiler, "fill.cu", {}, "sm_80", sources)
    assert same.exists() and young.exists() and not old.exists()


# The list of variants


def test_variants_are_named_once() -> None:
    names = [str(variant) for variant in variants()]
    assert len(names) == len(set(names))
    assert str(Variant("gemv.cu", {"KIND": 2})) == "gemv.cu KIND=2"
    assert "store.cu" in names and "prefill.cu HEAD_DIM=128" in names


# The device, with a stand-in for CuPy


class FakeFunction:
    def __init__(self, name: str, calls: list[Any]):
        self.ptr = 1000 + len(name)
        self._name, self._calls = name, calls

    def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int = 0) -> None:
        self._calls.append((self._name, grid, block, arguments, shared_mem))


class FakeDevice:
    compute_capability = "90"
    mem_info = (5, 9)

    def __init__(self, index: int):
        self.attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 232448}
        self.entered = self.synchronized = 0
        self.error: Exception | None = None

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        self.entered -= 1

    def synchronize(self) -> None:
        self.synchronized += 1
        if self.error:
            raise self.error


class FakeModule:
    calls: ClassVar[list[Any]] = []
    loaded: ClassVar[list[bytes]] = []
    refuse = False

    def load(self, code: bytes) -> None:
        if self.refuse:
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
        self.loaded.append(code)

    def get_function(self, name: str) -> FakeFunction:
        return FakeFunction(name, self.calls)


@pytest.fixture
def cupy(sources: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    granted: list[tuple[int, int, int]] = []
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda index: {"name": b"A GPU"},
        driverGetVersion=lambda: 13020,
    )
    module = type("Module", (FakeModule,), {"calls": [], "loaded": []})
    monkeypatch.setattr(cuda_device, "SOURCE_DIR", sources)
    monkeypatch.setattr(nvrtc, "find_compiler", lambda newest=None: CountingCompiler())
    monkeypatch.setattr(cuda_device, "get_cubin", lambda *_: Cubin(b"code", {
        "fill": Resources(8, 256, 0, 0), "other": Resources(8, 0, 0, 0)
    }))  # fmt: skip
    monkeypatch.delenv("KVRT_SYNC", raising=False)
    yield SimpleNamespace(
        __version__="14.2.0",
        cuda=SimpleNamespace(
            runtime=runtime,
            Device=FakeDevice,
            function=SimpleNamespace(Module=module),
            driver=SimpleNamespace(
                funcGetAttribute=lambda attribute, function: {1: 256}[attribute],
                funcSetAttribute=lambda *given: granted.append(given),
            ),
        ),
        granted=granted,
        module=module,
    )


def device_array(address: int, contiguous: bool = True) -> Any:
    return SimpleNamespace(
        data=SimpleNamespace(ptr=address),
        strides=(8,),
        flags=SimpleNamespace(c_contiguous=contiguous),
    )


def test_what_a_device_is(cupy: Any) -> None:
    device = CudaDevice(1, cupy)
    assert (device.index, device.name, device.arch) == (1, "A GPU", "sm_90")
    assert device.compute_capability == (9, 0) and device.multiprocessors == 132
    assert device.memory() == (5, 9) and device.driver_version == (13, 2)
    assert device.label == "cuda:1, A GPU"
    assert re.fullmatch(r"cuda-[0-9a-f]{12}, sm_90", device.build)
    assert device.address(device_array(512)) == 512


def test_the_peak_is_what_the_allocator_holds(cupy: Any) -> None:
    held = [700]
    pool = SimpleNamespace(total_bytes=lambda: held[0], free_all_blocks=held.clear)
    cupy.get_default_memory_pool = lambda: pool
    device = CudaDevice(0, cupy)
    assert device.peak_bytes() == 700
    assert device.reset_peak() and held == [] and device.handle.synchronized == 1


@pytest.mark.parametrize(("capability", "arch"), [("80", "sm_80"), ("120", "sm_120")])
def test_architectures(cupy: Any, monkeypatch: Any, capability: str, arch: str) -> None:
    monkeypatch.setattr(FakeDevice, "compute_capability", capability)
    assert CudaDevice(0, cupy).arch == arch


def test_devices_that_cannot_be_used(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in (-1, 2):
        with pytest.raises(UnsupportedError, match="there are 2"):
            CudaDevice(index, cupy)
    monkeypatch.setattr(FakeDevice, "compute_capability", "75")
    with pytest.raises(UnsupportedError, match=r"compute capability 7\.5; kvrt needs 8\.0"):
        CudaDevice(0, cupy)


def test_a_module_is_loaded_once(cupy: Any) -> None:
    device = CudaDevice(0, cupy)
    module = device.module("fill.cu", {"MORE": 1})
    assert device.module("fill.cu", {"MORE": 1}) is module
    assert device.module("fill.cu", {"MORE": 2}) is not module
    assert cupy.module.loaded == [b"code"] * 2
    cupy.module.refuse = True
    with pytest.raises(KernelError, match=r"fill.cu: the driver refuses .*INVALID_IMAGE"):
        device.module("fill.cu", {"MORE": 3})


def test_a_launch_converts_its_arguments(cupy: Any) -> None:
    device = CudaDevice(0, cupy)
    module = device.module("fill.cu")
    module.launch("fill", (3,), (64, 1), device_array(512), 7, 1, shared=100)
    ((name, grid, block, arguments, shared),) = cupy.module.calls
    assert (name, grid, block, shared) == ("fill", (3, 1, 1), (64, 1, 1), 100)
    assert [(a.dtype, a.item()) for a in arguments] == [
        (np.uint64, 512), (np.int32, 7), (np.float32, 1.0),
    ]  # fmt: skip
    assert device.handle.synchronized == 0 and cupy.granted == []


def test_much_shared_memory_is_asked_for_once(cupy: Any) -> None:
    module = CudaDevice(0, cupy).module("fill.cu")
    for shared in (48 * 1024 - 256, 48 * 1024, 100 * 1024, 1024):
        module.launch("fill", (1,), (64,), 512, 7, 1.0, shared=shared)
    assert cupy.granted == [(1004, 8, 232448 - 256)]
    with pytest.raises(KernelError, match="this device has 232192 for it"):
        module.launch("fill", (1,), (64,), 512, 7, 1.0, shared=232448)


@pytest.mark.parametrize(
    ("kernel", "grid", "block", "first", "message"),
    [
        ("gone", (1,), (1,), 512, "fill.cu has no kernel gone"),
        ("fill", (0,), (1,), 512, r"grid \(0, 1, 1\) is not within"),
        ("fill", (1, 65536), (1,), 512, "grid"),
        ("fill", (1 << 31,), (1,), 512, "grid"),
        ("fill", (1, 1, 1, 1), (1,), 512, "grid has 1 to 3 sizes"),
        ("fill", (1,), (), 512, "block has 1 to 3 sizes"),
        ("fill", (1,), (1025,), 512, "block"),
        ("fill", (1,), (64, 32), 512, "at most 1024 threads"),
        ("fill", (1,), (1,), 2, "x must be aligned to 4 bytes"),
        ("fill", (1,), (1,), np.zeros(4), "x must be an address"),
        ("fill", (1,), (1,), device_array(512, contiguous=False), "not contiguous"),
    ],
)
def test_launches_that_are_refused(
    cupy: Any, kernel: str, grid: Any, block: Any, first: Any, message: str
) -> None:
    module = CudaDevice(0, cupy).module("fill.cu")
    with pytest.raises(KernelError, match=message):
        module.launch(kernel, grid, block, first, 7, 1.0)
    assert cupy.module.calls == []


def test_sync_names_the_kernel_that_failed(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRT_SYNC", "1")
    device = CudaDevice(0, cupy)
    module = device.module("fill.cu")
    module.launch("fill", (1,), (64,), 512, 7, 1.0)
    assert device.handle.synchronized == 1
    device.handle.error = RuntimeError("cudaErrorIllegalAddress")
    with pytest.raises(KernelError, match=r"fill.cu: other, grid \(2, 1, 1\).*IllegalAddress"):
        module.launch("other", (2,), (1,), 512)
    assert device.handle.entered == 0


def failing(error: Exception) -> Any:
    def fail(*_: object) -> Any:
        raise error

    return fail


def test_without_cupy_or_driver_it_is_said(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cuda_device.importlib, "import_module", failing(ModuleNotFoundError(name="cupy"))
    )
    with pytest.raises(UnsupportedError, match=r"CuPy is not installed: pip install 'kvrt\[cuda"):
        CudaDevice()
    lines = cuda_device.describe()
    assert lines[0][:2] == ("CUDA device", False) and "CuPy is not installed" in lines[0][2]
    monkeypatch.setattr(cuda_device.importlib, "import_module", failing(ImportError("libfoo")))
    with pytest.raises(UnsupportedError, match=r"cannot be imported \(libfoo\)"):
        CudaDevice()
    monkeypatch.setattr(cuda_device.importlib, "import_module", lambda name: cupy)
    cupy.cuda.runtime.getDeviceCount = failing(RuntimeError("cudaErrorInsufficientDriver"))
    with pytest.raises(UnsupportedError, match=r"driver is missing or too old.*Insufficient"):
        CudaDevice()
    cupy.cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(UnsupportedError, match="sees no device"):
        CudaDevice()


def test_doctor_describes_devices(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device.importlib, "import_module", lambda name: cupy)
    found = SimpleNamespace(version=(13, 5), where="here")
    monkeypatch.setattr(nvrtc, "find_compiler", lambda newest=None: found)
    lines = cuda_device.describe()
    assert [line[:2] for line in lines] == [
        ("CuPy", True), ("cuda:0", True), ("cuda:1", True), ("CUDA compiler", True),
    ]  # fmt: skip
    assert lines[0][2] == "14.2.0; the driver takes CUDA 13.2"
    assert lines[1][2] == "A GPU, sm_90, 0.0 of 0.0 GiB free"
    monkeypatch.setattr(FakeDevice, "mem_info", property(failing(RuntimeError("in use"))))
    assert cuda_device.describe()[1] == ("cuda:0", False, "cannot be used: in use")
