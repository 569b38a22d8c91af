"""Attention on the CPU over blocks of zones and the tail, and the attention that tokens receive."""

import numpy as np
import pytest

from kvrt.backends import cpu as cpu_module
from kvrt.backends.cpu import CpuOps
from kvrt.errors import KernelError
from tests.helpers.compare import assert_close
from tests.helpers.refs import attention
from tests.helpers.tolerances import tolerance
from tests.helpers.zone_layer import make_layer
from tests.helpers.zone_reference import make_zones
from tests.helpers.zones import (
    Segment,
    Tail,
    attended_zones,
    new_tail,
    pack,
    random_segment,
    uniform_segment,
    zone_view,
)


def zone_attention(
    ops: CpuOps, segments: list[Segment], tail: Tail, group: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel gives, and what it should: (heads, dim) each."""
    kv_heads, _, dim = tail.keys.shape
    rng = np.random.default_rng(seed)
    q = 2 * rng.standard_normal((kv_heads * group, dim), dtype=np.float32)
    out = ops.to_device(np.full(q.shape, np.nan, np.float32))
    packed = pack(ops, segments) if segments[0].keys.size else None  # views hold addresses alone
    seen = zone_view(ops, tail, packed)
    scale = dim**-0.5
    for _ in range(2):  # what it counts with is as it was
        ops.attend(ops.to_device(q), seen, scale, None, out)
    rows = (tail.keys[:, : tail.count], tail.values[:, : tail.count])
    return out, attended_zones(q, segments, rows, scale)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dim", "group", "kv_heads", "count", "tail_rows"),
    [
        (16, 1, 1, 1, 1), (16, 9, 2, 200, 3), (64, 3, 3, 500, 37), (64, 4, 8, 300, 64),
        (80, 2, 2, 129, 65), (80, 5, 1, 64, 1), (128, 4, 2, 700, 36), (128, 1, 1, 65, 130),
        (128, 8, 1, 30, 1), (256, 7, 2, 100, 10), (64, 6, 2, 2, 2),
    ],
)  # fmt: skip
def test_attention_over_blocks_and_tail(
    dim: int, group: int, kv_heads: int, count: int, tail_rows: int, threads: int
) -> None:
    ops = CpuOps(threads=threads)
    rng = np.random.default_rng(dim + count)
    segment = random_segment(rng, count, kv_heads, dim)
    tail = new_tail(ops, rng, kv_heads, tail_rows, dim)
    out, expected = zone_attention(ops, [segment], tail, group)
    assert_close(out, expected, tolerance("attend", "f32"))


@pytest.mark.parametrize("count", [*range(1, 9), 31, 33, 62, 63, 64, 65, 127, 128, 129])
def test_attention_over_a_last_block_of_any_length(ops: CpuOps, count: int) -> None:
    rng = np.random.default_rng(count)
    segment = random_segment(rng, count, 1, 64)
    segment.token_widths[:] = rng.choice([2, 4, 8, 16], (1, count))
    # Blocks and no rows in the tail.
    tail = new_tail(ops, rng, 1, 0, 64)
    out, expected = zone_attention(ops, [segment], tail, 3)
    assert_close(out, expected, tolerance("attend", "f32"))


def test_attention_over_several_segments(ops: CpuOps) -> None:
    rng = np.random.default_rng(8)
    segments = [random_segment(rng, count, 3, 64) for count in (130, 5, 64)]
    tail = new_tail(ops, rng, 3, 40, 64)
    out, expected = zone_attention(ops, segments, tail, 3)
    assert_close(out, expected, tolerance("attend", "f32"))


@pytest.mark.parametrize("head", [0, 1, 2])
def test_attention_with_a_head_without_blocks(ops: CpuOps, head: int) -> None:
    rng = np.random.default_rng(9)
    segment = random_segment(rng, 150, 3, 64)
    segment.token_widths[head] = 0
    tail = new_tail(ops, rng, 3, 36, 64)
    out, expected = zone_attention(ops, [segment], tail, 3)
    assert_close(out, expected, tolerance("attend", "f32"))


@pytest.mark.parametrize("kept", [0, 1])
def test_attention_with_hardly_a_channel(ops: CpuOps, kept: int) -> None:
    rng = np.random.default_rng(10)
    segment = random_segment(rng, 150, 2, 128)
    segment.key_widths[:] = 0
    segment.key_widths[:, 100 : 100 + kept] = 4
    tail = new_tail(ops, rng, 2, 5, 128)
    out, expected = zone_attention(ops, [segment], tail, 2)
    assert_close(out, expected, tolerance("attend", "f32"))


def test_attention_before_anything_is_packed(ops: CpuOps) -> None:
    """Also with a directory that has no block."""
    rng = np.random.default_rng(11)
    nothing = random_segment(rng, 0, 2, 64)
    evicted = random_segment(rng, 20, 2, 64)
    evicted.token_widths[:] = 0
    tail = new_tail(ops, rng, 2, 70, 64)
    for segment in (nothing, evicted):
        out, expected = zone_attention(ops, [segment], tail, 3)
        assert_close(out, expected, tolerance("attend", "f32"))


def test_a_far_better_key_takes_all(ops: CpuOps) -> None:
    """Scores of 1e4 in a block whose neighbours score as little: nothing overflows."""
    rng = np.random.default_rng(12)
    segment = uniform_segment(100, 64, 8, 16)
    segment.keys[50] *= 1000
    tail = new_tail(ops, rng, 1, 5, 64)
    out, expected = zone_attention(ops, [segment], tail, 1)
    assert np.isfinite(out).all()
    assert_close(out, expected, tolerance("attend", "f32"))


@pytest.mark.parametrize("dim", [16, 48, 80, 128])
def test_values_that_are_rotated(ops: CpuOps, dim: int) -> None:
    rng = np.random.default_rng(dim)
    keys, values = rng.standard_normal((2, 200, 2, dim), dtype=np.float32)
    layer = make_layer(ops, make_zones(keys, values, [90, 70]), 2, dim, 37, block=dim & -dim)
    q = rng.standard_normal((6, dim), dtype=np.float32)
    out = ops.empty(q.shape)
    ops.attend(ops.to_device(q), layer.view, dim**-0.5, None, out)
    expected = layer.expected(q, dim**-0.5)
    assert_close(out, expected, tolerance("attend", "f32"))


def test_a_window_is_refused(ops: CpuOps) -> None:
    tail = new_tail(ops, np.random.default_rng(0), 1, 5, 16)
    q = ops.to_device(np.ones((1, 16), np.float32))
    with pytest.raises(KernelError, match="window of 7"):
        ops.attend(q, zone_view(ops, tail, None), 1.0, 7, q)


# Attention received


@pytest.mark.parametrize(
    ("n", "total", "kv_heads", "group", "dim"),
    [
        (32, 500, 2, 3, 64), (1, 1, 1, 1, 16), (1, 300, 1, 9, 80), (70, 70, 3, 2, 64),
        (5, 40, 2, 1, 128),
    ],
)  # fmt: skip
@pytest.mark.parametrize("room", [1 << 26, 1])
def test_attention_received(
    ops: CpuOps,
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    total: int,
    kv_heads: int,
    group: int,
    dim: int,
    room: int,
) -> None:
    """Also where there is room for one row of scores only; it adds to what is there."""
    monkeypatch.setattr(cpu_module, "_RECEIVED_ELEMENTS", room)
    rng = np.random.default_rng(total)
    q = 2 * rng.standard_normal((n, kv_heads * group, dim), dtype=np.float32)
    keys = rng.standard_normal((total, kv_heads, dim), dtype=np.float32)
    out = ops.to_device(np.ones((kv_heads, total), np.float32))
    asked = q.copy()
    ops.attention_received(ops.to_device(asked), ops.to_device(keys), dim**-0.5, out)
    _, weights = attention(q, keys, keys, None)  # (heads, n, total)
    expected = 1 + weights.reshape(kv_heads, group * n, total).sum(1)
    assert_close(out, expected, tolerance("received", "f32"))
    assert np.array_equal(asked, q)
    assert_close(out.sum(1) - total, np.full(kv_heads, group * n), tolerance("received", "sum"))


def test_queries_in_pieces_receive_the_same(ops: CpuOps) -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((100, 4, 64), dtype=np.float32)
    keys = rng.standard_normal((100, 2, 64), dtype=np.float32)
    whole, pieces = (ops.to_device(np.zeros((2, 100), np.float32)) for _ in range(2))
    ops.attention_received(ops.to_device(q), ops.to_device(keys), 0.125, whole)
    for start in range(0, 100, 30):
        end = min(start + 30, 100)
        part = ops.to_device(np.zeros((2, end), np.float32))
        ops.attention_received(ops.to_device(q[start:end]), ops.to_device(keys[:end]), 0.125, part)
        pieces[:, :end] += part
    assert_close(pieces, whole, tolerance("received", "f32"))
