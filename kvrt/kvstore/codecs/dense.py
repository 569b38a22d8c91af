"""Dense pages: f32, f16 or bf16 rows, the baseline format.

A head's run is its K rows, then its V rows: (64, head_dim) each, token by token.
"""

import sys
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ...backends import cpu_attn, cpu_math, cpu_store, jit

DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Dense:
    """One side (K or V) of a dense page."""

    name: str

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.name]

    kernels = "dense"

    @property
    def exact_dtype(self) -> np.dtype:
        """What sinks and tail hold: the page's own type, so that sealing changes nothing."""
        return self.dtype

    def code_bytes(self, page_tokens: int, head_dim: int) -> int:
        """Bytes of one head's codes in a page."""
        return page_tokens * head_dim * self.dtype.itemsize

    def meta_bytes(self, page_tokens: int, head_dim: int) -> int:
        """Bytes of one head's scales, minima and tables in a page: none."""
        return 0

    def settings(self) -> tuple[int, ...]:
        """What the kernels need to know beside the offsets: the kind of float."""
        return ({"f32": cpu_math.F32, "f16": cpu_math.F16, "bf16": cpu_math.BF16}[self.name],)


@jit.device
def load_keys(run, settings, tile):
    cpu_math.load_rows(run + settings[0], settings[4], tile.shape[0], tile.shape[1], tile)


@jit.device
def load_values(run, settings, tile):
    cpu_math.load_rows(run + settings[2], settings[8], tile.shape[0], tile.shape[1], tile)


@jit.device
def save_keys(tile, settings, run):
    size = cpu_store.row_bytes(settings[4], tile.shape[1])
    for t in range(tile.shape[0]):
        cpu_math.store_row(tile[t], settings[4], run + settings[0] + t * size)


@jit.device
def save_values(tile, settings, run):
    size = cpu_store.row_bytes(settings[8], tile.shape[1])
    for t in range(tile.shape[0]):
        cpu_math.store_row(tile[t], settings[8], run + settings[2] + t * size)


cpu_attn.build_attend("dense", sys.modules[__name__])
cpu_store.build_seal("dense", sys.modules[__name__])
