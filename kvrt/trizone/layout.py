"""Where every byte of a block of zones is: sizes and offsets from counts of tokens and channels.

Zones A and B of a KV head are cut into blocks of up to 64 kept tokens, in order of position. Inside
a block tokens are ordered by V width, descending, then by position; channels of K by K width,
descending, then by number (their `channels`, u8, are kept once a head). A block is one run of bytes
with four regions, none padded, and zeros up to a multiple of 16:

- V rows, a token each: `dim` numbers of 16 bits (f16), then codes of 8, 4 and 2 bits
- V meta: (scale f16, minimum f16) for each of the tokens below 16 bits
- K meta: (scale f16, minimum f16) for each of the channels below 16 bits
- K codes, a channel each: numbers of 16 bits (f16), then codes of 8, 4 and 2 bits, for as many
  tokens as the block has, rounded up to a multiple of 4

Code i of width w of a row begins at bit i * w % 8 of byte i * w // 8; it means code * scale +
minimum. Counts are integers (..., 4) in the order of `WIDTHS`, arrays of NumPy or of CuPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends.view import PAGE_TOKENS
from ..errors import CodecError

WIDTHS = (16, 8, 4, 2)
"""Bits of a kept V token or K channel, in the order in which they come."""

BLOCK_TOKENS = PAGE_TOKENS
"""The most tokens of a block."""

RUN_ALIGNMENT = 16
"""Runs are multiples of so many bytes, and must begin at one."""

_ROW_TOKENS = 4
"""Tokens of K codes are rounded up to a multiple of this, so that channels begin at whole bytes."""

META_BYTES = 4
"""Of a row of codes: its scale and its minimum."""

_COUNT_BITS = 16

Array = Any


def check_counts(tokens: np.ndarray, channels: np.ndarray, head_dim: int) -> None:
    """Raise CodecError for counts (units, 4), (units, 4) that no block has.

    For what comes from outside, as from a saved file.
    """
    fits = tokens.ndim == 2 and tokens.shape[1] == len(WIDTHS) and channels.shape == tokens.shape
    if not fits:
        raise CodecError(
            f"counts of blocks must be two arrays (blocks, {len(WIDTHS)}), "
            f"got {tokens.shape} and {channels.shape}"
        )
    limits = (("tokens", tokens, 1, BLOCK_TOKENS), ("channels", channels, 0, head_dim))
    for what, counts, least, most in limits:
        total = counts.sum(axis=1)
        bad = ((counts < 0) | (counts > most)).any(axis=1) | (total < least) | (total > most)
        if bad.any():
            block = int(bad.argmax())
            raise CodecError(
                f"block {block}: {what} by width {list(WIDTHS)} are {counts[block].tolist()}, "
                f"expected counts from 0 that make {least} to {most}"
            )


def row_bytes(counts: Array, length: Array) -> Array:
    """Bytes of rows of `length` numbers, so many (..., 4) of each width."""
    bits = sum(counts[..., i] * width for i, width in enumerate(WIDTHS))
    return bits * length // 8


def meta_bytes(counts: Array) -> Array:
    """Bytes of scales and minima of rows, so many (..., 4) of each width."""
    return counts[..., 1:].sum(axis=-1) * META_BYTES


def key_rows(token_counts: Array) -> Array:
    """Tokens (...) that a channel of K has room for in a block of so many (..., 4)."""
    return -(-token_counts.sum(axis=-1) // _ROW_TOKENS) * _ROW_TOKENS


def regions(token_counts: Array, channel_counts: Array, head_dim: int) -> tuple[Array, ...]:
    """Offsets (...) of V meta, K meta and K codes in a run, and where K codes end; V rows are at 0.

    token_counts, channel_counts (..., 4) i64 say how many have each of `WIDTHS`.
    """
    value_meta = row_bytes(token_counts, head_dim)
    key_meta = value_meta + meta_bytes(token_counts)
    key_codes = key_meta + meta_bytes(channel_counts)
    end = key_codes + row_bytes(channel_counts, key_rows(token_counts))
    return value_meta, key_meta, key_codes, end


def block_bytes(token_counts: Array, channel_counts: Array, head_dim: int) -> Array:
    """Bytes (units,) i64 of runs, zeros at their ends included; counts (units, 4) i64."""
    end = regions(token_counts, channel_counts, head_dim)[-1]
    return -(-end // RUN_ALIGNMENT) * RUN_ALIGNMENT


def pack_counts(counts: Array) -> Array:
    """Counts (..., 4) below 2^15 as one i64 each: the first in the lowest 16 bits, and so on."""
    return sum(counts[..., i].astype(np.int64) << _COUNT_BITS * i for i in range(len(WIDTHS)))


def unpack_counts(packed: np.ndarray) -> np.ndarray:
    """Counts (..., 4) i64 of numbers (...) i64 that `pack_counts` gave, on the host."""
    shifts = np.arange(len(WIDTHS), dtype=np.int64) * _COUNT_BITS  # (4,)
    return packed[..., None] >> shifts & (1 << _COUNT_BITS) - 1
