"""What tells models apart: a hash of a model's shape and of a little of every weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .config import ModelConfig

_SAMPLE_BYTES = 256


def model_fingerprint(config: ModelConfig, weights: Mapping[str, np.ndarray]) -> str:
    """The sha256 of a model, in hex: of all that shapes its keys and values.

    Hashes the geometry and RoPE, and of each tensor its name, dtype, shape and first 256 bytes, so
    that weights are hardly read. Special tokens and the context limit do not count.
    """
    shape = {
        key: value
        for key, value in asdict(config).items()
        if key not in ("max_context", "bos_id", "eos_ids")
    }
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"\n{name} {tensor.dtype.name} {tensor.shape}\n".encode())
        count = -(-_SAMPLE_BYTES // tensor.dtype.itemsize)
        digest.update(tensor.reshape(-1)[:count].tobytes()[:_SAMPLE_BYTES])
    return digest.hexdigest()
