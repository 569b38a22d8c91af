"""What a benchmark asks of a GPU that it need not ask of a processor."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import KernelError

if TYPE_CHECKING:
    from ..backends.ops import Ops

_NVML_NAMES = ("libnvidia-ml.so.1", "nvml.dll")


def device_of(ops: Ops) -> Any | None:
    """The `CudaDevice` that operations run on; None on a CPU."""
    return getattr(ops, "device", None) if ops.name == "cuda" else None


def settle(ops: Ops) -> None:
    """Wait for all that was launched: work on a GPU goes on behind the calls that ask for it."""
    wait = getattr(device_of(ops), "synchronize", None)
    if wait is not None:
        wait()


def used_memory(ops: Ops) -> int | None:
    """Bytes of a GPU that are in use, by all programs, as its driver counts; None on a CPU."""
    ask = getattr(device_of(ops), "memory", None)
    if ask is None:
        return None
    free, total = ask()
    return int(total - free)


def limit_memory(ops: Ops, limit: int) -> None:
    """Have a GPU's allocator hold at most so many bytes from now on; nothing on a CPU.

    What it holds unused goes back first, so that only what is in use counts.
    """
    device = device_of(ops)
    if device is None:
        return
    ops.reset_peak()
    with device.handle:
        device.xp.get_default_memory_pool().set_limit(size=limit)


def gpu_fields(ops: Ops) -> dict[str, Any]:
    """What rows say of a GPU: its driver's version and its compute capability; None on a CPU."""
    device = device_of(ops)
    capability = getattr(device, "compute_capability", None)
    return {
        "driver": None if device is None else driver_version(),
        "compute_capability": None if capability is None else _dotted(capability),
    }


def gpu_versions(ops: Ops) -> dict[str, str]:
    """The CUDA version that the driver knows, and that of the compiler of the kernels."""
    known = getattr(device_of(ops), "driver_version", None)
    if known is None:
        return {}
    from ..backends.nvrtc import find_compiler

    found = {"cuda-driver": _dotted(known)}
    with suppress(KernelError):  # none is needed where all kernels are on the disk
        found["nvrtc"] = _dotted(find_compiler(newest=known[0]).version)
    return found


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def driver_version() -> str | None:
    """The NVIDIA driver's version, such as "580.159.04", from its management library (NVML)."""
    for name in _NVML_NAMES:
        try:
            nvml = ctypes.CDLL(name)
            begin, ask = nvml.nvmlInit_v2, nvml.nvmlSystemGetDriverVersion
        except (OSError, AttributeError):
            continue
        buffer = ctypes.create_string_buffer(96)
        if begin():
            return None
        try:
            return None if ask(buffer, len(buffer)) else buffer.value.decode(errors="replace")
        finally:
            nvml.nvmlShutdown()
    return None
