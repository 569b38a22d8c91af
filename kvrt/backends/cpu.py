"""The CPU backend: compiled kernels for decode and the cache, BLAS for prefill."""

import os
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from ..errors import KernelError, UsageError
from . import cpu_attn, cpu_probe, cpu_store, memory
from .cpu_math import KINDS
from .native import Kernels, library_name, processor_name
from .ops import PAGE_TOKENS, Linear, Matrix, RandomMatrix
from .view import PageView

_GEMV_ROWS = 4
"""Up to so many tokens, reading weights once per token costs less than widening them."""

_WIDEN_ELEMENTS = 1 << 17
"""Weights are widened for BLAS in blocks of at most so many elements (512 KiB) for each thread."""

_SCORE_ELEMENTS = 1 << 17
"""Prefill attention holds so many scores at once for each thread (512 KiB)."""

_FEW_ROWS = 8
"""Row-wise kernels on fewer rows run on the calling thread."""


class Tensor(np.ndarray):
    """A NumPy array that remembers its address."""

    @cached_property
    def address(self) -> int:
        return self.ctypes.data


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


def _at(array: np.ndarray) -> int:
    return array.address if isinstance(array, Tensor) else array.ctypes.data


class CpuOps:
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
        self._scratch = self.empty((0,))
        self._partials = self.empty((0,))
        self._arrivals = self.empty((0,), np.int64)

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

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Tensor:
        return np.empty(shape, dtype).view(Tensor)

    def to_device(self, array: np.ndarray) -> Tensor:
        return np.ascontiguousarray(array).view(Tensor)

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array)

    def address(self, array: np.ndarray) -> int:
        return _at(array)

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
            len(ids), _FEW_ROWS, _at(ids), table.address, table.kind, table.cols, out.address
        )
        return out

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        size = x.shape[-1]
        if weight.shape != (size,) or out.shape != x.shape:
            raise KernelError(f"rmsnorm: x {x.shape}, weight {weight.shape}, out {out.shape}")
        self.kernels.rmsnorm(x.size // size, _FEW_ROWS, _at(x), _at(weight), size, eps, _at(out))

    def linear(
        self, x: Tensor, layers: Sequence[Linear], outs: Sequence[Tensor], add: bool = False
    ) -> None:
        n, cols = x.shape
        for layer, out in zip(layers, outs, strict=True):
            if layer.weight.cols != cols or out.shape != (n, layer.weight.rows):
                raise KernelError(
                    f"linear: x {x.shape}, weight ({layer.weight.rows}, {layer.weight.cols}), "
                    f"out {out.shape}"
                )
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
            bias = 0 if layer.bias is None else _at(layer.bias)
            arguments += (layer.weight.address, layer.weight.rows, bias, _at(out))
            rows += layer.weight.rows
        arguments += [0] * (12 - len(arguments))
        self.kernels.linear(rows, self._grain(rows), _at(x), n, cols, kind, int(add), *arguments)

    def linear_add(self, x: Tensor, layer: Linear, out: Tensor) -> None:
        self.linear(x, (layer,), (out,), add=True)

    def swiglu(self, x: Tensor, gate: Linear, up: Linear, out: Tensor) -> None:
        n, rows = x.shape[0], gate.weight.rows
        shapes = {(layer.weight.rows, layer.weight.cols) for layer in (gate, up)}
        if shapes != {(rows, x.shape[1])} or out.shape != (n, rows):
            raise KernelError(f"swiglu: x {x.shape}, weights {sorted(shapes)}, out {out.shape}")
        if n > _GEMV_ROWS or gate.weight.kind != up.weight.kind:
            raised = self.empty((n, rows))
            self.linear(x, (gate, up), (out, raised))
            self.kernels.silu_mul(n, _FEW_ROWS, _at(out), raised.address, rows)
            return
        self.kernels.swiglu(
            rows, self._grain(rows), _at(x), n, x.shape[1], gate.weight.kind, rows,
            gate.weight.address, 0 if gate.bias is None else _at(gate.bias),
            up.weight.address, 0 if up.bias is None else _at(up.bias), _at(out),
        )  # fmt: skip

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        n, heads, dim = x.shape
        if cos.shape != (n, dim // 2) or sin.shape != cos.shape:
            raise KernelError(f"rope: x {x.shape}, cos {cos.shape}, sin {sin.shape}")
        self.kernels.rope(n, _FEW_ROWS, _at(x), heads, dim, _at(cos), _at(sin))

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
        n, heads, dim = q.shape
        total, kv_heads, _ = keys.shape
        group = heads // kv_heads
        shape = (total, kv_heads, dim)
        if n > total or group * kv_heads != heads or not keys.shape == values.shape == shape:
            raise KernelError(
                f"attend_causal: q {q.shape}, keys {keys.shape}, values {values.shape}"
            )
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

    def _own_buffer(self, use: str, size: int) -> Tensor:
        """A buffer of at least `size` floats that belongs to the calling thread."""
        buffers: dict[str, Tensor] = self._local.__dict__
        if use not in buffers or buffers[use].size < size:
            buffers[use] = self.empty((size,))
        return buffers[use]

    def attend(
        self, q: Tensor, view: PageView, scale: float, window: int | None, out: Tensor
    ) -> None:
        heads, dim = q.shape
        kv_heads, extent = view.num_kv_heads, view.extent
        group = heads // kv_heads
        if dim != view.head_dim or group * kv_heads != heads or out.shape != q.shape:
            raise KernelError(
                f"attend: q {q.shape}, out {out.shape}, cache ({kv_heads} heads, {view.head_dim})"
            )
        blocks = extent.pages + -(-(extent.sinks + extent.tail_tokens) // PAGE_TOKENS)
        splits = 1 if self.threads == 1 else max(1, min(blocks, 8 * self.threads // kv_heads))
        items = kv_heads * splits
        states = items * group * (dim + 2)
        if self._partials.size < states:
            self._partials = self.empty((states,))
        if len(self._arrivals) < kv_heads:
            self._arrivals = np.zeros(kv_heads, np.int64).view(Tensor)  # (kv_heads,)
        partials = self._partials.address
        sums = partials + items * group * dim * 4
        tokens = extent.sinks + extent.pages * PAGE_TOKENS + extent.tail_tokens
        first = 0 if window is None else max(tokens - window, 0)
        self.kernels.attend(
            items, 1, _at(q), group, scale, splits,
            self._thread_scratch(cpu_attn.attend_bytes(dim, group)), partials, sums,
            self._arrivals.address, _at(out), view.address,
            extent.sinks, extent.table_address, extent.pages, extent.tail_tokens,
            extent.tail_slot, extent.bases_address, first,
        )  # fmt: skip

    def _thread_scratch(self, nbytes: int) -> int:
        """The address of so many bytes for each thread; valid until the next call."""
        floats = -(-nbytes // 4) * self.threads
        if self._scratch.size < floats:
            self._scratch = self.empty((floats,))
        return self._scratch.address

    # Cache

    def change_basis(
        self,
        rows: Tensor,
        inwards: bool,
        *,
        turns: Tensor | None = None,
        bias: Tensor | None = None,
        bias_turns: Tensor | None = None,
        hadamard: int = 0,
    ) -> None:
        n, heads, dim = rows.shape
        addresses = [0 if part is None else _at(part) for part in (turns, bias, bias_turns)]
        self.kernels.change_basis(
            n, _FEW_ROWS, _at(rows), heads, dim, int(inwards), *addresses, hadamard
        )

    def append(self, view: PageView, k: Tensor, v: Tensor, slot: int, sink: bool = False) -> None:
        self.kernels.append(len(k), _FEW_ROWS, view.address, _at(k), _at(v), slot, int(sink))

    def recall(
        self, view: PageView, is_value: bool, slot: int, out: Tensor, sink: bool = False
    ) -> None:
        self.kernels.recall(
            len(out), _FEW_ROWS, view.address, int(is_value), slot, int(sink), _at(out)
        )

    def round_rows(self, rows: Tensor, dtype: np.dtype) -> None:
        width = rows[0].size
        self.kernels.round_rows(len(rows), _FEW_ROWS, _at(rows), width, KINDS[dtype])

    def seal(
        self,
        view: PageView,
        first_page: int,
        count: int,
        new: tuple[Tensor, Tensor] | None,
        new_start: int,
        tail_first: int,
        tail_slot: int,
        measure: bool,
    ) -> None:
        heads, dim, table = view.num_kv_heads, view.head_dim, view.extent.table_address
        for is_value, survey in enumerate(view.surveys):
            fresh, tokens = (0, 0) if new is None else (_at(new[is_value]), len(new[is_value]))
            source = (tail_first, tail_slot, fresh, new_start, tokens)
            surveyed = {"never": 0, "first": int(measure), "every": count}[survey]
            if surveyed:
                scratch = self._thread_scratch(heads * PAGE_TOKENS * dim * 4)
                self.kernels.survey(
                    surveyed, 1, view.address, is_value, table, first_page, int(measure), *source,
                    scratch,
                )  # fmt: skip
            tile_bytes = PAGE_TOKENS * dim * 4
            scratch = self._thread_scratch(tile_bytes + cpu_store.codes_bytes(dim))
            self.kernels.seal(
                count * heads, 1, view.address, is_value, table, first_page, *source,
                scratch, scratch + self.threads * tile_bytes,
            )  # fmt: skip

    def gather(
        self, view: PageView, is_value: bool, first_page: int, count: int, out: Tensor
    ) -> None:
        self.kernels.gather(
            count * view.num_kv_heads, 1, view.address, int(is_value), view.extent.table_address,
            first_page, self._thread_scratch(cpu_store.decode_bytes(view.head_dim)), _at(out),
        )  # fmt: skip
