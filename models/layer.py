"""One layer: its weights, and what a prefill does with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.ops import Linear, Norm, Ops
from ..config import ModelConfig


@dataclass(frozen=True)
class Layer:
    """Weights of one layer. Norm gains and biases are f32, matrices as stored."""

    input_norm: Any  # (hidden_size,) f32
    q: Linear
    k: Linear
    v: Linear
    q_norm: Any | None  # (head_dim,) f32
    k_norm: Any | None  # (head_dim,) f32
    o: Linear
    mlp_norm: Any  # (hidden_size,) f32
    gate: Linear
    up: Linear
    down: Linear
    window: int | None

    def qk_norms(self, eps: float) -> tuple[Norm, Norm] | None:
        if self.q_norm is None:
            return None
        return (self.q_norm, eps), (self.k_norm, eps)


@dataclass(frozen=True)
class Update:
    """One layer of a prefill over the residual stream x (n, hidden_size), in chunks of tokens.

    Rows of x have `past` keys and values before them; `rotation` has the angles of their positions.
    Calling it updates rows first ... end - 1 by attention over keys, values (past + end or more,
    kv_heads, head_dim) and by the MLP. q (chunk, heads, head_dim), inner (chunk,
    intermediate_size): buffers. `firsts` (kv_heads,) i64: where only later rows of keys are tokens
    of a head, the first that is.
    """

    ops: Ops
    config: ModelConfig
    scale: float
    layer: Layer
    x: Any
    past: int
    rotation: tuple[Any, Any]
    q: Any
    inner: Any
    firsts: np.ndarray | None = None

    def __call__(self, first: int, end: int, keys: Any, values: Any) -> None:
        ops, layer, config = self.ops, self.layer, self.config
        for rows in self._chunks(first, end):
            x, count = self.x[rows], rows.stop - rows.start
            q = self.queries(rows, self.q[:count])
            seen = self.past + rows.stop
            self._attend(q, keys[:seen], values[:seen])
            ops.linear_add(q.reshape(count, -1), layer.o, x)
            inner = self.inner[:count]
            ops.swiglu(x, layer.gate, layer.up, inner, norm=(layer.mlp_norm, config.norm_eps))
            ops.linear_add(inner, layer.down, x)

    def _attend(self, q: Any, keys: Any, values: Any) -> None:
        """Causal attention in place of q (n, heads, head_dim), over what is there of each head."""
        attend, firsts = self.ops.attend_causal, self.firsts
        if firsts is None or not firsts.any():
            attend(q, keys, values, self.scale, self.layer.window)
            return
        group = q.shape[1] // keys.shape[1]
        for head, first in enumerate(firsts.tolist()):
            own = slice(head * group, (head + 1) * group)
            asked = q[:, own].copy()
            k, v = (side[first:, head : head + 1].copy() for side in (keys, values))
            attend(asked, k, v, self.scale, self.layer.window)
            q[:, own] = asked

    def queries(self, rows: slice, out: Any = None) -> Any:
        """Those of rows of x, after RoPE: (rows, heads, head_dim) f32."""
        if out is None:
            shape = (rows.stop - rows.start, self.config.num_heads, self.config.head_dim)
            out = self.ops.empty(shape)
        self._linear(rows, (self.layer.q,), (out,))
        self._turn(out, rows, self.layer.q_norm)
        return out

    def project(self, keys: Any, values: Any) -> None:
        """Keys, after RoPE, and values (n, kv_heads, head_dim) f32 of all rows of x."""
        layer = self.layer
        for rows in self._chunks(0, len(self.x)):
            self._linear(rows, (layer.k, layer.v), (keys[rows], values[rows]))
        self._turn(keys, slice(0, len(keys)), layer.k_norm)

    def _linear(self, rows: slice, layers: Sequence[Linear], outs: Sequence[Any]) -> None:
        flat = [out.reshape(len(out), -1) for out in outs]  # (rows, heads * head_dim)
        norm = (self.layer.input_norm, self.config.norm_eps)
        self.ops.linear(self.x[rows], layers, flat, norm=norm)

    def _turn(self, heads: Any, rows: slice, gains: Any | None) -> None:
        """Norm, if there is one, and RoPE of keys or queries of rows, in place."""
        if gains is not None:
            self.ops.rmsnorm(heads, gains, self.config.norm_eps, heads)
        self.ops.rope(heads, *(part[rows] for part in self.rotation))

    def _chunks(self, first: int, end: int) -> list[slice]:
        step = len(self.q)
        return [slice(i, min(i + step, end)) for i in range(first, end, step)]
