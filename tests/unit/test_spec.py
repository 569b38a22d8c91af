"""KVSpec: what it reads, what it prints, what it refuses."""

import pytest

from kvrt.errors import UnsupportedError, UsageError
from kvrt.kvstore import PRESETS, KVSpec
from kvrt.kvstore.codecs import CODECS


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_a_preset_is_a_codec_on_both_sides(name: str) -> None:
    spec = KVSpec.parse(name)
    assert (spec.k.name, spec.v.name, spec.sink, spec.window) == (name, name, 0, 0)
    assert str(spec) == name


def test_every_codec_has_a_preset() -> None:
    assert list(PRESETS) == list(CODECS)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("k=f16,v=bf16", "k=f16,v=bf16"),
        ("v=bf16,k=f16", "k=f16,v=bf16"),
        (" k=f32 , v=f16 , window=64 ", "k=f32,v=f16,window=64"),
        ("k=f16,v=f16,sink=4,window=100", "k=f16,v=f16,sink=4,window=100"),
        ("window=0007,sink=0,v=f32,k=f32", "k=f32,v=f32,window=7"),
        ("k=f16,v=f16", "f16"),
        ("k=f16,v=f16,sink=0,window=0", "f16"),
        ("  bf16\n", "bf16"),
        ("k=f16,v=f16,sink=1048576", "k=f16,v=f16,sink=1048576"),
    ],
)
def test_parse_and_print(text: str, printed: str) -> None:
    spec = KVSpec.parse(text)
    assert str(spec) == printed
    assert KVSpec.parse(printed) == spec


def test_parse_reads_each_field_into_its_place() -> None:
    spec = KVSpec.parse("k=f32,v=bf16,sink=3,window=9")
    assert (spec.k.name, spec.v.name, spec.sink, spec.window) == ("f32", "bf16", 3, 9)


@pytest.mark.parametrize("sink", [0, 1, 4, 1000])
@pytest.mark.parametrize("window", [0, 1, 64, 128])
def test_round_trip(sink: int, window: int) -> None:
    for k in CODECS.values():
        for v in CODECS.values():
            spec = KVSpec(k, v, sink, window)
            assert KVSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "f32, f16, bf16"),
        ("int9", "f32, f16, bf16"),
        ("F16", "f32, f16, bf16"),
        ("k=f16", "v=FORMAT is missing"),
        ("v=f16", "k=FORMAT is missing"),
        ("k=,v=f16", "unknown codec ''"),
        ("k=int9,v=f16", "unknown codec 'int9'"),
        ("k=f16,v=f16,k=f32", "k is given twice"),
        ("k=f16,v=f16,bits=4", "unknown key 'bits'"),
        ("k=f16,v=f16,", "unknown key ''"),
        ("k=f16,v=f16,sink=-1", "got '-1'"),
        ("k=f16,v=f16,sink=", "got ''"),
        ("k=f16,v=f16,window=1.5", "got '1.5'"),
        ("k=f16,v=f16,window=1_000", "got '1_000'"),
        ("k=f16,v=f16,window=²", "got '²'"),
        ("k=f16,v=f16,window=1048577", "got '1048577'"),
        ("k=f16,v=f16,sink", "got ''"),
    ],
)
def test_refusals_are_one_line_and_say_what_works(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        KVSpec.parse(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pair_that_no_kernels_read_is_refused() -> None:
    class Other(type(CODECS["f16"])):  # type: ignore[misc]
        kernels = "other"

    with pytest.raises(UnsupportedError, match="one family"):
        KVSpec(CODECS["f16"], Other("f16"))
