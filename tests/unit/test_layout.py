"""PageLayout: where the bytes of a page are, how many, and what kernels are told."""

from itertools import pairwise

import pytest

from kvrt.backends import view
from kvrt.kvstore import Geometry, KVSpec, PageLayout, bits_per_element, bytes_per_token
from kvrt.kvstore.layout import FORMAT_VERSION, RUN_ALIGNMENT
from tests.helpers.codecs import GEOMETRY, MATRIX, fits

GEOMETRIES = [
    Geometry(1, 1, 1),
    Geometry(2, 3, 5),
    Geometry(1, 4, 33),
    Geometry(2, 2, 64),
    Geometry(2, 3, 80),
    Geometry(2, 5, 96),
    Geometry(2, 1, 112),
    Geometry(2, 8, 128),
    Geometry(2, 7, 256),
]
FLOATS = {"f32": 4, "f16": 2, "bf16": 2}
FLOAT_SPECS = [f"k={k},v={v}" for k in FLOATS for v in FLOATS]


@pytest.mark.parametrize("spec", [*FLOAT_SPECS, *MATRIX])
def test_regions_are_in_order_disjoint_aligned_and_inside(spec: str) -> None:
    tried = 0
    for geometry in GEOMETRIES:
        if fits(spec, geometry):
            tried += 1
            for layer in range(geometry.num_layers):
                check_regions(PageLayout.of(geometry, KVSpec.parse(spec), layer))
    assert tried > 1


def check_regions(layout: PageLayout) -> None:
    names = [region.name for region in layout.regions]
    assert names == ["k_codes", "k_meta", "v_codes", "v_meta"]
    assert [region.name for region in layout.shared_regions] == ["k_shared", "v_shared"]
    ends = []
    for regions in (layout.regions, layout.shared_regions):
        assert regions[0].offset == 0
        assert all(region.offset % 16 == 0 and region.nbytes >= 0 for region in regions)
        for region, following in pairwise(regions):
            assert 0 <= following.offset - (region.offset + region.nbytes) < 16
        ends.append(regions[-1].offset + regions[-1].nbytes)
    shared = layout.page_bytes - layout.num_kv_heads * layout.run_bytes
    for size, end in zip((layout.run_bytes, shared), ends, strict=True):
        assert size % RUN_ALIGNMENT == 0 and 0 <= size - end < RUN_ALIGNMENT
    elements = 2 * 64 * layout.num_kv_heads * layout.head_dim
    assert layout.bits_per_element == layout.page_bytes * 8 / elements
    floor = sum(codec.code_bytes(layout.head_dim) for codec in layout.codecs)
    assert layout.page_bytes >= layout.num_kv_heads * floor


@pytest.mark.parametrize("k", FLOATS)
@pytest.mark.parametrize("v", FLOATS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_floats_take_what_floats_take(geometry: Geometry, k: str, v: str) -> None:
    layout = PageLayout.of(geometry, KVSpec.parse(f"k={k},v={v}"))
    rows = 64 * geometry.head_dim
    sizes = [region.nbytes for region in layout.regions]
    assert sizes == [rows * FLOATS[k], 0, rows * FLOATS[v], 0]


@pytest.mark.parametrize(
    ("side", "codes", "meta"),
    # Bytes of the 64 x 64 numbers of a head: codes; scales and minima, 2 bytes each.
    [
        ("int2:channel:g32", 1024, 64 * 2 * 4),
        ("int3:channel:g64", 1536, 64 * 1 * 4),
        ("int4:token:g32", 2048, 64 * 2 * 4),
        ("int8:token:g64:hybrid", 4096, 64 * 1 * 4),
        ("int3:token:g32:sym", 1536, 64 * 2 * 2),
        ("q8_0", 4096, 64 * 2 * 2),
        ("q4_0", 2048, 64 * 2 * 2),
        ("e4m3", 4096, 0),
        ("e5m2", 4096, 0),
    ],
)
def test_packed_sides_take_codes_scales_and_minima(side: str, codes: int, meta: int) -> None:
    layout = PageLayout.of(GEOMETRY, KVSpec.parse(f"k={side},v={side}"))
    assert [region.nbytes for region in layout.regions] == [codes, meta, codes, meta]
    assert [region.nbytes for region in layout.shared_regions] == [0, 0]


def test_a_layout_is_made_from_a_geometry_a_format_and_a_layer() -> None:
    spec = KVSpec.parse("k=f32,v=bf16,layers[2-3]=q8_0")
    k, v = (side.codec for side in spec.sides(0))
    assert PageLayout.of(Geometry(9, 3, 32), spec) == PageLayout(k, v, 3, 32)
    other = PageLayout.of(Geometry(9, 3, 32), spec, 3)
    assert (other.k.name, other.v.name) == ("q8_0", "q8_0")


@pytest.mark.parametrize("spec", MATRIX)
def test_settings_say_where_the_regions_are(spec: str) -> None:
    layout = PageLayout.of(GEOMETRY, KVSpec.parse(spec))
    for is_value in (False, True):
        settings = layout.side_settings(is_value)
        codes, meta = layout.regions[2 * is_value : 2 * is_value + 2]
        codec = layout.codecs[is_value]
        assert settings[view.CODEC] == codec.number
        assert settings[view.CODES] == codes.offset and settings[view.META] == meta.offset
        assert settings[view.SHARED] == layout.shared_regions[is_value].offset
        assert settings[view.OWN :] == list(codec.settings(is_value, 2, 64))
        assert len(settings) <= view.STATE  # behind them come addresses


@pytest.mark.parametrize("spec", MATRIX)
def test_defines_are_numbers_of_the_layout(spec: str) -> None:
    layout = PageLayout.of(GEOMETRY, KVSpec.parse(spec))
    defines = layout.defines()
    assert defines["FORMAT_VERSION"] == FORMAT_VERSION == 3
    assert defines["V_CODES_OFFSET"] == layout.regions[2].offset
    assert (defines["RUN_BYTES"], defines["PAGE_BYTES"]) == (layout.run_bytes, layout.page_bytes)
    assert (defines["HEAD_DIM"], defines["NUM_KV_HEADS"], defines["PAGE_TOKENS"]) == (64, 2, 64)
    assert all(name.isupper() and type(value) is int for name, value in defines.items())


@pytest.mark.parametrize(
    ("spec", "bits"), [("f32", 32), ("f16", 16), ("bf16", 16), ("k=f32,v=f16", 24)]
)
@pytest.mark.parametrize("head_dim", [1, 33, 64, 80])
def test_dense_bits_are_the_nominal_bits(spec: str, bits: int, head_dim: int) -> None:
    geometry = Geometry(3, 2, head_dim)
    assert bits_per_element(geometry, KVSpec.parse(spec)) == bits
    assert bytes_per_token(geometry, KVSpec.parse(spec)) == 3 * 2 * 2 * head_dim * bits / 8


def test_bits_of_layers_that_differ_are_their_mean() -> None:
    spec = KVSpec.parse("kvrt4,layers[1-2]=f16")
    assert bits_per_element(Geometry(4, 2, 64), spec) == (4.5 + 16) / 2
