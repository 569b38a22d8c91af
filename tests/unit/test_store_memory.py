"""Memory of a store: what it says equals what its arrays have, what was estimated, and theory."""

from typing import Any

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.backends.view import LAYER_SETTINGS
from kvrt.kvstore import Geometry, KVSpec, PageLayout, bits_per_element, estimate, fixed_bytes
from kvrt.kvstore.stats import sealed_pages, table_entries, tail_rows
from tests.helpers.codecs import GEOMETRY as PACKED_GEOMETRY
from tests.helpers.codecs import MATRIX
from tests.helpers.stores import (
    GEOMETRY,
    PLAIN_SPECS,
    Tokens,
    arrays,
    assert_holds,
    contents,
    extend,
    new_store,
    random_tokens,
)

TOKENS = random_tokens(1000)
LONG = random_tokens(8192, Geometry(1, 2, 64))
SETTINGS_BYTES = 2 * LAYER_SETTINGS * 8


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("spec", MATRIX)
def test_stats_are_the_arrays_and_the_estimate(ops: CpuOps, spec: str, biased: bool) -> None:
    parsed, geometry = KVSpec.parse(spec), Geometry(2, 2, 64, key_bias=biased)
    bias = [ops.to_device(np.ones((2, 64), "f4")) for _ in range(2)] if biased else None
    edge = parsed.sink + parsed.window
    store = new_store(ops, spec, geometry, key_bias=bias)
    assert store.stats().bytes == fixed_bytes(geometry, parsed)
    both = Tokens(*(np.repeat(side, 2, axis=0) for side in LONG))
    for length in sorted({0, 1, parsed.sink, edge, edge + 63, edge + 64, 1000, 8192}):
        if length > len(store):
            extend(store, both.part(len(store), length))
        stats = store.stats()
        held = sum(array.nbytes for array in arrays(store))
        assert stats.bytes == held == estimate(geometry, parsed, length)
        assert stats.tokens == length
        assert stats.sealed_tokens == max(0, length - edge) // 64 * 64
        assert stats.sealed_tokens + parsed.sink + tail_rows(parsed) >= length
        assert stats.bits_per_element == bits_per_element(geometry, parsed)


THEORY = {
    "f32": 32,
    "f16": 16,
    "bf16": 16,
    "f8": 8,
    "f8e5m2": 8,
    "q8_0": 8 + 16 / 32,
    "q4_0": 4 + 16 / 32,
    "kivi4": 4 + 2 * 16 / 32,
    "kivi2": 2 + 2 * 16 / 32,
    "kvrt4": 4 + 2 * 16 / 64,
    "kvrt3": 3 + 2 * 16 / 64,
    "kvrt2": (3 + 2) / 2 + 2 * 16 / 64,
    "innerq": 3 + 16 / 32,
    "innerq-small": (3 + 2) / 2 + 16 / 32,
    "innerq-hybrid": (3 + 16 / 32 + 2 + 2 * 16 / 32) / 2,
}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("spec", THEORY)
def test_bits_of_the_presets_at_8192_tokens_are_those_of_theory(
    ops: CpuOps, spec: str, dim: int
) -> None:
    """Of the bytes that pages really take: codes, scales and minima over keys and values."""
    geometry = Geometry(1, 2, dim)
    store = new_store(ops, spec, geometry)
    extend(store, Tokens(*(np.tile(side, dim // 64) for side in LONG)))
    stats = store.stats()
    assert stats.sealed_tokens == 8192 - (store.spec.sink + store.spec.window + 63) // 64 * 64
    measured = stats.page_bytes * 8 / (stats.sealed_tokens * 2 * 2 * dim)
    assert measured == THEORY[spec] == stats.bits_per_element


def test_bytes_of_nuq() -> None:
    """8 heads of 64 channels, 2 bits: thresholds of values; 1 % of keys and values kept exact."""
    codes = 64 * 64 * 2 // 8
    layout = PageLayout.of(Geometry(1, 8, 64), KVSpec.parse("kvquant2"))
    assert layout.page_bytes == 8 * 2 * codes + 64 * 2 * 2
    layout = PageLayout.of(Geometry(1, 8, 64), KVSpec.parse("kvquant2:1%"))
    kept_keys, kept_values = 41 * 4, 2 * 3 * 4  # of 4,096 keys a head, of 512 values a token
    assert layout.run_bytes == -(-(2 * codes + kept_keys + 12) // 128) * 128
    assert layout.page_bytes == 8 * layout.run_bytes + 64 * (2 * 2 + kept_values)


def test_the_estimate_in_numbers() -> None:
    """128 bytes a token in f16; 1,000 tokens after 4 sinks and a window of 100 seal 14 pages."""
    spec = KVSpec.parse("k=f16,v=f16,sink=4,window=100")
    pages, tail, sinks, table = 14 * 64 * 128, 192 * 128, 4 * 128, 16 * 8
    assert estimate(GEOMETRY, spec, 1000) == pages + tail + sinks + table + SETTINGS_BYTES
    one = 64 * 256 + 64 * 256 + table + SETTINGS_BYTES
    assert estimate(GEOMETRY, KVSpec.parse("f32"), 64) == one


@pytest.mark.parametrize(
    ("pages", "entries"), [(0, 16), (1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (1000, 1024)]
)
def test_the_page_table_doubles(pages: int, entries: int) -> None:
    assert table_entries(pages) == entries


def test_the_page_table_grows_and_shrinks_with_the_tokens(ops: CpuOps) -> None:
    """16 pages, 17, 33, and back; what is kept stays readable at every size of the table."""
    tokens = random_tokens(33 * 64)
    store = new_store(ops)
    for length in (16 * 64, 17 * 64, 33 * 64):
        extend(store, tokens.part(len(store), length))
        assert store.stats().table_bytes == 8 * table_entries(length // 64) + SETTINGS_BYTES
        assert_holds(store, tokens.part(0, length))
    for length in (32 * 64, 17 * 64 - 1, 5, 0):
        store.truncate(length)
        assert store.stats().bytes == estimate(GEOMETRY, store.spec, length)
        assert_holds(store, tokens.part(0, length))


def test_a_limit_is_not_an_allocation(ops: CpuOps) -> None:
    small, large = new_store(ops, max_tokens=1), new_store(ops, max_tokens=1 << 40)
    assert small.stats().bytes == large.stats().bytes


@pytest.mark.parametrize("spec", PLAIN_SPECS)
def test_sealed_pages_formula(spec: str) -> None:
    parsed = KVSpec.parse(spec)
    for length in range(400):
        expected = max(0, (length - parsed.sink - parsed.window) // 64)
        assert sealed_pages(parsed, length) == expected


@pytest.mark.parametrize("geometry", [PACKED_GEOMETRY, Geometry(2, 3, 64)], ids=str)
@pytest.mark.parametrize("spec", MATRIX)
def test_no_byte_of_a_page_is_left_undefined(
    ops: CpuOps, monkeypatch: pytest.MonkeyPatch, spec: str, geometry: Geometry
) -> None:
    """Padding too: saved stores and comparisons are of whole pages."""
    found, plain = [], CpuOps.empty
    for rubbish in (0, 85, 255):

        def empty(*arguments: Any, fill: int = rubbish, **options: Any) -> Any:
            array = plain(*arguments, **options)
            array.reshape(-1).view(np.uint8)[...] = fill
            return array

        with monkeypatch.context() as patch:
            patch.setattr(CpuOps, "empty", empty)
            store = new_store(ops, spec, geometry)
            extend(store, random_tokens(330, geometry))
        found.append(contents(store))
    assert found[0] == found[1] == found[2]
