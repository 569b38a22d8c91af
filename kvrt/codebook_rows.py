"""Sweeps over residual vectors, in blocks: nearest entries, sums by code, errors, subtraction.

`xp` is numpy or cupy. What the two have in common does the work: no matrix of all vectors by all
entries is ever held, and the same vectors, entries and `xp` always give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

_HOST_CELLS = 1 << 19
"""Distances at a time on the CPU: 2 MiB of f32, which stay in a core's cache."""

_HOST_ROWS = 1 << 14
"""Rows that a thread takes at a time, however many threads there are: sums stay the same."""

_DEVICE_CELLS = 1 << 26
"""Distances at a time on a GPU: enough to keep all of it busy."""


@dataclass(frozen=True)
class Sweep:
    """What one pass over the rows found."""

    change: float  # sum of weight * (|row - entry|^2 - |row|^2)
    sums: np.ndarray  # (E, d) f64: of weight * row, by code
    counts: np.ndarray  # (E,) f64: of weights, by code


class Rows:
    """Vectors that are to be coded, with a column of ones, and their weights.

    data (n, d + 1) f32, weights (n,) f32 or None (all 1), both of `xp`. The ones let one product
    give distances, 0.5 |e|^2 - r . e, and another one sums and counts. `part` shares the data.
    `pool` has threads for numpy's work; BLAS should then have one.
    """

    def __init__(self, xp: Any, data: Any, weights: Any, pool: Executor | None = None):
        self._xp = xp
        self._pool = pool
        self._data = data
        self._weights = weights

    def __len__(self) -> int:
        return len(self._data)

    def part(self, start: int, stop: int) -> Rows:
        """Rows from `start` on and before `stop`; what is subtracted there is subtracted here."""
        weights = None if self._weights is None else self._weights[start:stop]
        return Rows(self._xp, self._data[start:stop], weights, self._pool)

    def moments(self) -> tuple[float, np.ndarray, np.ndarray]:
        """Weighted: sum of the weights, sum of rows (d,), sum of row^T row (d, d); f64."""
        total = np.zeros((self._data.shape[1],) * 2)
        for rows, weights in self._blocks(_HOST_ROWS):  # f32 sums stay short
            total += self._host(self._xp.matmul((rows * weights).T, rows))
        return float(total[-1, -1]), total[-1, :-1], total[:-1, :-1]

    def power(self) -> float:
        """The sum of weight * |row|^2."""
        total = 0.0
        for rows, weights in self._blocks(_HOST_ROWS if self._xp is np else _DEVICE_CELLS >> 8):
            squares = self._xp.square(rows[:, :-1]).sum(1, keepdims=True) * weights
            total += float(squares.sum(dtype=np.float64))
        return total

    def sweep(self, entries: np.ndarray) -> Sweep:
        """Code every row by entries (E, d) f16: what that leaves; sums and counts of each code."""

        def found(rows: Any, weights: Any, codes: Any, least: Any, _: Any) -> tuple:
            sums = self._by_code(rows * weights, codes, len(entries))
            return float((least[:, None] * weights).sum(dtype=np.float64)), sums

        total, sums = 0.0, np.zeros((len(entries), self._data.shape[1]))
        for least, part in self._coded(entries, found):
            total += least
            sums += part
        return Sweep(2.0 * total, sums[:, :-1], sums[:, -1])

    def savings(self, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What each entry saves over the second nearest ones, (E,) f64; each row's error (n,) f64.

        Weighted squared errors. An entry that no row uses, or that has a twin, saves nothing.
        """

        def found(rows: Any, weights: Any, codes: Any, least: Any, second: Any) -> tuple:
            gains = (second - least)[:, None] * weights * 2
            own = (self._xp.square(rows[:, :-1]).sum(1) + least * 2)[:, None] * weights
            return self._by_code(gains, codes, len(entries))[:, 0], self._host(own[:, 0])

        saved, errors = np.zeros(len(entries)), []
        for part, own in self._coded(entries, found, second=True):
            saved += part
            errors.append(own.astype(np.float64))
        return saved, np.maximum(np.concatenate(errors), 0.0)

    def codes(self, entries: np.ndarray) -> np.ndarray:
        """The code of each row, (n,) int64: the nearest entry, ties to the lowest index."""
        return np.concatenate(list(self._coded(entries, lambda *found: self._host(found[2]))))

    def subtract(self, entries: np.ndarray) -> np.ndarray:
        """Leave of each row what its entry misses; how often each code was used, (E,) int64."""
        table = self._xp.asarray(entries.astype(np.float32))

        def left(rows: Any, weights: Any, codes: Any, *_: Any) -> np.ndarray:
            rows[:, :-1] -= table[codes]
            return self._host(self._xp.bincount(codes, minlength=len(entries)))

        return sum(self._coded(entries, left), np.zeros(len(entries), np.int64))

    def take(self, places: np.ndarray) -> np.ndarray:
        """The rows at places (k,), (k, d) f32."""
        return self._host(self._data[self._xp.asarray(places)])[:, :-1]

    def _blocks(self, step: int) -> Iterator[tuple[Any, Any]]:
        """Views of `step` rows (m, d + 1) and their weights (m, 1)."""
        for start in range(0, len(self._data), step):
            yield self._block(start, step)

    def _block(self, start: int, step: int) -> tuple[Any, Any]:
        block = slice(start, start + step)
        one = self._xp.ones((1, 1), np.float32)
        return self._data[block], one if self._weights is None else self._weights[block, None]

    def _coded(self, entries: np.ndarray, use: Callable, second: bool = False) -> Iterator[Any]:
        """What `use` makes of each block, in order: of its rows (m, d + 1), weights (m, 1), codes
        (m,), distances to the nearest entries (m,) and, if wanted, to the `second` nearest."""
        exact = entries.astype(np.float64)
        norms = np.square(exact).sum(1, keepdims=True) * 0.5
        host = np.concatenate([-exact, norms], 1).T.astype(np.float32, order="C")
        table = self._xp.asarray(host)  # (d + 1, E)
        step = _HOST_ROWS if self._xp is np else max(1, _DEVICE_CELLS // len(entries))

        def coded(start: int) -> Any:
            rows, weights = self._block(start, step)
            return use(rows, weights, *self._nearest(rows, table, second))

        run = map if self._pool is None else self._pool.map
        return iter(run(coded, range(0, len(self._data), step)))

    def _nearest(self, rows: Any, table: Any, second: bool) -> tuple[Any, Any, Any]:
        """Codes (m,), distances to them (m,) and those without them (m,), of a block of rows."""
        xp, count = self._xp, table.shape[1]
        step = max(1, (_HOST_CELLS if xp is np else _DEVICE_CELLS) // count)
        scratch = xp.empty((min(step, len(rows)), count), np.float32)
        found: list[tuple[Any, Any, Any]] = []
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            distances = xp.matmul(part, table, out=scratch[: len(part)])
            codes, place = distances.argmin(1), xp.arange(len(part))
            least = distances[place, codes]
            if second:
                distances[place, codes] = np.inf
            found.append((codes, least, distances.min(1) if second else least))
        codes, least, others = (xp.concatenate(parts) for parts in zip(*found))
        return codes, least, others

    def _by_code(self, numbers: Any, codes: Any, count: int) -> np.ndarray:
        """Sums of numbers (m, w) f32 by code, (count, w) f64."""
        xp = self._xp
        if xp is np:
            columns = [np.bincount(codes, column, count) for column in numbers.T]
            return np.stack(columns, 1)
        # CuPy's bincount adds weights in whatever order threads come; a product has one order.
        chosen = codes[None, :] == xp.arange(count)[:, None]  # (count, m)
        return self._host(xp.matmul(chosen.astype(np.float32), numbers)).astype(np.float64)

    def _host(self, array: Any) -> np.ndarray:
        return array if self._xp is np else self._xp.asnumpy(array)
