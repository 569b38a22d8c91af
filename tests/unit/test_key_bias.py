"""Keys as Qwen2 has them: a bias whose few large channels would spoil the codes of all others."""

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from tests.helpers.compare import relative_rmse
from tests.helpers.rotated import Sequence
from tests.helpers.stores import attend, extend

SPECS = [
    "k=int4:token:g32:pre,v=f32",
    "k=int4:token:g32:page,v=f32",
    "k=int4:token:g32,v=f32",
    "k=int4:channel:g64:page:had,v=f32",
    "k=int4:channel:g64:had,v=f32",  # the keys of kvrt4
    "k=q4_0:pre,v=f32",
    "k=q4_0,v=f32",
]
CHANNELS = [5, 20, 40]
NORM = 600.0
DIM, HEADS, TOKENS = 64, 2, 500


def qwen_like(norm: float, seed: int) -> tuple[Sequence, np.ndarray]:
    """A sequence and queries (heads, dim) that, as trained ones, hardly look at the bias."""
    rng = np.random.default_rng(seed)
    raw, values = rng.standard_normal((2, TOKENS, HEADS, DIM), dtype=np.float32)
    bias = np.zeros((HEADS, DIM))
    bias[:, CHANNELS] = rng.standard_normal((HEADS, len(CHANNELS)))
    bias *= norm / np.linalg.norm(bias, axis=1, keepdims=True)
    q = 2 * rng.standard_normal((16 * HEADS, DIM), dtype=np.float32)
    turning = np.isin(np.arange(DIM) % (DIM // 2), np.array(CHANNELS) % (DIM // 2))
    q[:, turning] *= 0.002
    return Sequence(raw, values, bias.astype(np.float32), theta=1e6), q


def error(ops: CpuOps, spec: str, norm: float, *, told: bool) -> float:
    """Relative error of attention, a mean over three sequences."""
    errors = []
    for seed in range(3):
        sequence, q = qwen_like(norm, seed)
        bias = sequence.bias if told else np.zeros_like(sequence.bias)
        store = sequence.store(ops, spec, told=bias)
        extend(store, sequence.tokens)
        errors.append(relative_rmse(attend(store, q), sequence.attention(q)))
    return float(np.mean(errors))


@pytest.mark.parametrize("spec", SPECS)
def test_a_huge_bias_costs_nothing_once_it_is_left_out(ops: CpuOps, spec: str) -> None:
    free = error(ops, spec, 0.0, told=True)
    assert 0.02 < free < 0.3
    assert error(ops, spec, NORM, told=True) < 1.5 * free
    assert error(ops, spec, NORM, told=False) > 5 * free  # the bound means something


def test_the_bias_is_kept_where_codes_are_floats(ops: CpuOps) -> None:
    """Nothing is left out of dense keys: they are what went in, whatever the bias."""
    sequence, q = qwen_like(NORM, 0)
    store = sequence.store(ops, "k=f32,v=f32")
    extend(store, sequence.tokens)
    assert store._basis.bias(0) is None
    assert relative_rmse(attend(store, q), sequence.attention(q)) < 1e-4
