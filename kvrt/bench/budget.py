"""What a benchmark will take of memory, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kvstore import Geometry, KVSpec, estimate
from ..models.decoder import CHUNK_TOKENS
from .case import Case, Fill
from .fill import CHUNK

if TYPE_CHECKING:
    from ..config import ModelConfig


def needed_bytes(
    config: ModelConfig,
    geometry: Geometry,
    spec: KVSpec,
    case: Case,
    fill: Fill,
    batch: int | None = None,
    micro_batch: int | None = None,
) -> int:
    """Bytes that a case takes beside the weights: its cache, and what computes the most tokens.

    `batch` and `micro_batch` are those of `Settings` and of the decoder, None their defaults.
    """
    cached = case.depth + case.n_prompt if case.n_prompt or fill == "prefill" else 0
    computed = max(case.n_prompt, case.depth if fill == "prefill" else 0, 1)
    at_once = min(computed, batch or computed)
    activations = at_once * (config.hidden_size + config.num_heads * config.head_dim)
    chunk = min(at_once, micro_batch or CHUNK_TOKENS)
    activations += chunk * (config.hidden_size + 2 * config.intermediate_size)
    made = 0 if fill == "prefill" else min(CHUNK, case.depth)  # K and V of synthetic tokens
    exact = 2 * config.num_kv_heads * config.head_dim * (cached + made)
    return estimate(geometry, spec, case.context) + 4 * (activations + exact)
