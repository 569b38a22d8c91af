"""A layer of zones and an exact tail, for what attends over it on any backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvrt.backends import view as place
from kvrt.backends.ops import Ops
from kvrt.backends.view import Extent, PageView

from .refs import hadamard_matrix
from .zone_reference import Zones, attention, half


@dataclass
class ZoneLayer:
    """What a view of zones needs, and what it stands for."""

    view: PageView
    zones: Zones
    tail: tuple[np.ndarray, np.ndarray]  # K, V (rows, kv_heads, dim) f32
    held: list[Any]

    def set_tail(self, tokens: int) -> None:
        self.view.extent.tail_tokens = tokens

    def expected(self, q: np.ndarray, scale: float) -> np.ndarray:
        """Attention in float64."""
        kv_heads, used = self.view.num_kv_heads, self.view.extent.tail_tokens
        sides = []
        for head in range(kv_heads):
            own = range(*self.zones.starts[head : head + 2])
            sides.append(
                tuple(
                    np.concatenate(
                        [half(self.tail[side][:used, head]).astype(np.float64)]
                        + [self.zones.decoded[unit][side] for unit in own]
                    )
                    for side in range(2)
                )
            )
        out = attention(q, sides, scale)  # (heads, dim)
        block = int(self.view.settings[place.VALUE_HADAMARD])
        if block:
            parts = out.reshape(len(out), -1, block)
            out = (parts @ hadamard_matrix(block)).reshape(out.shape)
        return out


def send_blocks(ops: Ops, zones: Zones, filled: bool) -> tuple[Any, Any, list[Any]]:
    """Memory for runs, with them or zeros, and the directory, on a backend's device."""
    memory = np.zeros(zones.size + 16, np.uint8)
    if filled:
        memory[: zones.size] = np.frombuffer(b"".join(zones.runs), np.uint8)
    runs = ops.to_device(memory)
    channels = ops.to_device(zones.channel_bytes())
    units = ops.to_device(zones.directory(ops.address(runs), ops.address(channels)))
    return runs, units, [channels]


def make_layer(
    ops: Ops,
    zones: Zones,
    kv_heads: int,
    dim: int,
    tail_tokens: int,
    room: int = 0,
    seed: int = 0,
    block: int = 0,
) -> ZoneLayer:
    """A layer whose tail has rows for `tail_tokens` and `room` more.

    `block`: its values count as Hadamard transformed in blocks of so many channels.
    """
    rng = np.random.default_rng(seed + 77)
    rows = max(tail_tokens + room, 1)
    tail = tuple(rng.normal(0, 1, (rows, kv_heads, dim)).astype(np.float32) for _ in range(2))
    exact = [
        ops.to_device(np.ascontiguousarray(half(part).astype(np.float16).transpose(1, 0, 2)))
        for part in tail
    ]
    runs, units, held = send_blocks(ops, zones, filled=True)
    settings = np.zeros(place.zone_settings(kv_heads), np.int64)
    settings[[place.HEADS, place.DIM]] = kv_heads, dim
    settings[[place.KEY_KIND, place.VALUE_KIND]] = 1
    settings[place.VALUE_HADAMARD] = block
    settings[[place.SINK_ROWS, place.TAIL_ROWS]] = 0, rows
    settings[[place.TAIL_KEYS, place.TAIL_VALUES]] = [ops.address(part) for part in exact]
    if len(zones.runs):
        place.set_blocks(settings, ops.address(units), zones.starts, max(map(len, zones.runs)))
    on_device = ops.to_device(settings)
    extent = Extent(tail_tokens=tail_tokens)
    view = PageView(extent, settings, ops.address(on_device), ("never", "never"), True)
    return ZoneLayer(view, zones, tail, [exact, runs, units, on_device, held])
