"""KVSpec: what it reads, what it prints, what it refuses."""

import subprocess
import sys
from dataclasses import replace

import pytest

from kvrt.errors import UnsupportedError, UsageError
from kvrt.kvstore import PRESETS, Geometry, KVSpec
from kvrt.kvstore.codecs import Block, Dense, Fp8, IntQ, Nuq
from kvrt.kvstore.spec import Override, Side

F16 = Side(Dense("f16"))
KVRT4 = "k=int4:channel:g64:had,v=int4:token:g64:had,sink=4,window=128"

# Name, sides of keys and values, sink, window, needs calibration, shifts.
PRESET_TABLE = [
    ("f32", "f32", "f32", 0, 0, False, False),
    ("f16", "f16", "f16", 0, 0, False, False),
    ("bf16", "bf16", "bf16", 0, 0, False, False),
    ("f8", "e4m3", "e4m3", 0, 0, False, False),
    ("f8e5m2", "e5m2", "e5m2", 0, 0, False, False),
    ("q8_0", "q8_0", "q8_0", 0, 0, False, False),
    ("q4_0", "q4_0", "q4_0", 0, 0, False, False),
    ("kivi2", "int2:channel:g32", "int2:token:g32", 0, 128, False, False),
    ("kivi4", "int4:channel:g32", "int4:token:g32", 0, 128, False, False),
    ("kvquant2", "nuq2:qnorm:pre", "nuq2:qnorm", 1, 0, True, True),
    ("kvquant3", "nuq3:pre", "nuq3", 1, 0, True, True),
    ("kvquant4", "nuq4:pre", "nuq4", 1, 0, True, True),
    ("kvquant2:1%", "nuq2:1%:qnorm:pre", "nuq2:1%:qnorm", 1, 0, True, True),
    ("kvquant3:1%", "nuq3:1%:pre", "nuq3:1%", 1, 0, True, True),
    ("kvquant4:1%", "nuq4:1%:pre", "nuq4:1%", 1, 0, True, True),
    ("innerq", "int3:token:g32:sym:norm", "int3:channel:g32:sym", 32, 96, False, False),
    ("innerq-small", "int3:token:g32:sym:norm", "int2:channel:g32:sym", 32, 96, False, False),
    ("innerq-hybrid", "int3:token:g32:sym:norm", "int2:channel:g32:hybrid", 32, 96, False, False),
    ("kvrt4", "int4:channel:g64:had", "int4:token:g64:had", 4, 128, False, False),
    ("kvrt3", "int3:channel:g64:had", "int3:token:g64:had", 4, 128, False, False),
    ("kvrt2", "int3:channel:g64:had", "int2:token:g64:had", 4, 128, False, False),
    ("vq2", "pq8x256:r3:perhead", "pq8x256:r1:perhead", 4, 128, True, False),
    ("vq1.5", "pq8x256:r2:perhead", "pq8x256:r1:perhead", 4, 128, True, False),
    ("vq1", "pq8x256:r1:perhead", "pq8x256:r1:perhead", 4, 128, True, False),
    ("vqkv", "rvq56x1024:scaled", "rvq16x512:scaled", 4, 1024, True, False),
]


@pytest.mark.parametrize(("name", "k", "v", "sink", "window", "calibrated", "shifts"), PRESET_TABLE)
def test_presets(
    name: str, k: str, v: str, sink: int, window: int, calibrated: bool, shifts: bool
) -> None:
    spec = KVSpec.parse(name)
    assert (str(spec.k), str(spec.v), spec.sink, spec.window) == (k, v, sink, window)
    assert (spec.calibrated, spec.shifts) == (calibrated, shifts)
    assert str(spec) == name
    assert KVSpec.parse(f"k={k},v={v},sink={sink},window={window}") == spec
    assert replace(spec, sink=sink + 1) != spec
    assert str(replace(spec, sink=sink + 1)).startswith(f"k={k},v={v},sink={sink + 1}")


def test_the_table_above_has_every_preset() -> None:
    assert list(PRESETS) == [row[0] for row in PRESET_TABLE]


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("f32", Side(Dense("f32"))),
        ("bf16:page", Side(Dense("bf16"), "page")),
        ("f16:pre", Side(Dense("f16"), "pre")),
        ("e4m3", Side(Fp8("e4m3"))),
        ("e5m2:had:page", Side(Fp8("e5m2"), "page", had=True)),
        ("q8_0:had", Side(Block("q8_0"), had=True)),
        ("q4_0:pre", Side(Block("q4_0"), "pre")),
        ("int2:channel:g32", Side(IntQ(2, "channel", 32))),
        ("int3:g64:token:asym:post", Side(IntQ(3, "token", 64))),
        ("int4:had:g128:token:page", Side(IntQ(4, "token", 128), "page", had=True)),
        ("int8:norm:sym:g32:channel", Side(IntQ(8, "channel", 32, "sym", norm=True))),
        ("int2:hybrid:token:g32:pre", Side(IntQ(2, "token", 32, "hybrid"), "pre")),
        ("int3:token:g32:norm:page:had", Side(IntQ(3, "token", 32, norm=True), "page", had=True)),
        ("nuq4", Side(Nuq(4))),
        ("nuq2:pre:qnorm:1%", Side(Nuq(2, outliers=True, qnorm=True), "pre")),
        ("nuq3:page:1%", Side(Nuq(3, outliers=True), "page")),
        ("nuq3:qnorm", Side(Nuq(3, qnorm=True))),
        (" int4 : channel :\tg64 ", Side(IntQ(4, "channel", 64))),
    ],
)
def test_each_option_goes_into_its_place(text: str, side: Side) -> None:
    assert Side.parse(text, "k") == side
    assert Side.parse(str(side), "k") == side
    assert KVSpec.parse(f"v=f16,k={text}") == KVSpec(side, F16)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("k=f16,v=bf16", "k=f16,v=bf16"),
        ("v=bf16,k=f16", "k=f16,v=bf16"),
        (" k = f32 , v = f16 , window = 64 ", "k=f32,v=f16,window=64"),
        ("k=f16,v=f16,sink=4,window=100", "k=f16,v=f16,sink=4,window=100"),
        ("window=0007,sink=0,v=f32,k=f32", "k=f32,v=f32,window=7"),
        ("k=f16:post,v=f16", "f16"),
        ("k=f16,v=f16,sink=0,window=0", "f16"),
        ("  bf16\n", "bf16"),
        ("k=f16,v=f16,sink=1048576", "k=f16,v=f16,sink=1048576"),
        ("k=f16:page,v=f16", "k=f16:page,v=f16"),
        (
            "k=int4:had:page:norm:sym:g64:channel,v=int2:hybrid:g32:had:token",
            "k=int4:channel:g64:sym:norm:page:had,v=int2:token:g32:hybrid:had",
        ),
        (KVRT4, "kvrt4"),
        ("kvrt4,window=256", KVRT4.replace("128", "256")),
        ("kvrt4,sink=0,window=0", "k=int4:channel:g64:had,v=int4:token:g64:had"),
        ("kvrt4,sink=4", "kvrt4"),
        ("kvrt4,layers[0-1]=f16", f"{KVRT4},layers[0-1]=f16"),
        # An override prints as the preset of its sides, whose sinks and window do not count.
        (
            "k=f16,v=f16,layers[3]=k=int4:channel:g64:had,v=int4:token:g64:had",
            "k=f16,v=f16,layers[3]=kvrt4",
        ),
        (
            "f16,layers[ 7 ] = f8 , layers [00-3]= v=q4_0 , k=e4m3:page",
            "k=f16,v=f16,layers[0-3]=k=e4m3:page,v=q4_0,layers[7]=f8",
        ),
        ("f16,layers[4095]=f8", "k=f16,v=f16,layers[4095]=f8"),
        ("f16,layers[2-2]=f8", "k=f16,v=f16,layers[2]=f8"),
    ],
)
def test_parse_and_print(text: str, printed: str) -> None:
    spec = KVSpec.parse(text)
    assert str(spec) == printed
    assert KVSpec.parse(printed) == spec


def test_parse_reads_each_field_into_its_place() -> None:
    spec = KVSpec.parse("k=f32,v=bf16,sink=3,window=9,layers[2-5]=k=q8_0,v=q4_0")
    assert spec == KVSpec(
        Side(Dense("f32")),
        Side(Dense("bf16")),
        sink=3,
        window=9,
        overrides=(Override(2, 5, Side(Block("q8_0")), Side(Block("q4_0"))),),
    )


def test_sides_of_each_layer() -> None:
    spec = KVSpec.parse("kivi2,layers[4]=f8,layers[1-2]=k=q8_0,v=q4_0")
    kivi2, f8 = KVSpec.parse("kivi2"), KVSpec.parse("f8")
    other = (Side(Block("q8_0")), Side(Block("q4_0")))
    base = (kivi2.k, kivi2.v)
    assert [spec.sides(layer) for layer in range(6)] == [
        base, other, other, base, (f8.k, f8.v), base,
    ]  # fmt: skip
    assert (spec.sink, spec.window) == (0, 128)


def test_overrides_count_for_calibration_and_shift() -> None:
    assert KVSpec.parse("k=f16:page,v=f16").shifts
    assert not KVSpec.parse("k=f16:page,v=f16,layers[0]=f16").shifts
    assert not KVSpec.parse("f16,layers[0]=k=f16:pre,v=f16").shifts
    assert KVSpec.parse("k=f16:page,v=f16,layers[0]=k=q8_0:pre,v=f16").shifts
    assert not KVSpec.parse("f16,layers[0]=f8").calibrated
    assert KVSpec.parse("f16,layers[0]=kvquant3").calibrated
    assert KVSpec.parse("k=f16,v=nuq3").calibrated
    assert KVSpec.parse("k=f16,v=rvq8x512").calibrated
    assert KVSpec.parse("k=pq8x256:r2:pre,v=f16").shifts


def test_the_order_of_overrides_does_not_matter() -> None:
    first, second = Override(0, 1, F16, F16), Override(5, 5, F16, F16)
    assert KVSpec(F16, F16, 0, 0, (second, first)) == KVSpec(F16, F16, 0, 0, (first, second))


PRESET_LIST = "f32, f16, bf16, f8, f8e5m2, q8_0, q4_0, kivi2"
CODEC_LIST = "f32, f16, bf16, e4m3, e5m2, q8_0, q4_0, int2|3|4|8, nuq2|3|4, pq8x256, rvqNxE"
KEYS = "expected k=, v=, sink=, window= or layers[A-B]="
INT_OPTIONS = "channel|token, g32|g64|g128, asym|sym|hybrid, norm, post|page|pre, had"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # Names
        ("", PRESET_LIST),
        ("int9", PRESET_LIST),
        ("F16", "did you mean f16?"),
        ("kvrt5", "did you mean kvrt"),
        ("innerq_small", "did you mean innerq-small?"),
        ("kvquant3:1", "did you mean kvquant3"),
        ("e4m3", "'e4m3': this is one side, expected k=e4m3,v=SIDE"),
        ("int4:channel:g64", "expected k=int4:channel:g64,v=SIDE"),
        (",k=f16,v=f16", "unknown cache format ''"),
        ("kvrt5,window=3", "unknown cache format 'kvrt5'"),
        # Keys
        ("k=f16", "v=SIDE is missing"),
        ("v=f16", "k=SIDE is missing"),
        ("k=f16,v=f16,k=f32", "k is given twice"),
        ("k=f16,v=f16,window=1,window=1", "window is given twice"),
        ("k=f16,v=f16,bits=4", f"unknown key 'bits' ({KEYS}"),
        ("k=f16,v=f16,wndow=4", "unknown key 'wndow', did you mean window?"),
        ("k=f16,v=f16,", f"unknown key '' ({KEYS}"),
        ("k=f16,v=f16,=3", f"unknown key '' ({KEYS}"),
        ("=f16,v=f16", f"unknown key '' ({KEYS}"),
        ("kvrt4,k=f16", "kvrt4 has its own k"),
        ("kvrt4,v=f16", "kvrt4 has its own v"),
        ("k=f16,v=f16,f8", "unknown key 'f8'"),
        # Counts
        ("k=f16,v=f16,sink=-1", "sink must be 0 to 1048576 tokens, got '-1'"),
        ("k=f16,v=f16,sink=", "got ''"),
        ("k=f16,v=f16,window=1.5", "window must be 0 to 1048576 tokens, got '1.5'"),
        ("k=f16,v=f16,window=1_000", "got '1_000'"),
        ("k=f16,v=f16,window=²", "got '²'"),
        ("k=f16,v=f16,window=٣", "got '٣'"),
        ("k=f16,v=f16,window=1048577", "got '1048577'"),
        ("k=f16,v=f16,sink", "sink has no value, expected sink=..."),
        ("kvrt4,window", "window has no value"),
        # Codecs
        ("k=,v=f16", f"unknown codec '' (expected one of {CODEC_LIST})"),
        ("k=f16,v=", "cache format 'v=': unknown codec ''"),
        ("k=f61,v=f16", "unknown codec 'f61', did you mean f16?"),
        ("k=Q8_0,v=f16", "unknown codec 'Q8_0', did you mean q8_0?"),
        ("k=iq4_nl,v=f16", CODEC_LIST),
        ("k=int9:channel:g32,v=f16", "there is no int9, expected one of int2, int3, int4, int8"),
        ("k=int,v=f16", "there is no int, expected one of int2, int3, int4, int8"),
        ("k=nuq8,v=nuq4", "there is no nuq8, expected one of nuq2, nuq3, nuq4"),
        ("k=int04:channel:g32,v=f16", "there is no int04"),
        ("k=pq4x256:r2,v=f16", "there is no pq4x256, expected pq8x256:r2"),
        ("k=pq8x512:r2,v=f16", "there is no pq8x512, expected pq8x256:r2"),
        ("k=rvq28,v=f16", "there is no rvq28, expected rvqNxE, such as rvq28x1024"),
        ("k=rvq0x1024,v=f16", "there is no rvq0x1024, expected rvqNxE"),
        ("k=rvq08x1024,v=f16", "there is no rvq08x1024, expected rvqNxE"),
        ("k=rvq65x1024,v=f16", "rvq65x1024 has too many stages, expected 1 to 64"),
        (
            "k=rvq28x1000,v=f16",
            "no codebooks of 1000 entries, expected one of 256, 512, 1024, 2048, 4096",
        ),
        ("k=pqx256:r1,v=f16", "there is no pqx256"),
        ("k=pg8x256:r1,v=f16", "unknown codec 'pg8x256', did you mean pq8x256?"),
        ("rvq28x1024", "'rvq28x1024': this is one side, expected k=rvq28x1024,v=SIDE"),
        ("pq8x256:r2", "this is one side, expected k=pq8x256:r2,v=SIDE"),
        ("vq3", "unknown cache format 'vq3', did you mean vq2?"),
        ("k=f16,v=vq1.5", "expected one side, such as pq8x256:r1"),
        (
            "k=kvrt4,v=f16",
            "kvrt4 is a format of keys and values, expected one side, such as int4:c",
        ),
        ("k=f16,v=kvrt4", "such as int4:token:g64:had"),
        # Options
        ("k=int4,v=f16", "int4 needs its axis (channel|token) and group (g32|g64|g128)"),
        ("k=int4:g64,v=f16", "int4 needs its axis (channel|token), such as int4:channel:g64"),
        ("k=int4:token,v=f16", "int4 needs its group (g32|g64|g128), such as"),
        ("k=int4:chanel:g64,v=f16", f"'chanel', did you mean channel? (int4 takes {INT_OPTIONS})"),
        ("k=int4:channel:g64:,v=f16", f"unknown option '' (int4 takes {INT_OPTIONS})"),
        ("k=int4:channel:g48,v=f16", "no groups of 48, expected g32, g64 or g128"),
        ("k=int4:channel:g16,v=f16", "no groups of 16, expected g32, g64 or g128"),
        ("k=int4:channel:64,v=f16", "unknown option '64', did you mean g64?"),
        ("k=int4:channel:g64:1%,v=f16", f"int4 does not take 1%; its options are {INT_OPTIONS}"),
        ("k=f16:norm,v=f16", "f16 does not take norm; its options are post|page|pre"),
        ("k=q8_0:g32,v=f16", "q8_0 does not take g32; its options are post|page|pre, had"),
        ("k=e4m3:sym,v=f16", "e4m3 does not take sym; its options are post|page|pre, had"),
        ("k=pq8x256,v=f16", "pq8x256 needs its stages (r1|r2|r3), such as pq8x256:r2"),
        ("k=pq8x256:r4,v=f16", "no 4 stages, expected r1, r2 or r3"),
        ("k=pq8x256:r1:r2,v=f16", "r1 and r2 exclude each other"),
        (
            "k=pq8x256:r1:norm,v=f16",
            "pq8x256 does not take norm; its options are r1|r2|r3, perhead, post|page|pre, had",
        ),
        ("k=pq8x256:perhead,v=f16", "pq8x256 needs its stages (r1|r2|r3), such as pq8x256:r2"),
        ("k=pq8x256:r1:perhead:perhead,v=f16", "perhead is given twice"),
        ("k=pq8x256:r1:perhed,v=f16", "unknown option 'perhed', did you mean perhead?"),
        ("k=int4:channel:g64:perhead,v=f16", "int4 does not take perhead"),
        ("k=f16,v=nuq4:perhead", "nuq4 does not take perhead"),
        ("k=pq8x256:r1:scaled,v=f16", "pq8x256 does not take scaled"),
        (
            "k=rvq8x512:r2,v=f16",
            "rvq8x512 does not take r2; its options are scaled, perhead, post|page|pre, had",
        ),
        ("k=rvq8x512:scled,v=f16", "unknown option 'scled', did you mean scaled?"),
        ("k=int4:channel:g64:r2,v=f16", "int4 does not take r2"),
        ("k=nuq2:2%,v=nuq2", "unknown option '2%' (nuq2 takes 1%, qnorm, post|page|pre)"),
        ("k=nuq2:norm,v=nuq2", "nuq2 does not take norm; its options are 1%, qnorm, post|page|pre"),
        ("k=int4:channel:token:g64,v=f16", "channel and token exclude each other"),
        ("k=int4:g32:channel:g64,v=f16", "g32 and g64 exclude each other"),
        ("k=int4:channel:g64:sym:asym,v=f16", "sym and asym exclude each other"),
        ("k=f16:pre:post,v=f16", "pre and post exclude each other"),
        ("k=int4:channel:g64:channel,v=f16", "channel is given twice"),
        ("k=q8_0:had:had,v=f16", "had is given twice"),
        ("k=nuq2:1%:1%,v=nuq2", "1% is given twice"),
        # Single layers
        ("layers[0]=f16", "expected layers[A-B]=SPEC after k=SIDE,v=SIDE"),
        ("layers[0]=f16,k=f16,v=f16", "expected layers[A-B]=SPEC after k=SIDE,v=SIDE"),
        ("f16,layers=f8", "expected layers[A-B]=SPEC after"),
        ("f16,layers[]=f8", "expected layers[A-B]=SPEC or layers[A]=SPEC"),
        ("f16,layers[a]=f8", "'layers[a]=f8': expected layers[A-B]=SPEC or layers[A]=SPEC"),
        ("f16,layers[-1]=f8", "expected layers[A-B]=SPEC or layers[A]=SPEC"),
        ("f16,layers[1]f8", "expected layers[A-B]=SPEC or layers[A]=SPEC"),
        ("f16,layers[3-1]=f8", "layers[3-1] cannot be, expected A-B with A <= B"),
        ("f16,layers[4096]=f8", "B below 4096"),
        ("f16,layers[123456789]=f8", "layers are 0 to 4095"),
        ("f16,layers[0-3]=f8,layers[3-4]=q8_0", "layer 3 is in layers[0-3] and in layers[3-4]"),
        ("f16,layers[3]=f8,layers[3]=f8", "layer 3 is in layers[3] and in layers[3]"),
        ("f16,layers[0]=", "unknown cache format ''"),
        ("f16,layers[0]=f9", "unknown cache format 'f9'"),
        ("f16,layers[0]=k=f8", "'k=f8': v=SIDE is missing"),
        ("f16,layers[0]=kvrt4,window=3", "window is common to all layers"),
        ("f16,layers[0]=k=f16,v=f16,sink=3", "sink is common to all layers"),
        ("f16,layers[0]=layers[1]=f8", "expected layers[A-B]=SPEC after k=SIDE,v=SIDE"),
    ],
)
def test_malformed_texts_are_refused_on_one_line_that_says_what_works(
    text: str, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        KVSpec.parse(text)
    assert words in str(caught.value)
    assert type(caught.value) is UsageError
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("k=int4:channel:g64:pre:had,v=f16", "undone for every cached token; page and post work"),
        ("k=q8_0:pre:had,v=f16", "undone for every cached token"),
        ("k=e4m3:had:pre,v=f16", "undone for every cached token"),
        ("k=int3:token:g32:norm:pre,v=f16", "norm could not be folded into the query"),
        ("k=f16,v=int3:token:g32:norm", "norm is folded into the query, so it is for keys only"),
        ("k=f16,v=f16:page", "'v=f16:page': page is for keys"),
        ("k=f16,v=nuq2:pre", "pre is for keys"),
        ("k=f16,v=int4:token:g64:post", "post is for keys"),
        ("k=f16:had,v=f16", "cache format f16:had: had is useless with floats"),
        ("k=f16,v=f32:had", "had is useless with floats"),
        ("k=nuq2:had,v=nuq2", "had would mix the channels"),
        ("k=pq8x256:r2:had:pre,v=f16", "undone for every cached token; page and post work"),
        ("k=rvq8x512:pre:had,v=f16", "undone for every cached token; page and post work"),
        ("k=f16,v=pq8x256:r2:page", "page is for keys"),
        ("k=int4:channel:g128,v=f16", "groups of 128 do not divide the 64 tokens of a page"),
        ("k=f16,v=int4:channel:g128", "channel takes g32 and g64"),
        ("f16,layers[0]=k=f16,v=f16:pre", "pre is for keys"),
    ],
)
def test_unsupported_combinations_are_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        KVSpec.parse(text)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_objects_are_refused_as_texts_are() -> None:
    page, norm = Side(Dense("f16"), "page"), Side(IntQ(3, "token", 32, norm=True))
    for values in (page, norm):
        with pytest.raises(UnsupportedError, match="keys"):
            KVSpec(F16, values)
        with pytest.raises(UnsupportedError, match="keys"):
            Override(0, 0, F16, values)
    for wrong in (-1, (1 << 20) + 1):
        with pytest.raises(UsageError, match="sink must be"):
            KVSpec(F16, F16, sink=wrong)
        with pytest.raises(UsageError, match="window must be"):
            KVSpec(F16, F16, window=wrong)
    for first, last in ((-1, 0), (1, 0), (0, 4096)):
        with pytest.raises(UsageError, match="cannot be"):
            Override(first, last, F16, F16)
    with pytest.raises(UsageError, match="layer 1 is in"):
        KVSpec(F16, F16, 0, 0, (Override(0, 1, F16, F16), Override(1, 1, F16, F16)))


def test_combinations_that_look_odd_but_work() -> None:
    for text in (
        "k=int4:token:g128:norm:page:had,v=int2:channel:g32:hybrid:had",
        "k=f16:page,v=q4_0:had",
        "k=nuq2,v=int8:token:g128",
        "k=q8_0:page:had,v=e5m2:had",
        "k=pq8x256:r3:page:had,v=rvq16x512:scaled:had",
        "k=rvq64x4096:pre,v=pq8x256:r1",
        "k=pq8x256:r2:perhead:page:had,v=rvq4x256:scaled:perhead:had",
    ):
        assert str(KVSpec.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "x" * 100_000,
        "k=" + "x" * 100_000 + ",v=f16",
        "k=int4:" + "\U000e0001" * 100_000 + ",v=f16",
        "k=" + "\U000e0001" * 40 + ",v=f16",
        "\U000e0001" * 40,
        "k=int" + "9" * 100_000 + ",v=f16",
        "k=int4:g" + "9" * 100_000 + ",v=f16",
        "k=f16,v=f16,sink=" + "9" * 100_000,
        "k=f16,v=f16,layers[" + "9" * 100_000 + "]=f16",
        "k=f16,v=f16,layers[0-" + "9" * 100_000 + "]=f16",
        "k=f16,v=f16," + "a\n\r\x00\u2028\udcff" * 10_000 + "=3",
        "k=f16,v=f16" + ",sink=1" * 50_000,
        "," * 100_000,
        ":" * 100_000,
        "k=f16,v=f16,layers" + "[" * 100_000,
        "f16,layers[0]=" * 20_000,
        "k=int4" + ":" * 100_000 + ",v=f16",
    ],
    ids=range(17),
)
def test_hostile_texts_end_in_one_short_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        KVSpec.parse(text)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 450
    message.encode()  # no lone surrogate either


def geometry(layers: int = 4, heads: int = 2, dim: int = 64) -> Geometry:
    return Geometry(layers, heads, dim)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits_a_common_geometry(name: str) -> None:
    KVSpec.parse(name).check(geometry(dim=128))


@pytest.mark.parametrize(
    ("text", "dim", "words"),
    [
        ("k=f16,v=int4:token:g64", 80, ("v=int4:token:g64", "64", "80")),
        ("k=int4:token:g128,v=f16", 64, ("k=int4:token:g128", "128", "64")),
        ("k=f16,v=q8_0", 80, ("v=q8_0", "32", "80")),
        ("q4_0", 48, ("k=q4_0", "32", "48")),
        ("k=f16,v=e4m3", 24, ("v=e4m3", "16", "24")),
        ("k=nuq3,v=f16", 8, ("k=nuq3", "16", "8")),
        ("k=f16,v=pq8x256:r1", 80, ("v=pq8x256:r1", "64", "80", "rvq")),
        ("k=rvq8x512,v=f16", 40, ("k=rvq8x512", "16", "40")),
        ("f16,layers[1-2]=q8_0", 80, ("layers[1-2]", "k=q8_0")),
        ("f16,layers[3]=k=f16,v=q8_0", 80, ("layers[3]", "v=q8_0")),
        ("f16,layers[0-3]=f8,layers[4]=f8", 64, ("layers[4]", "0 to 3")),
        ("f16,layers[2-4]=f8", 64, ("layers[2-4]", "0 to 3")),
    ],
)
def test_a_format_that_does_not_fit_the_model(text: str, dim: int, words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        KVSpec.parse(text).check(geometry(dim=dim))
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "dim"),
    [
        ("f16", 17),
        ("k=int4:channel:g64,v=int4:channel:g64", 80),
        ("k=int4:channel:g32,v=int4:token:g32", 96),
        ("f8", 112),
        ("k=rvq8x512,v=rvq8x512:scaled", 16),
        ("k=pq8x256:r1,v=pq8x256:r3", 192),
        ("f16,layers[3]=f8", 64),
        # No layer has the sides that do not fit.
        ("q8_0,layers[0-1]=f16,layers[2-3]=f8", 80),
    ],
)
def test_a_format_that_fits(text: str, dim: int) -> None:
    KVSpec.parse(text).check(geometry(dim=dim))


def test_a_codec_is_told_its_side_and_the_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(Block, "check", lambda codec, *args: told.append((codec.name, *args)))
    KVSpec.parse("k=q8_0,v=q4_0,layers[1]=k=q4_0,v=f16").check(geometry(heads=3, dim=80))
    assert told == [("q4_0", False, 3, 80), ("q8_0", False, 3, 80), ("q4_0", True, 3, 80)]


def test_parsing_needs_no_compiler() -> None:
    script = (
        "import sys; from kvrt.kvstore.spec import KVSpec; KVSpec.parse('kvrt4');"
        "print([name for name in ('numba', 'llvmlite', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
