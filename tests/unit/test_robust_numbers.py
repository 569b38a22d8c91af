"""Awkward numbers: what is finite stays finite in every format; debug mode names the rest."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.errors import CodecError
from kvrt.kvstore import KVStore
from tests.helpers.codecs import GEOMETRY, MATRIX
from tests.helpers.compare import assert_close
from tests.helpers.refs import attention
from tests.helpers.stores import (
    Tokens,
    append,
    attend,
    contents,
    extend,
    new_store,
    on_device,
    queries,
    random_tokens,
    read,
)  # fmt: skip
from tests.helpers.tolerances import tolerance

COUNT = 330
Change = Callable[[np.ndarray], None]  # of keys or values (num_layers, n, heads, dim), in place


def times(factor: float) -> Change:
    def change(side: np.ndarray) -> None:
        side *= np.float32(factor)

    return change


def constant(side: np.ndarray) -> None:
    side.fill(0.3)


def outliers(side: np.ndarray) -> None:
    side[:, ::50] *= 1e3
    side[:, 100:110, :, 3] = 1e3


def grown(side: np.ndarray) -> None:
    """What the first page fixed is far too small for what comes later."""
    side[:, :100] *= 1e-6
    side[:, 100:] *= 1e3


def one_grown_channel(side: np.ndarray) -> None:
    side[:, :100, :, 5] = 2**-24
    side[:, 100:, :, 5] = 6e4


CHANGES: dict[str, Change] = {
    "zero": times(0),
    "constant": constant,
    "subnormal f16": times(2**-22),
    "subnormal f32": times(1e-41),
    "outliers": outliers,
    "grown": grown,
    "one grown channel": one_grown_channel,
    "beyond f16": times(1e5),
    "near the end of f32": times(1e30),
}
SIDES = ((True, True), (True, False), (False, True))


def filled(ops: CpuOps, spec: str, tokens: Tokens) -> KVStore:
    store = new_store(ops, spec, GEOMETRY)
    extend(store, tokens.part(0, 300))
    append(store, tokens.part(300, COUNT))
    return store


def check_finite(store: KVStore) -> None:
    q = queries(1, 6, 64)[0]
    for layer, factor in ((0, 1), (0, 1e4), (1, 1e4)):
        assert np.isfinite(attend(store, q * np.float32(factor), layer)).all(), factor
    for side in read(store):
        assert np.isfinite(side).all()


@pytest.mark.parametrize("spec", MATRIX)
def test_finite_tokens_give_finite_attention(ops: CpuOps, spec: str) -> None:
    for name, change in CHANGES.items():
        # Both sides, keys alone and values alone take turns: any of them meets any kind in MATRIX.
        keys, values = SIDES[(MATRIX.index(spec) + len(name)) % 3]
        tokens = random_tokens(COUNT, GEOMETRY)
        for side, changed in zip(tokens, (keys, values), strict=True):
            if changed:
                change(side)
        try:
            check_finite(filled(ops, spec, tokens))
        except AssertionError as error:
            raise AssertionError(f"{name}, keys {keys}, values {values}") from error


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("spec", [s for s in MATRIX if s not in ("f32", "bf16")])
def test_an_infinite_key_saturates(ops: CpuOps, spec: str, sign: int) -> None:
    """In the sinks, in a page, in the tail. What f32 and bf16 do is in test_attention."""
    for position in (0, 100, COUNT - 3):
        tokens = random_tokens(COUNT, GEOMETRY)
        tokens.keys[:, position, 0, 3] = sign * np.inf
        check_finite(filled(ops, spec, tokens))


@pytest.mark.parametrize("spec", MATRIX)
def test_scores_beyond_f16_are_summed_in_f32(ops: CpuOps, spec: str) -> None:
    """The softmax is all on one token, and must be on the right one."""
    tokens = random_tokens(COUNT, GEOMETRY)
    tokens.keys[...] *= 100
    store = filled(ops, spec, tokens)
    q = 300 * queries(1, 4, 64)
    keys, values = (side[0].astype(np.float64) for side in read(store))
    scores = np.einsum("td,hd->ht", keys[:, 0], q[0, :2].astype(np.float64)) / math.sqrt(64)
    assert np.abs(scores).max() > 65504
    want = attention(q.astype(np.float64), keys, values)[0][0]
    assert_close(attend(store, q[0]), want, tolerance("attend", "large"), spec)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("spec", ["f32", "kvrt4", "k=q8_0:pre,v=q8_0"])
def test_debug_mode_names_the_layer(ops: CpuOps, spec: str, side: str, bad: float) -> None:
    store = new_store(ops, spec, GEOMETRY, debug=True).fork()
    extend(store, random_tokens(200, GEOMETRY))
    before = contents(store)
    tokens = random_tokens(40, GEOMETRY, seed=1)
    getattr(tokens, side)[1, 7, 1, 5] = bad
    expected = rf"^layer 1: the {side} hold infinities or NaN$"
    with pytest.raises(CodecError, match=expected):
        extend(store, tokens)
    assert contents(store) == before
    one = tokens.part(7, 8)
    store.append(0, on_device(store, one.keys[0]), on_device(store, one.values[0]))
    with pytest.raises(CodecError, match=expected):
        store.append(1, on_device(store, one.keys[1]), on_device(store, one.values[1]))
    append(store, random_tokens(1, GEOMETRY))
    assert len(store) == 201
