"""GGUF to model folder: tensors, config, refusals, and that nothing half-made stays."""

import errno
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save

from kvrt import convert
from kvrt.cli.main import run
from kvrt.config import ModelConfig
from kvrt.convert import convert_gguf
from kvrt.errors import ConfigError, StorageError, UnsupportedError, UsageError, WeightError
from kvrt.models.families import expected_tensors, ignored_tensor
from kvrt.weights import Weights
from tests.helpers.tiny_gguf import TinyGguf, byte_vocab, piece_vocab

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
QWEN2 = TinyGguf("qwen2", byte_vocab("qwen2"), qkv_bias=True)
QWEN3 = TinyGguf("qwen3", byte_vocab("qwen2"), qk_norm=True, head_dim=32, tied=False)


def made(spec: TinyGguf, tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """The converted folder and the expected tensors."""
    source, target = tmp_path / "model.gguf", tmp_path / "out"
    expected = spec.write(source)
    convert_gguf(source, target)
    return target, expected


def config_of(spec: TinyGguf, tmp_path: Path) -> dict:
    return json.loads((made(spec, tmp_path)[0] / "config.json").read_text())


def refusal(spec: TinyGguf, tmp_path: Path, error: type[Exception]) -> str:
    """The message with which a file is refused; nothing may be left behind."""
    source = tmp_path / "model.gguf"
    spec.write(source)
    with pytest.raises(error) as caught:
        convert_gguf(source, tmp_path / "out")
    assert caught.type is error
    assert os.listdir(tmp_path) == ["model.gguf"]
    message = str(caught.value)
    assert message.startswith(str(source)) and "\n" not in message
    return message


@pytest.mark.parametrize(
    "spec",
    [
        TinyGguf(),
        TinyGguf(tied=False, heads=6, kv_heads=2, head_dim=20),
        TinyGguf(heads=4, kv_heads=4, vocab=piece_vocab()),
        TinyGguf(
            tensor_types={
                "ffn": Kind.Q4_0,
                "attn_q.": Kind.Q8_0,
                "attn_k.": Kind.Q4_0,
                "token_embd": Kind.Q8_0,
                "attn_v": Kind.F16,
                "attn_output": Kind.BF16,
            }
        ),
        TinyGguf(qkv_bias=True, o_bias=True),
        QWEN2,
        QWEN3,
    ],
    ids=["llama", "untied", "spm", "mixed-types", "llama-bias", "qwen2", "qwen3"],
)
def test_tensors_are_those_that_went_in(spec, tmp_path):
    target, expected = made(spec, tmp_path)
    assert set(os.listdir(target)) == FILES
    found = load_file(target / "model.safetensors")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == np.float16
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    # And the loader agrees with the converter on what the folder holds.
    config = ModelConfig.from_dir(target)
    Weights.open(target, expected_tensors(config), ignored_tensor).close()


def test_file_is_byte_for_byte_what_safetensors_writes(tmp_path):
    target, expected = made(QWEN2, tmp_path)
    assert (target / "model.safetensors").read_bytes() == save(expected, {"format": "pt"})


def test_many_small_chunks_give_the_same_file(monkeypatch, tmp_path):
    spec = TinyGguf(tensor_types={"attn": Kind.Q8_0})
    whole = (made(spec, tmp_path)[0] / "model.safetensors").read_bytes()
    monkeypatch.setattr(convert, "_CHUNK_ELEMENTS", 100)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == whole


def test_memory_stays_far_below_the_model(monkeypatch, tmp_path):
    monkeypatch.setattr(convert, "_CHUNK_ELEMENTS", 1 << 14)
    spec = TinyGguf(hidden=512, inner=2048, layers=2, tensor_types={"": Kind.F16})
    spec.write(tmp_path / "model.gguf")
    tracemalloc.start()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (tmp_path / "out" / "model.safetensors").stat().st_size / 4


def test_config_of_a_llama(tmp_path):
    spec = TinyGguf(extra_keys={"llama.attention.layer_norm_rms_epsilon": 1e-6})
    target, _ = made(spec, tmp_path)
    data = json.loads((target / "config.json").read_text())
    assert data["architectures"] == ["LlamaForCausalLM"]
    assert '"rms_norm_eps": 1e-06' in (target / "config.json").read_text()  # shortest decimal
    config = ModelConfig.from_dir(target)
    assert (config.model_type, config.num_layers, config.hidden_size) == ("llama", 2, 64)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.rope.kind == "default" and config.rope.theta == 100000.0
    assert config.max_context == 256 and config.tie_embeddings
    assert (config.bos_id, config.eos_ids) == (0, (1,))
    assert not (config.qkv_bias or config.o_bias or config.qk_norm)


def test_config_of_the_qwens(tmp_path):
    assert ModelConfig.from_dict(config_of(QWEN2, tmp_path)).qkv_bias
    (tmp_path / "3").mkdir()
    config = ModelConfig.from_dict(config_of(QWEN3, tmp_path / "3"))
    assert config.qk_norm and config.head_dim == 32 and not config.tie_embeddings


def test_defaults_for_absent_keys(tmp_path):
    keys = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    spec = TinyGguf(
        kv_heads=4, drop_keys=frozenset(f"llama.{key}" for key in (*keys, "rope.freq_base"))
    )
    config = ModelConfig.from_dict(config_of(spec, tmp_path))
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 16, 10000.0)


def test_a_window_makes_a_mistral(tmp_path):
    spec = TinyGguf(extra_keys={"llama.attention.sliding_window": 96})
    config = ModelConfig.from_dict(config_of(spec, tmp_path))
    assert (config.model_type, config.windows) == ("mistral", (96, 96))


def test_a_qwen_window_holds_in_every_layer(tmp_path):
    spec = QWEN2.but(extra_keys={"qwen2.attention.sliding_window": 96})
    assert ModelConfig.from_dict(config_of(spec, tmp_path)).windows == (96, 96)


def test_every_end_of_turn_id_is_kept(tmp_path):
    keys = {"tokenizer.ggml.eot_token_id": 269, "tokenizer.ggml.eom_token_id": 1}
    target, _ = made(TinyGguf(extra_keys=keys), tmp_path)
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == [1, 269]
    assert ModelConfig.from_dir(target).eos_ids == (1, 269)


def test_absent_ids_written_as_minus_one(tmp_path):
    data = config_of(TinyGguf(extra_keys={"tokenizer.ggml.padding_token_id": 0xFFFFFFFF}), tmp_path)
    assert "pad_token_id" not in data


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"scaling.type": "none"}, None),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, ("linear", 4.0)),
        ({"scale_linear": 2.0}, ("linear", 2.0)),
        ({"scale_linear": 1.0}, None),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, ("yarn", 4.0)),
    ],
)
def test_rope_scaling_in_the_metadata(keys, expected, tmp_path):
    spec = TinyGguf(extra_keys={f"llama.rope.{key}": value for key, value in keys.items()})
    rope = ModelConfig.from_dict(config_of(spec, tmp_path)).rope
    assert (rope.kind, rope.factor) == (expected or ("default", 1.0))


def test_yarn_details(tmp_path):
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 64,
        "yarn_beta_fast": 16.0,
        "attn_factor": 0.5,
    }
    keys = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    rope = ModelConfig.from_dict(config_of(TinyGguf(extra_keys=keys), tmp_path)).rope
    assert (rope.original_max_position, rope.beta_fast, rope.beta_slow) == (64, 16.0, 1.0)
    # llama.cpp multiplies its own 0.1 ln(s) + 1 by the file's factor.
    assert rope.attention_scaling() == pytest.approx(0.5 * (0.1 * math.log(4.0) + 1.0), rel=1e-12)


def llama3_table(
    head_dim: int, theta: float, factor: float, low: float, high: float, context: int
) -> np.ndarray:
    """The divisors as llama.cpp's converter writes them, frequency by frequency."""
    table = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < context / high:
            table.append(1.0)
        elif wavelength > context / low:
            table.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, np.float32)  # (head_dim // 2,) f32


@pytest.mark.parametrize(
    "parameters",
    [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 1.0, 8.0, 4096), (2.0, 1.0, 3.0, 500)],
)
def test_llama3_scaling_comes_back_from_its_table(parameters, tmp_path):
    table = llama3_table(64, 500000.0, *parameters)
    spec = TinyGguf(
        head_dim=64,
        extra_tensors={"rope_freqs.weight": table},
        extra_keys={"llama.rope.freq_base": 500000.0},
    )
    rope = ModelConfig.from_dict(config_of(spec, tmp_path)).rope
    got = (rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position)
    assert (rope.kind, got) == ("llama3", parameters)
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)  # (32,) f64
    # The table is float32.
    np.testing.assert_allclose(rope.inverse_frequencies(64), plain / table, rtol=1e-5)


def test_a_table_of_ones_is_plain_rope(tmp_path):
    spec = TinyGguf(extra_tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    assert "rope_scaling" not in config_of(spec, tmp_path)


@pytest.mark.parametrize(
    "table", [np.linspace(1, 9, 8), np.full(8, 0.5), np.full(8, np.nan), np.full(8, np.inf)]
)
def test_other_rope_tables_are_refused(table, tmp_path):
    spec = TinyGguf(extra_tensors={"rope_freqs.weight": table.astype(np.float32)})
    assert "rope_freqs.weight" in refusal(spec, tmp_path, UnsupportedError)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (TinyGguf("gemma2"), "architecture 'gemma2' is not supported; llama, qwen2, qwen3 work"),
        (TinyGguf(extra_keys={"llama.expert_count": 8}), "expert_count = 8: mixture of experts"),
        (TinyGguf(extra_keys={"llama.logit_scale": 0.5}), "llama.logit_scale = 0.5"),
        (TinyGguf(extra_keys={"llama.rope.scaling.type": "longrope"}), "'longrope'"),
        (TinyGguf(extra_keys={"llama.rope.dimension_count": 8}), "rotary width 8"),
        (TinyGguf(extra_keys={"llama.attention.value_length": 8}), "value width 8"),
        (TinyGguf(extra_keys={"llama.attention.head_count_kv": [2, 1]}), "differs between layers"),
        (TinyGguf(extra_keys={"split.count": 2}), "llama-gguf-split"),
        (TinyGguf(extra_keys={"tokenizer.ggml.model": "bert"}), "tokenizer 'bert'"),
        (TinyGguf(vocab=byte_vocab("chameleon")), "tokenizer.ggml.pre is 'chameleon'; gpt-2"),
        (TinyGguf(vocab=byte_vocab(None)), "tokenizer.ggml.pre is missing"),
        (
            TinyGguf(extra_tensors={"blk.0.ffn_gate_exps.weight": np.ones((2, 2), np.float32)}),
            "tensor blk.0.ffn_gate_exps.weight has no place",
        ),
        (
            TinyGguf(extra_tensors={"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}),
            "tensor blk.0.attn_q_norm.weight has no place",
        ),
    ],
)
def test_unsupported_files_exit_2(spec, words, tmp_path):
    assert words in refusal(spec, tmp_path, UnsupportedError)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (TinyGguf(drop_keys=frozenset({"llama.block_count"})), "llama.block_count is missing"),
        (
            TinyGguf(drop_keys=frozenset({"llama.attention.layer_norm_rms_epsilon"})),
            "rms_epsilon is missing",
        ),
        (TinyGguf(drop_keys=frozenset({"tokenizer.ggml.model"})), "ggml.model is missing"),
        (TinyGguf(drop_keys=frozenset({"tokenizer.ggml.merges"})), "merges is missing"),
        (TinyGguf(extra_keys={"llama.embedding_length": "64"}), "expected an integer"),
        (TinyGguf(extra_keys={"tokenizer.ggml.merges": ["he"]}), "merge 'he' is not two pieces"),
        (TinyGguf(extra_keys={"tokenizer.ggml.merges": ["he qq"]}), "vocabulary is inconsistent"),
        (TinyGguf(extra_keys={"tokenizer.ggml.token_type": [1, 1]}), "has 2 values, expected"),
        (TinyGguf(extra_keys={"tokenizer.ggml.tokens": ["a", "a"]}), "expected"),
        (TinyGguf(extra_keys={"tokenizer.ggml.eos_token_id": 99999}), "eos token is 99999"),
        (TinyGguf(extra_keys={"llama.attention.head_count": 0}), "no heads"),
        (TinyGguf(extra_keys={"llama.rope.freq_base": float("nan")}), "nan"),
        (
            TinyGguf(
                extra_keys={
                    "llama.rope.scaling.type": "yarn",
                    "llama.rope.scaling.factor": 0.0,
                }
            ),
            "expected above 0",
        ),
    ],
)
def test_malformed_metadata_exits_1(spec, words, tmp_path):
    assert words in refusal(spec, tmp_path, ConfigError)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (TinyGguf(drop_tensors=frozenset({"token_embd.weight"})), "token_embd.weight is missing"),
        (
            TinyGguf(drop_tensors=frozenset({"blk.1.ffn_up.weight"})),
            "the tensor for model.layers.1.mlp.up_proj.weight is missing",
        ),
        (TinyGguf(extra_keys={"llama.feed_forward_length": 95}), "expected (95, 64)"),
    ],
)
def test_wrong_tensors_exit_1(spec, words, tmp_path):
    assert words in refusal(spec, tmp_path, WeightError)


@pytest.mark.parametrize(("value", "words"), [(70000.0, "70000"), (np.inf, "inf"), (np.nan, "nan")])
def test_values_beyond_float16_are_refused(value, words, tmp_path):
    norm = np.full(64, value, np.float32)
    spec = TinyGguf(
        drop_tensors=frozenset({"output_norm.weight"}), extra_tensors={"output_norm.weight": norm}
    )
    assert f"output_norm.weight holds {words}" in refusal(spec, tmp_path, WeightError)


def test_a_type_the_decoder_lacks_names_the_tensor(monkeypatch, tmp_path):
    from gguf import quants

    def missing(data, kind):
        raise NotImplementedError(kind)

    source = tmp_path / "model.gguf"
    TinyGguf().write(source)
    monkeypatch.setattr(quants, "dequantize", missing)
    with pytest.raises(UnsupportedError, match=r"tensor \S+ has type F32"):
        convert_gguf(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_any_truncation_is_one_clear_error(tmp_path):
    source = tmp_path / "model.gguf"
    TinyGguf(hidden=32, inner=32, heads=2, layers=1).write(source)
    data = source.read_bytes()
    lengths = [*range(0, 64), *range(64, len(data) - 1, len(data) // 97), len(data) - 33]
    for length in lengths:
        source.write_bytes(data[:length])
        with pytest.raises((WeightError, ConfigError)) as caught:
            convert_gguf(source, tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert os.listdir(tmp_path) == ["model.gguf"]


def test_truncation_is_seen_before_the_work(tmp_path):
    source = tmp_path / "model.gguf"
    TinyGguf().write(source)
    size = source.stat().st_size
    os.truncate(source, size - 1)
    stages: list[str] = []
    with pytest.raises(WeightError, match=f"ends at byte {size}, the file has {size - 1}"):
        convert_gguf(source, tmp_path / "out", lambda *call: stages.append(call[0]))
    assert stages == []


def test_flipped_header_bytes_never_escape_as_other_errors(tmp_path):
    source = tmp_path / "model.gguf"
    TinyGguf(hidden=32, inner=32, heads=2, layers=1).write(source)
    data = source.read_bytes()
    rng = np.random.default_rng(7)
    refused = 0
    for _ in range(150):
        broken = bytearray(data)
        for at in rng.integers(0, 9000, 3):
            broken[at] ^= int(rng.integers(1, 256))
        source.write_bytes(broken)
        try:
            convert_gguf(source, tmp_path / "out")
        except (WeightError, ConfigError, UnsupportedError) as error:
            refused += 1
            assert "\n" not in str(error)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert refused > 20


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", WeightError, "not a GGUF file"),
        (b"hello world, this is no model at all", WeightError, "starts with b'hell'"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 1), WeightError, "a count of 11529215"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60), WeightError, "a count of"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), UnsupportedError, "version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), UnsupportedError, "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), ConfigError, "general.architecture is missing"),
    ],
)
def test_garbage_is_named(data, error, words, tmp_path):
    source = tmp_path / "x.gguf"
    source.write_bytes(data)
    with pytest.raises(error) as caught:
        convert_gguf(source, tmp_path / "out")
    assert caught.type is error and words in str(caught.value)


def test_missing_file_and_impossible_targets(tmp_path):
    with pytest.raises(UsageError, match="no such GGUF file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")
    source = tmp_path / "model.gguf"
    TinyGguf().write(source)
    with pytest.raises(UsageError, match="is a file"):
        convert_gguf(source, source)
    with pytest.raises(UsageError, match="holds the GGUF itself"):
        convert_gguf(source, tmp_path)
    assert source.is_file()


def full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["fsync", "chunks"])
def test_a_full_disk_leaves_the_old_folder(monkeypatch, tmp_path, place):
    target, _ = made(TinyGguf(), tmp_path)
    before = (target / "model.safetensors").read_bytes()
    if place == "fsync":
        monkeypatch.setattr(os, "fsync", full_disk)
    else:
        monkeypatch.setattr(convert, "_chunks", full_disk)
    with pytest.raises(StorageError, match=r"out: no space left on the device\Z"):
        convert_gguf(tmp_path / "model.gguf", target)
    assert set(os.listdir(tmp_path)) == {"model.gguf", "out"}
    assert (target / "model.safetensors").read_bytes() == before


def test_too_little_space_is_seen_before_the_work(monkeypatch, tmp_path):
    TinyGguf().write(tmp_path / "model.gguf")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    stages: list[str] = []
    with pytest.raises(StorageError, match=r"32 MiB needed, 1 free"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out", lambda *a: stages.append(a[0]))
    assert stages == [] and os.listdir(tmp_path) == ["model.gguf"]


def test_progress_counts_every_byte(tmp_path):
    TinyGguf().write(tmp_path / "model.gguf")
    calls: list[tuple[str, int, int | None]] = []
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out", lambda *call: calls.append(call))
    done = [call[1] for call in calls]
    assert done == sorted(done) and calls[-1][1] == calls[-1][2]
    assert {call[0] for call in calls} == {"convert"}


def test_an_interrupt_leaves_nothing(tmp_path):
    def interrupt(stage: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    TinyGguf().write(tmp_path / "model.gguf")
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out", interrupt)
    assert os.listdir(tmp_path) == ["model.gguf"]


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_conversion_is_cleaned_by_the_next(tmp_path):
    source, target = tmp_path / "model.gguf", tmp_path / "out"
    TinyGguf().write(source)
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from kvrt.convert import convert_gguf\n"
        "def die(*call): os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), die)\n"
    )
    root = Path(convert.__file__).parents[1]
    process = subprocess.run([sys.executable, "-c", code, source, target], cwd=root, check=False)
    assert process.returncode == -signal.SIGKILL
    assert not target.exists() and len(os.listdir(tmp_path)) == 2  # the GGUF and a leftover
    convert_gguf(source, target)
    assert set(os.listdir(tmp_path)) == {"model.gguf", "out"}
    assert set(os.listdir(target)) == FILES


def test_command_prints_the_folder_and_guards_it(capsys, tmp_path):
    source, target = str(tmp_path / "model.gguf"), str(tmp_path / "out")
    TinyGguf().write(Path(source))
    assert run(["convert", source, target]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{target}\n" and "kvrt: convert" in captured.err
    assert run(["convert", source, target]) == 2
    assert "--force" in capsys.readouterr().err
    assert run(["convert", source, target, "--force", "--json"]) == 0
    size = os.path.getsize(os.path.join(target, "model.safetensors"))
    assert json.loads(capsys.readouterr().out) == {"path": target, "bytes": size}


@pytest.mark.parametrize(("data", "code"), [(b"junk" * 9, 1), (None, 2)])
def test_command_exit_codes(capsys, tmp_path, data, code):
    source = tmp_path / "x.gguf"
    if data is not None:
        source.write_bytes(data)
    assert run(["convert", str(source), str(tmp_path / "out")]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
