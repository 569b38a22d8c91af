"""How far a format's next-token predictions are from f16's, by the decode path that is timed.

The model first writes a text of its own with an f16 cache. Then each format reads the beginning of
it and decodes the rest token by token, as given; its logits are compared with f16's. This finds a
broken kernel; quality is measured by `kvrt eval`, on real texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CodecError
from ..evaluate import Predictions
from ..kvstore import KVSpec
from ..sampler import Sampler, SamplingParams
from .fill import Told

if TYPE_CHECKING:
    from ..generate import Model

CONTEXT = 512
STEPS = 64
_PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True)
class Agreement:
    """Beside f16, over `tokens` decoded tokens: the mean Kullback-Leibler divergence in nats, and
    the per cent of tokens with the same likeliest successor."""

    kld: float
    top1: float
    tokens: int


def planned_tokens(formats: int) -> int:
    """Tokens that `agreements` will tell of, at most."""
    return (CONTEXT + STEPS) * (formats + 2)


def agreements(
    model: Model, specs: Sequence[KVSpec], told: Told = lambda count: None
) -> list[Agreement]:
    """The agreement of each format. `told` hears of every token computed.

    Raises CodecError for logits that are not finite.
    """
    steps = min(STEPS, model.max_context // 2)
    context = min(CONTEXT, model.max_context - steps)
    plain = KVSpec.parse("f16")
    ids = _own_text(model, plain, context + steps, told)
    base = Predictions(_decoded(model, plain, ids, context))
    told(len(ids))
    found = []
    for spec in specs:
        predictions = Predictions(_decoded(model, spec, ids, context))
        told(len(ids))
        kld = float(predictions.divergence(base).mean())
        if not np.isfinite(kld):
            raise CodecError(f"cache format {spec} gives logits that are not finite")
        hits = predictions.likeliest == base.likeliest
        found.append(Agreement(max(kld, 0.0), 100 * float(hits.mean()), steps))
    return found


def _own_text(model: Model, spec: KVSpec, tokens: int, told: Told) -> list[int]:
    """Token ids that the model draws itself."""
    store, sampler = model.new_store(spec), Sampler(_PLAIN)
    start = model.tokenizer.bos_id
    ids = [0 if start is None else start]
    while len(ids) < tokens:
        ids.append(sampler.sample(model.decoder.decode(ids[-1], store), ids))
        told(1)
    return ids


def _decoded(model: Model, spec: KVSpec, ids: list[int], context: int) -> np.ndarray:
    """Logits (len(ids) - context, vocab_size) f32 of decoding what follows the context."""
    store = model.new_store(spec)
    model.decoder.prefill(ids[:context], store)
    return np.stack([model.decoder.decode(token_id, store) for token_id in ids[context:]])
