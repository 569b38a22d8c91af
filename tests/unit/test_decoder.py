"""The decoder against the float64 reference: every family, RoPE, cache type and split of calls."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrt.backends.cpu import CpuOps
from kvrt.config import ModelConfig
from kvrt.errors import CodecError, ContextFullError, UsageError
from kvrt.generate import Model, load
from kvrt.kvstore import Geometry, KVSpec, KVStore
from kvrt.models import decoder as decoder_module
from kvrt.models.decoder import Decoder
from kvrt.models.families import expected_tensors, ignored_tensor
from kvrt.weights import Weights
from tests.helpers.compare import assert_close, max_error
from tests.helpers.faded_store import FadedStore
from tests.helpers.refs import attention, reference_forward, reference_logits
from tests.helpers.stores import contents, read
from tests.helpers.tiny_model import CASES, write_case, write_tiny_model
from tests.helpers.tolerances import tolerance

LENGTH = 150  # two sealed pages and a part of the third
IDS = np.random.default_rng(1).integers(0, 320, LENGTH).tolist()
CACHES = ["f32", "f16", "bf16"]


class Made(NamedTuple):
    config: ModelConfig
    decoder: Decoder
    reference: np.ndarray  # (LENGTH, vocab_size) f64

    def store(self, spec: str = "f32", max_tokens: int = 4096) -> KVStore:
        return KVStore(geometry_of(self.config), KVSpec.parse(spec), self.decoder.ops, max_tokens)


def geometry_of(config: ModelConfig) -> Geometry:
    return Geometry(config.num_layers, config.num_kv_heads, config.head_dim)


def open_decoder(folder: Path, config: ModelConfig, ops: CpuOps) -> Decoder:
    weights = Weights.open(folder, expected_tensors(config), ignored_tensor)
    return Decoder(config, weights, ops)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, ops: CpuOps) -> Any:
    """The model of a case, by name, with its reference; made once."""

    @cache
    def make(name: str) -> Made:
        folder = tmp_path_factory.mktemp(name)
        config = write_case(folder, name)
        return Made(config, open_decoder(folder, config, ops), reference_logits(folder, IDS))

    return make


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kv", CACHES)
def test_every_case_against_the_reference(made: Any, name: str, kv: str) -> None:
    """A prefill, a second one over a cached history, and decode one by one across pages."""
    model = made(name)
    store = model.store(kv)
    parts = [
        model.decoder.prefill(IDS[:40], store, all_logits=True),
        model.decoder.prefill(IDS[40:105], store, all_logits=True),
        *(model.decoder.decode(token, store)[None] for token in IDS[105:]),
    ]
    logits = np.concatenate(parts)
    assert logits.dtype == np.float32 and len(store) == LENGTH
    assert_close(logits, model.reference, tolerance("logits", kv), name)


@pytest.mark.parametrize("kv", ["k=f16,v=f16,sink=4,window=30", "k=f32,v=bf16,sink=70"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3-window"])
def test_sinks_and_windows_of_the_format(made: Any, name: str, kv: str) -> None:
    model = made(name)
    store = model.store(kv)
    parts = [model.decoder.prefill(IDS[:2], store, all_logits=True)]
    parts += [model.decoder.decode(token, store)[None] for token in IDS[2:120]]
    parts += [model.decoder.prefill(IDS[120:], store, all_logits=True)]
    bound = tolerance("logits", "bf16" if "bf16" in kv else "f16")
    assert_close(np.concatenate(parts), model.reference, bound, name)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama-yarn"])
def test_the_cache_holds_the_keys_and_values_of_the_reference(
    tmp_path: Path, ops: CpuOps, name: str
) -> None:
    """Logits see only differences of positions; the cache shows the positions themselves."""
    config = write_case(tmp_path, name)
    decoder = open_decoder(tmp_path, config, ops)
    store = KVStore(geometry_of(decoder.config), KVSpec.parse("f32"), ops, 100)
    decoder.prefill(IDS[:40], store)
    for token in IDS[40:70]:
        decoder.decode(token, store)
    reference = reference_forward(tmp_path, IDS[:70])
    got = read(store)
    assert_close(got.keys, np.stack(reference.keys), tolerance("linear", "f32"), "keys")
    assert_close(got.values, np.stack(reference.values), tolerance("linear", "f32"), "values")


def test_a_window_of_more_than_a_page_crosses_pages(tmp_path: Path, ops: CpuOps) -> None:
    config = write_tiny_model(tmp_path, "mistral", sliding_window=90, max_context=512)
    ids = np.random.default_rng(2).integers(0, 320, 300).tolist()
    expected = reference_logits(tmp_path, ids)
    decoder = open_decoder(tmp_path, config, ops)
    whole = KVStore(geometry_of(decoder.config), KVSpec.parse("f32"), ops, 512)
    logits = decoder.prefill(ids, whole, all_logits=True)
    assert_close(logits, expected, tolerance("logits", "f32"), "one prefill")
    stepped = KVStore(geometry_of(decoder.config), KVSpec.parse("f32"), ops, 512)
    decoder.prefill(ids[:85], stepped)
    steps = [decoder.decode(token, stepped) for token in ids[85:]]
    assert_close(np.stack(steps), expected[85:], tolerance("logits", "f32"), "decode")


def test_prefill_gives_the_last_row_of_all_logits(made: Any) -> None:
    model = made("llama")
    last = model.decoder.prefill(IDS, model.store())
    everything = model.decoder.prefill(IDS, model.store(), all_logits=True)
    assert last.shape == (320,) and everything.shape == (LENGTH, 320)
    assert_close(last, everything[-1], tolerance("split", "f32"))


@st.composite
def splits(draw: st.DrawFn) -> list[int]:
    """Sizes that add up to LENGTH; 0 stands for one token by `decode`."""
    sizes: list[int] = []
    left = LENGTH
    while left:
        size = draw(st.one_of(st.integers(0, 6), st.sampled_from([17, 63, 64, 65, LENGTH])))
        size = min(size, left)
        sizes.append(size)
        left -= max(size, 1)
    return sizes


def run_split(model: Made, sizes: list[int], store: KVStore) -> np.ndarray:
    rows, start = [], 0
    for size in sizes:
        if size:
            ids = IDS[start : start + size]
            rows.append(model.decoder.prefill(ids, store, all_logits=True))
        else:
            rows.append(model.decoder.decode(IDS[start], store)[None])
        start += max(size, 1)
    return np.concatenate(rows)


@settings(max_examples=25)
@given(sizes=splits(), name=st.sampled_from(["llama", "mistral", "qwen2", "qwen3-window"]))
def test_any_split_gives_the_logits_of_one_prefill(made: Any, sizes: list[int], name: str) -> None:
    model = made(name)
    one, many = model.store(), model.store()
    whole = model.decoder.prefill(IDS, one, all_logits=True)
    assert_close(run_split(model, sizes, many), whole, tolerance("split", "f32"), str(sizes))


@settings(max_examples=15)
@given(sizes=splits())
def test_any_split_gives_the_logits_of_one_prefill_to_the_rounding_of_f16(
    made: Any, sizes: list[int]
) -> None:
    """One prefill sees its own keys exactly, a later call sees them rounded."""
    model = made("llama")
    whole = model.decoder.prefill(IDS, model.store("f16"), all_logits=True)
    parts = run_split(model, sizes, model.store("f16"))
    assert_close(parts, whole, tolerance("logits", "f16"), str(sizes))


def test_chunks_of_a_prefill_change_nothing(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections and MLP run over CHUNK_TOKENS tokens at a time; the last chunk is smaller."""
    model = made("llama-attention-bias")
    monkeypatch.setitem(decoder_module.CHUNK_TOKENS, "cpu", 7)
    store = model.store()
    logits = model.decoder.prefill(IDS, store, all_logits=True)
    assert_close(logits, model.reference, tolerance("logits", "f32"))


def test_a_real_number_of_chunks(tmp_path: Path, ops: CpuOps) -> None:
    size = decoder_module.CHUNK_TOKENS["cpu"]
    config = write_tiny_model(tmp_path, hidden_size=32, num_layers=1, max_context=2048)
    decoder = open_decoder(tmp_path, config, ops)
    ids = np.random.default_rng(3).integers(0, 320, size + 1).tolist()
    store = KVStore(geometry_of(decoder.config), KVSpec.parse("f32"), ops, 2048)
    logits = decoder.prefill(ids, store, all_logits=True)
    assert_close(logits, reference_logits(tmp_path, ids), tolerance("logits", "f32"))


@pytest.mark.parametrize("kv", ["f16", "k=f16,v=f16,sink=4,window=30"])
@pytest.mark.parametrize("start", [0, 50, 100])
@pytest.mark.parametrize("layer", [1, 2])
def test_an_interrupted_prefill_leaves_no_trace(made: Any, kv: str, start: int, layer: int) -> None:
    model = made("llama")
    store, fresh = model.store(kv), model.store(kv)
    for target in (store, fresh):
        if start:
            model.decoder.prefill(IDS[:start], target)
    before = contents(store)

    def interrupt(done: int, total: int) -> None:
        assert total == 2
        if done == layer:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.decoder.prefill(IDS[start:], store, progress=interrupt)
    assert contents(store) == before
    again = [model.decoder.prefill(IDS[start:], target) for target in (store, fresh)]
    assert np.array_equal(*again)
    step = [model.decoder.decode(5, target) for target in (store, fresh)]
    assert np.array_equal(*step) and contents(store) == contents(fresh)


def test_an_interrupted_step_can_be_done_again(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama")
    store, fresh = model.store(), model.store()
    for target in (store, fresh):
        model.decoder.prefill(IDS[:63], target)
    attend, calls = CpuOps.attend, []

    def interrupted(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        attend(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CpuOps, "attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.decoder.decode(IDS[100], store)
    assert len(store) == 63
    for token in IDS[63:70]:
        got, want = model.decoder.decode(token, store), model.decoder.decode(token, fresh)
        assert np.array_equal(got, want)
    assert contents(store) == contents(fresh)


# --- what the tokens of a prefill see ---

SINKS_AND_WINDOWS = ["", ",sink=4", ",window=30", ",sink=5,window=17", ",window=200"]


def stepwise(model: Made, store: KVStore, ids: list[int] = IDS) -> np.ndarray:
    return np.stack([model.decoder.decode(token, store) for token in ids])


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3-window", "llama-gqa7"])
@pytest.mark.parametrize("rest", SINKS_AND_WINDOWS)
def test_a_packed_history_is_what_decode_sees(made: Any, name: str, rest: str) -> None:
    """Also over what is cached already, and where pages are sealed in the middle of a call."""
    model = made(name)
    spec = KVSpec.parse(f"k=f32,v=f32{rest}")
    faded = [FadedStore(geometry_of(model.config), spec, model.decoder.ops, 4096) for _ in range(4)]
    expected = stepwise(model, faded[0])
    for store, sizes in zip(faded[1:], ([LENGTH], [1, 66, 83], [64, 70, 16]), strict=True):
        start, parts = 0, []
        for size in sizes:
            parts.append(
                model.decoder.prefill(
                    IDS[start : start + size], store, all_logits=True, history="packed"
                )
            )
            start += size
        assert_close(np.concatenate(parts), expected, tolerance("split", "f32"), str(sizes))
        step = model.decoder.decode(7, store)
        store.truncate(LENGTH)
        assert_close(step, model.decoder.decode(7, faded[0]), tolerance("split", "f32"), "after")
        faded[0].truncate(LENGTH)


@pytest.mark.parametrize("rest", ["", ",sink=4", ",sink=5,window=17"])
def test_an_exact_history_is_not_what_decode_sees(made: Any, rest: str) -> None:
    """The tests beside this one would pass if nothing were ever packed."""
    model = made("llama")
    spec = KVSpec.parse(f"k=f32,v=f32{rest}")
    store, stepped = (
        FadedStore(geometry_of(model.config), spec, model.decoder.ops, 4096) for _ in range(2)
    )
    exact = model.decoder.prefill(IDS, store, all_logits=True, history="exact")
    assert_close(exact, model.reference, tolerance("logits", "f32"))
    change = np.abs(stepwise(model, stepped) - exact).max(axis=1)  # (LENGTH,)
    first = spec.sink + spec.window + 64  # the first position that reads a page
    assert change[:first].max() < 1e-4 and change[first:].min() > 0.01
    assert change[first:].max() > 0.5


@pytest.mark.parametrize("kv", ["f16", "bf16", "k=f16,v=bf16,sink=4,window=30"])
def test_a_packed_history_rounds_the_exact_tokens_too(made: Any, kv: str) -> None:
    """A 16-bit cache: each token sees even itself as the tail holds it."""
    model = made("llama")
    stepped = stepwise(model, model.store(kv))
    packed = model.decoder.prefill(IDS, model.store(kv), all_logits=True, history="packed")
    exact = model.decoder.prefill(IDS, model.store(kv), all_logits=True)
    rounding = np.abs(stepped - exact).mean()
    assert rounding > 1e-4  # there is something to see
    assert np.abs(stepped - packed).mean() < 0.1 * rounding  # but for numbers at a boundary


LOSSY = [
    "k=int4:channel:g64:had,v=int4:token:g64:had,sink=4,window=30",
    "k=int2:channel:g32,v=int2:token:g32",
    "k=int3:channel:g32:pre,v=int2:token:g32,sink=5,window=17",
    "k=int2:channel:g64:page:had,v=int8:token:g64,window=10",
    "k=int3:token:g32:sym:norm,v=int2:channel:g32:hybrid,sink=3",
    "k=q4_0,v=q4_0,window=9",
    "k=e5m2,v=e4m3,sink=4",
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose heads are wide enough for every group."""
    folder = tmp_path_factory.mktemp("wide")
    write_tiny_model(folder, head_dim=64, tokenizer=True)
    return load(str(folder))


@pytest.mark.parametrize("kv", LOSSY)
@pytest.mark.parametrize("sizes", [[LENGTH], [70, 67, 13]])
def test_a_packed_history_of_real_codes(wide: Model, kv: str, sizes: list[int]) -> None:
    """As close as codes at a boundary allow, far closer than the format is to the exact model."""
    decoder, spec = wide.decoder, KVSpec.parse(kv)
    stepped, store = wide.new_store(spec), wide.new_store(spec)
    expected = np.stack([decoder.decode(token, stepped) for token in IDS])
    exact = decoder.logits(decoder.trace(IDS))
    parts, start = [], 0
    for size in sizes:
        ids = IDS[start : start + size]
        parts.append(decoder.prefill(ids, store, all_logits=True, history="packed"))
        start += size
    loss = np.abs(expected - exact).mean()
    assert loss > 2e-3
    assert np.abs(np.concatenate(parts) - expected).mean() < 0.1 * loss


def test_an_interrupted_packed_prefill_leaves_no_trace(made: Any) -> None:
    model = made("llama")
    store = model.store("k=f16,v=f16,sink=4,window=30")
    model.decoder.prefill(IDS[:50], store)
    before = contents(store)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.decoder.prefill(IDS[50:], store, history="packed", progress=interrupt)
    assert contents(store) == before


def test_hidden_rows_become_logits_piece_by_piece(made: Any) -> None:
    model = made("llama-tied")
    rows = model.decoder.hidden(IDS, model.store(), history="packed")
    assert rows.shape == (LENGTH, model.config.hidden_size)
    pieces = [model.decoder.logits(rows[start : start + 64]) for start in range(0, LENGTH, 64)]
    assert_close(np.concatenate(pieces), model.reference, tolerance("logits", "f32"))


# --- the exact pass without a store ---


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3-window", "llama-yarn"])
def test_a_trace_shows_queries_keys_and_values(tmp_path: Path, ops: CpuOps, name: str) -> None:
    config = write_case(tmp_path, name)
    decoder = open_decoder(tmp_path, config, ops)
    reference = reference_forward(tmp_path, IDS[:70])
    seen = []

    def visit(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        seen.append(layer)
        assert_close(k, reference.keys[layer], tolerance("linear", "f32"), f"keys {layer}")
        assert_close(v, reference.values[layer], tolerance("linear", "f32"), f"values {layer}")
        heads = (x.astype(np.float64) for x in (q, k, v))
        _, probabilities = attention(*heads, config.windows[layer])
        assert max_error(probabilities, reference.attention[layer]) < 1e-4, layer

    counted: list[tuple[int, int]] = []
    rows = decoder.trace(IDS[:70], visit, progress=lambda a, b: counted.append((a, b)))
    assert seen == list(range(config.num_layers))
    assert counted == [(layer + 1, config.num_layers) for layer in seen]
    assert_close(decoder.logits(rows), reference.logits, tolerance("logits", "f32"))
    alone = decoder.trace(IDS[:70])
    assert_close(alone, rows, tolerance("split", "f32"))


def test_a_trace_refuses_wrong_tokens(made: Any) -> None:
    with pytest.raises(UsageError, match="token id 320 is outside"):
        made("llama").decoder.trace([1, 320])
    with pytest.raises(UsageError, match="no tokens"):
        made("llama").decoder.trace([])


def test_progress_counts_layers(made: Any) -> None:
    model = made("qwen3-window")
    seen: list[tuple[int, int]] = []
    model.decoder.prefill(IDS[:5], model.store(), progress=lambda a, b: seen.append((a, b)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_truncating_and_going_on_is_a_fresh_run(made: Any) -> None:
    model = made("llama")
    store, fresh = model.store("f16"), model.store("f16")
    model.decoder.prefill(IDS, store)
    store.truncate(90)
    model.decoder.prefill(IDS[:90], fresh)
    steps = [
        [model.decoder.decode(token, target) for token in IDS[:9]] for target in (store, fresh)
    ]
    # The key and value of a token differ in the last bit between prefills of different length.
    assert_close(steps[0], steps[1], tolerance("logits", "f16"))


def test_several_stores_do_not_mix(made: Any) -> None:
    model = made("llama")
    stores = [model.store(), model.store()]
    order = [IDS[:40], IDS[40:80]]
    alone = [
        [model.decoder.decode(token, target) for token in ids]
        for ids, target in zip(order, (model.store(), model.store()), strict=True)
    ]
    for step in range(40):
        for ids, target, expected in zip(order, stores, alone, strict=True):
            assert np.array_equal(model.decoder.decode(ids[step], target), expected[step])


def test_logits_belong_to_the_caller(made: Any) -> None:
    model = made("llama")
    store = model.store()
    first = model.decoder.decode(1, store)
    kept = first.copy()
    model.decoder.decode(2, store)
    assert np.array_equal(first, kept)


@pytest.mark.parametrize("bad", [-1, 320, 1 << 40])
@pytest.mark.parametrize("position", [0, 3])
def test_ids_outside_the_vocabulary_are_refused(made: Any, bad: int, position: int) -> None:
    """They would read past the end of the embedding."""
    model = made("llama")
    store = model.store()
    ids = [1, 2, 3, 4]
    ids[position] = bad
    with pytest.raises(UsageError, match=f"token id {bad} is outside the vocabulary of 320 tokens"):
        model.decoder.prefill(ids, store)
    with pytest.raises(UsageError, match="outside the vocabulary"):
        model.decoder.decode(bad, store)
    assert len(store) == 0


def test_the_last_id_of_the_vocabulary_works(made: Any) -> None:
    model = made("llama")
    assert np.isfinite(model.decoder.prefill([0, 319], model.store())).all()


def test_no_tokens_are_refused(made: Any) -> None:
    model = made("llama")
    with pytest.raises(UsageError, match="no tokens to decode"):
        model.decoder.prefill([], model.store())


def test_a_full_context_is_refused_before_any_work(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made("llama")
    store = model.store(max_tokens=10)
    model.decoder.prefill(IDS[:9], store)
    before = contents(store)
    with monkeypatch.context() as patch:
        patch.setattr(CpuOps, "embed", lambda *_: pytest.fail("worked"))
        with pytest.raises(ContextFullError, match="the limit is 10"):
            model.decoder.prefill([1, 2], store)
        store.max_tokens = 9
        with pytest.raises(ContextFullError, match="the limit is 9"):
            model.decoder.decode(1, store)
    store.max_tokens = 10
    assert contents(store) == before
    model.decoder.decode(1, store)
    assert len(store) == 10


def test_a_store_of_another_geometry_is_refused(made: Any, ops: CpuOps) -> None:
    store = KVStore(Geometry(2, 2, 8), KVSpec.parse("f16"), ops, 100)
    with pytest.raises(CodecError, match="the store is for Geometry"):
        made("llama").decoder.prefill([1], store)
    with pytest.raises(CodecError, match="the store is for Geometry"):
        made("llama").decoder.decode(1, store)


def test_sinks_and_window_beyond_the_context_are_refused_at_load(tmp_path: Path) -> None:
    config = write_tiny_model(tmp_path, tokenizer=True)
    limit = config.max_context
    with pytest.raises(UsageError, match=f"more than this model's context of {limit:,}"):
        load(str(tmp_path), kv=f"k=f16,v=f16,sink=1,window={limit}")
    assert load(str(tmp_path), kv=f"k=f16,v=f16,window={limit}").max_context == limit


def test_the_likeliest_token_is_that_of_all_logits(made: Any) -> None:
    model = made("llama")
    stores = [model.store("f16") for _ in range(2)]
    for store in stores:
        model.decoder.prefill(IDS[:10], store)
    for token_id in IDS[10:20]:
        logits = model.decoder.decode(int(token_id), stores[0])
        best = model.decoder.decode_best(int(token_id), stores[1])
        assert best == (int(logits.argmax()), float(logits.max()))
    assert len(stores[0]) == len(stores[1]) == 20
