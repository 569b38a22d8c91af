"""A stand-in for CuPy whose arrays are NumPy's: one pool of memory with a limit, and streams whose
copies happen as late as they may."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvrt import backends
from kvrt.backends import cuda_device, nvrtc

FREE, TOTAL = 6 << 30, 8 << 30  # bytes of the device that the driver speaks of
SHARED = 232448  # bytes of shared memory that a block may have


class FakeStream:
    """Work that was put in waits until someone waits for it."""

    ptr = 0

    def __init__(self, non_blocking: bool = False) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.done = 0

    def put(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)
        self.ptr = id(self)

    def record(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.put(event.synchronize)

    def run(self, count: int) -> None:
        while self.done < count:
            self.done += 1
            self.waiting[self.done - 1]()

    def synchronize(self) -> None:
        self.run(len(self.waiting))


class FakeEvent:
    def __init__(self, disable_timing: bool = False) -> None:
        self._place: tuple[FakeStream, int] | None = None

    def record(self, stream: FakeStream) -> None:
        self._place = stream, len(stream.waiting)

    def synchronize(self) -> None:
        if self._place is not None:
            stream, count = self._place
            stream.run(count)


class FakePinned:
    """Pinned memory: `pinned` counts the bytes that are."""

    pinned = 0
    most = 0
    refuse = False

    def __init__(self, size: int) -> None:
        if self.refuse:
            raise RuntimeError("cudaErrorMemoryAllocation")
        self.size = size
        FakePinned.pinned += size
        FakePinned.most = max(FakePinned.most, FakePinned.pinned)

    def __del__(self) -> None:
        FakePinned.pinned -= getattr(self, "size", 0)


class FakePool:
    """CuPy's pool, as far as its figures go."""

    def __init__(self) -> None:
        self.limit = self.used = self.unused = 0

    def get_limit(self) -> int:
        return self.limit

    def used_bytes(self) -> int:
        return self.used

    def free_bytes(self) -> int:
        return self.unused

    def total_bytes(self) -> int:
        return self.used + self.unused

    def free_all_blocks(self) -> None:
        self.unused = 0

    def take(self, size: int) -> None:
        if self.limit and self.used + self.unused + size > self.limit:
            raise MemoryError(f"Out of memory allocating {size} bytes")
        self.used += size


class FakeArray(np.ndarray):
    """A device array: `data.ptr` is its address."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class FakeGpu:
    compute_capability = "90"
    mem_info = (FREE, TOTAL)
    current = 0

    def __init__(self, index: int) -> None:
        self.index = index
        self.attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": SHARED}

    def use(self) -> None:
        FakeGpu.current = self.index

    def synchronize(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class FakeCupy:
    """The parts of CuPy that loading needs; two devices."""

    __version__ = "14.2.0"

    def __init__(self) -> None:
        self.pool = FakePool()
        self.stream = FakeStream()  # the current one
        self.streams: dict[int, FakeStream] = {}
        self.copies: list[int] = []  # bytes of each asynchronous copy
        FakePinned.pinned = FakePinned.most = 0
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                getDeviceCount=lambda: 2,
                getDeviceProperties=lambda index: {"name": b"A GPU"},
                driverGetVersion=lambda: 13020,
                memcpyAsync=self._copy,
                memcpyHostToDevice=1,
            ),
            Device=FakeGpu,
            Stream=self._new_stream,
            Event=FakeEvent,
            get_current_stream=lambda: self.stream,
            PinnedMemory=FakePinned,
            PinnedMemoryPointer=self._pointer,
        )

    def get_default_memory_pool(self) -> FakePool:
        return self.pool

    def empty(self, shape: Any, dtype: Any) -> FakeArray:
        held = np.zeros(shape, dtype)
        self.pool.take(held.nbytes)
        return held.view(FakeArray)

    zeros = empty

    def asarray(self, array: Any) -> FakeArray:
        held = np.array(array)
        self.pool.take(held.nbytes)
        return held.view(FakeArray)

    def ascontiguousarray(self, array: Any) -> Any:
        return np.ascontiguousarray(array).view(FakeArray)

    def _new_stream(self, non_blocking: bool = False) -> FakeStream:
        stream = FakeStream()
        stream.ptr = id(stream)
        self.streams[stream.ptr] = stream
        return stream

    def _pointer(self, memory: FakePinned, offset: int) -> Any:
        buffer = (ctypes.c_char * memory.size)()
        buffer._memory = memory  # it lives as long as what lies in it
        return buffer

    def _copy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind == 1
        self.copies.append(size)
        self.streams[stream].put(lambda: void(ctypes.memmove(target, source, size)))


def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """Two GPUs and a compiler, for a fixture."""
    fake = FakeCupy()
    monkeypatch.setattr(backends, "_has_cupy", lambda: True)
    monkeypatch.setattr(cuda_device.importlib, "import_module", lambda name: fake)
    compiler = SimpleNamespace(version=(13, 0), where="here")
    monkeypatch.setattr(nvrtc, "find_compiler", lambda newest=None: compiler)
    cuda_device.get_device.cache_clear()
    yield fake
    cuda_device.get_device.cache_clear()


def void(_: object) -> None: ...
