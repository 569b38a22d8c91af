"""Where the codebooks that a format needs are found, part by part, and what is said without them.

The same of the tables of nuq is in `test_calibration`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from kvrt.calibration import FILE_NAME
from kvrt.calibrations import Calibrations, Chosen
from kvrt.config import ModelConfig
from kvrt.errors import KvrtError, StorageError, UnsupportedError
from kvrt.fingerprint import model_fingerprint
from kvrt.kvstore import Geometry, KVSpec
from kvrt.kvstore.codecs import Vq
from tests.helpers.calibrations import MODEL, books_by_hand, calibration_by_hand
from tests.helpers.tiny_model import write_tiny_model

GEOMETRY = Geometry(2, 2, 64)


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
    for stages, name in ((1, "a"), (3, "b"), (2, "b"), (1, "a")):
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
        "this cache format needs a calibration of this model with k.pq8x256.perhead.post, "
        "v.pq8x256.perhead; "
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
    given = tmp_path / "given.safetensors"
    tiny.books(given, {"v.rvq256": 1}, 1)
    assert f"with v.rvq256, more than {given} has; `kvrt calibrate" in message(
        "k=f16,v=rvq2x256", given
    )


def test_what_the_file_given_has_not_is_said_once(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given, own = tmp_path / "given.safetensors", tiny.folder / "calibration-a.safetensors"
    tiny.books(given, {"v.rvq256": 1}, 1)
    tiny.books(own, {"v.rvq256": 2, "v.rvq512": 1}, 2)
    asked = f"{tmp_path}/./{given.name}"
    lookup = Calibrations(tiny.folder, asked, tiny.config, lambda: tiny.fingerprint)
    for spec, said in (
        ("k=f16,v=rvq1x256", []),
        ("k=f16,v=rvq1x512", [f"{asked} has no v.rvq512: {own} is used"]),
        ("k=f16,v=rvq2x256", [f"{asked} has too few stages of v.rvq256: {own} is used"]),
        ("k=f16,v=rvq1x512", []),
        ("k=f16,v=rvq2x256", []),
    ):
        caplog.clear()
        lookup.get(KVSpec.parse(spec))
        assert caplog.messages == said


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
