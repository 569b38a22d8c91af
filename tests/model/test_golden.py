"""The real model against an independent implementation (tests/golden, see `recipe` there)."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvrt.generate import Model, load
from kvrt.sampler import SamplingParams
from tests.helpers.compare import assert_close
from tests.helpers.tolerances import Tolerance

pytestmark = pytest.mark.model

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "smollm2-135m-instruct.json").read_text()
)
PROMPTS: dict[str, dict[str, Any]] = {prompt["name"]: prompt for prompt in GOLDEN["prompts"]}

# What the project promises of each cache format: of a logit, of the mean log-likelihood.
LIMITS = {"f32": (1e-3, 1e-5), "f16": (0.05, 2e-3)}


class Outcome(NamedTuple):
    """What the model made of one prompt."""

    last: np.ndarray  # (vocab_size,) f64 logits after the last token
    likelihoods: np.ndarray  # (n - 1,) f64
    greedy: list[int]  # 32 steps on the cache, going on after an end of turn


@pytest.fixture(scope="module", params=LIMITS)
def model(request: pytest.FixtureRequest, real_model_dir: Path) -> Model:
    return load(str(real_model_dir), kv=request.param)


@pytest.fixture(scope="module")
def outcome(model: Model) -> Callable[[str], Outcome]:
    """The outcome of a prompt, by name, computed once."""

    @cache
    def run(name: str) -> Outcome:
        ids, store = PROMPTS[name]["ids"], model.new_store()
        # One prefill sees its own keys and values exactly. In pieces, it sees the rounded cache.
        size = len(ids) if str(model.spec) == "f32" else 100
        pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
        logits = np.concatenate(
            [model.decoder.prefill(piece, store, all_logits=True) for piece in pieces]
        )  # (n, vocab_size) f32
        sampler = model.new_sampler(SamplingParams(temperature=0))
        drawn = [sampler.sample(logits[-1], [])]
        while len(drawn) < 32:
            drawn.append(sampler.sample(model.decoder.decode(drawn[-1], store), drawn))
        return Outcome(logits[-1].astype(np.float64), reference_likelihoods(logits, ids), drawn)

    return run


def reference_likelihoods(logits: np.ndarray, ids: list[int]) -> np.ndarray:
    """log p(token | before) of tokens 1..n-1 from logits (n, vocab_size) f32, as the file's.

    The reference summed the exponentials in float32, in 16 lanes, each from left to right. A lane
    of 3,072 terms loses those below 2^-25 of its sum, so its likelihoods are too high by about
    7e-6; the same sum here leaves a difference of 3e-6 at most, a float64 sum one of up to 9.4e-6.
    """
    peaks = logits.max(axis=1, keepdims=True)  # (n, 1) f32
    lanes = np.exp(logits - peaks).reshape(len(logits), -1, 16)  # (n, vocab_size / 16, 16) f32
    sums = np.zeros((len(logits), 16), np.float32)  # (n, 16) f32
    for step in range(lanes.shape[1]):
        sums += lanes[:, step]
    total = np.log(sums.sum(axis=1, dtype=np.float64)) + peaks[:, 0]  # (n,) f64
    return logits[np.arange(len(ids) - 1), ids[1:]] - total[:-1]


@pytest.mark.parametrize("name", PROMPTS)
def test_token_ids(model: Model, name: str) -> None:
    prompt = PROMPTS[name]
    control = name == "chat"  # its text is a finished template
    assert model.tokenizer.encode(prompt["text"], control=control) == prompt["ids"]


@pytest.mark.parametrize("name", PROMPTS)
def test_logits(model: Model, outcome: Callable[[str], Outcome], name: str) -> None:
    prompt, last = PROMPTS[name], outcome(name).last
    limit, _ = LIMITS[str(model.spec)]
    bound = Tolerance(limit, 0.0, "what the project promises of a logit in this format")
    assert_close(last[prompt["last_top20_ids"]], prompt["last_top20_logits"], bound)
    assert set(np.argsort(-last)[:5]) == set(prompt["last_top20_ids"][:5])
    log_sum = np.log(np.exp(last - last.max()).sum()) + last.max()
    assert_close(log_sum, prompt["last_logsumexp"], bound)
    assert_close(last.mean(), prompt["last_logits_mean"], bound)
    assert_close(np.sqrt(np.mean(last**2)), prompt["last_logits_rms"], bound)


@pytest.mark.parametrize("name", PROMPTS)
def test_likelihood(model: Model, outcome: Callable[[str], Outcome], name: str) -> None:
    prompt, likelihoods = PROMPTS[name], outcome(name).likelihoods
    of_logits, of_mean = LIMITS[str(model.spec)]
    bound = Tolerance(of_mean, 0.0, "what the project promises of the mean in this format")
    assert_close(likelihoods.mean(), prompt["mean_log_likelihood"], bound)
    bound = Tolerance(5e-5 + 2 * of_logits, 0.0, "the file's rounding, and two moved logits")
    assert_close(likelihoods, np.array(prompt["token_log_likelihoods_1e-4"]) * 1e-4, bound)


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens(model: Model, outcome: Callable[[str], Outcome], name: str) -> None:
    prompt, drawn = PROMPTS[name], outcome(name).greedy
    assert drawn == prompt["greedy_ids"]
    assert model.tokenizer.decode(drawn, skip_control=False) == prompt["greedy_text"]


def test_the_chat_prompt_is_what_the_template_makes(model: Model) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert model.tokenizer.encode_chat(messages) == PROMPTS["chat"]["ids"]


def test_a_chat_answers(model: Model) -> None:
    answer = "".join(
        model.chat(sampling=SamplingParams(temperature=0)).send("What is the capital of France?")
    )
    assert answer == "The capital of France is Paris."
