"""The kernels of cuda_src/gemv.cu and layers.cu, emulated, against float64 and the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvrt.backends import get_ops
from kvrt.backends.projection_shape import blocks_an_sm, projection_shape
from tests.emulator import COMPILER, EmulatedModule

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

EPS = 1e-5
KINDS = {0: np.float32, 1: np.float16}
BF16 = 2


@cache
def gemv(kind: int) -> EmulatedModule:
    return EmulatedModule("gemv.cu", {"KIND": kind})


@cache
def layers() -> EmulatedModule:
    return EmulatedModule("layers.cu")


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that 16 divides."""
    room = np.zeros(array.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 16
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def stored(values: np.ndarray, kind: int) -> tuple[np.ndarray, np.ndarray]:
    """What memory holds of `values` as `kind`, and the numbers it stands for."""
    if kind != BF16:
        held = aligned(values.astype(KINDS[kind]))
        return held, held.astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    held = aligned(rounded.astype(np.uint16))
    return held, (rounded << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return aligned(rng.standard_normal(shape, np.float32))


def shared_bytes(kind: int, cols: int, block: int) -> int:
    items = 8 if kind else 4
    return block * (128 + -(-cols // (block * items)) * 4 * items)


def normed(x: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
    wide = x.astype(np.float64)
    if norm is None:
        return wide
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * norm


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize(
    ("cols", "sizes", "with_norm", "add", "grid", "block"),
    [
        (576, (192, 3, 1), True, 0, 7, 96),  # runs that end at matrices; a window, and more
        (1536, (3, 0, 0), False, 1, 1, 64),  # several pieces of a row
        (520, (90, 20, 50), True, 1, 2, 64),  # of which the last is for some threads only
        (100, (577, 0, 0), True, 0, 9, 32),
        (7, (1, 3, 192), False, 1, 300, 64),  # more blocks than rows; threads without columns
        (1, (1, 0, 0), True, 0, 1, 32),
        (512, (0, 41, 7), True, 1, 1, 32),
    ],
)
def test_linear_is_a_matrix_product(
    kind: int,
    cols: int,
    sizes: tuple[int, ...],
    with_norm: bool,
    add: int,
    grid: int,
    block: int,
) -> None:
    rng = np.random.default_rng(cols)
    x = normal(rng, cols)
    norm = normal(rng, cols) if with_norm else None
    arguments: list[Any] = []
    checks = []
    for i, rows in enumerate(sizes):
        held, numbers = stored(normal(rng, rows, cols), kind)
        bias = normal(rng, rows) if i != 1 else None
        out = normal(rng, rows) if add else np.full(rows, np.nan, np.float32)
        wanted = numbers @ normed(x, norm) + (0 if bias is None else bias) + (out if add else 0)
        arguments += [held, rows, 0 if bias is None else bias, out]
        checks.append((out, wanted))
    gemv(kind).launch(
        "linear", (grid,), (block,), x, cols, 0 if norm is None else norm, EPS, add, *arguments,
        shared=shared_bytes(kind, cols, block),
    )  # fmt: skip
    for out, wanted in checks:
        if wanted.size:
            close(out, wanted)


def test_rows_do_not_depend_on_the_grid() -> None:
    rng = np.random.default_rng(11)
    held, _ = stored(normal(rng, 83, 576), 1)
    x, norm, outs = normal(rng, 576), normal(rng, 576), []
    for grid in (1, 3, 10, 100):
        out = np.full(83, np.nan, np.float32)
        gemv(1).launch(
            "linear", (grid,), (64,), x, 576, norm, EPS, 0, held, 83, 0, out, *[0] * 8,
            shared=shared_bytes(1, 576, 64),
        )  # fmt: skip
        outs.append(out)
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize(
    ("cols", "rows", "grid", "block"), [(576, 192, 5, 64), (100, 3, 2, 32), (1544, 35, 1, 96)]
)
def test_swiglu(kind: int, cols: int, rows: int, grid: int, block: int) -> None:
    rng = np.random.default_rng(cols + 1)
    x, norm, bias = normal(rng, cols), normal(rng, cols), normal(rng, rows)
    gate, gates = stored(normal(rng, rows, cols) / np.float32(cols**0.5), kind)
    up, ups = stored(normal(rng, rows, cols), kind)
    for has_norm, gate_bias, up_bias in [(True, bias, 0), (False, 0, bias)]:
        out = np.full(rows, np.nan, np.float32)
        gemv(kind).launch(
            "swiglu", (grid,), (block,), x, cols, norm if has_norm else 0, EPS,
            gate, gate_bias, up, up_bias, rows, out, shared=shared_bytes(kind, cols, block),
        )  # fmt: skip
        ready = normed(x, norm if has_norm else None)
        close(out, silu(gates @ ready + gate_bias) * (ups @ ready + up_bias))


@pytest.mark.parametrize("kind", [1, 2])
def test_weights_that_are_not_aligned_and_nan(kind: int) -> None:
    rng = np.random.default_rng(3)
    held, numbers = stored(normal(rng, 4, 64), kind)
    room = aligned(np.zeros(held.size + 1, held.dtype))
    shifted = room[1:].reshape(held.shape)
    shifted[...] = held
    shifted.view(np.uint16)[2, 63] = 0x7FFF
    x = normal(rng, 64)
    far = aligned(np.zeros(65, np.float32))[1:]
    far[:] = x
    out = np.zeros(4, np.float32)
    for weights, given in ((shifted, x), (aligned(shifted), x), (aligned(shifted), far)):
        out[:] = 0
        gemv(kind).launch(
            "linear", (1,), (64,), given, 64, 0, EPS, 0, weights, 4, 0, out, *[0] * 8,
            shared=shared_bytes(kind, 64, 64),
        )  # fmt: skip
        assert np.isnan(out).tolist() == [False, False, True, False]
        close(out[[0, 1, 3]], (numbers @ x)[[0, 1, 3]])


@pytest.mark.parametrize("max_shared", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("kind", [0, 1])
def test_the_shape_of_a_launch_fits(kind: int, max_shared: int) -> None:
    # What the compiler says that the kernels have for themselves.
    own = 4480
    for cols in (1, 7, 64, 576, 2048, 4096, 5120, 8192, 11008, 14336, 16384):
        threads, shared = projection_shape(kind, cols, max_shared)
        assert threads % 32 == 0 and 32 <= threads <= 512
        assert shared == shared_bytes(kind, cols, threads) <= max_shared - own
    assert projection_shape(1, 4096, max_shared)[0] == 512
    assert projection_shape(1, 14336, 227 << 10)[0] == 448
    assert [blocks_an_sm(threads) for threads in (512, 448, 256, 32)] == [1, 1, 2, 16]


@pytest.mark.parametrize(("rows", "cols"), [(1, 576), (3, 1536), (5, 7), (577, 1)])
def test_rmsnorm_and_rope(rows: int, cols: int) -> None:
    rng = np.random.default_rng(rows)
    x, weight = normal(rng, rows, cols), normal(rng, cols)
    wanted = normed(x, weight)
    by_cpu = np.empty_like(x)
    get_ops("cpu").rmsnorm(x, weight, EPS, by_cpu)
    layers().launch("rmsnorm", (rows,), (96,), x, weight, cols, EPS, x)
    close(x, wanted)
    close(x, by_cpu)

    heads, half = 3, 20
    x, angles = normal(rng, rows, heads, 2 * half), normal(rng, rows, half)
    cos, sin = np.cos(angles), np.sin(angles)
    turned = x.copy()
    get_ops("cpu").rope(turned, cos, sin)
    layers().launch("rope", (rows,), (32,), x, heads, 2 * half, cos, sin)
    close(x, turned)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_embed_and_narrow(kind: int) -> None:
    rng = np.random.default_rng(kind)
    table = normal(rng, 9, 7)
    table[2, :5] = [np.inf, -np.inf, 7e4, 1e-7, 65520]
    with np.errstate(over="ignore"):
        held, numbers = stored(table, kind)
    ids = np.array([8, 0, 2], np.int64)
    out = np.zeros((3, 7), np.float32)
    layers().launch("embed", (3,), (32,), ids, held, kind, 7, out)
    np.testing.assert_array_equal(out, numbers[ids])
    if kind:
        table[4, 4] = np.nan
        bits = aligned(np.full(68, 0xABCD, np.uint16))
        layers().launch("narrow", (2,), (32,), table, 63, kind, bits)
        limited = np.clip(table, -65504, 65504) if kind == 1 else table
        dtype = np.float16 if kind == 1 else ml_dtypes.bfloat16
        back = bits[:63].view(dtype).astype(np.float32).reshape(9, 7)
        limited[4, 4] = 0
        assert np.isnan(back[4, 4])
        back[4, 4] = 0
        np.testing.assert_array_equal(back, stored(limited, kind)[1])
        assert (bits[63:] == 0xABCD).all()


def test_silu_mul_and_add_bias() -> None:
    rng = np.random.default_rng(5)
    gate, up, bias = normal(rng, 3, 100), normal(rng, 3, 100), normal(rng, 100)
    wanted = silu(gate.astype(np.float64)) * up
    layers().launch("silu_mul", (2,), (32,), gate, up, 300)
    close(gate, wanted)
    total = up + bias
    layers().launch("add_bias", (2,), (32,), up, bias, 300, 100)
    np.testing.assert_array_equal(up, total)


@pytest.mark.parametrize("threads", [32, 256])
def test_argmax(threads: int) -> None:
    nan, inf = np.nan, np.inf
    large = np.zeros(1000, np.float32)
    large[[41, 300, 999]] = 2
    large[7] = nan
    cases: list[tuple[Any, int]] = [
        (large, 7), ([nan, -3, nan], 0), ([-1, nan, nan], 1), ([nan, -inf, -inf], 0),
        (np.where(large == large, large, 0), 41), ([-inf, -inf], 0),
        ([1, inf, inf], 1), ([0.0, -0.0], 0), ([-0.0, 0.0], 0), ([5], 0),
    ]  # fmt: skip
    for logits, wanted in cases:
        best = np.full(2, -1, np.int64)
        values = np.array(logits, np.float32)
        layers().launch("argmax", (1,), (threads,), values, len(values), best)
        assert best[0] == wanted
        assert best[1] == int(values[wanted : wanted + 1].view(np.uint32)[0])


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_random_rows_have_the_bits_of_the_cpu(kind: int) -> None:
    rows, cols, low, high, scale = 5, 77, 0xDEADBEEF, 0x80000001, 0.03
    word: Any = np.uint16 if kind else np.uint32
    by_cpu, found = np.zeros(rows * cols, word), np.ones(rows * cols, word)
    cpu: Any = get_ops("cpu")
    cpu.kernels.random_rows(rows, 1, by_cpu.ctypes.data, kind, cols, low, high, scale)
    layers().launch("random_rows", (3,), (32,), found, kind, rows * cols, low, high, scale)
    np.testing.assert_array_equal(found, by_cpu)


def test_read_words_reads_all() -> None:
    words = aligned(np.random.default_rng(6).integers(0, 1 << 32, 4 * 1001, np.uint32))
    sums = np.zeros(64, np.uint32)
    layers().launch("read_words", (2,), (32,), words, 1001, sums)
    assert sums.sum(dtype=np.uint32) == words.sum(dtype=np.uint32)
