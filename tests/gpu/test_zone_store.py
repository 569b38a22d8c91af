"""Prompts that a GPU compresses: what it decodes, and what a CPU decodes from the same zones."""

from pathlib import Path

import numpy as np
import pytest

import kvrt
from kvrt.generate import Model
from kvrt.trizone.store import ZoneStore
from tests.helpers.tiny_model import write_tiny_model

FORMATS = (
    "rdkv:40",
    "rdkv:paper:60",
    "snapkv:60",
    "adakv:60",
    "h2o:60",
    "rdkv:15%:shared",
    "rdkv:0",
)
PROMPT, MORE = 300, 70

TOLERANCE = 0.03
"""Of a logit, as test_product.py has it: queries, keys and weights of a prefill are halves."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("zones") / "tiny"
    write_tiny_model(folder, tokenizer=True, num_layers=3, head_dim=64, max_context=2048)
    return str(folder)


def ids_of(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def loaded(tiny: str, kv: str) -> dict[str, Model]:
    return {device: kvrt.load(tiny, device=device, kv=kv) for device in ("cpu", "cuda")}


@pytest.mark.parametrize("kv", [*FORMATS, "rdkv:40,recompress=110"])
@pytest.mark.parametrize(("here", "there"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_both_decode_the_same_from_the_same_zones(
    tiny: str, tmp_path: Path, kv: str, here: str, there: str
) -> None:
    by_device = loaded(tiny, kv)
    first, ids = by_device[here].new_session(), ids_of(PROMPT)
    first.feed(ids)
    store = first.store
    assert isinstance(store, ZoneStore) and len(store.parts().layers[0].segments) == 1
    first.save(tmp_path / "cache")
    second, _ = by_device[there].new_session().load(tmp_path / "cache")
    for token in ids_of(20, seed=4):
        ids.append(token)
        assert np.abs(first.feed(ids) - second.feed(ids)).max() < TOLERANCE
    # A prompt on zones and exact tokens; what it makes of them differs where scores are close.
    ids += ids_of(MORE, seed=5)
    assert np.abs(first.feed(ids) - second.fork().feed(ids)).max() < TOLERANCE


@pytest.mark.parametrize("kv", FORMATS)
def test_a_step_sees_what_a_prefill_on_zones_sees(tiny: str, kv: str) -> None:
    model = kvrt.load(tiny, device="cuda", kv=kv)
    store, more = model.new_store(), ids_of(MORE, seed=5)
    model.decoder.prefill(ids_of(PROMPT), store)
    other = store.fork()
    expected = model.decoder.prefill(more, store, all_logits=True, history="packed")
    found = np.stack([model.decoder.decode(token, other) for token in more])
    assert np.abs(found - expected).max() < TOLERANCE
    other.truncate(PROMPT)
    again = model.decoder.decode(more[0], other)
    assert np.array_equal(again, found[0])


def test_a_budget_of_the_whole_prompt_compresses_nothing(tiny: str) -> None:
    whole, exact = (kvrt.load(tiny, device="cuda", kv=kv) for kv in ("rdkv:1000", "f16"))
    ids = ids_of(PROMPT)
    stores = whole.new_store(), exact.new_store()
    first = [model.decoder.prefill(ids, store) for model, store in zip((whole, exact), stores)]
    assert np.array_equal(*first)
    for token in ids[:20]:
        mine, theirs = (
            whole.decoder.decode(token, stores[0]),
            exact.decoder.decode(token, stores[1]),
        )
        assert np.abs(mine - theirs).max() < TOLERANCE
