"""Where a model's calibration is found, and the calibrations that come with kvrt.

smollm2.safetensors is of SmolLM2-135M-Instruct as `kvrt pull smollm2` makes it, fitted on State of
the Union addresses (public domain).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..calibration import FILE_NAME, Calibration
from ..errors import UnsupportedError
from ..generate import cache_geometry

if TYPE_CHECKING:
    from ..config import ModelConfig


class Calibrations:
    """The calibration of one model: the file given, else its folder's, else one of kvrt's own.

    Without a folder (random weights) it is one for normally distributed numbers: tables of the
    right size, fitted to nothing.
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
        self._config = config
        self._fingerprint = fingerprint

    def get(self) -> Calibration:
        """Open and check it, once.

        Raises UnsupportedError where there is none or it belongs to another model, and what
        `Calibration.open` raises.
        """
        return self._found

    @cached_property
    def _found(self) -> Calibration:
        own = None if self._folder is None else self._folder / FILE_NAME
        path = own if self._given is None else Path(self._given)
        if path is None:
            from ..calibrate import normal_calibration

            geometry = cache_geometry(self._config)
            return normal_calibration("random weights", self._fingerprint(), geometry)
        fingerprint = self._fingerprint()
        if self._given is not None or path.exists():
            found = Calibration.open(path)
            found.check(fingerprint, cache_geometry(self._config))
            return found
        for path in sorted(Path(__file__).parent.glob("*.safetensors")):
            shipped = Calibration.open(path)
            if shipped.model_fingerprint == fingerprint:
                return shipped
        raise UnsupportedError(
            "this cache format needs a calibration of this model; "
            f"`kvrt calibrate -m MODEL --text FILE -o {own}` makes one"
        )
