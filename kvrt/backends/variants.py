"""Every variant of a CUDA source that the product can ask for: what has to compile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
"""Head sizes that prefill attention has a variant for."""

KINDS = (0, 1, 2)
"""Numbers of a weight matrix: f32, f16, bf16 (`cpu_math.KINDS`)."""

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


def variants() -> list[Variant]:
    """All variants. A new source joins by a line here."""
    return [
        Variant("store.cu"),
        Variant("layers.cu"),
        *_over("gemv.cu", "KIND", KINDS),
        *_over("prefill.cu", "HEAD_DIM", HEAD_DIMS),
    ]


NO_SPILLS = ("attend.cu", "prefill.cu")
"""Sources whose kernels must fit into registers."""
