"""Codebooks in calibration files: what is kept and read, every way to refuse it, where it is found.

What files of nuq and of codebooks have in common is in `test_calibration`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvrt import calibration_file
from kvrt.backends.cpu import CpuOps
from kvrt.calibration import FILE_NAME, Calibration
from kvrt.calibration_file import CalibrationFile
from kvrt.calibration_parts import book_name, needed_parts, part_of
from kvrt.calibrations import Calibrations, Chosen
from kvrt.config import ModelConfig
from kvrt.errors import CodecError, KvrtError, StorageError, UnsupportedError
from kvrt.fingerprint import model_fingerprint
from kvrt.kvstore import Geometry, KVSpec
from kvrt.kvstore.codecs import Vq
from tests.helpers.calibrations import MODEL, books_by_hand, calibration_by_hand, rewrite
from tests.helpers.stores import extend, new_store, random_tokens, read
from tests.helpers.tiny_model import write_tiny_model

GEOMETRY = Geometry(2, 2, 64)
PARTS = {"k.pq8x256.post": 2, "k.pq8x256.page.had": 1, "k.rvq512.pre": 3, "v.rvq256.had": 2}
PQ, RVQ, VALUES = Vq(2, 256, True), Vq(3, 512, False), Vq(2, 256, False)


@pytest.fixture(scope="module")
def made() -> Calibration:
    return books_by_hand(GEOMETRY, PARTS)


@pytest.fixture
def path(made: Calibration, tmp_path: Path) -> Path:
    result = tmp_path / "made.safetensors"
    made.save(result)
    return result


def refused(kind: type[KvrtError], path: Path, said: str) -> None:
    """Opening fails with just this class and one line that names the file."""
    with pytest.raises(KvrtError) as caught:
        Calibration.open(path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    assert re.search(said, message), message


# --- names ---


def test_names_say_side_codec_form_and_transform() -> None:
    assert book_name(PQ, False) == "k.pq8x256.post"
    assert book_name(PQ, False, "page", True) == "k.pq8x256.page.had"
    assert book_name(RVQ, False, "pre") == "k.rvq512.pre"
    assert book_name(PQ, True) == "v.pq8x256"
    assert book_name(VALUES, True, had=True) == "v.rvq256.had"
    assert part_of("k.rvq512.pre.scale") == "k.rvq512.pre"
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
    values = made.books(0, True, VALUES, had=True)
    np.testing.assert_array_equal(values.entries, made.tensors["v.rvq256.had.entries"][0])
    assert values.centre is None and values.scale is None
    for asked in ((False, Vq(3, 256, True), "post", False), (False, PQ, "pre", False),
                  (True, VALUES, "post", False)):  # fmt: skip
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
    store = new_store(ops, spec, GEOMETRY, calibration=Calibration.open(path))
    tokens = random_tokens(64, GEOMETRY)
    extend(store, tokens)
    for got, want in zip(read(store), tokens, strict=True):
        assert np.isfinite(got).all()
        assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.2


# --- refusals ---


def test_a_missing_tensor(made: Calibration, path: Path) -> None:
    for name in ("k.pq8x256.post.centre", "k.rvq512.pre.entries"):
        rewrite(path, {key: value for key, value in made.tensors.items() if key != name})
        refused(StorageError, path, re.escape(name) + ".* is absent, expected float")


@pytest.mark.parametrize(
    "name", ["k.pq8x512.post.entries", "k.rvq1000.post.entries", "v.rvq256.page.entries",
             "k.rvq512.pre.had.scale", "more"],
)  # fmt: skip
def test_a_tensor_of_an_unknown_name(made: Calibration, path: Path, name: str) -> None:
    rewrite(path, {**made.tensors, name: np.zeros((2, 1, 1, 256, 64), np.float16)})
    refused(StorageError, path, "expected|absent")


def test_a_tensor_of_another_shape_or_type(made: Calibration, path: Path) -> None:
    name = "k.rvq512.pre.entries"
    entries = made.tensors[name]
    for wrong in (
        entries[:, :, :, :256], entries[:1], entries[..., :32], entries[:, :, 0],
        entries.astype(np.float32), entries[:, :0],
    ):  # fmt: skip
        rewrite(path, {**made.tensors, name: np.ascontiguousarray(wrong)})
        refused(StorageError, path, rf"{re.escape(name)}.* is float.*, expected float16 \[2, ")
    scale = made.tensors["k.rvq512.pre.scale"]
    rewrite(path, {**made.tensors, "k.rvq512.pre.scale": scale.astype(np.float16)})
    refused(StorageError, path, r"is float16 \[2, 2, 64\], expected float32 \[2, 2, 64\]")


@pytest.mark.parametrize(
    "change",
    [{"digests": None}, {"digests": "[1,"}, {"digests": "3"}, {"seeds": None}, {"seeds": "[]"},
     {"seeds": '{"k": "x"}'}, {"fingerprint": None}],
)  # fmt: skip
def test_incomplete_metadata(made: Calibration, path: Path, change: dict[str, Any]) -> None:
    rewrite(path, made.tensors, **change)
    refused(StorageError, path, "damaged, its metadata are incomplete")


def test_digests_of_other_tensors(made: Calibration, path: Path) -> None:
    fewer = {k: v for k, v in made.all_digests.items() if k != "k.rvq512.pre.scale"}
    for digests in (fewer, dict(made.all_digests) | {"k.rvq512.pre.scale": "ab" * 32}):
        rewrite(path, made.tensors, digests=json.dumps(digests))
        refused(StorageError, path, "damaged, its metadata do not go with its tensors")


@pytest.mark.parametrize("back", [1, 5000, 100_000])
def test_one_flipped_bit(path: Path, back: int) -> None:
    data = bytearray(path.read_bytes())
    data[-back] ^= 1
    path.write_bytes(data)
    refused(StorageError, path, "damaged, the tensors are not those it was written with")


def test_damage_in_another_part_is_not_looked_for(made: Calibration, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the last tensor by name
    path.write_bytes(data)
    file = CalibrationFile.open(path)
    assert file.read(["k.pq8x256.post"]).tensors
    with pytest.raises(StorageError, match="damaged"):
        file.read([part_of(sorted(made.tensors)[-1])])


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("k.pq8x256.post.entries", np.nan, "numbers that are not finite"),
        ("v.rvq256.had.entries", np.inf, "numbers that are not finite"),
        ("k.rvq512.pre.centre", np.inf, "numbers that are not finite"),
        ("k.rvq512.pre.scale", 0.0, "numbers that are not above 0"),
        ("k.rvq512.pre.scale", -1.0, "numbers that are not above 0"),
    ],
)
def test_numbers_that_cannot_be(
    made: Calibration, path: Path, name: str, number: float, said: str
) -> None:
    tensors = dict(made.tensors)
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[7] = number
    Calibration(made.origin, tensors).save(path)
    refused(StorageError, path, f"{re.escape(name)} holds {said}")


# --- where it is found ---


class Tiny:
    """A model folder, and what looks for its calibrations."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: ModelConfig = write_tiny_model(folder, head_dim=64)
        self.geometry = GEOMETRY
        weights = load_file(folder / "model.safetensors")
        self.fingerprint = model_fingerprint(self.config, weights)

    def books(self, path: Path, parts: dict[str, int], seed: int, **changes: Any) -> None:
        arguments = {"geometry": self.geometry, "model": self.fingerprint, **changes}
        books_by_hand(parts=parts, seed=seed, **arguments).save(path)

    def get(self, spec: str, given: Path | None = None) -> dict[str, str]:
        """The file that each part is from."""
        asked = None if given is None else str(given)
        lookup = Calibrations(self.folder, asked, self.config, lambda: self.fingerprint)
        found = lookup.get(KVSpec.parse(spec))
        assert isinstance(found, Chosen)
        return {part: Path(one.where).name for part, one in found.of.items()}


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path / "tiny")


def test_each_part_is_from_the_first_file_that_has_it(tiny: Tiny, tmp_path: Path) -> None:
    calibration_by_hand(GEOMETRY, model=tiny.fingerprint).save(tiny.folder / FILE_NAME)
    tiny.books(tiny.folder / "calibration-b.safetensors", {"k.pq8x256.post": 2}, 1)
    tiny.books(tiny.folder / "calibration-a.safetensors", {"k.pq8x256.post": 1, "v.rvq256": 2}, 2)
    tiny.books(tiny.folder / "other.safetensors", {"v.pq8x256": 2}, 2)  # no such name
    one, a, b = FILE_NAME, "calibration-a.safetensors", "calibration-b.safetensors"
    assert tiny.get("k=pq8x256:r1,v=nuq3") == {"k.pq8x256.post": a, "nuq": one}
    assert tiny.get("k=pq8x256:r2,v=rvq2x256") == {"k.pq8x256.post": b, "v.rvq256": a}
    assert tiny.get("k=pq8x256:r1,v=f16,layers[1]=k=pq8x256:r2,v=f16") == {"k.pq8x256.post": b}
    tiny.books(tmp_path / "given", {"v.rvq256": 1}, 3)
    asked = tiny.get("k=pq8x256:r2,v=rvq1x256", tmp_path / "given")
    assert asked == {"k.pq8x256.post": b, "v.rvq256": "given"}
    assert tiny.get("k=f16,v=rvq2x256", tmp_path / "given") == {"v.rvq256": a}


def test_more_stages_are_looked_for_again(tiny: Tiny) -> None:
    tiny.books(tiny.folder / "calibration-a.safetensors", {"v.rvq256": 1}, 2)
    tiny.books(tiny.folder / "calibration-b.safetensors", {"v.rvq256": 3}, 2)
    lookup = Calibrations(tiny.folder, None, tiny.config, lambda: tiny.fingerprint)
    for stages, name in ((1, "a"), (3, "b"), (2, "b"), (1, "b")):
        found = lookup.get(KVSpec.parse(f"k=f16,v=rvq{stages}x256"))
        assert isinstance(found, Chosen)
        assert Path(found.of["v.rvq256"].where).name == f"calibration-{name}.safetensors"
        codec = Vq(stages, 256, False)
        assert found.books(0, True, codec).entries.shape == (stages, 1, 256, 64)


def test_a_missing_part_names_the_command(tiny: Tiny, tmp_path: Path) -> None:
    def message(spec: str, given: Path | None = None) -> str:
        with pytest.raises(UnsupportedError) as caught:
            tiny.get(spec, given)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    command = "kvrt calibrate -m MODEL --text FILE"
    own = tiny.folder / FILE_NAME
    assert message("vq2") == (
        "this cache format needs a calibration of this model with k.pq8x256.post, v.pq8x256; "
        f"`{command} --codec vq2 -o {own}` makes one"
    )
    tiny.books(own, {"k.pq8x256.post": 1, "v.pq8x256": 2}, 1)
    second = tiny.folder / "calibration-2.safetensors"
    said = message("k=pq8x256:r2,v=pq8x256:r2")  # too few stages
    assert "with k.pq8x256.post; " in said
    assert f"`{command} --codec k=pq8x256:r2,v=pq8x256:r2 -o {second}`" in said
    assert f"`{command} -o {second}`" in message("kvquant4")
    said = message("k=nuq2:pre,v=pq8x256:r3,layers[1]=f16")
    assert "--codec 'k=nuq2:pre,v=pq8x256:r3,layers[1]=f16' -o" in said


def wrong_weights(tiny: Tiny, path: Path) -> None:
    tiny.books(path, {"v.pq8x256": 1}, 1, model=MODEL)


def wrong_geometry(tiny: Tiny, path: Path) -> None:
    tiny.books(path, {"v.pq8x256": 1}, 1, geometry=Geometry(1, 2, 64))


def damaged(tiny: Tiny, path: Path) -> None:
    tiny.books(path, {"v.pq8x256": 1}, 1)
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("name", [FILE_NAME, "calibration-x.safetensors", None])
@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (wrong_weights, UnsupportedError, "made for other weights"),
        (wrong_geometry, UnsupportedError, "made for 1 layers"),
        (damaged, StorageError, "damaged, the tensors are not"),
    ],
)
def test_one_that_does_not_fit_is_refused_and_not_passed_over(
    tiny: Tiny,
    tmp_path: Path,
    make: Callable[[Tiny, Path], None],
    kind: type[KvrtError],
    said: str,
    name: str | None,
) -> None:
    path = tmp_path / "given" if name is None else tiny.folder / name
    make(tiny, path)
    tiny.books(tiny.folder / "calibration-z.safetensors", {"v.pq8x256": 1}, 1)
    with pytest.raises(kind, match=f"^{re.escape(str(path))}: .*{said}"):
        tiny.get("k=f16,v=pq8x256:r1", path if name is None else None)


def test_a_model_without_a_folder_has_tables_of_the_right_size() -> None:
    from kvrt.normal_tables import NormalTables

    tables = NormalTables(GEOMETRY)
    for codec, is_value in ((PQ, False), (RVQ, False), (VALUES, True)):
        books = tables.books(0, is_value, codec)
        assert books is tables.books(1, is_value, codec, "pre")  # one for all layers
        assert books.entries.shape == codec.shape(64) and np.isfinite(books.entries).all()
        fewer = tables.books(0, is_value, Vq(1, codec.entries, codec.grouped))
        np.testing.assert_array_equal(fewer.entries[0], books.entries[0])
