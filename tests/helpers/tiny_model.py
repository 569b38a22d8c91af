"""Tiny seeded models on disk: real config.json, safetensors and, if wanted, a byte-level tokenizer.

The weights are scaled so that mistakes show: attention is far from uniform, logits spread by a few
units, norms are not 1, biases are not small, and the epsilon of the norm matters.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from kvrt.config import ModelConfig
from kvrt.models.families import expected_tensors

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_WIDE = {"hidden_size": 128, "head_dim": 32}  # enough channels for yarn's ramp to have three parts
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# Narrow enough that the ramp begins above channel 0.
_YARN_NARROW = {**_YARN, "beta_fast": 4.0, "beta_slow": 0.5}

# Every shape and RoPE the one decoder must run: name -> arguments of write_tiny_model.
CASES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "llama-f32": {"dtype": "float32"},
    "llama-bf16": {"dtype": "bfloat16"},
    "llama-mixed-dtypes": {"dtype": "mixed"},
    "llama-sharded": {"sharded": True},
    "llama-tied": {"tie": True},
    "llama-theta": {"rope_theta": 500000.0},
    "llama-attention-bias": {"attention_bias": True},
    "llama-mlp-bias": {"mlp_bias": True},
    "llama-gqa1": {"num_heads": 3, "num_kv_heads": 3, "hidden_size": 96},
    "llama-gqa3": {"num_heads": 6, "num_kv_heads": 2, "hidden_size": 96},
    "llama-gqa7": {"num_heads": 14, "num_kv_heads": 2, "hidden_size": 112, "head_dim": 16},
    "llama-head-dim-80": {"num_heads": 2, "num_kv_heads": 1, "hidden_size": 160},
    "llama-head-dim-96": {"num_heads": 3, "num_kv_heads": 1, "hidden_size": 72, "head_dim": 96},
    "llama-head-dim-other": {"hidden_size": 80, "num_heads": 4, "head_dim": 32},
    "llama-linear": {"rope": {"type": "linear", "factor": 4.0}},
    "llama-llama3": {"rope": _LLAMA3},
    "llama-yarn": {**_WIDE, "rope": _YARN},
    "llama-yarn-narrow": {**_WIDE, "rope": _YARN_NARROW},
    "llama-yarn-untruncated": {**_WIDE, "rope": {**_YARN_NARROW, "truncate": False}},
    "llama-yarn-attention-factor": {**_WIDE, "rope": {**_YARN, "attention_factor": 0.7}},
    "llama-yarn-mscale": {**_WIDE, "rope": {**_YARN, "mscale": 0.5, "mscale_all_dim": 2.0}},
    "llama-rope-parameters": {
        **_WIDE,
        "rope": {**_YARN, "rope_theta": 50000.0},
        "new_rope_key": True,
    },
    "mistral": {"family": "mistral", "sliding_window": 7},
    "mistral-no-window": {"family": "mistral", "sliding_window": None},
    "qwen2": {"family": "qwen2"},
    "qwen2-gqa7-tied": {
        "family": "qwen2",
        "num_heads": 7,
        "num_kv_heads": 1,
        "hidden_size": 112,
        "tie": True,
    },
    "qwen2-window": {"family": "qwen2", "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "qwen3-attention-bias": {"family": "qwen3", "head_dim": 32, "attention_bias": True},
    "qwen3-window": {
        "family": "qwen3",
        "head_dim": 32,
        "num_layers": 3,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3-yarn": {"family": "qwen3", "head_dim": 32, "rope": _YARN_NARROW},
}


def write_case(folder: Path, name: str, *, seed: int = 0) -> ModelConfig:
    """Write the model of one of CASES into `folder`."""
    return write_tiny_model(folder, **{"seed": seed, **CASES[name]})


def write_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    dtype: str = "float16",
    seed: int = 0,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int = 320,
    max_context: int = 256,
    norm_eps: float = 1e-3,
    sliding_window: int | None = None,
    max_window_layers: int = 0,
    layer_types: list[str] | None = None,
    rope: Mapping[str, Any] | None = None,
    rope_theta: float = 10000.0,
    new_rope_key: bool = False,
    tie: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    sharded: bool = False,
    tokenizer: bool = False,
    config_extra: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Write a random model and return its config.

    dtype: float32, float16, bfloat16, or mixed (float32 norms and biases, bfloat16 matrices).
    rope: the RoPE table, under `rope_scaling`, or under `rope_parameters` with new_rope_key.
    config_extra: further keys of config.json; they win.
    """
    config: dict[str, Any] = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_context,
        "rms_norm_eps": norm_eps,
        "tie_word_embeddings": tie,
        "torch_dtype": "bfloat16" if dtype == "mixed" else dtype,
        "bos_token_id": None,
        "eos_token_id": 258,
    }
    if head_dim is not None:
        config["head_dim"] = head_dim
    if new_rope_key:
        config["rope_parameters"] = {"rope_theta": rope_theta, **(rope or {})}
    else:
        config["rope_theta"] = rope_theta
        if rope is not None:
            config["rope_scaling"] = dict(rope)
    if family in ("llama", "qwen3"):
        config["attention_bias"] = attention_bias
    if family == "llama":
        config["mlp_bias"] = mlp_bias
    if family == "mistral":
        config["sliding_window"] = sliding_window
    if family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = sliding_window is not None
        config["sliding_window"] = sliding_window
        config["max_window_layers"] = max_window_layers
        if layer_types is not None:
            config["layer_types"] = layer_types
    config.update(config_extra or {})

    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    result = ModelConfig.from_dir(folder)
    write_weights(folder, random_weights(result, dtype=dtype, seed=seed), sharded=sharded)
    if tokenizer:
        write_tokenizer(folder)
    return result


def random_weights(
    config: ModelConfig, *, dtype: str = "float16", seed: int = 0
) -> dict[str, np.ndarray]:
    """Lively random tensors for a config: Hugging Face name -> array of `dtype`."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in expected_tensors(config).items():
        noise = rng.standard_normal(shape)  # shape f64
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            value = 1.5 * (1.0 + 0.3 * noise)  # q.k / sqrt(head_dim) spreads by about 2
        elif name.endswith("norm.weight"):
            value = 1.0 + 0.3 * noise
        elif name.endswith(".bias"):
            value = 0.7 * noise
        elif name == "model.embed_tokens.weight":
            # A tied embedding is also the head, so it has the head's scale.
            value = noise * (2.5 * shape[1] ** -0.5 if config.tie_embeddings else 0.3)
        elif name == "lm_head.weight":
            value = noise * 2.5 * shape[1] ** -0.5
        elif name.endswith(("q_proj.weight", "k_proj.weight", "gate_proj.weight")):
            value = noise * 1.5 * shape[1] ** -0.5
        else:
            value = noise * shape[1] ** -0.5
        tensors[name] = value.astype(_numpy_dtype(dtype, len(shape)))
    return tensors


def _numpy_dtype(dtype: str, ndim: int) -> np.dtype[Any]:
    if dtype == "mixed":
        dtype = "bfloat16" if ndim > 1 else "float32"
    if dtype == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype({"float32": "<f4", "float16": "<f2"}[dtype])


def write_weights(
    folder: Path, tensors: Mapping[str, np.ndarray], *, sharded: bool = False
) -> None:
    """Write tensors as model.safetensors, or as three shards and their index."""
    if not sharded:
        save_safetensors(folder / "model.safetensors", tensors)
        return
    weight_map: dict[str, str] = {}
    for shard in range(3):
        file_name = f"model-{shard + 1:05d}-of-00003.safetensors"
        names = list(tensors)[shard::3]  # neighbours in different files
        save_safetensors(folder / file_name, {name: tensors[name] for name in names})
        weight_map.update(dict.fromkeys(names, file_name))
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def save_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one file with the safetensors package."""
    save_file(dict(tensors), path, metadata={"format": "pt"})


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer (ids 0..255 are bytes, then CONTROL_TOKENS) with a template."""
    vocab = {character: byte for byte, character in _byte_characters().items()}
    added = [
        {
            "id": 256 + index,
            "content": token,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for index, token in enumerate(CONTROL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "trim_offsets": True},
            "post_processor": None,
            "decoder": {**byte_level, "trim_offsets": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [],
            },
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": [258, 256]})


def _byte_characters() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level vocabularies."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    table = {byte: chr(byte) for byte in kept}
    table.update({byte: chr(256 + index) for index, byte in enumerate(rest)})
    return dict(sorted(table.items()))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
