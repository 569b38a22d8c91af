"""What a cache knows about RoPE."""

import numpy as np

from kvrt.kvstore import Geometry, Rotary
from tests.helpers.codecs import rotary_for

HALF = 64


def test_others_than_quick_pairs_turn_along_a_line() -> None:
    rotary = rotary_for(Geometry(1, 1, 2 * HALF), theta=5e5)
    quick = rotary.quick_pairs(64)
    assert quick == 31
    angles = np.arange(-32, 33)[:, None] * rotary.frequencies  # (tokens, half)
    x = np.linspace(-1, 1, len(angles))[:, None]  # (tokens, 1)
    off = []
    for part in (np.cos(angles), np.sin(angles)):
        rest = part - x * np.polyfit(x[:, 0], part, 1)[0]
        off.append((rest.max(axis=0) - rest.min(axis=0)) / 2)  # (half,), from the best line
    assert np.max(off, axis=0)[quick] < 2**-10 < np.max(off, axis=0)[quick - 1]


def test_all_pairs_may_be_quick_or_none() -> None:
    assert Rotary(np.ones(HALF)).quick_pairs(64) == HALF
    assert Rotary(np.zeros(HALF)).quick_pairs(64) == 0
    # Pairs need not be in order.
    assert Rotary(np.eye(HALF)[5]).quick_pairs(64) == 6
