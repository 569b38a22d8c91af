"""Blocks of zones on the CPU: their bytes, what they give back, what widths cost; the layout."""

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.errors import CodecError, KernelError
from kvrt.trizone import layout
from tests.helpers.compare import assert_close
from tests.helpers.tolerances import EXACT, tolerance
from tests.helpers.zones import (
    GUARD,
    Packed,
    Segment,
    channels_of,
    counts_of,
    ordered_sum,
    pack,
    plain_levels,
    random_segment,
    reference_blocks,
    uniform_segment,
    units_of,
)

DIMS = (16, 64, 80, 128, 256)


def assert_packed(ops: CpuOps, segments: list[Segment]) -> Packed:
    """The runs are the reference's, of the size that the layout says, and nothing else changed."""
    packed = pack(ops, segments)
    expected = reference_blocks(segments)
    assert packed.sizes == [len(block.run) for block in expected]
    for unit, got, block in zip(units_of(segments), packed.runs(ops), expected, strict=True):
        assert got == block.run, f"block of head {unit.head}, {len(unit.tokens)} tokens"
    assert (packed.outside(ops) == GUARD).all()
    return packed


# Packing


@pytest.mark.parametrize("dim", DIMS)
def test_runs_are_those_of_the_reference(ops: CpuOps, dim: int) -> None:
    rng = np.random.default_rng(dim)
    segment = random_segment(rng, 150, 3, dim)
    packed = assert_packed(ops, [segment])
    assert len(packed.sizes) == sum(-(-np.count_nonzero(w) // 64) for w in segment.token_widths)


def test_segments_of_a_head_follow_one_another(ops: CpuOps) -> None:
    rng = np.random.default_rng(5)
    segments = [random_segment(rng, count, 2, 64) for count in (100, 1, 70)]
    packed = assert_packed(ops, segments)
    assert packed.starts.tolist()[0] == 0 and packed.starts.tolist()[-1] == len(packed.sizes)
    assert sorted(packed.heads.tolist()) == packed.heads.tolist()


@pytest.mark.parametrize("count", range(1, 65))
def test_blocks_of_every_length(ops: CpuOps, count: int) -> None:
    rng = np.random.default_rng(count)
    segment = random_segment(rng, count, 1, 16)
    segment.token_widths[:] = rng.choice([2, 4, 8, 16], (1, count))
    packed = assert_packed(ops, [segment])
    assert len(packed.sizes) == 1


@pytest.mark.parametrize("key_width", [2, 4, 8, 16])
@pytest.mark.parametrize("token_width", [2, 4, 8, 16])
def test_one_width_alone(ops: CpuOps, token_width: int, key_width: int) -> None:
    assert_packed(ops, [uniform_segment(67, 32, token_width, key_width)])


@pytest.mark.parametrize("channel", [0, 77, 127])
def test_one_channel_kept(ops: CpuOps, channel: int) -> None:
    segment = uniform_segment(9, 128, 4, 0)
    segment.key_widths[0, channel] = 2
    assert_packed(ops, [segment])


def test_no_channel_kept(ops: CpuOps) -> None:
    assert_packed(ops, [uniform_segment(9, 128, 4, 0)])


def test_numbers_at_the_ends_of_what_f16_holds(ops: CpuOps) -> None:
    """Constants, ranges beyond f16 and ranges that vanish in it, ties between two codes."""
    rows = np.zeros((12, 32), np.float32)
    rows[0] = 3.0
    rows[1] = np.linspace(-1e5, 1e5, 32)
    rows[2] = np.linspace(7e4, 2e5, 32)
    rows[3] = np.linspace(1e-8, 3e-8, 32)
    rows[4] = np.arange(32) % 4
    rows[5] = np.arange(32) / 2
    rows[6] = -1e6
    rows[7, 5] = 1e-3
    rows[8] = 1000 + np.arange(32) / 256
    rows[9] = np.linspace(0, 255, 32)
    rows[10] = np.where(np.arange(32) == 3, 500.0, 0.01 * np.arange(32))
    for width in (2, 4, 8, 16):
        segment = uniform_segment(32, 32, width, width)
        segment.values[:12, 0] = rows
        segment.keys[:, 0, :12] = rows.T
        assert_packed(ops, [segment])


def test_the_first_of_equally_good_ranges_wins(ops: CpuOps) -> None:
    """Near 1000 f16 has steps of 0.5: all minima are 1000.5, all codes 0, only scales differ."""
    segment = uniform_segment(3, 32, 2, 16)
    segment.values[:] = np.linspace(1000.3125, 1000.4375, 32, dtype=np.float32)
    packed = assert_packed(ops, [segment])
    scale = np.frombuffer(packed.runs(ops)[0][3 * 8 :][:2], np.float16)
    assert scale == np.float16(0.125 / 3)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_scales_half_way_between_two_of_f16(ops: CpuOps, width: int) -> None:
    """An arithmetic that is off by the last bit of float32 rounds some of them the other way."""
    steps = 2**width - 1
    odd = 1 + (2 * np.arange(64, dtype=np.float32) + 1) / 2048  # (64,) between 1 and 1.0625
    levels = np.round(np.linspace(0, 1, 64)[:, None] * steps).astype(np.float32) * odd
    segment = uniform_segment(64, 64, width, width)
    segment.keys[:, 0] = levels
    segment.values[:, 0] = levels.T
    assert_packed(ops, [segment])


def test_bytes_do_not_depend_on_threads(ops: CpuOps) -> None:
    segment = random_segment(np.random.default_rng(3), 300, 3, 64)
    alone = CpuOps(threads=1)
    assert pack(alone, [segment]).runs(alone) == pack(ops, [segment]).runs(ops)


# Unpacking


@pytest.mark.parametrize("dim", DIMS)
def test_unpacking_gives_what_the_codes_mean(ops: CpuOps, dim: int) -> None:
    rng = np.random.default_rng(dim)
    segments = [random_segment(rng, count, 3, dim) for count in (90, 70)]
    units, expected = units_of(segments), reference_blocks(segments)
    packed = pack(ops, segments)
    # Blocks lie behind one another, in another order than the directory's, with a row between.
    order = rng.permutation(len(units))
    rows = np.zeros(len(units), np.int64)
    used = 0
    for i in order:
        rows[i] = used
        used += len(units[i].tokens) + 1
    for is_value in (False, True):
        out = ops.to_device(np.full((used, 3, dim), np.nan, np.float32))
        ops.unpack_zones(packed.units, packed.heads, ops.to_device(rows), is_value, out)
        for i, unit in enumerate(units):
            part = out[rows[i] : rows[i] + len(unit.tokens), unit.head]
            want = expected[i].values if is_value else expected[i].keys
            assert_close(part, want, tolerance("unpack", "f32"))
            out[rows[i] : rows[i] + len(unit.tokens), unit.head] = np.nan
        assert np.isnan(out).all()


def test_f16_gives_back_f16(ops: CpuOps) -> None:
    segment = uniform_segment(70, 64, 16, 16)
    packed = pack(ops, [segment])
    for is_value, source in ((False, segment.keys), (True, segment.values)):
        out = ops.empty((70, 1, 64))
        rows = ops.to_device(np.array([0, 64]))
        ops.unpack_zones(packed.units, packed.heads, rows, is_value, out)
        assert_close(out, source.astype(np.float16).astype(np.float32), EXACT)


@pytest.mark.parametrize("offset", [5.0, 8.0])
def test_offset_channels_keep_their_spread(ops: CpuOps, offset: float) -> None:
    """Squared error over squared spread; an integer zero point, held to the codes, fails it."""
    segment = uniform_segment(640, 128, 8, 8)
    segment.keys[:] += offset
    segment.values[:] -= offset
    packed = pack(ops, [segment])
    rows = ops.to_device(np.arange(0, 640, 64))
    for is_value, source in ((False, segment.keys), (True, segment.values)):
        out = ops.empty((640, 1, 128))
        ops.unpack_zones(packed.units, packed.heads, rows, is_value, out)
        assert ((out - source) ** 2).mean() < 1e-3 * source.var()
        axis = 2 if is_value else 0
        low, high = source.min(axis, keepdims=True), source.max(axis, keepdims=True)
        scale = (high - low) / 255
        zero = np.clip(np.rint(-low / scale), 0, 255)
        codes = np.clip(np.rint(source / scale) + zero, 0, 255)
        assert ((scale * (codes - zero) - source) ** 2).mean() > 1e-3 * source.var()


# Errors


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("count", [1, 63, 130])
def test_value_errors_are_those_of_the_reference(ops: CpuOps, dim: int, count: int) -> None:
    rng = np.random.default_rng(count)
    values = rng.standard_normal((count, 2, dim), dtype=np.float32) * spreads(rng, count)
    out = ops.to_device(np.full((4, 2, count), np.nan, np.float32))
    ops.value_errors(ops.to_device(values), out)
    expected = np.zeros_like(out)
    for t in range(count):
        for head in range(2):
            x = values[t, head]
            errors = [plain_levels(x, bits).error(x) for bits in (2, 4, 8)]
            expected[:, head, t] = [ordered_sum(x * x), *errors]
    assert_close(out, expected, EXACT)


def spreads(rng: np.random.Generator, count: int) -> np.ndarray:
    """A factor for each token: (count, 1, 1) f32."""
    return np.exp(rng.standard_normal((count, 1, 1), dtype=np.float32) * 2)


@pytest.mark.parametrize("dim", [16, 80, 128])
def test_key_errors_are_those_of_the_reference(ops: CpuOps, dim: int) -> None:
    rng = np.random.default_rng(dim)
    segment = random_segment(rng, 200, 3, dim)
    segment.token_widths[1] = 0  # a head with nothing
    got = measured_key_errors(ops, segment)
    expected = np.zeros((3, dim, 4))
    for unit in units_of([segment]):
        for channel in range(dim):
            x = segment.keys[unit.tokens, unit.head, channel]
            errors = [plain_levels(x, bits).error(x) for bits in (2, 4, 8)]
            expected[unit.head, channel] += [np.float64(e) for e in (ordered_sum(x * x), *errors)]
    assert_close(got, expected, EXACT)
    assert not got[1].any() and got[0].all()


def measured_key_errors(ops: CpuOps, segment: Segment) -> np.ndarray:
    """(kv_heads, dim, 4) f64 of a segment's kept tokens."""
    units = units_of([segment])
    tokens = [unit.tokens for unit in units]
    counts = np.array([len(part) for part in tokens], np.int64)
    out = ops.to_device(np.full((*segment.keys.shape[1:], 4), np.nan))
    ops.key_errors(
        ops.to_device(segment.keys),
        ops.to_device(np.concatenate([*tokens, np.zeros(0, np.int64)])),
        ops.to_device(np.cumsum(counts) - counts),
        ops.to_device(counts),
        ops.to_device(np.array([unit.head for unit in units], np.int64)),
        out,
    )
    return out


# Nothing at all


def test_empty_inputs(ops: CpuOps) -> None:
    segment = random_segment(np.random.default_rng(0), 10, 2, 64)
    segment.token_widths[:] = 0
    packed = assert_packed(ops, [segment])
    assert packed.units.shape == (0, 4) and packed.starts.tolist() == [0, 0, 0]
    assert not measured_key_errors(ops, segment).any()
    ops.value_errors(ops.empty((0, 2, 64)), ops.empty((4, 2, 0)))
    rows = ops.to_device(np.zeros(0, np.int64))
    for is_value in (False, True):
        ops.unpack_zones(packed.units, packed.heads, rows, is_value, ops.empty((0, 2, 64)))
    received = ops.to_device(np.ones((2, 7), np.float32))
    ops.attention_received(ops.empty((0, 4, 64)), ops.empty((7, 2, 64)), 1.0, received)
    assert (received == 1).all()


def test_shapes_that_do_not_fit_are_refused(ops: CpuOps) -> None:
    i64 = ops.to_device(np.zeros(3, np.int64))
    two = ops.to_device(np.zeros(2, np.int64))
    units = ops.to_device(np.zeros((3, 4), np.int64))
    rows = ops.empty((5, 2, 64))
    with pytest.raises(KernelError, match="value_errors"):
        ops.value_errors(rows, ops.empty((4, 5, 2)))
    with pytest.raises(KernelError, match="key_errors"):
        ops.key_errors(rows, i64, i64, two, i64, ops.empty((2, 64, 4), np.float64))
    with pytest.raises(KernelError, match="pack_zones"):
        ops.pack_zones(rows, ops.empty((4, 2, 64)), i64, i64, i64, units)
    with pytest.raises(KernelError, match="pack_zones"):
        ops.pack_zones(rows, rows, i64, two, i64, units)
    with pytest.raises(KernelError, match="unpack_zones"):
        ops.unpack_zones(units, two, i64, False, rows)
    with pytest.raises(KernelError, match="attention_received"):
        ops.attention_received(ops.empty((6, 4, 64)), rows, 1.0, ops.empty((2, 5)))


# The layout


def test_counts_go_into_one_integer_and_back() -> None:
    counts = np.array([[64, 0, 0, 0], [0, 1, 2, 3], [256, 0, 0, 7], [0, 0, 0, 0]])
    packed = layout.pack_counts(counts)
    assert packed.dtype == np.int64 and packed.shape == (4,)
    assert packed[1] == 1 << 16 | 2 << 32 | 3 << 48
    assert np.array_equal(layout.unpack_counts(packed), counts)


def test_bytes_of_a_block_by_hand() -> None:
    """One token of each width, 16 channels of which three are kept."""
    tokens, channels = np.array([[1, 1, 1, 1]]), np.array([[1, 0, 1, 1]])
    # V: 32 + 16 + 8 + 4; metas 3 * 4 and 2 * 4; K: 4 tokens at 16, 4 and 2 bits: 8 + 2 + 1.
    assert [int(part[0]) for part in layout.regions(tokens, channels, 16)] == [60, 72, 80, 91]
    assert layout.block_bytes(tokens, channels, 16).tolist() == [96]
    nothing = np.zeros((0, 4), np.int64)
    assert layout.block_bytes(nothing, nothing, 128).shape == (0,)


def test_counts_that_no_block_has_are_refused() -> None:
    good = np.array([[1, 2, 3, 4], [64, 0, 0, 0]]), np.array([[16, 0, 0, 0], [0, 0, 0, 0]])
    layout.check_counts(*good, 16)
    for side, bad in ((0, [64, 1, 0, 0]), (0, [0] * 4), (0, [-1, 5, 0, 0]), (1, [0, 17, 0, 0])):
        counts = [part.copy() for part in good]
        counts[side][1] = bad
        with pytest.raises(CodecError, match=r"block 1: .* expected counts from 0 that make"):
            layout.check_counts(counts[0], counts[1], 16)
    with pytest.raises(CodecError, match="got \\(2, 4\\) and \\(1, 4\\)"):
        layout.check_counts(good[0], good[1][:1], 16)


def test_what_the_helpers_count() -> None:
    widths = np.array([2, 16, 0, 4, 16, 8, 2])
    assert channels_of(widths).tolist() == [1, 4, 5, 3, 0, 6]
    assert counts_of(widths) == [2, 1, 1, 2]
