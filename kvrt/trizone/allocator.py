"""Spending a budget on widths: a multiple-choice knapsack, solved by slopes.

Each unit (a V token, a K channel) takes one of a few widths; each costs bytes and leaves a
distortion. Cutting the steps of all lower convex hulls at one slope is optimal at what the cut
spends (Shoham and Gersho 1988); what is left is then filled greedily.

Only what NumPy and CuPy both have, a few dozen calls whatever the number of units, and comparisons
of f32 numbers that are rounded alike on both: the same distortions give the same widths. A GPU has
kernels that find the same without sorting (`Ops.allocate`, cuda_src/allocate.cu).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import CodecError

Array = Any
"""An array of the backend: NumPy's or CuPy's."""

STEPS_AT_ONCE = 1 << 23
"""So many steps are sorted at once, if they belong to several groups: it bounds the memory."""

_LARGEST = np.float32(3e38)
"""Stands for all larger distortions, so that each difference of two is finite."""

_SLOPE_BITS = 31
_INFINITY = 0x7F800000  # the bits of an f32; those of positive numbers grow with the numbers


class Allocation(NamedTuple):
    """What `allocate` decided: arrays of the backend."""

    chosen: Array  # (groups, n) u8, the index of each unit's width
    spent: Array  # (groups,) i64 bytes, or (1,) with `shared`; never more than the budget


def allocate(
    xp: Any, distortion: Array, rates: np.ndarray, budget: np.ndarray, *, shared: bool = False
) -> Allocation:
    """The widths that leave little distortion for the bytes of a budget.

    distortion (widths, groups, n) f32, of `xp`, at least 0, widths ascending; rates (widths,) or
    (widths, groups) i64 bytes, ascending from 0; budget (groups,) i64 bytes, of which less than 0
    buys nothing. `shared` gives the sum of all budgets to all units together, at rates (widths,).

    Steps of the hulls are taken by falling slope (distortion that goes / bytes that come), of equal
    slopes the first unit's, up to the first that the budget does not hold. Then, one by one, the
    step of largest slope, on a hull or not, that the rest holds: what is left in the end is less
    than any step that would gain something. A width that costs no more than a lower one is not
    taken (channels of a head without tokens), nor is any by a unit whose distortions hold a NaN.

    Raises CodecError where shapes do not fit, rates do not ascend from 0, or more than 2^27 units
    (at five widths) share a budget.
    """
    check_allocation(distortion, rates, budget, shared)
    widths, groups, n = distortion.shape
    if shared:
        merged = distortion.reshape(widths, 1, groups * n)
        chosen, spent = allocate(xp, merged, rates, budget.sum(keepdims=True))
        return Allocation(chosen.reshape(groups, n), spent)
    if widths == 1 or n == 0 or groups == 0:
        return Allocation(xp.zeros((groups, n), xp.uint8), xp.zeros(groups, xp.int64))
    by_group = np.broadcast_to(rates.reshape(widths, -1), (widths, groups))
    at_once = max(1, STEPS_AT_ONCE // (n * (widths - 1)))
    parts = [
        _allocate(xp, distortion[:, part], by_group[:, part], budget[part])
        for part in (slice(start, start + at_once) for start in range(0, groups, at_once))
    ]
    return parts[0] if len(parts) == 1 else Allocation(*(xp.concatenate(p) for p in zip(*parts)))


def check_allocation(
    distortion: Array, rates: np.ndarray, budget: np.ndarray, shared: bool
) -> None:
    """Raise CodecError for what `allocate` does not take."""
    widths, groups = distortion.shape[:2]
    shapes = [(widths,)] if shared else [(widths,), (widths, groups)]
    if rates.shape not in shapes or budget.shape != (groups,):
        raise CodecError(
            f"allocate: rates {rates.shape} and budget {budget.shape} do not fit distortions "
            f"{tuple(distortion.shape)}; expected {' or '.join(map(str, shapes))} and ({groups},)"
        )
    if np.any(rates[0] != 0) or np.any(np.diff(rates, axis=0) < 0):
        raise CodecError(f"allocate: rates {rates.tolist()} do not ascend from 0")
    units = distortion.shape[2] * (groups if shared else 1)
    most = 1 << (63 - _SLOPE_BITS - _class_bits(widths))
    if units > most:
        raise CodecError(
            f"allocate: got {units} units that share a budget, expected at most {most}"
        )


class _Steps(NamedTuple):
    """The steps from a width to a higher one, and what each costs in each group."""

    pairs: list[tuple[int, int]]
    rises: Array  # (pairs, groups) i64 bytes
    costs: Array  # (groups, widths * widths) i64: the same at from * widths + to; 0: no step


def _steps(xp: Any, rates: np.ndarray) -> _Steps:
    """The steps at rates (widths, groups)."""
    widths, groups = rates.shape
    pairs = [(i, j) for i in range(widths) for j in range(i + 1, widths)]
    costs = np.zeros((groups, widths * widths), np.int64)
    for i, j in pairs:
        costs[:, i * widths + j] = rates[j] - rates[i]
    rises = np.stack([costs[:, i * widths + j] for i, j in pairs])
    return _Steps(pairs, xp.asarray(rises), xp.asarray(costs))


def _allocate(xp: Any, distortion: Array, rates: np.ndarray, budget: np.ndarray) -> Allocation:
    """`allocate` for rates (widths, groups), all groups at once."""
    steps = _steps(xp, rates)
    budget = xp.asarray(budget)
    broken = xp.isnan(distortion).any(axis=0)  # (groups, n)
    distortion = xp.where(broken, xp.float32(0), xp.clip(distortion, xp.float32(0), _LARGEST))
    # Where a step costs nothing its slope is 0, as that of a step which gains nothing.
    prices = xp.where(steps.rises > 0, steps.rises.astype(xp.float32), xp.float32(np.inf))
    slopes = xp.empty((len(steps.pairs), *distortion.shape[1:]), xp.float32)
    for number, (i, j) in enumerate(steps.pairs):
        xp.subtract(distortion[i], distortion[j], out=slopes[number])
    slopes /= prices[:, :, None]
    chosen, spent = _cut(xp, slopes, steps, budget, len(rates))
    for number, (i, _) in enumerate(steps.pairs):
        here = chosen == i  # only steps from where a unit is now
        xp.multiply(slopes[number], here, out=slopes[number])
    return _fill(xp, distortion, slopes, steps, chosen, budget, spent)


def _cut(xp: Any, slopes: Array, steps: _Steps, budget: Array, widths: int) -> tuple[Array, Array]:
    """chosen (groups, n) u8 and spent (groups,) where the steps of the hulls end."""
    keys = _hull_keys(xp, slopes, steps.pairs, widths)  # (widths - 1, groups, n) i64
    groups, mask = keys.shape[1], (1 << _class_bits(widths)) - 1
    # The group comes first in a key: one sort of plain integers, none of them twice, does for all.
    ordered = xp.sort(keys.reshape(-1)).reshape(groups, -1)
    rises = xp.take_along_axis(steps.costs, ordered & mask, axis=1)
    sums = xp.cumsum(rises.reshape(-1)).reshape(groups, -1)  # in 1-D, the fast form on a GPU
    sums -= sums[:, :1] - rises[:, :1]
    count = ((sums <= budget[:, None]) & (rises > 0)).sum(axis=1, keepdims=True)  # (groups, 1)
    place = xp.maximum(count - 1, 0)
    last = xp.where(count > 0, xp.take_along_axis(ordered, place, axis=1), -1)
    spent = xp.where(count > 0, xp.take_along_axis(sums, place, axis=1), 0)[:, 0]
    chosen = xp.zeros(keys.shape[1:], xp.uint8)
    for i in range(widths - 1):
        to = ((keys[i] & mask) - i * widths).astype(xp.uint8)
        chosen = xp.where(keys[i] <= last, to, chosen)
    return chosen, spent


def _hull_keys(xp: Any, slopes: Array, pairs: list[tuple[int, int]], widths: int) -> Array:
    """A key for the step of each unit's hull that leaves a width: (widths - 1, groups, n) i64.

    From the highest bits: group, largest f32 - slope, unit, from * widths + to. `to` is 0, and the
    slope 0, where the hull has no step: these are the last of a group.
    """
    groups, n = slopes.shape[1:]
    below = _class_bits(widths) + (n - 1).bit_length()
    units = xp.arange(n, dtype=xp.int64) << _class_bits(widths)  # (n,)
    starts = xp.arange(groups, dtype=xp.int64)[:, None] << (below + _SLOPE_BITS)
    keys = xp.empty((widths - 1, groups, n), xp.int64)
    reached = [xp.zeros((groups, n), bool) for _ in range(widths)]
    reached[0][:] = True
    bound = xp.full((groups, n), _LARGEST, xp.float32)
    for i in range(widths - 1):
        best = xp.zeros((groups, n), xp.float32)
        to = xp.zeros((groups, n), xp.uint8)
        for number, (start, j) in enumerate(pairs):
            if start == i:  # of equal slopes the nearest width: smaller steps fill better
                to = xp.where(slopes[number] > best, xp.uint8(j), to)
                best = xp.maximum(best, slopes[number])
        to = xp.where(reached[i], to, xp.uint8(0))
        # Rounding could let slopes rise along a hull, and a step come before the one it follows.
        best = xp.where(to > 0, xp.minimum(best, bound), xp.float32(0))
        bound = xp.where(to > 0, best, bound)
        for j in range(i + 1, widths):
            reached[j] |= to == j
        key = (_INFINITY - best.view(xp.int32)).astype(xp.int64)
        key <<= below
        key += to
        key += units + i * widths
        xp.add(key, starts, out=keys[i])
    return keys


def _class_bits(widths: int) -> int:
    return (widths * widths - 1).bit_length()


def _fill(
    xp: Any,
    distortion: Array,
    slopes: Array,
    steps: _Steps,
    chosen: Array,
    budget: Array,
    spent: Array,
) -> Allocation:
    """Take the best step that the rest of the budget holds, in each group, while there is one.

    `slopes` (pairs, groups, n) are 0 but for the steps that leave where a unit is.
    """
    pairs, groups, n = slopes.shape
    first = xp.asarray([i for i, _ in steps.pairs])
    second = xp.asarray([j for _, j in steps.pairs])
    number, group = xp.arange(pairs)[:, None], xp.arange(groups)
    prices = steps.rises.astype(xp.float32)
    while True:
        unit = slopes.argmax(axis=2)  # (pairs, groups), the first of equals
        top = xp.take_along_axis(slopes, unit[:, :, None], axis=2)[:, :, 0]
        top = xp.where(steps.rises <= budget - spent, top, xp.float32(0))
        best = top.max(axis=0)  # (groups,)
        moves = best > 0
        if not bool(moves.any()):
            return Allocation(chosen, spent)
        code = xp.where(top == best, unit * pairs + number, n * pairs).min(axis=0)
        step, unit = code % pairs, code // pairs  # (groups,)
        spent = spent + xp.where(moves, steps.rises[step, group], 0)
        now = xp.where(moves, second[step], chosen[group, unit])  # (groups,) widths
        chosen[group, unit] = now.astype(xp.uint8)
        left = distortion[now, group, unit] - distortion[second[:, None], group, unit]
        gains = xp.where(first[:, None] == now, left, xp.float32(0))  # (pairs, groups)
        slopes[number, group, unit] = xp.where(steps.rises > 0, gains, 0) / xp.maximum(prices, 1)
