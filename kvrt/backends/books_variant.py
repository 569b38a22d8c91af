"""Attention over product-residual codes (pq8x256): which variant of attend_books.cu it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UnsupportedError
from . import view
from .gpu_formats import VQ, LayerFormat, check_readable, check_shared
from .view import PAGE_TOKENS

QUERY_HEADS = 4
"""Query heads of a CTA; larger groups take several."""

_WARPS = 8

_GROUP = 8
"""Channels that are quantised together."""

_BOOK_BYTES = 256 * 16
"""Of a book of values, or of what a book of keys brings to the scores of four query heads."""


def _side(settings: Sequence[int], is_value: bool | int) -> list[int]:
    start = view.VALUE_SIDE if is_value else view.KEY_SIDE
    return [int(value) for value in settings[start : start + view.SIDE_SETTINGS]]


def reads(settings: Sequence[int]) -> bool:
    """Whether a layer's pages are for this kernel."""
    return _side(settings, False)[view.CODEC] == VQ


def whole_heads(settings: Sequence[int], is_value: bool | int) -> bool:
    """Whether a side's codebooks are of whole heads."""
    side = _side(settings, is_value)
    return side[view.CODEC] == VQ and side[view.OWN] == settings[view.DIM]


def encode_shared(dim: int) -> int:
    """Dynamic shared memory of a block of encode_heads.cu: residuals, two chunks of entries, norms.

    0 where it has no variant: heads are too large, or no multiple of 32.
    """
    if dim % 32 or dim > 128:
        return 0
    pitch = dim + 8
    return 2 * PAGE_TOKENS * pitch * 4 + 2 * 128 * pitch * 2 + 4096 * 4


def shared_bytes(dim: int, key_books: int, value_books: int) -> int:
    """Dynamic shared memory of a CTA: books of values, scores, weights, queries, units of keys."""
    states = _WARPS * (8 * (dim + 4) + 16) * 4  # STATE_FLOATS of attend_softmax.cuh
    scores = key_books * 256 * QUERY_HEADS * 2
    weights, queries, units = _WARPS * 64 * 16, QUERY_HEADS * (dim + 8) * 4, 8 * dim
    return value_books * _BOOK_BYTES + max(scores, states) + weights + queries + units


def check_books(dim: int, own: tuple[Sequence[int], Sequence[int]], shared: int) -> int:
    """The dynamic shared memory that attention needs, where a CTA may have `shared` bytes.

    own: the codecs' own settings, of keys and values. Raises UnsupportedError for codebooks that
    are not for this kernel, or do not fit.
    """
    if any(side[0] != _GROUP for side in own):
        raise UnsupportedError("on a GPU, keys and values are both pq8x256, or both rvq")
    key_books, value_books = (side[1] * dim // _GROUP for side in own)
    size = shared_bytes(dim, key_books, value_books)
    return check_shared(size, shared, "these codebooks", "fewer stages take less, such as vq1")


def books_defines(settings: Sequence[int], shared: int) -> dict[str, Any]:
    """All -D options, where a CTA may have so many bytes of shared memory.

    Raises UnsupportedError for what the kernel cannot read.
    """
    layer = LayerFormat.of(settings)
    check_readable(layer, shared)
    row = [int(value) for value in settings]
    dim, sides = layer.head_dim, [_side(row, is_value) for is_value in (False, True)]
    stages = [side[view.OWN + 1] for side in sides]
    return {
        "HEAD_DIM": dim,
        "K_CODEC": VQ, "V_CODEC": VQ,
        "K_KIND": row[view.KEY_KIND], "V_KIND": row[view.VALUE_KIND],
        "K_STAGES": stages[0], "V_STAGES": stages[1],
        "K_PER_HEAD": sides[0][view.OWN + 4], "V_PER_HEAD": sides[1][view.OWN + 4],
        "K_CODES_OFFSET": sides[0][view.CODES], "V_CODES_OFFSET": sides[1][view.CODES],
        "K_META_OFFSET": 0, "V_META_OFFSET": 0,
        "K_HADAMARD": row[view.KEY_HADAMARD], "V_HADAMARD": row[view.VALUE_HADAMARD],
        "RUN_BYTES": row[view.RUN_BYTES],
        "FORM": view.POST, "K_NORM": 0, "K_BIAS": 0, "FEW_HEADS": 0, "TURNED_TILES": dim // 16,
        "WARPS": _WARPS, "STAGES": 1, "BY_SIDE": 0, "LOOKUP": 0, "EXTRA_BYTES": 0,
        "SHARED_BYTES": check_books(dim, layer.own, shared),
    }  # fmt: skip
