"""From the widths of tokens to blocks: which tokens each block has, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .layout import BLOCK_TOKENS, WIDTHS


def cut_blocks(
    chosen: np.ndarray, ranks: Sequence[int], start: int, tokens: np.ndarray, counts: np.ndarray
) -> None:
    """Cut the tokens of each head that were given a width into blocks, as `Ops.cut_blocks`."""
    rank_of = np.array(ranks)
    counts[...] = 0
    for head, widths in enumerate(chosen):
        kept = np.flatnonzero(widths)
        group = np.arange(len(kept)) // BLOCK_TOKENS * len(WIDTHS) + rank_of[widths[kept]]
        # By block, then width, then position.
        tokens[head, : len(kept)] = start + kept[np.argsort(group, kind="stable")]
        of_blocks = np.bincount(group, minlength=counts[head].size)
        counts[head] = of_blocks.reshape(counts[head].shape)
