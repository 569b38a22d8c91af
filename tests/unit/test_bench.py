"""The harness of `kvrt bench`: what is timed, what is counted, what is remarked upon."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvrt
from kvrt.backends import get_ops
from kvrt.bench.case import Case, Settings, cases, scan_case
from kvrt.bench.check import agreements
from kvrt.bench.environment import commit
from kvrt.bench.fill import CHUNK, Synthetic
from kvrt.bench.measure import Bench, Job, planned_tokens
from kvrt.bench.result import Measured
from kvrt.errors import CodecError
from kvrt.generate import Model
from kvrt.kvstore import KVSpec, KVStore, PageLayout, estimate
from kvrt.kvstore.stats import read_bytes, sealed_pages
from tests.helpers.fake_clock import time_by_bytes
from tests.helpers.tiny_model import write_tiny_model

F16, KVRT2 = KVSpec.parse("f16"), KVSpec.parse("k=int4:channel:g64,v=int2:token:g64,window=64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, head_dim=64, max_context=8192)
    get_ops("cpu")
    return kvrt.load(str(folder), threads=1)


def found(model: Model, spec: KVSpec, *tests: Case, **settings: Any) -> list[Measured]:
    clock = settings.pop("clock", None)
    bench = Bench(model, Settings(**settings), clock)
    return [measured for _, measured in bench.run([Job(spec, tests)])]


# --- names and order ---


@pytest.mark.parametrize(
    "case, name",
    [
        (Case(512, 0), "pp512"),
        (Case(0, 128), "tg128"),
        (Case(0, 128, 4096), "tg128 @ d4096"),
        (Case(512, 128, 7), "pp512+tg128 @ d7"),
    ],
)
def test_names_are_those_of_llama_bench(case: Case, name: str) -> None:
    assert case.name == name


def test_cases_go_by_depth_and_leave_out_zeros() -> None:
    wanted = ["pp4", "tg2", "pp4+tg2", "pp4 @ d9", "tg2 @ d9", "pp4+tg2 @ d9"]
    assert [case.name for case in cases([4, 0], [2], [(4, 2), (0, 0)], [9, 0])] == wanted
    assert cases([0], [0], [], [0]) == []


# --- what is measured ---


@pytest.mark.parametrize("fill", ["prefill", "synthetic"])
@pytest.mark.parametrize("spec", [F16, KVRT2], ids=str)
def test_bytes_are_those_of_the_format(model: Model, spec: KVSpec, fill: Any) -> None:
    tests = cases([70], [5], [(65, 3)], [0, 130, 300])
    for measured in found(model, spec, *tests, repetitions=2, fill=fill):
        store: KVStore = model.new_store(spec)
        assert measured.stats.tokens == measured.case.context
        assert measured.stats.bytes == measured.expected_bytes
        assert measured.expected_bytes == estimate(store.geometry, spec, measured.case.context)
        assert measured.effective == spec
        assert len(measured.seconds) == 2 and min(measured.seconds) > 0


def test_time_is_that_of_the_decoder_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time_by_bytes(monkeypatch, 1e9)
    stats, truncate = KVStore.stats, KVStore.truncate

    def slow_stats(self: KVStore) -> Any:
        clock.wait(100.0)
        return stats(self)

    def slow_truncate(self: KVStore, tokens: int) -> None:
        clock.wait(100.0)
        truncate(self, tokens)

    monkeypatch.setattr(KVStore, "stats", slow_stats)
    monkeypatch.setattr(KVStore, "truncate", slow_truncate)
    prompt, decoding = found(model, KVRT2, Case(64, 0, 200), Case(0, 10, 200), repetitions=3)
    assert prompt.tokens_per_s == pytest.approx([1000.0] * 3, abs=1e-6)
    # The clock counts the very bytes that are claimed.
    assert decoding.read_bandwidth == pytest.approx(1e9, abs=1.0)
    assert prompt.read_bandwidth is None


def calls(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Of each prefill from now on: the format, tokens cached before, and tokens."""
    seen = []
    prefill = type(model.decoder).prefill

    def noted(self: Any, ids: Any, store: Any, **rest: Any) -> Any:
        seen.append((str(store.spec), len(store), len(ids)))
        return prefill(self, ids, store, **rest)

    monkeypatch.setattr(type(model.decoder), "prefill", noted)
    return seen


def test_every_repetition_begins_where_the_first_did(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = calls(model, monkeypatch)
    found(model, F16, Case(70, 9, 100), repetitions=2)
    alone, timed = [("f16", 0, 100), ("f16", 100, 70)], [("f16", 0, 100)] + [("f16", 100, 70)] * 2
    assert seen == alone + timed
    seen.clear()
    found(model, F16, Case(70, 9, 100), repetitions=1, warmup=False, batch=32)
    once = [(0, 32), (32, 32), (64, 32), (96, 4), (100, 32), (132, 32), (164, 6)]
    assert [call[1:] for call in seen] == once * 2


def test_formats_take_turns(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(model, monkeypatch)
    q8 = KVSpec.parse("q8_0")
    jobs = [Job(spec, (Case(5, 0), Case(6, 0), Case(7, 0, 80))) for spec in (F16, q8)]
    jobs.append(Job(KVRT2, (Case(7, 0, 80),)))  # not at every depth
    done = list(Bench(model, Settings(2)).run(jobs))
    order = [(str(job.spec), measured.case.name) for job, measured in done]
    assert order == [
        ("f16", "pp5"), ("f16", "pp6"), ("q8_0", "pp5"), ("q8_0", "pp6"),
        ("f16", "pp7 @ d80"), ("q8_0", "pp7 @ d80"), (str(KVRT2), "pp7 @ d80"),
    ]  # fmt: skip
    timed = [(name, count) for name, _, count in seen if count]
    short = [("f16", 5), ("f16", 6), ("q8_0", 5), ("q8_0", 6)]
    names = ["f16", "q8_0", str(KVRT2)]
    filling, deep = [(name, 80) for name in names], [(name, 7) for name in names]
    assert timed[-17:] == short * 2 + filling + deep * 2


def test_planned_tokens_are_those_told_of(model: Model) -> None:
    tests = tuple(cases([5], [9], [], [0, 70, 130]))
    jobs = [Job(F16, tests), Job(KVRT2, tests[2:])]
    for settings in (
        Settings(2),
        Settings(1, warmup=False),
        Settings(2, fill="synthetic"),
    ):
        told: list[int] = []
        list(Bench(model, settings, told=told.append).run(jobs))
        assert sum(told) == planned_tokens(jobs, settings)


def test_what_a_token_reads(model: Model) -> None:
    (measured,) = found(model, KVRT2, Case(0, 4, 400), repetitions=1)
    geometry, windows = model.new_store(KVRT2).geometry, model.config.windows
    cache = read_bytes(geometry, KVRT2, range(401, 405), windows)
    assert measured.read_bytes == model.decoder.step_bytes + statistics.fmean(cache)


def test_a_step_reads_all_weights_but_an_embedding_that_is_no_head(tmp_path: Path) -> None:
    norms = 2 * 64 * (2 * 2 + 1)  # five gains, stored as f16
    for tie in (False, True):
        folder = tmp_path / f"tie-{tie}"
        config = write_tiny_model(folder, tokenizer=True, tie=tie)
        loaded = kvrt.load(str(folder), threads=1)
        embedding = 0 if tie else config.vocab_size * config.hidden_size * 2
        assert loaded.decoder.step_bytes == loaded.weight_bytes - embedding - norms


@pytest.mark.parametrize("window", [None, 50, 64, 100, 1000])
@pytest.mark.parametrize("spec", ["f16", "k=q8_0,v=q4_0,sink=4,window=100", "k=f32,v=q8_0,sink=70"])
def test_attention_reads_what_its_window_covers(model: Model, spec: str, window: Any) -> None:
    """Counted token by token: a page counts where any token of it is seen."""
    parsed, geometry = KVSpec.parse(spec), model.new_store(F16).geometry
    layout = PageLayout.of(geometry, parsed)
    lengths = [1, 3, 64, 65, 200, 299, 300]
    for length, read in zip(lengths, read_bytes(geometry, parsed, lengths, [window] * 2)):
        exact = sum(codec.exact_dtype.itemsize for codec in layout.codecs) * 2 * 64
        sealed_end = parsed.sink + 64 * sealed_pages(parsed, length)
        pages, total = set(), 0
        for position in range(0 if window is None else max(length - window, 0), length):
            if parsed.sink <= position < sealed_end:
                pages.add((position - parsed.sink) // 64)
            else:
                total += exact
        assert read == 2 * (total + len(pages) * layout.page_bytes)


# --- filling ---


def test_synthetic_stores_are_sealed_by_the_real_encoder(model: Model) -> None:
    made = Synthetic(model, 0)
    whole = made.filled(KVRT2, CHUNK + 300)
    assert len(whole) == CHUNK + 300 and whole.stats().sealed_tokens > CHUNK
    parts = model.new_store(KVRT2)
    for length in (70, 500, CHUNK, CHUNK + 300):
        made.grow(parts, length, lambda count: None)
    assert len(parts) == CHUNK + 300
    shape = (CHUNK + 300, 2, 64)
    keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
    whole.read(1, keys, values)
    assert 0.9 < keys.std() < 1.1 and 0.8 < values.std() < 1.2 and abs(keys.mean()) < 0.01


@pytest.mark.parametrize("fill", ["synthetic", "prefill"])
def test_the_peak_of_each_format_is_its_own(tmp_path: Path, fill: Any) -> None:
    """Neither a larger cache of before nor the caches that are timed beside it are in it.

    Many layers: freed activations of one layer, which the allocator keeps in fragments from a
    prefill to the next (3 MB here), must be little beside the 22 MB that the small format saves.
    """
    write_tiny_model(
        tmp_path / "deep", tokenizer=True, head_dim=64, num_layers=12, max_context=4096
    )
    model = kvrt.load(str(tmp_path / "deep"), threads=1)
    tests = (Case(0, 1, 2000),)
    jobs = [Job(KVSpec.parse("f32"), tests), Job(KVRT2, tests)]
    large, small = (one for _, one in Bench(model, Settings(1, fill=fill)).run(jobs))
    if not large.peak_is_own:
        pytest.skip("this system does not measure a peak anew")
    saved = large.stats.bytes - small.stats.bytes
    assert large.peak_bytes - small.peak_bytes > saved / 2
    assert small.peak_bytes > model.weight_bytes


# --- honesty ---


def test_a_slow_kernel_is_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    slowness = {str(F16): 1.0, str(KVRT2): 40.0}
    time_by_bytes(monkeypatch, 1e9, slowness.__getitem__)
    rates = {}
    for spec in (F16, KVRT2):
        (measured,) = found(model, spec, Case(0, 8, 4000), repetitions=2, fill="synthetic")
        rates[spec] = measured.read_bandwidth
    assert rates[F16] == pytest.approx(1e9, abs=1.0)
    assert rates[KVRT2] is not None and rates[KVRT2] < 0.1e9


@pytest.mark.parametrize("repetitions", [3, 5])
def test_a_first_repetition_that_was_not_warm_is_seen(
    model: Model, monkeypatch: pytest.MonkeyPatch, repetitions: int
) -> None:
    clock = time_by_bytes(monkeypatch, 1e6)
    decode = type(model.decoder).decode
    calls = []

    def cold(self: Any, token_id: int, store: Any) -> Any:
        calls.append(token_id)
        if len(calls) == 21:  # 20 steps of warm-up came before
            clock.wait(60.0)
        return decode(self, token_id, store)

    monkeypatch.setattr(type(model.decoder), "decode", cold)
    (measured,) = found(model, F16, Case(0, 20, 10), repetitions=repetitions)
    assert any("not warmed up" in remark for remark in measured.remarks)
    assert "no warm-up" not in measured.remarks


def test_an_unwarmed_run_says_so(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    time_by_bytes(monkeypatch, 1e6)
    (measured,) = found(model, F16, Case(0, 2), repetitions=3, warmup=False)
    assert measured.remarks == ["no warm-up"] and not measured.warmed_up
    (measured,) = found(model, F16, Case(0, 2), repetitions=3)
    assert measured.remarks == [] and measured.warmed_up


def test_a_format_that_falls_back_is_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    new_store = model.new_store
    monkeypatch.setattr(model, "new_store", lambda spec=None: new_store(F16))
    (measured,) = found(model, KVRT2, Case(0, 2, 200), repetitions=1)
    assert measured.effective == F16 and measured.stats.bits_per_element == 16.0
    asked, held = measured.remarks
    assert asked == f"asked for {KVRT2}, ran f16"
    assert held.startswith(f"cache holds {measured.stats.bytes:,} bytes, its format ")


@pytest.mark.parametrize("late, remarks", [(0.2, []), (0.5, ["unsteady: deviation 12%"])])
def test_unsteady_repetitions_are_remarked_upon(
    model: Model, monkeypatch: pytest.MonkeyPatch, late: float, remarks: list[str]
) -> None:
    clock = time_by_bytes(monkeypatch, 1e12)
    decode = type(model.decoder).decode
    waits = iter([0.0] * 2 + [1.0, 1.0, 1.0 + late] * 2)  # two steps of warm-up, then 3 x 2

    def uneven(self: Any, token_id: int, store: Any) -> Any:
        clock.wait(next(waits))
        return decode(self, token_id, store)

    monkeypatch.setattr(type(model.decoder), "decode", uneven)
    (measured,) = found(model, F16, Case(0, 2), repetitions=3)
    assert measured.remarks == remarks


# --- the check ---


def test_a_check_tells_a_good_format_from_a_bad_one(model: Model) -> None:
    same, fine, coarse = agreements(
        model,
        [F16, KVSpec.parse("q8_0"), KVSpec.parse("k=int2:token:g64,v=int2:channel:g64")],
    )
    assert same.kld == 0.0 and same.top1 == 100.0 and same.tokens == 64
    assert 0.0 < fine.kld < coarse.kld / 10
    assert fine.top1 >= coarse.top1


def test_a_check_finds_a_broken_decode_kernel(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill does not go through it, so a quality measured there would not notice."""
    attend = type(model.ops).attend

    def broken(self: Any, q: Any, view: Any, *rest: Any) -> None:
        attend(self, q, view, *rest)
        if "q8_0" in running:
            rest[-1][...] = 0.0

    running: list[str] = []
    new_store = model.new_store

    def told(spec: KVSpec | None = None) -> KVStore:
        running[:] = [str(spec)]
        return new_store(spec)

    (whole,) = agreements(model, [KVSpec.parse("q8_0")])
    monkeypatch.setattr(type(model.ops), "attend", broken)
    monkeypatch.setattr(model, "new_store", told)
    (found,) = agreements(model, [KVSpec.parse("q8_0")])
    assert found.kld > 100 * whole.kld and found.top1 < whole.top1


def test_a_check_refuses_numbers_that_are_none(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = type(model.decoder).decode

    def poisoned(self: Any, token_id: int, store: Any) -> Any:
        out = decode(self, token_id, store)
        return out if store.spec == F16 else out * np.nan

    monkeypatch.setattr(type(model.decoder), "decode", poisoned)
    with pytest.raises(CodecError, match="logits that are not finite"):
        agreements(model, [KVRT2])


# --- where it ran ---


def test_a_commit_is_that_of_the_sources_or_none(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    assert commit(tmp_path) is None


# --- where a scan decodes ---


@pytest.mark.parametrize(
    "context, steps, case",
    [
        (512, 16, Case(0, 16, 496, 4)),
        (512, 64, Case(0, 64, 448, 1)),
        (512, 100, Case(0, 100, 412, 1)),
        (512, 7, Case(0, 7, 505, 9)),
        (40, 16, Case(0, 16, 24, 2)),
        (8, 16, Case(0, 8, 0, 1)),
    ],
)
def test_a_scan_decodes_the_end_of_a_context(context: int, steps: int, case: Case) -> None:
    assert scan_case(context, steps) == case
    depths = [case.repeated(left).depth for left in range(2 * case.places)]
    assert min(depths) >= 0 and depths[0] == case.depth
    assert depths[: case.places] == depths[case.places :]


@pytest.mark.parametrize("spec", ["f16", "kvrt2", "k=q8_0,v=q8_0,sink=37,window=3"])
def test_every_format_seals_as_often_in_a_scan(
    model: Model, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    """Once in the 64 tokens of four repetitions, wherever its pages begin."""
    clock = time_by_bytes(monkeypatch, 1e12)
    seal = type(model.ops)._seal  # of one layer

    def slow(self: Any, view: Any, *rest: Any) -> None:
        clock.wait(0.5)  # 2 layers
        seal(self, view, *rest)

    monkeypatch.setattr(type(model.ops), "_seal", slow)
    for context in (512, 1000):
        (measured,) = found(
            model, KVSpec.parse(spec), scan_case(context, 16), repetitions=4, fill="synthetic"
        )
        assert sum(measured.seconds) == pytest.approx(1.0, abs=1e-3)
        assert measured.stats.tokens == context
