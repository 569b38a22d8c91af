"""Which cache formats a GPU's attention reads; a CPU's reads all."""

from __future__ import annotations

from ..errors import UnsupportedError
from .cpu_math import BF16, F32

DENSE, INTQ, BLOCK, FP8, NUQ, VQ = range(6)
"""Codecs by their numbers (`kvstore.codecs`)."""


def check_readable(head_dim: int, codecs: tuple[int, int], kinds: tuple[int, int]) -> None:
    """Raise UnsupportedError for what no kernel reads.

    Of keys and values: the codec's number, and the kind of float of tokens that are not packed.
    """
    if F32 in kinds:
        raise UnsupportedError("f32 caches are for the CPU; on a GPU f16 and bf16 work")
    if (kinds[0] == BF16) != (kinds[1] == BF16):
        raise UnsupportedError("on a GPU, keys and values are both bf16 or neither is")
    if (codecs[0] == VQ) != (codecs[1] == VQ):
        raise UnsupportedError("on a GPU, keys and values are both vector-quantised or neither is")
    if (codecs[0] == DENSE) != (codecs[1] == DENSE):
        raise UnsupportedError("on a GPU, keys and values are both packed or neither is")
    if head_dim % 16 or not 16 <= head_dim <= 256:
        raise UnsupportedError(
            f"on a GPU, head_dim must be a multiple of 16 up to 256, this cache has {head_dim}"
        )
