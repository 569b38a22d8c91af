"""The decoder over a store of zones: against f16, the float64 reference, and step by step."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.errors import ContextFullError
from kvrt.generate import Model, load
from kvrt.kvstore import KVSpec
from kvrt.models.decoder import Decoder
from kvrt.trizone.store import ZoneStore
from tests.helpers import refs
from tests.helpers.compare import assert_close
from tests.helpers.tiny_model import write_case, write_tiny_model, write_tokenizer
from tests.helpers.tolerances import tolerance
from tests.helpers.zone_oracle import compressed, runs
from tests.helpers.zone_stores import contents, held_by, kept_values

IDS = np.random.default_rng(1).integers(0, 320, 230).tolist()
NAMES = ("llama", "qwen2", "qwen3", "llama-gqa7", "llama-head-dim-80", "llama-head-dim-96")
SPECS = ("rdkv:60", "rdkv:paper:60", "adakv:60", "h2o:40%", "rdkv:0", "rdkv:64:shared")
SPLIT = tolerance("split", "f32")


class Made(NamedTuple):
    folder: Path
    model: Model

    def store(self, spec: str) -> Any:
        return self.model.new_store(KVSpec.parse(spec))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model of a case, by name; made once."""
    known: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            write_case(folder, name)
            write_tokenizer(folder)
            known[name] = Made(folder, load(str(folder)))
        return known[name]

    return make


def greedy(model: Model, store: Any, logits: np.ndarray, count: int) -> tuple[list[int], Any]:
    tokens, rows = [], []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = model.decoder.decode(tokens[-1], store)
        rows.append(logits)
    return tokens, np.stack(rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", ["rdkv:200", "snapkv:100%", "rdkv:4096:shared"])
def test_with_a_budget_for_all_tokens_it_is_f16(made: Any, name: str, spec: str) -> None:
    """To the bit where prompts are read; steps differ by the order of float32 sums."""
    model = made(name).model
    zones, plain = made(name).store(spec), made(name).store("f16")
    assert isinstance(zones, ZoneStore)
    for ids in (IDS[:100], IDS[100:130]):
        got, want = (model.decoder.prefill(ids, store, all_logits=True) for store in (zones, plain))
        assert np.array_equal(got, want)
        (tokens, rows), (others, expected) = (
            greedy(model, store, want[-1], 25) for store in (zones, plain)
        )
        assert tokens == others
        assert_close(rows, expected, SPLIT, name)
    assert zones.parts().frozen == 0


def assert_as_decoded(
    decoder: Decoder, expected: np.ndarray, packed: Any, exact: Any, parts: list[list[int]]
) -> None:
    """A packed history gives what steps gave, but for numbers at a boundary of f16."""
    got = [decoder.prefill(ids, packed, all_logits=True, history="packed") for ids in parts]
    whole = decoder.prefill([i for ids in parts for i in ids], exact, all_logits=True)
    rounding = np.abs(whole - expected).mean()
    assert rounding > 5e-5  # there is something to see
    assert np.abs(np.concatenate(got) - expected).mean() < 0.1 * rounding


@pytest.mark.parametrize("name", ["llama", "llama-gqa7"])
def test_with_a_packed_history_too(made: Any, name: str) -> None:
    decoder, store = made(name).model.decoder, made(name).store
    stepped, packed, exact = (store(spec) for spec in ("f16", "rdkv:4096", "f16"))
    expected = np.stack([decoder.decode(token, stepped) for token in IDS[:150]])
    assert_as_decoded(decoder, expected, packed, exact, [IDS[:100], IDS[100:150]])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_packed_history_is_what_steps_see(made: Any, name: str, spec: str) -> None:
    """Over a compressed prompt, too, whose heads hold different numbers of tokens."""
    decoder, stepped = made(name).model.decoder, made(name).store(spec)
    decoder.prefill(IDS[:150], stepped)
    packed, exact = stepped.fork(), stepped.fork()
    expected = np.stack([decoder.decode(token, stepped) for token in IDS[150:]])
    parts = [IDS[150:151], IDS[151:200], IDS[200:]]
    assert_as_decoded(decoder, expected, packed, exact, parts)
    assert packed.parts().frozen == 150 and packed.parts().rows == stepped.parts().rows


def reference_over(
    store: ZoneStore, folder: Path, ids: list[int], patch: pytest.MonkeyPatch
) -> refs.Reference:
    """The reference's pass over ids that follow what a store holds."""
    past, layers = len(store), iter(range(store.geometry.num_layers))
    plain, tables = refs.attention, refs.rope_tables

    def attention(
        q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        held, group = held_by(store, next(layers)), q.shape[1] // k.shape[1]
        outs = []
        for head, (keys, values) in enumerate(held):
            sides = (
                np.concatenate([old[:, None], new[:, head : head + 1]])
                for old, new in ((keys, k), (values, v))
            )
            outs.append(plain(q[:, head * group : (head + 1) * group], *sides)[0])
        return np.concatenate(outs, axis=1), np.zeros(0)

    def rope_tables(config: Any, dim: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        cos, sin = tables(config, dim, past + n)
        return cos[past:], sin[past:]

    with patch.context() as here:
        here.setattr(refs, "attention", attention)
        here.setattr(refs, "rope_tables", rope_tables)
        return refs.reference_forward(folder, ids)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_later_prompt_sees_what_is_held_and_itself_exactly(
    made: Any, name: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of queries do not change it; afterwards it is compressed by itself."""
    case, store = made(name), made(name).store(spec)
    case.model.decoder.prefill(IDS[:150], store)
    for token in IDS[150:160]:
        case.model.decoder.decode(token, store)
    for ids in (IDS[160:210], IDS[210:]):
        expected = reference_over(store, case.folder, ids, monkeypatch)
        monkeypatch.setattr(case.model.decoder, "chunk_tokens", 16)
        got = case.model.decoder.prefill(ids, store, all_logits=True)
        assert_close(got, expected.logits, tolerance("logits", "f32"), name)
    assert len(store) == 230 and store.parts().rows in (36, 46 + 50, 66, 56)


@pytest.mark.parametrize("spec", SPECS)
def test_a_prompt_is_packed_by_its_own_keys_values_and_queries(
    made: Any, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the trace of an exact pass has them, in chunks of any size."""
    decoder = made("llama").model.decoder
    for chunk in (150, 37):
        monkeypatch.setattr(decoder, "chunk_tokens", chunk)
        rows: list[Any] = []
        decoder.trace(IDS[:150], lambda i, *qkv, rows=rows: rows.append([x.copy() for x in qkv]))
        store = made("llama").store(spec)
        decoder.prefill(IDS[:150], store)
        for zones, (q, k, v) in zip(store.parts().layers, rows, strict=True):
            (segment,) = zones.segments
            v = kept_values(store, v)
            expected = runs(compressed(store.spec, k, v, q), k, v)
            starts = segment.units[:, 0].tolist()
            assert len(starts) == len(expected)
            for at, (_, run) in zip(starts, expected, strict=True):
                assert segment.data[at : at + len(run)].tobytes() == run


@pytest.mark.parametrize("history", ["exact", "packed"])
@pytest.mark.parametrize("layer", [1, 2])
def test_an_interrupted_prefill_leaves_no_trace(made: Any, history: Any, layer: int) -> None:
    model, store = made("llama").model, made("llama").store("rdkv:50")
    model.decoder.prefill(IDS[:100], store)
    fresh, before = store.fork(), contents(store)

    def interrupt(done: int, total: int) -> None:
        if done == layer:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.decoder.prefill(IDS[100:], store, history=history, progress=interrupt)
    assert contents(store) == before
    steps = [[model.decoder.decode(token, one) for token in IDS[:30]] for one in (store, fresh)]
    assert np.array_equal(*steps) and contents(store) == contents(fresh)


def test_debug_steps_are_the_same(made: Any) -> None:
    model, store = made("llama").model, made("llama").store("rdkv:50")
    model.decoder.prefill(IDS[:100], store)
    checked = ZoneStore(
        store.geometry, store.spec, store.ops, 4096, rotary=store.rotary, debug=True
    )
    model.decoder.prefill(IDS[:100], checked)
    for token in IDS[100:140]:
        assert np.array_equal(*(model.decoder.decode(token, one) for one in (store, checked)))


def test_a_step_that_does_not_fit_is_refused(made: Any, ops: CpuOps) -> None:
    model, store = made("llama").model, made("llama").store("rdkv:50")
    small = ZoneStore(store.geometry, store.spec, store.ops, 100)
    model.decoder.prefill(IDS[:100], small)
    with pytest.raises(ContextFullError, match="100 tokens cached and 1 more asked for"):
        model.decoder.decode(5, small)


def test_sliding_windows_are_refused_when_a_store_is_made(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "mistral", sliding_window=90, tokenizer=True)
    with pytest.raises(Exception, match="this model has layers with a sliding window"):
        load(str(tmp_path)).new_store(KVSpec.parse("rdkv:64"))
