"""q8_0 and q4_0: bit for bit the blocks that the gguf package makes, which are llama.cpp's."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from kvrt.backends.cpu import CpuOps
from tests.helpers import fragments
from tests.helpers.pages import SealedPage, sealed_page
from tests.helpers.stores import Geometry, Tokens, extend, new_store, read
from tests.helpers.tiles import TILES

TYPES = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}
HEADS = 2


def blocks_of(page: SealedPage, is_value: bool, head: int, name: str) -> np.ndarray:
    """The page's numbers as ggml lays them out: (64, bytes of a row) u8."""
    dim = page.layout.head_dim
    codes = page.codes(is_value, head).reshape(64, dim // 32, 32)
    meta = np.frombuffer(page.region("v_meta" if is_value else "k_meta", head), np.uint16)
    planes = meta.reshape(dim // 32, 64)
    scales = np.empty_like(planes)
    # The tokens of values are the depth of the product: in the order of lanes.
    scales[:, fragments.column_order(64, True) if is_value else np.arange(64)] = planes
    heads = np.ascontiguousarray(scales.T)[..., None].view(np.uint8)  # (64, blocks, 2)
    if name == "q8_0":
        body = (codes - 128).astype(np.int8).view(np.uint8)
    else:
        body = (codes[..., :16] | codes[..., 16:] << 4).astype(np.uint8)
    return np.concatenate([heads, body], axis=-1).reshape(64, -1)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("tile", TILES)
def test_blocks_are_those_of_gguf(ops: CpuOps, name: str, dim: int, tile: str) -> None:
    keys, values = TILES[tile](HEADS, dim, 1), TILES[tile](HEADS, dim, 2)
    page = sealed_page(ops, f"k={name},v={name}", keys, values)
    store = new_store(ops, f"k={name},v={name}", Geometry(1, HEADS, dim))
    extend(store, Tokens(keys[None], values[None]))
    for is_value, (numbers, got) in enumerate(zip((keys, values), read(store), strict=True)):
        for head in range(HEADS):
            rows = np.ascontiguousarray(numbers[:, head])
            want = quants.quantize(rows, TYPES[name])  # (64, bytes of a row) u8
            np.testing.assert_array_equal(blocks_of(page, bool(is_value), head, name), want)
            decoded = quants.dequantize(want, TYPES[name])
            np.testing.assert_array_equal(got[0, :, head], decoded)
