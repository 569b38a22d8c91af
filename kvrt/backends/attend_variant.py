"""Which variant of the decode attention kernel reads a layer: -D options from its settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from . import books_variant, view
from .cpu_math import BF16
from .gpu_formats import (
    BLOCK,
    DENSE,
    FP8,
    INTQ,
    LARGEST_SHARED,
    NUQ,
    OWN_SHARED,
    LayerFormat,
    check_readable,
)
from .ops import PAGE_TOKENS

QUERY_HEADS = 8
"""Query heads of one CTA; larger groups take several."""

SHAPES = (
    (12, 2, 0), (8, 2, 0), (8, 3, 1), (8, 2, 1), (4, 3, 0), (4, 2, 0), (4, 3, 1), (4, 2, 1),
    (3, 2, 0), (2, 2, 0), (1, 2, 0),
)  # fmt: skip
"""Warps of a CTA, stages of a warp's ring, and whether a stage has one side of a page, from the
best on, one CTA on a multiprocessor.

A multiprocessor has four schedulers: with 10 or 11 warps it is slower than with 8.
"""

_FEW = 4
"""Query heads with which keys whose query is another for each page have a kernel of their own."""

_LEVELS = 32
"""Bytes of the levels of one side."""

_LOOKUP_ROW = 256
"""Bytes of a row of the table that levels are looked up in."""

_LOOKUP_WARPS = 8
"""Warps that must be left for that table to be worth its memory."""

_KEY_ROOM, _VALUE_ROOM = 2048, 4096
"""KEY_ROOM and VALUE_ROOM of attend_tables.cuh."""


def attend_defines(settings: Sequence[int], group: int = QUERY_HEADS) -> dict[str, Any]:
    """Names and values for the compiler, from settings (LAYER_SETTINGS,).

    `group` is how many query heads a KV head has.

    Raises UnsupportedError for what the kernel cannot read.
    """
    row = [int(value) for value in settings]
    dim = row[view.DIM]
    check_readable(LayerFormat.of(row))
    defines: dict[str, Any] = {
        "HEAD_DIM": dim,
        "FORM": row[view.FORM],
        "K_HADAMARD": row[view.KEY_HADAMARD],
        "V_HADAMARD": row[view.VALUE_HADAMARD],
        "K_NORM": int(row[view.KEY_NORM] != 0),
        "K_BIAS": int(row[view.KEY_BIAS] != 0),
        "RUN_BYTES": row[view.RUN_BYTES],
        "TURNED_TILES": _turned_tiles(row),
        "FEW_HEADS": int(
            group <= _FEW
            and row[view.FORM] != view.POST
            and row[view.KEY_KIND] != BF16
            and dim % 32 == 0
        ),
    }
    for letter, start, kind in (
        ("K", view.KEY_SIDE, row[view.KEY_KIND]),
        ("V", view.VALUE_SIDE, row[view.VALUE_KIND]),
    ):
        side = row[start : start + view.SIDE_SETTINGS]
        codec, own = side[view.CODEC], side[view.OWN : view.OWN + 6]
        defines |= {
            f"{letter}_CODEC": codec,
            f"{letter}_KIND": kind,
            f"{letter}_CODES_OFFSET": side[view.CODES],
            f"{letter}_META_OFFSET": side[view.META],
        }
        if codec in (INTQ, BLOCK):
            names = ("BITS", "GROUP", "MODE", "BY_ROWS")
            defines |= {f"{letter}_{name}": own[i] for i, name in enumerate(names)}
        elif codec == FP8:
            defines[f"{letter}_E4M3"] = int(own[0] == 0)
        elif codec == NUQ:
            defines |= {f"{letter}_BITS": own[0], f"{letter}_SLOTS": own[1]}
    return defines


def _lookup_rows(defines: dict[str, Any]) -> int:
    """Rows of the table that levels are looked up in, 0 if there is none."""
    if not defines.get("LOOKUP"):
        return 0
    sides = [side for side in "KV" if defines[f"{side}_CODEC"] == NUQ]
    return max(64 if defines[f"{side}_BITS"] == 3 else 256 for side in sides)


def _turned_tiles(row: Sequence[int]) -> int:
    """Tiles of 8 RoPE pairs that packed keys before RoPE must be turned in."""
    tiles = row[view.DIM] // 16
    if row[view.FORM] != view.PRE or row[view.KEY_SIDE + view.CODEC] == DENSE:
        return tiles
    return -(-row[view.QUICK] // 8)


def extra_bytes(defines: dict[str, Any], warps: int) -> int:
    """Bytes of a CTA's tables in shared memory, as attend_tables.cuh counts them."""
    dim = defines["HEAD_DIM"]
    size = _lookup_rows(defines) * _LOOKUP_ROW
    if defines["FORM"] == view.PRE or defines["K_BIAS"]:  # angles of the offsets in a block
        size += PAGE_TOKENS * 32 * (dim // 16 if defines["K_BIAS"] else defines["TURNED_TILES"])
    if defines["TURNED_TILES"] < dim // 16:
        size += dim * 4
    if defines["K_BIAS"]:
        size += PAGE_TOKENS * dim * 2 + (QUERY_HEADS + 1) * dim * 4
    room = 0  # of a warp, where outliers are put between other numbers
    if defines["K_CODEC"] == NUQ:
        size += _LEVELS + dim * 4
        room = _KEY_ROOM if defines["K_SLOTS"] else 0
    if defines["V_CODEC"] == NUQ:
        size += _LEVELS
        # Otherwise they take the place of a page's keys.
        if defines["V_SLOTS"] and defines["V_CODES_OFFSET"] < _VALUE_ROOM:
            room = _VALUE_ROOM
    return size + warps * room


def stage_bytes(defines: dict[str, Any]) -> int:
    """Bytes of one stage of a warp's ring, as attend_units.cuh counts them."""
    by_side = defines.get("BY_SIDE", 0)
    exact = (1 if by_side else 2) * 16 * (defines["HEAD_DIM"] * 2 + 16)
    angles = 0
    if defines["FORM"] != view.POST or defines["K_BIAS"]:
        angles = defines["HEAD_DIM"] * 4
    if defines["K_CODEC"] == DENSE:
        return exact + angles
    keys = defines["V_CODES_OFFSET"] if by_side else 0
    packed = defines["RUN_BYTES"] - keys
    if defines["V_CODEC"] == NUQ:  # what belongs to all heads
        packed += PAGE_TOKENS * (4 + 2 * defines["V_SLOTS"] * 4)
    return max(exact, packed, keys) + angles


def shared_bytes(defines: dict[str, Any], warps: int, stages: int) -> int:
    """Dynamic shared memory of a CTA: queries, tables, then rings."""
    queries = QUERY_HEADS * (defines["HEAD_DIM"] + 8) * 4  # QUERY_PITCH of attend_query.cuh
    return queries + extra_bytes(defines, warps) + warps * stages * stage_bytes(defines)


def with_shape(defines: dict[str, Any], warps: int, stages: int) -> dict[str, Any]:
    """The options with the shape of a CTA."""
    shape = {"WARPS": warps, "STAGES": stages, "CTAS_AN_SM": 1}
    shared = shared_bytes(defines, warps, stages)
    return {
        **defines, **shape, "EXTRA_BYTES": extra_bytes(defines, warps), "SHARED_BYTES": shared,
    }  # fmt: skip


def _wants_many_warps(defines: dict[str, Any]) -> bool:
    """Whether twelve warps are better than eight: for dense pages, where a warp's units are small.

    Each warp has 168 registers then. Of two and three bits eight are better up to 131,072 tokens.
    """
    plain = defines["FORM"] != view.PRE and not defines["K_BIAS"]
    return bool(defines["HEAD_DIM"] <= 128 and plain and defines["K_CODEC"] == DENSE)


def with_sides(defines: dict[str, Any]) -> dict[str, Any]:
    """The options, with pages that come by side, if they can."""
    # Outliers of values may need the place of a page's keys.
    whole = defines["K_CODEC"] == DENSE or defines.get("V_SLOTS")
    return defines if whole else {**defines, "BY_SIDE": 1}


def with_lookup(defines: dict[str, Any]) -> dict[str, Any]:
    """The options, with levels looked up in a table if there are any."""
    levels = NUQ in (defines["K_CODEC"], defines["V_CODEC"])
    return {**defines, "LOOKUP": 1} if levels else defines


def _candidates(defines: dict[str, Any]) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Options, warps and stages, from the best on."""
    shapes = SHAPES[0 if _wants_many_warps(defines) else 1 :]
    wide, sides = with_lookup(defines), with_sides(defines)
    for warps, stages, by_side in shapes:
        if wide is not defines and warps >= _LOOKUP_WARPS and not by_side:
            yield wide, warps, stages
    for warps, stages, by_side in shapes:
        yield sides if by_side else defines, warps, stages


def compiled(
    settings: Sequence[int], shared: int = LARGEST_SHARED, group: int = QUERY_HEADS
) -> dict[str, Any]:
    """All -D options that a layer's kernel is compiled with: `attend_defines` and its shape.

    `shared` is how many bytes of shared memory a CTA may have on the device.
    """
    for defines, warps, stages in _candidates(attend_defines(settings, group)):
        if shared_bytes(defines, warps, stages) <= shared - OWN_SHARED:
            break
    return with_shape(defines, warps, stages)


def chosen(
    settings: Sequence[int], shared: int = LARGEST_SHARED, group: int = QUERY_HEADS
) -> tuple[str, dict[str, Any], int]:
    """Source and -D options of the kernel that reads a layer, and the query heads of a CTA of it.

    Arguments and errors are those of `compiled` and of `books_defines`.
    """
    if books_variant.reads(settings):
        defines = books_variant.books_defines(settings, shared)
        return "attend_books.cu", defines, books_variant.QUERY_HEADS
    return "attend.cu", compiled(settings, shared, group), QUERY_HEADS
