"""The written form of formats that compress prompts."""

from fractions import Fraction

import pytest

from kvrt.errors import CodecError, UnsupportedError, UsageError
from kvrt.kvstore import Geometry, KVSpec, KVStore
from kvrt.kvstore.compression import Compression


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rdkv:1024", Compression("rdkv", 1024)),
        ("rdkv:0", Compression("rdkv", 0)),
        ("rdkv:paper:512", Compression("rdkv", 512, paper=True)),
        ("rdkv:512:paper", Compression("rdkv", 512, paper=True)),
        ("rdkv:2.5%", Compression("rdkv", Fraction(1, 40))),
        ("h2o:100%", Compression("h2o", Fraction(1))),
        ("snapkv:12.345678%", Compression("snapkv", Fraction("0.12345678"))),
        (" adakv : 64 ", Compression("adakv", 64)),
        ("rdkv:64:shared", Compression("rdkv", 64, shared=True)),
        ("rdkv:64,recompress=100", Compression("rdkv", 64, recompress=100)),
    ],
)
def test_formats_are_read_and_printed_so_that_they_are_read_again(
    text: str, expected: Compression
) -> None:
    spec = KVSpec.parse(text)
    assert spec.compression == expected
    assert (spec.sink, spec.window) == (4, 32)
    assert KVSpec.parse(str(spec)) == spec


def test_sinks_and_window_can_be_chosen() -> None:
    spec = KVSpec.parse("rdkv:64,sink=0,window=100")
    assert (spec.sink, spec.window) == (0, 100)
    assert str(spec) == "rdkv:64,sink=0,window=100"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rdkv", "expected one budget, in tokens (rdkv:1024)"),
        ("rdkv:1:2", "got 2"),
        ("rdkv:x", "'x' is neither a budget nor an option"),
        ("rdkv:1:papr", "did you mean paper?"),
        ("rdkv:-1", "'-1' is neither a budget"),
        ("rdkv:200%", "at most 100% of the prompt, got 200%"),
        ("rdkv:1048577", "a budget is at most 1048576 tokens"),
        ("rdkv:1:paper:paper", "paper is given twice"),
        ("snapkv:paper:3", "paper is a form of rdkv"),
        ("adakv:3:shared", "adakv divides a layer's budget among its heads by itself"),
        ("rdkv:1,k=f16", "has its own k"),
        ("rdkv:1,layers[0]=f16", "layers[0-0] cannot have a format of its own"),
        ("rdkv:1,recompress=99", "recompress must be at least sink + window + 64 = 100"),
        ("f16,recompress=300", "unknown key 'recompress'"),
        ("rdkv:1,foo=1", "unknown key 'foo' (expected sink=, window= or recompress=)"),
        ("rdkv:1,recompres=200", "did you mean recompress? (expected sink="),
        ("rdvk:3", "did you mean rdkv?"),
        ("rdvk:1024", "did you mean rdkv?"),
        ("k=rdkv:1,v=f16", "unknown codec 'rdkv'"),
        ("k=f16,v=f16,layers[0]=rdkv:1", "unknown cache format 'rdkv:1'"),
    ],
)
def test_what_cannot_be_is_refused_on_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        KVSpec.parse(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_budget_is_bytes_for_a_head_and_never_more_than_the_prompt() -> None:
    assert Compression("rdkv", 10).budget_bytes(100, 64) == 10 * 256
    assert Compression("rdkv", 1000).budget_bytes(100, 64) == 100 * 256
    assert Compression("rdkv", Fraction(1, 40)).budget_bytes(1000, 64) == 25 * 256
    assert Compression("rdkv", Fraction(1, 3)).budget_bytes(1, 64) == 85


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        (Geometry(1, 1, 64, windows=True), "sliding window"),
        (Geometry(1, 1, 24), "a multiple of 16 up to 256, this cache has 24"),
        (Geometry(1, 1, 272), "a multiple of 16 up to 256, this cache has 272"),
    ],
)
def test_models_whose_prompts_cannot_be_compressed(geometry: Geometry, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        KVSpec.parse("rdkv:64").check(geometry)
    KVSpec.parse("f16").check(geometry)


def test_a_store_of_pages_does_not_take_them(ops) -> None:
    with pytest.raises(CodecError, match="use a ZoneStore"):
        KVStore(Geometry(1, 1, 16), KVSpec.parse("rdkv:64"), ops, 100)
