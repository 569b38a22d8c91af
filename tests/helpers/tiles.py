"""Tiles to encode, (64 tokens, heads, head_dim) f32 in f16's numbers: easy and awkward ones."""

from collections.abc import Callable, Mapping

import numpy as np


def gaussian(heads: int, dim: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return _halves(rng.standard_normal((64, heads, dim)))


def outlier_channels(heads: int, dim: int, seed: int = 0) -> np.ndarray:
    """Every 16th channel is 30 times as large, as keys of real models are."""
    tile = gaussian(heads, dim, seed)
    tile[:, :, 3::16] *= 30
    return _halves(tile)


def constant(heads: int, dim: int, seed: int = 0) -> np.ndarray:
    """One number in all of the tile."""
    return np.full((64, heads, dim), np.float32(0.1).astype(np.float16), np.float32)


def constant_channels(heads: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.broadcast_to(gaussian(heads, dim, seed)[:1], (64, heads, dim)).copy()


def zeros(heads: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.zeros((64, heads, dim), np.float32)


def ties(heads: int, dim: int, seed: int = 0) -> np.ndarray:
    """Whole and half numbers: many lie midway between two levels."""
    rng = np.random.default_rng(seed)
    tile = rng.integers(-30, 31, (64, heads, dim)) / 4
    tile[::32], tile[1::32] = -7.5, 7.5
    tile[:, :, ::32], tile[:, :, 1::32] = -7.5, 7.5
    return _halves(tile)


def one_sided(heads: int, dim: int, seed: int = 0) -> np.ndarray:
    """Far from zero: a minimum is worth its bits."""
    return _halves(gaussian(heads, dim, seed) / 4 + 20 * (-1) ** np.arange(dim))


def subnormal(heads: int, dim: int, seed: int = 0) -> np.ndarray:
    """Multiples of f16's smallest number; scales underflow."""
    rng = np.random.default_rng(seed)
    return _halves(rng.integers(-9, 10, (64, heads, dim)) * 2.0**-24)


def wild(heads: int, dim: int, seed: int = 0) -> np.ndarray:
    """All of f16, up to its largest number."""
    bits = np.random.default_rng(seed).integers(0, 0x7C00, (64, heads, dim)).astype(np.uint16)
    signs = np.random.default_rng(seed + 1).integers(0, 2, bits.shape).astype(np.uint16)
    tile = (bits | signs << np.uint16(15)).view(np.float16).astype(np.float32)
    tile[0], tile[1], tile[2, :, 0] = 65504, -65504, -0.0
    return tile


TILES: Mapping[str, Callable[..., np.ndarray]] = {
    tile.__name__: tile
    for tile in (
        gaussian,
        outlier_channels,
        constant,
        constant_channels,
        zeros,
        ties,
        one_sided,
        subnormal,
        wild,
    )
}


def _halves(tile: np.ndarray) -> np.ndarray:
    return tile.astype(np.float16).astype(np.float32)
