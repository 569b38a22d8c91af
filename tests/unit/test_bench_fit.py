"""The arithmetic of a scan: fits, break-even lengths and what a limit holds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrt.bench.fit import Line, break_even, fit_line, longest_context, slopes_differ


def test_fit_is_the_least_squares_line() -> None:
    x, y = [512, 1024, 2048, 4096, 8192], [20100.0, 20900.0, 22000.0, 25800.0, 32100.0]
    line = fit_line(x, y)
    slope, intercept = np.polyfit(x, y, 1)
    assert line is not None
    # Two ways to solve the same equations in float64: 1e-9 is far above their rounding.
    assert math.isclose(line.slope, slope, rel_tol=1e-9)
    assert math.isclose(line.intercept, intercept, rel_tol=1e-9)
    assert line.at(1000) == line.intercept + 1000 * line.slope


def test_fit_of_large_contexts_keeps_a_small_slope() -> None:
    x = [(1 << 40) + step for step in range(4)]
    line = fit_line(x, [5.0, 7.0, 9.0, 11.0])
    assert line is not None and line.slope == 2.0


@pytest.mark.parametrize("x", [[], [512], [512, 512, 512]])
def test_no_line_below_two_different_contexts(x: list[int]) -> None:
    assert fit_line(x, [1.0 + one for one in range(len(x))]) is None


def test_fit_refuses_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="2 x but 1 y"):
        fit_line([1, 2], [1.0])


BASE = Line(slope=2.0, intercept=100.0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (Line(1.0, 90.0), 0),  # faster at once
        (Line(2.0, 100.0), 0),  # the base itself
        (Line(2.0, 99.0), 0),
        (Line(1.0, 100.0), 0),
        (Line(1.0, 110.0), 10),  # equal at 10
        (Line(1.0, 110.5), 11),  # between two contexts: the first that is not above
        (Line(2.0, 101.0), None),  # parallel and above
        (Line(3.0, 50.0), None),  # ahead at first, but overtakes at 50
        (Line(3.0, 101.0), None),
        (None, None),
    ],
)
def test_break_even(line: Line | None, expected: int | None) -> None:
    assert break_even(line, BASE) == expected


def test_break_even_without_a_base_or_beyond_all_numbers() -> None:
    assert break_even(BASE, None) is None
    assert break_even(Line(0.0, 1e300), Line(1e-300, 0.0)) is None


@given(st.integers(0, 50), st.integers(0, 500), st.integers(0, 50), st.integers(0, 500))
def test_from_break_even_on_the_line_stays_below(a: int, b: int, c: int, d: int) -> None:
    line, base = Line(float(a), float(b)), Line(float(c), float(d))
    found = break_even(line, base)
    below = [line.at(x) <= base.at(x) for x in range(1200)]  # integers: exact, crossing by 500
    if found is None:
        assert not below[-1]
    else:
        assert all(below[found:]) and (found == 0 or not below[found - 1])


@given(st.integers(1, 300), st.integers(0, 3000), st.integers(0, 100_000), st.integers(1, 900))
def test_longest_context_is_the_last_that_fits(
    step: int, fixed: int, limit: int, high: int
) -> None:
    def bytes_at(tokens: int) -> int:
        return fixed + -(-tokens // 32) * 32 * step  # grows by pages

    fits = [tokens for tokens in range(1, high + 1) if bytes_at(tokens) <= limit]
    assert longest_context(bytes_at, limit, high) == (fits[-1] if fits else 0)


def test_longest_context_of_a_cache_that_never_fills_is_the_highest() -> None:
    assert longest_context(lambda tokens: 7, 7) == 1 << 40
    assert longest_context(lambda tokens: 7, 6) == 0
    assert longest_context(lambda tokens: tokens, 10**9, 0) == 0


def test_longest_context_asks_little_and_never_far_above() -> None:
    asked: list[int] = []

    def bytes_at(tokens: int) -> int:
        asked.append(tokens)
        return 23_040 * tokens

    assert longest_context(bytes_at, 48 * 10**9) == 48 * 10**9 // 23_040
    assert len(asked) < 50 and max(asked) <= 2 * (48 * 10**9 // 23_040) + 2


def test_the_error_of_a_slope_is_that_of_the_textbook() -> None:
    """Beside a covariance matrix of NumPy, which divides by n - 2 as well."""
    x, y = [1.0, 2.0, 4.0, 8.0, 16.0], [3.1, 2.9, 5.2, 8.8, 17.5]
    _, covariance = np.polyfit(x, y, 1, cov=True)
    line = fit_line(x, y)
    assert line is not None and line.error == pytest.approx(math.sqrt(covariance[0, 0]))
    two = fit_line(x[:2], y[:2])
    assert two is not None and two.error is None


def test_slopes_differ_beyond_twice_their_error() -> None:
    base = Line(1.0, 0.0, 0.3)
    assert slopes_differ(Line(0.0, 0.0, 0.399), base)  # 2 * 0.499
    assert not slopes_differ(Line(0.0, 0.0, 0.401), base)
    assert slopes_differ(Line(2.0, 0.0, 0.399), base)
    for unknown in (None, Line(9.0, 0.0)):
        assert not slopes_differ(unknown, base) and not slopes_differ(base, unknown)
