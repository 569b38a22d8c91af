"""Each operation of a backend against NumPy in float64."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvrt.backends import get_ops
from kvrt.backends.cpu import CpuOps
from kvrt.backends.ops import Linear, Matrix, RandomMatrix
from kvrt.errors import KernelError, UnsupportedError, UsageError
from tests.helpers.compare import assert_close
from tests.helpers.refs import turned
from tests.helpers.tolerances import EXACT, tolerance

DTYPES = {"f32": np.dtype("f4"), "f16": np.dtype("f2"), "bf16": np.dtype(ml_dtypes.bfloat16)}
KINDS = {"f32": 0, "f16": 1, "bf16": 2}
ROWS = [1, 2, 3, 4, 5, 6]  # up to four tokens go through the row kernel, more through BLAS


def normal(shape: tuple[int, ...], seed: int, stored: str = "f32") -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return values.astype(DTYPES[stored])


def nan_array(ops: CpuOps, shape: tuple[int, ...]) -> Any:
    out = ops.empty(shape)
    out.fill(np.nan)
    return out


def make_linear(
    ops: CpuOps, weight: np.ndarray, bias: np.ndarray | None = None
) -> tuple[Linear, Callable[[np.ndarray], np.ndarray]]:
    """A layer, and the same in float64."""

    def reference(x: np.ndarray) -> np.ndarray:
        product = x.astype(np.float64) @ weight.astype(np.float64).T  # (n, rows) f64
        return product if bias is None else product + bias.astype(np.float64)

    return Linear(ops.matrix(weight), None if bias is None else ops.to_device(bias)), reference


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 40])
def test_embed(ops: CpuOps, stored: str, count: int) -> None:
    table = normal((37, 33), 0, stored)
    ids = np.random.default_rng(1).integers(0, 37, count)
    ids[-1] = 36
    assert_close(ops.embed(ops.matrix(table), ids), table[ids].astype("f4"), EXACT)


@pytest.mark.parametrize("shape", [(1, 33), (7, 577), (20, 64), (3, 5, 16), (1, 2048)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rmsnorm(ops: CpuOps, shape: tuple[int, ...], in_place: bool) -> None:
    x, weight = normal(shape, 0), normal(shape[-1:], 1)
    x[0] *= 1e-3  # where eps counts
    source = ops.to_device(x.copy())
    out = source if in_place else nan_array(ops, shape)
    ops.rmsnorm(source, ops.to_device(weight), 1e-5, out)
    wide = x.astype(np.float64)
    mean = np.mean(wide**2, axis=-1, keepdims=True)
    assert_close(out, wide / np.sqrt(mean + 1e-5) * weight, tolerance("rmsnorm", "f32"))


def test_rmsnorm_of_one_huge_activation(ops: CpuOps) -> None:
    """The real model has a hidden state of 23,131, whose square does not fit float16."""
    x = normal((2, 576), 0)
    x[:, 37] = 23131.0
    out = nan_array(ops, x.shape)
    ops.rmsnorm(ops.to_device(x), ops.to_device(np.ones(576, "f4")), 1e-5, out)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    assert_close(out, expected, tolerance("rmsnorm", "f32"))


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_linear(ops: CpuOps, stored: str, n: int, layers: int) -> None:
    """Sizes are odd, differ between layers, and only some layers have a bias."""
    x = normal((n, 577), 0)
    sizes = [33, 5, 130][:layers]
    made = [
        make_linear(
            ops,
            normal((rows, 577), 10 + i, stored),
            normal((rows,), 20 + i) if (i + layers) % 2 else None,
        )
        for i, rows in enumerate(sizes)
    ]
    outs = [nan_array(ops, (n, rows)) for rows in sizes]
    ops.linear(ops.to_device(x), [layer for layer, _ in made], outs)
    for out, (_, reference) in zip(outs, made, strict=True):
        assert_close(out, reference(x), tolerance("linear", stored))


@pytest.mark.parametrize("n", [1, 4, 5])
def test_linear_with_layers_of_different_types(ops: CpuOps, n: int) -> None:
    x = normal((n, 65), 0)
    made = [make_linear(ops, normal((17, 65), i, stored)) for i, stored in enumerate(DTYPES)]
    outs = [nan_array(ops, (n, 17)) for _ in made]
    ops.linear(ops.to_device(x), [layer for layer, _ in made], outs)
    for out, (_, reference), stored in zip(outs, made, DTYPES, strict=True):
        assert_close(out, reference(x), tolerance("linear", stored))


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_add(ops: CpuOps, stored: str, n: int, biased: bool) -> None:
    x, before = normal((n, 33), 0), normal((n, 577), 1)
    bias = normal((577,), 2) if biased else None
    layer, reference = make_linear(ops, normal((577, 33), 3, stored), bias)
    out = ops.to_device(before.copy())
    ops.linear_add(ops.to_device(x), layer, out)
    assert_close(out, before + reference(x), tolerance("linear", stored))


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("add", [False, True])
def test_linear_widens_in_blocks(ops: CpuOps, stored: str, add: bool) -> None:
    """A matrix of more elements than the widening buffer holds, in unequal blocks."""
    x, before = normal((6, 1030), 0), normal((6, 2100), 3)
    layer, reference = make_linear(ops, normal((2100, 1030), 1, stored), normal((2100,), 2))
    out = ops.to_device(before.copy()) if add else nan_array(ops, (6, 2100))
    if add:
        ops.linear_add(ops.to_device(x), layer, out)
    else:
        ops.linear(ops.to_device(x), (layer,), (out,))
    assert_close(out, reference(x) + (before if add else 0), tolerance("linear", stored))


def test_linear_with_rows_longer_than_the_widening_buffer(
    ops: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrt.backends.cpu._WIDEN_ELEMENTS", 50)
    small = CpuOps(2)
    x = normal((6, 130), 0)
    layer, reference = make_linear(small, normal((7, 130), 1, "bf16"))
    out = nan_array(small, (6, 7))
    small.linear(small.to_device(x), (layer,), (out,))
    assert_close(out, reference(x), tolerance("linear", "bf16"))


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (1.0 + np.exp(-x))


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_swiglu(ops: CpuOps, stored: str, n: int, biased: bool) -> None:
    x = normal((n, 65), 0)
    made = [
        make_linear(
            ops,
            (normal((77, 65), i) / 8).astype(DTYPES[stored]),
            normal((77,), i) if biased else None,
        )
        for i in (1, 2)
    ]
    out = nan_array(ops, (n, 77))
    ops.swiglu(ops.to_device(x), made[0][0], made[1][0], out)
    expected = silu(made[0][1](x)) * made[1][1](x)
    assert_close(out, expected, tolerance("linear", stored))


@pytest.mark.parametrize("n", [2, 5])
def test_swiglu_with_matrices_of_different_types(ops: CpuOps, n: int) -> None:
    x = normal((n, 65), 0) / 8
    gate, gate_reference = make_linear(ops, normal((7, 65), 1, "f16"))
    up, up_reference = make_linear(ops, normal((7, 65), 2, "bf16"))
    out = nan_array(ops, (n, 7))
    ops.swiglu(ops.to_device(x), gate, up, out)
    assert_close(out, silu(gate_reference(x)) * up_reference(x), tolerance("linear", "bf16"))


@pytest.mark.parametrize("n", [1, 6])
def test_swiglu_over_the_whole_range_of_silu(ops: CpuOps, n: int) -> None:
    """Identity matrices show silu(x) itself: from where exp overflows to where it vanishes."""
    ends = [-1e30, -1e4, -89, -88, -87, -1e-3, 0, 1e-3, 87, 88, 89, 1e4]
    points = [*ends, *range(-600, 601, 5)]
    gate_values = np.array([points] * n, "f4")  # (n, points)
    size = len(points)
    identity = np.eye(size, dtype="f4")
    layer, _ = make_linear(ops, identity)
    constant, _ = make_linear(ops, np.zeros((size, size), "f4"), np.ones(size, "f4"))
    out = nan_array(ops, (n, size))
    ops.swiglu(ops.to_device(gate_values), layer, constant, out)
    assert_close(out, silu(gate_values.astype(np.float64)), tolerance("silu_mul", "f32"))


@pytest.mark.parametrize("n", [1, 3, 9])
@pytest.mark.parametrize("dim", [2, 6, 64, 80])
def test_rope(ops: CpuOps, n: int, dim: int) -> None:
    x = normal((n, 3, dim), 0)
    angles = np.random.default_rng(1).uniform(-4, 4, (n, dim // 2))
    cos, sin = np.cos(angles).astype("f4"), np.sin(angles).astype("f4")
    out = ops.to_device(x.copy())
    ops.rope(out, ops.to_device(cos), ops.to_device(sin))
    assert_close(out, turned(x, angles), tolerance("rope", "f32"))


def test_every_half_is_widened_exactly(ops: CpuOps) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    for stored in ("f16", "bf16"):
        table = bits.view(DTYPES[stored]).reshape(256, 256)
        got = ops.to_host(ops.embed(ops.matrix(table), np.arange(256)))
        np.testing.assert_array_equal(got, table.astype("f4"))  # a NaN must stay a NaN
        numbers = ~np.isnan(got)
        assert np.array_equal(got[numbers].view("u4"), table.astype("f4")[numbers].view("u4"))


def test_a_nan_is_never_hidden(ops: CpuOps) -> None:
    x = normal((1, 16), 0)
    x[0, 3] = np.nan
    device = ops.to_device(x)
    identity, _ = make_linear(ops, np.eye(16, dtype="f4"))
    outs = [nan_array(ops, (1, 16)) * 0 + i for i in range(3)]
    ops.rmsnorm(device, ops.to_device(np.ones(16, "f4")), 1e-5, outs[0])
    ops.linear(device, (identity,), (outs[1],))
    ops.swiglu(device, identity, identity, outs[2])
    assert np.isnan(outs[0]).all() and np.isnan(outs[1]).all() and np.isnan(outs[2][0, 3])


def test_bad_shapes_are_refused(ops: CpuOps) -> None:
    x, out = ops.empty((2, 8)), ops.empty((2, 4))
    layer = Linear(ops.matrix(np.zeros((4, 8), "f4")))
    other = Linear(ops.matrix(np.zeros((4, 9), "f4")))
    tall = Linear(ops.matrix(np.zeros((5, 8), "f4")))
    q, kv = ops.empty((2, 4, 6)), ops.empty((3, 2, 6))
    calls: list[Callable[[], Any]] = [
        lambda: ops.rmsnorm(x, ops.empty((7,)), 1e-5, x),
        lambda: ops.rmsnorm(x, ops.empty((8,)), 1e-5, out),
        lambda: ops.linear(x, (other,), (out,)),
        lambda: ops.linear(x, (layer,), (ops.empty((2, 5)),)),
        lambda: ops.linear(x, (layer,), (ops.empty((3, 4)),)),
        lambda: ops.linear_add(x, other, out),
        lambda: ops.swiglu(x, layer, other, out),
        lambda: ops.swiglu(x, layer, tall, out),
        lambda: ops.swiglu(x, other, other, out),
        lambda: ops.swiglu(x, layer, layer, ops.empty((2, 5))),
        lambda: ops.rope(q, ops.empty((2, 2)), ops.empty((2, 2))),
        lambda: ops.rope(q, ops.empty((1, 3)), ops.empty((1, 3))),
        lambda: ops.rope(q, ops.empty((2, 3)), ops.empty((2, 2))),
        lambda: ops.attend_causal(q, kv, ops.empty((4, 2, 6)), 1.0, None),
        lambda: ops.attend_causal(q, ops.empty((3, 3, 6)), ops.empty((3, 3, 6)), 1.0, None),
        lambda: ops.attend_causal(q, ops.empty((3, 2, 5)), ops.empty((3, 2, 5)), 1.0, None),
        lambda: ops.attend_causal(q, ops.empty((1, 2, 6)), ops.empty((1, 2, 6)), 1.0, None),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(KernelError) as caught:
            call()
            pytest.fail(f"call {number} was not refused")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(8, "f4"),
        np.zeros((2, 2, 2), "f4"),
        np.zeros((4, 4), "f8"),
        np.zeros((4, 4), "i4"),
        np.zeros((4, 8), "f4")[:, ::2],
        np.zeros((4, 8), "f4").T,
    ],
    ids=["1-d", "3-d", "f64", "int", "strided", "transposed"],
)
def test_a_matrix_must_be_plain(ops: CpuOps, array: np.ndarray) -> None:
    with pytest.raises(KernelError, match="weight matrix must be"):
        ops.matrix(array)


def test_devices_and_threads_are_checked() -> None:
    with pytest.raises(UnsupportedError, match=r"'tpu' is not supported.*what works: cpu"):
        get_ops("tpu")
    for threads in (0, -1, 100_000):
        with pytest.raises(UsageError, match=f"1 to .* got {threads}"):
            get_ops("cpu", threads)


# --- benchmarks ---


def random_reference(recipe: RandomMatrix) -> np.ndarray:
    """The formula of random matrices, on whole arrays of 32-bit numbers: shape, stored type."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    low, high = (np.uint32(recipe.seed >> shift & 0xFFFFFFFF) for shift in (0, 32))
    index = np.arange(recipe.shape[0] * recipe.shape[1], dtype=np.uint32)
    hashed = mix(mix(index ^ low) + high)  # (rows * cols,) u32
    unit = (hashed >> np.uint32(8)) / np.float64(1 << 23) - 1.0  # (rows * cols,) f64, exact
    values = unit.astype(np.float32) * np.float32(recipe.scale)
    return values.reshape(recipe.shape).astype(recipe.dtype)


def bits_of(matrix: Matrix) -> np.ndarray:
    return np.asarray(matrix.array).view(f"u{matrix.array.itemsize}")


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1, 0xFEDCBA9876543210])
def test_random_matrices_follow_their_formula(stored: str, threads: int, seed: int) -> None:
    """To the bit, whichever thread makes a row; even and odd columns, one row, one column."""
    ops = CpuOps(threads)
    for shape, scale in [((37, 65), 0.7), ((1, 300), 1.0), ((301, 1), 1e-3), ((64, 128), 3.0)]:
        recipe = RandomMatrix(shape, DTYPES[stored], seed, scale)
        made = ops.matrix(recipe)
        assert (made.rows, made.cols, made.kind) == (*shape, KINDS[stored])
        assert made.array.nbytes == recipe.nbytes
        expected = random_reference(recipe).view(f"u{recipe.dtype.itemsize}")
        np.testing.assert_array_equal(bits_of(made), expected)


@pytest.mark.parametrize("stored", DTYPES)
def test_random_matrices_are_the_same_each_time_and_differ_by_seed(
    ops: CpuOps, stored: str
) -> None:
    """Each of the 64 bits of a seed counts."""
    first = bits_of(ops.matrix(RandomMatrix((9, 33), DTYPES[stored], 5, 1.0)))
    again = bits_of(ops.matrix(RandomMatrix((9, 33), DTYPES[stored], 5, 1.0)))
    np.testing.assert_array_equal(first, again)
    for bit in range(64):
        other = bits_of(ops.matrix(RandomMatrix((9, 33), DTYPES[stored], 5 ^ 1 << bit, 1.0)))
        # Two random bfloat16 in -1 .. 1 are the same about once in 200 times.
        assert (other == first).mean() < 0.1, bit


def test_random_matrices_are_uniform(ops: CpuOps) -> None:
    values = np.asarray(ops.matrix(RandomMatrix((500, 400), DTYPES["f32"], 7, 2.0)).array)
    counts, _ = np.histogram(values, bins=16, range=(-2.0, 2.0))
    # Of 200,000 numbers 12,500 fall into each bin, give or take 108 (one sigma).
    assert counts.sum() == values.size and abs(counts - 12_500).max() < 5 * 108
    neighbours = [(values[:, :-1], values[:, 1:]), (values[:-1], values[1:])]
    for left, right in neighbours:
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.012  # 5 sigma
    assert len(np.unique(values)) > 0.98 * values.size


def test_a_random_matrix_is_a_weight_like_any_other(ops: CpuOps) -> None:
    recipe = RandomMatrix((33, 65), DTYPES["bf16"], 3, 0.5)
    x, out = normal((2, 65), 0), nan_array(ops, (2, 33))
    ops.linear(ops.to_device(x), (Linear(ops.matrix(recipe)),), (out,))
    expected = x.astype(np.float64) @ random_reference(recipe).astype(np.float64).T
    assert_close(out, expected, tolerance("linear", "bf16"))


def test_the_read_bandwidth_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes a second of the best pass: the clock says 1 s for each, but for one of 0.5 s."""
    monkeypatch.setattr("kvrt.backends.cpu_probe.BYTES", 1 << 22)
    ops = CpuOps(2)
    assert 0 < ops.read_bandwidth() < float("inf")
    ends = [(2.0 * start, 2.0 * start + (0.5 if start == 3 else 1.0)) for start in range(10)]
    ticks = iter([time for pair in ends for time in pair])
    monkeypatch.setattr("kvrt.backends.cpu_probe.perf_counter", lambda: next(ticks))
    assert ops.read_bandwidth() == (1 << 22) / 0.5


@pytest.mark.parametrize("threads", [1, 3])
def test_every_word_is_read(threads: int) -> None:
    ops = CpuOps(threads)
    words = np.random.default_rng(0).integers(0, 1 << 63, (7, 50), dtype=np.uint64)
    source, sums = ops.to_device(words), ops.empty((7,), np.uint64)
    ops.kernels.read_words(7, 2, source.address, 50, sums.address)
    np.testing.assert_array_equal(sums, words.sum(axis=1))  # both wrap


def test_a_device_says_what_it_is() -> None:
    for threads in (1, 2):
        ops = CpuOps(threads)
        assert (ops.name, ops.threads) == ("cpu", threads)
        assert ops.device_name == f"CPU, {threads} thread{'s' * (threads > 1)}"
        for text in (ops.hardware, ops.build):
            assert isinstance(text, str) and text.strip() == text != "" and "\n" not in text
    assert CpuOps(1).build == CpuOps(1).build
