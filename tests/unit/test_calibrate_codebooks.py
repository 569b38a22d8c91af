"""`kvrt calibrate --codec`: which vectors are coded, in which units, how they count."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvrt
from kvrt.calibrate import calibrate
from kvrt.calibrate_codebooks import BookOptions, BookReport, balanced_order
from kvrt.calibrate_sample import collect, hadamard
from kvrt.calibration import Calibration
from kvrt.calibration_parts import expected_tensors, is_order
from kvrt.generate import Model
from kvrt.kvstore import Geometry, KVSpec
from kvrt.kvstore.codecs import Vq
from tests.helpers import codebook_trainer
from tests.helpers.codebook_trainer import Call
from tests.helpers.refs import hadamard_matrix
from tests.helpers.tiny_model import write_tiny_model

CONTEXT, TOKENS = 160, 320
TEXT = "Call me Ishmael. Some years ago, never mind how long precisely. " * 8
KEPT = CONTEXT - 1
PLAIN = "k=rvq2x256,v=rvq1x256"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, rope_theta=500.0)  # 2 layers, 2 KV heads of 16
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return kvrt.load(str(folder), threads=1)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    return codebook_trainer.install(monkeypatch)


def fit(model: Model, spec: str, **options: Any) -> tuple[Calibration, list[BookReport]]:
    reports: list[BookReport] = []
    made = calibrate(
        model, [model.tokenizer.encode(TEXT)], ["ab" * 32], tokens=TOKENS, context=CONTEXT,
        books=BookOptions(KVSpec.parse(spec), **options), report=reports.append,
    )  # fmt: skip
    return made, reports


def traced(model: Model) -> list[np.ndarray]:
    """q, k, v of every token but a window's first: (layers, n, heads, dim) f32."""
    ids = model.tokenizer.encode(TEXT)
    windows = len(ids) // CONTEXT
    chosen = (np.arange(2) * 2 + 1) * windows // 4
    seen: list[list[list[np.ndarray]]] = [[[], []] for _ in range(3)]
    for window in chosen:

        def show(layer: int, *parts: np.ndarray) -> None:
            for kind, part in enumerate(parts):
                seen[kind][layer].append(np.array(part))

        model.decoder.trace(ids[window * CONTEXT : (window + 1) * CONTEXT], show)
    return [np.stack([np.concatenate(layer) for layer in kind]) for kind in seen]


def test_the_tensors_are_those_that_the_format_needs(model: Model) -> None:
    made, reports = fit(model, f"{PLAIN},layers[1]=k=rvq3x256:pre,v=rvq2x256:had")
    parts = {"k.rvq256.post": 2, "v.rvq256": 1, "k.rvq256.pre": 3, "v.rvq256.had": 2}
    assert made.parts == parts
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in made.tensors.items()}
    assert found == expected_tensors(Geometry(2, 2, 16), parts)
    assert {report.name: len(report.errors) for report in reports} == parts
    for report in reports:
        assert all(0 < error < 1 for error in report.errors)
        assert list(report.errors) == sorted(report.errors, reverse=True)
        assert all(0 < used <= 1 for used in report.used)


def test_the_most_stages_are_fitted_once(model: Model, calls: list[Call]) -> None:
    fit(model, "k=rvq2x256,v=f16,layers[1]=k=rvq5x256,v=f16")
    assert [(call.stages, call.entries, call.seed) for call in calls] == [(5, 256, 0)] * 2


def test_nuq_is_fitted_along_where_the_format_has_it(model: Model) -> None:
    made, _ = fit(model, "k=nuq2:pre,v=rvq1x256")
    assert made.parts == {"nuq": 0, "v.rvq256": 1}


def squares_of(queries: np.ndarray) -> np.ndarray:
    """E[q_c^2] summed over the queries of a KV head: q (n, heads, dim) -> (2, dim) f64."""
    squares = np.square(queries.astype(np.float64)).mean(0)
    return squares.reshape(2, -1, queries.shape[-1]).sum(1)


@pytest.mark.parametrize("form", ["post", "page", "pre", "post:had"])
def test_keys_are_scaled_by_what_queries_ask_for(
    model: Model, calls: list[Call], form: str
) -> None:
    made, _ = fit(model, f"k=rvq1x256:{form},v=f16")
    name = f"k.rvq256.{form.replace(':', '.')}"
    queries, keys, _ = traced(model)
    # Every query counts, a window's first too.
    matrix = hadamard_matrix(16)
    for layer in range(2):
        q, k = queries[layer], keys[layer]
        q = q @ matrix if "had" in form else q
        squares = squares_of(q)
        if form in ("page", "pre"):
            squares = (squares + np.roll(squares, 8, -1)) / 2
        scale = np.sqrt(squares / squares.mean())
        got = made.tensors[f"{name}.scale"][layer]
        np.testing.assert_allclose(got, scale, rtol=2e-3)
        assert np.square(got).mean() == pytest.approx(1, rel=1e-4)
        assert not made.tensors[f"{name}.centre"][layer].any()
        kept = k.reshape(2, CONTEXT, 2, 16)[:, 1:]
        at = np.arange(1, CONTEXT)
        if form in ("page", "pre"):
            at = at if form == "pre" else at // 64 * 64
            angles = at[:, None, None] * 500.0 ** (-np.arange(8) / 8)
            pairs = (kept[..., :8] + 1j * kept[..., 8:]) * np.exp(-1j * angles)
            kept = np.concatenate([pairs.real, pairs.imag], -1)
        kept = kept @ matrix if "had" in form else kept
        want = (kept * got).reshape(-1, 16)
        np.testing.assert_allclose(calls[layer].samples, want, atol=0.01)  # f16 of numbers up to 8


def test_a_page_form_with_had_looks_at_queries_turned_back(model: Model) -> None:
    """Not those of `post`, but as many: the mean of squares is what a rotation leaves alone."""
    page, _ = fit(model, "k=rvq1x256:page:had,v=f16")
    post, _ = fit(model, "k=rvq1x256:post:had,v=f16")
    a, b = page.tensors["k.rvq256.page.had.scale"], post.tensors["k.rvq256.post.had.scale"]
    assert np.square(a).mean() == pytest.approx(1, rel=1e-4)
    assert 1e-3 < np.abs(a - b).max() < 2


def test_values_are_as_they_are_or_transformed(model: Model, calls: list[Call]) -> None:
    values = traced(model)[2].reshape(2, 2, CONTEXT, 2, 16)[:, :, 1:].reshape(2, -1, 16)
    fit(model, "k=f16,v=rvq1x256")
    fit(model, "k=f16,v=rvq1x256:had")
    for layer in range(2):
        np.testing.assert_allclose(calls[layer].samples, values[layer], atol=2**-8)
        want = values[layer] @ hadamard_matrix(16)
        np.testing.assert_allclose(calls[2 + layer].samples, want, atol=2**-8)


def test_a_centre_is_the_mean_of_a_channel(model: Model, calls: list[Call]) -> None:
    made, _ = fit(model, "k=rvq1x256,v=f16", centred=True)
    keys = traced(model)[1].reshape(2, 2, CONTEXT, 2, 16)[:, :, 1:].reshape(2, -1, 2, 16)
    np.testing.assert_allclose(made.tensors["k.rvq256.post.centre"], keys.mean(1), atol=2e-3)
    for call in calls:
        assert np.abs(call.samples.reshape(-1, 2, 16).mean(0)).max() < 1e-4


def test_vectors_count_by_attention_half_and_half(model: Model, calls: list[Call]) -> None:
    fit(model, PLAIN)
    for call in calls:
        assert call.weights is not None
        assert call.weights.mean() == pytest.approx(1, rel=1e-4)
        assert call.weights.min() >= 0.5 and call.weights.max() > 1.2
    weights = [call.weights for call in calls[:2]]
    assert not np.array_equal(*weights)  # of a key by a, of a value by its square
    fit(model, PLAIN, weighted=False)
    assert all(call.weights is None for call in calls[4:])


@pytest.mark.parametrize("dim", [16, 48, 80, 128])
def test_hadamard_is_that_of_the_cache(dim: int) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 3, dim)).astype(np.float32)
    block = dim & -dim
    want = (rows.reshape(-1, block) @ hadamard_matrix(block)).reshape(rows.shape)
    np.testing.assert_allclose(hadamard(rows), want, atol=1e-5)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Of heads of 64 channels."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    write_tiny_model(folder, tokenizer=True, head_dim=64)
    return kvrt.load(str(folder), threads=1)


def test_groups_are_coded_by_themselves(wide: Model, calls: list[Call]) -> None:
    made, reports = fit(wide, "k=pq8x256:r2,v=pq8x256:r1")
    assert made.parts == {"k.pq8x256.post": 2, "v.pq8x256": 1}
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in made.tensors.items()}
    assert found == expected_tensors(Geometry(2, 2, 64), made.parts)
    order = made.tensors["k.pq8x256.post.order"][0]
    assert is_order(order)
    assert made.tensors["k.pq8x256.post.entries"].shape == (2, 2, 8, 256, 8)
    assert len(calls) == 2 * 8 * 2 and len(reports) == 2
    _, keys, values = traced(wide)
    kept = keys.reshape(2, 2, CONTEXT, 2, 64)[0, :, 1:] * made.tensors["k.pq8x256.post.scale"][0]
    for head in range(2):
        strengths = kept[:, :, head].reshape(-1, 64).var(0)
        np.testing.assert_array_equal(order[head], balanced_order(strengths))
    for group in (0, 3, 7):
        where = order[:, 8 * group : 8 * group + 8]  # each head's own channels
        want = np.stack([kept[:, :, head, where[head]] for head in range(2)], 2).reshape(-1, 8)
        np.testing.assert_allclose(calls[group].samples, want, atol=0.02)
        book = made.tensors["k.pq8x256.post.entries"][0, 0, group].astype(np.float64)
        # The stand-in's entries are samples, times 0.7.
        far = np.abs(book[:, None] / 0.7 - calls[group].samples[None]).max(-1).min(1)
        assert far.max() < 0.01
    plain = values.reshape(2, 2, CONTEXT, 2, 64)[0, :, 1:, :, 24:32].reshape(-1, 8)
    np.testing.assert_allclose(calls[8 + 3].samples, plain, atol=2**-8)


def test_heads_are_coded_by_themselves(wide: Model, calls: list[Call]) -> None:
    made, reports = fit(wide, "k=pq8x256:r1:perhead,v=rvq2x256:perhead")
    assert made.parts == {"k.pq8x256.perhead.post": 1, "v.rvq256.perhead": 2}
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in made.tensors.items()}
    assert found == expected_tensors(Geometry(2, 2, 64), made.parts)
    assert len(calls) == 2 * (2 * 8 + 2) and len(reports) == 2
    assert {len(call.samples) for call in calls} == {2 * KEPT}
    _, keys, values = traced(wide)
    scale = made.tensors["k.pq8x256.perhead.post.scale"][0]
    kept = keys.reshape(2, 2, CONTEXT, 2, 64)[0, :, 1:] * scale
    order = made.tensors["k.pq8x256.perhead.post.order"][0]
    for head, group in ((0, 5), (1, 0), (1, 7)):
        want = kept[:, :, head, order[head, 8 * group : 8 * group + 8]].reshape(-1, 8)
        call = calls[8 * head + group]
        np.testing.assert_allclose(call.samples, want, atol=0.02)
        book = made.tensors["k.pq8x256.perhead.post.entries"][0, 0, 8 * head + group]
        far = np.abs(book.astype(np.float64)[:, None] / 0.7 - call.samples[None]).max(-1).min(1)
        assert far.max() < 0.01
    plain = values.reshape(2, 2, CONTEXT, 2, 64)[0, :, 1:, 1].reshape(-1, 64)
    np.testing.assert_allclose(calls[16 + 1].samples, plain, atol=2**-8)
    for call in calls:
        assert call.weights is not None and call.weights.shape == call.samples.shape[:1]


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_groups_are_of_strong_and_weak_pairs(dim: int) -> None:
    """Nearly equal sums of log-variances, where neighbours have very different ones."""
    half, codec = dim // 2, Vq(1, 256, True)
    rng = np.random.default_rng(dim)
    variances = np.tile(np.exp(np.linspace(6, -6, half)), 2) * np.exp(rng.normal(0, 0.3, dim))
    order, plain = balanced_order(variances), codec.plain_order(1, dim)[0]
    assert order.shape == (dim,) and order.dtype == np.int32 and is_order(order)

    def spread(of: np.ndarray) -> float:
        return float(np.log(variances[of]).reshape(-1, 8).sum(1).std())

    assert spread(order) < spread(plain) / 5
    np.testing.assert_array_equal(balanced_order(np.ones(dim)), balanced_order(np.ones(dim)))


def test_channels_that_never_move_have_groups_too() -> None:
    variances = np.ones(64)
    variances[[3, 35, 40]] = 0
    assert is_order(balanced_order(variances)) and is_order(balanced_order(np.zeros(64)))


# --- a further text ---

LOOKUP = "x1 = 24, y7 = 319, " * 60


@pytest.mark.parametrize(
    ("tokens", "prose", "lookup"),
    [
        (4 * CONTEXT, 2, 2),
        (3 * CONTEXT, 2, 1),
        (CONTEXT, 1, 0),
        (40 * CONTEXT, 3, 3),  # as many as there are of the texts
    ],
)
def test_half_of_the_windows_are_of_the_further_text(
    model: Model, tokens: int, prose: int, lookup: int
) -> None:
    texts, further = (model.tokenizer.encode(text) for text in (TEXT, LOOKUP))
    assert len(texts) // CONTEXT == 3 and len(further) // CONTEXT > 3
    seen: list[list[int]] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(model.decoder, name)

        def trace(self, ids: Any, show: Any) -> None:
            seen.append([int(token) for token in ids])
            model.decoder.trace(ids, show)

    watched = SimpleNamespace(config=model.config, ops=model.ops, decoder=Watched())
    sample = collect(watched, [texts], tokens=tokens, context=CONTEXT, lookup=further)  # type: ignore[arg-type]
    own, made_up = ([*map(int, ids)] for ids in (texts, further))
    windows = [
        [ids[at : at + CONTEXT] for at in range(0, len(ids) - CONTEXT + 1, CONTEXT)]
        for ids in (own, made_up)
    ]
    assert len(seen) == prose + lookup
    assert all(ids in windows[0] for ids in seen[:prose])
    assert all(ids in windows[1] for ids in seen[prose:])
    assert sample.tokens == len(seen) * CONTEXT
    assert len(sample.positions) == len(seen) * KEPT
    assert len(np.concatenate(sample.layers[0].keys)) == len(sample.positions)


def test_a_further_text_of_less_than_a_window_is_left_out(model: Model) -> None:
    texts = model.tokenizer.encode(TEXT)
    sample = collect(model, [texts], tokens=TOKENS, context=CONTEXT, lookup=texts[: CONTEXT - 1])
    assert sample.tokens == CONTEXT


def test_a_calibration_says_what_was_read_of_both(model: Model, calls: list[Call]) -> None:
    texts, further = (model.tokenizer.encode(text) for text in (TEXT, LOOKUP))
    made = calibrate(
        model, [texts], ["ab" * 32], tokens=TOKENS, context=CONTEXT, lookup=further,
        books=BookOptions(KVSpec.parse(PLAIN)),
    )  # fmt: skip
    assert made.origin.tokens == TOKENS and made.origin.texts == ("ab" * 32,)
    assert made.fingerprint != fit(model, PLAIN)[0].fingerprint
    assert [len(call.samples) for call in calls[:4]] == [2 * 2 * KEPT] * 4


def test_simvq_keeps_projections(model: Model, tmp_path: Path) -> None:
    made, _ = fit(model, PLAIN, simvq=True, seed=5)
    assert made.seeds == {"k.rvq256.post": 5, "v.rvq256": 5}
    assert made.tensors["k.rvq256.post.w"].shape == (2, 2, 1, 16, 16)
    assert "k.rvq256.post.entries" not in made.tensors
    made.save(tmp_path / "c.safetensors")
    opened = Calibration.open(tmp_path / "c.safetensors")
    assert opened.fingerprint == made.fingerprint and opened.seeds == made.seeds
    codec = KVSpec.parse(PLAIN).k.codec
    assert isinstance(codec, Vq)
    got = opened.books(1, False, codec)
    want = codebook_trainer.simvq_entries(5, made.tensors["k.rvq256.post.w"][1, :, 0], 256)
    np.testing.assert_array_equal(got.entries[:, 0], want)
    again, _ = fit(model, PLAIN, simvq=True, seed=6)
    assert again.fingerprint != made.fingerprint


def test_a_fit_repeats(model: Model) -> None:
    made, _ = fit(model, PLAIN, seed=3)
    assert fit(model, PLAIN, seed=3)[0].fingerprint == made.fingerprint
    assert fit(model, PLAIN, seed=4)[0].fingerprint != made.fingerprint


def test_threads_do_not_change_a_number(wide: Model, tmp_path: Path) -> None:
    # The books of several groups are then fitted at a time; what the model shows is the same.
    spec = "k=pq8x256:r2:perhead,v=pq8x256:r1"
    want, reports = fit(wide, spec)
    wide.ops.threads, threads = 3, wide.ops.threads
    try:
        got, again = fit(wide, spec)
    finally:
        wide.ops.threads = threads
    assert got.fingerprint == want.fingerprint
    assert again == reports


@pytest.mark.parametrize("kv", ["k=rvq4x256,v=rvq4x256", "k=rvq6x256:pre,v=rvq3x512:had,sink=4"])
@pytest.mark.parametrize("simvq", [False, True])
def test_a_store_of_the_model_takes_it(
    folder: Path, model: Model, tmp_path: Path, kv: str, simvq: bool
) -> None:
    path = tmp_path / "c.safetensors"
    fit(model, kv, simvq=simvq)[0].save(path)
    with_it = kvrt.load(str(folder), kv=kv, threads=1, calibration=str(path))
    store = with_it.new_store()
    ids = with_it.tokenizer.encode(TEXT)[:140]
    with_it.decoder.prefill(ids, store)
    assert store.stats().sealed_tokens == 128
    got = with_it.decoder.decode(65, store)
    exact = model.new_store(KVSpec.parse("f32"))
    model.decoder.prefill(ids, exact)
    want = model.decoder.decode(65, exact)
    assert np.isfinite(got).all()
    assert simvq or np.corrcoef(got, want)[0, 1] > 0.5
