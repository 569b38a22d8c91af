"""Launches that overlap: what the driver is handed, and when; with a stand-in for its library."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvrt.backends import cuda_device, dependent_launch, nvrtc
from kvrt.backends.cuda_device import CudaDevice
from kvrt.backends.dependent_launch import DriverError
from kvrt.backends.nvrtc import Cubin, Resources
from kvrt.errors import KernelError
from tests.emulator import COMPILER, EmulatedModule

KERNEL = 'extern "C" __global__ void fill(float* x, int n, float value) { x[n] = value; }'


class FakeDriver:
    """Reads what it is handed as the driver does, by the offsets of cuda.h."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.status = 0

        def launch(config: int, function: int, places: int, extra: int | None) -> int:
            sizes = struct.unpack_from("7I", ctypes.string_at(config, 56))
            stream, attributes, count = struct.unpack_from("2QI", ctypes.string_at(config, 56), 32)
            name, allowed = struct.unpack_from("I4xi", ctypes.string_at(attributes, 72))
            pointers = struct.unpack("3Q", ctypes.string_at(places, 24))
            values = [
                struct.unpack(form, ctypes.string_at(at, struct.calcsize(form)))[0]
                for form, at in zip("Qif", pointers, strict=True)
            ]
            self.calls.append((sizes, stream, (count, name, allowed), function, values, extra))
            return self.status

        pointer = ctypes.c_void_p
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 4)(launch)

    def _text(self, text: bytes, place: Any) -> int:
        place._obj.value = text
        return 0

    def cuGetErrorName(self, status: int, place: Any) -> int:
        return self._text(f"CUDA_ERROR_{status}".encode(), place)

    def cuGetErrorString(self, status: int, place: Any) -> int:
        return self._text(b"it is wrong", place)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(dependent_launch, "_driver", lambda: fake)
    return fake


@pytest.fixture
def cupy(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "fill.cu").write_text(KERNEL)
    plain: list[Any] = []

    class Device:
        compute_capability = "90"

        def __init__(self, index: int):
            self.attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 232448}
            self.entered = self.synchronized = 0

        def __enter__(self) -> None:
            self.entered += 1

        def __exit__(self, *_: object) -> None:
            self.entered -= 1

        def synchronize(self) -> None:
            self.synchronized += 1

    class Function:
        ptr = 0xFEED00000001

        def __call__(self, *arguments: Any) -> None:
            plain.append(arguments)

    module = SimpleNamespace(load=lambda code: None, get_function=lambda name: Function())
    monkeypatch.setattr(cuda_device, "SOURCE_DIR", tmp_path)
    monkeypatch.setattr(nvrtc, "find_compiler", lambda newest=None: None)
    cubin = Cubin(b"code", {"fill": Resources(8, 0, 0, 0)})
    monkeypatch.setattr(cuda_device, "get_cubin", lambda *_: cubin)
    monkeypatch.delenv("KVRT_SYNC", raising=False)
    granted: list[Any] = []
    yield SimpleNamespace(
        cuda=SimpleNamespace(
            runtime=SimpleNamespace(
                getDeviceCount=lambda: 1,
                getDeviceProperties=lambda index: {"name": b"A GPU"},
                driverGetVersion=lambda: 13000,
            ),
            Device=Device,
            function=SimpleNamespace(Module=lambda: module),
            driver=SimpleNamespace(
                funcGetAttribute=lambda attribute, function: {1: 0}[attribute],
                funcSetAttribute=lambda *given: granted.append(given),
            ),
            get_current_stream=lambda: SimpleNamespace(ptr=0xABCD00000002),
        ),
        granted=granted,
        plain=plain,
        device=Device,
    )


def test_the_driver_gets_sizes_stream_attribute_and_arguments(
    cupy: Any, driver: FakeDriver
) -> None:
    device = CudaDevice(0, cupy)
    device.module("fill.cu").launch(
        "fill", (3, 4, 5), (64, 2), 1 << 40, -7, 1.5, shared=99, overlap=True
    )
    assert driver.calls == [
        (
            (3, 4, 5, 64, 2, 1, 99), 0xABCD00000002, (1, 6, 1), 0xFEED00000001,
            [1 << 40, -7, 1.5], None,
        )
    ]  # fmt: skip
    assert cupy.plain == [] and device.handle.entered == 0


def test_plain_launches_where_there_is_no_overlap(
    cupy: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    CudaDevice(0, cupy).module("fill.cu").launch("fill", (1,), (1,), 512, 1, 1.0)
    monkeypatch.setattr(cupy.device, "compute_capability", "89")
    CudaDevice(0, cupy).module("fill.cu").launch("fill", (1,), (1,), 512, 1, 1.0, overlap=True)
    monkeypatch.setattr(cupy.device, "compute_capability", "120")
    cupy.cuda.runtime.driverGetVersion = lambda: 12020
    CudaDevice(0, cupy).module("fill.cu").launch("fill", (1,), (1,), 512, 1, 1.0, overlap=True)
    assert driver.calls == [] and len(cupy.plain) == 3
    cupy.cuda.runtime.driverGetVersion = lambda: 12030
    CudaDevice(0, cupy).module("fill.cu").launch("fill", (1,), (1,), 512, 1, 1.0, overlap=True)
    assert len(driver.calls) == 1 and len(cupy.plain) == 3


def test_much_shared_memory_and_sync_work_as_without(
    cupy: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRT_SYNC", "1")
    device = CudaDevice(0, cupy)
    device.module("fill.cu").launch(
        "fill", (1,), (1,), 512, 1, 1.0, shared=100 * 1024, overlap=True
    )
    assert cupy.granted == [(0xFEED00000001, 8, 232448), (0xFEED00000001, 9, 100)]
    assert device.handle.synchronized == 1 and driver.calls[0][0][6] == 100 * 1024


def test_errors_name_the_kernel(cupy: Any, driver: FakeDriver) -> None:
    device = CudaDevice(0, cupy)
    module = device.module("fill.cu")
    driver.status = 719
    with pytest.raises(
        KernelError, match=r"fill.cu: fill, grid \(2, 1, 1\).*CUDA_ERROR_719: it is wrong"
    ):
        module.launch("fill", (2,), (1,), 512, 1, 1.0, overlap=True)
    assert device.handle.entered == 0
    with pytest.raises(KernelError, match="x must be aligned"):
        module.launch("fill", (2,), (1,), 2, 1, 1.0, overlap=True)
    assert len(driver.calls) == 1


def test_a_driver_without_the_call_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    dependent_launch._driver.cache_clear()
    monkeypatch.setattr(dependent_launch, "_LIBRARIES", ("libkvrt-none.so", "libm.so.6"))
    with pytest.raises(DriverError, match="no cuLaunchKernelEx: update the driver"):
        dependent_launch.launch(1, (1, 1, 1), (1, 1, 1), [np.int32(1)], 0, 0)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_emulated_kernels_run_one_after_the_other() -> None:
    x, bias = np.zeros(4, np.float32), np.arange(4, dtype=np.float32)
    EmulatedModule("layers.cu").launch("add_bias", (1,), (32,), x, bias, 4, 4, overlap=True)
    np.testing.assert_array_equal(x, bias)
