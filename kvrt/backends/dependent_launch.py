"""Launches that may overlap with the end of the kernel before them (programmatic dependent launch).

CuPy has no call for them: this is the driver's cuLaunchKernelEx, through ctypes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

CAPABILITY = (9, 0)
"""The first compute capability that has them."""

DRIVER = (12, 3)
"""The first CUDA version whose graphs keep the overlap of what was captured."""

_LIBRARIES = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class DriverError(RuntimeError):
    """What the driver's library answered. Whoever launches says which kernel it was."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute. Its value is a union of 64 bytes that begins with an int for us."""

    _fields_ = [
        ("name", ctypes.c_uint),
        ("pad", ctypes.c_char * 4),
        ("allowed", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_OVERLAP = (_Attribute * 1)(_Attribute(_STREAM_SERIALIZATION, b"", 1))


def supported(capability: tuple[int, int], driver: tuple[int, int]) -> bool:
    """Whether a device of that compute capability has them, with a driver of that CUDA version."""
    return capability >= CAPABILITY and driver >= DRIVER


@cache
def _driver() -> Any:
    """The driver's library. Raises DriverError."""
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            library.cuLaunchKernelEx.argtypes = (
                ctypes.POINTER(_Config), ctypes.c_void_p,
                ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
            )  # fmt: skip
            return library
        except (OSError, AttributeError):
            continue
    raise DriverError(
        f"the CUDA driver's library ({_LIBRARIES[0]}) cannot be loaded, or has no "
        "cuLaunchKernelEx: update the driver"
    )


def launch(
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    arguments: Sequence[np.generic],
    shared: int,
    stream: int,
) -> None:
    """Start a kernel (a CUfunction's address) on a stream; valid while a graph is captured.

    Its blocks may start as soon as all blocks of the kernel before have said that they may, or have
    ended. `arguments` are of the kernel's own types, `shared` is bytes. Raises DriverError.
    """
    library = _driver()
    held = [np.array(value) for value in arguments]
    places = (ctypes.c_void_p * max(len(held), 1))(*(value.ctypes.data for value in held))
    config = _Config(
        (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared, stream, _OVERLAP, 1
    )
    status = library.cuLaunchKernelEx(ctypes.byref(config), function, places, None)
    if status:
        raise DriverError(_words(library, status))


def _words(library: Any, status: int) -> str:
    """What the driver says of a status: "CUDA_ERROR_INVALID_VALUE: invalid argument"."""
    parts = []
    for call in (library.cuGetErrorName, library.cuGetErrorString):
        text = ctypes.c_char_p()
        if not call(status, ctypes.byref(text)) and text.value:
            parts.append(text.value.decode(errors="replace"))
    return ": ".join(parts) or f"CUDA error {status}"
