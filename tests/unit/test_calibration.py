"""The file of a calibration: what it keeps, every way to refuse it, and where it is found."""

import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvrt import calibrations
from kvrt.calibration import FILE_NAME, Calibration, expected_tensors, middle_and_half
from kvrt.calibrations import Calibrations, Chosen
from kvrt.config import ModelConfig
from kvrt.errors import KvrtError, StorageError, UnsupportedError, UsageError
from kvrt.fingerprint import model_fingerprint
from kvrt.kvstore import Geometry, KVSpec
from tests.helpers.calibrations import MODEL, assert_refused, calibration_by_hand, rewrite
from tests.helpers.tiny_model import write_tiny_model

GEOMETRY = Geometry(2, 2, 16)
SHIPPED = Path(calibrations.__file__).parent / "smollm2.safetensors"


@pytest.fixture
def made() -> Calibration:
    return calibration_by_hand(GEOMETRY)


@pytest.fixture
def path(made: Calibration, tmp_path: Path) -> Path:
    result = tmp_path / "made.safetensors"
    made.save(result)
    return result


# --- the file ---


def test_what_is_saved_is_opened(made: Calibration, path: Path) -> None:
    opened = Calibration.open(path)
    assert opened.origin == made.origin
    assert opened.where == str(path)
    assert opened.fingerprint == made.fingerprint
    assert list(opened.tensors) and set(opened.tensors) == set(made.tensors)
    for name, tensor in made.tensors.items():
        assert opened.tensors[name].dtype == tensor.dtype
        np.testing.assert_array_equal(opened.tensors[name], tensor)


def test_saving_replaces_a_file_and_leaves_nothing_else(path: Path, tmp_path: Path) -> None:
    other = calibration_by_hand(GEOMETRY, seed=1)
    other.save(path)
    assert Calibration.open(path).fingerprint == other.fingerprint
    assert list(tmp_path.iterdir()) == [path]


def test_saving_onto_a_folder_fails(made: Calibration, tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    (target / "kept").touch()
    with pytest.raises(StorageError, match="folder"):
        made.save(target)
    assert [p.name for p in tmp_path.rglob("*")] == ["folder", "kept"]


@pytest.mark.parametrize("name", expected_tensors(GEOMETRY))
def test_the_fingerprint_changes_with_any_tensor(made: Calibration, name: str) -> None:
    tensors = dict(made.tensors)
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[-1] += 1
    assert Calibration(made.origin, tensors).fingerprint != made.fingerprint


def test_the_fingerprint_is_of_names_and_shapes_too_but_not_of_the_order(made: Calibration) -> None:
    def of(tensors: dict[str, np.ndarray]) -> str:
        return Calibration(made.origin, tensors).fingerprint

    tensors = dict(made.tensors)
    assert of(dict(reversed(tensors.items()))) == made.fingerprint
    k, v = tensors["k.sensitivity"], tensors["v.sensitivity"]
    assert of(tensors | {"k.sensitivity": v, "v.sensitivity": k}) != made.fingerprint
    assert of(tensors | {"k.sensitivity": k.reshape(2, 1, 32)}) != made.fingerprint
    assert of(tensors | {"k.sensitivity": k.view(np.int32)}) != made.fingerprint


# --- refusals ---


def test_no_file(tmp_path: Path) -> None:
    assert_refused(UsageError, tmp_path / "none", "no such file, expected a calibration")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert_refused(
        StorageError, tmp_path / "empty", "empty, expected a file made by `kvrt calibrate`"
    )


def test_a_folder(tmp_path: Path) -> None:
    assert_refused(
        StorageError, tmp_path, "no calibration, expected a file made by `kvrt calibrate`"
    )


def test_a_path_through_a_file(path: Path) -> None:
    assert_refused(StorageError, path / "below", "ot a directory")


@pytest.mark.parametrize("keep", [1, 8, 100, -1])
def test_a_truncated_file(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(StorageError, path, "damaged, or no calibration: ")


@pytest.mark.parametrize(
    "data", [b"\xff" * 200, b"Call me Ishmael.\n" * 50, struct.pack("<Q", 4) + b"{\n\n}"]
)
def test_a_file_that_is_no_safetensors(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "text").write_bytes(data)
    assert_refused(StorageError, tmp_path / "text", "no calibration")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_safetensors_file_of_something_else(tmp_path: Path, metadata: Any) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": np.zeros(3, np.float32)}, path, metadata=metadata)
    assert_refused(
        StorageError, path, "safetensors, but no calibration; `kvrt calibrate` makes one"
    )


@pytest.mark.parametrize(("version", "shown"), [("3", "3"), ("0", "0"), (None, "None|null")])
def test_another_version(made: Calibration, path: Path, version: str | None, shown: str) -> None:
    rewrite(path, made.tensors, version=version)
    said = f"of version '?\"?({shown}).*reads 1 and 2; make it again with `kvrt"
    assert_refused(UnsupportedError, path, said)


@pytest.mark.parametrize(
    "change",
    [
        {"model": None}, {"model_fingerprint": None}, {"num_layers": None}, {"head_dim": "x"},
        {"head_dim": "0"}, {"num_layers": "-1"},
        {"num_kv_heads": "2.5"}, {"texts": "[1,"}, {"texts": "3"}, {"tokens": ""},
        {"fingerprint": None},
    ],
)  # fmt: skip
def test_incomplete_metadata(made: Calibration, path: Path, change: dict[str, Any]) -> None:
    rewrite(path, made.tensors, **change)
    assert_refused(StorageError, path, "damaged, its metadata are incomplete")


def test_a_missing_tensor(made: Calibration, path: Path) -> None:
    tensors = dict(made.tensors)
    del tensors["v.1%.3.levels"]
    rewrite(path, tensors)
    assert_refused(StorageError, path, r"v\.1%\.3\.levels.* is absent, expected float32 \[2, 8\]")


def test_a_tensor_too_many(made: Calibration, path: Path) -> None:
    rewrite(path, {**made.tensors, "more": np.zeros(3, np.float32)})
    assert_refused(StorageError, path, r"more.* is float32 \[3\], expected absent")


def test_a_tensor_of_another_shape_or_type(made: Calibration, path: Path) -> None:
    low = made.tensors["k.pre.0%.low"]
    rewrite(path, {**made.tensors, "k.pre.0%.low": low.reshape(2, 1, 32)})
    assert_refused(StorageError, path, r"is float16 \[2, 1, 32\], expected float16 \[2, 2, 16\]")
    rewrite(path, {**made.tensors, "k.pre.0%.low": low.astype(np.float32)})
    assert_refused(StorageError, path, r"is float32 \[2, 2, 16\], expected float16 \[2, 2, 16\]")


def test_metadata_of_another_geometry(made: Calibration, path: Path) -> None:
    rewrite(path, made.tensors, num_layers="3")
    assert_refused(StorageError, path, r"is float32 \[2, 2, 16\], expected float32 \[3, 2, 16\]")


@pytest.mark.parametrize("back", [1, 1000, 3000])
def test_one_flipped_bit(path: Path, back: int) -> None:
    data = bytearray(path.read_bytes())
    data[-back] ^= 1
    path.write_bytes(data)
    assert_refused(StorageError, path, "damaged, the tensors are not those it was written with")


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite(made: Calibration, path: Path, number: float) -> None:
    tensors = {name: tensor.copy() for name, tensor in made.tensors.items()}
    tensors["v.0%.2.levels"][1, 3] = number
    Calibration(made.origin, tensors).save(path)
    assert_refused(StorageError, path, "holds numbers that are not finite")


def test_a_calibration_of_the_model_is_taken(path: Path) -> None:
    Calibration.open(path).check(MODEL, GEOMETRY)
    Calibration.open(path).check(MODEL, Geometry(2, 2, 16, key_bias=True))  # no matter of shape


def test_a_calibration_of_other_weights(path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        Calibration.open(path).check("12" * 32, GEOMETRY)
    message = str(caught.value)
    assert message.startswith(f"{path}: made for other weights") and "\n" not in message
    assert "by-hand" in message and MODEL[:12] in message and message.endswith("is 121212121212")


@pytest.mark.parametrize("other", [Geometry(3, 2, 16), Geometry(2, 1, 16), Geometry(2, 2, 32)])
def test_a_calibration_of_another_geometry(path: Path, other: Geometry) -> None:
    with pytest.raises(UnsupportedError) as caught:
        Calibration.open(path).check(MODEL, other)
    assert str(caught.value) == (
        f"{path}: made for 2 layers of 2 KV heads of 16 channels, this model has "
        f"{other.num_layers} layers of {other.num_kv_heads} KV heads of {other.head_dim} channels"
    )


# --- thresholds ---


def test_middle_and_half_hold_both_ends_and_are_never_empty() -> None:
    low = np.array([-2, 0, 100, -3], np.float32)
    high = np.array([4, 0, 100, -1], np.float32)
    middle, half = middle_and_half(low, high)
    assert middle.tolist() == [1, 0, 100, -2]
    assert half[1:3].tolist() == [2**-12, 100 * 2**-12]
    np.testing.assert_allclose(half[[0, 3]], [3.003, 1.001], rtol=1e-6)  # f32
    assert (np.abs(low - middle) < half).all() and (np.abs(high - middle) < half).all()


# --- where it is found ---


class Tiny:
    """A model folder, and what looks for its calibration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: ModelConfig = write_tiny_model(folder)
        self.weights = load_file(folder / "model.safetensors")
        config = self.config
        self.geometry = Geometry(config.num_layers, config.num_kv_heads, config.head_dim)
        self.fingerprint = model_fingerprint(config, self.weights)

    def save(self, path: Path, seed: int, **changes: Any) -> str:
        arguments = {"geometry": self.geometry, "model": self.fingerprint, **changes}
        found = calibration_by_hand(seed=seed, **arguments)
        found.save(path)
        return found.fingerprint

    def lookup(self, given: Path | None = None) -> Calibrations:
        asked = None if given is None else str(given)
        return Calibrations(self.folder, asked, self.config, lambda: self.fingerprint)

    def get(self, given: Path | None = None) -> Calibration:
        found = self.lookup(given).get(KVSpec.parse("kvquant4"))
        assert isinstance(found, Chosen)
        return found.of["nuq"]


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path / "tiny")


def test_the_given_file_comes_before_the_folders_own(tiny: Tiny, tmp_path: Path) -> None:
    own = tiny.save(tiny.folder / FILE_NAME, 1)
    assert tiny.get().fingerprint == own
    given = tiny.save(tmp_path / "given", 2)
    assert given != own
    assert tiny.get(tmp_path / "given").fingerprint == given


def test_the_folders_own_comes_before_the_shipped_one(tiny: Tiny) -> None:
    shipped = Calibration.open(SHIPPED)
    tiny.fingerprint = shipped.model_fingerprint
    assert tiny.get().fingerprint == shipped.fingerprint
    own = tiny.save(tiny.folder / FILE_NAME, 1, model=shipped.model_fingerprint)
    assert tiny.get().fingerprint == own


def test_without_any_the_message_has_the_command(tiny: Tiny) -> None:
    with pytest.raises(UnsupportedError) as caught:
        tiny.get()
    message = str(caught.value)
    own = tiny.folder / "calibration.safetensors"
    assert f"`kvrt calibrate -m MODEL --text FILE -o {own}`" in message and "\n" not in message


def break_weights(tiny: Tiny, path: Path) -> None:
    tiny.save(path, 1, model=MODEL)


def break_geometry(tiny: Tiny, path: Path) -> None:
    tiny.save(path, 1, geometry=GEOMETRY.__class__(1, 2, 16))


def break_file(tiny: Tiny, path: Path) -> None:
    shutil.copy(tiny.folder / "model.safetensors", path)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (break_weights, UnsupportedError, "made for other weights"),
        (break_geometry, UnsupportedError, "made for 1 layers"),
        (break_file, StorageError, "no calibration"),
    ],
)
def test_one_that_does_not_fit_is_refused_and_not_passed_over(
    tiny: Tiny,
    tmp_path: Path,
    make: Callable[[Tiny, Path], None],
    kind: type[KvrtError],
    said: str,
    given: bool,
) -> None:
    path = tmp_path / "given" if given else tiny.folder / FILE_NAME
    make(tiny, path)
    if given:  # a good one of the folder does not help
        tiny.save(tiny.folder / FILE_NAME, 2)
    with pytest.raises(kind, match=f"^{re.escape(str(path))}: .*{said}"):
        tiny.get(path if given else None)


def test_a_given_file_that_is_not_there(tiny: Tiny, tmp_path: Path) -> None:
    tiny.save(tiny.folder / FILE_NAME, 2)
    with pytest.raises(UsageError, match="none: no such file"):
        tiny.get(tmp_path / "none")


def test_it_is_opened_once(tiny: Tiny) -> None:
    tiny.save(tiny.folder / FILE_NAME, 1)
    lookup, spec = tiny.lookup(), KVSpec.parse("kvquant4")
    first = lookup.get(spec)
    (tiny.folder / FILE_NAME).unlink()
    assert isinstance(first, Chosen) and lookup.get(spec) == first


def test_the_shipped_calibration_opens_and_is_small() -> None:
    shipped = Calibration.open(SHIPPED)
    assert shipped.origin.geometry == Geometry(30, 3, 64)
    assert shipped.origin.tokens >= 4096 and shipped.origin.texts
    assert SHIPPED.stat().st_size < 400_000
    for name, tensor in shipped.tensors.items():
        if name.endswith("levels"):
            assert (np.diff(tensor, axis=-1) >= 0).all(), name
        if name.endswith(".low"):
            assert (tensor <= shipped.tensors[name.replace(".low", ".high")]).all(), name
