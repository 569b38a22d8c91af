"""Shapes of published models: what memory arithmetic needs, and configs that kvrt can run.

They are the makers' base models. Tests hold the parameter counts against the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .config import ModelConfig

if TYPE_CHECKING:
    from .kvstore import Geometry

_F16 = np.dtype("<f2")
_BF16 = np.dtype(ml_dtypes.bfloat16)


UNTRAINED_CONTEXT = 1 << 24
"""Most tokens of context with random weights, which were trained for no length."""


@dataclass(frozen=True)
class Shape:
    """What memory arithmetic must know of a model; `config` where kvrt can also run it.

    `dtype` is the type its matrices are stored in, `max_context` the tokens it was trained for
    and `context_limit` those that a cache of it may be asked to hold.
    """

    name: str
    model_type: str
    parameters: int
    weight_bytes: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    dtype: np.dtype[Any]
    key_bias: bool
    config: ModelConfig | None
    context_limit: int = UNTRAINED_CONTEXT

    @classmethod
    def of(
        cls,
        name: str,
        config: ModelConfig,
        dtype: np.dtype[Any],
        weight_bytes: int | None = None,
    ) -> Shape:
        """The shape of a config; without `weight_bytes` all weights are of `dtype`."""
        parameters = config.parameters()
        return cls(
            name=name,
            model_type=config.model_type,
            parameters=parameters,
            weight_bytes=parameters * dtype.itemsize if weight_bytes is None else weight_bytes,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_context=config.max_context,
            dtype=dtype,
            key_bias=config.has_constant_key_bias,
            config=config,
        )

    @property
    def geometry(self) -> Geometry:
        """What a cache must know of it."""
        from .kvstore import Geometry

        windows = self.config is not None and self.config.has_windows
        return Geometry(self.num_layers, self.num_kv_heads, self.head_dim, self.key_bias, windows)


def _config(
    model_type: str,
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    context: int,
    **others: Any,
) -> ModelConfig:
    """A config in the words of config.json; heads: of queries, of keys and values."""
    words = {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return ModelConfig.from_dict({**words, **others})


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    }


_QWEN = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "bos_token_id": 151_643,
    "eos_token_id": 151_643,
}
_TIED = {"tie_word_embeddings": True}


def _runnable() -> dict[str, Shape]:
    """The shapes that kvrt can also compute with."""
    configs = {
        "llama-7b": (
            _F16,
            _config("llama", 32_000, 4096, 11_008, 32, (32, 32), 2048, rms_norm_eps=1e-6),
        ),
        "llama-2-7b": (_F16, _config("llama", 32_000, 4096, 11_008, 32, (32, 32), 4096)),
        "llama-2-13b": (_F16, _config("llama", 32_000, 5120, 13_824, 40, (40, 40), 4096)),
        "llama-3.1-8b": (
            _BF16,
            _config("llama", 128_256, 4096, 14_336, 32, (32, 8), 131_072, **_llama3(8.0)),
        ),
        "llama-3.2-1b": (
            _BF16,
            _config("llama", 128_256, 2048, 8192, 16, (32, 8), 131_072, **_llama3(32.0), **_TIED),
        ),
        "llama-3.2-3b": (
            _BF16,
            _config("llama", 128_256, 3072, 8192, 28, (24, 8), 131_072, **_llama3(32.0), **_TIED),
        ),
        "mistral-7b": (  # v0.1; later versions have no window
            _BF16,
            _config("mistral", 32_000, 4096, 14_336, 32, (32, 8), 32_768, sliding_window=4096),
        ),
        "qwen2.5-7b": (
            _BF16,
            _config("qwen2", 152_064, 3584, 18_944, 28, (28, 4), 131_072, **_QWEN),
        ),
        "qwen3-4b": (
            _BF16,
            _config(
                "qwen3", 151_936, 2560, 9728, 36, (32, 8), 40_960, head_dim=128, **_QWEN, **_TIED
            ),
        ),
        "smollm2-135m": (
            _BF16,
            _config(
                "llama", 49_152, 576, 1536, 30, (9, 3), 8192,
                rope_theta=100_000.0, bos_token_id=0, eos_token_id=0, **_TIED,
            ),
        ),
    }  # fmt: skip
    return {name: Shape.of(name, config, dtype) for name, (dtype, config) in configs.items()}


def opt_parameters(hidden: int, layers: int, vocab: int = 50_272, context: int = 2048) -> int:
    """Of OPT (Zhang et al. 2022): biases everywhere, learned positions, a tied head."""
    attention = 4 * (hidden * hidden + hidden)
    inner = 4 * hidden
    mlp = 2 * hidden * inner + inner + hidden
    norm = 2 * hidden  # gain and bias
    positions = (context + 2) * hidden  # they begin at 2
    return vocab * hidden + positions + layers * (attention + mlp + 2 * norm) + norm


def _opt_175b() -> Shape:
    hidden, layers, heads, context = 12_288, 96, 96, 2048
    parameters = opt_parameters(hidden, layers, context=context)
    return Shape(
        name="opt-175b",
        model_type="opt",
        parameters=parameters,
        weight_bytes=parameters * _F16.itemsize,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_context=context,
        dtype=_F16,
        key_bias=False,  # it has one, but in keys that no rotation changes: nothing to take out
        config=None,
    )


def _mixtral_8x7b() -> Shape:
    """Jiang et al. 2024: mistral's layers with eight MLPs and a router to choose two of them."""
    hidden, inner, layers, experts = 4096, 14_336, 32, 8
    dense = _config(
        "mistral", 32_000, hidden, inner, layers, (32, 8), 32_768, sliding_window=None
    )  # what a token would pass through with one MLP a layer
    more = (experts - 1) * 3 * hidden * inner + experts * hidden
    parameters = dense.parameters() + layers * more
    return replace(
        Shape.of("mixtral-8x7b", dense, _BF16, parameters * _BF16.itemsize),
        model_type="mixtral",
        parameters=parameters,
        config=None,
    )


def _qwen2_5_72b() -> Shape:
    """Larger than any device that kvrt computes on."""
    config = _config("qwen2", 152_064, 8192, 29_568, 80, (64, 8), 131_072, **_QWEN)
    return replace(Shape.of("qwen2.5-72b", config, _BF16), config=None)


SHAPES: Mapping[str, Shape] = {
    **_runnable(),
    **{shape.name: shape for shape in (_opt_175b(), _mixtral_8x7b(), _qwen2_5_72b())},
}
"""Name -> shape; those for memory arithmetic only have no config."""
