"""`Ops`: what a backend offers. Arrays, a view of the cache and plain numbers go in and out.

Activations are float32, row-major, one row a token. A backend knows no model and owns no cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from .view import PAGE_TOKENS as PAGE_TOKENS
from .view import Extent, PageView

Array = Any
"""An array of the backend: NumPy's or CuPy's."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix where the backend wants it: (rows, cols) f32, f16 or bf16."""

    array: Array
    address: int
    kind: int
    rows: int
    cols: int


@dataclass(frozen=True)
class RandomMatrix:
    """A weight matrix that a backend makes itself, the same on each: uniform in -scale .. scale.

    Element i, counted row by row, follows from i and the seed (64 bits) alone.
    """

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    seed: int
    scale: float

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


@dataclass(frozen=True)
class Linear:
    """y = x @ weight.T + bias; bias (rows,) f32 or None."""

    weight: Matrix
    bias: Array | None = None


Norm = tuple[Array, float]
"""Gains (cols,) f32 and epsilon of a norm: x / sqrt(mean(x^2) + epsilon) * gains."""


class Ops(Protocol):
    """One backend on one device. Used by one thread at a time."""

    name: str
    threads: int

    @property
    def device_name(self) -> str:
        """The device in words, for people."""
        ...

    @property
    def hardware(self) -> str:
        """The processor's own name."""
        ...

    @property
    def xp(self) -> ModuleType:
        """The module of its arrays' functions: NumPy or CuPy."""
        ...

    @property
    def build(self) -> str:
        """What tells these kernels from those of other sources, and how they are run."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """An array with undefined contents."""
        ...

    def expect(self, count: int, nbytes: int) -> None:
        """A hint: so many arrays of a size are about to be made, best in one piece of memory."""
        ...

    def to_device(self, array: np.ndarray) -> Array: ...
    def to_host(self, array: Array, copy: bool = False) -> np.ndarray:
        """The contents on the host; without `copy` it may be the array itself."""
        ...

    def address(self, array: Array) -> int:
        """The 64-bit address of an array's first element."""
        ...

    def matrix(self, array: np.ndarray | RandomMatrix) -> Matrix:
        """Make a weight matrix usable, kept in its stored type; a random one is made here."""
        ...

    def trim(self) -> None:
        """Give back memory that only loading, or computing many tokens at once, needs."""
        ...

    def release(self) -> None:
        """Give the device's memory that the allocator holds unused back to others."""
        ...

    def reset_peak(self) -> bool:
        """Begin to measure the peak anew; False where it can only be that of the whole process."""
        ...

    def peak_bytes(self) -> int:
        """The most memory held at once: the process's on a CPU, the allocator's on a GPU."""
        ...

    def read_bandwidth(self) -> float:
        """Bytes a second at which the device reads its memory, measured now."""
        ...

    def embed(self, table: Matrix, token_ids: np.ndarray) -> Array:
        """Rows of the table: (n,) i64 -> (n, cols) f32."""
        ...

    def rmsnorm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """out = x / rms(x) * weight over the last axis; out may be x."""
        ...

    def linear(
        self,
        x: Array,
        layers: Sequence[Linear],
        outs: Sequence[Array],
        *,
        norm: Norm | None = None,
    ) -> None:
        """outs[i] (n, rows_i) = layers[i](x) for up to three layers of one input (n, cols).

        With `norm` of x normed, which itself stays as it is.
        """
        ...

    def linear_add(self, x: Array, layer: Linear, out: Array) -> None:
        """out (n, rows) += layer(x)."""
        ...

    def swiglu(
        self, x: Array, gate: Linear, up: Linear, out: Array, *, norm: Norm | None = None
    ) -> None:
        """out (n, rows) = silu(gate(x)) * up(x) (Shazeer 2020), with `norm` of x normed."""
        ...

    def rope(self, x: Array, cos: Array, sin: Array) -> None:
        """Rotate x (n, heads, head_dim) in place, pairs (i, i + half); cos, sin (n, half)."""
        ...

    def attend_causal(
        self, q: Array, keys: Array, values: Array, scale: float, window: int | None
    ) -> None:
        """Causal attention of the newest tokens, in place of q.

        q (n, heads, head_dim) belongs to the last n of keys, values (m, kv_heads, head_dim).
        """
        ...

    def attention_received(self, q: Array, keys: Array, scale: float, out: Array) -> None:
        """out (kv_heads, m) += the weight that each key receives in causal attention.

        q (n, heads, head_dim) belongs to the last n of keys (m, kv_heads, head_dim). Summed over
        the n queries and the heads of a group, always in the same order; no n x m matrix is held.
        """
        ...

    def attend(
        self, q: Array, view: PageView, scale: float, window: int | None, out: Array
    ) -> None:
        """Attention of one token over everything in the view: q, out (heads, head_dim).

        A view with zones takes no window: what is in them has no order.
        """
        ...

    # A decode step

    def publish(self, extent: Extent) -> None:
        """Make the extent, with its token, known to what the calls of a decode step launch."""
        ...

    def program(self, run: Callable[[], None]) -> Callable[[], None]:
        """The same work on the same arrays again and again, as one call. `run` does it once.

        In it only what follows, `linear`, `linear_add`, `swiglu` and `attend` may be called, and
        nothing is read but arrays and published extents.
        """
        ...

    def embed_token(self, table: Matrix, extent: Extent, out: Array) -> None:
        """out (1, cols) f32 = the row of the table for the token of a published extent."""
        ...

    def enter(self, view: PageView, qkv: Array, norms: tuple[Norm, Norm] | None) -> None:
        """Rotate q, and put k and v of the token of a published extent where that says.

        qkv (heads + 2 * kv_heads, head_dim): q (in place) and k, each head normed if `norms` are
        given, are rotated to the token's position; k and v then go in the cache's basis to the
        sinks or to the tail, and are undefined here. q also goes to the queries that a view keeps.
        """
        ...

    def best(self, logits: Array) -> tuple[int, float]:
        """Index of the first of the largest of (n,) f32, and its value; a NaN is the largest."""
        ...

    # Cache

    def change_basis(
        self,
        rows: Array,
        inwards: bool,
        *,
        turns: Array | None = None,
        bias: Array | None = None,
        bias_turns: Array | None = None,
        hadamard: int = 0,
    ) -> None:
        """Keys or values (n, kv_heads, head_dim) f32 in place, into the cache's basis or out of it.

        Inwards: rotate backwards by `turns`, subtract `bias` (kv_heads, head_dim) rotated by
        `bias_turns`, Hadamard transform in blocks of `hadamard`; outwards: all of it undone. turns,
        bias_turns (n, 2, head_dim / 2) f32 are cos and sin of each token.
        """
        ...

    def append(self, view: PageView, k: Array, v: Array, slot: int, sink: bool = False) -> None:
        """Store k, v (n, kv_heads, head_dim) in the tail from a ring slot on, or in the sinks."""
        ...

    def recall(
        self, view: PageView, is_value: bool, slot: int, out: Array, sink: bool = False
    ) -> None:
        """out (n, kv_heads, head_dim) f32 = slots slot, slot + 1, ... of the tail, or sinks."""
        ...

    def round_rows(self, rows: Array, dtype: np.dtype) -> None:
        """rows (n, ...) f32 in place = what they are once stored as dtype."""
        ...

    def seal(
        self,
        views: Sequence[PageView],
        first_page: int,
        count: int,
        new: tuple[Array, Array] | None,
        new_start: int,
        tail_first: int,
        tail_slot: int,
        measure: bool,
    ) -> None:
        """Encode pages first_page .. first_page + count - 1 of layers, one after the other.

        Tokens before position new_start come from the tail, where position tail_first lies in slot
        tail_slot, later ones from new (K, V; of a single layer). `measure`: the first page fixes
        the codecs' scales.
        """
        ...

    def gather(
        self, view: PageView, is_value: bool, first_page: int, count: int, out: Array
    ) -> None:
        """out (count * 64, kv_heads, head_dim) f32 = one side of pages, in the cache's basis."""
        ...

    # Zones: blocks of kept tokens at widths of their own, see kvrt/trizone/layout.py. Per block,
    # `firsts` (units,) i64 says where its tokens begin in a list of rows of keys and values
    # (kept,) i64, which has them in the block's order; `heads` (units,) i64 is its KV head;
    # `units` (units, 4) i64 its row of the directory: addresses of its run and of its head's
    # channels, and the counts of tokens and of channels by width, 16 bits each.

    def value_errors(self, values: Array, out: Array) -> None:
        """out (4, kv_heads, n) f32 = sum x^2 of each token, and its squared errors at 2, 4, 8 bits.

        values (n, kv_heads, head_dim). Sums go channel by channel in float32.
        """
        ...

    def key_errors(
        self, keys: Array, tokens: Array, firsts: Array, counts: Array, heads: Array, out: Array
    ) -> None:
        """out (kv_heads, head_dim, 4) f64 = as `value_errors`, of each channel over kept tokens.

        keys (n, kv_heads, head_dim); counts (units,) i64 are the tokens of the blocks. Sums go
        token by token in float32 inside a block, then block by block in float64.
        """
        ...

    def allocate(
        self, distortion: Array, rates: np.ndarray, budget: np.ndarray, *, shared: bool = False
    ) -> tuple[Array, Array]:
        """The widths that leave little distortion for the bytes of a budget.

        distortion (widths, groups, n) f32; rates and budget on the host. Gives chosen (groups, n)
        u8 and spent (groups,) i64, or (1,) with `shared`: what `kvrt.trizone.allocator.allocate`
        gives, whose text says how, bit for bit.
        """
        ...

    def cut_blocks(
        self, chosen: Array, ranks: Sequence[int], start: int, tokens: Array, counts: Array
    ) -> None:
        """Cut the tokens of each head that were given a width into blocks.

        chosen (kv_heads, n) u8, contiguous: an index of a width, 0 where a token is not kept;
        ranks[i] is the place of width i in a block, 0 to 3. tokens (kv_heads, n) i64 = the kept
        tokens of each head by block, then rank, then position, counted from `start`; what lies
        behind them is undefined. counts (kv_heads, ceil(n / 64), 4) u8 = tokens of each block by
        rank; zeros behind the last block.
        """
        ...

    def pack_zones(
        self, keys: Array, values: Array, tokens: Array, firsts: Array, heads: Array, units: Array
    ) -> None:
        """Write the runs of blocks, which are zeros; keys, values (n, kv_heads, head_dim)."""
        ...

    def unpack_zones(
        self, units: Array, heads: Array, rows: Array, is_value: bool, out: Array
    ) -> None:
        """out (m, kv_heads, head_dim): rows rows[u], ... of head heads[u] = tokens of block u.

        In the block's order; rows (units,) i64. Channels of K that are not kept are zeros.
        """
        ...
