"""A segment: what one compression made of the tokens of one layer. It is never written again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.ops import Ops
from .layout import RUN_ALIGNMENT, WIDTHS, block_bytes, pack_counts, unpack_counts


def lay_out(
    tokens: np.ndarray, heads: np.ndarray, channels: np.ndarray, head_dim: int
) -> tuple[np.ndarray, int]:
    """Where blocks go in a segment's memory: `Segment.units` (units, 4) i64, and all its bytes.

    tokens (units, 4) i64: those of each block by width, heads (units,) i64 its head; channels
    (kv_heads, 4) i64: those of each head by width.
    """
    orders = channels.sum(1)  # (kv_heads,) bytes
    first = -(-int(orders.sum()) // RUN_ALIGNMENT) * RUN_ALIGNMENT
    runs = block_bytes(tokens, channels[heads], head_dim)  # (units,)
    units = np.stack(
        [
            first + np.cumsum(runs) - runs,
            (np.cumsum(orders) - orders)[heads],
            pack_counts(tokens),
            pack_counts(channels)[heads],
        ],
        axis=1,
    )
    return units, first + int(runs.sum())


@dataclass(frozen=True)
class Segment:
    """Blocks of packed tokens, all heads of a layer, in one piece of memory.

    data: (bytes,) u8 on the device: the heads' orders of channels, then the blocks' runs. units:
    (units, 4) i64 on the host, rows of the directory with offsets in `data` in place of addresses,
    sorted by head; heads: (units,) i64. `candidates` are the tokens, for each head, that were
    chosen from; `channels` (kv_heads, 4) i64 how many channels a head has of each width.
    """

    data: Any
    units: np.ndarray
    heads: np.ndarray
    candidates: int
    channels: np.ndarray

    @property
    def token_counts(self) -> np.ndarray:
        """Tokens of each unit by width of their values, (units, 4) i64."""
        return unpack_counts(self.units[:, 2])

    def kept(self, kv_heads: int) -> np.ndarray:
        """Packed tokens of each head, (kv_heads,) i64."""
        tokens = self.token_counts.sum(1)
        return np.bincount(self.heads, tokens, kv_heads).astype(np.int64)

    def placed(self, ops: Ops) -> np.ndarray:
        """The rows of the directory, (units, 4) i64, with addresses."""
        rows = self.units.copy()
        rows[:, :2] += ops.address(self.data)
        return rows


@dataclass(frozen=True)
class Widths:
    """How many tokens' values and how many channels of keys a layer keeps at each width.

    Keys are bits (0: not kept); tokens and channels of all heads are counted together.
    """

    tokens: dict[int, int]
    channels: dict[int, int]

    @classmethod
    def of(cls, segments: Sequence[Segment], head_dim: int) -> Widths:
        """Those of a layer's segments together."""
        tokens = dict.fromkeys((*WIDTHS, 0), 0)
        channels = dict(tokens)
        for segment in segments:
            heads = len(segment.channels)
            values, keys = segment.token_counts.sum(0), segment.channels.sum(0)
            for width, of_values, of_keys in zip(WIDTHS, values.tolist(), keys.tolist()):
                tokens[width] += of_values
                channels[width] += of_keys
            tokens[0] += heads * segment.candidates - int(values.sum())
            channels[0] += heads * head_dim - int(keys.sum())
        return cls(tokens, channels)


@dataclass(frozen=True)
class Directory:
    """Where a layer's blocks lie, for kernels: `units` (units, 4) i64, sorted by head.

    On the host are rows and heads, what `units` holds and whose it is, `starts` (kv_heads + 1,)
    i64, where each head's begin, and the bytes of the largest.
    """

    units: Any
    rows: np.ndarray
    heads: np.ndarray
    starts: np.ndarray
    largest: int

    @classmethod
    def of(cls, segments: Sequence[Segment], ops: Ops, *, head_dim: int) -> Directory | None:
        """The directory of all segments of a layer, sorted by head; None where nothing is kept."""
        if not any(len(segment.units) for segment in segments):
            return None
        heads = np.concatenate([segment.heads for segment in segments])  # (units,)
        order = np.argsort(heads, kind="stable")
        rows = np.concatenate([segment.placed(ops) for segment in segments])[order]
        counts = np.bincount(heads, minlength=len(segments[0].channels))  # (kv_heads,)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        sizes = block_bytes(unpack_counts(rows[:, 2]), unpack_counts(rows[:, 3]), head_dim)
        units = ops.to_device(np.ascontiguousarray(rows))
        return cls(units, rows, heads[order], starts, int(sizes.max()))

    @property
    def nbytes(self) -> int:
        return int(self.units.nbytes)
