"""What policies and the allocator decide on a GPU: the same widths as on a CPU."""

import numpy as np
import pytest

from kvrt.backends import get_ops
from kvrt.backends.cuda import CudaOps
from kvrt.backends.ops import Ops
from kvrt.trizone.layout import WIDTHS
from kvrt.trizone.policies import POLICIES, query_energy

HEADS, DIM = 4, 64
V_RATES = {0: 0, 2: 20, 4: 36, 8: 68, 16: 128}
"""Bytes of a V token of 64 channels."""


def widths(ops: Ops, name: str, tokens: int, shared: bool) -> list[np.ndarray]:
    """All that a policy and the allocator make of the same numbers, on the host."""
    xp, policy = ops.xp, POLICIES[name]
    rng = np.random.default_rng(tokens)
    received = rng.lognormal(0, 3, (HEADS, tokens)).astype(np.float32)
    received[:, tokens // 2 :] = received[:, -1:]  # equal units
    shares = rng.uniform(0.001, 0.3, (4, HEADS, tokens)).astype(np.float32)
    shares[0] *= 1000
    errors = shares.cumprod(axis=0)
    key_errors = rng.uniform(0.001, 0.3, (HEADS, DIM, 4)).cumprod(axis=2)
    q = rng.standard_normal((32, 2 * HEADS, DIM)).astype(np.float32)

    weights = policy.token_weights(xp, xp.asarray(received), slice(0, tokens))
    left = policy.token_distortion(xp, weights, xp.asarray(errors))
    rates = np.array([V_RATES[width] for width in policy.widths])
    budgets = policy.head_budgets(xp, weights, np.full(HEADS, 30 * 128 + 77), 128)
    tokens_of = ops.allocate(left, rates, budgets, shared=shared)
    kept = np.array((tokens_of[0] > 0).sum(axis=1).tolist())
    places = xp.zeros((HEADS, tokens), np.int64)
    counts = xp.zeros((HEADS, -(-tokens // 64), len(WIDTHS)), np.uint8)
    ranks = [0, *(WIDTHS.index(width) for width in policy.widths[1:])]
    ops.cut_blocks(tokens_of[0], ranks, 4, places, counts)
    energy = query_energy(xp, xp.asarray(q), HEADS)
    of_channels = policy.channel_distortion(xp, energy, xp.asarray(key_errors), kept)
    by_head = np.array(policy.key_widths)[:, None] * kept // 8  # (widths, heads)
    channels = ops.allocate(of_channels, by_head - by_head[:1], by_head[-1] * DIM // 5)
    found = (weights, left, *tokens_of, places, counts, energy, of_channels, *channels)
    return [budgets, *(np.array(array.tolist(), array.dtype) for array in found)]


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("tokens", [1, 3, 33, 5000])
@pytest.mark.parametrize("shared", [False, True])
def test_widths_are_those_of_the_cpu(cuda: CudaOps, name: str, tokens: int, shared: bool) -> None:
    wanted, found = (widths(ops, name, tokens, shared) for ops in (get_ops("cpu"), cuda))
    for want, got in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(got, want)
