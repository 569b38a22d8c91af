"""Attention that reads packed pages, against float64 on what the store gives back.

Not the full product: `CASES` is a covering selection. Every format meets every length, every
window, and two head sizes: 64 and another by turns. Group sizes, numbers of KV heads and of threads
come up by turns too, so that all formats together meet all of them. Two formats, whose kernels
differ most, meet every group size on every head size.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.kvstore import Geometry, KVSpec, KVStore
from tests.helpers.codecs import MATRIX, fits
from tests.helpers.compare import assert_close
from tests.helpers.refs import attention
from tests.helpers.stores import (
    Tokens,
    append,
    attend,
    extend,
    new_store,
    on_device,
    queries,
    random_tokens,
    read,
)  # fmt: skip
from tests.helpers.tolerances import tolerance

HEAD_DIMS = (64, 80, 96, 112, 128, 256)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)


class Case(NamedTuple):
    """A format on one shape of cache."""

    spec: str
    dim: int
    group: int
    kv_heads: int
    threads: int


def covering() -> list[Case]:
    """Each format on 64 and on one other head size that fits; the rest by turns."""
    cases: list[Case] = []
    for index, spec in enumerate(MATRIX):
        others = [dim for dim in HEAD_DIMS[1:] if fits(spec, Geometry(2, 1, dim))]
        for dim in (64, others[index % len(others)]):
            n = len(cases)
            cases.append(Case(spec, dim, GROUPS[n % 8], 1 + n // 2 % 3, 1 + n // 8 % 2))
    return cases


CASES = covering()


def lengths(spec: KVSpec) -> list[int]:
    """Where something begins or ends; the last goes on for 300 tokens, one by one."""
    edge = spec.sink + spec.window
    near = {1, 31, 33, spec.sink, spec.sink + 1, spec.window - 1, spec.window, spec.window + 1}
    return sorted({n for n in near | {edge + 63, edge + 64, edge + 65, 1000} if n > 0})


def check(store: KVStore, group: int, window: int | None = None, layer: int = 0) -> None:
    """One query per head over a layer, as decode asks: against float64 on decoded tokens."""
    geometry = store.geometry
    scale = 1 / math.sqrt(geometry.head_dim)
    q = queries(1, group * geometry.num_kv_heads, geometry.head_dim, len(store))
    got = attend(store, q[0], layer, window, scale)
    keys, values = (side[layer].astype(np.float64) for side in read(store))
    want = attention(q.astype(np.float64), keys, values, window)[0]
    what = f"{store.spec} {geometry} tokens {len(store)}, window {window}"
    assert_close(got, want[0], tolerance("attend", "packed"), what)


@pytest.fixture(scope="module")
def backends() -> dict[int, CpuOps]:
    return {threads: CpuOps(threads) for threads in (1, 2)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_attention_is_that_over_the_decoded_tokens(backends: dict[int, CpuOps], case: Case) -> None:
    geometry = Geometry(2, case.kv_heads, case.dim)
    tokens = random_tokens(1300, geometry)
    store = new_store(backends[case.threads], case.spec, geometry)
    for length in lengths(store.spec):
        extend(store, tokens.part(len(store), length))
        check(store, case.group, layer=length % 2)
    for window in (1, 100, 300, 2000):
        check(store, case.group, window)
    for length in (1001, 1150, 1299, 1300):
        append(store, tokens.part(len(store), length))
        check(store, case.group)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("spec", ["kvrt4", "k=int2:channel:g32:pre,v=q8_0,sink=3"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_group_on_every_head_size(ops: CpuOps, spec: str, group: int, dim: int) -> None:
    if dim % 64 and spec == "kvrt4":
        spec = "k=int4:channel:g64:had,v=int4:channel:g64:had,sink=4,window=128"
    if dim % 32:
        spec = spec.replace("v=q8_0", "v=e4m3")
    geometry = Geometry(1, 1, dim)
    store = new_store(ops, spec, geometry)
    extend(store, random_tokens(270, geometry))
    check(store, group)


def test_the_cases_cover_every_size() -> None:
    assert {case.dim for case in CASES} == set(HEAD_DIMS)
    assert {case.group for case in CASES} == set(GROUPS)
    assert {case.kv_heads for case in CASES} == {1, 2, 3}
    for threads in (1, 2):
        assert len({case.spec for case in CASES if case.threads == threads}) > len(MATRIX) / 3


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spec", ["kvrt4", "kvquant2:1%"])
def test_a_step_takes_no_more_memory_with_more_tokens(spec: str, threads: int) -> None:
    geometry, sizes = Geometry(1, 2, 64), []
    for count in (1500, 5000):
        backend = CpuOps(threads)
        store = new_store(backend, spec, geometry)
        extend(store, random_tokens(count, geometry))
        backend._scratch = backend._partials = backend.empty((0,))
        check(store, 2)
        sizes.append((backend._scratch.nbytes, backend._partials.nbytes))
    assert sizes[0] == sizes[1] and 0 < sum(sizes[0]) < 300_000


@pytest.mark.parametrize("spec", MATRIX)
def test_the_token_under_way_is_seen(ops: CpuOps, spec: str) -> None:
    """A step appends, attends, and counts the token only then; the page it completes is not yet."""
    geometry = Geometry(2, 2, 64)
    tokens = random_tokens(1000, geometry)
    store = new_store(ops, spec, geometry)
    length = store.spec.sink + store.spec.window + 64  # the last of them seals the first page
    extend(store, tokens.part(0, length - 1))
    before = read(store)
    last = tokens.part(length - 1, length)
    for layer in range(2):
        k, v = (on_device(store, side[layer]) for side in last)
        store.append(layer, k, v)
        q = queries(1, 4, 64)
        got = attend(store, q[0], layer)
        ks, vs = (
            np.concatenate([old[layer], new]).astype(np.float64)
            for old, new in zip(before, exact(store, last, layer), strict=True)
        )
        want = attention(q.astype(np.float64), ks, vs)[0][0]
        assert_close(got, want, tolerance("attend", "packed"), spec)
    assert store.view(0).extent.pages == 0
    store.advance()
    assert store.view(0).extent.pages == 1


def exact(store: KVStore, token: Tokens, layer: int) -> list[np.ndarray]:
    """What sinks or tail make of one token, by `read_exact`."""
    keys, values = (on_device(store, side[layer].copy()) for side in token)
    store.read_exact(layer, keys, values, len(store))
    for row, side in zip((keys, values), token, strict=True):
        assert np.abs(row - side[layer]).max() <= 4 * 2.0**-8  # of bf16, at 4
    return [keys, values]
