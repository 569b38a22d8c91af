"""The family in float64, naively, from the papers: shares no code with kvrt, and no cleverness.

Reads config.json raw and the weights through the safetensors package.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

Rounding = Callable[[np.ndarray], np.ndarray]


@dataclass
class Reference:
    """Everything one forward pass produced."""

    logits: np.ndarray  # (n, vocab_size) f64
    keys: list[np.ndarray] = field(default_factory=list)  # per layer (n, kv_heads, head_dim) f64
    values: list[np.ndarray] = field(default_factory=list)  # the same shape; keys are after RoPE
    hidden: list[np.ndarray] = field(default_factory=list)  # per layer, after it: (n, hidden) f64
    attention: list[np.ndarray] = field(default_factory=list)  # per layer (heads, n, n) f64


def reference_logits(folder: Path, token_ids: Sequence[int]) -> np.ndarray:
    """Logits of every position: (n, vocab_size) f64."""
    return reference_forward(folder, token_ids).logits


def reference_forward(
    folder: Path, token_ids: Sequence[int], cache_rounding: Rounding = lambda x: x
) -> Reference:
    """One pass over `token_ids`; `cache_rounding` is what storing does to keys and values."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    w = load_tensors(folder)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    eps = config["rms_norm_eps"]
    n = len(token_ids)
    cos, sin = rope_tables(config, head_dim, n)  # (n, head_dim // 2) f64 each

    x = w["model.embed_tokens.weight"][list(token_ids)]  # (n, hidden) f64
    out = Reference(x)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."

        def linear(inputs: np.ndarray, name: str, layer: str = layer) -> np.ndarray:
            product = inputs @ w[f"{layer}{name}.weight"].T  # (n, out_width) f64
            bias = w.get(f"{layer}{name}.bias")
            return product if bias is None else product + bias

        h = rms_norm(x, w[layer + "input_layernorm.weight"], eps)
        q = linear(h, "self_attn.q_proj").reshape(n, heads, head_dim)
        k = linear(h, "self_attn.k_proj").reshape(n, kv_heads, head_dim)
        v = linear(h, "self_attn.v_proj").reshape(n, kv_heads, head_dim)
        if config["model_type"] == "qwen3":
            q = rms_norm(q, w[layer + "self_attn.q_norm.weight"], eps)
            k = rms_norm(k, w[layer + "self_attn.k_norm.weight"], eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = cache_rounding(k), cache_rounding(v)
        mixed, probabilities = attention(q, k, v, layer_window(config, index))
        x = x + linear(mixed.reshape(n, heads * head_dim), "self_attn.o_proj")

        h = rms_norm(x, w[layer + "post_attention_layernorm.weight"], eps)
        gate, up = linear(h, "mlp.gate_proj"), linear(h, "mlp.up_proj")
        x = x + linear(silu(gate) * up, "mlp.down_proj")
        out.keys.append(k)
        out.values.append(v)
        out.hidden.append(x)
        out.attention.append(probabilities)

    x = rms_norm(x, w["model.norm.weight"], eps)
    tied = config.get("tie_word_embeddings", False)
    head = w["model.embed_tokens.weight" if tied else "lm_head.weight"]
    out.logits = x @ head.T  # (n, vocab_size) f64
    return out


def load_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of every safetensors file of a folder, widened to f64."""
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, stored in safetensors.deserialize(path.read_bytes()):
            raw = bytes(stored["data"])
            if stored["dtype"] == "BF16":
                bits = np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)
                flat = bits.view(np.float32)
            else:
                flat = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[stored["dtype"]])
            tensors[name] = flat.astype(np.float64).reshape(stored["shape"])
    return tensors


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Root mean square norm over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    """x times its logistic function."""
    return x / (1.0 + np.exp(-x))


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn each pair (i, i + head_dim/2) of x (n, heads, head_dim) by its position's angle."""
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for i in range(half):
        a, b = x[:, :, i], x[:, :, i + half]  # (n, heads) each
        c, s = cos[:, i, None], sin[:, i, None]  # (n, 1) each
        out[:, :, i] = a * c - b * s
        out[:, :, i + half] = b * c + a * s
    return out


def turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """x (n, heads, dim) with each pair (i, i + dim/2) as a complex number, turned; f64."""
    half = x.shape[-1] // 2
    pairs = x[..., :half].astype(np.float64) + 1j * x[..., half:]  # (n, heads, half)
    pairs = pairs * np.exp(1j * angles)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def hadamard_matrix(size: int) -> np.ndarray:
    """H[i, j] = (-1)^(ones common to i and j) / sqrt(size)."""
    common = np.arange(size)[:, None] & np.arange(size)
    ones = np.array([[bin(number).count("1") for number in row] for row in common])
    return (-1.0) ** ones / np.sqrt(size)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention of the last len(q) positions over all of k, v.

    q (q_len, heads, head_dim), k and v (kv_len, kv_heads, head_dim), all f64. A window lets a
    query see itself and the window - 1 tokens before. Returns the output, shaped as q, and the
    probabilities (heads, q_len, kv_len).
    """
    q_len, heads, head_dim = q.shape
    kv_len, kv_heads, _ = k.shape
    group = heads // kv_heads
    out = np.zeros_like(q)
    probabilities = np.zeros((heads, q_len, kv_len))
    for row in range(q_len):
        position = kv_len - q_len + row
        first = 0 if window is None else max(0, position - window + 1)
        seen = slice(first, position + 1)
        for head in range(heads):
            scores = k[seen, head // group] @ q[row, head] / math.sqrt(head_dim)  # (seen,) f64
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[row, head] = weights @ v[seen, head // group]
            probabilities[head, row, seen] = weights
    return out, probabilities


def layer_window(config: dict[str, Any], index: int) -> int | None:
    """The sliding window of a layer, None for full attention."""
    window = config.get("sliding_window")
    if config["model_type"] == "mistral":
        return window
    if config["model_type"] in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        if config.get("layer_types"):
            return window if config["layer_types"][index] == "sliding_attention" else None
        return window if index >= config["max_window_layers"] else None
    return None


def rope_tables(config: dict[str, Any], head_dim: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of positions 0..n-1, yarn's factor included: (n, head_dim // 2) f64 each."""
    frequencies, scaling = rope_frequencies(config, head_dim)
    angles = np.outer(np.arange(n), frequencies)  # (n, head_dim // 2) f64
    return np.cos(angles) * scaling, np.sin(angles) * scaling


def rope_frequencies(config: dict[str, Any], head_dim: int) -> tuple[list[float], float]:
    """Radians per position of each pair, and the factor of cos and sin."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    plain = [1.0 / theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
    if kind == "default":
        return plain, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return [frequency / factor for frequency in plain], 1.0
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "llama3":
        return [_llama3(frequency, rope, original) for frequency in plain], 1.0
    assert kind == "yarn", kind
    return _yarn(plain, rope, original, theta, head_dim), _yarn_scaling(rope)


def _llama3(frequency: float, rope: dict[str, Any], original: int) -> float:
    """Long waves are stretched, short ones kept, those between mixed."""
    wavelength = 2 * math.pi / frequency
    longest_kept = original / rope["high_freq_factor"]
    shortest_stretched = original / rope["low_freq_factor"]
    if wavelength < longest_kept:
        return frequency
    if wavelength > shortest_stretched:
        return frequency / rope["factor"]
    smooth = (original / wavelength - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    return (1 - smooth) * frequency / rope["factor"] + smooth * frequency


def _yarn(
    plain: list[float], rope: dict[str, Any], original: int, theta: float, head_dim: int
) -> list[float]:
    """Between the channels of beta_fast and beta_slow rotations, a linear ramp to stretched."""

    def channel(rotations: float) -> float:
        # Solve rotations = original / (2 pi theta^(2 i / head_dim)) for i.
        return head_dim / 2 * math.log(original / (rotations * 2 * math.pi)) / math.log(theta)

    first = channel(rope.get("beta_fast", 32))
    last = channel(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    result = []
    for i, frequency in enumerate(plain):
        stretched_share = min(max((i - first) / (last - first), 0.0), 1.0)
        result.append(
            stretched_share * frequency / rope["factor"] + (1 - stretched_share) * frequency
        )
    return result


def _yarn_scaling(rope: dict[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]

    def temperature(mscale: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * mscale * math.log(rope["factor"]) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return temperature(rope["mscale"]) / temperature(rope["mscale_all_dim"])
    return temperature(1.0)
