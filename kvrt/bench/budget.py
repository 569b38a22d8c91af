"""What a benchmark will take of memory, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kvstore import Geometry, KVSpec, estimate
from ..kvstore.stats import stats_for
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
    gpu: bool = False,
) -> int:
    """Bytes that a case takes beside the weights: its cache, and what computes the most tokens.

    `batch` and `micro_batch` are those of `Settings` and of the decoder, None their defaults. On a
    GPU all of it comes from one allocator, copies on the way too.
    """
    cached = case.depth + case.n_prompt if case.n_prompt or fill == "prefill" else 0
    computed = max(case.n_prompt, case.depth if fill == "prefill" else 0, 1)
    at_once = min(computed, batch or computed)
    chunk = min(at_once, micro_batch or CHUNK_TOKENS["cuda" if gpu else "cpu"])
    queries = chunk * config.num_heads * config.head_dim
    activations = at_once * config.hidden_size + queries
    activations += chunk * (config.hidden_size + 2 * config.intermediate_size)
    made = 0 if fill == "prefill" else min(CHUNK, case.depth)  # K and V of synthetic tokens
    exact = 2 * config.num_kv_heads * config.head_dim * (cached + made)
    total = estimate(geometry, spec, case.context) + 4 * (activations + exact)
    if gpu:
        row = 2 * config.num_kv_heads * config.head_dim  # numbers of K and V of a token
        if cached:  # attention and projections of a prefill take 16-bit copies
            total += 2 * (queries + cached * row)
            total += 2 * chunk * max(config.hidden_size, config.intermediate_size)
        total += 4 * row * made  # in the cache's basis
        total += stats_for(geometry, spec, 0).tail_bytes + 4 * config.vocab_size
    return total
