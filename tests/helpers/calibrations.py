"""A calibration made by hand, of small fractions, so that what lies midway is exact."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvrt.calibration import Calibration, Origin, expected_tensors
from kvrt.calibration_parts import books_of
from kvrt.errors import KvrtError
from kvrt.kvstore import Geometry
from tests.helpers.codecs import scattered_order

MODEL = "ab" * 32
"""The fingerprint of the model that it says it is of."""


def calibration_by_hand(
    geometry: Geometry, *, seed: int = 0, model: str = MODEL, **tensors: np.ndarray
) -> Calibration:
    """Every tensor of a calibration for numbers of unit spread; `tensors` replace some of them.

    Levels are multiples of 1/64 from -1 to 1, no two tables alike; thresholds of keys lie about 2
    from zero. In a name given as a keyword `__` stands for a dot and `pct` for the percent sign.
    """
    rng = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    for name, (shape, dtype) in expected_tensors(geometry).items():
        if name.endswith("levels"):
            rows = [
                np.sort(rng.choice(np.arange(-64, 65), shape[1], replace=False))
                for _ in range(shape[0])
            ]
            tensor = np.stack(rows) / 64  # (layers, 2^bits)
        elif name.endswith("sensitivity"):
            tensor = rng.random(shape)
        else:
            sign = 1 if name.endswith(".high") else -1
            tensor = sign * (2 + rng.integers(-32, 33, shape) / 64)
        made[name] = tensor.astype(dtype)
    for key, tensor in tensors.items():
        name = key.replace("__", ".").replace("pct", "%")
        assert made[name].shape == tensor.shape
        made[name] = tensor.astype(made[name].dtype)
    origin = Origin("by-hand", model, geometry, ("cd" * 32,), 4096)
    return Calibration(origin, made)


def books_by_hand(
    geometry: Geometry, parts: Mapping[str, int], *, seed: int = 0, model: str = MODEL
) -> Calibration:
    """Codebooks alone: `parts` by name, each of so many stages, for numbers of unit spread."""
    rng = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    for name, stages in parts.items():
        books = books_of(name, stages)
        assert books is not None
        for tensor, (shape, dtype) in books.tensors(geometry).items():
            if tensor.endswith(".order"):
                rows = [scattered_order(shape[-1], int(start)) for start in rng.integers(0, 99, 64)]
                found = np.stack(rows)[rng.integers(0, len(rows), shape[:-1])]
            else:
                found = rng.standard_normal(shape) / 2
                found = np.exp(found) if tensor.endswith(".scale") else found
            made[tensor] = found.astype(dtype)
    origin = Origin("by-hand", model, geometry, ("cd" * 32,), 4096)
    return Calibration(origin, made)


def rewrite(path: Path, tensors: Mapping[str, np.ndarray], **header: str | None) -> None:
    """Write a calibration's file again with other tensors and metadata; None leaves one out."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        old: dict[str, str] = file.metadata()
    new = {key: value for key, value in (old | header).items() if value is not None}
    save_file(dict(tensors), path, metadata=new)


def assert_refused(kind: type[KvrtError], path: Path, said: str) -> None:
    """Opening fails with just this class and one line that names the file."""
    with pytest.raises(KvrtError) as caught:
        Calibration.open(path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    assert re.search(said, message), message
