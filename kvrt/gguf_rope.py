"""RoPE scaling of a GGUF, from its metadata or its table of frequency divisors."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import ConfigError, UnsupportedError
from .gguf_metadata import Metadata

# The llama3 values of every Llama 3.1, 3.2 and 3.3 model: low, high, original context.
_LLAMA3_KNOWN = (1.0, 4.0, 8192)


def rope_scaling(meta: Metadata) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json that the metadata asks for; None for plain RoPE.

    Raises UnsupportedError for another kind than linear and yarn, ConfigError for bad numbers.
    """
    kind = meta.text(meta.key("rope.scaling.type"), "")
    legacy = meta.key("rope.scale_linear")
    if not kind and legacy in meta.values:
        kind = "linear"
    if kind in ("", "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(
            f"{meta.source}: RoPE scaling {kind!r} is not supported; none, linear and yarn work"
        )
    default = meta.number(legacy, 1.0)
    factor = meta.number(meta.key("rope.scaling.factor"), default)
    if factor < 0.0 or (factor == 0.0 and kind == "yarn"):
        raise ConfigError(f"{meta.source}: RoPE scaling factor is {factor}, expected above 0")
    if factor in (0.0, 1.0) and kind == "linear":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = meta.integer(
        meta.key("rope.scaling.original_context_length"), meta.integer(meta.key("context_length"))
    )
    for suffix, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if meta.key(f"rope.scaling.{suffix}") in meta.values:
            scaling[name] = meta.number(meta.key(f"rope.scaling.{suffix}"))
    # GGUF's factor multiplies YaRN's own 0.1 ln(s) + 1; config.json's replaces it.
    for suffix in ("attn_factor", "yarn_attn_factor"):
        extra = meta.number(meta.key(f"rope.scaling.{suffix}"), 1.0)
        if extra != 1.0:
            scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
    if meta.number(meta.key("rope.scaling.yarn_ext_factor"), 1.0) != 1.0:
        raise UnsupportedError(f"{meta.source}: yarn_ext_factor other than 1 is not supported")
    return scaling


def llama3_scaling(meta: Metadata, factors: np.ndarray, config: Mapping[str, Any]) -> Any:
    """The llama3 rope_scaling whose frequency divisors are `factors`, (head_dim // 2,) f32.

    None when all are 1. Raises UnsupportedError when no llama3 parameters give these divisors.
    """
    head_dim, theta = config["head_dim"], config["rope_theta"]
    if factors.shape != (head_dim // 2,):
        raise ConfigError(
            f"{meta.source}: rope_freqs.weight has shape {factors.shape}, "
            f"expected ({head_dim // 2},)"
        )
    if theta <= 0.0:
        raise ConfigError(f"{meta.source}: RoPE base is {theta}, expected above 0")
    if np.all(factors == 1.0):
        return None
    if not (np.isfinite(factors).all() and factors.min() >= 1.0):
        raise UnsupportedError(f"{meta.source}: rope_freqs.weight holds divisors below 1 or NaN")
    if "rope_scaling" in config:
        kind = config["rope_scaling"]["rope_type"]
        raise UnsupportedError(f"{meta.source}: both rope_freqs.weight and {kind} RoPE scaling")
    turns = theta ** (-2.0 * np.arange(head_dim // 2) / head_dim) / (2 * math.pi)  # (hd/2,) f64
    factor = float(str(np.float32(factors.max())))
    original = meta.values.get(meta.key("rope.scaling.original_context_length"))
    candidates = [_LLAMA3_KNOWN, *_fit_llama3(factors, turns, factor, original)]
    for low, high, context in candidates:
        expected = _llama3_factors(turns, factor, low, high, context)
        if np.allclose(factors, expected, rtol=1e-5, atol=0):  # float32 rounding of the table
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise UnsupportedError(
        f"{meta.source}: rope_freqs.weight is not the llama3 RoPE scaling, the only table kvrt has"
    )


def _llama3_factors(
    turns: np.ndarray, factor: float, low: float, high: float, context: float
) -> np.ndarray:
    smooth = np.clip((context * turns - low) / (high - low), 0.0, 1.0)  # (head_dim // 2,) f64
    return 1.0 / ((1.0 - smooth) / factor + smooth)  # (head_dim // 2,) f64


def _fit_llama3(
    factors: np.ndarray, turns: np.ndarray, factor: float, original: object
) -> list[tuple[float, float, int]]:
    """Parameters from the divisors between 1 and `factor`, where the blend is linear in `turns`."""
    middle = (factors > 1.0 + 1e-6) & (factors < factor * (1 - 1e-6))  # (head_dim // 2,) bool
    if middle.sum() < 2:
        return []
    smooth = (1.0 / factors[middle].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    slope, start = np.polyfit(turns[middle], smooth, 1)
    if not (slope > 0 and start < 0):
        return []
    # Only two of (low, high, context) are determined; the file's own context or low = 1 is the
    # third, since scaling all three together changes nothing.
    if isinstance(original, int) and original > 0:
        span = original / slope
        return [(_tidy(-start * span), _tidy((1 - start) * span), original)]
    high = _tidy(1.0 - 1.0 / start)
    return [(1.0, high, round(slope * (high - 1.0)))]


def _tidy(value: float) -> float:
    return round(float(value), 3)
