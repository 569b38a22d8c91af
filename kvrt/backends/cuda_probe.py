"""How fast a GPU reads its memory: what its other kernels are compared with."""

from __future__ import annotations

from typing import Any

from ..errors import OutOfMemoryError

_LARGEST, _LEAST = 4 << 30, 64 << 20
"""Bytes of what is read; as much as possible, so that a launch's beginning and end are little."""

_BLOCKS, _THREADS = 4, 512
"""Of a multiprocessor, and of a block: as many threads as it holds."""

_READS, _ROUNDS = 3, 4
"""Launches measured together, and how often; the best counts."""


def read_bandwidth(device: Any) -> float:
    """Bytes a second at which a `CudaDevice` reads its memory, measured now.

    Raises OutOfMemoryError.
    """
    buffer, nbytes = _buffer(device)
    blocks = _BLOCKS * device.multiprocessors
    sums = device.empty((blocks * _THREADS,), "uint32")
    module, event = device.module("layers.cu"), device.xp.cuda.Event
    grid, block = (blocks,), (_THREADS,)
    module.launch("random_rows", grid, block, buffer, 0, nbytes // 4, 1, 2, 1.0)
    best = float("inf")
    for _ in range(_ROUNDS):
        begin, end = event(), event()
        for number in range(_READS + 1):
            module.launch("read_words", grid, block, buffer, nbytes // 16, sums)
            if number == 0:
                begin.record()  # with work ahead: the device does not wait for launches
        end.record()
        end.synchronize()
        best = min(best, device.xp.cuda.get_elapsed_time(begin, end) / 1000)
    return _READS * nbytes / best


def _buffer(device: Any) -> tuple[Any, int]:
    """An array, and its bytes: at most half of what is free."""
    nbytes = _LARGEST
    while nbytes > _LEAST and 2 * nbytes > device.available_bytes():
        nbytes //= 2
    while True:
        try:
            return device.empty((nbytes // 4,), "float32"), nbytes
        except OutOfMemoryError:
            if nbytes <= _LEAST:
                raise
            nbytes //= 2
