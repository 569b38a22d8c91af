"""Projections of one token on a GPU against float64, launched with overlap, and as a graph."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvrt.backends.cuda import CudaOps
from kvrt.backends.ops import Linear

EPS = 1e-5

# Sums of f32, in another order.
TOLERANCE = 3e-6


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(
    ("cols", "sizes"),
    [
        (4096, (4096, 1024, 1024)), (14336, (4096,)), (28672, (64,)), (8192, (1000,)),
        (2048, (2049,)), (576, (576, 192, 192)), (1535, (37, 5, 9)), (100, (3,)),
    ],
)  # fmt: skip
def test_they_are_matrix_products(
    cuda: CudaOps, dtype: Any, cols: int, sizes: tuple[int, ...]
) -> None:
    rng, xp = np.random.default_rng(cols), cuda.device.xp
    x = rng.normal(0, 1, (1, cols)).astype(np.float32)
    gains = rng.uniform(0.5, 1.5, cols).astype(np.float32)
    weights = [
        rng.normal(0, cols**-0.5, (rows, cols)).astype(np.float32).astype(dtype)
        for rows in (*sizes, sizes[0])
    ]
    biases = [rng.normal(0, 1, rows).astype(np.float32) for rows in sizes]
    held, norm = cuda.to_device(x), (cuda.to_device(gains), EPS)
    layers = [
        Linear(cuda.matrix(w), cuda.to_device(b)) for w, b in zip(weights, biases, strict=False)
    ]
    up = Linear(cuda.matrix(weights[-1]))
    outs = [xp.full((1, rows), np.nan, np.float32) for rows in (*sizes, sizes[0])]
    total = xp.zeros((1, sizes[0]), np.float32)

    def run() -> None:
        cuda.linear(held, layers, outs[:-1], norm=norm)
        cuda.swiglu(held, layers[0], up, outs[-1], norm=norm)
        cuda.linear_add(held, layers[0], total)

    stream = xp.cuda.Stream(non_blocking=True)
    cuda.device.synchronize()
    with stream:
        run()
        first = [out.get() for out in (*outs, total)]
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        total.fill(0)
        graph.launch(stream)
        second = [out.get() for out in (*outs, total)]

    wide = [w.astype(np.float64) for w in weights]
    ready = x / np.sqrt((x.astype(np.float64) ** 2).mean() + EPS) * gains
    wanted = [ready @ w.T + b for w, b in zip(wide, biases, strict=False)]
    gate = wanted[0]
    wanted += [gate / (1 + np.exp(-gate)) * (ready @ wide[-1].T), x @ wide[0].T + biases[0]]
    for found, again, numbers in zip(first, second, wanted, strict=True):
        assert error(found, numbers) < TOLERANCE
        np.testing.assert_array_equal(again, found)
