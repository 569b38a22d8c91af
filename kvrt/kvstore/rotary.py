"""The rotation of keys (RoPE, arXiv 2104.09864) as a cache needs to know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Rotary:
    """Pairs (i, i + head_dim / 2) turn by position * frequencies[i], times `amplitude` (yarn).

    frequencies: (head_dim / 2,) f64, radians for each position.
    """

    frequencies: np.ndarray
    amplitude: float = 1.0

    def table(self, positions: np.ndarray, amplitude: float | Sequence[float] = 1.0) -> np.ndarray:
        """cos and sin, times amplitude (or amplitudes), of positions (n,).

        (n, 2, head_dim / 2) f32.
        """
        angles = np.asarray(positions, np.float64)[:, None] * self.frequencies  # (n, half) f64
        parts = np.stack([np.cos(angles), np.sin(angles)], axis=1)  # (n, 2, half) f64
        factors = np.asarray(amplitude, np.float64)[..., None, None]  # (n or 1, 1, 1) f64
        return (parts * factors).astype(np.float32)

    def quick_pairs(self, tokens: int) -> int:
        """The number of pairs up to the last that turns much within `tokens` neighbours.

        Over those, the cosines and sines of the others are straight lines, but for 2^-10.
        """
        angles = np.abs(self.frequencies) * tokens / 2  # from the middle to an end
        quick = np.flatnonzero(angles**2 / 4 > 2.0**-10)
        return int(quick[-1]) + 1 if len(quick) else 0

    def rotate(self, x: np.ndarray, positions: np.ndarray, inverse: bool = False) -> np.ndarray:
        """x (n, heads, head_dim) rotated to its positions (n,), or back; a new f32 array."""
        amplitude = 1.0 / self.amplitude if inverse else self.amplitude
        table = self.table(positions, amplitude)[:, :, None]  # (n, 2, 1, half) f32
        cos, sin = table[:, 0], -table[:, 1] if inverse else table[:, 1]
        low, high = np.split(x, 2, axis=-1)  # (n, heads, half)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
