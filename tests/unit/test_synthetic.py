"""Models of random weights: the same for the same seed, of sane numbers, reading bytes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.backends.ops import RandomMatrix
from kvrt.config import ModelConfig
from kvrt.generate import cache_geometry
from kvrt.kvstore import KVSpec, KVStore
from kvrt.models.decoder import Decoder
from kvrt.models.families import expected_tensors
from kvrt.synthetic import SyntheticSource, SyntheticWeights, byte_tokenizer
from tests.helpers.tiny_model import write_tiny_model

F16 = np.dtype("<f2")
BF16 = np.dtype(ml_dtypes.bfloat16)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def config_of(tmp_path: Path, family: str = "llama", **how: Any) -> ModelConfig:
    # Large enough for statistics, with an epsilon that no trained model goes beyond.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 4096, "norm_eps": 1e-5}
    return write_tiny_model(tmp_path / "shape", family, **{**sizes, **how})


def logits_of(config: ModelConfig, ops: CpuOps, seed: int = 0, dtype: Any = F16) -> np.ndarray:
    """Logits (24, vocab_size) f32 of a text under random weights."""
    decoder = Decoder(config, SyntheticSource("tiny", config, dtype, seed).weights(), ops)
    store = KVStore(
        cache_geometry(config), KVSpec.parse("f16"), ops, 64, rotary=decoder.rotary,
        key_bias=decoder.key_biases if config.has_constant_key_bias else None,
    )  # fmt: skip
    return decoder.prefill(list(b"twenty-four bytes it is."), store, all_logits=True)


# --- weights ---


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_every_tensor_that_the_decoder_needs(tmp_path: Path, family: str) -> None:
    config = config_of(tmp_path, family)
    weights = SyntheticWeights(config, BF16, 0)
    assert {name: tensor.shape for name, tensor in weights.items()} == expected_tensors(config)
    assert {tensor.dtype for tensor in weights.values()} == {BF16}
    assert weights.nbytes == sum(tensor.nbytes for tensor in weights.values())
    seeds = [tensor.seed for tensor in weights.values() if isinstance(tensor, RandomMatrix)]
    assert len(set(seeds)) == len(seeds) > 10
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            assert (tensor == 1).all()


def test_seeds_and_biases_never_change(tmp_path: Path) -> None:
    """Saved measurements are of these weights; by hand: sha256 of "name\\nseed", PCG64."""
    weights = SyntheticWeights(config_of(tmp_path, "qwen2"), F16, 0)
    matrix = weights["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(matrix, RandomMatrix)
    assert matrix.seed == 3850282796774913276
    bias = weights["model.layers.0.self_attn.k_proj.bias"]
    assert bias[:3].tolist() == [0.06341552734375, -0.0200042724609375, 0.06256103515625]


def test_matrices_keep_the_size_of_what_passes(tmp_path: Path, ops: CpuOps) -> None:
    config = config_of(tmp_path, intermediate_size=512)
    weights = SyntheticWeights(config, F16, 0)
    for name, deviation in (
        ("model.layers.1.self_attn.v_proj.weight", 128**-0.5),
        ("model.layers.0.mlp.down_proj.weight", 512**-0.5),
        ("lm_head.weight", 128**-0.5),
        ("model.embed_tokens.weight", 1.0),
    ):
        made = np.asarray(ops.matrix(weights[name]).array, np.float32)
        # Of 8,192 uniform numbers or more the deviation is known to 0.5 % (one sigma).
        assert made.std() == pytest.approx(deviation, rel=0.025), name
        assert abs(made.mean()) < 0.05 * deviation
        assert abs(made).max() <= 3**0.5 * deviation * 1.001  # f16
    tied = SyntheticWeights(config_of(tmp_path, tie=True), F16, 0)
    assert tied["model.embed_tokens.weight"].scale == pytest.approx((3 / 128) ** 0.5)


# --- what they compute ---


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_finite_and_spread_by_one(
    tmp_path: Path, ops: CpuOps, family: str, tie: bool
) -> None:
    logits = logits_of(config_of(tmp_path, family, tie=tie), ops)
    assert np.isfinite(logits).all()
    # A row of norm sqrt(n) by rows of norm 1, in 4,096 draws; the row itself varies by more.
    assert ((logits.std(axis=1) > 0.8) & (logits.std(axis=1) < 1.25)).all()
    # Every place counts, even for the same byte with only two layers to see others by.
    alike = np.corrcoef(logits)[~np.eye(len(logits), dtype=bool)]
    assert alike.max() < 0.995


def test_the_same_seed_gives_the_same_logits_and_another_does_not(
    tmp_path: Path, ops: CpuOps
) -> None:
    config = config_of(tmp_path)
    first = logits_of(config, ops, seed=1)
    np.testing.assert_array_equal(first, logits_of(config, ops, seed=1))
    assert abs(np.corrcoef(first[-1], logits_of(config, ops, seed=2)[-1])[0, 1]) < 0.1


def test_the_fingerprint_tells_seeds_types_and_shapes_apart(tmp_path: Path) -> None:
    config, other = config_of(tmp_path), config_of(tmp_path, num_layers=3)
    sources = [
        SyntheticSource("a", config, F16),
        SyntheticSource("a", config, F16, 1),
        SyntheticSource("a", config, BF16),
        SyntheticSource("a", other, F16),
        SyntheticSource("a", config_of(tmp_path, rope_theta=5e5), F16),
    ]
    prints = [source.fingerprint(source.weights()) for source in sources]
    assert len(set(prints)) == len(prints)
    again = SyntheticSource("another name", config, F16)
    assert again.fingerprint(again.weights()) == prints[0]
    assert all(len(text) == 64 for text in prints)


# --- its tokens ---


@pytest.mark.parametrize(
    "text", ["", "hello", " a  b\n\t", "Grüße 🙂", "<300>", "\0\x01\x02", "<s>"]
)
def test_text_is_its_bytes(tmp_path: Path, text: str) -> None:
    tokenizer = byte_tokenizer(config_of(tmp_path))
    assert tokenizer.encode(text) == tokenizer.encode_prompt(text) == list(text.encode())
    assert tokenizer.encode(text, control=True) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_other_ids_read_as_their_number(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(replace(config_of(tmp_path), vocab_size=200_000))
    assert tokenizer.decode([104, 256, 105, 199_999]) == "h<256>i<199999>"
    every = tokenizer.decode(range(256, 4096))
    assert every == "".join(f"<{number}>" for number in range(256, 4096))
    stream = tokenizer.stream()
    assert [stream.push(number) for number in (0xC3, 0xBC, 256, 0xC3, 257)] == [
        "", "ü", "<256>", "", "\ufffd<257>",
    ]  # fmt: skip


def test_it_stops_where_the_config_says(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert config.eos_ids
    assert byte_tokenizer(config).stop_ids == frozenset(config.eos_ids)


def test_a_chat_is_bytes_too(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(config_of(tmp_path))
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi <300>!"},
    ]
    ids = tokenizer.encode_chat(messages)
    assert bytes(ids) == b"system: Be short.\nuser: Hi <300>!\nassistant: "
