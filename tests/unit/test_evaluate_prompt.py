"""Quality behind a prompt: what follows it is scored as a chat would have computed it."""

from pathlib import Path

import numpy as np
import pytest

from kvrt.errors import UsageError
from kvrt.evaluate import measure_quality
from kvrt.generate import Model, load
from kvrt.kvstore import Geometry, KVSpec
from tests.helpers.faded_store import FadedStore
from tests.helpers.tiny_model import write_case, write_tokenizer

CONTEXT = 150
WINDOWS = np.random.default_rng(4).integers(0, 320, (3, CONTEXT))  # (3, 150) i64
CLOSE = 2e-4  # two ways to compute a mean over rows whose logits differ by rounding
SPEC = KVSpec.parse("k=f32,v=f32,sink=3,window=20")
EXACT = KVSpec.parse("k=f32,v=f32,window=400")  # packs nothing of so few tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    write_case(folder, "llama")
    write_tokenizer(folder)
    return load(str(folder), device="cpu")


@pytest.fixture
def faded(model: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model with caches whose pages hold half the numbers once they are sealed."""
    config = model.config
    geometry = Geometry(config.num_layers, config.num_kv_heads, config.head_dim)

    def new_store(spec: KVSpec) -> FadedStore:
        return FadedStore(geometry, spec, model.ops, 4096)

    monkeypatch.setattr(model, "_new_store", new_store)
    return model


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)  # (n, vocab_size)
    peak = logits.max(axis=1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))


def chatted(model: Model, spec: KVSpec, prompt: int) -> np.ndarray:
    """Log-probabilities (windows, CONTEXT - prompt, vocab_size): a prefill, then `decode`."""
    rows = []
    for ids in WINDOWS:
        store = model.new_store(spec)
        logits = [model.decoder.prefill(ids[:prompt], store)]
        logits += [model.decoder.decode(token, store) for token in ids[prompt:-1]]
        rows.append(log_softmax(np.stack(logits)))
    return np.stack(rows)


@pytest.mark.parametrize("prompt", [1, 40, 100, CONTEXT - 2, CONTEXT - 1])
def test_behind_a_prompt_a_format_is_what_a_chat_gives(faded: Model, prompt: int) -> None:
    """A prompt in one piece, then token by token: from the prompt's last row on all are scored."""
    exact, (row,) = measure_quality(faded, [SPEC], WINDOWS, prompt=prompt)
    changed, unpacked = (chatted(faded, spec, prompt) for spec in (SPEC, EXACT))
    targets = WINDOWS[:, prompt:, None]  # (3, CONTEXT - prompt, 1)
    assert exact.tokens == row.tokens == 3 * (CONTEXT - prompt)
    for found, wanted in ((exact, unpacked), (row, changed)):
        nll = -np.take_along_axis(wanted, targets, axis=2).mean()
        assert found.nll == pytest.approx(nll, abs=CLOSE)
    divergences = (np.exp(unpacked) * (unpacked - changed)).sum(axis=-1)
    assert row.kld == pytest.approx(divergences.mean(), abs=CLOSE)
    # The row of the last prompt token saw nothing packed, those after it did.
    packed = prompt < CONTEXT - 1
    assert (row.kld > 50 * CLOSE) == packed


def test_a_prompt_of_one_token_is_as_good_as_none(model: Model) -> None:
    """Nothing is packed where it ends."""
    whole, one = (measure_quality(model, [SPEC], WINDOWS[:1], prompt=n)[1][0] for n in (None, 1))
    assert one.tokens == whole.tokens and one.nll == pytest.approx(whole.nll, abs=1e-5)


@pytest.mark.parametrize("prompt", [-1, 0, CONTEXT, CONTEXT + 1])
def test_a_prompt_that_leaves_nothing_to_score_is_refused(model: Model, prompt: int) -> None:
    with pytest.raises(UsageError, match=f"a prompt must be 1 to 149 tokens in .*, got {prompt}"):
        measure_quality(model, [SPEC], WINDOWS, prompt=prompt)


def test_progress_of_prompts_rises_to_all_tokens(model: Model) -> None:
    seen: list[int] = []
    measure_quality(model, [SPEC], WINDOWS[:2], lambda _, done, __: seen.append(done), prompt=50)
    assert seen == sorted(seen) and seen[-1] == 2 * 2 * CONTEXT
