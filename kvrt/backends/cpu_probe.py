"""CPU kernels of benchmarks: random weights, and reading memory as fast as it goes."""

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from . import cpu_math, jit
from .jit import Address, Int, Real

if TYPE_CHECKING:
    from .native import Kernels

BYTES = 1 << 28
"""Memory read to measure bandwidth: beyond the caches of all but the largest servers."""

RUNS = 1 << 11
"""Pieces of it, 128 KiB each, that threads take in turn."""

_PASSES = 10


@jit.inline
def _mix(x):
    """A bijection of 32-bit numbers that flips half of the bits for any one that changes."""
    # Numba makes 64 bits of every sum and product.
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@jit.inline
def _uniform(index, low, high):
    """A float32 of -1 .. 1, one of 2^24, that follows from an index and two keys alone."""
    x = _mix(np.uint32(_mix(np.uint32(index) ^ np.uint32(low)) + np.uint32(high)))
    return np.float32(x >> np.uint32(8)) * np.float32(1.0 / (1 << 23)) - np.float32(1.0)


@jit.kernel
def random_rows(
    thread, begin, end,
    out_at: Address, kind: Int, cols: Int, low: Int, high: Int, scale: Real,
):  # fmt: skip
    """Stored floats, uniform in -scale .. scale; one item is one row of `cols`."""
    factor = np.float32(scale)
    for row in range(begin, end):
        first = row * cols
        if kind == cpu_math.F32:
            wide = jit.array(out_at + first * 4, (cols,), np.float32)
            for i in range(cols):
                wide[i] = _uniform(first + i, low, high) * factor
        else:
            bits = jit.array(out_at + first * 2, (cols,), np.uint16)
            if kind == cpu_math.F16:
                for i in range(cols):
                    bits[i] = jit.float_to_half(_uniform(first + i, low, high) * factor)
            else:
                for i in range(cols):
                    bits[i] = cpu_math.float_to_bfloat(_uniform(first + i, low, high) * factor)


@jit.kernel
def read_words(thread, begin, end, at: Address, words: Int, sums_at: Address):
    """Add up integers; one item is a run of `words` u64, its sum goes to sums (items,) u64."""
    sums = jit.array(sums_at, (end,), np.uint64)
    for item in range(begin, end):
        run = jit.array(at + item * words * 8, (words,), np.uint64)
        total = np.uint64(0)
        for i in range(words):
            total += run[i]
        sums[item] = total


def read_bandwidth(kernels: "Kernels", buffer: int, sums: int) -> float:
    """Bytes a second of the best of some passes over a buffer (BYTES,) u8; sums is (RUNS,) u64.

    Both are addresses.
    """
    best = float("inf")
    for _ in range(_PASSES):
        started = perf_counter()
        kernels.read_words(RUNS, 8, buffer, BYTES // RUNS // 8, sums)
        best = min(best, perf_counter() - started)
    return BYTES / best
