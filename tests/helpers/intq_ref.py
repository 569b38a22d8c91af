"""The integer formats in NumPy, from their definitions: groups of a tile, all at once.

Arithmetic is float32, every operation rounded; a sum goes from first to last. A scale that f16
does not hold becomes its largest number.
"""

from typing import NamedTuple

import numpy as np

ONE = np.float32(1)


class Encoded(NamedTuple):
    """Codes (64, dim) i64; bits of scales, and minima: (planes, channels or tokens, groups) u16."""

    codes: np.ndarray
    planes: np.ndarray
    numbers: np.ndarray  # what they mean: (64, dim) f32


def encode(tile: np.ndarray, bits: int, axis: str, group: int, mode: str) -> Encoded:
    """Quantise a tile (64 tokens, dim) f32."""
    rows = tile.T if axis == "channel" else tile  # groups lie along the rows
    x = rows.reshape(len(rows), -1, group).astype(np.float32)  # (outer, groups, group)
    low, high = x.min(axis=2), x.max(axis=2)
    arms = []
    if mode != "sym":
        top = 2 ** (bits - 1 if mode == "hybrid" else bits) - 1
        arms.append((_half((high - low) / np.float32(top)), _half(low), top))
    if mode != "asym":
        middle = 2 ** (bits - 1) - 1
        step = _half(np.abs(x).max(axis=2) / np.float32(middle))
        arms.append((step, np.float32(-middle) * step, 2 * middle))
    coded = [_codes(x, *arm) for arm in arms]
    choice = np.zeros(low.shape, bool)  # whether the second arm is taken
    if mode == "hybrid":
        asym, sym = (
            np.cumsum(np.abs(x - (code * scale[..., None] + minimum[..., None])), axis=2)[..., -1]
            for code, (scale, minimum, _) in zip(coded, arms, strict=True)
        )
        choice = ~(asym < sym)
    scale, minimum = (np.where(choice, arms[-1][i], arms[0][i]) for i in (0, 1))
    codes = np.where(choice[..., None], coded[-1], coded[0])
    planes = [_bits(scale)]
    if mode == "hybrid":
        planes[0] = planes[0] | np.where(choice, 0, 0x8000).astype(np.uint16)
    if mode != "sym":
        planes.append(_bits(np.where(choice, np.float32(0), minimum)))
    # Rounded once, as a fused multiply-add does it.
    wide = codes.astype(np.float64) * scale[..., None] + minimum[..., None]
    back = [part.reshape(rows.shape) for part in (codes, wide.astype(np.float32))]
    if axis == "channel":
        back = [part.T for part in back]
    return Encoded(back[0].astype(np.int64), np.stack(planes), back[1])


def _codes(x: np.ndarray, scale: np.ndarray, minimum: np.ndarray, top: int) -> np.ndarray:
    """The nearest of the levels 0 ... top, f32."""
    divisor = np.where(scale == 0, ONE, scale)[..., None]
    codes = np.clip(np.rint((x - minimum[..., None]) / divisor), 0, top).astype(np.float32)
    return np.where(scale[..., None] == 0, np.float32(0), codes)


def _half(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)


def _bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)
