"""The CUDA kernels of attention over pages of rvq, emulated, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvrt.backends import cuda_rvq
from kvrt.backends import view as place
from kvrt.backends.cuda import CudaOps
from kvrt.backends.cuda_rvq import rvq_defines
from kvrt.errors import UnsupportedError
from tests.emulator import COMPILER
from tests.helpers.emulated_device import emulated_ops
from tests.helpers.rvq_layer import RvqLayer, RvqSide, make_layer

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

SMALL = RvqSide(4, 8), RvqSide(2, 8)
"""As few sums as a test of anything else can do with."""


@pytest.fixture(scope="module")
def cuda() -> CudaOps:
    return emulated_ops()


@pytest.fixture(scope="module", params=[False, True], ids=["threads", "engine"])
def copying(request: pytest.FixtureRequest) -> CudaOps:
    """Tables are copied by threads, as before sm_90, or by the copy engine."""
    return emulated_ops(bulk=request.param)


@pytest.fixture
def few_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaOps]:
    """Warps have two pages' scores at a time."""
    whole = cuda_rvq._variant

    def short(settings: bytes, shared: int) -> dict[str, Any]:
        defines = whole(settings, shared)
        return {**defines, "WARP_PAGES": 2, "SHARED_BYTES": defines["SHARED_BYTES"] - 16 * 6 * 8}

    monkeypatch.setattr(cuda_rvq, "_variant", short)
    yield emulated_ops()


def attend(
    ops: CudaOps, layer: RvqLayer, group: int, window: int | None = None, spread: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernels give, and what is expected: (heads, dim)."""
    heads, dim = group * layer.view.num_kv_heads, layer.view.head_dim
    q = np.random.default_rng(heads).normal(0, spread, (heads, dim)).astype(np.float32)
    out = np.full((heads, dim), np.nan, np.float32)
    ops.attend(q, layer.view, dim**-0.5, window, out)
    assert all(not held.any() for (name, _), held in ops._buffers.items() if "arrivals" in name)
    return out, layer.expected(q, dim**-0.5, window)


def check(out: np.ndarray, expected: np.ndarray) -> None:
    """What entries are worth, and weights, are halves (11 bits)."""
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error < 2e-3


@pytest.mark.parametrize(
    ("dim", "k", "v"),
    [
        (64, RvqSide(4, 8), RvqSide(2, 8)),
        (128, RvqSide(24, 9), RvqSide(16, 9)),  # two quads in a block, twice
        (64, RvqSide(28, 10), RvqSide(8, 9)),  # three in a block
        (128, RvqSide(4, 10), RvqSide(9, 10)),  # two histograms, the second of a book
        (64, RvqSide(5, 10), RvqSide(17, 8)),  # books that make up no quad
        (64, RvqSide(3, 9), RvqSide(1, 10)),
        (64, RvqSide(18, 8), RvqSide(12, 9)),
    ],
)
def test_shapes(cuda: CudaOps, dim: int, k: RvqSide, v: RvqSide) -> None:
    check(*attend(cuda, make_layer(cuda, 2, dim, k, v, 5), 3))


@pytest.mark.parametrize("group", range(1, 9))
def test_groups(cuda: CudaOps, group: int) -> None:
    check(*attend(cuda, make_layer(cuda, 3, 64, *SMALL, 3), group))


def test_more_heads_than_columns_at_once(cuda: CudaOps) -> None:
    check(*attend(cuda, make_layer(cuda, 10, 64, *SMALL, 1), 4))


@pytest.mark.parametrize("had", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dim", [64, 128])
def test_transformed_sides(cuda: CudaOps, dim: int, had: tuple[bool, bool]) -> None:
    check(*attend(cuda, make_layer(cuda, 2, dim, *SMALL, 3, had=had), 2))


@pytest.mark.parametrize(
    ("pages", "sinks", "tail"),
    [
        (0, 4, 0),  # sinks alone
        (0, 1, 0),
        (0, 4, 1),
        (1, 4, 0),
        (1, 0, 1),
        (3, 4, 64),
        (4, 4, 65),
        (70, 4, 200),  # more pages than warps
    ],
)
def test_lengths(copying: CudaOps, pages: int, sinks: int, tail: int) -> None:
    layer = make_layer(copying, 1, 64, *SMALL, pages, sinks=sinks, tail=tail)
    check(*attend(copying, layer, 4))


def test_no_tokens(cuda: CudaOps) -> None:
    layer = make_layer(cuda, 1, 64, *SMALL, 0, sinks=0, tail=0)
    out = np.full((4, 64), 7, np.float32)
    cuda.attend(np.ones((4, 64), np.float32), layer.view, 1.0, None, out)
    assert (out == 7).all()


def test_a_ring_that_wraps(cuda: CudaOps) -> None:
    check(*attend(cuda, make_layer(cuda, 2, 64, *SMALL, 2, tail=100, slot=128), 4))


def test_exact_tokens_of_16_bit_brain_floats(cuda: CudaOps) -> None:
    check(*attend(cuda, make_layer(cuda, 2, 64, *SMALL, 2, tail=130, bfloats=True), 4))


@pytest.mark.parametrize("window", [1, 30, 71, 100, 134, 200, 326, 330, 331, 1000])
def test_windows(cuda: CudaOps, window: int) -> None:
    check(*attend(cuda, make_layer(cuda, 2, 64, *SMALL, 4), 4, window))


@pytest.mark.parametrize("v", [RvqSide(2, 8), RvqSide(9, 10)])
@pytest.mark.parametrize("pages", [33, 64, 97, 150])
def test_more_pages_than_find_room(few_pages: CudaOps, pages: int, v: RvqSide) -> None:
    layer = make_layer(few_pages, 4, 64, RvqSide(4, 8), v, pages)
    check(*attend(few_pages, layer, 2))


@pytest.mark.parametrize("spread", [0.0, 1e-20, 0.1, 10.0])
def test_flat_and_sharp_scores(few_pages: CudaOps, spread: float) -> None:
    """Maxima differ by more than an exponential holds."""
    out, expected = attend(few_pages, make_layer(few_pages, 2, 64, *SMALL, 80), 4, None, spread)
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < 1e-3 * max(spread, 1)


@pytest.mark.parametrize("sizes", [(1e-3, 1e3), (30.0, 1e-2)])
def test_sizes_of_numbers(cuda: CudaOps, sizes: tuple[float, float]) -> None:
    """Queries make up for those of keys."""
    layer = make_layer(cuda, 2, 64, *SMALL, 5, sizes=sizes)
    check(*attend(cuda, layer, 4, None, min(1 / sizes[0], 1.0)))


def test_many_equal_weights(few_pages: CudaOps) -> None:
    """Their sum is not held back by rounding, however many there are."""
    layer = make_layer(few_pages, 1, 64, *SMALL, 300, tail=1)
    out, expected = attend(few_pages, layer, 1, None, 0.0)
    check(out, expected)


def test_a_nan_shows(cuda: CudaOps) -> None:
    """In the heads that are looked up together."""
    for pages in (0, 3):
        layer = make_layer(cuda, 2, 64, *SMALL, pages)
        q = np.ones((4, 64), np.float32)
        q[1, 5] = np.nan
        out = np.zeros((4, 64), np.float32)
        cuda.attend(q, layer.view, 0.125, None, out)
        assert np.isnan(out[1]).all() and np.isfinite(out[2:]).all()


def test_the_tail_grows_while_launches_stay_the_same(cuda: CudaOps) -> None:
    layer = make_layer(cuda, 2, 64, *SMALL, 3, tail=90)
    keys, values = layer.keys, layer.values
    for tail in (1, 63, 64, 65, 90):
        layer.view.extent.tail_tokens = tail
        layer.keys, layer.values = (rows[: len(rows) - 90 + tail] for rows in (keys, values))
        check(*attend(cuda, layer, 4))


def settings_of(cuda: CudaOps, k: RvqSide, v: RvqSide, dim: int = 64) -> list[int]:
    settings: list[int] = make_layer(cuda, 1, dim, k, v, 0).view.settings.tolist()
    return settings


def test_what_is_refused(cuda: CudaOps) -> None:
    settings = settings_of(cuda, *SMALL)
    for name, value in (
        (place.FORM, place.PRE),
        (place.KEY_BIAS, 64),
        (place.DIM, 80),
        (place.KEY_KIND, 0),
    ):
        changed = list(settings)
        changed[name] = value
        with pytest.raises(UnsupportedError, match="on a GPU"):
            rvq_defines(changed, 227 * 1024)
    with pytest.raises(UnsupportedError, match="1024 entries"):
        rvq_defines(settings_of(cuda, RvqSide(1, 11), RvqSide(1, 8)), 227 * 1024)
    with pytest.raises(UnsupportedError, match=r"rvq4x1024 needs .* this GPU has 101,376"):
        rvq_defines(settings_of(cuda, RvqSide(4, 10), RvqSide(2, 8)), 99 * 1024)


def test_the_main_format_fits_from_sm_80_on(cuda: CudaOps) -> None:
    settings = settings_of(cuda, RvqSide(56, 10), RvqSide(16, 9), 128)
    assert rvq_defines(settings, 163 * 1024)["SHARED_BYTES"] < 163 * 1024
