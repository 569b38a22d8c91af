"""The CUDA kernels that choose, emulated: what the allocator chooses, and the same blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kvrt.backends.cuda import CudaOps
from kvrt.errors import CodecError, KernelError
from kvrt.trizone.allocator import allocate
from kvrt.trizone.blocks import cut_blocks
from tests.emulator import COMPILER
from tests.helpers.emulated_device import emulated_ops

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

V_RATES = np.array([0, 36, 68, 132, 256])
"""Bytes of a V token of 128 channels with a scale and a minimum."""

LEFT = np.array([1, 0.118, 0.0140, 4.9e-5, 0], np.float32)
"""Relative errors of its widths."""


@pytest.fixture(scope="module")
def cuda() -> CudaOps:
    return emulated_ops()


def check(
    cuda: CudaOps, distortion: np.ndarray, rates: np.ndarray, budget: np.ndarray, shared: bool
) -> np.ndarray:
    """Equal widths and bytes, and scratch that is as it was; gives the widths."""
    d = np.ascontiguousarray(distortion, np.float32)
    with np.errstate(all="ignore"):
        want = allocate(np, d, rates, budget, shared=shared)
    chosen, spent = cuda.allocate(d, rates, budget, shared=shared)
    assert chosen.dtype == np.uint8 and spent.dtype == np.int64
    np.testing.assert_array_equal(chosen, want.chosen)
    np.testing.assert_array_equal(spent, want.spent)
    assert not any(held.any() for (use, _), held in cuda._buffers.items() if use == "weighed")
    return chosen


def weights(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """(groups, n) f32, of which each is times what a width leaves."""
    if kind == "spread":
        return rng.lognormal(0, 4, shape).astype(np.float32)
    if kind == "floor":  # all are nearly alike
        return (0.3 + rng.lognormal(-4, 3, shape)).astype(np.float32)
    if kind == "ties":
        return rng.integers(0, 4, shape).astype(np.float32)
    return np.full(shape, 0.7, np.float32)


@pytest.mark.parametrize("kind", ["spread", "floor", "ties", "equal"])
@pytest.mark.parametrize("n", [1, 5, 300, 2040, 2500])
@pytest.mark.parametrize("shared", [False, True])
def test_widths_of_tokens(cuda: CudaOps, kind: str, n: int, shared: bool) -> None:
    rng = np.random.default_rng(n)
    w = weights(rng, kind, (3, n))
    left = LEFT[:, None, None] * rng.uniform(0.8, 1.2, (5, 3, n)).astype(np.float32)
    d = w * (LEFT[:, None, None] if kind in ("ties", "equal") else left)
    for budget in ([n * 20, n * 60 + 13, n * 200], [0, -7, n * 256], [n * 256 - 1, 35, 36]):
        chosen = check(cuda, d, V_RATES, np.array(budget), shared)
        assert n < 5 or chosen.any()


@pytest.mark.parametrize("kind", ["spread", "ties", "equal"])
def test_evictions(cuda: CudaOps, kind: str) -> None:
    w = weights(np.random.default_rng(1), kind, (2, 1500))
    d = np.stack([w, np.zeros_like(w)])
    for tokens in (0, 1, 700, 1500, 9999):
        check(cuda, d, np.array([0, 512]), np.array([tokens * 512, tokens * 512 + 511]), False)


@pytest.mark.parametrize("seed", range(40))
def test_small_cases(cuda: CudaOps, seed: int) -> None:
    """Whole numbers with true ties, few widths, each group's own rates, some that do not rise."""
    rng = np.random.default_rng(seed)
    widths, groups, n = (int(rng.integers(*span)) for span in ((2, 6), (1, 9), (1, 40)))
    d = rng.integers(0, rng.choice([3, 1000]), (widths, groups, n))
    rates = np.zeros((widths, groups), np.int64)
    rates[1:] = rng.integers(0, rng.choice([2, 13, 1 << 33]), (widths - 1, groups)).cumsum(axis=0)
    top = int(rates.max()) * n + 1
    for budget in rng.integers(-1, top, (4, groups)):
        check(cuda, d, rates, budget, False)
    check(cuda, d, rates[:, 0], budget, True)


def test_numbers_that_are_none(cuda: CudaOps) -> None:
    rng = np.random.default_rng(0)
    d = (weights(rng, "spread", (2, 400)) * LEFT[:, None, None]).astype(np.float32)
    places = rng.random(d.shape)
    for share, what in ((0.05, np.nan), (0.1, np.inf), (0.15, 3.2e38), (0.2, 1e-45), (0.3, -0.0)):
        d[(places < share) & (places > share - 0.05)] = what
    d[:, :, 7] = 0
    for budget in (0, 500, 20000, 60000, 10**6):
        check(cuda, d, V_RATES, np.array([budget, budget + 1]), False)


def test_straight_hulls(cuda: CudaOps) -> None:
    """Rounding makes their slopes rise and fall."""
    w = np.random.default_rng(0).lognormal(0, 0.001, 300).astype(np.float32)
    d = (w * (1 - V_RATES / 256).astype(np.float32)[:, None])[:, None]
    for total in range(0, 300 * 256, 9001):
        check(cuda, d, V_RATES, np.array([total]), False)


def test_what_is_left_is_filled_by_many_steps(cuda: CudaOps) -> None:
    """The first unit's step is too dear; fifty others follow one by one, from all chunks."""
    w = np.random.default_rng(0).uniform(1, 2, 2100)
    d = np.stack([w, 0 * w, 0 * w]).astype(np.float32)[:, None]
    d[:2, 0, 0] = 1e9
    chosen = check(cuda, d, np.array([0, 1, 5000]), np.array([50]), False)
    assert chosen[0].sum() == 50 and chosen[0, 0] == 0
    assert all(chosen[0, part : part + 1024].any() for part in (0, 1024, 2048))


def test_nothing_to_choose(cuda: CudaOps) -> None:
    for shape in ((1, 2, 3), (3, 2, 0), (3, 0, 7)):
        chosen, spent = cuda.allocate(
            np.ones(shape, np.float32), np.arange(shape[0]), np.full(shape[1], 9)
        )
        assert chosen.shape == shape[1:] and not chosen.any()
        assert spent.shape == shape[1:2] and not spent.any()


def test_what_does_not_fit_is_refused(cuda: CudaOps) -> None:
    d = np.ones((6, 2, 4), np.float32)
    with pytest.raises(CodecError, match="do not fit"):
        cuda.allocate(d, np.arange(5), np.array([5, 5]))
    with pytest.raises(KernelError, match="at most 5 widths"):
        cuda.allocate(d, np.arange(6), np.array([5, 5]))
    chosen, tokens = np.zeros((2, 70), np.uint8), np.zeros((2, 70), np.int64)
    for ranks, units in (((0, 3), 1), ((0, 4), 2), ((0, 1, 2, 3, 0, 1), 2)):
        with pytest.raises(KernelError, match="cut_blocks"):
            cuda.cut_blocks(chosen, ranks, 0, tokens, np.zeros((2, units, 4), np.uint8))


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1024, 1025, 4096, 9001])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("ranks", [(0, 3, 2, 1, 0), (0, 0)])
def test_blocks(cuda: CudaOps, n: int, share: float, ranks: tuple[int, ...]) -> None:
    rng = np.random.default_rng(n)
    chosen = rng.integers(1, len(ranks), (3, n)) * (rng.random((3, n)) < share)
    chosen[1] = 0
    chosen = chosen.astype(np.uint8)
    units = -(-n // 64)
    found = []
    for cut in (cut_blocks, cuda.cut_blocks):
        tokens = np.full((3, n), -1)
        counts = np.full((3, units, 4), 0xFF, np.uint8)
        cut(chosen, ranks, 4, tokens, counts)
        found.append((tokens, counts))
    np.testing.assert_array_equal(found[1][1], found[0][1])
    np.testing.assert_array_equal(found[1][0], found[0][0])
    for head, (tokens, counts) in enumerate(zip(*found[0])):
        kept = np.flatnonzero(chosen[head])
        assert (tokens[len(kept) :] == -1).all()
        for unit in range(units):  # against plain sorting
            of_block = kept[64 * unit : 64 * unit + 64].tolist()
            by_rank = [[t for t in of_block if ranks[chosen[head, t]] == r] for r in range(4)]
            assert counts[unit].tolist() == [len(part) for part in by_rank]
            want = [4 + t for part in by_rank for t in part]
            assert tokens[64 * unit : 64 * unit + len(want)].tolist() == want
