"""Where a model's calibrations are found, and those that come with kvrt.

Those that come with kvrt are of SmolLM2-135M-Instruct as `kvrt pull smollm2` makes it:
smollm2.safetensors has the tables of nuq, fitted to State of the Union addresses (public domain);
smollm2-vq.safetensors the codebooks of vq1, vq1.5 and vq2, fitted to 32,768 tokens in windows of
4,096, half of such addresses and half made up of their words (`lookup_text`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ..calibration import FILE_NAME, Calibration, Fitted, NuqTables
from ..calibration_file import CalibrationFile
from ..calibration_parts import NUQ, book_name, needed_parts
from ..errors import UnsupportedError
from ..generate import cache_geometry

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..kvstore import KVSpec
    from ..kvstore.codecs import Nuq, Vq, VqBooks
    from ..kvstore.grammar import Rope

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chosen:
    """What a format needs, each part from a calibration of its own."""

    of: Mapping[str, Calibration]

    def tables(self, layer: int, is_value: bool, codec: Nuq, rope: Rope = "post") -> NuqTables:
        return self.of[NUQ].tables(layer, is_value, codec, rope)

    def books(
        self, layer: int, is_value: bool, codec: Vq, rope: Rope = "post", had: bool = False
    ) -> VqBooks:
        found = self.of[book_name(codec, is_value, rope, had)]
        return found.books(layer, is_value, codec, rope, had)


class Calibrations:
    """The calibrations of one model: the file given, its folder's, kvrt's own.

    Each part that a format needs is taken from the first file that has it: the one given, then
    calibration.safetensors and the other calibration*.safetensors of the folder, then one that
    comes with kvrt. Without a folder (random weights) there are tables of the right size, fitted
    to nothing.
    """

    def __init__(
        self,
        folder: Path | None,
        given: str | None,
        config: ModelConfig,
        fingerprint: Callable[[], str],
    ):
        self._folder = folder
        self._given = given
        self._geometry = cache_geometry(config)
        self._make_fingerprint = fingerprint
        self._files: dict[Path, CalibrationFile] = {}
        self._read: dict[tuple[str, int], Calibration] = {}  # by part and stages
        self._told: set[str] = set()  # parts that the file given has not

    def get(self, spec: KVSpec) -> Fitted:
        """What a format needs; each part is opened and checked once.

        Raises UnsupportedError where some is missing or belongs to another model, and what
        `Calibration.open` raises.
        """
        if self._given is None and self._folder is None:
            return self._normal
        needed = needed_parts(spec, self._geometry)
        found = {part: self._find(part, stages) for part, stages in needed.items()}
        if missing := [part for part, one in found.items() if one is None]:
            raise UnsupportedError(self._advice(spec, missing))
        chosen = {part: one for part, one in found.items() if one is not None}
        if chosen and self._given is not None:
            self._tell(self._files[Path(self._given)], chosen)
        return Chosen(chosen)

    @cached_property
    def _normal(self) -> Fitted:
        from ..normal_tables import NormalTables

        return NormalTables(self._geometry, self._fingerprint)

    @cached_property
    def _fingerprint(self) -> str:
        return self._make_fingerprint()

    def _find(self, part: str, stages: int) -> Calibration | None:
        """A part, of the first file that has so many stages of it."""
        if (part, stages) not in self._read:
            for file in self._candidates():
                if file.parts.get(part, -1) >= stages:
                    self._read[part, stages] = file.read([part])
                    break
        return self._read.get((part, stages))

    def _tell(self, given: CalibrationFile, chosen: Mapping[str, Calibration]) -> None:
        """Say once of each part that it is not from the file given."""
        for part, one in chosen.items():
            if Path(one.where) == given.path or part in self._told:
                continue
            self._told.add(part)
            lacks = "too few stages of" if part in given.parts else "no"
            _log.warning("%s has %s %s: %s is used", self._given, lacks, part, one.where)

    def _candidates(self) -> Iterator[CalibrationFile]:
        """The files to look into, in turn; one of another model is refused, not passed over."""
        for path in self._own_paths():
            if path not in self._files:
                file = CalibrationFile.open(path)
                file.origin.check(self._fingerprint, self._geometry, str(path))
                self._files[path] = file
            yield self._files[path]
        for path in sorted(Path(__file__).parent.glob("*.safetensors")):
            shipped = self._files.get(path) or CalibrationFile.open(path)
            self._files[path] = shipped
            if shipped.origin.model_fingerprint == self._fingerprint:
                yield shipped

    def _own_paths(self) -> Iterator[Path]:
        if self._given is not None:
            yield Path(self._given)
        if self._folder is not None:
            own = self._folder / FILE_NAME
            others = sorted(set(self._folder.glob("calibration*.safetensors")) - {own})
            yield from ([own] if own.exists() else [])
            yield from others

    def _advice(self, spec: KVSpec, missing: list[str]) -> str:
        """The command that makes what is missing."""
        codec = "" if missing == [NUQ] else f" --codec {quote(str(spec))}"
        name = self._given
        if self._folder is not None:
            free = (
                path
                for number in range(1, 1000)
                if not (path := self._folder / _numbered(number)).exists()
            )
            name = str(next(free, self._folder / FILE_NAME))
        what = "" if missing == [NUQ] else f" with {', '.join(missing)}"
        what += "" if self._given is None else f", more than {self._given} has"
        return (
            f"this cache format needs a calibration of this model{what}; "
            f"`kvrt calibrate -m MODEL --text FILE{codec} -o {name}` makes one"
        )


def _numbered(number: int) -> str:
    return FILE_NAME if number == 1 else FILE_NAME.replace(".", f"-{number}.")
