"""What a benchmark will take of memory, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kvstore import Geometry, KVSpec, estimate
from .case import Case, Fill
from .fill import CHUNK

if TYPE_CHECKING:
    from ..config import ModelConfig


def needed_bytes(
    config: ModelConfig, geometry: Geometry, spec: KVSpec, case: Case, fill: Fill
) -> int:
    """Bytes that a case takes beside the weights: its cache, and what computes the most tokens."""
    jobs = [_scratch(config, 1, 0)]
    if case.n_prompt:
        jobs.append(_scratch(config, case.n_prompt, case.depth))
    if fill == "prefill":
        jobs.append(_scratch(config, case.depth, 0))
    else:
        jobs.append(_scratch(config, 0, min(CHUNK, case.depth)))
    return estimate(geometry, spec, case.context) + max(jobs)


def _scratch(config: ModelConfig, tokens: int, history: int) -> int:
    """Bytes of a prefill: activations of its tokens, one layer's exact K and V with the history."""
    activations = config.hidden_size + config.num_heads * config.head_dim
    exact = 2 * config.num_kv_heads * config.head_dim
    return 4 * (tokens * activations + (tokens + history) * exact)
