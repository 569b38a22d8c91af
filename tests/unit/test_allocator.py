"""The allocator: against brute force, and against the Lagrangian bound where there are many."""

from fractions import Fraction
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from kvrt.errors import CodecError
from kvrt.trizone import allocator
from kvrt.trizone.allocator import Allocation, allocate

V_RATES = np.array([0, 36, 68, 132, 256])
"""Bytes of a V token of 128 channels with a scale and a minimum."""

MIN_MAX = (1, 0.313, 0.0140, 4.9e-5, 0)
"""Relative errors with which 2 bits are on no hull (RDKV's table of Llama 3.1)."""

CLIPPED = (1, 0.118, 0.0140, 4.9e-5, 0)


class Case(NamedTuple):
    distortion: np.ndarray  # (widths, groups, n) f32, whole numbers
    rates: np.ndarray  # (widths, groups) i64


def small_case(seed: int, groups: int = 1) -> Case:
    """Whole numbers, of which f32 makes exact ties and no false ones; not all of them fall."""
    rng = np.random.default_rng(seed)
    widths, n = int(rng.integers(2, 6)), int(rng.integers(1, 6))
    top = int(rng.choice([6, 1000]))  # few values make ties
    distortion = rng.integers(0, top, (widths, groups, n))
    if seed % 2:
        distortion = -np.sort(-distortion, axis=0)
    steps = rng.integers(1, rng.choice([2, 13]), (widths - 1, groups))
    rates = np.concatenate([np.zeros((1, groups), np.int64), steps.cumsum(axis=0)])
    return Case(distortion.astype(np.float32), rates)


class Step(NamedTuple):
    """A step of a unit; the least comes first."""

    slope: Fraction  # the negative of its slope
    unit: int
    to: int
    rise: int


def step(d: np.ndarray, rates: np.ndarray, unit: int, start: int, to: int) -> Step:
    """The step of a unit from a width to a higher one, for d (widths, n)."""
    rise = int(rates[to] - rates[start])
    return Step(Fraction(int(d[to, unit] - d[start, unit]), rise), unit, to, rise)


def hull_steps(d: np.ndarray, rates: np.ndarray) -> list[Step]:
    """The steps of all hulls, in the order in which they are taken."""
    steps = []
    for unit in range(d.shape[1]):
        at = 0
        while further := [step(d, rates, unit, at, to) for to in range(at + 1, len(d))]:
            best = min(further)
            if best.slope >= 0:
                break
            steps.append(best)
            at = best.to
    return sorted(steps)


def hull_sums(d: np.ndarray, rates: np.ndarray) -> list[tuple[int, Fraction]]:
    """(bytes, distortion) after each step of the hulls."""
    sums = [(0, Fraction(int(d[0].sum())))]
    for slope, _, _, rise in hull_steps(d, rates):
        sums.append((sums[-1][0] + rise, sums[-1][1] + slope * rise))
    return sums


def greedy(d: np.ndarray, rates: np.ndarray, budget: int) -> list[int]:
    """The widths of units, step by step: first those of the hulls, then whatever the rest holds."""
    at, rest = [0] * d.shape[1], budget
    for best in hull_steps(d, rates):
        if best.rise > rest:
            break
        at[best.unit], rest = best.to, rest - best.rise
    while True:
        further = [
            step(d, rates, unit, start, to)
            for unit, start in enumerate(at)
            for to in range(start + 1, len(d))
        ]
        best = min((s for s in further if s.rise <= rest and s.slope < 0), default=None)
        if best is None:
            return at
        at[best.unit], rest = best.to, rest - best.rise


def totals(d: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The sum of distortions (groups,) f64 that an allocation leaves of d (widths, groups, n)."""
    return np.take_along_axis(d, chosen[None].astype(int), axis=0)[0].sum(axis=1, dtype=np.float64)


def costs(rates: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Bytes of each unit (groups, n), rates (widths, groups)."""
    return np.take_along_axis(rates.T, chosen.astype(int), axis=1)


def check_sound(case: Case, budget: np.ndarray, got: Allocation) -> None:
    """What holds for any budget: true sums, not too much, and nothing left that would do."""
    price = costs(case.rates, got.chosen)
    np.testing.assert_array_equal(got.spent, price.sum(axis=1))
    rest = np.maximum(budget, 0) - got.spent
    assert (rest >= 0).all()
    now = np.take_along_axis(case.distortion, got.chosen[None].astype(int), axis=0)[0]
    for rates, d in zip(case.rates, case.distortion, strict=True):
        rise = rates[:, None] - price  # (groups, n)
        assert not ((rise > 0) & (rise <= rest[:, None]) & (d < now)).any()


@pytest.mark.parametrize("seed", range(60))
def test_where_a_step_ends_no_choice_is_better(seed: int) -> None:
    d, rates = small_case(seed)
    choices = np.array(list(product(range(len(d)), repeat=d.shape[2])))  # (choices, n)
    price = rates[choices, 0].sum(axis=1)
    left = d[choices, 0, np.arange(d.shape[2])].sum(axis=1)
    for spent, distortion in hull_sums(d[:, 0], rates[:, 0]):
        got = allocate(np, d, rates[:, 0], np.array([spent]))
        assert got.spent.tolist() == [spent]
        assert totals(d, got.chosen) == float(distortion) == left[price <= spent].min()


@pytest.mark.parametrize("seed", range(16))
def test_any_budget_is_kept_and_used_up(seed: int) -> None:
    """No worse than the last cut below it, no better than the line between two cuts."""
    case = small_case(seed, groups=3)
    most = int(case.rates[-1].max()) * case.distortion.shape[2]
    sums = [hull_sums(case.distortion[:, g], case.rates[:, g]) for g in range(3)]
    for total in range(-1, most + 2):
        budget = np.array([total, total // 2, most - total])
        got = allocate(np, case.distortion, case.rates, budget)
        check_sound(case, budget, got)
        for g, (d, rates) in enumerate(zip(case.distortion.swapaxes(0, 1), case.rates.T)):
            assert got.chosen[g].tolist() == greedy(d, rates, int(budget[g]))
        for left, limit, cuts in zip(totals(case.distortion, got.chosen), budget, sums):
            below = max((cut for cut in cuts if cut[0] <= limit), default=cuts[0])
            above = next((cut for cut in cuts if cut[0] > limit), below)
            assert left <= below[1]
            if above is not below:
                share = Fraction(int(limit) - below[0], above[0] - below[0])
                assert left >= below[1] + share * (above[1] - below[1])
            else:
                assert left == below[1]


@pytest.mark.parametrize("table", [MIN_MAX, CLIPPED])
@pytest.mark.parametrize(("tokens", "heads"), [(10_323, 4), (131_072, 1)])
def test_weights_over_six_decades_come_within_a_percent_of_the_bound(
    tokens: int, heads: int, table: tuple[float, ...]
) -> None:
    rng = np.random.default_rng(tokens)
    weights = np.exp(rng.normal(0, 2.3, (heads, tokens)))
    spread = rng.uniform(0.8, 1.25, (heads, tokens))  # not all tokens are alike
    d = np.stack([weights * (e * spread if e < 1 else 1) for e in table]).astype(np.float32)
    assert np.ptp(np.log10(weights)) > 6
    for kept in (64, 256, 1024):
        budget = np.full(heads, kept * int(V_RATES[-1]))
        got = allocate(np, d, V_RATES, budget)
        rates = np.repeat(V_RATES[:, None], heads, axis=1)
        check_sound(Case(d, rates), budget, got)
        for head, left in enumerate(totals(d, got.chosen)):
            bound = lagrangian_bound(d[:, head], V_RATES, int(budget[head]))
            assert bound <= left <= 1.01 * bound


def lagrangian_bound(d: np.ndarray, rates: np.ndarray, budget: int) -> float:
    """The largest of sum(min(d + slope * rate)) - slope * budget, which no choice is below."""
    low, high = 0.0, float(d.max())
    for _ in range(60):
        slope = (low + high) / 2
        best = (d + slope * rates[:, None]).argmin(axis=0)  # f64
        low, high = (slope, high) if rates[best].sum() > budget else (low, slope)
    return float((d + high * rates[:, None]).min(axis=0).sum() - high * budget)


def test_groups_do_not_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    d = -np.sort(-rng.lognormal(0, 3, (5, 7, 50)).astype(np.float32), axis=0)
    rates = np.concatenate([np.zeros((1, 7), int), rng.integers(1, 90, (4, 7)).cumsum(axis=0)])
    budget = rng.integers(0, 4000, 7)
    whole = allocate(np, d, rates, budget)
    for g in range(7):
        alone = allocate(np, d[:, g : g + 1], rates[:, g], budget[g : g + 1])
        np.testing.assert_array_equal(alone.chosen[0], whole.chosen[g])
        assert alone.spent[0] == whole.spent[g]
    # Three groups at a time, the last time one: as many as memory allows for.
    monkeypatch.setattr(allocator, "STEPS_AT_ONCE", 3 * 50 * 4)
    in_parts = allocate(np, d, rates, budget)
    np.testing.assert_array_equal(in_parts.chosen, whole.chosen)
    np.testing.assert_array_equal(in_parts.spent, whole.spent)


def test_shared_heads_spend_where_it_helps_most() -> None:
    rng = np.random.default_rng(0)
    scale = np.array([1, 100])[:, None]
    d = -np.sort(-(rng.lognormal(0, 2, (5, 2, 200)) * scale).astype(np.float32), axis=0)
    budget = np.array([2000, 2001])
    got = allocate(np, d, V_RATES, budget, shared=True)
    as_one = allocate(np, d.reshape(5, 1, 400), V_RATES, np.array([4001]))
    assert got.chosen.shape == (2, 200)
    np.testing.assert_array_equal(got.chosen.reshape(-1), as_one.chosen[0])
    assert got.spent.tolist() == as_one.spent.tolist() == [V_RATES[got.chosen].sum()]
    apart = allocate(np, d, V_RATES, budget)
    assert totals(d, got.chosen).sum() < totals(d, apart.chosen).sum()


def test_of_equal_units_the_first_are_kept() -> None:
    d = np.stack([np.ones((2, 9)), np.zeros((2, 9))]).astype(np.float32)
    got = allocate(np, d, np.array([0, 10]), np.array([39, 70]))
    assert got.chosen.tolist() == [[1] * 3 + [0] * 6, [1] * 7 + [0] * 2]
    # The third unit's step is too dear; what is left goes up in the first or in the second.
    d = np.array([[20, 2, 90], [10, 0, 89], [8, 0, 0]], np.float32)[:, None]
    assert allocate(np, d, np.array([0, 4, 80]), np.array([8])).chosen[0].tolist() == [1, 1, 0]
    d = np.array([[20, 2, 9], [10, 0, 8.75], [8, 0, 0]], np.float32)[:, None]
    assert allocate(np, d, np.array([0, 4, 8]), np.array([8])).chosen[0].tolist() == [2, 0, 0]


def test_what_the_hull_leaves_buys_smaller_steps() -> None:
    """4 bits are the only step of the hull; with less left, 2 bits are taken, and then the rest."""
    d = np.array([[10, 9], [8, 7.5], [1, 1]], np.float32)[:, None]  # (3, 1, 2)
    rates = np.array([0, 36, 68])
    chosen = {b: allocate(np, d, rates, np.array([b])).chosen[0].tolist() for b in (35, 36, 68)}
    assert chosen == {35: [0, 0], 36: [1, 0], 68: [2, 0]}
    assert allocate(np, d, rates, np.array([104])).chosen[0].tolist() == [2, 1]
    # The first unit's hull ends in a step that is too dear; the second's goes on, twice.
    d = np.array([[900, 9], [890, 4], [0, 2]], np.float32)[:, None]
    assert allocate(np, d, np.array([0, 4, 9]), np.array([8])).chosen[0].tolist() == [1, 1]
    d = np.array([[900, 9], [899, 4], [0, 2]], np.float32)[:, None]
    assert allocate(np, d, np.array([0, 4, 20]), np.array([19])).chosen[0].tolist() == [1, 1]


def test_steps_of_a_straight_hull_are_taken_in_order() -> None:
    """Rounding makes their slopes rise and fall; no unit may skip what it has not paid."""
    weights = np.random.default_rng(0).lognormal(0, 0.001, 300).astype(np.float32)
    rates = np.array([0, 36, 68, 132, 256])
    d = (weights * (1 - rates / 256).astype(np.float32)[:, None])[:, None]  # (5, 1, 300)
    slopes = (d[:-1] - d[1:]) / np.diff(rates).astype(np.float32)[:, None, None]
    assert (np.diff(slopes, axis=0) > 0).any()
    for total in range(0, 300 * 256, 3001):
        budget = np.array([total])
        check_sound(Case(d, rates[:, None]), budget, allocate(np, d, rates, budget))


def test_units_without_distortion_and_broken_ones_take_nothing() -> None:
    nan, inf = np.nan, np.inf
    d = np.array([[0, 5, nan, 5, inf], [0, 2, 3, 2, 4], [0, 0, 0, nan, 0]], np.float32)[:, None]
    got = allocate(np, d, np.array([0, 4, 9]), np.array([1000]))
    assert got.chosen.tolist() == [[0, 2, 0, 0, 2]]
    # An infinite distortion goes first.
    assert allocate(np, d, np.array([0, 4, 9]), np.array([9])).chosen.tolist() == [[0, 0, 0, 0, 2]]


def test_nothing_is_bought_for_nothing() -> None:
    """A head without tokens has channels that cost nothing; a budget can be overdrawn, or 0."""
    d = np.array([[5, 5], [3, 3], [0, 0]], np.float32)[:, None].repeat(4, axis=1)
    rates = np.array([[0, 0, 0], [0, 4, 9], [0, 4, 9], [0, 4, 9]]).T
    got = allocate(np, d, rates, np.array([1000, -5, 0, 13]))
    assert got.chosen.tolist() == [[0, 0], [0, 0], [0, 0], [2, 1]]
    assert got.spent.tolist() == [0, 0, 0, 13]
    for shape in ((1, 2, 3), (3, 2, 0), (3, 0, 7)):
        rates = np.arange(shape[0])
        got = allocate(np, np.ones(shape, np.float32), rates, np.full(shape[1], 9))
        assert got.chosen.tolist() == np.zeros(shape[1:]).tolist()
        assert got.spent.tolist() == [0] * shape[1]


def test_what_does_not_fit_is_refused() -> None:
    d = np.ones((3, 2, 4), np.float32)
    rates, budget = np.array([0, 4, 9]), np.array([5, 5])
    for wrong in (rates[:2], np.zeros((3, 3), int), np.zeros((2, 3), int)):
        with pytest.raises(CodecError, match=r"rates .* do not fit distortions \(3, 2, 4\)"):
            allocate(np, d, wrong, budget)
    with pytest.raises(CodecError, match=r"budget \(3,\).* expected \(3,\) or \(3, 2\) and \(2,\)"):
        allocate(np, d, rates, np.array([5, 5, 5]))
    with pytest.raises(CodecError, match=r"rates \(3, 2\).* expected \(3,\) and \(2,\)"):
        allocate(np, d, np.zeros((3, 2), int), budget, shared=True)
    for wrong in (np.array([1, 4, 9]), np.array([0, 9, 4])):
        with pytest.raises(CodecError, match="do not ascend from 0"):
            allocate(np, d, wrong, budget)
    many = np.broadcast_to(np.float32(1), (5, 2, 2**26 + 1))  # takes no memory
    with pytest.raises(CodecError, match=r"got 134217730 units .* expected at most 134217728"):
        allocate(np, many, V_RATES, budget, shared=True)
