"""How the kernels of gemv.cu are launched."""

from __future__ import annotations

from .cpu_math import F32

_THREADS = 512
"""Of a block at most, and of a multiprocessor."""

_RING = 128
"""Bytes of shared memory that a thread's weights under way take."""

_FIXED = 4608
"""Bytes of shared memory that a block has besides, at most."""


def projection_shape(kind: int, cols: int, max_shared: int) -> tuple[int, int]:
    """Threads of a block, and bytes of its dynamic shared memory, for rows of so many columns.

    A thread takes 16 bytes of each piece of a row; it keeps its columns of x in shared memory, of
    which a block may have `max_shared` bytes.
    """
    items = 4 if kind == F32 else 8
    lanes = -(-cols // items)
    for most in range(_THREADS, 0, -32):
        pieces = -(-lanes // most)
        threads = -(-lanes // (pieces * 32)) * 32
        shared = threads * (_RING + pieces * items * 4)
        if shared + _FIXED <= max_shared:
            break
    return threads, shared


def blocks_an_sm(threads: int) -> int:
    """Blocks of a multiprocessor: large ones have it to themselves."""
    return max(_THREADS // threads, 1)
