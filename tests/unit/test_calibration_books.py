"""Codebooks in calibration files: what is kept and read, every way to refuse it, where it is found.

What files of nuq and of codebooks have in common is in `test_calibration`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrt import calibration_file
from kvrt.backends.cpu import CpuOps
from kvrt.calibration import Calibration
from kvrt.calibration_file import CalibrationFile
from kvrt.calibration_parts import book_name, expected_tensors, needed_parts, part_of
from kvrt.errors import CodecError, StorageError
from kvrt.kvstore import Geometry, KVSpec
from kvrt.kvstore.codecs import Vq
from tests.helpers.calibrations import assert_refused, books_by_hand, calibration_by_hand, rewrite
from tests.helpers.stores import extend, new_store, random_tokens, read

GEOMETRY = Geometry(2, 2, 64)
PARTS = {
    "k.pq8x256.post": 2,
    "k.pq8x256.page.had": 1,
    "k.pq8x256.perhead.pre": 1,
    "k.rvq512.pre": 3,
    "v.rvq256.had": 2,
    "v.rvq256.perhead": 2,
}
PQ, RVQ, VALUES = Vq(2, 256, True), Vq(3, 512, False), Vq(2, 256, False)


def own_books(codec: Vq) -> Vq:
    """The same with books of each head."""
    return replace(codec, perhead=True)


@pytest.fixture(scope="module")
def made() -> Calibration:
    return books_by_hand(GEOMETRY, PARTS)


@pytest.fixture
def path(made: Calibration, tmp_path: Path) -> Path:
    result = tmp_path / "made.safetensors"
    made.save(result)
    return result


# --- names ---


def test_names_say_side_codec_form_and_transform() -> None:
    assert book_name(PQ, False) == "k.pq8x256.post"
    assert book_name(PQ, False, "page", True) == "k.pq8x256.page.had"
    assert book_name(RVQ, False, "pre") == "k.rvq512.pre"
    assert book_name(PQ, True) == "v.pq8x256"
    assert book_name(VALUES, True, had=True) == "v.rvq256.had"
    assert book_name(own_books(PQ), False) == "k.pq8x256.perhead.post"
    assert book_name(own_books(VALUES), True, had=True) == "v.rvq256.perhead.had"
    assert part_of("k.rvq512.pre.scale") == "k.rvq512.pre"
    assert part_of("k.pq8x256.perhead.page.had.order") == "k.pq8x256.perhead.page.had"
    assert part_of("k.post.1%.low") == part_of("v.sensitivity") == "nuq"


def test_a_format_needs_the_most_stages_of_any_layer() -> None:
    spec = KVSpec.parse(
        "k=pq8x256:r1,v=nuq2,layers[1]=k=pq8x256:r3,v=pq8x256:r1,"
        "layers[3]=k=rvq28x1024:scaled,v=rvq4x512:had"
    )
    assert needed_parts(spec, Geometry(4, 2, 64)) == {
        "nuq": 0, "k.pq8x256.post": 3, "v.pq8x256": 1, "k.rvq1024.post": 14, "v.rvq512.had": 4,
    }  # fmt: skip
    assert needed_parts(KVSpec.parse("kivi4"), GEOMETRY) == {}
    # Those of all heads are others.
    spec = KVSpec.parse("vq2,layers[1]=k=pq8x256:r1,v=pq8x256:r2:perhead")
    assert needed_parts(spec, GEOMETRY) == {
        "k.pq8x256.perhead.post": 3, "k.pq8x256.post": 1, "v.pq8x256.perhead": 2,
    }  # fmt: skip


def test_the_tensors_of_a_part() -> None:
    shapes = {
        name: shape
        for part, stages in PARTS.items()
        for name, (shape, _) in expected_tensors(GEOMETRY, {part: stages}).items()
    }
    assert shapes["k.pq8x256.post.entries"] == (2, 2, 8, 256, 8)
    assert shapes["k.pq8x256.perhead.pre.entries"] == (2, 1, 16, 256, 8)
    assert shapes["k.pq8x256.perhead.pre.order"] == (2, 2, 64)
    assert shapes["v.rvq256.perhead.entries"] == (2, 2, 2, 256, 64)
    assert {name for name in shapes if name.endswith(".order")} == {
        "k.pq8x256.post.order", "k.pq8x256.page.had.order", "k.pq8x256.perhead.pre.order",
    }  # fmt: skip


# --- the file ---


def test_what_is_saved_is_opened(made: Calibration, path: Path) -> None:
    opened = Calibration.open(path)
    assert opened.origin == made.origin and opened.fingerprint == made.fingerprint
    assert opened.parts == made.parts == PARTS
    assert set(opened.tensors) == set(made.tensors)
    for name, tensor in made.tensors.items():
        np.testing.assert_array_equal(opened.tensors[name], tensor)


def test_books_are_those_of_layer_form_and_the_first_stages(made: Calibration) -> None:
    for codec in (PQ, Vq(1, 256, True)):
        got = made.books(1, False, codec)
        want = made.tensors["k.pq8x256.post.entries"][1, : codec.count]
        np.testing.assert_array_equal(got.entries, want)
        np.testing.assert_array_equal(got.centre, made.tensors["k.pq8x256.post.centre"][1])
        np.testing.assert_array_equal(got.scale, made.tensors["k.pq8x256.post.scale"][1])
        np.testing.assert_array_equal(got.order, made.tensors["k.pq8x256.post.order"][1])
    own = made.books(1, False, Vq(1, 256, True, perhead=True), "pre")
    np.testing.assert_array_equal(own.entries, made.tensors["k.pq8x256.perhead.pre.entries"][1])
    heads = made.books(0, False, RVQ, "pre")
    np.testing.assert_array_equal(heads.order, np.tile(np.arange(64), (2, 1)))
    values = made.books(0, True, VALUES, had=True)
    np.testing.assert_array_equal(values.entries, made.tensors["v.rvq256.had.entries"][0])
    assert values.centre is None and values.scale is None and values.order is None
    for asked in ((False, Vq(3, 256, True), "post", False), (False, PQ, "pre", False),
                  (True, VALUES, "post", False), (False, own_books(PQ), "post", False),
                  (True, Vq(3, 256, False, perhead=True), "post", False)):  # fmt: skip
        with pytest.raises(CodecError, match=r"has no \d stages of the codebooks"):
            made.books(0, *asked)  # type: ignore[arg-type]


def test_beside_the_tables_of_nuq(tmp_path: Path, made: Calibration) -> None:
    nuq = calibration_by_hand(GEOMETRY)
    both = Calibration(made.origin, {**nuq.tensors, **made.tensors})
    both.save(tmp_path / "both")
    opened = Calibration.open(tmp_path / "both")
    assert opened.parts == {"nuq": 0} | PARTS
    assert opened.fingerprint == both.fingerprint not in (nuq.fingerprint, made.fingerprint)


def test_files_of_nuq_alone_are_still_of_version_1(tmp_path: Path) -> None:
    nuq = calibration_by_hand(GEOMETRY)
    nuq.save(tmp_path / "nuq")
    file = CalibrationFile.open(tmp_path / "nuq")
    assert file.parts == {"nuq": 0} and file._digests is None


def test_only_what_is_asked_for_is_read(
    made: Calibration, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = calibration_file.digest_of
    monkeypatch.setattr(
        calibration_file, "digest_of", lambda tensor: (seen.append(tensor.nbytes), real(tensor))[1]
    )
    part = CalibrationFile.open(path).read(["v.rvq256.had"])
    assert set(part.tensors) == {"v.rvq256.had.entries"}
    assert seen == [made.tensors["v.rvq256.had.entries"].nbytes]
    assert part.fingerprint == made.fingerprint  # that of the file
    assert isinstance(part.tensors["v.rvq256.had.entries"], np.memmap)


@pytest.mark.parametrize("name", ["k.pq8x256.post.entries", "k.rvq512.pre.scale"])
def test_the_fingerprint_changes_with_any_tensor(made: Calibration, name: str) -> None:
    tensors = dict(made.tensors)
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[-1] += 1
    assert Calibration(made.origin, tensors).fingerprint != made.fingerprint


def test_a_store_reads_with_them(ops: CpuOps, path: Path) -> None:
    spec = "k=pq8x256:r2,v=rvq2x256:had,layers[1]=k=rvq3x512:pre,v=f16"
    check_reading(ops, spec, path)


def test_a_store_reads_with_books_of_each_head(ops: CpuOps, path: Path) -> None:
    check_reading(ops, "k=pq8x256:r1:perhead:pre,v=rvq2x256:perhead", path)


def check_reading(ops: CpuOps, spec: str, path: Path) -> None:
    store = new_store(ops, spec, GEOMETRY, calibration=Calibration.open(path))
    tokens = random_tokens(64, GEOMETRY)
    extend(store, tokens)
    for got, want in zip(read(store), tokens, strict=True):
        assert np.isfinite(got).all()
        assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.2


# --- refusals ---


def test_a_missing_tensor(made: Calibration, path: Path) -> None:
    for name in ("k.pq8x256.post.centre", "k.rvq512.pre.entries", "k.pq8x256.page.had.order"):
        rewrite(path, {key: value for key, value in made.tensors.items() if key != name})
        assert_refused(StorageError, path, re.escape(name) + ".* is absent, expected (float|int)")


@pytest.mark.parametrize(
    "name", ["k.pq8x512.post.entries", "k.rvq1000.post.entries", "v.rvq256.page.entries",
             "k.rvq512.pre.had.scale", "k.rvq512.pre.order", "v.pq8x256.order",
             "k.pq8x256.post.perhead.entries", "more"],
)  # fmt: skip
def test_a_tensor_of_an_unknown_name(made: Calibration, path: Path, name: str) -> None:
    rewrite(path, {**made.tensors, name: np.zeros((2, 1, 1, 256, 64), np.float16)})
    assert_refused(StorageError, path, "expected|absent")


def test_a_tensor_of_another_shape_or_type(made: Calibration, path: Path) -> None:
    name = "k.rvq512.pre.entries"
    entries = made.tensors[name]
    for wrong in (
        entries[:, :, :, :256], entries[:1], entries[..., :32], entries[:, :, 0],
        entries.astype(np.float32), entries[:, :0],
    ):  # fmt: skip
        rewrite(path, {**made.tensors, name: np.ascontiguousarray(wrong)})
        assert_refused(
            StorageError, path, rf"{re.escape(name)}.* is float.*, expected float16 \[2, "
        )
    order = made.tensors["k.pq8x256.post.order"]
    rewrite(path, {**made.tensors, "k.pq8x256.post.order": order.astype(np.float32)})
    assert_refused(
        StorageError, path, r"post.order. is float32 \[2, 2, 64\], expected int32 \[2, 2, 64\]"
    )
    name = "v.rvq256.perhead.entries"  # of as many heads as there are
    rewrite(path, {**made.tensors, name: made.tensors[name][:, :, :1].copy()})
    assert_refused(
        StorageError, path, r"is float16 \[2, 2, 1, 256, 64\], expected float16 \[2, 2, 2, 256"
    )
    scale = made.tensors["k.rvq512.pre.scale"]
    rewrite(path, {**made.tensors, "k.rvq512.pre.scale": scale.astype(np.float16)})
    assert_refused(StorageError, path, r"is float16 \[2, 2, 64\], expected float32 \[2, 2, 64\]")


@pytest.mark.parametrize(
    "change",
    [{"digests": None}, {"digests": "[1,"}, {"digests": "3"}, {"seeds": None}, {"seeds": "[]"},
     {"seeds": '{"k": "x"}'}, {"seeds": '{"k": 1e400}'}, {"fingerprint": None}],
)  # fmt: skip
def test_incomplete_metadata(made: Calibration, path: Path, change: dict[str, Any]) -> None:
    rewrite(path, made.tensors, **change)
    assert_refused(StorageError, path, "damaged, its metadata are incomplete")


def test_digests_of_other_tensors(made: Calibration, path: Path) -> None:
    fewer = {k: v for k, v in made.all_digests.items() if k != "k.rvq512.pre.scale"}
    for digests in (fewer, dict(made.all_digests) | {"k.rvq512.pre.scale": "ab" * 32}):
        rewrite(path, made.tensors, digests=json.dumps(digests))
        assert_refused(StorageError, path, "damaged, its metadata do not go with its tensors")


@pytest.mark.parametrize("back", [1, 5000, 100_000])
def test_one_flipped_bit(path: Path, back: int) -> None:
    data = bytearray(path.read_bytes())
    data[-back] ^= 1
    path.write_bytes(data)
    assert_refused(StorageError, path, "damaged, the tensors are not those it was written with")


def test_damage_in_another_part_is_not_looked_for(made: Calibration, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the last tensor by name
    path.write_bytes(data)
    file = CalibrationFile.open(path)
    assert file.read(["k.pq8x256.post"]).tensors
    with pytest.raises(StorageError, match="damaged"):
        file.read([part_of(sorted(made.tensors)[-1])])


def swapped(order: np.ndarray) -> None:
    """Two channels of different groups."""
    order[1, 1, [0, 8]] = order[1, 1, [8, 0]]


def twice(order: np.ndarray) -> None:
    order[0, 1, :8] = order[0, 1, 8:16]


def partners_first(order: np.ndarray) -> None:
    order[1, 0, :8] = np.roll(order[1, 0, :8], 4)


def beyond(order: np.ndarray) -> None:
    order[0, 0, [0, 4]] += 64


def below(order: np.ndarray) -> None:
    order[0, 0] -= 64


def as_they_come(order: np.ndarray) -> None:
    order[:] = np.arange(64)


def far_beyond(order: np.ndarray) -> None:
    order[0, 0, 0] = np.iinfo(np.int32).max


@pytest.mark.parametrize(
    "change", [swapped, twice, partners_first, beyond, below, as_they_come, far_beyond]
)
def test_an_order_that_cannot_be(
    made: Calibration, path: Path, change: Callable[[np.ndarray], None]
) -> None:
    for name in ("k.pq8x256.post.order", "k.pq8x256.perhead.pre.order"):
        tensors = {**made.tensors, name: made.tensors[name].copy()}
        change(tensors[name])
        Calibration(made.origin, tensors).save(path)
        said = "an order of channels that cannot be, expected each channel of a head once, in"
        assert_refused(StorageError, path, f"{re.escape(name)} holds {said}")


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("k.pq8x256.post.entries", np.nan, "numbers that are not finite"),
        ("v.rvq256.had.entries", np.inf, "numbers that are not finite"),
        ("k.rvq512.pre.centre", np.inf, "numbers that are not finite"),
        ("k.rvq512.pre.scale", 0.0, r"numbers that are not between 1e-06 and 1e\+06"),
        ("k.rvq512.pre.scale", -1.0, "numbers that are not between 1e-06 and"),
        ("k.rvq512.pre.scale", 1e-41, "numbers that are not between 1e-06 and"),
        ("k.rvq512.pre.scale", 3e38, "numbers that are not between 1e-06 and"),
        ("k.rvq512.pre.centre", -3e38, r"numbers beyond 1e\+06"),
    ],
)
def test_numbers_that_cannot_be(
    made: Calibration, path: Path, name: str, number: float, said: str
) -> None:
    tensors = dict(made.tensors)
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[7] = number
    Calibration(made.origin, tensors).save(path)
    assert_refused(StorageError, path, f"{re.escape(name)} holds {said}")


# --- random weights ---


def test_a_model_without_a_folder_has_tables_of_the_right_size() -> None:
    from kvrt.normal_tables import NormalTables

    tables = NormalTables(GEOMETRY)
    for codec, is_value in (
        (PQ, False), (RVQ, False), (VALUES, True), (own_books(PQ), True), (own_books(RVQ), False),
    ):  # fmt: skip
        books = tables.books(0, is_value, codec)
        assert books is tables.books(1, is_value, codec, "pre")  # one for all layers
        assert books.entries.shape == codec.shape(2, 64) and np.isfinite(books.entries).all()
        fewer = tables.books(0, is_value, replace(codec, count=1))
        np.testing.assert_array_equal(fewer.entries[0], books.entries[0])
