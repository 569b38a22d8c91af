"""Dense pages: f32, f16 or bf16 rows, the baseline format. Codes are (64, head_dim), by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from ...backends import cpu_math, jit
from ...backends.ops import PAGE_TOKENS
from .base import CODES, OWN, Codec

DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Dense(Codec):
    """One side (K or V) of a dense page."""

    name: Literal["f32", "f16", "bf16"]

    number = 0

    @property
    def exact_dtype(self) -> np.dtype:
        """What sinks and tail hold: the page's own type, so that sealing changes nothing."""
        return DTYPES[self.name]

    def check(self, is_value: bool, num_kv_heads: int, head_dim: int) -> None:
        """Any shape will do."""

    def code_bytes(self, head_dim: int) -> int:
        return PAGE_TOKENS * head_dim * self.exact_dtype.itemsize

    def settings(self, is_value: bool, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (cpu_math.KINDS[self.exact_dtype],)


@jit.device
def dense_encode(tile, side, run):
    """Write a tile's rows."""
    size = cpu_math.row_bytes(side[OWN], tile.shape[1])
    for t in range(PAGE_TOKENS):
        cpu_math.store_row(tile[t], side[OWN], run + side[CODES] + t * size)


@jit.device
def dense_decode(run, side, tile):
    """Read a tile's rows."""
    cpu_math.load_rows(run + side[CODES], side[OWN], PAGE_TOKENS, tile.shape[1], tile)
