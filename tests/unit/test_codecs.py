"""Every codec: its bytes, and what is lost of tiles that are easy and that are not."""

import json

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry
from kvrt.kvstore.layout import FORMAT_VERSION
from tests.helpers import golden_pages, intq_ref
from tests.helpers.compare import relative_rmse
from tests.helpers.pages import sealed_page
from tests.helpers.refs import hadamard_matrix
from tests.helpers.stores import Tokens, extend, new_store, read
from tests.helpers.tiles import TILES, gaussian, outlier_channels
from tests.helpers.tolerances import CODEC_ERRORS

GOLDEN = json.loads(golden_pages.PATH.read_text())
HEADS, DIM = 2, 64
FITTED = ("nuq", "pq", "rvq")
QUIET = np.arange(DIM) % 16 != 3  # the other channels of `outlier_channels`


def decoded(ops: CpuOps, side: str, tile: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A tile as keys and as values of a sealed page, read back: (64, heads, dim) f32 each."""
    values = "f16" if side.endswith(":norm") else side
    store = new_store(ops, f"k={side},v={values}", Geometry(1, *tile.shape[1:]))
    extend(store, Tokens(tile[None], tile[None]))
    assert store.stats().sealed_tokens == 64
    keys, numbers = read(store)
    return keys[0], numbers[0]


def test_the_golden_file_is_of_this_version_and_complete() -> None:
    assert GOLDEN["format_version"] == FORMAT_VERSION
    assert list(GOLDEN["sha256"]) == list(golden_pages.specs())


@pytest.mark.parametrize("spec", GOLDEN["sha256"])
def test_page_bytes_are_those_of_the_golden_file(ops: Ops, spec: str) -> None:
    """A change of a page's bytes must raise FORMAT_VERSION, or saved stores would be misread."""
    pages = golden_pages.pages(ops, spec, golden_pages.specs()[spec])
    assert golden_pages.page_hash(pages) == GOLDEN["sha256"][spec]


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_a_dense_page_holds_the_rows_of_k_then_of_v(ops: CpuOps, name: str) -> None:
    keys, values = gaussian(HEADS, DIM, 1), gaussian(HEADS, DIM, 2)
    page = sealed_page(ops, name, keys, values)
    dtype = page.layout.k.exact_dtype
    rows = [side[:, head].astype(dtype).tobytes() for head in range(2) for side in (keys, values)]
    assert page.data == b"".join(rows)


@pytest.mark.parametrize("side", CODEC_ERRORS)
def test_errors_are_within_their_bounds(ops: CpuOps, side: str) -> None:
    for name, bound in zip(("gaussian", "outlier_channels", "constant"), CODEC_ERRORS[side]):
        tile = TILES[name](HEADS, DIM, 3)
        for got in decoded(ops, side, tile):
            error = relative_rmse(got, tile)
            assert not error > bound, name
            assert name != "gaussian" or error >= 0.8 * bound  # a bound that says something


@pytest.mark.parametrize("options", ["channel:g32", "channel:g64:sym", "token:g32:hybrid"])
def test_more_bits_lose_less_of_the_gaussian_tile(ops: CpuOps, options: str) -> None:
    tile = gaussian(HEADS, DIM)
    errors = [relative_rmse(decoded(ops, f"int{b}:{options}", tile)[0], tile) for b in (2, 3, 4, 8)]
    assert errors[0] > 1.5 * errors[1] > 1.5**2 * errors[2] > 1.5**3 * errors[3]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_outlier_channels_hurt_the_others_along_a_token_only(ops: CpuOps, bits: int) -> None:
    """Why keys are grouped by channel, or divided by their channels' norm, or transformed."""
    tile = outlier_channels(HEADS, DIM)

    def error(side: str) -> float:
        return relative_rmse(decoded(ops, side, tile)[0][:, :, QUIET], tile[:, :, QUIET])

    along_channel, along_token = (error(f"int{bits}:{axis}:g32") for axis in ("channel", "token"))
    assert along_token > 8 * along_channel
    assert error(f"int{bits}:token:g32:sym:norm") < along_token / 2


@pytest.mark.parametrize("side", [side for side in CODEC_ERRORS if not side.startswith(FITTED)])
def test_zeros_stay_zeros(ops: CpuOps, side: str) -> None:
    for got in decoded(ops, side, np.zeros((64, HEADS, DIM), np.float32)):
        assert not got.any()


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 256])
def test_had_is_a_transform_along_each_head(ops: CpuOps, dim: int) -> None:
    """Codes are those of the tile times a dense matrix, but for ties that rounding decides."""
    block = dim & -dim
    keys, values = gaussian(HEADS, dim, 1), gaussian(HEADS, dim, 2)
    side = "int4:channel:g64:had"
    page = sealed_page(ops, f"k={side},v={side}", keys, values)
    for is_value, tile in enumerate((keys, values)):
        blocks = tile.astype(np.float64).reshape(64, HEADS, dim // block, block)
        inside = (blocks @ hadamard_matrix(block)).reshape(tile.shape)
        inside = inside.astype(np.float16).astype(np.float32)
        for head in range(HEADS):
            want = intq_ref.encode(inside[:, head], 4, "channel", 64, "asym")
            step = np.abs(page.codes(bool(is_value), head) - want.codes)
            assert step.max() <= 1 and (step > 0).mean() < 0.002
