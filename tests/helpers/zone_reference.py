"""Blocks of zones in plain NumPy, as kvrt/trizone/layout.py has them: bytes, errors, attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WIDTHS = (16, 8, 4, 2)
F32 = np.float32


def half(x: np.ndarray) -> np.ndarray:
    """x f32 as it is once stored in f16."""
    return np.clip(x, F32(-65504), F32(65504)).astype(np.float16).astype(np.float32)


def _codes(x: np.ndarray, scale: np.ndarray, minimum: np.ndarray, top: int) -> np.ndarray:
    """Codes of x (groups, k) as f32; scale, minimum (groups,)."""
    safe = np.where(scale == 0, F32(1), scale)[:, None]
    level = np.clip(np.rint((x - minimum[:, None]) / safe), F32(0), F32(top))
    return np.where(scale[:, None] == 0, F32(0), level)


def _squared(x: np.ndarray, scale: np.ndarray, minimum: np.ndarray, top: int) -> np.ndarray:
    """Sums (groups,) of squared errors, first to last in f32."""
    rest = x - (_codes(x, scale, minimum, top) * scale[:, None] + minimum[:, None])
    return np.cumsum(rest * rest, axis=1, dtype=np.float32)[:, -1]


def fit(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima (groups,) f32 of groups (groups, k) f32."""
    low, high = x.min(axis=1), x.max(axis=1)
    return half((high - low) / F32(2**bits - 1)), half(low)


def errors(x: np.ndarray) -> np.ndarray:
    """(4, groups) f32: sums of squares of groups (groups, k), and their errors at 2, 4, 8 bits."""
    rows = [np.cumsum(x * x, axis=1, dtype=np.float32)[:, -1]]
    for bits in (2, 4, 8):
        rows.append(_squared(x, *fit(x, bits), 2**bits - 1))
    return np.stack(rows)


def _packed(codes: np.ndarray, bits: int) -> bytes:
    """A row of codes, the first in the lowest bits."""
    spread = codes.astype(np.uint8)[:, None] >> np.arange(bits) & 1  # (k, bits)
    return np.packbits(spread.ravel(), bitorder="little").tobytes()


def _side(x: np.ndarray, widths: np.ndarray, room: int) -> tuple[bytes, bytes, Any]:
    """Codes, meta and decoded numbers of groups (groups, k) of these widths."""
    codes, meta, decoded = [], [], np.empty(x.shape, np.float64)
    for j, bits in enumerate(widths):
        row = np.zeros(room, np.float32)
        if bits == 16:
            row[: x.shape[1]] = decoded[j] = half(x[j])
            codes.append(row.astype(np.float16).tobytes())
            continue
        scale, minimum = fit(x[j : j + 1], bits)
        row[: x.shape[1]] = _codes(x[j : j + 1], scale, minimum, 2**bits - 1)[0]
        codes.append(_packed(row, bits))
        meta.append(np.array([scale[0], minimum[0]], np.float16).tobytes())
        decoded[j] = row[: x.shape[1]].astype(np.float64) * scale + minimum
    return b"".join(codes), b"".join(meta), decoded


def encode(
    keys: np.ndarray, values: np.ndarray, v_widths: np.ndarray, channels: np.ndarray, k_widths: Any
) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Run of a block, and its keys and values decoded (n, dim) f64.

    keys, values (n, dim) f32 in the block's order; channels (kept,) and their widths.
    """
    n, dim = keys.shape
    v_codes, v_meta, decoded_values = _side(values, v_widths, dim)
    columns = np.ascontiguousarray(keys[:, channels].T)  # (kept, n)
    k_codes, k_meta, decoded = _side(columns, k_widths, -(-n // 4) * 4)
    decoded_keys = np.zeros((n, dim))
    decoded_keys[:, channels] = decoded.T
    run = v_codes + v_meta + k_meta + k_codes
    return run + bytes(-len(run) % 16), decoded_keys, decoded_values


def packed_counts(widths: np.ndarray) -> int:
    return sum(int((widths == w).sum()) << 16 * i for i, w in enumerate(WIDTHS))


@dataclass
class Zones:
    """Random zones of one layer: what kernels take, and what blocks are and decode to."""

    tokens: np.ndarray  # (kept,) i64
    firsts: np.ndarray  # (units,) i64, as all below
    counts: np.ndarray
    heads: np.ndarray
    starts: np.ndarray  # (kv_heads + 1,)
    runs: list[bytes]
    offsets: np.ndarray  # of runs in one piece of memory
    channels: list[np.ndarray]  # of each unit, (kept channels,) u8
    decoded: list[tuple[np.ndarray, np.ndarray]]  # keys, values (n, dim) f64
    shapes: np.ndarray  # (units, 2): counts as one number

    @property
    def size(self) -> int:
        return int(self.offsets[-1])

    def directory(self, runs_at: int, channels_at: int) -> np.ndarray:
        """(units, 4) i64; the channels of unit u begin at u * 256."""
        units = np.empty((len(self.runs), 4), np.int64)
        units[:, 0] = runs_at + self.offsets[:-1]
        units[:, 1] = channels_at + 256 * np.arange(len(self.runs))
        units[:, 2:] = self.shapes
        return units

    def channel_bytes(self) -> np.ndarray:
        table = np.zeros((max(len(self.runs), 1), 256), np.uint8)
        for unit, channels in enumerate(self.channels):
            table[unit, : len(channels)] = channels
        return table


def make_zones(
    keys: np.ndarray,
    values: np.ndarray,
    kept: list[int],
    seed: int = 0,
    v_widths: tuple[int, ...] = WIDTHS,
    k_widths: tuple[int, ...] = (*WIDTHS, 0),
) -> Zones:
    """Zones of so many kept tokens a head of keys, values (n, kv_heads, dim) f32."""
    rng = np.random.default_rng(seed)
    _, kv_heads, dim = keys.shape
    tokens: list[np.ndarray] = []
    firsts, counts, heads, starts, runs, channels, decoded, shapes = [], [], [], [0], [], [], [], []
    for head in range(kv_heads):
        chosen = np.sort(rng.choice(len(keys), kept[head], replace=False))
        width = rng.choice(k_widths, dim)  # of channels
        width[rng.integers(dim)] = k_widths[0]  # one at least is kept
        order = np.lexsort((np.arange(dim), -width))
        order = order[width[order] > 0]
        for begin in range(0, len(chosen), 64):
            block = chosen[begin : begin + 64]
            wide = rng.choice(v_widths, len(block))
            by_width = np.lexsort((block, -wide))
            block, wide = block[by_width], wide[by_width]
            run, *both = encode(keys[block, head], values[block, head], wide, order, width[order])
            firsts.append(sum(map(len, tokens)))
            counts.append(len(block))
            heads.append(head)
            tokens.append(block)
            runs.append(run)
            channels.append(order.astype(np.uint8))
            decoded.append(tuple(both))
            shapes.append((packed_counts(wide), packed_counts(width[order])))
        starts.append(len(runs))
    return Zones(
        np.concatenate([np.empty(0, np.int64), *tokens]).astype(np.int64),
        *(np.array(part, np.int64) for part in (firsts, counts, heads, starts)),
        runs,
        np.cumsum([0, *map(len, runs)]),
        channels,
        decoded,
        np.array(shapes, np.int64).reshape(-1, 2),
    )


def attention(
    q: np.ndarray, sides: Sequence[tuple[np.ndarray, np.ndarray]], scale: float
) -> np.ndarray:
    """(heads, dim) f64 of q (heads, dim) over the keys and values (n, dim) of each KV head."""
    group = len(q) // len(sides)
    out = np.empty(q.shape)
    for head, row in enumerate(q.astype(np.float64)):
        keys, values = sides[head // group]
        scores = keys @ row * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values / weights.sum()
    return out


def received(q: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """(kv_heads, m) f64: the weights that keys (m, kv_heads, dim) get from q (n, heads, dim)."""
    (n, heads, _), (m, kv_heads, _) = q.shape, keys.shape
    out = np.zeros((kv_heads, m))
    seen = np.arange(m) <= (m - n + np.arange(n))[:, None]
    for head in range(heads):
        own = head // (heads // kv_heads)
        scores = q[:, head].astype(np.float64) @ keys[:, own].astype(np.float64).T * scale
        weights = np.where(
            seen, np.exp(scores - np.where(seen, scores, -np.inf).max(1)[:, None]), 0
        )
        out[own] += (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    return out
