"""What a benchmark will take of memory, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..backends.view import QUERY_ROWS
from ..kvstore import Geometry, KVSpec, estimate
from ..kvstore.stats import compressed_stats, stats_for
from ..models.decoder import CHUNK_TOKENS
from ..trizone.work import working_bytes
from .case import Case, Fill
from .fill import CHUNK, QUERIES

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..shapes import Shape


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

    A format that compresses prompts takes one layer of a whole prompt, exactly, and what chooses
    from it.
    """
    compresses = spec.compression is not None
    cached = case.depth + case.n_prompt if case.n_prompt or fill == "prefill" else 0
    computed = max(case.n_prompt, case.depth if fill == "prefill" else 0, 1)
    at_once = min(computed, batch or computed)
    chunk = min(at_once, micro_batch or CHUNK_TOKENS["cuda" if gpu else "cpu"])
    queries = chunk * config.num_heads * config.head_dim
    activations = at_once * config.hidden_size + queries
    activations += chunk * (config.hidden_size + 2 * config.intermediate_size)
    made = 0 if fill == "prefill" else min(CHUNK, case.depth)  # K and V of synthetic tokens
    repeated = case.depth if compresses and made else 0  # those of a whole prompt
    exact = 2 * config.num_kv_heads * config.head_dim * (cached + made + repeated)
    total = expected_bytes(config, geometry, spec, case) + 4 * (activations + exact)
    if compresses:
        total += _choosing_bytes(config, spec, case)
    if gpu:
        row = 2 * config.num_kv_heads * config.head_dim  # numbers of K and V of a token
        if cached:  # attention and projections of a prefill take 16-bit copies
            total += 2 * (queries + cached * row)
            total += 2 * chunk * max(config.hidden_size, config.intermediate_size)
        total += 4 * row * made  # in the cache's basis
        total += stats_for(geometry, spec, 0).tail_bytes + 4 * config.vocab_size
    return total


def _choosing_bytes(config: ModelConfig, spec: KVSpec, case: Case) -> int:
    """Bytes beside a prompt's keys and values while a layer of it is compressed."""
    prompt = max(case.depth, case.n_prompt)
    numbers = 2 * QUERIES * config.num_heads * config.head_dim  # queries, and those asked for
    if spec.compression is not None and spec.compression.policy == "h2o":  # it asks for all
        numbers += prompt * config.hidden_size
    if case.depth and case.n_prompt:  # exact tokens before a prompt, and it, in one piece
        rows = spec.sink + spec.window + case.n_prompt
        numbers += 2 * config.num_kv_heads * config.head_dim * rows
    return working_bytes(spec, prompt, config.num_kv_heads, config.head_dim) + 4 * numbers


def expected_bytes(config: ModelConfig, geometry: Geometry, spec: KVSpec, case: Case) -> int:
    """What a cache must hold at a case's end, or may hold at most if it compresses prompts."""
    if spec.compression is None:
        return estimate(geometry, spec, case.context)
    prompts = [case.depth, case.n_prompt]
    most = compressed_stats(geometry, spec, spec.compression, prompts, case.n_gen).bytes
    if spec.compression.recompress is not None:  # the newest queries are kept
        most += geometry.num_layers * QUERY_ROWS * config.num_heads * config.head_dim * 4
    return most


def context_bytes(shape: Shape, spec: KVSpec, tokens: int, sequences: int = 1) -> int:
    """Bytes of the caches of `sequences` sequences of so many tokens.

    In a format that compresses prompts also what reading one of them takes: a layer's exact keys
    and values, and what chooses from them. The cache itself may not grow at all.
    """
    total = estimate(shape.geometry, spec, tokens) * sequences
    if spec.compression is not None:
        total += 4 * 2 * shape.num_kv_heads * shape.head_dim * tokens
        total += working_bytes(spec, tokens, shape.num_kv_heads, shape.head_dim)
    return total
