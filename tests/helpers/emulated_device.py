"""The CUDA backend on the emulator: arrays are NumPy's, kernels run thread by thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvrt.backends.cuda import CudaOps
from tests.emulator import EmulatedModule


class EmulatedDevice:
    """What `CudaOps` launches on where there is no GPU."""

    xp = np
    name = "emulator"
    label = "emulated GPU"
    build = "emulator"
    multiprocessors = 4
    max_shared = 227 * 1024

    def __init__(self, bulk: bool = False) -> None:
        """`bulk`: large runs come by the copy engine, as from sm_90 on."""
        self._modules: dict[Any, EmulatedModule] = {}
        self._options = {"KVRT_BULK_COPIES": int(bulk)}

    def module(self, name: str, defines: Mapping[str, Any] | None = None) -> EmulatedModule:
        key = (name, *sorted((defines or {}).items()))
        if key not in self._modules:
            self._modules[key] = EmulatedModule(name, {**(defines or {}), **self._options})
        return self._modules[key]

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def put(self, array: np.ndarray) -> np.ndarray:
        return self.upload(array)

    def upload(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array)

    def end_uploads(self) -> None: ...

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def send(self, staged: np.ndarray, array: np.ndarray) -> None:
        array[...] = staged

    def program(self, run: Any, keep: Any) -> Any:
        return run

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def release(self) -> None: ...

    def reset_peak(self) -> bool:
        return True

    def peak_bytes(self) -> int:
        return 0

    def read_bandwidth(self) -> float:
        return 1e9

    def matmul(self, x: np.ndarray, weight: np.ndarray, out: np.ndarray, add: bool) -> None:
        product = x.astype(np.float32) @ weight.astype(np.float32).T  # (n, rows)
        out[...] = out + product if add else product


def emulated_ops(bulk: bool = False) -> CudaOps:
    return CudaOps(EmulatedDevice(bulk))
