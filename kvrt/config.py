"""config.json as a frozen ModelConfig: every alias, default and refusal is here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError, ModelNotFoundError, UnsupportedError
from .fields import Fields, read_object, shown
from .models.families import Family, expected_tensors, family
from .rope import RopeConfig

__all__ = ["ModelConfig", "RopeConfig"]

# Other spellings of a key, tried when the first is absent.
_ALIASES = {"max_position_embeddings": ("max_sequence_length",)}

# Far above any model, low enough that no product of two overflows 64 bits.
_MAX_WIDTH = 1 << 20
_MAX_LAYERS = 4096
_MAX_HEAD_DIM = 1024
_MAX_VOCAB = 1 << 24
_MAX_CONTEXT = 1 << 30

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Sizes are counts, `max_context` and `windows` are in tokens."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer; w: a query sees itself and the w - 1 tokens before
    bos_id: int | None
    eos_ids: tuple[int, ...]  # of config.json, then those only generation_config.json has

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Build from the contents of config.json and, if there is one, generation_config.json.

        Raises ConfigError for a missing key or an impossible value, UnsupportedError for a model
        type, RoPE, activation, quantisation or mixture of experts that kvrt does not run.
        """
        return _build(
            Fields(data, "config.json", _ALIASES),
            Fields({} if generation is None else generation, "generation_config.json"),
        )

    @classmethod
    def from_dir(cls, folder: Path) -> "ModelConfig":
        """Read the config files of a model folder. Raises as `from_dict`, and ModelNotFoundError
        when there is no folder or no config.json in it, StorageError when they cannot be read."""
        path = folder / "config.json"
        try:
            data = read_object(path)
        except FileNotFoundError:
            missing = "no config.json in it" if folder.is_dir() else "no such folder"
            raise ModelNotFoundError(f"{folder}: {missing}, expected a model folder") from None
        generation_path = folder / "generation_config.json"
        try:
            generation = read_object(generation_path)
        except FileNotFoundError:
            generation = {}
        return _build(Fields(data, str(path), _ALIASES), Fields(generation, str(generation_path)))

    @property
    def has_constant_key_bias(self) -> bool:
        """Whether every key holds the same bias, rotated; a norm behind it would change that."""
        return self.qkv_bias and not self.qk_norm

    @property
    def has_windows(self) -> bool:
        """Whether some layers see the newest tokens alone."""
        return any(window is not None for window in self.windows)

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in expected_tensors(self).values())


def _build(config: Fields, generation: Fields) -> ModelConfig:
    model_type = config.text("model_type")
    try:
        kind = family(model_type)
    except UnsupportedError as problem:
        raise UnsupportedError(f"{config.where}: {problem}") from None
    _refuse_unsupported(config)

    hidden_size = config.integer("hidden_size", high=_MAX_WIDTH)
    num_layers = config.integer("num_hidden_layers", high=_MAX_LAYERS)
    num_heads = config.integer("num_attention_heads", high=_MAX_WIDTH)
    num_kv_heads = config.integer("num_key_value_heads", num_heads, high=_MAX_WIDTH)
    if num_heads % num_kv_heads:
        raise config.fail("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    max_position = config.integer("max_position_embeddings", high=_MAX_CONTEXT)
    rope = RopeConfig.from_fields(config, max_position)
    attention_bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    bos_ids = config.token_ids("bos_token_id") or generation.token_ids("bos_token_id")
    eos_ids = config.token_ids("eos_token_id") + generation.token_ids("eos_token_id")
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", high=_MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, kind, hidden_size, num_heads),
        vocab_size=config.integer("vocab_size", high=_MAX_VOCAB),
        max_context=_max_context(rope, max_position),
        # Not defaulted: a wrong eps cannot be seen in the text it makes.
        norm_eps=config.number("rms_norm_eps", low=1e-30, high=1.0),
        tie_embeddings=config.flag("tie_word_embeddings", False),  # the default of all families
        qkv_bias=attention_bias if kind.qkv_bias is None else kind.qkv_bias,
        o_bias=attention_bias if kind.o_bias is None else kind.o_bias,
        mlp_bias=mlp_bias if kind.mlp_bias is None else kind.mlp_bias,
        qk_norm=kind.qk_norm,
        rope=rope,
        windows=_windows(config, kind, num_layers),
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
    )


def _refuse_unsupported(config: Fields) -> None:
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # two names of one function
        raise UnsupportedError(
            f"{config.where}: hidden_act {shown(activation)} is not supported, silu is"
        )
    for key in ("quantization_config", "quantization"):
        if key in config:
            value = config.raw(key)
            method = value.get("quant_method", value) if isinstance(value, dict) else value
            raise UnsupportedError(
                f"{config.where}: {key} ({shown(method)}): quantised weights are not supported, "
                "float32, float16 and bfloat16 are"
            )
    for key in _EXPERT_KEYS:
        if config.raw(key) not in (None, 0):
            raise UnsupportedError(
                f"{config.where}: {key} {shown(config.raw(key))}: mixtures of experts are not "
                "supported, dense models are"
            )


def _head_dim(config: Fields, kind: Family, hidden_size: int, num_heads: int) -> int:
    head_dim: int | None = config.integer("head_dim", kind.head_dim, high=_MAX_HEAD_DIM)
    if head_dim is None:
        head_dim, rest = divmod(hidden_size, num_heads)
        if rest or not head_dim:
            raise ConfigError(
                f"{config.where}: key 'head_dim' is missing and hidden_size {hidden_size} is no "
                f"multiple of num_attention_heads {num_heads}"
            )
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        raise ConfigError(
            f"{config.where}: key 'head_dim': got {head_dim}, expected an even number up to "
            f"{_MAX_HEAD_DIM}"
        )
    return head_dim


def _max_context(rope: RopeConfig, max_position: int) -> int:
    # yarn is often switched on without raising max_position_embeddings; linear and llama3 give
    # the stretched length there.
    if rope.kind == "yarn":
        stretched = int(rope.original_max_position * rope.factor)
        return min(max(max_position, stretched), _MAX_CONTEXT)
    return max_position


def _windows(config: Fields, kind: Family, num_layers: int) -> tuple[int | None, ...]:
    if kind.window == "none":
        return (None,) * num_layers
    # null is a choice (no window); only an absent key takes the family's default.
    default = None if "sliding_window" in config.data else kind.default_window
    window: int | None = config.integer("sliding_window", default, high=_MAX_CONTEXT)
    if kind.window == "all":
        return (window,) * num_layers
    if not config.flag("use_sliding_window", False):
        window = None
    first = config.integer("max_window_layers", 28, low=0, high=_MAX_LAYERS)
    layer_types = config.raw("layer_types")
    if layer_types is None:
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise config.fail("layer_types", f"a list of num_hidden_layers ({num_layers}) names")
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(
                f"{config.where}: layer_types {shown(layer_type)} is not supported, "
                "full_attention and sliding_attention are"
            )
    if window is None and "sliding_attention" in layer_types:
        raise ConfigError(
            f"{config.where}: layer_types asks for sliding_attention, but sliding_window and "
            "use_sliding_window give no window"
        )
    return tuple(window if name == "sliding_attention" else None for name in layer_types)
