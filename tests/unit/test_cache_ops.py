"""Operations of a backend on a cache's rows: rounding, the ring, changes of basis."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvrt.backends import view
from kvrt.backends.cpu import CpuOps
from kvrt.backends.view import Extent, PageView
from tests.helpers.compare import assert_close
from tests.helpers.refs import hadamard_matrix, turned
from tests.helpers.tolerances import tolerance
from tests.unit.test_ops import DTYPES, KINDS, nan_array, normal


def ring_view(keys: np.ndarray, values: np.ndarray, kind: int) -> PageView:
    """A view whose tail rings are these arrays (kv_heads, rows, head_dim)."""
    heads, rows, dim = keys.shape
    settings = np.zeros(view.LAYER_SETTINGS, np.int64)  # (LAYER_SETTINGS,)
    given = {
        view.HEADS: heads,
        view.DIM: dim,
        view.KEY_KIND: kind,
        view.VALUE_KIND: kind,
        view.TAIL_ROWS: rows,
        view.TAIL_KEYS: keys.ctypes.data,
        view.TAIL_VALUES: values.ctypes.data,
    }
    for name, value in given.items():
        settings[name] = value
    return PageView(Extent(), settings, settings.ctypes.data, ("never", "never"))


@pytest.mark.parametrize("stored", DTYPES)
def test_narrowing_rounds_to_nearest_even(ops: CpuOps, stored: str) -> None:
    """Bits from all over float32: subnormal results, ties, NaN; f16 ends at its largest number."""
    rng = np.random.default_rng(0)
    wild = rng.integers(0, 1 << 32, 4000, dtype=np.uint32).view("f4")
    halves = rng.integers(0, 1 << 16, 2000, dtype=np.uint16)
    between = [
        (halves.view(dtype).astype("f4").view("u4") + np.uint32(half)).view("f4")
        for dtype, half in (("f2", 1 << 12), (ml_dtypes.bfloat16, 1 << 15))
    ]
    ends = np.array([np.inf, -np.inf, np.nan, 3.4028235e38, 65519.0, 65520.0, -0.0, 1e-45], "f4")
    values = np.concatenate([ends, wild, *between]).reshape(-1, 1, 8)  # (1001, 1, 8) f32
    count = len(values)
    kept = np.zeros((1, count, 8), DTYPES[stored])
    other = np.zeros_like(kept)
    ring = ring_view(kept, other, KINDS[stored])
    ops.append(ring, ops.to_device(values), ops.to_device(-values), 0)
    inside = np.clip(values[:, 0], -65504, 65504) if stored == "f16" else values[:, 0]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = inside.astype(DTYPES[stored])
    got, want = kept[0].astype("f4"), expected.astype("f4")
    np.testing.assert_array_equal(got, want)
    assert np.isnan(want).any() and np.isinf(want).any() == (stored != "f16")
    np.testing.assert_array_equal(other[0].astype("f4"), -want)
    for is_value in (False, True):
        out = nan_array(ops, values.shape)
        ops.recall(ring, is_value, 0, out)
        np.testing.assert_array_equal(ops.to_host(out)[:, 0], -want if is_value else want)
    rows = ops.to_device(values.copy())
    ops.round_rows(rows, DTYPES[stored])
    np.testing.assert_array_equal(ops.to_host(rows)[:, 0], want)


def test_append_and_recall_go_around_the_ring(ops: CpuOps) -> None:
    values = normal((5, 2, 3), 0)
    ring, other = (np.full((2, 7, 3), np.nan, "f4") for _ in range(2))  # (heads, rows, dim)
    rings = ring_view(ring, other, KINDS["f32"])
    ops.append(rings, ops.to_device(values), ops.to_device(2 * values), 4)
    assert np.array_equal(ring[:, [4, 5, 6, 0, 1]], values.swapaxes(0, 1))
    assert np.array_equal(other[:, [4, 5, 6, 0, 1]], 2 * values.swapaxes(0, 1))
    assert np.isnan(ring[:, [2, 3]]).all() and np.isnan(other[:, [2, 3]]).all()
    for is_value, factor in enumerate((1, 2)):
        out = nan_array(ops, (5, 2, 3))
        ops.recall(rings, bool(is_value), 4, out)
        assert np.array_equal(out, factor * values)


def table(ops: CpuOps, angles: np.ndarray) -> Any:
    """cos and sin (n, 2, half) f32 of angles (n, half)."""
    return ops.to_device(np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))


@pytest.mark.parametrize("steps", ["turns", "bias", "bias_turns", "hadamard", "all"])
@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize(("dim", "block"), [(64, 64), (80, 16), (112, 16), (96, 32), (256, 256)])
def test_change_of_basis(ops: CpuOps, dim: int, block: int, count: int, steps: str) -> None:
    """Inwards against dense matrices in float64; outwards it undoes itself."""
    x, bias = normal((count, 3, dim), 0), 10 * normal((3, dim), 1)
    rng = np.random.default_rng(2)
    angles, bias_angles = rng.uniform(-4, 4, (2, count, dim // 2))
    options: dict[str, Any] = {}
    want = x.astype(np.float64)
    if steps in ("turns", "all"):
        options["turns"] = table(ops, angles)
        want = turned(want, -angles)
    if steps in ("bias", "bias_turns", "all"):
        options["bias"] = ops.to_device(bias)
        rotated = np.broadcast_to(bias, x.shape)
        if steps != "bias":
            options["bias_turns"] = table(ops, bias_angles)
            rotated = turned(rotated, bias_angles)
        want = want - rotated
    if steps in ("hadamard", "all"):
        options["hadamard"] = block
        blocks = want.reshape(count, 3, dim // block, block)
        want = (blocks @ hadamard_matrix(block)).reshape(x.shape)
    rows = ops.to_device(x.copy())
    ops.change_basis(rows, True, **options)
    assert_close(rows, want, tolerance("basis", "f32"))
    ops.change_basis(rows, False, **options)
    assert_close(rows, x, tolerance("basis", "f32"))
