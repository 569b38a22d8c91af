"""`kvrt bench` of formats that compress prompts: fills, repetitions, bytes, lines of a scan."""

from __future__ import annotations

import statistics
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvrt
from kvrt.backends import get_ops
from kvrt.bench import rows
from kvrt.bench.budget import context_bytes, expected_bytes, needed_bytes
from kvrt.bench.case import Case, Settings, cases
from kvrt.bench.fill import CHUNK, QUERIES, Synthetic
from kvrt.bench.fit import longest_context
from kvrt.bench.measure import Bench, Job, planned_tokens
from kvrt.bench.result import Measured
from kvrt.errors import ContextFullError
from kvrt.generate import Model, cache_geometry
from kvrt.kvstore import KVSpec, estimate
from kvrt.room import Need
from kvrt.shapes import SHAPES
from kvrt.trizone import allocator
from kvrt.trizone.compress import compress
from kvrt.trizone.store import ZoneStore
from kvrt.trizone.work import working_bytes
from tests.helpers.fake_clock import time_by_bytes
from tests.helpers.tiny_model import write_tiny_model

RDKV, F16 = KVSpec.parse("rdkv:64"), KVSpec.parse("f16")
BUDGETS = (
    "rdkv:64",
    "rdkv:64,recompress=100",
    "rdkv:64:shared",
    "rdkv:30%",
    "adakv:80",
    "h2o:20%",
    "snapkv:0",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, head_dim=64, max_context=8192)
    get_ops("cpu")
    return kvrt.load(str(folder), threads=1)


def found(model: Model, spec: KVSpec, *tests: Case, **settings: Any) -> list[Measured]:
    bench = Bench(model, Settings(**settings))
    return [measured for _, measured in bench.run([Job(spec, tests)])]


# --- bytes ---


@pytest.mark.parametrize("fill", ["prefill", "synthetic"])
@pytest.mark.parametrize("kv", BUDGETS)
def test_bytes_are_at_most_those_of_the_format(model: Model, kv: str, fill: Any) -> None:
    """Whatever ran on the same depth before: the rows of generated tokens are a case's own."""
    spec, tests = KVSpec.parse(kv), cases([70], [130, 5], [(65, 3)], [0, 200, 500])
    measured = found(model, spec, *tests, repetitions=2, fill=fill)
    assert [one.case for one in measured] == tests
    for one in measured:
        assert one.stats.tokens == one.case.context
        assert one.effective == spec and len(one.seconds) == 2
        geometry = cache_geometry(model.config)
        assert one.expected_bytes == expected_bytes(model.config, geometry, spec, one.case)
        assert 0.9 * one.expected_bytes < one.stats.bytes <= one.expected_bytes
        assert not [remark for remark in one.remarks if "cache holds" in remark]


def test_a_prompt_is_one_compression_and_an_expected_size_is_that_of_a_store(model: Model) -> None:
    geometry = cache_geometry(model.config)

    def expected(spec: KVSpec, case: Case) -> int:
        return expected_bytes(model.config, geometry, spec, case)

    assert expected(RDKV, Case(300, 0)) == estimate(geometry, RDKV, 300)
    assert expected(F16, Case(7, 5, 60)) == estimate(geometry, F16, 72)
    one, two = (expected(RDKV, Case(n, 0, 300)) for n in (0, 100))
    row = 2 * 2 * 64 * 4  # layers, heads, channels, bytes of K and V
    assert two - one == (64 - 36) * row  # 136 tokens, a second budget less what is protected


def test_a_cache_that_holds_more_than_it_may_is_seen(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    (measured,) = found(model, RDKV, Case(0, 2, 200), repetitions=1)
    assert not measured.remarks
    new_store = model.new_store
    wide = KVSpec.parse("rdkv:150")
    monkeypatch.setattr(model, "new_store", lambda spec=None: new_store(wide))
    (measured,) = found(model, RDKV, Case(0, 2, 200), repetitions=1)
    asked, held = measured.remarks
    assert asked == "asked for rdkv:64, ran rdkv:150"
    assert held.endswith(f"bytes, its format at most {measured.expected_bytes:,}")


def test_a_prompt_that_is_kept_whole_is_remarked_upon(model: Model) -> None:
    (measured,) = found(model, RDKV, Case(0, 2, 60), repetitions=1)
    assert measured.remarks == ["nothing packed in so few tokens"]


def test_a_token_reads_what_the_store_holds(model: Model) -> None:
    (measured,) = found(model, RDKV, Case(0, 4, 400), repetitions=1)
    store = Synthetic(model, 0).filled(RDKV, 400)
    assert isinstance(store, ZoneStore)
    layers = store.parts().layers
    blocks = sum(part.data.nbytes for zones in layers for part in zones.segments)
    blocks += sum(zones.directory.nbytes for zones in layers if zones.directory is not None)
    exact = [(36 + step) * 2 * 2 * 64 * 4 for step in range(1, 5)]
    assert store.read_bytes([401, 402], [None, None]) == [blocks + rows for rows in exact[:2]]
    (measured,) = found(model, RDKV, Case(0, 4, 400), repetitions=1, fill="synthetic")
    assert measured.read_bytes == model.decoder.step_bytes + blocks + statistics.fmean(exact)


# --- fills and repetitions ---


def test_a_synthetic_depth_is_one_prompt_at_any_length(model: Model) -> None:
    made, told = Synthetic(model, 0), []
    store = model.new_store(RDKV)
    assert isinstance(store, ZoneStore)
    for length in (300, CHUNK + 700, 200):
        told.clear()
        made.grow(store, length, told.append)
        assert len(store) == sum(told) == length and len(told) == 2
        assert store.cut(length) == length and store.cut(length - 1) == 0
        layers = store.parts().layers
        assert [len(zones.segments) for zones in layers] == [1, 1]
        assert layers[0].segments[0].candidates == length - 36
    made.grow(store, 200, told.append)
    assert len(told) == 2  # it holds them already


def test_synthetic_tokens_repeat_a_chunk_and_their_weights_spread(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def noted(self: ZoneStore, layer: int, k: Any, v: Any, queries: Any) -> None:
        seen.append((k, v, queries(slice(QUERIES - 40, QUERIES + 10))))
        self.extend(layer, k, v)

    monkeypatch.setattr(ZoneStore, "compress", noted)
    Synthetic(model, 3).filled(RDKV, CHUNK + 100)
    k, v, q = seen[0]
    for side in (k, v):
        assert np.array_equal(side[CHUNK:], side[:100]) and 0.9 < side.std() < 1.1
    assert q.shape == (50, model.config.num_heads, 64)
    assert not np.array_equal(q[0], q[1])
    scores = q[-1, 0] @ k[:CHUNK, 0].T / 8  # of the first head of the first group
    decades = np.log10(np.exp(scores))
    assert 4 < np.ptp(decades) < 20
    assert np.corrcoef(scores, q[0, 0] @ k[:CHUNK, 0].T)[0, 1] > 0.95


@pytest.mark.parametrize("fill", ["prefill", "synthetic"])
def test_every_repetition_begins_behind_the_same_compressed_depth(
    model: Model, monkeypatch: pytest.MonkeyPatch, fill: Any
) -> None:
    seen, prefill, decode = [], type(model.decoder).prefill, type(model.decoder).decode

    def noted(self: Any, ids: Any, store: Any, **rest: Any) -> Any:
        if len(ids) == 70:
            seen.append((len(store), len(store.parts().layers[0].segments)))
        return prefill(self, ids, store, **rest)

    def noted_step(self: Any, token_id: int, store: Any) -> Any:
        seen.append((len(store), len(store.parts().layers[0].segments)))
        return decode(self, token_id, store)

    monkeypatch.setattr(type(model.decoder), "prefill", noted)
    monkeypatch.setattr(type(model.decoder), "decode", noted_step)
    found(model, RDKV, Case(70, 0, 300), Case(0, 2, 300, 9), repetitions=2, fill=fill)
    alone, steps = [(300, 1)], [(300, 1), (301, 1)]
    assert seen == alone + steps + (alone + steps) * 2


def test_planned_tokens_are_those_told_of(model: Model) -> None:
    jobs = [Job(spec, tuple(cases([5], [9], [], [0, 70, 130]))) for spec in (F16, RDKV)]
    for settings in (Settings(2), Settings(1, warmup=False), Settings(2, fill="synthetic")):
        told: list[int] = []
        list(Bench(model, settings, told=told.append).run(jobs))
        assert sum(told) == planned_tokens(jobs, settings)


def test_a_prompt_beyond_the_context_is_refused(model: Model) -> None:
    with pytest.raises(ContextFullError):
        Synthetic(model, 0).filled(RDKV, 8193)


# --- what it takes ---


@pytest.mark.parametrize(
    "kv", ["rdkv:64", "rdkv:50%", "rdkv:50%:shared", "snapkv:50%", "adakv:64", "h2o:64"]
)
@pytest.mark.parametrize(("heads", "at_once"), [(2, 1 << 23), (6, 6000 * 4)])
def test_working_bytes_bound_what_compressing_takes(
    kv: str, heads: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what arrays really take, where all heads are allocated at once, and where one by one."""
    monkeypatch.setattr(allocator, "STEPS_AT_ONCE", at_once)
    spec, ops, tokens, dim = KVSpec.parse(kv), get_ops("cpu", 1), 6000, 32
    assert spec.compression is not None
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((tokens, heads, dim), dtype=np.float32) for _ in range(2))
    q = 3 * rng.standard_normal((tokens, heads, dim), dtype=np.float32)
    budget = spec.compression.budget_bytes(tokens, dim)
    call = ops, spec.compression, budget, k, v, slice(4, tokens - 32), q.__getitem__, tokens
    compress(*call)  # scratch that stays
    tracemalloc.start()
    segment = compress(*call)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    bound = working_bytes(spec, tokens, heads, dim)
    assert peak <= bound + segment.data.nbytes + 50_000
    assert peak > 0.5 * bound


def test_what_a_prompt_takes_is_in_what_is_needed(model: Model) -> None:
    config, geometry = model.config, cache_geometry(model.config)
    row = 2 * 2 * 64 * 4  # f32 K and V of a layer
    grown = working_bytes(RDKV, 8000, 2, 64) - working_bytes(RDKV, 6000, 2, 64)
    less, more = (
        needed_bytes(config, geometry, RDKV, Case(0, 1, depth), "synthetic")
        for depth in (6000, 8000)
    )
    assert more - less == 2000 * row + grown
    less, more = (Need.of(config, geometry, RDKV, 0, tokens).bytes for tokens in (6000, 8000))
    assert more - less == 2000 * 2 * 2 * 64 * (4 + 2) + grown
    behind, alone = (
        needed_bytes(config, geometry, RDKV, Case(100, 0, depth), "prefill") for depth in (900, 0)
    )
    assert behind > alone


def test_tokens_that_fit_are_bounded_though_the_cache_does_not_grow() -> None:
    shape, spec = SHAPES["llama-3.1-8b"], KVSpec.parse("rdkv:1024")
    fits = longest_context(lambda n: context_bytes(shape, spec, n), 24 << 30)
    assert 1 << 20 < fits < 1 << 23
    prompt = 4 * 2 * 8 * 128 * fits + working_bytes(spec, fits, 8, 128)
    assert context_bytes(shape, spec, fits) == estimate(shape.geometry, spec, fits) + prompt
    assert context_bytes(shape, F16, 1000, 3) == 3 * estimate(shape.geometry, F16, 1000)


# --- scans and rows ---


def scanned(spec: KVSpec, contexts: list[int], times: list[float]) -> list[dict[str, Any]]:
    bits = [16.0 if spec.compression is None or c <= 1024 else 0.5 for c in contexts]
    return [
        {"context": c, "decode_us": t, "bits_per_element": b}
        for c, t, b in zip(contexts, times, bits)
    ]


def test_the_line_of_a_scan_goes_through_what_was_compressed() -> None:
    spec, contexts = KVSpec.parse("rdkv:1024"), [256, 512, 1024, 2048, 4096, 8192]
    own = scanned(spec, contexts, [125.0, 150.0, 200.0, 210.0, 210.0, 210.0])
    base = rows.trend_line(scanned(F16, contexts, [100 + c / 10 for c in contexts]), F16)
    line = rows.trend_line(own, spec)
    assert line is not None and (line.slope, line.intercept) == (0.0, 210.0)
    fields = rows.trend_fields(line, base, None, rows.trend_start(own, spec))
    assert fields["break_even_tokens"] == 2048  # the lines cross at 1,100, where it is as of f16
    assert fields["slope_us_per_1k"] == 0.0 and fields["slopes_differ"] is True
    slow = rows.trend_line(scanned(spec, contexts, [400.0] * 6), spec)
    assert rows.trend_fields(slow, base, None, 2048)["break_even_tokens"] == 3000


@pytest.mark.parametrize("contexts", [[256, 512], [512, 2048]])
def test_too_few_compressed_contexts_have_no_line(contexts: list[int]) -> None:
    spec = KVSpec.parse("rdkv:1024")
    own = scanned(spec, contexts, [1.0, 2.0])
    assert rows.trend_line(own, spec) is None
    fields = rows.trend_fields(None, None, None, rows.trend_start(own, spec))
    assert fields["break_even_tokens"] is None and fields["slope_us_per_1k"] is None


def test_a_dry_run_prices_one_prompt() -> None:
    shape, spec = SHAPES["llama-3.1-8b"], KVSpec.parse("rdkv:1024")
    row = rows.memory_row("r", shape, spec, 1 << 17, 2)
    assert row["token_bytes"] == 2 * 1024 * 4 * 128 * 8 * 32
    assert row["cache_bytes"] == 2 * estimate(shape.geometry, spec, 1 << 17)
    assert row["bytes_per_token"] == 0.0 and 0.1 < row["bits_per_element"] < 0.13


def test_formats_with_and_without_budgets_are_timed_side_by_side(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = time_by_bytes(monkeypatch, 1e9)
    jobs = [Job(spec, (Case(0, 3, 500), Case(0, 3, 2000))) for spec in (F16, RDKV)]
    bench = Bench(model, Settings(2, fill="synthetic"), clock)
    measured = [(job.spec, one) for job, one in bench.run(jobs)]
    times = {(spec, one.case.depth): statistics.fmean(one.seconds) for spec, one in measured}
    assert times[F16, 2000] > 1.5 * times[F16, 500]
    assert times[RDKV, 2000] == pytest.approx(times[RDKV, 500], rel=0.02)
    assert all(one.read_bandwidth == pytest.approx(1e9, abs=1.0) for _, one in measured)
