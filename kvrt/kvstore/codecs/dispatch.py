"""Which codec's kernels a side of a page runs. K and V choose independently of each other."""

from __future__ import annotations

import sys

import numpy as np

from ...backends import cpu_attn, cpu_store, jit, view
from ...backends.ops import PAGE_TOKENS
from . import blocks, dense, fp8, intq, nuq, vq
from .base import CODEC

DENSE, INTQ, BLOCK, FP8, NUQ, VQ = (
    dense.Dense.number,
    intq.IntQ.number,
    blocks.Block.number,
    fp8.Fp8.number,
    nuq.Nuq.number,
    vq.Vq.number,
)


@jit.device
def token_major(side, is_value):
    """Whether the side decodes to (64, head_dim); packed numbers of values to (head_dim, 64)."""
    return side[CODEC] == DENSE or side[CODEC] == VQ or not is_value


@jit.device
def survey(tiles, side, is_value, first, shared):
    """Look at all heads (heads, 64, head_dim) of a page before any is encoded."""
    if side[CODEC] == INTQ:
        intq.intq_survey(tiles, side, is_value, first, shared)
    elif side[CODEC] == FP8:
        fp8.fp8_survey(tiles, side, is_value, first, shared)
    elif side[CODEC] == NUQ:
        nuq.nuq_survey(tiles, side, is_value, first, shared)


@jit.device
def encode(tile, side, is_value, head, heads, run, shared, codes):
    """Write one head's part of a page from tile (64, head_dim) f32, which may be overwritten."""
    if side[CODEC] == DENSE:
        dense.dense_encode(tile, side, run)
    elif side[CODEC] == INTQ:
        intq.intq_encode(tile, side, is_value, head, heads, run, shared, codes)
    elif side[CODEC] == BLOCK:
        blocks.block_encode(tile, side, is_value, head, heads, run, shared, codes)
    elif side[CODEC] == FP8:
        fp8.fp8_encode(tile, side, is_value, head, heads, run, shared, codes)
    elif side[CODEC] == VQ:
        vq.vq_encode(tile, side, is_value, head, heads, run, codes)
    else:
        nuq.nuq_encode(tile, side, is_value, head, heads, run, shared, codes)


@jit.device
def decode(run, shared, side, is_value, head, heads, codes, scratch, tile):
    """Read one head's part of a page into tile, which has the shape that `token_major` says."""
    if side[CODEC] == DENSE:
        dense.dense_decode(run, side, tile)
    elif side[CODEC] == INTQ:
        intq.intq_decode(run, shared, side, is_value, head, heads, codes, scratch, tile)
    elif side[CODEC] == BLOCK:
        blocks.block_decode(run, shared, side, is_value, head, heads, codes, scratch, tile)
    elif side[CODEC] == FP8:
        fp8.fp8_decode(run, shared, side, is_value, head, heads, codes, scratch, tile)
    elif side[CODEC] == VQ:
        vq.vq_decode(run, side, is_value, head, heads, codes, tile)
    else:
        nuq.nuq_decode(run, shared, side, is_value, head, heads, codes, scratch, tile)


@jit.device
def decode_at(place, base, info, side, is_value, head):
    """Decode one head of the page that begins at `base` into the tile at `place`."""
    dim = info[view.DIM]
    run = base + head * info[view.RUN_BYTES]
    shared = base + info[view.SHARED_OFFSET] + side[view.SHARED]
    rows = PAGE_TOKENS if token_major(side, is_value) else dim
    cols = PAGE_TOKENS * dim // rows
    tile = jit.array(place, (rows, cols), np.float32)
    codes_at = place + PAGE_TOKENS * dim * 4
    codes = jit.array(codes_at, (cols // 8, rows, 8), np.uint16)
    scratch_at = codes_at + cpu_store.codes_bytes(dim)
    scratch = jit.array(scratch_at, (cpu_store.codec_floats(dim),), np.float32)
    decode(run, shared, side, is_value, head, info[view.HEADS], codes, scratch, tile)


cpu_attn.build_attend(sys.modules[__name__])
cpu_store.build_seal(sys.modules[__name__])
