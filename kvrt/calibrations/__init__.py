"""Where a model's calibration is found, and the calibrations that come with kvrt.

smollm2.safetensors is of SmolLM2-135M-Instruct as `kvrt pull smollm2` makes it, fitted on State of
the Union addresses (public domain).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..calibration import FILE_NAME, Calibration
from ..errors import UnsupportedError
from ..fingerprint import model_fingerprint
from ..generate import cache_geometry

if TYPE_CHECKING:
    from ..config import ModelConfig


class Calibrations:
    """The calibration of one model: the file given, else its folder's, else one of kvrt's own."""

    def __init__(
        self,
        folder: Path,
        given: str | None,
        config: ModelConfig,
        weights: Mapping[str, np.ndarray],
    ):
        self._folder = folder
        self._given = given
        self._config = config
        self._weights = weights

    def get(self) -> Calibration:
        """Open and check it, once.

        Raises UnsupportedError where there is none or it belongs to another model, and what
        `Calibration.open` raises.
        """
        return self._found

    @cached_property
    def _found(self) -> Calibration:
        fingerprint = model_fingerprint(self._config, self._weights)
        own = self._folder / FILE_NAME
        if self._given is not None or own.exists():
            found = Calibration.open(Path(self._given) if self._given is not None else own)
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
