"""The CUDA kernels of zones, emulated, against plain NumPy: equal bytes, and attention in f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvrt.backends.cuda import CudaOps
from kvrt.backends.cuda_zones import least_arena, zone_defines
from kvrt.errors import KernelError
from kvrt.trizone.layout import block_bytes, unpack_counts
from tests.emulator import COMPILER
from tests.helpers.emulated_device import emulated_ops
from tests.helpers.tiles import TILES
from tests.helpers.zone_layer import make_layer, send_blocks
from tests.helpers.zone_reference import Zones, errors, make_zones, received

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

AWKWARD = (
    "gaussian",
    "outlier_channels",
    "ties",
    "wild",
    "constant_channels",
    "zeros",
    "subnormal",
)
"""Tiles of numbers that are hard to round."""


@pytest.fixture(scope="module")
def cuda() -> CudaOps:
    return emulated_ops()


@pytest.fixture(scope="module", params=[False, True], ids=["lanes", "engine"])
def copying(request: pytest.FixtureRequest) -> CudaOps:
    """Blocks are copied by lanes, as before sm_90, or by the copy engine."""
    return emulated_ops(bulk=request.param)


def rows_of(kv_heads: int, dim: int, names: tuple[str, ...] = AWKWARD) -> np.ndarray:
    """(64 * names, kv_heads, dim) f32."""
    return np.concatenate([TILES[name](kv_heads, dim, 3) for name in names])


def pair(kv_heads: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    return rows_of(kv_heads, dim), rows_of(kv_heads, dim)[::-1].copy()


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 64), (2, 80), (2, 128), (1, 256)])
def test_value_errors_have_equal_bits(cuda: CudaOps, heads: int, dim: int) -> None:
    values = rows_of(heads, dim)[:-5]  # the last rows of a block of threads are missing
    out = np.full((4, heads, len(values)), np.nan, np.float32)
    cuda.value_errors(values, out)
    for head in range(heads):
        expected = errors(np.ascontiguousarray(values[:, head]))
        assert out[:, head].tobytes() == expected.tobytes()


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 80), (1, 256)])
def test_key_errors_have_equal_bits(cuda: CudaOps, heads: int, dim: int) -> None:
    keys, values = pair(heads, dim)
    zones = make_zones(keys, values, [200, 0, 77][:heads])
    out = np.full((heads, dim, 4), np.nan)
    lists = zones.tokens, zones.firsts, zones.counts, zones.heads
    cuda.key_errors(keys, *lists, out)
    expected = np.zeros((heads, dim, 4))
    for first, count, head in zip(zones.firsts, zones.counts, zones.heads, strict=True):
        tokens = zones.tokens[first : first + count]
        columns = np.ascontiguousarray(keys[tokens, head].T)  # (dim, count)
        expected[head] += errors(columns).T.astype(np.float64)
    assert out.tobytes() == expected.tobytes()


def kept(kv_heads: int) -> list[int]:
    """Ragged: whole blocks, one token over, none, fewer than a row of four."""
    return [129, 0, 64, 3, 190][:kv_heads]


PACKED = [(1, 16), (3, 64), (2, 80), (4, 128), (1, 256)]


@pytest.mark.parametrize(("heads", "dim"), PACKED)
def test_packed_blocks_have_equal_bytes(cuda: CudaOps, heads: int, dim: int) -> None:
    keys, values = pair(heads, dim)
    zones = make_zones(keys, values, kept(heads))
    runs, units, _held = send_blocks(cuda, zones, filled=False)
    cuda.pack_zones(keys, values, zones.tokens, zones.firsts, zones.heads, units)
    assert runs[: zones.size].tobytes() == b"".join(zones.runs)
    assert not runs[zones.size :].any()


@pytest.mark.parametrize(("heads", "dim"), PACKED)
def test_unpacked_blocks(cuda: CudaOps, heads: int, dim: int) -> None:
    zones = make_zones(*pair(heads, dim), kept(heads))
    _runs, units, _held = send_blocks(cuda, zones, filled=True)
    rows = np.cumsum([2, *zones.counts])[:-1]  # each block behind the one before
    for is_value in (False, True):
        out = np.full((int(zones.counts.sum()) + 3, heads, dim), np.nan, np.float32)
        cuda.unpack_zones(units, zones.heads, rows, is_value, out)
        written = np.zeros(out.shape, bool)
        for unit, row in enumerate(rows):
            place = slice(row, row + zones.counts[unit]), zones.heads[unit]
            written[place] = True
            np.testing.assert_allclose(
                out[place], zones.decoded[unit][is_value], rtol=2e-7, atol=1e-30
            )
        assert np.isnan(out[~written]).all()


def test_the_layout_gives_the_bytes_of_runs() -> None:
    zones = make_zones(*pair(2, 80), kept(2))
    tokens, channels = (unpack_counts(zones.shapes[:, side]) for side in range(2))
    sizes = np.array([len(run) for run in zones.runs])
    np.testing.assert_array_equal(block_bytes(tokens, channels, 80), sizes)


def attend(ops: CudaOps, layer: Any, group: int, spread: float = 1.0) -> tuple[Any, Any]:
    """What the kernel gives, and what is expected: (heads, dim)."""
    heads, dim = group * layer.view.num_kv_heads, layer.view.head_dim
    q = np.random.default_rng(heads).normal(0, spread, (heads, dim)).astype(np.float32)
    out = np.full((heads, dim), np.nan, np.float32)
    ops.attend(q, layer.view, dim**-0.5, None, out)
    for use in ("partials", "arrivals"):
        assert all(not held.any() for (name, _), held in ops._buffers.items() if name == use)
    return out, layer.expected(q, dim**-0.5)


def check(out: np.ndarray, expected: np.ndarray) -> None:
    """All sums are in f32."""
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error < 3e-6


def smooth(kv_heads: int, dim: int, n: int = 500) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(dim)
    parts = rng.normal(0, 1, (2, n, kv_heads, dim)) + rng.normal(0, 1, (2, 1, kv_heads, dim))
    keys, values = parts.astype(np.float32)
    return keys, values


def zones_of(kv_heads: int, dim: int, kept: list[int], **options: Any) -> Zones:
    return make_zones(*smooth(kv_heads, dim), kept, **options)


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 144, 256])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_attention_by_size(cuda: CudaOps, dim: int, group: int) -> None:
    layer = make_layer(cuda, zones_of(2, dim, [131, 64]), 2, dim, 37)
    check(*attend(cuda, layer, group))


@pytest.mark.parametrize("group", [8, 9, 17])
def test_attention_of_large_groups(cuda: CudaOps, group: int) -> None:
    check(*attend(cuda, make_layer(cuda, zones_of(1, 64, [200]), 1, 64, 70), group))


@pytest.mark.parametrize(
    ("kept", "tail"),
    [
        ([300, 0, 1], 37),  # a head that has the tail alone
        ([300, 2, 77], 0),  # no tail
        ([0, 0, 0], 65),  # no directory
        ([500, 1, 0, 130, 64, 63], 1),  # more heads than multiprocessors
        ([1], 1),
        ([500], 200),
        ([0, 65, 1] * 12, 1),  # more heads than lanes
        ([3, 1, 130] * 11, 0),
    ],
)
def test_attention_over_ragged_heads(copying: CudaOps, kept: list[int], tail: int) -> None:
    heads = len(kept)
    layer = make_layer(copying, zones_of(heads, 64, kept), heads, 64, tail)
    check(*attend(copying, layer, 2))


@pytest.mark.parametrize(
    ("dim", "widths", "tail"),
    [
        (16, (4, 2), 1),  # two cells a team
        (16, (4, 2), 300),  # and rows of the tail after blocks
        (64, (16, 8, 4, 2), 70),  # one
        (128, (16,), 40),  # of three teams
    ],
)
def test_attention_in_rounds(
    copying: CudaOps, dim: int, widths: tuple[int, ...], tail: int
) -> None:
    """A block of threads has more units than find room at once: one for each head here."""
    heads = copying.device.multiprocessors + 1
    kept = [500, *[1] * (heads - 1)]
    zones = zones_of(heads, dim, kept, v_widths=widths, k_widths=widths)
    check(*attend(copying, make_layer(copying, zones, heads, dim, tail), 4))


@pytest.mark.parametrize(("dim", "group"), [(128, 4), (64, 8), (80, 3)])
def test_attention_by_many_blocks_of_threads(dim: int, group: int) -> None:
    """More of one head than hand over their states at once."""
    ops = emulated_ops(bulk=True)
    ops.device.multiprocessors = 55
    for kept in ([64 * 50], [64 * 24, 64 * 21 + 1]):
        zones = make_zones(*smooth(len(kept), dim, 64 * 50), kept, v_widths=(4,), k_widths=(2, 0))
        check(*attend(ops, make_layer(ops, zones, len(kept), dim, 37), group))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 63, 64, 65])
def test_attention_over_short_blocks(cuda: CudaOps, tokens: int) -> None:
    check(*attend(cuda, make_layer(cuda, zones_of(1, 80, [tokens]), 1, 80, 1), 3))


@pytest.mark.parametrize("width", [16, 8, 4, 2])
def test_attention_over_one_width(cuda: CudaOps, width: int) -> None:
    zones = zones_of(1, 128, [150], v_widths=(width,), k_widths=(width,))
    check(*attend(cuda, make_layer(cuda, zones, 1, 128, 5), 4))


@pytest.mark.parametrize("width", [16, 8, 4, 2])
def test_attention_with_few_channels(cuda: CudaOps, width: int) -> None:
    """Of 16 channels that are taken at once, most are behind the last one."""
    zones = zones_of(1, 128, [150], k_widths=(width, *[0] * 60))
    check(*attend(cuda, make_layer(cuda, zones, 1, 128, 5), 4))


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 256])
def test_attention_over_rotated_values(cuda: CudaOps, dim: int) -> None:
    zones = zones_of(2, dim, [90, 70])
    check(*attend(cuda, make_layer(cuda, zones, 2, dim, 37, block=dim & -dim), 3))


@pytest.mark.parametrize("tokens", [1, 17, 33, 49])
def test_attention_over_few_exact_values(cuda: CudaOps, tokens: int) -> None:
    """What lies behind the last row may be a NaN."""
    zones = zones_of(1, 64, [tokens], v_widths=(16,), k_widths=(16, 2, 0))
    check(*attend(cuda, make_layer(cuda, zones, 1, 64, 1), 4))


@pytest.mark.parametrize("group", range(1, 10))
def test_attention_by_group(cuda: CudaOps, group: int) -> None:
    check(*attend(cuda, make_layer(cuda, zones_of(2, 16, [70, 3]), 2, 16, 9), group))


@pytest.mark.parametrize(("size", "query"), [(2e4, 1e-4), (3e-6, 1e5), (1.0, 1e-30), (1.0, 0.0)])
def test_attention_by_size_of_numbers(cuda: CudaOps, size: float, query: float) -> None:
    """Scales from what halves hardly have to what they just have."""
    keys, values = smooth(1, 64)
    zones = make_zones(keys * np.float32(size), values * np.float32(size), [130])
    layer = make_layer(cuda, zones, 1, 64, 0)
    check(*attend(cuda, layer, 4, query))
    check(*attend(cuda, layer, 8, query))


def test_attention_over_numbers_of_many_sizes(cuda: CudaOps) -> None:
    """Scales of channels and tokens are far apart, and the query makes up for those of channels."""
    keys, values = smooth(1, 64)
    of_channels = np.logspace(-2, 2, 64, dtype=np.float32)
    of_tokens = np.logspace(-3, 3, len(values), dtype=np.float32)[:, None, None]
    zones = make_zones(keys * of_channels, values * of_tokens, [200])
    layer = make_layer(cuda, zones, 1, 64, 0)
    q = np.random.default_rng(3).normal(0, 1, (4, 64)).astype(np.float32) / of_channels
    out = np.empty((4, 64), np.float32)
    cuda.attend(q, layer.view, 0.125, None, out)
    check(out, layer.expected(q, 0.125))


def test_attention_with_sharp_scores(cuda: CudaOps) -> None:
    """The maximum moves from unit to unit, by more than an exponential holds."""
    out, expected = attend(cuda, make_layer(cuda, zones_of(2, 64, [400, 90]), 2, 64, 130), 4, 60.0)
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < 3e-5


def test_the_tail_grows_while_launches_stay_the_same(copying: CudaOps) -> None:
    layer = make_layer(copying, zones_of(2, 64, [70, 10]), 2, 64, 1, room=140)
    for tokens in (1, 63, 64, 65, 129, 140):
        layer.set_tail(tokens)
        check(*attend(copying, layer, 2))


def test_a_nan_shows(cuda: CudaOps) -> None:
    layer = make_layer(cuda, zones_of(2, 64, [70, 10]), 2, 64, 3)
    q = np.ones((4, 64), np.float32)
    q[1, 5] = np.nan
    out = np.zeros((4, 64), np.float32)
    cuda.attend(q, layer.view, 0.125, None, out)
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2, 3]]).all()


def test_what_attention_refuses(cuda: CudaOps) -> None:
    layer = make_layer(cuda, zones_of(1, 64, [70]), 1, 64, 3)
    q = np.ones((1, 64), np.float32)
    with pytest.raises(KernelError, match="window"):
        cuda.attend(q, layer.view, 0.125, 32, q.copy())
    with pytest.raises(KernelError, match="this device has 60000"):
        zone_defines(256, 8, 60000)


@pytest.mark.parametrize(
    ("dim", "group", "shared", "teams"),
    [(128, 4, 227, 7), (128, 8, 227, 7), (256, 8, 227, 4), (128, 4, 99, 7), (256, 8, 99, 2)],
)
def test_shapes_fit(dim: int, group: int, shared: int, teams: int) -> None:
    defines = zone_defines(dim, group, shared * 1024)
    assert defines["TEAMS"] == teams
    assert defines["ARENA_BYTES"] >= least_arena(dim, defines["HEADS"], teams)
    assert defines["ARENA_BYTES"] < defines["SHARED_BYTES"] < shared * 1024


@pytest.mark.parametrize(
    ("n", "m", "group", "dim"),
    [(1, 1, 1, 16), (5, 70, 3, 64), (32, 200, 4, 128), (40, 40, 4, 80), (3, 64, 1, 256)],
)
def test_attention_received(cuda: CudaOps, n: int, m: int, group: int, dim: int) -> None:
    rng = np.random.default_rng(n + m)
    q, keys = (rng.normal(0, 1, shape) for shape in ((n, 2 * group, dim), (m, 2, dim)))
    q, keys = (half.astype(np.float16).astype(np.float32) for half in (q, keys))
    out = np.full((2, m), 0.25, np.float32)
    cuda.attention_received(q, keys, dim**-0.5, out)
    expected = received(q, keys, dim**-0.5)
    np.testing.assert_allclose(out - 0.25, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose((out - 0.25).sum(axis=1), n * group, rtol=1e-4)


def test_attention_received_from_many_tokens(cuda: CudaOps) -> None:
    """More rows than are held at once, and more tokens than are taken at once."""
    rng = np.random.default_rng(1)
    q, keys = (
        rng.normal(0, 1, shape).astype(np.float16).astype(np.float32)
        for shape in ((270, 1, 16), (300, 1, 16))
    )
    out = np.zeros((1, 300), np.float32)
    cuda.attention_received(q, keys, 0.25, out)
    np.testing.assert_allclose(out, received(q, keys, 0.25), rtol=1e-4, atol=1e-5)


def test_nothing_to_do(cuda: CudaOps) -> None:
    """A prompt without candidates."""
    none = np.empty(0, np.int64)
    rows = np.empty((0, 2, 64), np.float32)
    out = np.full((2, 64, 4), np.nan)
    cuda.value_errors(rows, np.empty((4, 2, 0), np.float32))
    cuda.key_errors(rows, none, none, none, none, out)
    assert not out.any()
    cuda.pack_zones(rows, rows, none, none, none, none.reshape(0, 4))
    cuda.unpack_zones(none.reshape(0, 4), none, none, True, rows)


@pytest.mark.parametrize("dim", [8, 40, 272])
def test_sizes_of_heads_that_are_refused(cuda: CudaOps, dim: int) -> None:
    rows = np.zeros((1, 1, dim), np.float32)
    with pytest.raises(KernelError, match=f"{dim}"):
        cuda.value_errors(rows, np.zeros((4, 1, 1), np.float32))
    with pytest.raises(KernelError, match=f"{dim}"):
        cuda.attention_received(rows, rows, 1.0, np.zeros((1, 1), np.float32))
