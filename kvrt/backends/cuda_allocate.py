"""The CUDA backend's part that chooses: a budget spent on widths, and tokens cut into blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import KernelError
from ..trizone.allocator import check_allocation
from .checks import check_cut_blocks
from .cuda_cache import CacheKernels
from .ops import PAGE_TOKENS, Array

_MOST_WIDTHS = 5
_PAIRS = _MOST_WIDTHS * (_MOST_WIDTHS - 1) // 2
_BUDGET, _SPENT, _TERMS = _MOST_WIDTHS, _MOST_WIDTHS + 2, _MOST_WIDTHS + 3
"""Places in a group's row of what it is allowed, behind its rates: `Terms` of steps.cuh."""

_THREADS = 256
"""Of a block of the kernels of allocate.cu."""

_DIGIT_BITS = 12
_SLOPE_BITS, _WIDTH_BITS = 31, 2
"""Of a step's key, beside those of its unit."""

_MOST_UNITS = 1 << 27
_CHUNK = 1024
"""Units of a block of `choose_widths`, and the fewest of one of `weigh_steps`."""

_FEW = 2 * _CHUNK
"""Units, at most, for which a block does all: launches take longer than it."""

_CUT_THREADS = 1024


class AllocateKernels(CacheKernels):
    """Kernels that choose. Shapes are those of `Ops`."""

    def allocate(
        self, distortion: Array, rates: np.ndarray, budget: np.ndarray, *, shared: bool = False
    ) -> tuple[Array, Array]:
        check_allocation(distortion, rates, budget, shared)
        widths, groups, n = distortion.shape
        if shared:
            merged = distortion.reshape(widths, 1, groups * n)
            chosen, spent = self.allocate(merged, rates, budget.sum(keepdims=True))
            return chosen.reshape(groups, n), spent
        if widths > _MOST_WIDTHS or n > _MOST_UNITS:
            raise KernelError(
                f"allocate: at most {_MOST_WIDTHS} widths of {_MOST_UNITS} units, got {widths} "
                f"of {n}"
            )
        zeros = self.device.zeros
        if widths == 1 or n == 0 or groups == 0:
            return zeros((groups, n), np.uint8), zeros((groups,), np.int64)
        terms = np.zeros((groups, _TERMS), np.int64)
        terms[:, :widths] = np.broadcast_to(rates.reshape(widths, -1), (widths, groups)).T
        terms[:, _BUDGET] = budget
        return self._allocate(distortion, self.to_device(terms))

    def _allocate(self, distortion: Array, terms: Array) -> tuple[Array, Array]:
        """`allocate` at terms (groups, _TERMS) i64, which end as what is spent."""
        widths, groups, n = distortion.shape
        module, threads = self.device.module("allocate.cu"), (_THREADS,)
        chosen = self.empty((groups, n), np.uint8)
        chunks, low = -(-n // _CHUNK), _WIDTH_BITS + (n - 1).bit_length()
        best = self._scratch("steps", (groups * chunks * _PAIRS,), np.uint64)
        problem, lasting = (distortion, widths, n), (terms, chosen, best)
        shifts = range(0, _SLOPE_BITS + low, _DIGIT_BITS)[::-1]  # from the highest digit
        if n <= _FEW:
            module.launch("allocate_few", (groups,), threads, *problem, low, shifts[0], *lasting)
            return chosen, terms[:, _SPENT]
        weights = self._scratch("weighed", (groups << _DIGIT_BITS,), np.uint64)
        arrivals = self._scratch("weighed", (groups,), np.int32)
        blocks = min(chunks, max(1, 4 * self.device.multiprocessors // groups))
        each = -(-n // blocks)
        for shift in shifts:
            module.launch(
                "weigh_steps", (blocks, groups), threads, *problem, each, low, shift, terms,
                weights, arrivals,
            )  # fmt: skip
        module.launch("choose_widths", (chunks, groups), threads, *problem, low, *lasting)
        module.launch("fill_rest", (groups,), threads, *problem, low, *lasting)
        return chosen, terms[:, _SPENT]

    def cut_blocks(
        self, chosen: Array, ranks: Sequence[int], start: int, tokens: Array, counts: Array
    ) -> None:
        check_cut_blocks(chosen, ranks, tokens, counts)
        heads, n = chosen.shape
        if chosen.size:
            packed = sum(rank << 4 * index for index, rank in enumerate(ranks))
            self.device.module("cut_blocks.cu").launch(
                "cut_blocks", (heads,), (_CUT_THREADS,), chosen, n, packed, start, tokens, counts,
                -(-n // PAGE_TOKENS),
            )  # fmt: skip
