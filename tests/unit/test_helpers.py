"""The helpers themselves: comparisons bite, models are lively, the reference is causal."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.helpers.compare import assert_close, max_error, relative_rmse
from tests.helpers.refs import attention, reference_forward, reference_logits
from tests.helpers.tiny_model import CASES, CONTROL_TOKENS, write_case, write_tiny_model
from tests.helpers.tolerances import EXACT, TOLERANCES, Tolerance, tolerance

LOOSE = Tolerance(0.1, 0.0, "a test")
IDS = np.random.default_rng(1).integers(0, 320, 40).tolist()


@pytest.mark.parametrize("actual", [np.nan, np.inf, -np.inf, 1.2, 0.8])
def test_assert_close_bites(actual: float) -> None:
    with pytest.raises(AssertionError, match=r"1 of 2 elements are off, worst at \(1,\)"):
        assert_close([5.0, actual], [5.0, 1.0], LOOSE)


@pytest.mark.parametrize("expected", [np.nan, np.inf, -np.inf])
def test_assert_close_wants_finite_expectations(expected: float) -> None:
    with pytest.raises(AssertionError):
        assert_close([expected], [expected], LOOSE)
    with pytest.raises(AssertionError):
        assert_close([1.0], [expected], LOOSE)


def test_assert_close_passes_and_checks_shapes() -> None:
    assert_close([1.05, 2.0], [1.0, 2.0], LOOSE)
    assert_close([[110.0]], [[100.0]], Tolerance(0.0, 0.1, "relative"))
    assert_close(np.empty((0, 3)), np.empty((0, 3)), EXACT)
    with pytest.raises(AssertionError, match="shape"):
        assert_close([1.0], [[1.0]], LOOSE)


def test_error_measures() -> None:
    assert max_error([1.0, 4.0], [1.0, 2.0]) == 2.0
    assert relative_rmse([3.0, 5.0], [3.0, 4.0]) == pytest.approx(0.2)
    assert np.isnan(max_error([np.nan], [1.0])) and np.isnan(relative_rmse([np.nan], [1.0]))


def test_tolerances_have_reasons_and_no_defaults() -> None:
    assert all(len(entry.why) > 20 and entry.atol < 1 for entry in TOLERANCES.values())
    with pytest.raises(KeyError):
        tolerance("logits", "int2")


@pytest.mark.parametrize("name", CASES)
def test_models_are_lively(tmp_path: Path, name: str) -> None:
    write_case(tmp_path, name)
    out = reference_forward(tmp_path, IDS)
    assert 1.0 < out.logits.std() < 5.0
    for probabilities in out.attention:
        peak = probabilities[:, 20:].max(-1)  # (heads, 20) f64
        assert 0.05 < peak.mean() < 0.9


def test_models_repeat_by_seed(tmp_path: Path) -> None:
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_case(tmp_path / folder, "llama", seed=seed)
    same = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in "abc"]
    assert same[0] == same[1] != same[2]


def test_every_case_computes_something_else(tmp_path: Path) -> None:
    """Otherwise a case would not test what its name says."""
    alike = {"llama", "llama-sharded", "mistral-no-window"}
    last: dict[str, np.ndarray] = {}
    for name in CASES:
        write_case(tmp_path / name, name)
        last[name] = reference_logits(tmp_path / name, IDS)[-1]
    for name in CASES:
        for other in CASES:
            if name < other and not {name, other} <= alike:
                assert max_error(last[name], last[other]) > 1e-3, (name, other)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3-window"])
def test_reference_is_causal(tmp_path: Path, name: str) -> None:
    write_case(tmp_path, name)
    whole = reference_logits(tmp_path, IDS)
    part = reference_logits(tmp_path, IDS[:17])
    assert max_error(whole[:17], part) < 1e-12


def test_window_hides_exactly_the_older_tokens() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 6, 1, 4))  # (6, 1, 4) f64 each
    _, seen = attention(q, k, v, window=3)
    rows, columns = np.indices((6, 6))
    assert np.array_equal(seen[0] > 0, (columns <= rows) & (columns > rows - 3))


def test_tokenizer_is_byte_level(tmp_path: Path) -> None:
    config = write_tiny_model(tmp_path, tokenizer=True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Grüße, 世界! \n\t\0 <end>"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert [tokenizer.token_to_id(token) for token in CONTROL_TOKENS] == [256, 257, 258]
    assert tokenizer.encode("<|im_end|>").ids == [258] and config.eos_ids == (258,)
    template = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    assert "<|im_start|>" in template
