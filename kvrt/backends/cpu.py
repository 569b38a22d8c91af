"""The CPU backend: compiled kernels for decode and the cache, BLAS for prefill."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from ..errors import KernelError, UsageError
from . import cpu_probe, memory
from .checks import (
    check_attend_causal,
    check_attention_received,
    check_linear,
    check_rmsnorm,
    check_rope,
    check_swiglu,
    token_of,
)
from .cpu_cache import FEW_ROWS, Tensor, address_of
from .cpu_math import KINDS
from .cpu_zones import ZoneOps
from .native import Kernels, library_name, processor_name
from .ops import Linear, Matrix, Norm, RandomMatrix
from .view import Extent

_GEMV_ROWS = 4
"""Up to so many tokens, reading weights once per token costs less than widening them."""

_WIDEN_ELEMENTS = 1 << 17
"""Weights are widened for BLAS in blocks of at most so many elements (512 KiB) for each thread."""

_SCORE_ELEMENTS = 1 << 17
"""Prefill attention holds so many scores at once for each thread (512 KiB)."""

_RECEIVED_ELEMENTS = 1 << 26
"""What tokens receive is summed up from at most so many scores at once (256 MiB in all)."""


def available_threads() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(threads: int | None) -> None:
    """Raise UsageError for a number of threads that is of no use here; None is all cores."""
    most = max(64, 8 * available_threads())
    if threads is not None and not 1 <= threads <= most:
        raise UsageError(f"threads must be 1 to {most} on this machine, got {threads}")


class CpuOps(ZoneOps):
    """`Ops` on NumPy arrays. See the protocol for shapes."""

    name = "cpu"
    _blas_turn = threading.Lock()

    def __init__(self, threads: int | None = None):
        """Load the kernels, compiling them at first use.

        Raises UsageError for a thread count below 1, KernelError where compilation fails.
        """
        check_threads(threads)
        self.threads = threads or available_threads()
        self.kernels = Kernels(self.threads)
        self._libraries = ThreadpoolController()
        self._local = threading.local()
        self._norms = self.empty((0,))
        super().__init__()

    @property
    def device_name(self) -> str:
        return f"CPU, {self.threads} thread{'s' if self.threads > 1 else ''}"

    @property
    def hardware(self) -> str:
        return processor_name()

    @property
    def build(self) -> str:
        return f"{library_name()}, {self.kernels.team.kind}"

    # Arrays

    def expect(self, count: int, nbytes: int) -> None:
        """Nothing: the system gives memory page by page."""

    def to_device(self, array: np.ndarray) -> Tensor:
        return np.ascontiguousarray(array).view(Tensor)

    def to_host(self, array: np.ndarray, copy: bool = False) -> np.ndarray:
        return np.array(array) if copy else np.asarray(array)

    def address(self, array: np.ndarray) -> int:
        return address_of(array)

    def matrix(self, array: np.ndarray | RandomMatrix) -> Matrix:
        if isinstance(array, RandomMatrix):
            array = self._random(array)
        if array.ndim != 2 or not array.flags.c_contiguous or array.dtype not in KINDS:
            raise KernelError(
                f"a weight matrix must be (rows, cols), contiguous, f32, f16 or bf16; "
                f"got {array.shape} {array.dtype}"
            )
        kind = KINDS[array.dtype]
        return Matrix(array, array.ctypes.data, kind, *array.shape)

    def _random(self, recipe: RandomMatrix) -> Tensor:
        out = self.empty(recipe.shape, recipe.dtype)
        rows, cols = recipe.shape
        low, high = recipe.seed & 0xFFFFFFFF, recipe.seed >> 32 & 0xFFFFFFFF
        kind = KINDS[recipe.dtype]
        self.kernels.random_rows(
            rows, self._grain(rows), out.address, kind, cols, low, high, recipe.scale
        )
        return out

    # Memory

    def trim(self) -> None:
        """Nothing: what is kept is small."""

    def release(self) -> None:
        """Nothing: the system gets back what is freed."""

    def reset_peak(self) -> bool:
        memory.release_freed()
        return memory.reset_peak()

    def peak_bytes(self) -> int:
        return memory.peak_resident_bytes()

    def read_bandwidth(self) -> float:
        buffer = self.empty((cpu_probe.BYTES // 8,), np.uint64)
        buffer.fill(1)
        sums = self.empty((cpu_probe.RUNS,), np.uint64)
        return cpu_probe.read_bandwidth(self.kernels, buffer.address, sums.address)

    # Decoder

    def embed(self, table: Matrix, token_ids: np.ndarray) -> Tensor:
        ids = np.ascontiguousarray(token_ids, np.int64)  # (n,)
        out = self.empty((len(ids), table.cols))
        self.kernels.embed(
            len(ids), FEW_ROWS, address_of(ids), table.address, table.kind, table.cols, out.address
        )
        return out

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        size = x.shape[-1]
        check_rmsnorm(x, weight, out)
        self.kernels.rmsnorm(
            x.size // size, FEW_ROWS, address_of(x), address_of(weight), size, eps, address_of(out)
        )

    def linear(
        self,
        x: Tensor,
        layers: Sequence[Linear],
        outs: Sequence[Tensor],
        add: bool = False,
        *,
        norm: Norm | None = None,
    ) -> None:
        n, cols = x.shape
        check_linear(x, layers, outs)
        x = self._normed(x, norm)
        if n > _GEMV_ROWS:
            self._matmul(x, layers, outs, add)
            return
        kind = layers[0].weight.kind
        if any(layer.weight.kind != kind for layer in layers):
            for layer, out in zip(layers, outs, strict=True):
                self.linear(x, (layer,), (out,), add)
            return
        arguments: list[int] = []
        rows = 0
        for layer, out in zip(layers, outs, strict=True):
            bias = 0 if layer.bias is None else address_of(layer.bias)
            arguments += (layer.weight.address, layer.weight.rows, bias, address_of(out))
            rows += layer.weight.rows
        arguments += [0] * (12 - len(arguments))
        self.kernels.linear(
            rows, self._grain(rows), address_of(x), n, cols, kind, int(add), *arguments
        )

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """x (n, cols), or a buffer with x normed."""
        if norm is None:
            return x
        if self._norms.shape != x.shape:
            self._norms = self.empty(x.shape)
        self.rmsnorm(x, *norm, self._norms)
        return self._norms

    def linear_add(self, x: Tensor, layer: Linear, out: Tensor) -> None:
        self.linear(x, (layer,), (out,), add=True)

    def swiglu(
        self, x: Tensor, gate: Linear, up: Linear, out: Tensor, *, norm: Norm | None = None
    ) -> None:
        n, rows = x.shape[0], gate.weight.rows
        check_swiglu(x, gate, up, out)
        x = self._normed(x, norm)
        if n > _GEMV_ROWS or gate.weight.kind != up.weight.kind:
            raised = self.empty((n, rows))
            self.linear(x, (gate, up), (out, raised))
            self.kernels.silu_mul(n, FEW_ROWS, address_of(out), raised.address, rows)
            return
        self.kernels.swiglu(
            rows, self._grain(rows), address_of(x), n, x.shape[1], gate.weight.kind, rows,
            gate.weight.address, 0 if gate.bias is None else address_of(gate.bias),
            up.weight.address, 0 if up.bias is None else address_of(up.bias), address_of(out),
        )  # fmt: skip

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        n, heads, dim = x.shape
        check_rope(x, cos, sin)
        self.kernels.rope(n, FEW_ROWS, address_of(x), heads, dim, address_of(cos), address_of(sin))

    def _grain(self, rows: int) -> int:
        """Rows of a chunk: enough chunks to even out the threads, few enough to stay cheap."""
        return max(rows // (8 * self.threads), 8)

    def _matmul(
        self, x: Tensor, layers: Sequence[Linear], outs: Sequence[Tensor], add: bool
    ) -> None:
        """BLAS on blocks of weight rows, each widened by the thread that multiplies it."""

        def multiply(job: tuple[Linear, Tensor, int, int]) -> None:
            layer, out, start, stop = job
            weight, rows = layer.weight, stop - start
            block = self._own_buffer("widened", rows * weight.cols)
            offset = start * weight.cols * weight.array.itemsize
            self.kernels.widen(
                rows, rows, weight.address + offset, weight.kind, weight.cols, block.address
            )
            wide = block[: rows * weight.cols].reshape(rows, weight.cols)
            part = out[:, start:stop]  # (n, rows)
            if add:
                part += x @ wide.T
            else:
                np.matmul(x, wide.T, out=part)
            if layer.bias is not None:
                part += layer.bias[start:stop]

        jobs = []
        for layer, out in zip(layers, outs, strict=True):
            rows, cols = layer.weight.rows, layer.weight.cols
            blocks = max(-(-rows * cols // _WIDEN_ELEMENTS), min(self.threads, rows))
            step = -(-rows // blocks)
            jobs += [(layer, out, i, min(i + step, rows)) for i in range(0, rows, step)]
        self._each(multiply, jobs)

    def _each(self, function: Callable[[Any], None], jobs: Sequence[Any]) -> None:
        """Run BLAS calls on all threads, each call on one.

        BLAS's own idle threads spin, which made prefill 14 times slower where cores were shared.
        """

        def quietly(job: Any) -> None:
            with np.errstate(all="ignore"):  # what a NaN in a weight leads to shows in the logits
                function(job)

        # The limit is the process's: two that overlap would restore each other's.
        with self._blas_turn, self._libraries.limit(limits=1, user_api="blas"):
            self.kernels.team.each(quietly, jobs)

    # Attention

    def attend_causal(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> None:
        n, heads, _ = q.shape
        total, kv_heads, _ = keys.shape
        group = heads // kv_heads
        check_attend_causal(q, keys, values)
        first = total - n
        step = int(min(max(_SCORE_ELEMENTS // total, 16), 256))

        def one_head(head: int) -> None:
            buffer = self._own_buffer("scores", step * total)
            k, v = keys[:, head // group], values[:, head // group]  # (total, dim)
            for start in range(0, n, step):
                count = min(step, n - start)
                seen = first + start + count
                low = 0 if window is None else max(first + start - window + 1, 0)
                scores = buffer[: count * (seen - low)].reshape(count, seen - low)
                queries = q[start : start + count, head]  # (count, dim)
                np.matmul(queries, k[low:seen].T, out=scores)
                self.kernels.softmax_causal(
                    count, count, buffer.address, seen - low, scale, first + start, low, window or 0
                )
                np.matmul(scores, v[low:seen], out=queries)

        self._each(one_head, range(heads))

    def attention_received(self, q: Tensor, keys: Tensor, scale: float, out: Tensor) -> None:
        check_attention_received(q, keys, out)
        n, heads, _ = q.shape
        total, kv_heads, _ = keys.shape
        if not n:
            return
        group, first = heads // kv_heads, total - n
        room = _RECEIVED_ELEMENTS // (min(self.threads, kv_heads) * total)
        step = min(max(_SCORE_ELEMENTS // total, 16), 256, max(room, 1), n)
        ones = np.ones(step, np.float32)  # (step,)

        def one_head(kv_head: int) -> None:
            # One job adds all that a head's tokens receive, so that the sums have one order.
            buffer = self._own_buffer("scores", step * total)
            k, received = keys[:, kv_head], out[kv_head]  # (total, dim), (total,)
            for head in range(kv_head * group, (kv_head + 1) * group):
                for start in range(0, n, step):
                    count = min(step, n - start)
                    seen = first + start + count
                    scores = buffer[: count * seen].reshape(count, seen)
                    np.matmul(q[start : start + count, head], k[:seen].T, out=scores)
                    self.kernels.softmax_causal(
                        count, count, buffer.address, seen, scale, first + start, 0, 0
                    )
                    received[:seen] += ones[:count] @ scores

        self._each(one_head, range(kv_heads))

    def _own_buffer(self, use: str, size: int) -> Tensor:
        """A buffer of at least `size` floats that belongs to the calling thread."""
        buffers: dict[str, Tensor] = self._local.__dict__
        if use not in buffers or buffers[use].size < size:
            buffers[use] = self.empty((size,))
        return buffers[use]

    # A decode step

    def program(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def embed_token(self, table: Matrix, extent: Extent, out: Tensor) -> None:
        ids = np.array([token_of(extent).token_id], np.int64)  # (1,)
        self.kernels.embed(
            1, FEW_ROWS, address_of(ids), table.address, table.kind, table.cols, address_of(out)
        )

    def best(self, logits: Tensor) -> tuple[int, float]:
        index = int(logits.argmax())
        return index, float(logits[index])
