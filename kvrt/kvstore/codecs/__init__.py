"""Cache formats. One file each, and one line in the registry."""

from typing import Protocol

import numpy as np

from .dense import DTYPES, Dense


class TileCodec(Protocol):
    """One side (K or V) of a page. The kernels of `kernels` encode and decode it."""

    @property
    def name(self) -> str: ...
    @property
    def kernels(self) -> str:
        """Suffix of the codec's kernels: attend_<kernels>, seal_<kernels>, gather_<kernels>."""
        ...

    @property
    def exact_dtype(self) -> np.dtype:
        """Dtype of this side's sinks and tail."""
        ...

    def code_bytes(self, page_tokens: int, head_dim: int) -> int:
        """Bytes of one head's codes in a page."""
        ...

    def meta_bytes(self, page_tokens: int, head_dim: int) -> int:
        """Bytes of one head's scales, minima and tables in a page."""
        ...

    def settings(self) -> tuple[int, ...]:
        """Up to four integers for the kernels."""
        ...


CODECS: dict[str, TileCodec] = {
    **{name: Dense(name) for name in DTYPES},
}
