"""Zones for tests: blocks in NumPy, from their definition and one by one, and ways to fill zones.

Arithmetic of the reference is float32, every operation rounded, sums from first to last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvrt.backends import view
from kvrt.backends.cpu_math import F16
from kvrt.backends.ops import Ops
from kvrt.backends.view import Extent, PageView
from kvrt.trizone.layout import block_bytes, pack_counts

from .zone_reference import attention

WIDTHS = (16, 8, 4, 2)
BLOCK = 64
GUARD = 0xA5
"""What lies between the runs of `pack`."""

F32 = np.float32


class Levels(NamedTuple):
    """Numbers of one group at one width: codes, scale and minimum as stored, what they mean."""

    codes: np.ndarray  # (n,) i64
    scale: np.ndarray  # () f16
    minimum: np.ndarray  # () f16
    numbers: np.ndarray  # (n,) f32

    def error(self, x: np.ndarray) -> np.float32:
        """The sum of squared errors, f32."""
        return ordered_sum((x - self.numbers) ** 2)


def ordered_sum(x: np.ndarray) -> np.float32:
    """The f32 sum of f32 numbers from first to last."""
    return np.cumsum(x, dtype=np.float32)[-1]


def _held(x: Any) -> np.ndarray:
    return np.clip(x, F32(-65504), F32(65504)).astype(np.float16)


def _levels(x: np.ndarray, scale: np.ndarray, minimum: np.ndarray, bits: int) -> Levels:
    s, m = F32(scale), F32(minimum)
    steps = np.zeros_like(x) if s == 0 else np.rint((x - m) / s)
    codes = np.clip(steps, 0, 2**bits - 1).astype(np.float32)
    return Levels(codes.astype(np.int64), scale, minimum, codes * s + m)


def plain_levels(x: np.ndarray, bits: int) -> Levels:
    """A group (n,) f32 at a width, its scale from its whole range."""
    low, high = x.min(), x.max()
    return _levels(x, _held((high - low) / F32(2**bits - 1)), _held(low), bits)


def _packed(codes: np.ndarray, bits: int, room: int) -> bytes:
    """Codes one after the other, lowest bits first, with zeros up to `room` codes."""
    whole = np.zeros(room, np.int64)
    whole[: len(codes)] = codes
    each = (whole[:, None] >> np.arange(bits)) & 1  # (room, bits)
    return np.packbits(each.astype(np.uint8).ravel(), bitorder="little").tobytes()


class Block(NamedTuple):
    """What a run holds: its bytes, and the numbers that they mean."""

    run: bytes
    keys: np.ndarray  # (n, dim) f32, zeros in channels that are not kept
    values: np.ndarray  # (n, dim) f32


def reference_block(
    keys: np.ndarray, values: np.ndarray, token_widths: np.ndarray, key_widths: np.ndarray
) -> Block:
    """One block: keys, values (n, dim) f32 in its order, widths (n,) and (dim,)."""
    count, dim = keys.shape
    room = -(-count // 4) * 4
    rows, value_meta = b"", b""
    decoded_values = np.zeros_like(values)
    for t, bits in enumerate(token_widths):
        if bits == 16:
            half = _held(values[t])
            rows += half.tobytes()
            decoded_values[t] = half
        else:
            levels = plain_levels(values[t], int(bits))
            rows += _packed(levels.codes, int(bits), dim)
            value_meta += levels.scale.tobytes() + levels.minimum.tobytes()
            decoded_values[t] = levels.numbers
    codes, key_meta = b"", b""
    decoded_keys = np.zeros_like(keys)
    for channel in channels_of(key_widths):
        bits, x = int(key_widths[channel]), keys[:, channel]
        if bits == 16:
            half = np.zeros(room, np.float16)
            half[:count] = _held(x)
            codes += half.tobytes()
            decoded_keys[:, channel] = half[:count]
        else:
            levels = plain_levels(x, bits)
            codes += _packed(levels.codes, bits, room)
            key_meta += levels.scale.tobytes() + levels.minimum.tobytes()
            decoded_keys[:, channel] = levels.numbers
    run = rows + value_meta + key_meta + codes
    return Block(run + bytes(-len(run) % 16), decoded_keys, decoded_values)


def channels_of(key_widths: np.ndarray) -> np.ndarray:
    """Kept channels (kept,) u8 in the order of a head's permutation."""
    order = [c for bits in WIDTHS for c in np.flatnonzero(key_widths == bits)]
    return np.array(order, np.uint8)


@dataclass(frozen=True)
class Segment:
    """Tokens that are packed together, and the widths that each head gives them."""

    keys: np.ndarray  # (n, kv_heads, dim) f32
    values: np.ndarray
    token_widths: np.ndarray  # (kv_heads, n) of 0, 2, 4, 8, 16
    key_widths: np.ndarray  # (kv_heads, dim)


def random_segment(
    rng: np.random.Generator, count: int, kv_heads: int, dim: int, scale: float = 1.0
) -> Segment:
    """Normal keys and values with every width; heads keep different numbers of tokens."""
    shape = (count, kv_heads, dim)
    keys, values = (scale * rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    token_widths = rng.choice([0, 2, 4, 8, 16], (kv_heads, count), p=[0.3, 0.2, 0.2, 0.2, 0.1])
    for head in range(kv_heads):
        token_widths[head, rng.permutation(count)[: head * count // (kv_heads + 1)]] = 0
    return Segment(keys, values, token_widths, rng.choice([0, 2, 4, 8, 16], (kv_heads, dim)))


def uniform_segment(
    count: int, dim: int, token_width: int, key_width: int, seed: int = 0
) -> Segment:
    """One head whose tokens all have one width, and whose channels all have one."""
    segment = random_segment(np.random.default_rng(seed), count, 1, dim)
    return Segment(
        segment.keys,
        segment.values,
        np.full((1, count), token_width),
        np.full((1, dim), key_width),
    )


class Unit(NamedTuple):
    """One block of a segment: its head and its tokens, in its order."""

    segment: int
    head: int
    tokens: np.ndarray  # (n,) i64


def units_of(segments: Sequence[Segment]) -> list[Unit]:
    """The blocks of all segments, sorted by head; the segments of a head follow one another."""
    units = []
    for head in range(segments[0].keys.shape[1]):
        for index, segment in enumerate(segments):
            widths = segment.token_widths[head]
            kept = np.flatnonzero(widths)
            for first in range(0, len(kept), BLOCK):
                block = kept[first : first + BLOCK]
                order = sorted(block, key=lambda t: (-widths[t], t))
                units.append(Unit(index, head, np.array(order, np.int64)))
    return units


def counts_of(widths: np.ndarray) -> list[int]:
    return [int((widths == bits).sum()) for bits in WIDTHS]


class Packed(NamedTuple):
    """Blocks in memory, and what `Ops` takes to say where they are. Arrays of the backend."""

    units: Any  # (units, 4) i64
    starts: np.ndarray  # (kv_heads + 1,) i64, on the host
    heads: Any  # (units,) i64
    memory: Any  # (bytes,) u8
    offsets: list[int]  # where each run begins in it
    sizes: list[int]
    channels: Any

    def runs(self, ops: Ops) -> list[bytes]:
        memory = ops.to_host(self.memory)
        return [
            memory[at : at + size].tobytes()
            for at, size in zip(self.offsets, self.sizes, strict=True)
        ]

    def outside(self, ops: Ops) -> np.ndarray:
        """All bytes that belong to no run."""
        inside = np.zeros(self.memory.size, bool)
        for at, size in zip(self.offsets, self.sizes, strict=True):
            inside[at : at + size] = True
        return ops.to_host(self.memory)[~inside]


def pack(ops: Ops, segments: Sequence[Segment]) -> Packed:
    """Blocks of the segments, with guards before, between and behind the runs."""
    _, kv_heads, dim = segments[0].keys.shape
    units = units_of(segments)
    by_token = [counts_of(segments[u.segment].token_widths[u.head][u.tokens]) for u in units]
    by_channel = [counts_of(segments[u.segment].key_widths[u.head]) for u in units]
    token_counts = np.array(by_token, np.int64).reshape(-1, 4)
    channel_counts = np.array(by_channel, np.int64).reshape(-1, 4)
    sizes = block_bytes(token_counts, channel_counts, dim)
    offsets = np.cumsum(sizes + 16) - sizes
    memory = np.full(int(sizes.sum()) + 16 * len(units) + 16, GUARD, np.uint8)
    for at, size in zip(offsets, sizes, strict=True):
        memory[at : at + size] = 0
    where: dict[tuple[int, int], int] = {}
    orders: list[np.ndarray] = []
    for s, segment in enumerate(segments):
        for head in range(kv_heads):
            where[s, head] = sum(map(len, orders))
            orders.append(channels_of(segment.key_widths[head]))
    channels = ops.to_device(np.concatenate([*orders, np.zeros(1, np.uint8)]))
    device_memory = _aligned(ops, memory)
    directory = np.zeros((len(units), 4), np.int64)
    for i, unit in enumerate(units):
        directory[i, 0] = ops.address(device_memory) + offsets[i]
        directory[i, 1] = ops.address(channels) + where[unit.segment, unit.head]
    directory[:, 2] = pack_counts(token_counts)
    directory[:, 3] = pack_counts(channel_counts)
    heads = np.array([unit.head for unit in units], np.int64)
    for s, segment in enumerate(segments):
        chosen = [i for i, unit in enumerate(units) if unit.segment == s]
        tokens = [units[i].tokens for i in chosen]
        firsts = np.cumsum([0, *map(len, tokens)])[:-1]
        ops.pack_zones(
            ops.to_device(segment.keys),
            ops.to_device(segment.values),
            ops.to_device(np.concatenate([*tokens, np.zeros(0, np.int64)])),
            ops.to_device(firsts.astype(np.int64)),
            ops.to_device(heads[chosen]),
            ops.to_device(directory[chosen]),
        )
    starts = np.searchsorted(heads, np.arange(kv_heads + 1)).astype(np.int64)
    return Packed(
        ops.to_device(directory),
        starts,
        ops.to_device(heads),
        device_memory,
        offsets.tolist(),
        sizes.tolist(),
        channels,
    )


def _aligned(ops: Ops, memory: np.ndarray) -> Any:
    """The bytes on the device, from an address that is a multiple of 16 on."""
    whole = ops.empty((len(memory) + 16,), np.uint8)
    start = -ops.address(whole) % 16
    part = whole[start : start + len(memory)]
    part[:] = ops.to_device(memory)
    return part


def reference_blocks(segments: Sequence[Segment]) -> list[Block]:
    """The blocks that `pack` is to give."""
    blocks = []
    for unit in units_of(segments):
        segment = segments[unit.segment]
        blocks.append(
            reference_block(
                segment.keys[unit.tokens, unit.head],
                segment.values[unit.tokens, unit.head],
                segment.token_widths[unit.head][unit.tokens],
                segment.key_widths[unit.head],
            )
        )
    return blocks


class Tail(NamedTuple):
    """Zone C: exact rows (kv_heads, capacity, dim) f16, of which the first `count` are in use."""

    keys: Any
    values: Any
    count: int


def new_tail(ops: Ops, rng: np.random.Generator, kv_heads: int, count: int, dim: int) -> Tail:
    """Random rows; those that are not in use are NaN."""
    rows = np.full((2, kv_heads, count + 3, dim), np.nan, np.float16)
    rows[:, :, :count] = rng.standard_normal((2, kv_heads, count, dim))
    return Tail(ops.to_device(rows[0].copy()), ops.to_device(rows[1].copy()), count)


def zone_view(ops: Ops, tail: Tail, packed: Packed | None) -> PageView:
    """One layer of zones as kernels see it; None: nothing was packed yet."""
    heads, rows, dim = tail.keys.shape
    settings = np.zeros(view.zone_settings(heads), np.int64)
    given = {
        view.HEADS: heads,
        view.DIM: dim,
        view.KEY_KIND: F16,
        view.VALUE_KIND: F16,
        view.TAIL_ROWS: rows,
        view.TAIL_KEYS: ops.address(tail.keys),
        view.TAIL_VALUES: ops.address(tail.values),
        view.FORM: view.POST,
    }
    for name, value in given.items():
        settings[name] = value
    if packed is not None:
        units, largest = ops.address(packed.units), max(packed.sizes, default=0)
        view.set_blocks(settings, units, packed.starts, largest)
    on_device = ops.to_device(settings)
    extent = Extent(tail_tokens=tail.count)
    return PageView(extent, on_device, ops.address(on_device), ("never", "never"), True)


def attended_zones(
    q: np.ndarray, segments: Sequence[Segment], tail: tuple[np.ndarray, np.ndarray], scale: float
) -> np.ndarray:
    """Attention in float64 of q (heads, dim) over what blocks and tail (kv_heads, n, dim) mean."""
    blocks = reference_blocks(segments)
    units = units_of(segments)
    sides = []
    for head in range(segments[0].keys.shape[1]):
        own = [b for unit, b in zip(units, blocks, strict=True) if unit.head == head]
        keys = np.concatenate([*(b.keys for b in own), tail[0][head]]).astype(np.float64)
        values = np.concatenate([*(b.values for b in own), tail[1][head]]).astype(np.float64)
        sides.append((keys, values))
    return attention(q, sides, scale)
