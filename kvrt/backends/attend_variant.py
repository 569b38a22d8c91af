"""Which variant of the decode attention kernel reads a layer: -D options from its settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UnsupportedError
from . import view
from .cpu_math import BF16, F32

DENSE, INTQ, BLOCK, FP8, NUQ = range(5)
"""Codecs by their numbers (`kvstore.codecs`)."""

QUERY_HEADS = 8
"""Query heads of one CTA; larger groups take several."""

WARPS, STAGES = 8, 2
"""Of a CTA, and of a warp's ring; one CTA on a multiprocessor (measured best from 8k to 128k)."""

_SHARED = 220 * 1024
"""Bytes of shared memory that a CTA may take."""


def attend_defines(settings: Sequence[int]) -> dict[str, Any]:
    """Names and values for the compiler, from settings (LAYER_SETTINGS,).

    Raises UnsupportedError for what the kernel cannot read.
    """
    row = [int(value) for value in settings]
    dim = row[view.DIM]
    if row[view.KEY_KIND] == F32 or row[view.VALUE_KIND] == F32:
        raise UnsupportedError("f32 caches are for the CPU; on a GPU f16 and bf16 work")
    if (row[view.KEY_KIND] == BF16) != (row[view.VALUE_KIND] == BF16):
        raise UnsupportedError("on a GPU, keys and values are both bf16 or neither is")
    if dim % 16 or not 16 <= dim <= 256:
        raise UnsupportedError(
            f"on a GPU, head_dim must be a multiple of 16 up to 256, this cache has {dim}"
        )
    if row[view.FORM] == view.PRE or row[view.KEY_BIAS]:
        raise UnsupportedError("keys before RoPE, or with a bias, are not yet for the GPU")
    defines: dict[str, Any] = {
        "HEAD_DIM": dim,
        "FORM": row[view.FORM],
        "K_HADAMARD": row[view.KEY_HADAMARD],
        "V_HADAMARD": row[view.VALUE_HADAMARD],
        "K_NORM": int(row[view.KEY_NORM] != 0),
        "RUN_BYTES": row[view.RUN_BYTES],
    }
    codecs = [row[view.KEY_SIDE + view.CODEC], row[view.VALUE_SIDE + view.CODEC]]
    if (codecs[0] == DENSE) != (codecs[1] == DENSE):
        raise UnsupportedError("on a GPU, keys and values are both packed or neither is")
    for letter, start, kind in (
        ("K", view.KEY_SIDE, row[view.KEY_KIND]),
        ("V", view.VALUE_SIDE, row[view.VALUE_KIND]),
    ):
        side = row[start : start + view.SIDE_SETTINGS]
        codec, own = side[view.CODEC], side[view.OWN : view.OWN + 6]
        if codec == NUQ:
            raise UnsupportedError("non-uniform integers are not yet for the GPU")
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
    return defines


def stage_bytes(defines: dict[str, Any]) -> int:
    """Bytes of one stage of a warp's ring, as attend.cu counts them."""
    exact = 2 * 16 * (defines["HEAD_DIM"] * 2 + 16)
    return exact if defines["K_CODEC"] == DENSE else max(exact, defines["RUN_BYTES"])


def shared_bytes(defines: dict[str, Any], warps: int, stages: int, splits: int) -> int:
    """Dynamic shared memory of a CTA: queries, then rings, or what is merged after them."""
    dim = defines["HEAD_DIM"]
    result = warps * 16 + 16 + QUERY_HEADS * dim  # statistics, and one state
    merged = max(warps * QUERY_HEADS * (dim + 1), QUERY_HEADS * splits)
    rings = warps * stages * stage_bytes(defines)
    return QUERY_HEADS * dim * 4 + max(rings, (result + merged) * 4)


def compiled(settings: Sequence[int]) -> dict[str, Any]:
    """All -D options that a layer's kernel is compiled with: `attend_defines` and its shape."""
    defines = attend_defines(settings)
    warps = WARPS
    while warps > 1 and shared_bytes(defines, warps, STAGES, 1) > _SHARED:
        warps -= 1
    return {**defines, "WARPS": warps, "STAGES": STAGES, "CTAS_AN_SM": 1}
