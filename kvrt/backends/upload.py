"""Weights on their way to a GPU: from a mapped file through two pinned buffers.

A GPU fetches from pinned memory at the full speed of its bus, and by itself: while it fetches one
buffer, the host fills the other from the file. So a model never lies in the host's memory twice.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

BUFFER_BYTES = 64 << 20
"""Of each of the two buffers: large enough that starting a copy costs nothing beside it."""

LEAST_BYTES = 1 << 20
"""What is smaller goes the ordinary way."""

_log = logging.getLogger(__name__)


class Uploader:
    """Copies host arrays to the current device of CuPy; used by one thread at a time."""

    def __init__(self, cupy: Any, buffer_bytes: int = BUFFER_BYTES):
        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._buffers = [_pinned(cupy, buffer_bytes) for _ in range(2)]
        self._fetched = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self._turn = 0

    def copy(self, source: np.ndarray, target: Any) -> None:
        """target = source, both contiguous and of the same bytes.

        The source can be changed afterwards, and work on the current stream finds the target
        complete.
        """
        cuda = self._cupy.cuda
        flat = source.reshape(-1).view(np.uint8)  # (nbytes,)
        current, address = cuda.get_current_stream(), int(target.data.ptr)
        # The memory may be that of an array whose last readers have not run yet.
        self._stream.wait_event(current.record())
        size = self._buffers[0].size
        for start in range(0, flat.size, size):
            piece = flat[start : start + size]
            buffer, fetched = self._buffers[self._turn], self._fetched[self._turn]
            fetched.synchronize()  # returns at once for an event that was never recorded
            buffer[: piece.size] = piece
            cuda.runtime.memcpyAsync(
                address + start, buffer.ctypes.data, piece.size,
                cuda.runtime.memcpyHostToDevice, self._stream.ptr,
            )  # fmt: skip
            fetched.record(self._stream)
            self._turn = 1 - self._turn
        current.wait_event(self._stream.record())

    def close(self) -> None:
        """Wait for all copies and give the buffers back."""
        self._stream.synchronize()
        self._buffers.clear()


def _pinned(cupy: Any, size: int) -> np.ndarray:
    """(size,) u8; ordinary memory, whose copies take longer, where the system lets none be pinned.

    Not from CuPy's pool of pinned memory, which would keep it.
    """
    try:
        memory = cupy.cuda.PinnedMemory(size)
    except Exception as error:  # CuPy's own, which can be named only with CuPy
        _log.warning("weights are loaded more slowly: no memory can be pinned (%s)", error)
        return np.empty(size, np.uint8)
    return np.frombuffer(cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, size)
