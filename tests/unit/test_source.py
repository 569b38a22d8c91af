"""Where models come from: published shapes, folders and synthetic models, found by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvrt
from kvrt import backends
from kvrt.backends.cpu import CpuOps
from kvrt.cli.main import run
from kvrt.config import ModelConfig
from kvrt.errors import ModelNotFoundError, UnsupportedError, UsageError, WeightError
from kvrt.generate import cache_geometry
from kvrt.shapes import SHAPES, Shape, opt_parameters
from kvrt.source import find_shape, find_source
from kvrt.synthetic import SyntheticWeights
from tests.helpers.tiny_model import write_tiny_model

# As their makers publish them.
PARAMETERS = {
    "llama-7b": 6_738_415_616,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-4b": 4_022_468_096,
    "smollm2-135m": 134_515_008,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-72b": 72_706_203_648,
}
MEMORY_ONLY = ("opt-175b", "mixtral-8x7b", "qwen2.5-72b")
RUNNABLE = tuple(name for name in SHAPES if name not in MEMORY_ONLY)


def config_of(name: str) -> ModelConfig:
    config = SHAPES[name].config
    assert config is not None
    return config


# --- shapes ---


def test_there_are_the_promised_shapes() -> None:
    assert set(SHAPES) == {*PARAMETERS, "opt-175b"}
    assert [name for name, shape in SHAPES.items() if shape.config is None] == list(MEMORY_ONLY)
    assert all(name == shape.name for name, shape in SHAPES.items())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_count(name: str) -> None:
    assert SHAPES[name].parameters == PARAMETERS[name]


def test_opt_has_the_parameters_of_its_name() -> None:
    shape = SHAPES["opt-175b"]
    assert round(shape.parameters / 1e9, 1) == 174.6
    assert opt_parameters(768, 12) == 125_239_296  # as published for the smallest of the family
    # 2 sides x 96 layers x 12,288 channels x 2 bytes: what its paper's successors reckon with.
    geometry = shape.geometry
    assert 4 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim == 4_718_592


@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_two_bytes_each(name: str) -> None:
    shape = SHAPES[name]
    assert shape.weight_bytes == 2 * shape.parameters
    if shape.config is not None:
        assert shape.geometry == cache_geometry(shape.config)
        weights = SyntheticWeights(shape.config, shape.dtype, 0)
        assert weights.nbytes == shape.weight_bytes
        assert sum(tensor.nbytes for tensor in weights.values()) == shape.weight_bytes


def test_shapes_differ_in_more_than_sizes() -> None:
    assert {name for name in RUNNABLE if config_of(name).tie_embeddings} == {
        "llama-3.2-1b", "llama-3.2-3b", "qwen3-4b", "smollm2-135m",
    }  # fmt: skip
    assert {name for name in RUNNABLE if config_of(name).qk_norm} == {"qwen3-4b"}
    assert {name for name, shape in SHAPES.items() if shape.key_bias} == {
        "qwen2.5-7b", "qwen2.5-72b",
    }  # fmt: skip
    windows = {name: set(config_of(name).windows) for name in RUNNABLE}
    assert windows.pop("mistral-7b") == {4096}
    assert all(window == {None} for window in windows.values())
    ropes = {name: config_of(name).rope for name in RUNNABLE}
    factors = {name: rope.factor for name, rope in ropes.items() if rope.kind == "llama3"}
    assert factors == {"llama-3.1-8b": 8.0, "llama-3.2-1b": 32.0, "llama-3.2-3b": 32.0}
    assert ropes["llama-3.1-8b"].theta == 500_000
    assert ropes["llama-3.1-8b"].original_max_position == 8192
    assert ropes["qwen2.5-7b"].theta == 1_000_000
    assert ropes["llama-7b"].theta == 10_000


# --- names ---


def test_a_folder_is_a_source(tmp_path: Path) -> None:
    config = write_tiny_model(tmp_path, dtype="mixed")
    source = find_source(str(tmp_path))
    assert (source.name, source.folder, source.synthetic) == (str(tmp_path), tmp_path, False)
    assert source.config == config
    assert source.context_limit == config.max_context
    shape = find_shape(str(tmp_path))
    weights = source.weights()
    assert shape.weight_bytes == weights.nbytes == sum(array.nbytes for array in weights.values())
    assert shape.weight_bytes != 2 * shape.parameters  # some are f32
    assert shape.parameters == config.parameters()
    assert shape.name == str(tmp_path) and shape.config == config


def test_a_folder_that_lacks_weights_has_no_shape(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    find_source(str(tmp_path))  # which is cheap: it reads the config alone
    with pytest.raises(WeightError):
        find_shape(str(tmp_path))


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_synthetic_name_is_a_source(name: str) -> None:
    source = find_source(f"synthetic:{name}")
    assert (source.name, source.folder, source.synthetic) == (f"synthetic:{name}", None, True)
    assert source.config == SHAPES[name].config
    assert source.context_limit == 1 << 24
    assert find_shape(f"synthetic:{name}") == SHAPES[name]


@pytest.mark.parametrize("name", MEMORY_ONLY)
def test_some_shapes_are_for_memory_only(name: str) -> None:
    assert find_shape(f"synthetic:{name}") == SHAPES[name]
    with pytest.raises(UnsupportedError, match=f"^synthetic:{name} is for memory only: .*dry-run"):
        find_source(f"synthetic:{name}")


@pytest.mark.parametrize("find", [find_source, find_shape])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama7b", "did you mean synthetic:llama-7b?"),
        ("SMOLLM2-135M", "did you mean synthetic:smollm2-135m?"),
        ("", "; there are llama-7b, "),
        ("x\ny" * 1000, "; there are llama-7b, "),
    ],
)
def test_an_unknown_synthetic_name_says_which_there_are(find: Any, name: str, said: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find(f"synthetic:{name}")
    message = str(caught.value)
    assert said in message and "opt-175b" in message
    assert "\n" not in message and len(message) < 500
    assert ("did you mean" in message) == ("did you mean" in said)


@pytest.mark.parametrize("find", [find_source, find_shape])
def test_a_published_name_alone_says_what_is_missing(find: Any) -> None:
    with pytest.raises(ModelNotFoundError, match=r"kvrt pull .*; synthetic:llama-7b has its shape"):
        find("llama-7b")
    with pytest.raises(ModelNotFoundError) as caught:
        find("llama-7c")
    assert "synthetic" not in str(caught.value)


# --- load ---


@pytest.fixture
def tiny_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shape:
    """synthetic:tiny, small enough to run."""
    config = write_tiny_model(tmp_path / "shape", num_layers=2)
    shape = Shape.of("tiny", config, np.dtype("<f2"))
    monkeypatch.setitem(SHAPES, "tiny", shape)  # type: ignore[arg-type]
    return shape


@pytest.mark.parametrize(
    ("model", "how", "said"),
    [
        ("tiny", {"kv": "int99"}, "int99"),
        ("tiny", {"kv": "k=int4:channel:g64,v=int4:token:g64"}, "g64"),
        ("tiny", {"max_context": 0}, "1 to 16777216 tokens"),
        ("tiny", {"max_context": (1 << 24) + 1}, "1 to 16777216 tokens"),
        ("tiny", {"device": "tpu"}, "tpu"),
        ("tiny", {"calibration": "/nowhere/file", "kv": "kvquant3"}, "/nowhere/file"),
        ("tinny", {}, "did you mean synthetic:tiny?"),
        ("opt-175b", {}, "for memory only"),
    ],
)
def test_load_refuses_before_weights_are_made(
    tiny_shape: Shape, model: str, how: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device(*arguments: Any) -> None:
        raise AssertionError("the device was asked for")

    monkeypatch.setattr(backends, "get_ops", no_device)
    with pytest.raises(UsageError) as caught:
        kvrt.load(f"synthetic:{model}", **how)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_load_refuses_what_memory_cannot_hold(
    tiny_shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("weights were made")

    monkeypatch.setattr(CpuOps, "matrix", refuse)
    monkeypatch.setattr(backends, "available_memory", lambda _: tiny_shape.weight_bytes - 1)
    with pytest.raises(UsageError, match=r"^the weights of synthetic:tiny take .* GiB of memory"):
        kvrt.load("synthetic:tiny")
    # Where it is unknown, or enough, they are made.
    for known in (0, tiny_shape.weight_bytes):
        monkeypatch.setattr(backends, "available_memory", lambda _, known=known: known)
        with pytest.raises(AssertionError, match="weights were made"):
            kvrt.load("synthetic:tiny")


def test_a_synthetic_model_can_have_any_context(tiny_shape: Shape) -> None:
    assert kvrt.load("synthetic:tiny").max_context == 256
    model = kvrt.load("synthetic:tiny", max_context=1 << 24)
    assert model.max_context == 1 << 24
    long = [byte % 320 for byte in range(300)]
    assert model.generate(long, max_tokens=2).prompt_tokens == 300
    assert model.weight_bytes == tiny_shape.weight_bytes


def test_random_weights_have_tables_for_random_numbers(tiny_shape: Shape) -> None:
    model = kvrt.load("synthetic:tiny", kv="kvquant3")
    spec = kvrt.KVSpec.parse("kvquant3:1%")
    for store in (model.new_store(), model.new_store(spec)):
        model.decoder.prefill([byte % 320 for byte in range(200)], store)
        assert store.stats().sealed_tokens == 192
        assert np.isfinite(model.decoder.decode(1, store)).all()


# --- the command line ---


@pytest.mark.parametrize("name", SHAPES)
def test_info_knows_every_shape(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("weights were made")

    monkeypatch.setattr(SyntheticWeights, "__init__", refuse)
    shape = SHAPES[name]
    assert run(["info", f"synthetic:{name}", "--json", "--kv", "f16", "--kv", "kvrt4"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == shape.parameters
    assert facts["weight_bytes"] == shape.weight_bytes
    assert facts["max_context"] == shape.max_context
    plain = 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    assert facts["kv"][0]["bytes_per_token"] == plain
    assert facts["kv"][1]["bytes_per_token"] < plain / 3


def test_info_says_what_type_a_shape_is_of(capsys: Any) -> None:
    assert run(["info", "synthetic:opt-175b"]) == 0
    out, err = capsys.readouterr()
    assert "model type   opt\n" in out and "96 query, 96 key-value" in out and err == ""


@pytest.mark.parametrize("command", ["info", "chat", "generate"])
def test_an_unknown_shape_is_one_line(command: str, capsys: Any) -> None:
    name = "synthetic:nothing-like-it"
    words = [command, name] if command == "info" else [command, "-m", name, "-p", "x"]
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("kvrt: error: no synthetic model 'nothing-like-it'")


def test_chat_with_a_synthetic_model(tiny_shape: Shape, capsys: Any) -> None:
    words = ["chat", "-m", "synthetic:tiny", "-p", "hi", "-n", "9", "--temp", "0"]
    assert run([*words, "-l", "65+1000"]) == 0
    assert capsys.readouterr().out == "AAAAAAAAA\n"
    assert run([*words, "-l", "300+1000", "--kv", "f8", "-sys", "be short"]) == 0
    assert capsys.readouterr().out == "<300>" * 9 + "\n"
