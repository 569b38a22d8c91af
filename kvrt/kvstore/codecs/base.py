"""What a codec is: one side (K or V) of a page, how large it is and which kernels it runs.

In kernels a side is described by a few integers (`backends.view`). A tile is one KV head's part of
a page, (64, head_dim) f32, token by token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np

from ...backends.ops import PAGE_TOKENS
from ...backends.view import CODEC, CODES, META, OWN, SHARED, STATE, TABLE
from ...errors import UnsupportedError

if TYPE_CHECKING:
    from ...calibration import Fitted
    from ..grammar import Rope

__all__ = [
    "CODEC", "CODES", "META", "OWN", "SHARED", "STATE", "TABLE",
    "Codec", "Packed", "Survey", "TileCodec",
]  # fmt: skip

Survey = Literal["never", "first", "every"]
"""Whether a codec looks at all heads of a page before any is encoded: never, only at the first page
ever sealed (which fixes scales for good), or at every page."""


class TileCodec(Protocol):
    """One side of a page. Sizes are bytes of one head unless said otherwise."""

    @property
    def name(self) -> str:
        """The codec and its options, as in a printed spec."""
        ...

    @property
    def number(self) -> int:
        """What kernels know the codec by."""
        ...

    @property
    def exact_dtype(self) -> np.dtype:
        """Dtype of this side's sinks and tail."""
        ...

    @property
    def calibrated(self) -> bool:
        """Whether it needs tables fitted beforehand."""
        ...

    @property
    def survey(self) -> Survey: ...

    def check(self, is_value: bool, num_kv_heads: int, head_dim: int) -> None:
        """Raise UnsupportedError where the codec does not fit such a cache."""
        ...

    def code_bytes(self, head_dim: int) -> int: ...

    def meta_bytes(self, is_value: bool, head_dim: int) -> int:
        """Bytes of scales, minima and outliers."""
        ...

    def shared_bytes(self, is_value: bool, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of a page that belong to all heads together."""
        ...

    def state_floats(self, num_kv_heads: int, head_dim: int) -> int:
        """f32 numbers of a layer that are measured on its first sealed page."""
        ...

    def table_bytes(self, is_value: bool, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of what was fitted beforehand to one layer and side."""
        ...

    def tables(
        self, calibration: Fitted, layer: int, is_value: bool, rope: Rope, had: bool
    ) -> np.ndarray:
        """What was fitted to one layer and side, as kernels read it: 1-D, of `table_bytes`."""
        ...

    def work_bytes(self, head_dim: int) -> int:
        """Scratch that a CPU needs to encode one head's part, beside its tile and codes."""
        ...

    def settings(self, is_value: bool, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Up to six integers for the kernels."""
        ...


class Codec:
    """What a codec is unless it says otherwise: codes alone, and nothing to know beforehand."""

    calibrated = False
    survey: ClassVar[Survey] = "never"

    def meta_bytes(self, is_value: bool, head_dim: int) -> int:
        return 0

    def shared_bytes(self, is_value: bool, num_kv_heads: int, head_dim: int) -> int:
        return 0

    def state_floats(self, num_kv_heads: int, head_dim: int) -> int:
        return 0

    def table_bytes(self, is_value: bool, num_kv_heads: int, head_dim: int) -> int:
        return 0

    def tables(
        self, calibration: Fitted, layer: int, is_value: bool, rope: Rope, had: bool
    ) -> np.ndarray:
        return np.empty(0, np.float32)

    def work_bytes(self, head_dim: int) -> int:
        return 0


class Packed(Codec):
    """What all codecs of packed codes have in common."""

    exact_dtype = np.dtype(np.float16)
    name: str
    code_bits: int

    def check(self, is_value: bool, num_kv_heads: int, head_dim: int) -> None:
        if head_dim % 16:
            raise UnsupportedError(
                f"{self.name} needs a head_dim that is a multiple of 16, this cache has "
                f"{head_dim}; f32, f16 and bf16 take any"
            )

    def code_bytes(self, head_dim: int) -> int:
        return PAGE_TOKENS * head_dim * self.code_bits // 8
