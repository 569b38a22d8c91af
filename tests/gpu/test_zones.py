"""The kernels of zones on a GPU against plain NumPy: equal bits, and attention in float64."""

from __future__ import annotations

import numpy as np
import pytest

from kvrt.backends.cuda import CudaOps
from tests.helpers.tiles import TILES
from tests.helpers.zone_layer import make_layer, send_blocks
from tests.helpers.zone_reference import errors, make_zones, received

TOLERANCE = 5e-4
"""Of attention, beside float64. The tensor cores of an H200 add up products with fewer bits than an
f32 has (2e-4 was measured); all else is f32, and on the emulator 3e-6 holds."""

SIZES = [(3, 64), (4, 128), (1, 256), (2, 16)]


def awkward(heads: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.concatenate([tile(heads, dim, 3) for tile in TILES.values()])
    return rows, rows[::-1].copy()


@pytest.mark.parametrize(("heads", "dim"), SIZES)
def test_blocks_and_errors_have_equal_bits(cuda: CudaOps, heads: int, dim: int) -> None:
    keys, values = awkward(heads, dim)
    zones = make_zones(keys, values, [129, 0, 64, 190][:heads])
    k, v, tokens, firsts, counts, of_heads = (
        cuda.to_device(part)
        for part in (keys, values, zones.tokens, zones.firsts, zones.counts, zones.heads)
    )
    of_values = cuda.empty((4, heads, len(values)))
    cuda.value_errors(v, of_values)
    for head in range(heads):
        expected = errors(np.ascontiguousarray(values[:, head]))
        assert cuda.to_host(of_values)[:, head].tobytes() == expected.tobytes()
    of_keys = cuda.empty((heads, dim, 4), np.float64)
    cuda.key_errors(k, tokens, firsts, counts, of_heads, of_keys)
    sums = np.zeros((heads, dim, 4))
    for first, count, head in zip(zones.firsts, zones.counts, zones.heads, strict=True):
        rows = zones.tokens[first : first + count]
        columns = np.ascontiguousarray(keys[rows, head].T)  # (dim, count)
        sums[head] += errors(columns).T.astype(np.float64)
    assert cuda.to_host(of_keys).tobytes() == sums.tobytes()
    runs, units, _held = send_blocks(cuda, zones, filled=False)
    cuda.pack_zones(k, v, tokens, firsts, of_heads, units)
    assert cuda.to_host(runs)[: zones.size].tobytes() == b"".join(zones.runs)
    places = np.cumsum([0, *zones.counts])
    for is_value in (False, True):
        out = cuda.empty((int(places[-1]), heads, dim))
        cuda.unpack_zones(units, of_heads, cuda.to_device(places[:-1]), is_value, out)
        got = cuda.to_host(out)
        for unit, head in enumerate(zones.heads):
            np.testing.assert_allclose(
                got[places[unit] : places[unit + 1], head],
                zones.decoded[unit][is_value], rtol=2e-7, atol=1e-30,
            )  # fmt: skip


@pytest.mark.parametrize(("dim", "group"), [(64, 3), (80, 9), (128, 4), (128, 8), (256, 4)])
def test_attention(cuda: CudaOps, dim: int, group: int) -> None:
    rng = np.random.default_rng(dim + group)
    keys, values = rng.normal(0, 1, (2, 700, 5, dim)).astype(np.float32)
    zones = make_zones(keys, values, [600, 0, 1, 131, 64])
    layer = make_layer(cuda, zones, 5, dim, 1, room=150)
    q = rng.normal(0, 1, (5 * group, dim)).astype(np.float32)
    for tail in (1, 36, 64, 151):
        layer.set_tail(tail)
        found = []
        for _ in range(10):
            out = cuda.empty(q.shape)
            cuda.attend(cuda.to_device(q), layer.view, dim**-0.5, None, out)
            found.append(cuda.to_host(out))
        expected = layer.expected(q, dim**-0.5)
        assert np.linalg.norm(found[0] - expected) < TOLERANCE * np.linalg.norm(expected)
        assert len({out.tobytes() for out in found}) == 1


@pytest.mark.parametrize(
    ("n", "m", "group", "dim"),
    [(32, 2000, 4, 128), (40, 40, 3, 64), (3, 300, 1, 256), (300, 700, 4, 128)],
)
def test_attention_received(cuda: CudaOps, n: int, m: int, group: int, dim: int) -> None:
    rng = np.random.default_rng(n + m)
    q, keys = (
        rng.normal(0, 1, shape).astype(np.float16).astype(np.float32)
        for shape in ((n, 2 * group, dim), (m, 2, dim))
    )
    found = []
    for _ in range(2):
        out = cuda.to_device(np.zeros((2, m), np.float32))
        cuda.attention_received(cuda.to_device(q), cuda.to_device(keys), dim**-0.5, out)
        found.append(cuda.to_host(out))
    np.testing.assert_allclose(found[0], received(q, keys, dim**-0.5), rtol=1e-3, atol=1e-5)
    assert found[0].tobytes() == found[1].tobytes()
