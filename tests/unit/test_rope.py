"""RoPE: frequencies of each kind against literals, a naive reference, and bad descriptions."""

import math
from typing import Any

import numpy as np
import pytest

from kvrt.config import ModelConfig, RopeConfig
from kvrt.errors import ConfigError, UnsupportedError
from tests.helpers.compare import assert_close
from tests.helpers.refs import rope_frequencies
from tests.helpers.tolerances import Tolerance, tolerance

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def config_of(
    rope: dict[str, Any] | None = None, *, theta: float | None = 10000.0, **extra: Any
) -> dict[str, Any]:
    """A config.json of a llama with this RoPE."""
    data = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "vocab_size": 1000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    }
    if rope is not None:
        data["rope_scaling"] = rope
    if theta is not None:
        data["rope_theta"] = theta
    return {**data, **extra}


def rope_of(*args: Any, **kwargs: Any) -> RopeConfig:
    return ModelConfig.from_dict(config_of(*args, **kwargs)).rope


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
@pytest.mark.parametrize(
    "rope",
    [
        None,
        {"rope_type": "default"},
        {"type": "linear", "factor": 2.5},
        LLAMA3,
        {**LLAMA3, "factor": 32.0},
        {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
        YARN,
        {**YARN, "truncate": False},
        {**YARN, "beta_fast": 16, "beta_slow": 2},
        {**YARN, "original_max_position_embeddings": 64},
        {**YARN, "original_max_position_embeddings": 5},
        {"rope_type": "yarn", "factor": 4.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_agree_with_the_reference(
    rope: dict[str, Any] | None, head_dim: int, theta: float
) -> None:
    data = config_of(rope, theta=theta)
    expected, scaling = rope_frequencies(data, head_dim)
    ours = ModelConfig.from_dict(data).rope
    actual = ours.inverse_frequencies(head_dim)
    assert actual.dtype == np.float64
    assert_close(actual, expected, tolerance("frequencies", "f64"))
    assert ours.attention_scaling() == pytest.approx(scaling, rel=1e-15)


# Printed by transformers 5.24, which computes them in float32.
_LLAMA_31 = {
    0: 1.0,
    10: 0.12868738174438477,
    28: 0.0032114461064338684,
    32: 0.0005248460220173001,
    36: 7.784655463183299e-05,
    40: 3.428102354519069e-05,
    63: 3.068925877869333e-07,
}
_QWEN3_YARN = {
    0: 1.0,
    20: 0.01333521492779255,
    24: 0.005375321488827467,
    30: 0.0010643609566614032,
    36: 0.0001798411540221423,
    40: 4.4456985051510856e-05,
    63: 3.102344408034696e-07,
}
_FLOAT32 = Tolerance(0.0, 1e-6, "literals rounded to float32 a few times")


@pytest.mark.parametrize(
    "rope, theta, literals",
    [(LLAMA3, 500000.0, _LLAMA_31), (YARN, 1000000.0, _QWEN3_YARN)],
    ids=["llama-3.1", "qwen3-yarn"],
)
def test_frequencies_of_real_models(
    rope: dict[str, Any], theta: float, literals: dict[int, float]
) -> None:
    actual = rope_of(rope, theta=theta).inverse_frequencies(128)
    assert_close(actual[list(literals)], list(literals.values()), _FLOAT32)


@pytest.mark.parametrize(
    "extra, scaling",
    [
        ({}, 1.0 + 0.1 * math.log(4.0)),
        ({"attention_factor": 0.75}, 0.75),
        ({"attention_factor": 0.75, "mscale": 2.0, "mscale_all_dim": 1.0}, 0.75),
        ({"mscale": 2.0}, 1.0 + 0.1 * math.log(4.0)),
        ({"mscale": 0, "mscale_all_dim": 1.0}, 1.0 + 0.1 * math.log(4.0)),
        (
            {"mscale": 2.0, "mscale_all_dim": 0.5},
            (1.0 + 0.2 * math.log(4.0)) / (1.0 + 0.05 * math.log(4.0)),
        ),
        ({"factor": 1.0}, 1.0),
    ],
    ids=str,
)
def test_yarn_scales_cos_and_sin(extra: dict[str, Any], scaling: float) -> None:
    assert rope_of({**YARN, **extra}).attention_scaling() == pytest.approx(scaling, rel=1e-15)


@pytest.mark.parametrize("rope", [None, LLAMA3, {"type": "linear", "factor": 3.0}], ids=str)
def test_other_kinds_do_not_scale(rope: dict[str, Any] | None) -> None:
    assert rope_of(rope).attention_scaling() == 1.0


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("home", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_type_and_table(key: str, home: str) -> None:
    table = {key: "linear", "factor": 3}
    assert rope_of(**{home: table}) == RopeConfig("linear", 10000.0, 3.0)


def test_empty_or_null_table_is_plain_rope() -> None:
    for table in (None, {}, {"rope_type": None}):
        assert rope_of(rope_scaling=table, rope_parameters=None) == RopeConfig("default", 10000.0)


def test_theta_comes_from_either_place_or_the_default() -> None:
    assert rope_of(theta=123.0).theta == 123.0
    assert rope_of(theta=None).theta == 10000.0
    table = {"rope_type": "default", "rope_theta": 77}
    assert rope_of(theta=None, rope_parameters=table).theta == 77.0
    assert rope_of(theta=77.0, rope_parameters=table).theta == 77.0


def test_original_context_falls_back_to_max_position_and_may_stand_outside() -> None:
    yarn = {"type": "yarn", "factor": 2.0}
    assert rope_of(yarn).original_max_position == 131072
    assert rope_of(yarn, original_max_position_embeddings=4096).original_max_position == 4096
    no_original = {key: value for key, value in LLAMA3.items() if not key.startswith("orig")}
    assert rope_of(no_original).original_max_position == 131072


def test_yarn_without_factor_takes_the_ratio_of_contexts() -> None:
    rope = rope_of({"type": "yarn", "original_max_position_embeddings": 32768})
    assert rope.factor == 4.0


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "proportional", "YARN", ""])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_kinds_are_refused_by_name(kind: str, key: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        rope_of({key: kind, "factor": 2.0})
    message = str(caught.value)
    assert f'"{kind}"' in message and "default, linear, llama3, yarn" in message
    assert "config.json" in message and "\n" not in message


@pytest.mark.parametrize("place", ["top", "table"])
def test_partial_rotation_is_refused(place: str) -> None:
    share = {"partial_rotary_factor": 0.5}
    table = {"rope_type": "default", **(share if place == "table" else {})}
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor 0\.5 is not supported"):
        rope_of(table, **(share if place == "top" else {}))
    full = {"partial_rotary_factor": 1.0}
    assert rope_of({**table, **full} if place == "table" else table, **full).kind == "default"


def test_one_rope_per_layer_type_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="full_attention"):
        rope_of(rope_parameters={"full_attention": {"rope_type": "default"}})


@pytest.mark.parametrize(
    "rope, word",
    [
        ({"type": "linear"}, "'factor' is missing"),
        ({"type": "linear", "factor": None}, "'factor' is missing"),
        ({"type": "linear", "factor": "4"}, "'factor'"),
        ({"type": "linear", "factor": True}, "'factor'"),
        ({"type": "linear", "factor": 0}, "'factor'"),
        ({"type": "linear", "factor": 0.5}, "'factor'"),
        ({"type": "linear", "factor": float("nan")}, "'factor'"),
        ({"type": "linear", "factor": float("inf")}, "'factor'"),
        ({"type": "linear", "factor": 10**400}, "'factor'"),
        ({"factor": 4.0}, "'factor' without 'rope_type'"),
        ({"type": "linear", "rope_type": "yarn", "factor": 2.0}, "'rope_type' and 'type' differ"),
        ({"type": 3}, "'type'"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "'low_freq_factor'"),
        ({**LLAMA3, "low_freq_factor": None}, "'low_freq_factor' is missing"),
        ({**LLAMA3, "high_freq_factor": "x"}, "'high_freq_factor'"),
        ({**LLAMA3, "original_max_position_embeddings": -1}, "'original_max_position_embeddings'"),
        ({**LLAMA3, "original_max_position_embeddings": 8192.5}, "'original_max_position"),
        ({**YARN, "beta_fast": 1.0}, "beta_fast 1 and beta_slow 1"),
        ({**YARN, "truncate": "no"}, "'truncate'"),
        ({**YARN, "attention_factor": 0}, "'attention_factor'"),
        ({**YARN, "mscale": -1}, "'mscale'"),
        ({"type": "yarn"}, "'factor' is missing"),
        ({"rope_type": "default", "rope_theta": 500.0}, "'rope_theta'"),
        (["linear", 4.0], "rope_scaling"),
        ("linear", "rope_scaling"),
    ],
    ids=str,
)
def test_bad_tables_are_refused_by_key(rope: Any, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rope_of(rope)
    message = str(caught.value)
    assert word in message and "config.json" in message and "\n" not in message


@pytest.mark.parametrize("theta", [0, -10000.0, 1.0, float("nan"), float("inf"), "1e4", True])
def test_bad_theta_is_refused(theta: Any) -> None:
    with pytest.raises(ConfigError, match="'rope_theta'"):
        rope_of(theta=theta)


def test_two_tables_that_differ_are_refused() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    assert rope_of(linear, rope_parameters=linear).kind == "linear"
    with pytest.raises(ConfigError, match="differ"):
        rope_of(linear, rope_parameters={**linear, "factor": 4.0})
