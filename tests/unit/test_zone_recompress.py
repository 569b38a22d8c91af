"""recompress in a store of zones: what a growing sequence packs, files of it, and Ctrl-C."""

from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest

from kvrt.backends import get_ops
from kvrt.errors import CodecError, UnsupportedError
from kvrt.generate import Model, load
from kvrt.kvstore import KVSpec, load_store, save_store
from kvrt.trizone import memory, moving, packing, state, store
from kvrt.trizone.compress import Queries
from kvrt.trizone.store import ZoneStore
from tests.helpers.interrupts import interrupt_at
from tests.helpers.stores import on_device
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.zone_stores import (
    HEADS,
    Prompt,
    contents,
    held_by,
    new_store,
    prefill,
    random_prompt,
    read_heads,
)

IDS = np.random.default_rng(3).integers(0, 320, 400).tolist()
SPEC = "rdkv:64,recompress=110"
IN_THE_STORE = {module.__file__ for module in (memory, moving, packing, state, store)}


def in_the_store(code: CodeType) -> bool:
    return code.co_filename in IN_THE_STORE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, tokenizer=True, max_context=512)
    return load(str(folder))


def begun(model: Model, spec: str = SPEC, steps: int = 0) -> Any:
    kept = model.new_store(KVSpec.parse(spec))
    model.decoder.prefill(IDS[:100], kept)
    for token in IDS[100 : 100 + steps]:
        model.decoder.decode(token, kept)
    return kept


@pytest.mark.parametrize("spec", [SPEC, "h2o:40%,recompress=100", "adakv:50,recompress=101"])
def test_the_oldest_exact_tokens_are_packed_in_time(model: Model, spec: str) -> None:
    kept, packed = begun(model, spec), 1
    most = kept.compression.recompress
    for token in IDS[100:300]:
        rows = kept.parts().rows
        model.decoder.decode(token, kept)
        if rows == most:
            packed += 1
        state = kept.parts()
        assert state.rows == (most + 1 - 64 if rows == most else rows + 1)
        sizes = [len(zones.segments) for zones in state.layers]
        assert sizes == [packed] * 2
        for zones in state.layers:
            assert sum(part.candidates for part in zones.segments) == state.length - state.rows
    assert packed > 2 and len(kept) == 300
    for layer in range(2):
        for got, want in zip(read_heads(kept, layer), held_by(kept, layer), strict=True):
            assert np.allclose(got.keys, want.keys, atol=1e-5)
            assert np.allclose(got.values, want.values, atol=1e-5)


@pytest.mark.parametrize("steps", [0, 74, 75, 90, 150])
def test_it_comes_back_from_a_file_and_from_a_fork(
    model: Model, tmp_path: Path, steps: int
) -> None:
    kept = begun(model, steps=steps)
    save_store(kept, tmp_path / "x.kv")
    others = [kept, load_store(tmp_path / "x.kv", kept).store, kept.fork()]
    logits = [[model.decoder.decode(token, one) for token in IDS[300:380]] for one in others]
    assert np.array_equal(logits[1], logits[0]) and np.array_equal(logits[2], logits[0])
    assert len({repr(contents(other)) for other in others}) == 1


def test_packed_tokens_cannot_be_cut(model: Model) -> None:
    kept = begun(model, steps=80)
    frozen = kept.parts().frozen
    assert 100 < frozen < 180 and kept.cut(frozen - 1) == 0 and kept.cut(frozen) == frozen
    with pytest.raises(UnsupportedError, match=f"the first {frozen} were compressed together"):
        kept.truncate(frozen - 1)
    kept.truncate(frozen)
    assert kept.parts().rows == kept.spec.sink
    for token in IDS[:200]:
        model.decoder.decode(token, kept)
    assert kept.parts().rows <= 110


def test_a_step_that_packs_is_interrupted(model: Model) -> None:
    start = begun(model, steps=74)
    assert start.parts().rows == 110
    known: dict[int, list[Any]] = {}
    last = start.fork()
    model.decoder.decode(5, last)
    for done in (start, last):
        known.setdefault(len(done), []).append(contents(done))
    for line in range(1, 3000, 2):
        kept = start.fork()
        if not interrupt_at(line, lambda kept=kept: model.decoder.decode(5, kept), in_the_store):  # type: ignore[misc]
            break
        if contents(kept) not in known[len(kept)]:
            # It counts, and what is too many is packed with the next token.
            assert len(kept) == 175 and kept.parts().rows == 111
        for layer in range(2):
            for got, want in zip(read_heads(kept, layer), held_by(kept, layer), strict=True):
                assert np.allclose(got.keys, want.keys, atol=1e-5)
        for token in IDS[len(kept) : 180]:
            model.decoder.decode(token, kept)
        assert len(kept) == 180 and kept.parts().rows < 110
    assert 20 < line < 2998


def test_appended_tokens_are_weighed_by_their_own_queries() -> None:
    """As they are where each is a prompt of its own; without queries they are refused."""
    extended, appended = (new_store(get_ops("cpu", 1), SPEC, query_heads=HEADS) for _ in range(2))
    tokens = random_prompt(90, seed=1)
    for kept in (extended, appended):
        prefill(kept, random_prompt(150))
    for i in range(90):
        with extended.extending(1):
            for layer in range(2):
                extended.extend(layer, *row(extended, tokens, layer, i))
        for layer in range(2):
            appended.append(layer, *row(appended, tokens, layer, i))
        appended.advance()
    assert len(appended.parts().layers[0].segments) == 2
    assert contents(appended) == contents(extended)
    with pytest.raises(CodecError, match="weighs tokens by queries"):
        appended.append(0, *row(appended, tokens, 0, 0)[:2])


def row(store: ZoneStore, tokens: Prompt, layer: int, i: int) -> tuple[Any, Any, Queries]:
    """What a layer is given of token i."""
    k, v, q = (on_device(store, side[layer, i : i + 1]) for side in tokens)
    return k, v, lambda rows: q[rows]
