"""`kvrt calibrate`: optimal levels, thresholds that hold the keys, and the command."""

import itertools
import json
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvrt
from kvrt import generate
from kvrt.calibrate import calibrate
from kvrt.calibration import ROPES, Calibration, expected_tensors
from kvrt.cli.main import run
from kvrt.errors import UsageError
from kvrt.generate import Model
from kvrt.kvstore import Geometry, KVSpec
from kvrt.kvstore.codecs import Nuq
from kvrt.levels import optimal_levels, refined_levels
from tests.helpers.refs import attention
from tests.helpers.tiny_model import write_tiny_model

CONTEXT, TOKENS = 160, 480  # three windows: all of TEXT
TEXT = "Call me Ishmael. Some years ago, never mind how long precisely. " * 8


# --- levels ---


def cost_of(numbers: np.ndarray, weights: np.ndarray, levels: np.ndarray) -> float:
    error = np.square(numbers[:, None] - levels).min(axis=1)
    return float(weights @ error)


def least_cost(numbers: np.ndarray, weights: np.ndarray, size: int) -> float:
    """Of every way to cut the sorted numbers into `size` runs, each on its weighted mean."""
    order = np.argsort(numbers)
    numbers, weights = numbers[order], weights[order]
    costs = []
    for cuts in itertools.combinations(range(1, len(numbers)), size - 1):
        levels = [
            np.average(part, weights=share)
            for part, share in zip(np.split(numbers, cuts), np.split(weights, cuts))
        ]
        costs.append(cost_of(numbers, weights, np.array(levels)))
    return min(costs)


@pytest.mark.parametrize("seed", range(5))
def test_levels_are_as_good_as_brute_force(seed: int) -> None:
    """Numbers of a histogram bin each, so that the histogram loses nothing."""
    rng = np.random.default_rng(seed)
    bins = rng.choice(512, 11, replace=False)
    numbers = (bins + rng.random(11)) / 256 - 1
    weights = rng.random(11) ** 4 + 0.01
    found = optimal_levels(numbers, weights, [2, 3, 4, 6])
    assert list(found) == [2, 3, 4, 6]
    for size, levels in found.items():
        assert levels.shape == (size,) and (np.diff(levels) > 0).all()
        least = least_cost(numbers, weights, size)
        assert cost_of(numbers, weights, levels) == pytest.approx(least, rel=1e-6, abs=1e-12)


def test_weights_pull_levels() -> None:
    numbers, weights = np.array([-0.9, -0.2, 0.6, 0.8]), np.array([1000.0, 1000.0, 1.0, 1.0])
    even = optimal_levels(numbers, np.ones(4), [2])[2]
    assert even == pytest.approx([-0.55, 0.7])
    pulled = optimal_levels(numbers, weights, [2])[2]
    assert pulled == pytest.approx([-0.9, np.average(numbers[1:], weights=weights[1:])])


def test_fewer_numbers_than_levels_are_all_met() -> None:
    numbers = np.array([-1.0, -0.25, 0.5, 1.0] * 3)
    for size, levels in optimal_levels(numbers, np.ones(12), [8, 16]).items():
        assert levels.shape == (size,) and (np.diff(levels) >= 0).all()
        assert cost_of(numbers, np.ones(12), levels) == pytest.approx(0, abs=1e-20)


def test_the_histogram_costs_little() -> None:
    """Many numbers to a bin: no worse than the optimum by more than the width of a bin."""
    numbers = np.tanh(np.random.default_rng(0).standard_normal(20_000))
    levels = optimal_levels(numbers, np.ones(20_000), [4])[4]
    best = levels
    for _ in range(200):  # Lloyd's iterations, from there
        codes = np.abs(numbers[:, None] - best).argmin(axis=1)
        best = np.array([numbers[codes == code].mean() for code in range(4)])
    assert np.abs(levels - best).max() < 2 / 512


def cost_of_averages(
    numbers: np.ndarray, sizes: np.ndarray, levels: np.ndarray, alone: float
) -> float:
    near = levels[np.abs(numbers[..., None] - levels).argmin(axis=-1)]
    error = sizes * (near - numbers)  # (n, channels)
    return float((alone * np.square(error).mean(0) + (1 - alone) * error.mean(0) ** 2).sum())


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("alone", [0.02, 0.3])
def test_refined_levels_cost_less_in_averages(size: int, alone: float) -> None:
    """Channels that sit off the levels for good make an error that no average takes away."""
    rng = np.random.default_rng(0)
    numbers = np.clip(rng.uniform(-0.9, 0.9, 24) + 0.05 * rng.standard_normal((600, 24)), -1, 1)
    sizes = rng.uniform(0.5, 2, (600, 1)) * np.ones(24)
    start = optimal_levels(numbers.ravel(), np.square(sizes).ravel(), [size])[size]
    levels = refined_levels(numbers, sizes, start, np.ones(24), alone)
    assert levels.shape == (size,) and (np.diff(levels) >= 0).all()
    before, after = (cost_of_averages(numbers, sizes, x, alone) for x in (start, levels))
    assert after < before * (0.97 if alone < 0.1 else 0.995)


def test_refining_weighs_channels_and_leaves_outliers_out() -> None:
    """One level is free for the channel that counts; a size of 0 is no error."""
    numbers = np.array([[-0.5, 0.3], [-0.5, 0.3], [1.0, 0.3]])
    sizes = np.array([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
    levels = refined_levels(numbers, sizes, np.array([-0.4, 0.9]), np.array([1.0, 9.0]), 0.5)
    assert levels == pytest.approx([-0.5, 0.3], abs=0.01)
    alike = refined_levels(numbers, sizes, np.array([-0.5, 0.3]), np.array([1.0, 9.0]), 0.5)
    assert alike == pytest.approx([-0.5, 0.3])  # never worse than at the start


# --- a fit ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, rope_theta=500.0)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return kvrt.load(str(folder), threads=1)


@pytest.fixture(scope="module")
def fitted(model: Model) -> Calibration:
    return fit(model)


def fit(model: Model, text: str = TEXT) -> Calibration:
    return calibrate(
        model, [model.tokenizer.encode(text)], ["ab" * 32], tokens=TOKENS, context=CONTEXT
    )


def traced(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys of every token, after RoPE: (layers, windows, context, heads, dim) f32."""
    ids = model.tokenizer.encode(TEXT)
    seen: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(2)]
    for start in range(0, TOKENS, CONTEXT):
        model.decoder.trace(
            ids[start : start + CONTEXT],
            lambda layer, q, k, v: seen[layer].append((np.array(q), np.array(k))),
        )
    queries, keys = (np.array([[pair[i] for pair in layer] for layer in seen]) for i in (0, 1))
    return queries, keys


def turned_back(keys: np.ndarray, model: Model, positions: np.ndarray) -> np.ndarray:
    """keys (..., context, heads, dim) less the rotation of positions (context,): f64."""
    dim = keys.shape[-1]
    angles = positions[:, None, None] * 500.0 ** (-np.arange(dim // 2) * 2 / dim)
    pairs = (keys[..., : dim // 2] + 1j * keys[..., dim // 2 :]) * np.exp(-1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def test_what_it_says_of_itself(model: Model, fitted: Calibration) -> None:
    origin = fitted.origin
    assert origin.geometry == Geometry(2, 2, 16)
    assert (origin.tokens, origin.texts) == (TOKENS, ("ab" * 32,))
    fitted.check(model.fingerprint, Geometry(2, 2, 16))
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in fitted.tensors.items()}
    assert found == expected_tensors(origin.geometry)


@pytest.mark.parametrize("rope", ROPES)
def test_thresholds_are_those_of_the_keys(model: Model, fitted: Calibration, rope: Any) -> None:
    """0%: the extremes of every token but a window's first; 1%: half a percent less at each end."""
    keys = traced(model)[1].astype(np.float16).astype(np.float64)
    at = np.arange(CONTEXT)
    if rope != "post":
        keys = turned_back(keys, model, at if rope == "pre" else at // 64 * 64)
    kept = keys[:, :, 1:].reshape(2, -1, 2, 16)  # (layers, n, heads, dim)
    for layer in range(2):
        ordered = np.sort(kept[layer], axis=0)
        for share, outside in (("0%", 0), ("1%", round(len(ordered) * 0.005))):
            for end, row in (("low", outside), ("high", -1 - outside)):
                got = fitted.tensors[f"k.{rope}.{share}.{end}"][layer].astype(np.float64)
                # The rounding of f16, and of a rotation in f32.
                np.testing.assert_allclose(got, ordered[row], rtol=2**-10, atol=1e-4)
        tables = fitted.tables(layer, False, Nuq(2), rope)
        assert tables.centre is not None and tables.half is not None
        assert (np.abs(kept[layer] - tables.centre) <= tables.half + 1e-4).all()
        apart = fitted.tables(layer, False, Nuq(2, outliers=True), rope)
        assert apart.centre is not None and apart.half is not None
        share_outside = (np.abs(kept[layer] - apart.centre) > apart.half).mean()
        assert share_outside <= 0.0101
        # Before RoPE a byte's keys are alike, and a threshold that many meet has none outside.
        assert rope != "post" or share_outside > 0.003


def test_sensitivity_of_keys_is_the_mean_square_of_queries(
    model: Model, fitted: Calibration
) -> None:
    queries = traced(model)[0].astype(np.float64).reshape(2, -1, 2, 2, 16)
    want = np.square(queries).mean(axis=1).sum(axis=2)  # (layers, kv_heads, dim)
    np.testing.assert_allclose(fitted.tensors["k.sensitivity"], want, rtol=1e-4)  # f32 sums
    assert (fitted.tensors["v.sensitivity"] > 0).all()


def test_levels_grow_and_fill_their_range(fitted: Calibration) -> None:
    for name, tensor in fitted.tensors.items():
        if name.endswith(".levels"):
            assert (np.diff(tensor, axis=-1) > 0).all(), name
            assert (np.abs(tensor) <= 1.001).all(), name
            wide = 0.6 if ".2." in name else 0.75
            assert (tensor[:, 0] < -wide + 0.3).all() and (tensor[:, -1] > wide - 0.3).all(), name


def test_a_fit_repeats_and_depends_on_the_text(model: Model, fitted: Calibration) -> None:
    assert fit(model).fingerprint == fitted.fingerprint
    assert fit(model, TEXT.upper()).fingerprint != fitted.fingerprint


@pytest.mark.parametrize("kv", ["kvquant4", "kvquant2:1%", "k=nuq3:page,v=nuq3"])
def test_a_store_of_the_model_takes_it(
    folder: Path, model: Model, fitted: Calibration, tmp_path: Path, kv: str
) -> None:
    path = tmp_path / "c.safetensors"
    fitted.save(path)
    with_it = kvrt.load(str(folder), kv=kv, threads=1, calibration=str(path))
    store = with_it.new_store(KVSpec.parse(kv))
    ids = with_it.tokenizer.encode(TEXT)[:140]
    logits = with_it.decoder.prefill(ids, store)
    assert store.stats().sealed_tokens == 128
    exact = model.decoder.prefill(ids, model.new_store(KVSpec.parse("f32")))
    next_logits = [
        m.decoder.decode(65, s) for m, s in ((with_it, store), (model, _filled(model, ids)))
    ]
    np.testing.assert_allclose(logits, exact, atol=1e-2, rtol=0)  # prefill attends before packing
    # Packed, but of use: what was said before still decides the next token's logits.
    assert np.abs(next_logits[0] - next_logits[1]).max() > 0
    # Random weights look at single tokens, so that 2 bits change much (int2 too: 0.57 to 0.94).
    assert np.corrcoef(*next_logits)[0, 1] > (0.97 if "4" in kv else 0.5)


def _filled(model: Model, ids: Sequence[int]) -> Any:
    store = model.new_store(KVSpec.parse("f32"))
    model.decoder.prefill(ids, store)
    return store


def test_windows_are_spread_over_the_text(model: Model) -> None:
    """Of six, every other one."""
    parts = [letter * CONTEXT for letter in "abcdef"]

    def fit_of(*letters: str) -> str:
        texts = [model.tokenizer.encode(part) for part in parts if part[0] in letters]
        return calibrate(model, texts, ["ab" * 32], tokens=TOKENS, context=CONTEXT).fingerprint

    assert fit_of(*"abcdef") == fit_of(*"bdf") != fit_of(*"abc")


def test_keys_are_weighed_by_the_attention_they_receive(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels of keys follow it; thresholds, and the levels of values, do not."""
    weighed = fit(model)
    module = import_module("kvrt.calibrate_sample")
    real = module._attention

    def none_received(*args: Any) -> Any:
        received, squared, alone = real(*args)
        return np.zeros_like(received) + 1, squared, alone

    monkeypatch.setattr(module, "_attention", none_received)
    even = fit(model)
    changed = {n for n, t in weighed.tensors.items() if not np.array_equal(t, even.tensors[n])}
    assert changed == {n for n in weighed.tensors if n.startswith("k.") and n.endswith("levels")}


def test_attention_is_that_of_the_reference(folder: Path, model: Model) -> None:
    """Of the queries asked, here all but the first: sums of a and a^2, and how few count."""
    from kvrt.calibrate_sample import _attention

    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((100, 4, 16)), rng.standard_normal((100, 2, 16))
    for window in (None, 7):
        _, rows = attention(q, k, k, window)  # (heads, n, n)
        rows = rows[:, 1:]
        got = _attention(q.astype(np.float32), k.astype(np.float32), window)
        received, squared, alone = got
        np.testing.assert_allclose(received, rows.sum(1).reshape(2, 2, 100).sum(1).T, rtol=1e-4)
        np.testing.assert_allclose(squared, np.square(rows).sum(1).T, rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(alone, np.square(rows[..., 1:]).sum(-1).mean(1), rtol=1e-4)


def test_the_bias_of_keys_is_left_out(tmp_path: Path) -> None:
    """Caches leave it out of what they pack, so thresholds must not hold it."""
    folder = tmp_path / "qwen2"
    config = write_tiny_model(folder, "qwen2", tokenizer=True)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(config.num_layers):
        tensors[f"model.layers.{layer}.self_attn.k_proj.bias"][:] = 600
    save_file(tensors, folder / "model.safetensors")
    made = fit(kvrt.load(str(folder), threads=1))
    for name, tensor in made.tensors.items():
        if name.endswith((".low", ".high")):
            assert np.abs(tensor).max() < 30, name


def test_no_whole_window_is_refused(model: Model) -> None:
    with pytest.raises(UsageError, match="less than one window of 160 tokens"):
        calibrate(model, [range(100)], ["ab" * 32], tokens=TOKENS, context=CONTEXT)


# --- the command ---


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


SMALL = ("--tokens", "256", "--context", "128", "-t", "1")


def test_a_good_run_writes_the_file(folder: Path, text: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "out.safetensors"
    assert run(["calibrate", str(folder), "--text", text, "-o", str(path), *SMALL]) == 0
    out, _ = capsys.readouterr()
    made = Calibration.open(path)
    assert made.origin.tokens == 256 and len(made.origin.texts) == 1
    assert out.startswith(f"{path}: 256 tokens, codebooks {made.fingerprint[:12]}, ")
    assert out.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, "text.txt"]


def test_json_is_one_object(folder: Path, text: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "out.safetensors"
    args = ["calibrate", str(folder), "--text", text, "-o", str(path), *SMALL, "--json"]
    assert run(args) == 0
    made = Calibration.open(path)
    assert json.loads(capsys.readouterr().out) == {
        "path": str(path),
        "tokens": 256,
        "fingerprint": made.fingerprint,
        "bytes": path.stat().st_size,
    }


def test_the_file_in_the_models_folder_is_found_by_itself(
    text: str, tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "tiny"
    write_tiny_model(folder, tokenizer=True)
    talk = ["generate", "-m", str(folder), "-p", "a", "-n", "2", "-t", "1", "--kv", "kvquant4"]
    assert run(talk) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "kvrt calibrate -m MODEL --text FILE -o" in message
    own = re.findall(r"-o (\S+)`", message)[0]
    assert run(["calibrate", "-m", str(folder), "--text", text, "-o", own, *SMALL]) == 0
    assert run(talk) == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["M", "--text", "none.txt", "-o", "OUT"], "--text: cannot read none.txt"),
        (["M", "--text", "TEXT", "--text", "none.txt", "-o", "OUT"], "cannot read none.txt"),
        (["M", "--text", "TEXT", "-o", "OUT", "--codec", "kivi4"],
         "--codec: 'kivi4' needs no calibration; nuq does, and formats such as vq2"),
        (["M", "--text", "TEXT", "-o", "OUT", "--tokens", "100", "--context", "101"],
         "--tokens: 100 are less than one window of 101 tokens"),
        (["M", "--text", "TEXT", "-o", "OUT", "--tokens", "63"], "--tokens"),
        (["M", "--text", "TEXT", "-o", "OUT", "--context", "1"], "--context"),
        (["M", "--text", "TEXT", "-o", "none/OUT"], "-o: the folder of none/OUT does not exist"),
        (["M", "--text", "TEXT", "-o", "."], "-o: . is a folder, expected the name of a file"),
        (["M", "-m", "M", "--text", "TEXT", "-o", "OUT"], "MODEL is given twice"),
        (["M", "--text", "TEXT"], "-o"),
        (["M", "-o", "OUT"], "--text"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused_before_the_model_is_loaded(
    folder: Path,
    text: str,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(generate, "load", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.chdir(tmp_path)
    check_refused(
        capsys, tmp_path, [{"M": str(folder), "TEXT": text}.get(a, a) for a in args], said
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--context", "257"], "--context: 257 tokens are beyond this model's context of 256"),
        (["--context", "250", "--text", "SHORT"], None),
        (["--text", "SHORT"], "the text has 70 tokens, less than one window of 128 tokens"),
    ],
)
def test_what_the_model_cannot_do_is_refused(
    folder: Path,
    text: str,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    said: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SHORT").write_text("x" * 70)
    if "--text" not in args:
        args = [*args, "--text", text]
    if "--context" not in args:
        args = [*args, "--context", "128"]
    check_refused(
        capsys, tmp_path, [str(folder), "-o", "OUT", "-t", "1", *args], said or "one window of 250"
    )


def check_refused(capsys: Any, folder: Path, args: list[str], said: str) -> None:
    before = sorted(folder.rglob("*"))
    assert run(["calibrate", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvrt: error: ") and err.count("\n") == 1, err
    assert said in err
    assert sorted(folder.rglob("*")) == before


def test_a_model_that_is_not_here(text: str, tmp_path: Path, capsys: Any) -> None:
    none = str(tmp_path / "none")
    check_refused(capsys, tmp_path, [none, "--text", text, "-o", str(tmp_path / "x")], "none")


def test_the_texts_hashes_are_kept(folder: Path, text: str, tmp_path: Path, capsys: Any) -> None:
    import hashlib

    other = tmp_path / "other.txt"
    other.write_text("other words " * 20, encoding="utf-8")
    path = tmp_path / "out.safetensors"
    args = ["--text", text, "--text", str(other), "-o", str(path), *SMALL]
    assert run(["calibrate", "-m", str(folder), *args]) == 0
    # Less the last newline, which these do not have.
    want = [hashlib.sha256(Path(p).read_bytes()).hexdigest() for p in (text, other)]
    assert list(Calibration.open(path).origin.texts) == want
