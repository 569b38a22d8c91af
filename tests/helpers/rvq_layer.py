"""A layer of pages of rvq with sinks and tail, made of random codes, for what attends over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvrt.backends import view as place
from kvrt.backends.cpu_math import BF16, F16
from kvrt.backends.gpu_formats import VQ
from kvrt.backends.ops import PAGE_TOKENS, Ops
from kvrt.backends.view import Extent, PageView

from .refs import hadamard_matrix


@dataclass(frozen=True)
class RvqSide:
    """How many stages there are, of 2^bits entries each."""

    stages: int
    bits: int

    @property
    def code_bytes(self) -> int:
        return PAGE_TOKENS * self.stages * self.bits // 8


def _write_fields(out: np.ndarray, first_bit: int, width: int, fields: np.ndarray) -> None:
    """Write numbers of so many bits one behind the other, from a bit of (bytes,) u8 on."""
    for i, number in enumerate(fields):
        for k in range(width):
            bit = first_bit + i * width + k
            out[bit // 8] |= int(number >> k & 1) << bit % 8


def pack_keys(codes: np.ndarray, side: RvqSide) -> np.ndarray:
    """Codes (stages, 64) in a page's order: (code_bytes,) u8."""
    out, further = np.zeros(side.code_bytes, np.uint8), side.bits - 8
    for first, quads, width in key_blocks(side.stages):
        for book in range(first, first + quads * width):
            quad, q = divmod(book - first, width)
            for n in range(8):
                step, tokens = (quad - n) % quads, codes[book, 8 * n : 8 * n + 8]
                low = 64 * first + 8 * (width * (8 * step + n) + q)
                out[low : low + 8] = tokens & 0xFF
                byte = 64 * side.stages + further * (8 * first + quads * (width * n + q) + step)
                _write_fields(out, 8 * byte, further, tokens >> 8)
    return out


def key_blocks(stages: int) -> list[tuple[int, int, int]]:
    """Of each block of books of keys the first, how many rows of them it has, and of how many."""
    blocks, first = [], 0
    while first < stages:
        left = stages - first
        quads, width = (4, 4) if left >= 16 else (2, 4) if left >= 8 else (1, min(left, 4))
        blocks.append((first, quads, width))
        first += quads * width
    return blocks


def pack_values(codes: np.ndarray, side: RvqSide) -> np.ndarray:
    out, further = np.zeros(side.code_bytes, np.uint8), side.bits - 8
    for book in range(side.stages):
        for piece in range(4):
            low = 16 * (side.stages * piece + book)
            out[low : low + 16] = codes[book, 16 * piece : 16 * piece + 16] & 0xFF
        bit = 8 * (64 * side.stages + 8 * further * book)
        _write_fields(out, bit, further, codes[book] >> 8)
    return out


@dataclass
class RvqLayer:
    """A view, and what it stands for, in the store's basis: (tokens, kv_heads, dim) f64 each."""

    view: PageView
    keys: np.ndarray
    values: np.ndarray
    held: list[Any]

    def expected(self, q: np.ndarray, scale: float, window: int | None = None) -> np.ndarray:
        """Attention in float64: (heads, dim)."""
        settings = self.view.settings
        key_turn, value_turn = (
            hadamard_matrix(block) if block else np.eye(q.shape[1])
            for block in settings[[place.KEY_HADAMARD, place.VALUE_HADAMARD]]
        )
        group, total = len(q) // self.view.num_kv_heads, len(self.keys)
        first = max(total - (window or total), 0)
        out = np.empty(q.shape)
        for head, query in enumerate(q.astype(np.float64) @ key_turn):
            scores = self.keys[first:, head // group] @ query * scale
            weights = np.exp(scores - scores.max())
            out[head] = weights @ self.values[first:, head // group] / weights.sum()
        return out @ value_turn


def half(rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.float16)


def _rounded(parts: list[np.ndarray], bfloats: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Numbers as 16 bits hold them, and the bits (u16)."""
    if not bfloats:
        halves = [half(part) for part in parts]
        return halves, [part.view(np.uint16) for part in halves]
    words = [part.astype(np.float32).view(np.uint32) >> 16 for part in parts]
    wide = [(word << 16).astype(np.uint32).view(np.float32) for word in words]
    return wide, [word.astype(np.uint16) for word in words]


def make_layer(
    ops: Ops,
    kv_heads: int,
    dim: int,
    k: RvqSide,
    v: RvqSide,
    pages: int,
    *,
    sinks: int = 4,
    tail: int = 70,
    had: tuple[bool, bool] = (False, False),
    slot: int = 0,
    seed: int = 0,
    sizes: tuple[float, float] = (1.0, 1.0),
    bfloats: bool = False,
) -> RvqLayer:
    """`slot`: the tail's ring begins there; `sizes`: of keys and values; `bfloats`: exact ones."""
    rng = np.random.default_rng([kv_heads, dim, pages, seed])
    v_offset = -(-k.code_bytes // 16) * 16
    run_bytes = -(-(v_offset + v.code_bytes) // 128) * 128
    memory = np.zeros((max(pages, 1), kv_heads, run_bytes), np.uint8)
    tail_rows = -(-tail // 64) * 64 + 64
    sink_rows = max(sinks, 4)
    settings = np.zeros(place.LAYER_SETTINGS, np.int64)
    settings[[place.HEADS, place.DIM]] = kv_heads, dim
    settings[[place.KEY_KIND, place.VALUE_KIND]] = BF16 if bfloats else F16
    settings[[place.SINK_ROWS, place.TAIL_ROWS]] = sink_rows, tail_rows
    settings[[place.LAYER_OFFSET, place.RUN_BYTES]] = 0, run_bytes
    settings[place.FORM] = place.POST
    settings[[place.KEY_HADAMARD, place.VALUE_HADAMARD]] = [dim * int(turned) for turned in had]
    held: list[Any] = []
    rows: list[np.ndarray] = []
    for is_value, (start, side) in enumerate(((place.KEY_SIDE, k), (place.VALUE_SIDE, v))):
        count, books = 1 << side.bits, side.stages
        fading = 0.8 ** np.arange(books)[:, None, None] * sizes[is_value]
        entries = half(rng.normal(0, 1, (books, count, dim)) * fading)
        codes = rng.integers(0, count, (max(pages, 1), kv_heads, books, PAGE_TOKENS))
        sums = sum(entries.astype(np.float64)[b][codes[:, :, b]] for b in range(books))
        decoded = np.asarray(sums).swapaxes(1, 2).reshape(-1, kv_heads, dim)[: pages * PAGE_TOKENS]
        parts = [entries, rng.normal(0, 1, (books, count)).astype(np.float32)]
        if not is_value:
            centre, scale = rng.normal(0, 1, (2, kv_heads, dim)).astype(np.float32)
            scale = np.exp(scale / 3)
            inverse = np.float32(1) / scale
            parts += [centre, scale, inverse]
            decoded = decoded * inverse + centre
        pack, offset = (pack_values, v_offset) if is_value else (pack_keys, 0)
        for page in range(pages):
            for head in range(kv_heads):
                own = memory[page, head, offset : offset + side.code_bytes]
                own[:] = pack(codes[page, head], side)
        flat = [np.ascontiguousarray(part).view(np.uint8).ravel() for part in parts]
        table = ops.to_device(np.concatenate(flat))
        settings[start + place.CODEC], settings[start + place.TABLE] = VQ, ops.address(table)
        settings[start + place.CODES] = offset
        settings[start + place.OWN : start + place.OWN + 4] = dim, side.stages, side.bits, 1
        exact = [rng.normal(0, sizes[is_value], (n, kv_heads, dim)) for n in (sinks, tail)]
        exact, bits_of = _rounded(exact, bfloats)
        arrays = np.full((kv_heads, sink_rows + tail_rows, dim), 0xFFFF, np.uint16)  # NaN
        arrays[:, :sinks] = bits_of[0].swapaxes(0, 1)
        ring = (slot + np.arange(tail)) % tail_rows
        arrays[:, sink_rows + ring] = bits_of[1].swapaxes(0, 1)
        placed = [
            ops.to_device(np.ascontiguousarray(part))
            for part in (arrays[:, :sink_rows], arrays[:, sink_rows:])
        ]
        settings[place.SINK_KEYS + is_value] = ops.address(placed[0])
        settings[place.TAIL_KEYS + is_value] = ops.address(placed[1])
        held += [table, *placed]
        rows.append(np.concatenate([exact[0], decoded, exact[1]]).astype(np.float64))
    order = rng.permutation(max(pages, 1))  # pages lie anywhere
    stored = np.empty_like(memory)
    stored[order] = memory
    bytes_ = ops.to_device(stored)
    table = ops.to_device(ops.address(bytes_) + order[:pages].astype(np.int64) * memory[0].nbytes)
    on_device = ops.to_device(settings)
    held += [bytes_, table, on_device]
    extent = Extent(sinks, pages, tail, slot, ops.address(table) if pages else 0)
    view = PageView(extent, settings, ops.address(on_device), ("never", "never"))
    return RvqLayer(view, rows[0], rows[1], held)
