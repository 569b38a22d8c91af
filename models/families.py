"""The model families that share the one decoder: what config.json leaves out, and tensor names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UnsupportedError

if TYPE_CHECKING:
    from ..config import ModelConfig


@dataclass(frozen=True)
class Family:
    """What the weights of a model type hold whether or not its config.json says so."""

    qkv_bias: bool | None  # None: as `attention_bias` says
    o_bias: bool | None
    mlp_bias: bool | None  # None: as `mlp_bias` says
    qk_norm: bool
    window: str  # "none" | "all" layers | "layers" (use_sliding_window, max_window_layers)
    head_dim: int | None = None  # when config.json has none; None: hidden_size / num_heads
    default_window: int | None = None  # tokens, when config.json has no `sliding_window`


FAMILIES: Mapping[str, Family] = {
    "llama": Family(None, None, None, qk_norm=False, window="none"),
    "mistral": Family(False, False, False, qk_norm=False, window="all", default_window=4096),
    "qwen2": Family(True, False, False, qk_norm=False, window="layers", default_window=4096),
    "qwen3": Family(
        None, None, False, qk_norm=True, window="layers", head_dim=128, default_window=4096
    ),
}

# Buffers that old checkpoints carry, and the copy of the embedding in a tied model. The weights
# ask only about names that are not expected, and an untied model expects lm_head.weight.
_IGNORED = re.compile(r"(model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight)")


def family(model_type: str) -> Family:
    """The family of a model_type; UnsupportedError when kvrt has none."""
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"model_type {ascii(model_type)[:60]} is not supported, {', '.join(FAMILIES)} are"
        )
    return FAMILIES[model_type]


def expected_tensors(config: "ModelConfig") -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder needs: Hugging Face name -> shape, in layer order."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, out_width: int, in_width: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out_width, in_width)
        if bias:
            shapes[f"{name}.bias"] = (out_width,)

    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        linear(f"{layer}.self_attn.q_proj", q_width, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_width, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_width, hidden, config.qkv_bias)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head_dim,)
        linear(f"{layer}.self_attn.o_proj", hidden, q_width, config.o_bias)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def ignored_tensor(name: str) -> bool:
    """Whether a tensor that is not expected may be there: rotary buffers, a tied model's head."""
    return _IGNORED.fullmatch(name) is not None
