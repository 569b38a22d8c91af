"""Vector-quantised caches on a GPU, emulated: attention against the CPU's, and equal codes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvrt.backends import books_variant
from kvrt.backends.attend_variant import chosen
from kvrt.backends.cpu import CpuOps
from kvrt.backends.cuda import CudaOps
from kvrt.backends.gpu_formats import OWN_SHARED
from kvrt.errors import UnsupportedError
from kvrt.kvstore import Geometry, KVStore
from kvrt.kvstore.codecs import Vq, VqBooks
from tests.emulator import COMPILER
from tests.helpers.codecs import FittedTables
from tests.helpers.emulated_attend import error, make_store
from tests.helpers.emulated_device import emulated_ops
from tests.helpers.stores import Tokens, fill, new_store, page_bytes, random_tokens

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

TOLERANCE = 1e-3
"""What entries bring to a score, and weights, are halves (11 bits); sums are f32."""


@pytest.fixture(scope="module")
def cuda() -> CudaOps:
    return emulated_ops()


def both(
    cpu: CpuOps,
    cuda: CudaOps,
    store: KVStore,
    group: int,
    window: int | None = None,
    spread: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of either device over a store of the CPU's: (heads, dim) f32 each."""
    view = store.view(0)
    rng = np.random.default_rng(group)
    q = rng.normal(0, spread, (group * view.num_kv_heads, view.head_dim)).astype(np.float32)
    got, expected = np.full(q.shape, np.nan, np.float32), cpu.empty(q.shape)
    cpu.attend(cpu.to_device(q), view, view.head_dim**-0.5, window, expected)
    view.extent.mirror = None
    cuda.attend(q, view, view.head_dim**-0.5, window, got)
    return got, expected


CASES = [
    ("vq2", 64, 3, 411), ("vq1", 64, 4, 700), ("vq1.5", 64, 1, 1500), ("vq2", 128, 4, 411),
    ("vq1", 192, 2, 300), ("vq1", 256, 4, 230), ("vq1.5", 128, 8, 330),
    ("k=pq8x256:r3:had,v=pq8x256:r1:had,sink=4", 64, 9, 300),
    ("k=pq8x256:r1,v=pq8x256:r3,sink=70,window=1", 64, 5, 300),
    ("k=pq8x256:r1:had,v=pq8x256:r2,window=20", 128, 6, 300),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "dim", "group", "tokens"), CASES)
def test_agrees_with_the_cpu(
    ops: CpuOps, cuda: CudaOps, spec: str, dim: int, group: int, tokens: int
) -> None:
    store = make_store(ops, spec, kv_heads=2, dim=dim, tokens=tokens)
    assert error(*both(ops, cuda, store, group)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 16, 17, 64, 65, 195, 196, 197])
def test_lengths(ops: CpuOps, cuda: CudaOps, tokens: int) -> None:
    store = make_store(ops, "vq1", kv_heads=1, dim=64, tokens=tokens)
    assert error(*both(ops, cuda, store, group=2)) < TOLERANCE


@pytest.mark.parametrize("window", [1, 63, 64, 65, 200, 1000])
def test_windows(ops: CpuOps, cuda: CudaOps, window: int) -> None:
    store = make_store(ops, "k=pq8x256:r1,v=pq8x256:r1", kv_heads=1, dim=64, tokens=500)
    assert error(*both(ops, cuda, store, group=2, window=window)) < TOLERANCE


def test_a_maximum_that_grows(ops: CpuOps, cuda: CudaOps) -> None:
    # Weights of later pages are beyond a half until the maximum is taken again.
    store = make_store(ops, "vq1", kv_heads=4, dim=64, tokens=5000)
    assert error(*both(ops, cuda, store, group=4, spread=20)) < TOLERANCE


def test_pages_by_the_copy_engine(ops: CpuOps) -> None:
    store = make_store(ops, "vq1.5", kv_heads=1, dim=64, tokens=600)
    assert error(*both(ops, emulated_ops(bulk=True), store, group=4)) < TOLERANCE


def test_a_nan_shows(ops: CpuOps, cuda: CudaOps) -> None:
    store = make_store(ops, "vq1", kv_heads=1, dim=64, tokens=300)
    row = ops.to_device(np.full((1, 1, 64), np.nan, np.float32))
    ops.append(store.view(0), row, row, 5)
    assert np.isnan(both(ops, cuda, store, group=2)[0]).all()


@pytest.mark.parametrize(
    ("spec", "bias", "said"),
    [
        ("k=pq8x256:r1:page,v=pq8x256:r1", 0.0, "page and pre are for the CPU"),
        ("k=pq8x256:r1:pre,v=pq8x256:r1", 0.0, "page and pre are for the CPU"),
        ("vq1", 1.0, "key biases"),
        ("k=pq8x256:r1,v=rvq1x256", 0.0, "both pq8x256, or both rvq"),
        ("k=pq8x256:r1,v=int4:token:g32", 0.0, "both vector-quantised"),
        ("k=int4:token:g32,v=pq8x256:r1", 0.0, "both vector-quantised"),
    ],
)
def test_a_layer_that_no_kernel_reads_has_none(
    ops: CpuOps, spec: str, bias: float, said: str
) -> None:
    """As of a format, while a model is loaded: see test_gpu_formats."""
    store = make_store(ops, spec, kv_heads=1, dim=64, tokens=1, bias=bias)
    with pytest.raises(UnsupportedError, match=said):
        chosen(store.view(0).settings.tolist())


def test_books_beyond_shared_memory_are_refused(ops: CpuOps) -> None:
    store = make_store(ops, "k=pq8x256:r3,v=pq8x256:r3", kv_heads=1, dim=128, tokens=1)
    with pytest.raises(UnsupportedError, match=r"needs [\d,]+ bytes of shared memory.*vq1"):
        books_variant.books_defines(store.view(0).settings.tolist(), 227 * 1024)


class Repeated(FittedTables):
    """Codebooks in which each entry comes `times` times: at `apart` places from each other."""

    def __init__(self, geometry: Geometry, times: int, apart: int):
        super().__init__(geometry)
        self._times, self._apart = times, apart

    def books(
        self, layer: int, is_value: bool, codec: Vq, rope: str = "post", had: bool = False
    ) -> VqBooks:
        found = super().books(layer, is_value, codec, rope, had)
        entries = found.entries.copy()
        size = entries.shape[2]
        run = self._times * self._apart
        index = np.arange(size) // run * run + np.arange(size) % self._apart
        return dataclasses.replace(found, entries=entries[:, :, index])


def sealed(
    cpu: CpuOps, cuda: CudaOps, spec: str, tokens: Tokens, geometry: Geometry, calibration: object
) -> list[bytes]:
    """Pages of either device."""
    stores = [new_store(ops, spec, geometry, calibration=calibration) for ops in (cuda, cpu)]
    for store in stores:
        fill(store, tokens, [150, 1, 49])
    return [page_bytes(store) for store in stores]


@pytest.mark.parametrize(("dim", "heads"), [(64, 1), (64, 2), (96, 1), (128, 1), (80, 2)])
def test_whole_heads_have_the_codes_of_the_cpu(
    ops: CpuOps, cuda: CudaOps, dim: int, heads: int
) -> None:
    # 80 channels have no variant of encode_heads.cu, and three pages of one head no even number.
    geometry = Geometry(1, heads, dim)
    spec, tokens = "k=rvq3x512,v=rvq2x256:had,sink=3", random_tokens(200, geometry)
    ours, theirs = sealed(ops, cuda, spec, tokens, geometry, FittedTables(geometry))
    assert ours == theirs


def test_whole_heads_are_encoded_without_tensor_cores_where_these_find_no_room(
    ops: CpuOps, cuda: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry, launched = Geometry(1, 2, 64), set()
    launch, room = cuda._store, books_variant.encode_shared(64) + OWN_SHARED

    def watched(name: str, *more: Any, **options: Any) -> None:
        launched.add(name)
        launch(name, *more, **options)

    monkeypatch.setattr(cuda, "_store", watched)
    for size, without in ((room, False), (room - 1, True)):
        monkeypatch.setattr(cuda.device, "max_shared", size)
        launched.clear()
        spec, tokens = "k=rvq2x256,v=rvq1x256", random_tokens(200, geometry)
        ours, theirs = sealed(ops, cuda, spec, tokens, geometry, FittedTables(geometry))
        assert ours == theirs
        assert ("seal" in launched) is without


@pytest.mark.parametrize(("times", "apart"), [(2, 1), (2, 128), (4, 8), (256, 1)])
def test_of_equal_entries_the_first_is_taken(
    ops: CpuOps, cuda: CudaOps, times: int, apart: int
) -> None:
    # Equal ones among the entries that one lane sees, or among those of several.
    geometry = Geometry(1, 1, 64)
    tokens, calibration = random_tokens(200, geometry), Repeated(geometry, times, apart)
    for spec in ("k=rvq2x256,v=rvq1x512", "k=pq8x256:r2,v=pq8x256:r1"):
        ours, theirs = sealed(ops, cuda, spec, tokens, geometry, calibration)
        assert ours == theirs


def test_awkward_numbers_have_the_codes_of_the_cpu(ops: CpuOps, cuda: CudaOps) -> None:
    geometry = Geometry(1, 1, 64)
    tokens = random_tokens(200, geometry)
    for part in (tokens.keys, tokens.values):
        part[0, 3] = np.nan
        part[0, 5] = 1e30  # 65,504 once it is stored
        part[0, 7] = 0.0
        part[0, 9] = 1e-6
        part[0, 11, :, ::2] = -6e4
    for spec in ("k=rvq2x256,v=rvq2x1024", "k=pq8x256:r3,v=pq8x256:r2"):
        ours, theirs = sealed(ops, cuda, spec, tokens, geometry, FittedTables(geometry))
        assert ours == theirs
