"""PageLayout: where the bytes of a page are; and the bytes themselves, kept as golden hashes."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry, KVSpec, PageLayout, bits_per_element, bytes_per_token
from kvrt.kvstore.codecs import CODECS
from kvrt.kvstore.layout import FORMAT_VERSION, RUN_ALIGNMENT
from tests.helpers.stores import Tokens, extend, new_store

GOLDEN = Path(__file__).parent.parent / "golden" / "pages.json"
GEOMETRIES = [Geometry(1, 1, 1), Geometry(2, 3, 5), Geometry(1, 4, 33), Geometry(2, 2, 64)]
SPECS = [f"k={k},v={v}" for k in CODECS for v in CODECS]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("page_tokens", [64, 3])  # 3: dense rows that do not fill 128 bytes
def test_regions_are_in_order_disjoint_aligned_and_inside(
    geometry: Geometry, spec: str, page_tokens: int
) -> None:
    parsed = KVSpec.parse(spec)
    heads, dim = geometry.num_kv_heads, geometry.head_dim
    layout = PageLayout(parsed.k, parsed.v, heads, dim, page_tokens)
    assert [region.name for region in layout.regions] == ["k_codes", "k_meta", "v_codes", "v_meta"]
    assert layout.regions[0].offset == 0
    for region, following in pairwise(layout.regions):
        assert region.offset + region.nbytes <= following.offset
    last = layout.regions[-1]
    assert last.offset + last.nbytes <= layout.run_bytes
    for region, codec in zip(layout.regions[::2], (parsed.k, parsed.v), strict=True):
        assert page_tokens == 3 or region.offset % codec.exact_dtype.itemsize == 0
    assert layout.run_bytes % RUN_ALIGNMENT == 0
    assert layout.run_bytes - (last.offset + last.nbytes) < RUN_ALIGNMENT
    assert layout.page_bytes == heads * layout.run_bytes
    sizes = [region.nbytes for region in layout.regions]
    rows = page_tokens * dim
    assert sizes == [
        rows * parsed.k.exact_dtype.itemsize,
        0,
        rows * parsed.v.exact_dtype.itemsize,
        0,
    ]
    assert layout.bits_per_element == layout.page_bytes * 8 / (2 * rows * heads)


def test_a_layout_is_made_from_a_geometry_and_a_format() -> None:
    spec = KVSpec.parse("k=f32,v=bf16")
    assert PageLayout.of(Geometry(9, 3, 5), spec) == PageLayout(spec.k, spec.v, 3, 5, 64)


@pytest.mark.parametrize("spec", SPECS)
def test_settings_say_where_the_regions_are_and_what_they_hold(spec: str) -> None:
    parsed = KVSpec.parse(spec)
    layout = PageLayout.of(Geometry(1, 2, 7), parsed)
    settings = layout.settings
    assert settings.shape == (16,) and settings.dtype == np.int64
    assert settings[:4].tolist() == [region.offset for region in layout.regions]
    assert settings[4] == parsed.k.settings()[0] and settings[8] == parsed.v.settings()[0]


@pytest.mark.parametrize(
    ("spec", "bits"), [("f32", 32), ("f16", 16), ("bf16", 16), ("k=f32,v=f16", 24)]
)
@pytest.mark.parametrize("head_dim", [1, 33, 64, 80])
def test_dense_bits_are_the_nominal_bits(spec: str, bits: int, head_dim: int) -> None:
    geometry = Geometry(3, 2, head_dim)
    assert bits_per_element(geometry, KVSpec.parse(spec)) == bits
    assert bytes_per_token(geometry, KVSpec.parse(spec)) == 3 * 2 * 2 * head_dim * bits / 8


def golden_tokens() -> tuple[Geometry, Tokens]:
    """One page of numbers made by integer arithmetic, so that they never change."""
    geometry = Geometry(num_layers=1, num_kv_heads=2, head_dim=4)
    count = 2 * 64 * 2 * 4
    scattered = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    numbers = (scattered.astype(np.float64) / 2**32 * 8 - 4).astype(np.float32)  # (count,)
    # Where rounding shows: ties to even, subnormal, smallest, largest, signed zero, infinity.
    numbers[:12] = [
        1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 2**-24, 2**-25, -(2**-26),
        65504.0, 65519.0, -0.0, np.inf, -np.inf,
    ]  # fmt: skip
    keys, values = numbers.reshape(2, 1, 64, 2, 4)
    return geometry, Tokens(keys, values)


@pytest.mark.parametrize("name", CODECS)
def test_page_bytes_are_those_of_the_golden_file(ops: Ops, name: str) -> None:
    """A change of a page's bytes must raise FORMAT_VERSION, or saved stores would be misread."""
    golden = json.loads(GOLDEN.read_text())
    geometry, tokens = golden_tokens()
    store = new_store(ops, name, geometry)
    extend(store, tokens)
    (page,) = (ops.to_host(slab).tobytes() for slab in store._pages[0])
    assert golden["format_version"] == FORMAT_VERSION
    assert hashlib.sha256(page).hexdigest() == golden["sha256"][name]
    # The dense page in words: for each head the rows of K, then the rows of V.
    rows = [
        side[0, :, head].astype(CODECS[name].exact_dtype).tobytes()
        for head in range(geometry.num_kv_heads)
        for side in tokens
    ]
    assert page == b"".join(rows)
