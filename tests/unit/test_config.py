"""config.json: real models read right, aliases and defaults, refusals by name, bad files."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvrt.config import ModelConfig, RopeConfig
from kvrt.errors import ConfigError, KvrtError, ModelNotFoundError, StorageError, UnsupportedError
from kvrt.models.families import FAMILIES, expected_tensors, family, ignored_tensor

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN25_05B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# Parameter counts as the model cards and checkpoints have them.
REAL = {
    "smollm2": (SMOLLM2, 134_515_008, 64),
    "llama-3.1-8b": (LLAMA_31_8B, 8_030_261_248, 128),
    "mistral-7b": (MISTRAL_7B, 7_241_732_096, 128),
    "qwen2.5-0.5b": (QWEN25_05B, 494_032_768, 64),
    "qwen3-0.6b": (QWEN3_06B, 596_049_920, 128),
}


def read(base: dict[str, Any], *without: str, **changes: Any) -> ModelConfig:
    """The config of a model with some keys left out and some changed."""
    data = {key: value for key, value in base.items() if key not in without}
    return ModelConfig.from_dict({**data, **changes})


@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str) -> None:
    data, parameters, head_dim = REAL[name]
    config = ModelConfig.from_dict(data)
    assert config.parameters() == parameters
    assert config.head_dim == head_dim
    assert config.model_type == data["model_type"]
    assert config.hidden_size == data["hidden_size"]
    assert config.intermediate_size == data["intermediate_size"]
    assert config.num_layers == data["num_hidden_layers"] == len(config.windows)
    assert config.num_heads == data["num_attention_heads"]
    assert config.num_kv_heads == data["num_key_value_heads"]
    assert config.group_size == data["num_attention_heads"] // data["num_key_value_heads"]
    assert config.vocab_size == data["vocab_size"]
    assert config.max_context == data["max_position_embeddings"]
    assert config.norm_eps == data["rms_norm_eps"]
    assert config.tie_embeddings == data["tie_word_embeddings"]
    assert config.rope.theta == data["rope_theta"]
    assert config.bos_id == data["bos_token_id"]
    biased = data["model_type"] == "qwen2"
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (biased, False, False)
    assert config.qk_norm == (data["model_type"] == "qwen3")
    window = 4096 if data["model_type"] == "mistral" else None
    assert set(config.windows) == {window}


def test_llama3_rope_is_read() -> None:
    assert ModelConfig.from_dict(LLAMA_31_8B).rope == RopeConfig(
        "llama3", 500000.0, 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0
    )


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        read(SMOLLM2).head_dim = 32  # type: ignore[misc]


def test_head_dim_is_read_not_derived() -> None:
    assert read(SMOLLM2, head_dim=80).head_dim == 80
    assert read(SMOLLM2, head_dim=None).head_dim == 64
    assert read(QWEN3_06B, "head_dim").head_dim == 128  # 1024 / 16 is 64, the family's is 128
    shapes = expected_tensors(read(SMOLLM2, head_dim=80))
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (9 * 80, 576)
    assert shapes["model.layers.0.self_attn.v_proj.weight"] == (3 * 80, 576)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (576, 9 * 80)


def test_kv_heads_default_to_heads() -> None:
    assert read(SMOLLM2, "num_key_value_heads").num_kv_heads == 9
    assert read(SMOLLM2, num_key_value_heads=None).group_size == 1


@pytest.mark.parametrize("name", REAL)
def test_head_is_untied_by_default(name: str) -> None:
    config = read(REAL[name][0], "tie_word_embeddings")
    assert not config.tie_embeddings
    assert "lm_head.weight" in expected_tensors(config)
    assert "lm_head.weight" not in expected_tensors(read(REAL[name][0], tie_word_embeddings=True))


def test_context_aliases_and_yarn_stretch() -> None:
    data = {"max_sequence_length": 2048}
    assert read(SMOLLM2, "max_position_embeddings", **data).max_context == 2048
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read(QWEN25_05B, rope_scaling=yarn).max_context == 131072
    linear = {"type": "linear", "factor": 4.0}
    assert read(SMOLLM2, rope_scaling=linear).max_context == 8192


@pytest.mark.parametrize(
    "base, changes, qkv, o, mlp",
    [
        (SMOLLM2, {"attention_bias": True}, True, True, False),
        (SMOLLM2, {"mlp_bias": True}, False, False, True),
        (MISTRAL_7B, {"attention_bias": True, "mlp_bias": True}, False, False, False),
        (QWEN25_05B, {"attention_bias": False}, True, False, False),
        (QWEN3_06B, {"attention_bias": True}, True, True, False),
    ],
)
def test_biases(
    base: dict[str, Any], changes: dict[str, Any], qkv: bool, o: bool, mlp: bool
) -> None:
    config = read(base, **changes)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (qkv, o, mlp)
    shapes = expected_tensors(config)
    layer = "model.layers.1."
    for projection in ("q", "k", "v"):
        assert (f"{layer}self_attn.{projection}_proj.bias" in shapes) == qkv
    assert (f"{layer}self_attn.o_proj.bias" in shapes) == o
    assert (f"{layer}mlp.down_proj.bias" in shapes) == mlp


def test_q_and_k_norm_are_as_wide_as_a_head() -> None:
    shapes = expected_tensors(read(QWEN3_06B))
    assert shapes["model.layers.27.self_attn.q_norm.weight"] == (128,)
    assert shapes["model.layers.27.self_attn.k_norm.weight"] == (128,)
    assert not any("q_norm" in name for name in expected_tensors(read(QWEN25_05B)))


def test_only_known_extras_are_ignored() -> None:
    assert ignored_tensor("model.layers.11.self_attn.rotary_emb.inv_freq")
    assert ignored_tensor("lm_head.weight")
    for name in ("lm_head.bias", "model.layers.0.mlp.up_proj.weight", "x.lm_head.weight", ""):
        assert not ignored_tensor(name)


SLIDE, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    "base, changes, windows",
    [
        (MISTRAL_7B, {"sliding_window": 7}, (7, 7, 7, 7)),
        (MISTRAL_7B, {"sliding_window": None}, (None,) * 4),
        (SMOLLM2, {"sliding_window": 7}, (None,) * 4),
        (QWEN25_05B, {"sliding_window": 7}, (None,) * 4),
        (QWEN25_05B, {"sliding_window": 7, "use_sliding_window": True}, (None,) * 4),
        (
            QWEN25_05B,
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 7),
        ),
        (
            QWEN3_06B,
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0},
            (9, 9, 9, 9),
        ),
        (
            QWEN3_06B,
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": [SLIDE, FULL, SLIDE, FULL],
            },
            (9, None, 9, None),
        ),
        (QWEN3_06B, {"layer_types": [FULL] * 4}, (None,) * 4),
    ],
)
def test_windows(
    base: dict[str, Any], changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(base, num_hidden_layers=4, **changes).windows == windows


def test_absent_window_of_mistral_is_the_family_default() -> None:
    assert set(read(MISTRAL_7B, "sliding_window").windows) == {4096}


@pytest.mark.parametrize(
    "layer_types, error, word",
    [
        ([SLIDE] * 3, ConfigError, "num_hidden_layers"),
        (SLIDE, ConfigError, "'layer_types'"),
        ([SLIDE, FULL, SLIDE, "chunked_attention"], UnsupportedError, "chunked_attention"),
        ([SLIDE, FULL, SLIDE, 3], UnsupportedError, "3"),
        ([SLIDE, FULL, SLIDE, [FULL]], UnsupportedError, "full_attention"),
    ],
)
def test_bad_layer_types(layer_types: Any, error: type[KvrtError], word: str) -> None:
    with pytest.raises(error, match=word):
        read(
            QWEN3_06B,
            num_hidden_layers=4,
            sliding_window=5,
            use_sliding_window=True,
            layer_types=layer_types,
        )


def test_sliding_layers_without_a_window_contradict() -> None:
    with pytest.raises(ConfigError, match="use_sliding_window"):
        read(QWEN3_06B, num_hidden_layers=1, layer_types=[SLIDE])


@pytest.mark.parametrize(
    "config_eos, generation_eos, expected",
    [
        (2, None, (2,)),
        ([5, 3], None, (5, 3)),
        (None, None, ()),
        (None, 7, (7,)),
        (2, [2, 0], (2, 0)),
        ([1, 2], [3, 2, 1], (1, 2, 3)),
    ],
)
def test_eos_is_the_union(config_eos: Any, generation_eos: Any, expected: tuple[int, ...]) -> None:
    data = {**SMOLLM2, "eos_token_id": config_eos}
    generation = {"eos_token_id": generation_eos}
    assert ModelConfig.from_dict(data, generation).eos_ids == expected


def test_bos_of_the_generation_config_fills_a_gap_only() -> None:
    data = {**SMOLLM2, "bos_token_id": None}
    assert ModelConfig.from_dict(data).bos_id is None
    assert ModelConfig.from_dict(data, {"bos_token_id": 4}).bos_id == 4
    assert ModelConfig.from_dict(SMOLLM2, {"bos_token_id": 4}).bos_id == 1


@pytest.mark.parametrize("value", ["2", -1, True, 2.0, [1, "2"], [[1]], {"id": 2}, 2**31])
@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_bad_eos(value: Any, where: str) -> None:
    generation = {"eos_token_id": value} if where.startswith("gen") else {}
    data = {**SMOLLM2, **({} if generation else {"eos_token_id": value})}
    with pytest.raises(ConfigError, match=f"^{where}: key 'eos_token_id'"):
        ModelConfig.from_dict(data, generation)


REQUIRED = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_keys_are_named(key: str) -> None:
    for changes in ({}, {key: None}):
        with pytest.raises(ConfigError, match=f"config.json: required key '{key}' is missing"):
            read(SMOLLM2, key, **changes)


_INTEGERS = [key for key in REQUIRED if key not in ("model_type", "rms_norm_eps")]


@pytest.mark.parametrize(
    "value",
    ["576", 0, -1, True, 576.0, float("nan"), [576], {}, 2**62, pytest.param(10**5000, id="huge")],
)
@pytest.mark.parametrize("key", [*_INTEGERS, "num_key_value_heads", "head_dim"])
def test_bad_sizes_are_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read(SMOLLM2, **{key: value})
    message = str(caught.value)
    assert message.startswith(f"config.json: key '{key}': got ")
    assert "\n" not in message and len(message) < 200


@pytest.mark.parametrize(
    "value", ["1e-5", 0, -1e-5, float("nan"), float("inf"), True, 2.0, 10**400], ids=repr
)
def test_bad_eps(value: Any) -> None:
    with pytest.raises(ConfigError, match="'rms_norm_eps'"):
        read(SMOLLM2, rms_norm_eps=value)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"num_key_value_heads": 2}, r"'num_key_value_heads': got 2, .*\(9\)"),
        ({"num_key_value_heads": 18}, "'num_key_value_heads'"),
        ({"head_dim": 63}, "'head_dim': got 63, expected an even"),
        ({"hidden_size": 9 * 63}, "'head_dim': got 63, expected an even"),
        ({"hidden_size": 577}, "577 is no multiple of num_attention_heads 9"),
        ({"hidden_size": 8}, "'head_dim' is missing"),
        ({"hidden_size": 9 * 2048}, "'head_dim': got 2048"),
        ({"tie_word_embeddings": "true"}, "'tie_word_embeddings'"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings'"),
        ({"attention_bias": 0}, "'attention_bias'"),
        ({"hidden_act": 3}, "'hidden_act'"),
        ({"model_type": ["llama"]}, "'model_type'"),
    ],
)
def test_contradictions_and_wrong_types(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        read(SMOLLM2, **changes)


@pytest.mark.parametrize(
    "changes, value, works",
    [
        ({"model_type": "gemma3"}, "gemma3", "llama, mistral, qwen2, qwen3"),
        ({"model_type": "Llama"}, "Llama", "llama"),
        ({"model_type": ""}, "''", "llama"),
        ({"model_type": "a\nb" * 500}, "a", "llama"),
        ({"hidden_act": "gelu"}, "gelu", "silu"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq", "float16"),
        ({"quantization_config": {"bits": 4}}, "bits", "float16"),
        ({"quantization": {"group_size": 64}}, "group_size", "float16"),
        ({"num_local_experts": 8}, "num_local_experts 8", "dense"),
        ({"num_experts": 128}, "num_experts 128", "dense"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], value: str, works: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read(SMOLLM2, **changes)
    message = str(caught.value)
    assert value in message and works in message and message.startswith("config.json: ")
    assert "\n" not in message and len(message) < 250
    assert caught.value.exit_code == 2


def test_swish_is_silu_and_the_default() -> None:
    assert read(SMOLLM2, hidden_act="swish") == read(SMOLLM2, "hidden_act") == read(SMOLLM2)


def test_families_are_found_by_name() -> None:
    assert set(FAMILIES) == {"llama", "mistral", "qwen2", "qwen3"}
    assert family("qwen3").qk_norm
    with pytest.raises(UnsupportedError, match="'mamba' is not supported"):
        family("mamba")


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_from_dict_wants_an_object(data: Any) -> None:
    with pytest.raises(ConfigError, match="expected a JSON object"):
        ModelConfig.from_dict(data)


def test_from_dir_reads_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    assert ModelConfig.from_dir(tmp_path) == ModelConfig.from_dict(SMOLLM2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert ModelConfig.from_dir(tmp_path).eos_ids == (2, 0)


def test_missing_folder_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        ModelConfig.from_dir(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json in it"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content, word",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\x00\x01", "not JSON"),
        (b'{"a": \xff}', "not UTF-8"),
        (b"[1]", "expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b"[" * 100_000, "nested too deeply|not JSON"),
        (b'{"vocab_size": ' + b"9" * 10_000 + b"}", "not JSON|vocab_size"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_broken_files(tmp_path: Path, file: str, content: bytes, word: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=word) as caught:
        ModelConfig.from_dir(tmp_path)
    assert str(tmp_path / file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_named_config_json_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        ModelConfig.from_dir(tmp_path)


def test_a_huge_config_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 1 << 33)  # sparse
    with pytest.raises(ConfigError, match="larger than 64 MiB"):
        ModelConfig.from_dir(tmp_path)


def test_errors_of_a_folder_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMOLLM2, "hidden_size": "576"}))
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dir(tmp_path)
    assert str(caught.value).startswith(f"{path}: key 'hidden_size': got \"576\", expected")
