"""GGUF metadata to the dictionaries of config.json and generation_config.json."""

from collections.abc import Mapping
from typing import Any

from .errors import ConfigError, UnsupportedError
from .fields import shown
from .gguf_metadata import Metadata
from .gguf_rope import rope_scaling

# GGUF architecture -> (model_type, architectures[0]).
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
# Keys that change the arithmetic in ways no supported family has; these values mean "unused".
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "use_parallel_residual": (False,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.alpha": (0.0,),
}


def check_architecture(meta: Metadata) -> None:
    """Refuse (UnsupportedError) a GGUF of another model family."""
    if meta.arch not in ARCHITECTURES:
        raise UnsupportedError(
            f"{meta.source}: GGUF architecture {meta.arch!r} is not supported; "
            f"{', '.join(ARCHITECTURES)} work (Mistral files say llama)"
        )


def model_config(
    meta: Metadata, *, vocab_size: int, tied: bool, biases: Mapping[str, bool]
) -> dict[str, Any]:
    """The config.json of a GGUF, RoPE frequencies table (`rope_freqs`) not yet applied.

    `biases` says whether the file holds attention (`attn`) and MLP (`mlp`) biases.
    Raises UnsupportedError for another architecture or arithmetic, ConfigError for missing keys.
    """
    check_architecture(meta)
    _refuse_other_arithmetic(meta)
    model_type, architecture = ARCHITECTURES[meta.arch]
    num_heads = meta.integer(meta.key("attention.head_count"))
    hidden_size = meta.integer(meta.key("embedding_length"))
    if not num_heads or not hidden_size:
        raise ConfigError(f"{meta.source}: no heads or no hidden size in the metadata")
    head_dim = meta.integer(meta.key("attention.key_length"), hidden_size // num_heads)
    _check_head_dims(meta, head_dim)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": meta.integer(meta.key("feed_forward_length")),
        "num_hidden_layers": meta.integer(meta.key("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.integer(meta.key("attention.head_count_kv"), num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": meta.integer(meta.key("context_length")),
        "rms_norm_eps": meta.number(meta.key("attention.layer_norm_rms_epsilon")),
        "rope_theta": meta.number(meta.key("rope.freq_base"), 10000.0),
        "tie_word_embeddings": tied,
        "torch_dtype": "float16",
        "use_cache": True,
        **_token_ids(meta),
    }
    if model_type != "qwen2":  # there the q, k and v biases are part of the family
        config["attention_bias"] = biases["attn"]
    if model_type == "llama":
        config["mlp_bias"] = biases["mlp"]
    _set_window(meta, config)
    scaling = rope_scaling(meta)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def generation_config(
    meta: Metadata, recommended: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The generation_config.json: every end-of-turn id the file names, as an int or a list, and the
    sampling that is recommended for the model."""
    ids = [meta.token_id(name) for name in ("eos", "eot", "eom")]
    stops = list(dict.fromkeys(index for index in ids if index is not None))
    # The marker lets other programs derive the file anew, which would lose a recommendation.
    data: dict[str, Any] = {} if recommended else {"_from_model_config": True}
    data.update(_token_ids(meta))
    if len(stops) > 1:
        data["eos_token_id"] = stops
    return {**data, **(recommended or {})}


def _refuse_other_arithmetic(meta: Metadata) -> None:
    for suffix, neutral in _NEUTRAL.items():
        key = meta.key(suffix)
        if key in meta.values and meta.values[key] not in neutral:
            what = "mixture of experts" if suffix == "expert_count" else "this arithmetic"
            raise UnsupportedError(
                f"{meta.source}: {key} = {shown(meta.values[key])}: {what} is not supported; "
                "dense Llama, Mistral, Qwen2 and Qwen3 models work"
            )


def _check_head_dims(meta: Metadata, head_dim: int) -> None:
    for suffix, what in (("attention.value_length", "value"), ("rope.dimension_count", "rotary")):
        width = meta.integer(meta.key(suffix), head_dim)
        if width != head_dim:
            raise UnsupportedError(
                f"{meta.source}: {what} width {width} differs from head_dim {head_dim}; "
                "only equal widths work"
            )


def _token_ids(meta: Metadata) -> dict[str, int]:
    named = {"bos": meta.token_id("bos"), "eos": meta.token_id("eos")}
    named["pad"] = meta.token_id("padding")
    return {f"{name}_token_id": index for name, index in named.items() if index is not None}


def _set_window(meta: Metadata, config: dict[str, Any]) -> None:
    window = meta.integer(meta.key("attention.sliding_window"), 0)
    if not window:
        return
    pattern = meta.key("attention.sliding_window_pattern")
    if pattern in meta.values:
        raise UnsupportedError(f"{meta.source}: {pattern} is not supported; one window works")
    config["sliding_window"] = window
    if config["model_type"] == "llama":
        config["model_type"], config["architectures"] = "mistral", ["MistralForCausalLM"]
        if config.pop("attention_bias") or config.pop("mlp_bias"):
            raise UnsupportedError(f"{meta.source}: a sliding window together with biases")
    else:
        config["use_sliding_window"] = True
        config["max_window_layers"] = 0
