"""One GPU through CuPy: what it is, its kernels, and launches whose arguments are checked."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..cuda_src import SOURCE_DIR
from ..errors import KernelError, OutOfMemoryError, UnsupportedError
from . import cuda_graph, cuda_probe, dependent_launch, nvrtc
from .cubin_cache import get_cubin, sources_digest
from .cuda_memory import DeviceMemory
from .nvrtc import Cubin
from .signatures import read_signatures

OLDEST = (8, 0)
"""Compute capability that the kernels need: asynchronous copies, bf16 in tensor cores."""

_PINNED_BYTES = 4 << 20
"""Arrays up to this size come to the host through pinned memory, of which a pool is kept."""

_CUDA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
_COMPUTE_F32, _ALGORITHM = 68, -1  # CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
# What it says where it cannot have the memory that it begins with.
_CUBLAS_NO_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")

_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_THREADS = 1024
_FREE_SHARED = 48 * 1024  # bytes of shared memory that need no permission
_FIXED_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent


def import_cupy() -> Any:
    """CuPy, with at least one device that its driver can use. Raises UnsupportedError."""
    try:
        cupy = importlib.import_module("cupy")
    except Exception as error:  # a broken installation raises what it likes
        missing = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        broken = f"CuPy cannot be imported ({_one_line(error)})"
        reason = "CuPy is not installed" if missing else broken
        raise UnsupportedError(f"no CUDA: {reason}: {nvrtc.INSTALL}") from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise UnsupportedError(
            f"no CUDA: the NVIDIA driver is missing or too old for this CuPy ({error})"
        ) from error
    if not count:
        raise UnsupportedError("no CUDA: the NVIDIA driver sees no device")
    return cupy


class CudaDevice(DeviceMemory):
    """A GPU by its number; its modules are compiled and loaded once."""

    def __init__(self, index: int = 0, cupy: Any = None):
        """Find the device. Raises UnsupportedError where it cannot be used."""
        self.xp = cupy = cupy if cupy is not None else import_cupy()
        count = cupy.cuda.runtime.getDeviceCount()
        if not 0 <= index < count:
            raise UnsupportedError(f"no device cuda:{index}; there are {count}, from cuda:0")
        self.index = index
        self.handle = cupy.cuda.Device(index)
        capability = str(self.handle.compute_capability)  # "90" for 9.0, "120" for 12.0
        self.compute_capability = int(capability[:-1]), int(capability[-1])
        self.name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        if self.compute_capability < OLDEST:
            have, need = (".".join(map(str, c)) for c in (self.compute_capability, OLDEST))
            raise UnsupportedError(
                f"cuda:{index} ({self.name}) has compute capability {have}; kvrt needs {need}"
            )
        attributes = self.handle.attributes
        self.multiprocessors = int(attributes["MultiProcessorCount"])
        self.max_shared = int(attributes["MaxSharedMemoryPerBlockOptin"])
        self.overlaps = dependent_launch.supported(self.compute_capability, self.driver_version)
        self._modules: dict[tuple[Any, ...], CudaModule] = {}
        self._lock = threading.Lock()

    @property
    def arch(self) -> str:
        """What the compiler calls the device's architecture: "sm_90"."""
        return "sm_{}{}".format(*self.compute_capability)

    @property
    def label(self) -> str:
        """The device in words, for people."""
        return f"cuda:{self.index}, {self.name}"

    @property
    def build(self) -> str:
        """What tells these kernels from those of other sources."""
        return f"cuda-{sources_digest()[:12]}, {self.arch}"

    @property
    def driver_version(self) -> tuple[int, int]:
        """The newest CUDA version that the driver knows."""
        return _driver_version(self.xp)

    def address(self, array: Any) -> int:
        """The address of an array's first element."""
        return int(array.data.ptr)

    def to_host(self, array: Any) -> np.ndarray:
        """A copy in the host's memory; waits for what writes the array on the current stream."""
        if not array.flags.c_contiguous or array.nbytes > _PINNED_BYTES:
            return np.asarray(self.xp.asnumpy(array))
        out = self.pinned(array.shape, array.dtype)
        array.get(out=out)
        return out

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array of the host, undefined, that the device copies from and to at full speed.

        CuPy's pool takes its memory back when it is gone.
        """
        size, kind = int(np.prod(shape)), np.dtype(dtype)
        memory = self.xp.cuda.alloc_pinned_memory(max(size, 1) * kind.itemsize)
        return np.frombuffer(memory, kind, size).reshape(shape)

    def send(self, staged: np.ndarray, array: Any) -> None:
        """Copy a pinned array to one of the device, in the order of the current stream."""
        array.data.copy_from_host_async(staged.ctypes.data, staged.nbytes)

    def program(self, run: Callable[[], None], keep: Callable[[], list[Any]]) -> Callable[[], None]:
        """Launches that are the same each time, as a graph; what `keep` gives lives as long."""
        return cuda_graph.Program(self.xp, run, keep) if cuda_graph.wanted() else run

    def read_bandwidth(self) -> float:
        """Bytes a second at which the device reads its memory, measured now."""
        return cuda_probe.read_bandwidth(self)

    def matmul(self, x: Any, weight: Any, out: Any, add: bool) -> None:
        """out (n, rows) f32 = (or +=) x (n, cols) @ weight (rows, cols).T, by cuBLAS."""
        cublas = self.xp.cuda.cublas
        one, start = np.array(1, np.float32), np.array(int(add), np.float32)
        (n, cols), rows, kind = x.shape, weight.shape[0], _CUDA_TYPES[str(x.dtype)]
        try:
            # cuBLAS counts columns first: it computes the transpose of out.
            cublas.gemmEx(
                self.xp.cuda.device.get_cublas_handle(), cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N,
                rows, n, cols, one.ctypes.data, weight.data.ptr, kind, cols, x.data.ptr, kind, cols,
                start.ctypes.data, out.data.ptr, _CUDA_TYPES["float32"], rows,
                _COMPUTE_F32, _ALGORITHM,
            )  # fmt: skip
        except Exception as error:
            if any(status in str(error) for status in _CUBLAS_NO_MEMORY):
                raise OutOfMemoryError(f"{self.label} has no memory for cuBLAS: {error}") from error
            raise KernelError(
                f"cuBLAS: ({n}, {cols}) times ({rows}, {cols}), {x.dtype}: {error}"
            ) from error

    def module(self, name: str, defines: Mapping[str, Any] | None = None) -> CudaModule:
        """A source compiled with -D options, loaded; compiled once, then from the disk.

        Raises KernelError.
        """
        wanted = dict(defines or {})
        key = (name, *sorted(wanted.items()))
        with self._lock:
            if key not in self._modules:
                compiler = nvrtc.find_compiler(newest=self.driver_version[0])
                cubin = get_cubin(compiler, name, wanted, self.arch)
                self._modules[key] = CudaModule(self, name, cubin)
            return self._modules[key]


class CudaModule:
    """The kernels of one variant of a source, on one device."""

    def __init__(self, device: CudaDevice, name: str, cubin: Cubin):
        self.device = device
        self.name = name
        self.signatures = read_signatures(SOURCE_DIR / name)
        with device.handle:
            self._module = device.xp.cuda.function.Module()
            try:
                self._module.load(cubin.code)
            except Exception as error:
                raise KernelError(
                    f"{name}: the driver refuses the compiled code: {error}"
                ) from error
        self._functions: dict[str, tuple[Any, int]] = {}  # with bytes of shared memory of their own
        self._granted: dict[str, int] = {}  # bytes of dynamic shared memory, where over 48 KB
        self._carved: set[str] = set()

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        *arguments: Any,
        shared: int = 0,
        overlap: bool = False,
    ) -> None:
        """Start a kernel on CuPy's current stream; arrays stand for their addresses.

        With `overlap` it may begin before the kernel ahead of it has ended, on devices that can do
        so; only for kernels that call ptx::wait_for_previous() where they need what others write.
        With KVRT_SYNC=1 it is waited for, so that its errors carry its name; not for use while a
        graph is captured. Raises KernelError.
        """
        signature = self.signatures.get(kernel)
        if signature is None:
            raise KernelError(f"{self.name} has no kernel {kernel}")
        values = signature.convert([_address(kernel, value) for value in arguments])
        sizes = _checked(kernel, "grid", grid, _MAX_GRID)
        threads = _checked(kernel, "block", block, _MAX_BLOCK)
        if threads[0] * threads[1] * threads[2] > _MAX_THREADS:
            raise KernelError(
                f"{kernel}: a block has at most {_MAX_THREADS} threads, got {threads}"
            )
        try:
            with self.device.handle:
                function = self._function(kernel, shared)
                if overlap and self.device.overlaps:
                    self._prefer_shared(kernel, function)
                    stream = self.device.xp.cuda.get_current_stream().ptr
                    dependent_launch.launch(function.ptr, sizes, threads, values, shared, stream)
                else:
                    function(sizes, threads, tuple(values), shared)
                if os.environ.get("KVRT_SYNC") == "1":
                    self.device.synchronize()
        except KernelError:
            raise
        except Exception as error:
            where = f"{self.name}: {kernel}, grid {sizes}, block {threads}, {shared} bytes shared"
            raise KernelError(f"{where}: {error}") from error

    def _function(self, kernel: str, shared: int) -> Any:
        """The loaded kernel, permitted to have that much dynamic shared memory."""
        driver = self.device.xp.cuda.driver
        if kernel not in self._functions:
            function = self._module.get_function(kernel)
            # Not the compiler's own word: it says nothing of what it had in a cache.
            fixed = driver.funcGetAttribute(_FIXED_SHARED, function.ptr)
            self._functions[kernel] = function, fixed
        function, fixed = self._functions[kernel]
        if shared + fixed > self._granted.get(kernel, _FREE_SHARED):
            room = self.device.max_shared - fixed
            if shared > room:
                raise KernelError(
                    f"{kernel}: {shared} bytes of shared memory; this device has {room} for it"
                )
            driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED, room)
            self._granted[kernel] = self.device.max_shared
        return function

    def _prefer_shared(self, kernel: str, function: Any) -> None:
        """Split the multiprocessor's memory the same way for all kernels that overlap.

        It must be idle before it is split anew.
        """
        if kernel not in self._carved:
            self.device.xp.cuda.driver.funcSetAttribute(function.ptr, _SHARED_CARVEOUT, 100)
            self._carved.add(kernel)


def _driver_version(cupy: Any) -> tuple[int, int]:
    version = cupy.cuda.runtime.driverGetVersion()
    return version // 1000, version % 1000 // 10


def _address(kernel: str, value: Any) -> Any:
    """A device array as its address; other values as they are."""
    pointer = getattr(getattr(value, "data", None), "ptr", None)
    if pointer is None:
        return value
    if not value.flags.c_contiguous:
        raise KernelError(f"{kernel}: an array of strides {value.strides} is not contiguous")
    return int(pointer)


def _checked(
    kernel: str, what: str, sizes: Sequence[int], limits: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Three sizes of a launch, each from 1 to its limit."""
    if not 1 <= len(sizes) <= 3:
        raise KernelError(f"{kernel}: {what} has 1 to 3 sizes, got {tuple(sizes)}")
    x, y, z = (int(size) for size in (*sizes, 1, 1)[:3])
    if not all(1 <= size <= limit for size, limit in zip((x, y, z), limits, strict=True)):
        raise KernelError(f"{kernel}: {what} {(x, y, z)} is not within (1, 1, 1) .. {limits}")
    return x, y, z


@cache
def get_device(index: int) -> CudaDevice:
    """The device of a number, always the same one, with a compiler for its kernels.

    Raises UnsupportedError where one of them is missing, or the device cannot be used now.
    """
    try:
        device = CudaDevice(index)
        device.use()
        device.available_bytes()  # makes a context, which a device in use by others may refuse
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(f"cuda:{index} cannot be used: {_one_line(error)}") from error
    try:
        nvrtc.find_compiler(newest=device.driver_version[0])
    except KernelError as error:
        raise UnsupportedError(str(error)) from error
    return device


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def describe() -> list[tuple[str, bool, str]]:
    """What `kvrt doctor` says of CUDA: (name, whether it is well, in words)."""
    lines = []
    try:
        cupy = import_cupy()
        newest = ".".join(map(str, _driver_version(cupy)))
        lines.append(("CuPy", True, f"{cupy.__version__}; the driver takes CUDA {newest}"))
        for index in range(cupy.cuda.runtime.getDeviceCount()):
            lines.append(_describe_device(cupy, index))
    except UnsupportedError as error:
        lines.append(("CUDA device", False, str(error)))
    except Exception as error:  # half an installation
        lines.append(("CUDA device", False, f"CuPy does not work: {_one_line(error)}"))
    try:
        compiler = nvrtc.find_compiler()
        major, minor = compiler.version
        lines.append(("CUDA compiler", True, f"NVRTC {major}.{minor}: {compiler.where}"))
    except KernelError as error:
        lines.append(("CUDA compiler", False, str(error)))
    return lines


def _describe_device(cupy: Any, index: int) -> tuple[str, bool, str]:
    try:
        device = CudaDevice(index, cupy)
        free, total = (size / 2**30 for size in device.memory())
    except UnsupportedError as error:
        return f"cuda:{index}", False, str(error)
    except Exception as error:  # in use by someone alone, or broken
        return f"cuda:{index}", False, f"cannot be used: {_one_line(error)}"
    words = f"{device.name}, {device.arch}, {free:.1f} of {total:.1f} GiB free"
    return f"cuda:{index}", True, words
