"""The memory of one GPU through CuPy: arrays, what is free, the peak, errors that are ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import OutOfMemoryError
from .upload import LEAST_BYTES, Uploader


class DeviceMemory:
    """The half of a device that makes arrays."""

    xp: Any  # CuPy
    handle: Any  # cupy.cuda.Device
    _uploader: Uploader | None = None
    _peak = 0  # bytes, before the allocator last gave something back

    @property
    def label(self) -> str:
        """The device in words, for people."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for all that was launched on the device."""
        self.handle.synchronize()

    def use(self) -> None:
        """Make it the calling thread's current device, as CuPy's arrays need it."""
        self.handle.use()

    def memory(self) -> tuple[int, int]:
        """Bytes of the device's memory: (free, total)."""
        free, total = self.handle.mem_info
        return int(free), int(total)

    def available_bytes(self) -> int:
        """Bytes that arrays can still take: what is free, what the allocator holds unused.

        No more than a limit leaves that was set on CuPy's allocator; 1 where there is none.
        """
        with self.handle:
            pool = self.xp.get_default_memory_pool()
            available = self.memory()[0] + int(pool.free_bytes())
            limit = int(pool.get_limit())
            if limit:
                available = min(available, limit - int(pool.used_bytes()))
        return max(available, 1)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array with undefined contents. Raises OutOfMemoryError."""
        return self._allocate(self.xp.empty, shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of zeros. Raises OutOfMemoryError."""
        return self._allocate(self.xp.zeros, shape, dtype)

    def put(self, array: Any) -> Any:
        """A contiguous array of the device with the same numbers. Raises OutOfMemoryError."""
        held = self._allocate(self.xp.asarray, array)
        return self._allocate(self.xp.ascontiguousarray, held)

    def upload(self, array: Any) -> Any:
        """Like `put`, but a large one goes through buffers that are kept until `end_uploads`."""
        if not isinstance(array, np.ndarray) or array.nbytes < LEAST_BYTES:
            return self.put(array)
        held = self.empty(array.shape, array.dtype)
        if self._uploader is None:
            self._uploader = Uploader(self.xp)
        self._uploader.copy(np.ascontiguousarray(array), held)
        return held

    def end_uploads(self) -> None:
        """Give back the buffers that uploads go through; the next large one makes them anew."""
        if self._uploader is not None:
            self._uploader.close()
            self._uploader = None

    def _allocate(self, make: Callable[..., Any], *arguments: Any) -> Any:
        self.use()
        try:
            return make(*arguments)
        except MemoryError:  # CuPy's is one, too
            # A limit on the pool counts what it holds unused, in blocks of other sizes.
            self.release()
        try:
            return make(*arguments)
        except MemoryError as error:
            raise OutOfMemoryError(f"{self.label} has no memory left: {error}") from error

    def release(self) -> None:
        """Give back what the allocator holds unused."""
        self.peak_bytes()
        self.xp.get_default_memory_pool().free_all_blocks()

    def reset_peak(self) -> bool:
        """Begin to measure the peak anew: what the allocator holds unused goes back first."""
        self.synchronize()
        self.xp.get_default_memory_pool().free_all_blocks()
        self._peak = 0
        return True

    def peak_bytes(self) -> int:
        """The most that CuPy's allocator held at once: it gives nothing back unless told to."""
        held = int(self.xp.get_default_memory_pool().total_bytes())
        self._peak = max(self._peak, held)
        return self._peak
