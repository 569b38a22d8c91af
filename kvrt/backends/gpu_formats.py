"""Which cache formats a GPU's attention reads; a CPU's reads all.

What is refused is refused twice: of a format, while a model is loaded, and of a layer's settings,
where a kernel is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UnsupportedError
from . import view
from .cpu_math import BF16, F32

DENSE, INTQ, BLOCK, FP8, NUQ, VQ = range(6)
"""Codecs by their numbers (`kvstore.codecs`)."""

LARGEST_SHARED = 227 * 1024
"""Bytes of shared memory that a CTA may have on the largest devices."""

OWN_SHARED = 1024
"""Bytes of shared memory of a CTA, at most, that are not dynamic."""

LOG2_E = math.log2(math.e)
"""Kernels take powers of 2: scores come with this factor."""


def check_shared(size: int, shared: int, what: str, advice: str) -> int:
    """`size` bytes of dynamic shared memory, where a CTA may have `shared` in all.

    Raises UnsupportedError where they do not fit.
    """
    if size + OWN_SHARED > shared:
        raise UnsupportedError(
            f"attention over {what} needs {size + OWN_SHARED:,} bytes of shared memory a block, "
            f"this GPU has {shared:,}; {advice}"
        )
    return size


@dataclass(frozen=True)
class LayerFormat:
    """What a kernel must read of a layer; pairs are of keys and values.

    codecs: their numbers; kinds: of float, of tokens that are not packed; own: the settings that
    are each codec's own; form: of keys; key_bias: whether packed keys are without their bias.
    """

    head_dim: int
    codecs: tuple[int, int]
    kinds: tuple[int, int]
    own: tuple[Sequence[int], Sequence[int]]
    form: int = view.POST
    key_bias: bool = False

    @classmethod
    def of(cls, settings: Sequence[int]) -> LayerFormat:
        """That of a layer's settings (LAYER_SETTINGS,)."""
        row = [int(value) for value in settings]
        k, v = (row[at : at + view.SIDE_SETTINGS] for at in (view.KEY_SIDE, view.VALUE_SIDE))
        return cls(
            row[view.DIM],
            (k[view.CODEC], v[view.CODEC]),
            (row[view.KEY_KIND], row[view.VALUE_KIND]),
            (k[view.OWN : view.STATE], v[view.OWN : view.STATE]),
            row[view.FORM],
            row[view.KEY_BIAS] != 0,
        )


def check_readable(layer: LayerFormat, shared: int = LARGEST_SHARED) -> None:
    """Raise UnsupportedError for what no kernel reads, where a CTA may have `shared` bytes."""
    codecs, kinds, dim = layer.codecs, layer.kinds, layer.head_dim
    if F32 in kinds:
        raise UnsupportedError("f32 caches are for the CPU; on a GPU f16 and bf16 work")
    if (kinds[0] == BF16) != (kinds[1] == BF16):
        raise UnsupportedError("on a GPU, keys and values are both bf16 or neither is")
    if (codecs[0] == VQ) != (codecs[1] == VQ):
        raise UnsupportedError(
            "on a GPU, keys and values are both vector-quantised or neither is, such as vq2"
        )
    if (codecs[0] == DENSE) != (codecs[1] == DENSE):
        raise UnsupportedError("on a GPU, keys and values are both packed or neither is")
    if dim % 16 or not 16 <= dim <= 256:
        raise UnsupportedError(
            f"on a GPU, head_dim must be a multiple of 16 up to 256, this cache has {dim}"
        )
    if VQ in codecs:
        from .books_variant import check_books
        from .cuda_rvq import check_heads

        if layer.form != view.POST:
            raise UnsupportedError(
                "on a GPU, vector-quantised keys are those after RoPE; page and pre are for the CPU"
            )
        if layer.key_bias:
            raise UnsupportedError(
                "on a GPU, keys of a model with key biases cannot be vector-quantised; kvrt2 works"
            )
        whole = all(side[0] == dim for side in layer.own)
        (check_heads if whole else check_books)(dim, layer.own, shared)
