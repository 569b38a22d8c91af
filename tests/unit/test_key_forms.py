"""The three forms of keys, the bias and the transform, against exact attention.

The oracle never reads a store: a rotation that is wrong the same way in and out would show. 8-bit
codes lose little, so that the bound is far below what any wrong angle costs.
"""

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.errors import CodecError
from kvrt.kvstore import Geometry, KVSpec, KVStore
from tests.helpers.compare import assert_close, relative_rmse
from tests.helpers.rotated import Sequence, random_sequence
from tests.helpers.stores import append, attend, extend, queries, read
from tests.helpers.tolerances import tolerance

INT8 = tolerance("attend", "int8")
KEYS = {
    "post": "int8:channel:g32",
    "page": "int8:token:g32:page",
    "pre": "int8:token:g32:pre",
    "post:had": "int8:channel:g64:had",
    "page:had": "int8:token:g64:page:had",
    "page:norm": "int8:token:g32:sym:norm:page",
    "post:norm:had": "int8:channel:g32:norm:had",
    "pre:q8_0": "q8_0:pre",
}
PLACES = ["", ",sink=5", ",sink=70,window=30"]


def check(ops: CpuOps, sequence: Sequence, spec: str) -> None:
    store = sequence.store(ops, spec)
    heads, dim = sequence.raw.shape[1:]
    tokens, q = sequence.tokens, queries(1, 2 * heads, dim)[0]
    scale = 1 / np.sqrt(dim)
    for start, end, add in ((0, 3, extend), (3, 260, extend), (260, 300, append)):
        add(store, tokens.part(start, end))
        known = sequence.part(0, end)
        for window in (None, 90):
            got = attend(store, q, 0, window, scale)
            assert_close(got, known.attention(q, window), INT8, f"{spec} {end} {window}")
    keys, values = read(store)
    assert relative_rmse(keys[0], sequence.keys()) < 0.01
    assert relative_rmse(values[0], sequence.values) < 0.01


@pytest.mark.parametrize("bias", [0.0, 6.0])
@pytest.mark.parametrize("amplitude", [1.0, 1.35])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("form", KEYS)
def test_attention_is_exact_but_for_8_bits(
    ops: CpuOps, form: str, places: str, amplitude: float, bias: float
) -> None:
    sequence = random_sequence(300, bias=bias, amplitude=amplitude)
    check(ops, sequence, f"k={KEYS[form]},v=int8:token:g32{':had' * ('had' in form)}{places}")


@pytest.mark.parametrize("dim", [80, 96, 112, 128, 256])
@pytest.mark.parametrize("form", ["post", "page", "pre", "page:had"])
def test_every_head_size(ops: CpuOps, form: str, dim: int) -> None:
    """Transforms in blocks, and rotations of halves that are no power of two."""
    key = KEYS[form].replace("token:g32", "channel:g32").replace("token:g64", "channel:g64")
    sequence = random_sequence(300, 3, dim, bias=3.0, amplitude=1.1)
    check(ops, sequence, f"k={key},v=int8:channel:g64:had,sink=4")


@pytest.mark.parametrize("spec", ["k=f32:pre,v=f32", "k=f32:page,v=f32,sink=70,window=9"])
@pytest.mark.parametrize("bias", [0.0, 6.0])
def test_floats_in_other_forms_lose_nothing(ops: CpuOps, spec: str, bias: float) -> None:
    """Within float32's rounding: the two rotations undo each other."""
    sequence = random_sequence(300, bias=bias, amplitude=1.35)
    store = sequence.store(ops, spec)
    extend(store, sequence.tokens)
    q = queries(1, 4, 64)[0] / 3
    assert_close(attend(store, q), sequence.attention(q), tolerance("attend", "packed"))
    assert_close(read(store).keys[0], sequence.keys(), tolerance("basis", "f32"))


@pytest.mark.parametrize("form", ["post", "page", "pre", "page:had", "page:norm"])
def test_a_page_is_read_alone(ops: CpuOps, form: str) -> None:
    """`read_page` and `read_exact` give keys after RoPE, bias included, at their positions."""
    sequence = random_sequence(300, bias=6.0, amplitude=1.35)
    store = sequence.store(ops, f"k={KEYS[form]},v=q8_0,sink=5,window=40")
    extend(store, sequence.tokens)
    whole = read(store)
    for page in range(3):
        keys, values = ops.empty((64, 2, 64)), ops.empty((64, 2, 64))
        store.read_page(0, page, keys, values)
        rows = slice(5 + 64 * page, 69 + 64 * page)
        assert np.array_equal(keys, whole.keys[0, rows])
        assert np.array_equal(values, whole.values[0, rows])
        assert relative_rmse(keys, sequence.keys()[rows]) < 0.01
    for rows in (slice(0, 5), slice(230, 300)):
        keys, values = (ops.to_device(side[0, rows].copy()) for side in sequence.tokens)
        store.read_exact(0, keys, values, rows.start)
        for got, want in zip((keys, values), whole, strict=True):
            assert np.array_equal(got, want[0, rows])


def test_a_wrong_angle_would_show(ops: CpuOps) -> None:
    """The bound is worth something: a base of rotation that is off by 1 % breaks it."""
    sequence = random_sequence(300)
    store = sequence.store(ops, "k=int8:token:g32,v=int8:token:g32")
    wrong = Sequence(sequence.raw, sequence.values, sequence.bias, theta=10100.0)
    extend(store, wrong.tokens)
    q = queries(1, 4, 64)[0]
    with pytest.raises(AssertionError, match="elements are off"):
        assert_close(attend(store, q), sequence.attention(q), INT8)


def test_a_format_without_rotation_needs_no_rotary(ops: CpuOps) -> None:
    geometry, biased = Geometry(1, 2, 64), Geometry(1, 2, 64, key_bias=True)
    KVStore(geometry, KVSpec.parse("kvrt4"), ops, 10)
    with pytest.raises(CodecError, match="unrotated, so a Rotary is needed"):
        KVStore(geometry, KVSpec.parse("k=q8_0:pre,v=q8_0"), ops, 10)
    for wrong, bias in ((geometry, [ops.empty((2, 64))]), (biased, None)):
        with pytest.raises(CodecError, match="whether keys have a bias"):
            KVStore(wrong, KVSpec.parse("f16"), ops, 10, key_bias=bias)
