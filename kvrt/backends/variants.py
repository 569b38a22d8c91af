"""Every variant of a CUDA source that the product can ask for: what has to compile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from . import view
from .books_variant import encode_shared
from .cpu_math import BF16, F16
from .cuda_rvq import rvq_defines
from .cuda_zones import zone_defines
from .gpu_formats import VQ

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
"""Head sizes that prefill attention has a variant for."""

KINDS = (0, 1, 2)
"""Numbers of a weight matrix: f32, f16, bf16 (`cpu_math.KINDS`)."""

GROUPS = (4, 8)
"""Query heads of a KV head that attention over zones has a variant for each."""

SHARED = (227 * 1024, 163 * 1024)
"""Bytes of shared memory that a block may have: from sm_90 on, and on sm_80."""

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""What every variant is compiled for where there is no GPU: one of each generation."""


@dataclass(frozen=True)
class Variant:
    """A source and the -D options that it is compiled with."""

    source: str
    defines: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""  # in words, where there are many options

    def __str__(self) -> str:
        if self.label:
            return f"{self.source} {self.label}"
        return " ".join([self.source, *(f"{k}={v}" for k, v in self.defines.items())])


def _over(source: str, name: str, values: Iterable[Any]) -> Iterator[Variant]:
    """One variant for each value of a name."""
    for value in values:
        yield Variant(source, {name: value})


def _of_zones() -> Iterator[Variant]:
    """What attention over zones is compiled with, each once."""
    shapes = (zone_defines(*shape) for shape in product(HEAD_DIMS, GROUPS, SHARED))
    for defines in {tuple(shape.items()): shape for shape in shapes}.values():
        yield Variant("attend_zones.cu", defines)


RVQ = (
    (F16, 128, (56, 10), (16, 9)),
    (F16, 64, (28, 10), (8, 9)),
    (F16, 128, (30, 9), (12, 10)),
    (BF16, 64, (3, 8), (2, 8)),
)
"""Kinds of exact tokens, head sizes, and stages and bits of keys and values, of attention over rvq:
its main format, and what takes other ways through the kernels."""


def _of_rvq() -> Iterator[Variant]:
    """What attention over residual vector quantised pages is compiled with."""
    for kind, dim, *sides in RVQ:
        settings, offset = [0] * view.LAYER_SETTINGS, 0
        for start, (stages, bits) in zip((view.KEY_SIDE, view.VALUE_SIDE), sides, strict=True):
            settings[start + view.CODEC] = VQ
            settings[start + view.OWN : start + view.OWN + 4] = dim, stages, bits, 1
            settings[start + view.CODES] = offset
            offset += -(-8 * stages * bits // 16) * 16
        settings[view.KEY_KIND] = settings[view.VALUE_KIND] = kind
        settings[view.DIM], settings[view.RUN_BYTES] = dim, -(-offset // 128) * 128
        yield Variant("attend_rvq.cu", rvq_defines(settings, min(SHARED)))


def variants() -> list[Variant]:
    """All variants. A new source joins by a line here."""
    return [
        Variant("store.cu"),
        Variant("layers.cu"),
        *_over("gemv.cu", "KIND", KINDS),
        *_over("prefill.cu", "HEAD_DIM", HEAD_DIMS),
        Variant("zones.cu"),
        Variant("allocate.cu"),
        Variant("cut_blocks.cu"),
        *_over("received.cu", "HEAD_DIM", HEAD_DIMS),
        *_over("encode_heads.cu", "HEAD_DIM", (dim for dim in HEAD_DIMS if encode_shared(dim))),
        *_of_zones(),
        *_of_rvq(),
    ]


NO_SPILLS = (
    "attend.cu",
    "attend_books.cu",
    "encode_heads.cu",
    "prefill.cu",
    "zones.cu",
    "received.cu",
    "attend_zones.cu",
    "attend_rvq.cu",
    "allocate.cu",
    "cut_blocks.cu",
)
"""Sources whose kernels must fit into registers."""
