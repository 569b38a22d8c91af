"""Backends: operations on plain arrays, a page layout and a view of the cache."""

from __future__ import annotations

import logging
import re
from importlib import util
from typing import TYPE_CHECKING

from ..errors import UnsupportedError, UsageError
from .ops import Ops

if TYPE_CHECKING:
    from .cuda_device import CudaDevice

DEVICES = ("cpu", "cuda", "cuda:N")
"""How devices are named; cuda is cuda:0."""

_CUDA = re.compile(r"cuda(?::([0-9]{1,4}))?")

_log = logging.getLogger(__name__)


def get_ops(device: str = "cpu", threads: int | None = None) -> Ops:
    """The operations of a device: "cpu", "cuda" or "cuda:N".

    A GPU becomes the calling thread's current one. Raises UnsupportedError for a device that cannot
    be used, UsageError for a bad thread count, KernelError where the kernels cannot be compiled.
    """
    check_threads(device, threads)
    if device == "cpu":
        from .cpu import CpuOps

        return CpuOps(threads)
    from .cuda import CudaOps

    found = _cuda(device)
    found.use()
    return CudaOps(found)


def default_device() -> str:
    """What computes where no device is named: "cuda" where it can be used, else "cpu".

    Costs next to nothing where CuPy is not installed.
    """
    if not _has_cupy():
        return "cpu"
    try:
        check_device("cuda")
    except UnsupportedError as error:
        _log.debug("computing on the CPU: %s", error)
        return "cpu"
    return "cuda"


def doctor() -> list[tuple[str, bool, str]]:
    """The state of the CPU backend: (name, whether it is well, in words)."""
    from .native import describe

    return describe()


def doctor_cuda() -> list[tuple[str, bool, str]]:
    """The state of the CUDA backend, which kvrt can do without."""
    from .cuda_device import describe

    return describe()


def check_device_name(device: str) -> None:
    """Raise UnsupportedError for what names no device; whether there is one is not asked."""
    if not isinstance(device, str):
        raise UsageError(f"device must be a name, {', '.join(DEVICES)}; got {device!r:.40}")
    if device != "cpu" and _CUDA.fullmatch(device) is None:
        raise UnsupportedError(
            f"device {device!r:.40} is not supported; what works: {', '.join(DEVICES)}"
        )


def check_device(device: str) -> None:
    """Raise UnsupportedError unless the device can be used."""
    check_device_name(device)
    if device != "cpu":
        _cuda(device)


def check_threads(device: str, threads: int | None) -> None:
    """Raise UsageError for a number of threads that the device cannot have; None is its own."""
    check_device(device)
    if device == "cpu":
        from .cpu import check_threads as check

        check(threads)
    elif threads is not None:
        raise UsageError(
            f"{threads} threads: they are for the CPU, and {device} computes without them; "
            "leave them out, or take the device cpu"
        )


def available_memory(device: str) -> int:
    """Bytes that a model and its cache can have on a device; 0 where unknown.

    Of a GPU: what its driver has free, and what the allocator holds unused.
    """
    check_device(device)
    if device == "cpu":
        from .memory import available_bytes

        return available_bytes()
    return _cuda(device).available_bytes()


def shared_memory(device: str) -> int:
    """Bytes of shared memory that a block may have on a GPU."""
    check_device(device)
    return _cuda(device).max_shared


def _has_cupy() -> bool:
    return util.find_spec("cupy") is not None


def _cuda(device: str) -> CudaDevice:
    """The device of a name that was checked. Raises UnsupportedError."""
    from .cuda_device import get_device

    match = _CUDA.fullmatch(device)
    assert match is not None
    try:
        return get_device(int(match[1] or 0))
    except UnsupportedError as error:
        raise UnsupportedError(f"device {device!r}: {error}; what works: cpu") from error
