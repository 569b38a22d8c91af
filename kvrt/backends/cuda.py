"""The CUDA backend: our kernels for decode and the cache, cuBLAS for the projections of prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import KernelError, OutOfMemoryError
from .checks import check_linear, check_rmsnorm, check_rope, check_swiglu
from .cpu_math import F32, KINDS
from .cuda_allocate import AllocateKernels
from .cuda_cache import Device
from .cuda_zones import ZoneKernels
from .ops import Array, Linear, Matrix, Norm, RandomMatrix
from .projection_shape import blocks_an_sm, projection_shape
from .view import TOKEN_ID, Extent

_THREADS = 256
"""Of a block."""

_FEW_ROWS, _FEW_PRODUCTS = 128, 2**31
"""So many tokens are multiplied in the time that reading the weights takes, even twice: as 16-bit
floats, and once more what those lost. So are more of them, where it costs some microseconds."""

_KEPT_BYTES = 4 << 20
"""Scratch arrays up to this size stay; what a decode step needs is smaller."""

_DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


class CudaOps(AllocateKernels, ZoneKernels):
    """`Ops` on arrays of a GPU. See the protocol for shapes."""

    name = "cuda"
    threads = 1

    def __init__(self, device: Device):
        self.device = device
        self._buffers: dict[tuple[str, np.dtype[Any]], Array] = {}

    @property
    def device_name(self) -> str:
        return self.device.label

    @property
    def hardware(self) -> str:
        return self.device.name

    @property
    def build(self) -> str:
        return self.device.build

    # Arrays

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        return self.device.empty(shape, dtype)

    def expect(self, count: int, nbytes: int) -> None:
        # The driver gives 2 MiB at least for each request; CuPy cuts what it has, in steps of 512.
        # Freed at once, this is what it has. Without room for all there may be some for each.
        with suppress(OutOfMemoryError):
            self.empty((count * -(-nbytes // 512) * 512,), np.uint8)

    def to_device(self, array: np.ndarray) -> Array:
        return self.device.put(array)

    def to_host(self, array: Array, copy: bool = False) -> np.ndarray:
        return self.device.to_host(array)

    def address(self, array: Array) -> int:
        return self.device.address(array)

    def _scratch(self, use: str, shape: tuple[int, ...], dtype: Any) -> Array:
        size, key = int(np.prod(shape)), (use, np.dtype(dtype))
        held = self._buffers.get(key)
        if held is None or held.size < size:
            most = size
            if held is not None and held.nbytes > _KEPT_BYTES:
                # A prompt's keys and values grow chunk by chunk. What is freed is too small for the
                # next, and the allocator would keep the sum of all.
                most = max(size, held.size + held.size // 4)
                held = None
                del self._buffers[key]
                self.device.release()
            # Zeros: what counts arrivals begins with none.
            held = self._buffers[key] = self.device.zeros((most,), dtype)
        return held[:size].reshape(shape)

    def matrix(self, array: np.ndarray | RandomMatrix) -> Matrix:
        dtype, shape = array.dtype, array.shape
        if len(shape) != 2 or dtype not in KINDS:
            raise KernelError(
                f"a weight matrix must be (rows, cols), f32, f16 or bf16; got {shape} {dtype}"
            )
        rows, cols = shape
        if isinstance(array, RandomMatrix):
            held = self.empty(shape, dtype)
            low, high = array.seed & 0xFFFFFFFF, array.seed >> 32 & 0xFFFFFFFF
            self._strided(
                "random_rows", rows * cols, held, KINDS[dtype], rows * cols, low, high, array.scale
            )
        else:
            held = self.device.upload(array)
        return Matrix(held, self.address(held), KINDS[dtype], rows, cols)

    # Memory

    def trim(self) -> None:
        self.device.end_uploads()
        # What a captured program reads it holds itself.
        for key in [key for key, held in self._buffers.items() if held.nbytes > _KEPT_BYTES]:
            del self._buffers[key]

    def release(self) -> None:
        self.device.release()

    def reset_peak(self) -> bool:
        return self.device.reset_peak()

    def peak_bytes(self) -> int:
        return self.device.peak_bytes()

    def read_bandwidth(self) -> float:
        return self.device.read_bandwidth()

    # Decoder

    def _rows(self, kernel: str, rows: int, *arguments: Any) -> None:
        """Launch a kernel of layers.cu with a block for each row."""
        self.device.module("layers.cu").launch(kernel, (rows,), (_THREADS,), *arguments)

    def _strided(self, kernel: str, items: int, *arguments: Any) -> None:
        """Launch a kernel of layers.cu whose threads take every so-manieth item."""
        blocks = min(-(-items // _THREADS), 8 * self.device.multiprocessors)
        self._rows(kernel, max(blocks, 1), *arguments)

    def embed(self, table: Matrix, token_ids: np.ndarray) -> Array:
        ids = self.to_device(np.ascontiguousarray(token_ids, np.int64))  # (n,)
        out = self.empty((len(ids), table.cols))
        self._rows("embed", len(ids), ids, table.address, table.kind, table.cols, out)
        return out

    def rmsnorm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        size = x.shape[-1]
        check_rmsnorm(x, weight, out)
        self._rows("rmsnorm", x.size // size, x, weight, size, eps, out)

    def rope(self, x: Array, cos: Array, sin: Array) -> None:
        n, heads, dim = x.shape
        check_rope(x, cos, sin)
        self._rows("rope", n, x, heads, dim, cos, sin)

    def linear_add(self, x: Array, layer: Linear, out: Array) -> None:
        self.linear(x, (layer,), (out,), add=True)

    def linear(
        self,
        x: Array,
        layers: Sequence[Linear],
        outs: Sequence[Array],
        add: bool = False,
        *,
        norm: Norm | None = None,
    ) -> None:
        n, cols = x.shape
        check_linear(x, layers, outs)
        kinds = {layer.weight.kind for layer in layers}
        if n > 1:
            x = self._normed(x, norm)
            rows = max(layer.weight.rows for layer in layers)
            narrow = {kind: self._narrowed(x, kind, rows) for kind in kinds}  # (n or 2 * n, cols)
            for layer, out in zip(layers, outs, strict=True):
                self._multiply(narrow[layer.weight.kind], layer, out, add)
        elif len(kinds) > 1:
            for layer, out in zip(layers, outs, strict=True):
                self.linear(x, (layer,), (out,), add, norm=norm)
        else:
            arguments: list[Any] = []
            for layer, out in zip(layers, outs, strict=True):
                bias = 0 if layer.bias is None else layer.bias
                arguments += (layer.weight.address, layer.weight.rows, bias, out)
            arguments += [0] * (12 - len(arguments))
            rows = sum(layer.weight.rows for layer in layers)
            self._project(
                "linear", kinds.pop(), -(-rows // 2), x, cols, *(norm or (0, 0.0)), int(add),
                *arguments,
            )  # fmt: skip

    def _normed(self, x: Array, norm: Norm | None) -> Array:
        """x (n, cols), or scratch with x normed."""
        if norm is None:
            return x
        out = self._scratch("normed", x.shape, np.float32)
        self.rmsnorm(x, *norm, out)
        return out

    def swiglu(
        self, x: Array, gate: Linear, up: Linear, out: Array, *, norm: Norm | None = None
    ) -> None:
        n, rows = x.shape[0], gate.weight.rows
        check_swiglu(x, gate, up, out)
        if n > 1 or gate.weight.kind != up.weight.kind:
            raised = self._scratch("raised", (n, rows), np.float32)
            self.linear(x, (gate, up), (out, raised), norm=norm)
            self._strided("silu_mul", n * rows, out, raised, n * rows)
            return
        biases = [0 if layer.bias is None else layer.bias for layer in (gate, up)]
        self._project(
            "swiglu", gate.weight.kind, rows, x, x.shape[1], *(norm or (0, 0.0)),
            gate.weight.address, biases[0], up.weight.address, biases[1], rows, out,
        )  # fmt: skip

    def _project(self, kernel: str, kind: int, tasks: int, x: Array, cols: int, *rest: Any) -> None:
        """Launch a kernel of gemv.cu over so many pairs of rows."""
        threads, shared = projection_shape(kind, cols, self.device.max_shared)
        blocks = min(tasks, self.device.multiprocessors * blocks_an_sm(threads))
        self.device.module("gemv.cu", {"KIND": kind}).launch(
            kernel, (blocks,), (threads,), x, cols, *rest, shared=shared, overlap=True
        )

    # A decode step

    def program(self, run: Callable[[], None]) -> Callable[[], None]:
        return self.device.program(run, lambda: list(self._buffers.values()))

    def embed_token(self, table: Matrix, extent: Extent, out: Array) -> None:
        token = self.address(self._lengths(extent)) + 8 * TOKEN_ID
        self._rows("embed", 1, token, table.address, table.kind, table.cols, out)

    def best(self, logits: Array) -> tuple[int, float]:
        found = self._scratch("best", (2,), np.int64)  # index, bits of the value
        self.device.module("layers.cu").launch("argmax", (1,), (1024,), logits, len(logits), found)
        index, bits = self.to_host(found)
        return int(index), float(np.int64(bits).astype(np.uint32).view(np.float32))

    # Many tokens

    def narrow(self, rows: Array, out: Array, kind: int) -> None:
        self._strided("narrow", -(-rows.size // 4), rows, rows.size, kind, out)

    def _narrowed(self, x: Array, kind: int, rows: int) -> Array:
        """x (n, cols) f32 as the floats of a weight (rows, cols); few with what they lost below."""
        if kind == F32:
            return x
        if len(x) > _FEW_ROWS and x.size * rows > _FEW_PRODUCTS:
            out = self._scratch("narrowed", x.shape, _DTYPES[kind])
            self.narrow(x, out, kind)
        else:
            out = self._scratch("narrowed", (2 * len(x), x.shape[1]), _DTYPES[kind])
            self._strided("split", x.size, x, x.size, kind, out)
        return out

    def _multiply(self, x: Array, layer: Linear, out: Array, add: bool) -> None:
        """out (n, rows) f32 = (or +=) x, as `_narrowed` gives it, times a weight, by cuBLAS."""
        if len(x) == len(out):
            self.device.matmul(x, layer.weight.array, out, add)
        else:
            parts = self._scratch("parts", (len(x), out.shape[1]), np.float32)
            self.device.matmul(x, layer.weight.array, parts, False)
            self._strided("sum_parts", out.size, parts, out.size, int(add), out)
        if layer.bias is not None:
            self._strided("add_bias", out.size, out, layer.bias, out.size, out.shape[1])
