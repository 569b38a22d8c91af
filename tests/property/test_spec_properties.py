"""What every cache format and every text must satisfy."""

import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrt.errors import KvrtError
from kvrt.kvstore import PRESETS, KVSpec
from kvrt.kvstore.codecs import Block, Dense, Fp8, IntQ, Nuq, Vq
from kvrt.kvstore.spec import Override, Side

BOOLS = st.booleans()
DENSE = st.sampled_from(("f32", "f16", "bf16")).map(Dense)
FP8 = st.sampled_from(("e4m3", "e5m2")).map(Fp8)
BLOCKS = st.sampled_from(("q8_0", "q4_0")).map(Block)
NUQ = st.builds(Nuq, st.sampled_from((2, 3, 4)), BOOLS, BOOLS)

PQ = st.builds(Vq, st.integers(1, 3), st.just(256), st.just(True), st.just(False), perhead=BOOLS)
RVQ = st.builds(
    Vq, st.integers(1, 64), st.sampled_from((256, 1024, 4096)), st.just(False), BOOLS, BOOLS
)


@st.composite
def ints(draw: st.DrawFn, norm: bool) -> IntQ:
    axis = draw(st.sampled_from(("channel", "token")))
    group = draw(st.sampled_from((32, 64) if axis == "channel" else (32, 64, 128)))
    mode = draw(st.sampled_from(("asym", "sym", "hybrid")))
    return IntQ(draw(st.sampled_from((2, 3, 4, 8))), axis, group, mode, norm and draw(BOOLS))


@st.composite
def sides(draw: st.DrawFn, values: bool, rvq: Any = RVQ) -> Side:
    """`rvq` says which there are; without it no vectors are quantised."""
    vectors = [] if rvq is None else [PQ, rvq]
    codec: Any = draw(st.one_of(DENSE, FP8, BLOCKS, NUQ, ints(norm=not values), *vectors))
    had = not isinstance(codec, (Dense, Nuq)) and draw(BOOLS)
    pre = not (had or (isinstance(codec, IntQ) and codec.norm))
    forms = ("post", "page", "pre") if pre else ("post", "page")
    return Side(codec, "post" if values else draw(st.sampled_from(forms)), had)


PAIRS = st.one_of(
    st.tuples(sides(values=False), sides(values=True)),
    st.sampled_from([(preset.k, preset.v) for preset in PRESETS.values()]),
)
COUNTS = st.one_of(st.sampled_from((0, 1, 4, 32, 96, 128)), st.integers(0, 1 << 20))


@st.composite
def specs(draw: st.DrawFn) -> KVSpec:
    edges = sorted(draw(st.sets(st.integers(0, 4095), max_size=8)))
    ranges = zip(edges[::2], edges[1::2]) if draw(BOOLS) else zip(edges, edges)
    overrides = [Override(first, last, *draw(PAIRS)) for first, last in ranges]
    k, v = draw(PAIRS)
    return KVSpec(k, v, draw(COUNTS), draw(COUNTS), tuple(draw(st.permutations(overrides))))


SPECS = st.one_of(specs(), st.sampled_from(list(PRESETS.values())))


@given(SPECS)
def test_a_printed_spec_reads_back_and_prints_the_same(spec: KVSpec) -> None:
    text = str(spec)
    assert KVSpec.parse(text) == spec
    assert str(KVSpec.parse(text)) == text
    assert (text in PRESETS) == (spec in PRESETS.values())


def shuffled(side: Side, order: random.Random, space: str) -> str:
    name, *options = str(side).split(":")
    order.shuffle(options)
    return f"{space}:{space}".join((name, *options))


@given(SPECS, st.randoms(use_true_random=False), st.sampled_from(("", " ", "\t ")))
def test_order_and_spaces_do_not_matter(spec: KVSpec, order: random.Random, space: str) -> None:
    def parts(k: Side, v: Side, *more: str) -> str:
        pieces = [
            f"k{space}={space}{shuffled(k, order, space)}",
            f"v{space}={space}{shuffled(v, order, space)}",
            *more,
        ]
        order.shuffle(pieces)
        return f"{space},{space}".join(pieces)

    base = parts(spec.k, spec.v, f"sink={space}{spec.sink}", f"window={spec.window}{space}")
    overrides = [
        f"layers{space}[{space}{override.first}{space}-{override.last}]{space}="
        f"{parts(override.k, override.v)}"
        for override in spec.overrides
    ]
    order.shuffle(overrides)
    assert KVSpec.parse(f"{space},{space}".join((base, *overrides))) == spec


WORDS = """
    k= v= sink= window= layers[ ] - = , : % f16 bf16 e4m3 q8_0 int4 int nuq2 channel token g64 g128
    had norm pre page post sym 1% qnorm r2 scaled perhead pq8x256 rvq rvq8x512 vq2
    kvrt4 kvquant2:1% 0 7 4096 99999999999999999999
"""
PIECES = st.sampled_from(WORDS.split())
NEARLY = st.lists(st.one_of(PIECES, PIECES, PIECES, st.text(max_size=3)), max_size=30)
DAMAGED = st.tuples(SPECS.map(str), st.integers(0, 400), st.integers(0, 3), st.text(max_size=2))


def damaged(parts: tuple[str, int, int, str]) -> str:
    text, place, cut, added = parts
    place %= len(text) + 1
    return text[:place] + added + text[place + cut :]


@pytest.mark.parametrize("read", [KVSpec.parse, lambda text: Side.parse(text, "k")], ids="sk")
@given(text=st.one_of(st.text(), NEARLY.map("".join), DAMAGED.map(damaged)))
@example(text="k=f16,v=f16,layers[0]=k=f16,v=f16,layers[")
@example(text="k=int4:channel:g64,v=f16,sink=٣")
@example(text="int²:channel:g64")
@example(text="k=int٤:channel:g64,v=f16")
@example(text="f16,layers[٣]=f16")
def test_any_text_is_read_or_refused_on_one_short_line(read: Any, text: str) -> None:
    try:
        result = read(text)
    except KvrtError as error:
        message = str(error)
        assert len(message.splitlines()) == 1
        assert len(message) < 450
        assert error.exit_code == 2
    else:
        assert read(str(result)) == result
