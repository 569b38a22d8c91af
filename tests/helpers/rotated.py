"""Keys as a model with RoPE and a bias of its key projection computes them, and exact attention.

In float64, by complex numbers; shares no code with the store. `Model.keys` are what a store is
given; what attention over them should be is computed from them directly, never read from a store.
"""

from dataclasses import dataclass, replace

import numpy as np

from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry, KVStore

from .codecs import rotary_for
from .refs import attention, turned
from .stores import Tokens, new_store


@dataclass(frozen=True)
class Sequence:
    """Tokens of one layer: `raw` keys (n, heads, dim) before bias and RoPE, values, the bias."""

    raw: np.ndarray
    values: np.ndarray
    bias: np.ndarray  # (heads, dim)
    theta: float = 10000.0
    amplitude: float = 1.0

    @property
    def geometry(self) -> Geometry:
        _, heads, dim = self.raw.shape
        return Geometry(1, heads, dim, key_bias=bool(self.bias.any()))

    @property
    def frequencies(self) -> np.ndarray:
        half = self.raw.shape[-1] // 2
        return self.theta ** (-np.arange(half) / half)

    def keys(self, start: int = 0) -> np.ndarray:
        """Keys (n, heads, dim) f64, the first of them at position `start`."""
        positions = start + np.arange(len(self.raw))
        biased = self.raw.astype(np.float64) + self.bias
        return self.amplitude * turned(biased, positions[:, None] * self.frequencies)

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.keys().astype(np.float32)[None], self.values[None])

    def store(
        self, ops: Ops, spec: str, *, told: np.ndarray | None = None, max_tokens: int = 4096
    ) -> KVStore:
        """An empty store for such tokens; `told`: what it hears of the bias, if not the truth."""
        geometry, bias = self.geometry, None
        if told is not None:
            geometry = replace(geometry, key_bias=True)
        if geometry.key_bias:
            told = self.bias if told is None else told
            bias = [ops.to_device(told.astype(np.float32))]
        rotary = rotary_for(geometry, self.theta, self.amplitude)
        return new_store(ops, spec, geometry, max_tokens, rotary=rotary, key_bias=bias)

    def attention(self, q: np.ndarray, window: int | None = None) -> np.ndarray:
        """Exact attention of one query (heads, dim), taken after RoPE, over all tokens; f64."""
        wide = q[None].astype(np.float64)
        return attention(wide, self.keys(), self.values.astype(np.float64), window)[0][0]

    def part(self, start: int, end: int) -> "Sequence":
        """Some of the tokens, which then begin at position 0."""
        raw, values = self.raw[start:end], self.values[start:end]
        return Sequence(raw, values, self.bias, self.theta, self.amplitude)


def random_sequence(
    count: int,
    heads: int = 2,
    dim: int = 64,
    *,
    bias: float = 0.0,
    amplitude: float = 1.0,
    seed: int = 0,
) -> Sequence:
    """Keys and values of unit spread; `bias` is the spread of the bias."""
    rng = np.random.default_rng(seed)
    raw, values = rng.standard_normal((2, count, heads, dim), dtype=np.float32)
    given = (bias * rng.standard_normal((heads, dim))).astype(np.float32)
    return Sequence(raw, values, given, amplitude=amplitude)
