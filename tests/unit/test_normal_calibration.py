"""The tables that random weights get for `nuq`: right for normal numbers, and they say so."""

from pathlib import Path

import numpy as np
import pytest

from kvrt.calibrate import normal_calibration
from kvrt.calibration import ROPES, Calibration, expected_tensors
from kvrt.kvstore import Geometry
from kvrt.kvstore.codecs import Nuq
from kvrt.levels import optimal_levels, rounded

GEOMETRY = Geometry(num_layers=3, num_kv_heads=4, head_dim=64)

# Max 1960: what the best quantiser of 2^bits levels leaves of a normal distribution's variance.
LEAST_ERROR = {2: 0.1175, 3: 0.03454, 4: 0.009497}


@pytest.fixture(scope="module")
def found() -> Calibration:
    return normal_calibration("random weights", "ab" * 32, GEOMETRY)


def test_it_is_a_calibration_like_others(found: Calibration, tmp_path: Path) -> None:
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in found.tensors.items()}
    assert shapes == expected_tensors(GEOMETRY)
    found.check("ab" * 32, GEOMETRY)
    found.save(tmp_path / "c.safetensors")
    opened = Calibration.open(tmp_path / "c.safetensors")
    assert opened.fingerprint == found.fingerprint
    assert (opened.origin.tokens, opened.origin.texts) == (0, ())


def test_it_is_the_same_every_time(found: Calibration) -> None:
    assert normal_calibration("x", "cd" * 32, GEOMETRY).fingerprint == found.fingerprint


@pytest.mark.parametrize("bits", LEAST_ERROR)
@pytest.mark.parametrize("rope", ROPES)
def test_keys_lose_what_they_must(found: Calibration, bits: int, rope: str) -> None:
    tables = found.tables(1, False, Nuq(bits), rope)  # type: ignore[arg-type]
    assert tables.centre is not None and tables.half is not None
    keys = np.random.default_rng(bits).standard_normal((4096, 4, 64))
    places = (keys - tables.centre) / tables.half
    near = tables.levels[rounded(places, tables.levels)] * tables.half + tables.centre
    assert np.square(near - keys).mean() == pytest.approx(LEAST_ERROR[bits], rel=0.05)


def test_one_key_in_a_hundred_is_outside(found: Calibration) -> None:
    tables = found.tables(0, False, Nuq(2, True), "pre")
    assert tables.half is not None and tables.half == pytest.approx(2.576, rel=0.02)


@pytest.mark.parametrize("bits", LEAST_ERROR)
@pytest.mark.parametrize("outliers", [False, True])
def test_values_lose_little_more_than_they_must(
    found: Calibration, bits: int, outliers: bool
) -> None:
    """Beside the best table for these very tokens; their thresholds are each token's own."""
    codec = Nuq(bits, outliers)
    levels = found.tables(2, True, codec).levels
    tokens = np.random.default_rng(bits).standard_normal((2000, 4 * 64))
    ordered = np.sort(tokens, axis=1)
    outside = codec.value_slots(4, 64)
    low, high = ordered[:, outside, None], ordered[:, -1 - outside, None]
    inside = (tokens >= low) & (tokens <= high)
    half = np.broadcast_to((high - low) / 2, tokens.shape)[inside]
    numbers = ((tokens - (high + low) / 2) / ((high - low) / 2))[inside]
    best = optimal_levels(numbers, np.square(half), [2**bits])[2**bits]
    errors = [
        np.square((table[rounded(numbers, table)] - numbers) * half).mean()
        for table in (levels, best)
    ]
    assert errors[0] < errors[1] * 1.05
