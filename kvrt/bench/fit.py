"""The arithmetic of a scan: a line through the timings, where two lines cross, what fits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """y = intercept + slope * x. `error` is the slope's standard error, None of two points."""

    slope: float
    intercept: float
    error: float | None = None

    def at(self, x: float) -> float:
        """y at x."""
        return self.intercept + self.slope * x


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """The line of least squares through the points; None below two different x.

    x, y (n,). Raises ValueError where their lengths differ.
    """
    if len(x) != len(y):
        raise ValueError(f"{len(x)} x but {len(y)} y")
    if len(set(x)) < 2:
        return None
    x_mean, y_mean = math.fsum(x) / len(x), math.fsum(y) / len(y)
    # About the means: the squares of contexts of a million would swamp the differences.
    spread = math.fsum((a - x_mean) ** 2 for a in x)
    slope = math.fsum((a - x_mean) * (b - y_mean) for a, b in zip(x, y)) / spread
    rest = math.fsum((b - y_mean - slope * (a - x_mean)) ** 2 for a, b in zip(x, y))
    error = math.sqrt(rest / (len(x) - 2) / spread) if len(x) > 2 else None
    return Line(slope, y_mean - slope * x_mean, error)


def slopes_differ(line: Line | None, base: Line | None) -> bool:
    """Whether two slopes are further apart than twice the standard error of their difference."""
    if line is None or base is None or line.error is None or base.error is None:
        return False
    return abs(line.slope - base.slope) > 2 * math.hypot(line.error, base.error)


def break_even(line: Line | None, base: Line | None) -> int | None:
    """The least context from which on `line` is never above `base`; 0 if at once, None if never.

    A line that is below at first and overtakes `base` later does not stay below: None. So is
    either line missing.
    """
    if line is None or base is None:
        return None
    lead, gain = line.intercept - base.intercept, base.slope - line.slope
    if gain < 0 or (gain == 0 and lead > 0):
        return None
    if lead <= 0:
        return 0
    crossing = lead / gain
    return math.ceil(crossing) if math.isfinite(crossing) else None


def longest_context(bytes_at: Callable[[int], int], limit: int, high: int = 1 << 40) -> int:
    """The most tokens n with bytes_at(n) <= limit: 0 where not even one fits, `high` at most.

    `bytes_at` must not decrease. It is asked about few lengths, none above twice the answer
    (nor above `high`).
    """
    fits, fails = 0, 1
    while fails <= high and bytes_at(fails) <= limit:
        fits, fails = fails, fails * 2
    fails = min(fails, high + 1)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if bytes_at(middle) <= limit:
            fits = middle
        else:
            fails = middle
    return fits
