"""The real model on a GPU against an independent implementation (tests/golden, see `recipe`)."""

from pathlib import Path

import numpy as np
import pytest

from kvrt.generate import Model, load
from tests.helpers.compare import assert_close
from tests.helpers.tolerances import Tolerance
from tests.model.test_golden import PROMPTS

pytestmark = pytest.mark.model

LOGITS = Tolerance(2e-2, 0.0, "long prompts multiply activations rounded to 16 bits")


@pytest.fixture(scope="module")
def model(real_model_dir: Path) -> Model:
    return load(str(real_model_dir), device="cuda", kv="f16")


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_greedy_tokens(model: Model, name: str) -> None:
    prompt, store = PROMPTS[name], model.new_store()
    last = model.decoder.prefill(prompt["ids"], store).astype(np.float64)  # (vocab_size,)
    drawn = [int(last.argmax())]
    while len(drawn) < 32:
        drawn.append(int(model.decoder.decode(drawn[-1], store).argmax()))
    assert drawn == prompt["greedy_ids"]
    assert_close(last[prompt["last_top20_ids"]], prompt["last_top20_logits"], LOGITS)
    log_sum = np.log(np.exp(last - last.max()).sum()) + last.max()
    assert_close(log_sum, prompt["last_logsumexp"], LOGITS)


@pytest.mark.parametrize("name", ["chat", "code"])
def test_token_by_token_activations_are_not_rounded(model: Model, name: str) -> None:
    """The decode step alone, for the whole prompt."""
    prompt, store = PROMPTS[name], model.new_store()
    for token in prompt["ids"]:
        last = model.decoder.decode(token, store)
    bound = Tolerance(1e-2, 0.0, "queries, keys, values and weights of attention have 11 bits")
    assert_close(last[prompt["last_top20_ids"]], prompt["last_top20_logits"], bound)
