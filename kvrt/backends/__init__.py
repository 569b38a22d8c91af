"""Backends: operations on plain arrays, a page layout and a view of the cache."""

from ..errors import UnsupportedError
from .ops import Ops

DEVICES = ("cpu",)


def get_ops(device: str = "cpu", threads: int | None = None) -> Ops:
    """The operations of a device.

    Raises UnsupportedError for a device that this version cannot use, UsageError for a bad thread
    count, KernelError where the kernels cannot be compiled.
    """
    check_device(device)
    from .cpu import CpuOps

    return CpuOps(threads)


def doctor() -> list[tuple[str, bool, str]]:
    """The state of the backends: (name, whether it is well, in words)."""
    from .native import describe

    return describe()


def check_device(device: str) -> None:
    """Raise UnsupportedError unless the device can be used."""
    if device not in DEVICES:
        raise UnsupportedError(
            f"device {device!r} is not supported by this version; what works: {', '.join(DEVICES)}"
        )


def check_threads(device: str, threads: int | None) -> None:
    """Raise UsageError for a number of threads that the device cannot have; None is its own."""
    from .cpu import check_threads as check

    check_device(device)
    check(threads)


def available_memory(device: str) -> int:
    """Bytes that a model and its cache can have on a device; 0 where unknown."""
    from .memory import available_bytes

    check_device(device)
    return available_bytes()
