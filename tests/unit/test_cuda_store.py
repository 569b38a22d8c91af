"""The CUDA kernels of the store, emulated: equal bytes to the CPU's in every format."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from kvrt.backends import view as place
from kvrt.backends.cpu import CpuOps
from kvrt.backends.cuda import CudaOps
from kvrt.kvstore import Geometry, KVSpec, KVStore
from kvrt.kvstore.codecs import Nuq
from tests.emulator import COMPILER
from tests.helpers.codecs import ON_GPU, fits, rotary_for
from tests.helpers.emulated_device import emulated_ops
from tests.helpers.stores import Tokens, contents, fill, new_store, page_bytes, random_tokens, read
from tests.helpers.tiles import TILES

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")


@pytest.fixture(scope="module")
def cuda() -> CudaOps:
    return emulated_ops()


def awkward_tokens(geometry: Geometry, tiles: tuple[str, ...]) -> Tokens:
    """Pages of tiles, the values another tile's than the keys."""
    heads, dim = geometry.num_kv_heads, geometry.head_dim
    pages = [TILES[name](heads, dim, seed) for seed, name in enumerate(tiles)]
    keys, values = np.concatenate(pages), np.concatenate(pages[1:] + pages[:1])
    layers = geometry.num_layers
    return Tokens(*(np.stack([part] * layers) for part in (keys, values)))


def assert_equal_stores(ours: KVStore, theirs: KVStore) -> None:
    """Byte for byte, but for what is read of nuq: there the CPU may round a product on its own."""
    assert page_bytes(ours) == page_bytes(theirs)
    assert contents(ours) == contents(theirs)
    spec = ours.spec
    for layer in range(ours.geometry.num_layers):
        for is_value, side in enumerate(spec.sides(layer)):
            shape = (ours._extent.pages * 64, ours.geometry.num_kv_heads, ours.geometry.head_dim)
            got, expected = (np.full(shape, np.nan, np.float32) for _ in range(2))
            for store, out in ((ours, got), (theirs, expected)):
                out = store.ops.to_device(out)
                view = store.view(layer)
                store.ops.gather(view, bool(is_value), 0, view.extent.pages, out)
            if isinstance(side.codec, Nuq):
                size = np.abs(expected).max()
                np.testing.assert_allclose(got, expected, rtol=2e-7, atol=1e-7 * size)
            else:
                assert got.tobytes() == expected.tobytes()


def both(
    cpu: CpuOps, cuda: CudaOps, spec: str, geometry: Geometry, tokens: Tokens, split
) -> tuple[KVStore, KVStore]:
    extras: dict[str, Any] = {}
    if geometry.key_bias:
        rng = np.random.default_rng(5)
        shape = (geometry.num_kv_heads, geometry.head_dim)
        bias = [rng.normal(0, 3, shape).astype(np.float32) for _ in range(geometry.num_layers)]
        extras = {"key_bias": [cpu.to_device(part) for part in bias]}
    stores = [new_store(ops, spec, geometry, **extras) for ops in (cuda, cpu)]
    for store in stores:
        fill(store, tokens, split)
    return stores[0], stores[1]


INTQ = [
    f"k=int{bits}:{axis}:g{group}{mode},v=int{bits}:{other}:g{group}{mode}"
    for bits, (axis, other), group, mode in product(
        (2, 3, 4, 8),
        (("channel", "token"), ("token", "channel")),
        (32, 64),
        ("", ":sym", ":hybrid"),
    )
]
NORM = [
    "k=int4:channel:g64:norm,v=int8:token:g32",
    "k=int3:token:g32:norm:hybrid,v=int2:channel:g32",
    "k=int2:channel:g32:norm:sym,v=int4:token:g64",
]
OTHERS = ["f32", "f16", "bf16", "q8_0", "q4_0", "f8", "f8e5m2"]
NUQ = [
    f"k=nuq{bits}{options},v=nuq{bits}{options}"
    for bits, options in product((2, 3, 4), ("", ":1%", ":qnorm", ":1%:qnorm"))
]
VQ = [
    "k=pq8x256:r3:perhead,v=pq8x256:r1:perhead",
    "k=pq8x256:r1:page:had,v=pq8x256:r3",
    "k=rvq2x256:perhead,v=rvq1x512:had",
    "k=rvq1x256:pre,v=pq8x256:r2:perhead",
]
EASY_FIRST = ("gaussian", "outlier_channels", "ties", "wild")
CONSTANT = ("constant_channels", "zeros", "constant", "subnormal", "one_sided")


@pytest.mark.parametrize("spec", [*INTQ, *NORM, *OTHERS, *NUQ, *VQ])
def test_equal_bytes(ops: CpuOps, cuda: CudaOps, spec: str) -> None:
    geometry = Geometry(1, 2, 64)
    for tiles in (EASY_FIRST, CONSTANT):
        tokens = awkward_tokens(geometry, tiles)
        spare = f"{spec},sink=0,window=0"
        assert_equal_stores(*both(ops, cuda, spare, geometry, tokens, [len(tokens)]))


DIMS = [
    "k=int3:channel:g64:had,v=int3:channel:g32:hybrid",
    "k=int2:channel:g32,v=int2:channel:g64:sym",
    "k=int4:channel:g64:norm,v=int4:channel:g64",
    "k=e4m3,v=int8:channel:g64",
    "k=nuq2:1%,v=nuq3:1%",
    "k=nuq3:1%,v=nuq4",
    "k=rvq2x256,v=rvq1x256:perhead",
]


@pytest.mark.parametrize("dim", [16, 32, 48, 80, 96, 112, 128, 144, 192, 256])
def test_head_dims(ops: CpuOps, cuda: CudaOps, dim: int) -> None:
    """Words that are narrow at the end of a plane, and every place of a scale."""
    geometry = Geometry(1, 1 if dim > 128 else 3, dim)
    tokens = awkward_tokens(geometry, ("gaussian", "wild"))
    for spec in DIMS:
        assert_equal_stores(*both(ops, cuda, f"{spec},sink=0,window=0", geometry, tokens, [128]))


@pytest.mark.parametrize(
    ("spec", "dim"),
    [
        ("k=int4:token:g128,v=int4:token:g128:hybrid", 128),
        ("k=int2:token:g128:sym,v=int8:token:g128", 256),
        ("q8_0", 96), ("q4_0", 160), ("k=int3:token:g32,v=int3:token:g32:sym", 96),
        ("k=f32,v=bf16", 5), ("f16", 24), ("k=pq8x256:r2,v=pq8x256:r1:perhead", 192),
        ("k=pq8x256:r1:perhead,v=pq8x256:r3", 256),
    ],
)  # fmt: skip
def test_long_groups_and_odd_sizes(ops: CpuOps, cuda: CudaOps, spec: str, dim: int) -> None:
    geometry = Geometry(1, 2, dim)
    tokens = awkward_tokens(geometry, ("gaussian", "ties"))
    assert_equal_stores(*both(ops, cuda, f"{spec},sink=0,window=0", geometry, tokens, [128]))


@pytest.mark.parametrize("spec", ON_GPU)
def test_the_matrix_token_by_token_and_at_once(ops: CpuOps, cuda: CudaOps, spec: str) -> None:
    """Sinks, a ring that has gone round, pages half from the tail and half from new tokens."""
    geometry = Geometry(2, 2, 64, key_bias=True)
    tokens = random_tokens(330, geometry)
    ours, theirs = both(ops, cuda, spec, geometry, tokens, [3, 100, 0, 0, 1, 70, 155])
    assert_equal_stores(ours, theirs)
    for got, expected in zip(read(ours), read(theirs), strict=True):
        if "nuq" in str(ours.spec) or "kvquant" in spec:
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        else:
            assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("spec", [*INTQ[::5], *NORM, *OTHERS, *NUQ[::2], *VQ])
def test_numbers_that_no_model_should_have(ops: CpuOps, cuda: CudaOps, spec: str) -> None:
    """Beyond f16, infinite, NaN of either sign, subnormal: from the ring and as new tokens."""
    geometry = Geometry(1, 2, 64)
    tokens = random_tokens(256, geometry)
    rng = np.random.default_rng(8)
    for part in tokens:
        part[:, 64:128] *= 1e5
        part[:, 192:] *= 2.0**-24
        strange = np.array([np.inf, -np.inf, np.nan, -np.nan, 1e-40, -0.0, 0.0], np.float32)
        places = rng.random(part.shape) < 0.01
        places[:, 128, 0] = True  # the first of a group, and of the token's
        part[places] = rng.choice(strange, places.sum())
    ours, theirs = both(ops, cuda, f"{spec},sink=0,window=0", geometry, tokens, [100, 0, 155])
    assert page_bytes(ours) == page_bytes(theirs)
    assert contents(ours) == contents(theirs)
    np.testing.assert_allclose(read(ours), read(theirs), rtol=2e-7)


@pytest.mark.parametrize("many", [False, True])
def test_outliers_in_a_tie(ops: CpuOps, cuda: CudaOps, many: bool) -> None:
    """Equal sizes, more than there are slots for, or just a few."""
    geometry = Geometry(1, 3, 64)
    rng = np.random.default_rng(1)
    shape = (1, 128, 3, 64)
    keys = np.where(rng.random(shape) < (0.3 if many else 0.004), 50, 0.25)
    values = np.round(rng.normal(0, 2, shape))
    tokens = Tokens(*((x * rng.choice([-1, 1], shape)).astype(np.float32) for x in (keys, values)))
    tokens.keys[0, 64:] = 6e4  # all of them far outside, most by equal sizes
    spec = "k=nuq3:1%,v=nuq2:1%,sink=0,window=0"
    assert_equal_stores(*both(ops, cuda, spec, geometry, tokens, [128]))


@pytest.mark.parametrize("inwards", [True, False])
@pytest.mark.parametrize(
    ("dim", "block"), [(64, 0), (64, 64), (80, 16), (256, 256), (6, 2), (128, 32)]
)
def test_change_basis(ops: CpuOps, cuda: CudaOps, inwards: bool, dim: int, block: int) -> None:
    rng = np.random.default_rng(dim + block)
    n, heads = 5, 3
    turns, bias_turns = (
        np.ascontiguousarray(rotary_for(Geometry(1, heads, dim)).table(positions))
        for positions in (np.arange(7, 7 + n), np.arange(900, 900 + n))
    )
    bias = rng.normal(0, 2, (heads, dim)).astype(np.float32)
    parts = {"turns": turns, "bias": bias, "bias_turns": bias_turns}
    for left_out in ((), ("turns",), ("bias",), ("bias_turns",), ("turns", "bias", "bias_turns")):
        given = {name: part for name, part in parts.items() if name not in left_out}
        rows = rng.normal(0, 2, (n, heads, dim)).astype(np.float32)
        rows[0, 0, :3] = np.inf, -np.inf, 1e31
        got, expected = (backend.to_device(rows.copy()) for backend in (cuda, ops))
        for backend, x in ((cuda, got), (ops, expected)):
            on_device = {name: backend.to_device(part) for name, part in given.items()}
            backend.change_basis(x, inwards, hadamard=block, **on_device)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_round_rows_append_and_recall(ops: CpuOps, cuda: CudaOps, dtype: str) -> None:
    """Every kind of number: beyond f16, midway, subnormal, NaN with its sign and payload."""
    name = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, (16, 2, 8), dtype=np.uint64).astype(np.uint32)
    rows = bits.view(np.float32)
    rows[0, 0] = [65504, 65519, 65520, 1e9, -1e9, np.inf, -np.inf, np.nan]
    rows[1, 0] = [2.0**-25, 3 * 2.0**-25, 2.0**-24, 1e-40, -0.0, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 0]
    results = []
    for backend in (cuda, ops):
        rounded = backend.to_device(rows.copy())
        backend.round_rows(rounded, KVSpec.parse(name).sides(0)[0].codec.exact_dtype)
        store = new_store(backend, f"{name},sink=8,window=10", Geometry(1, 2, 8))
        x: Any = backend.to_device(rows)
        back: list[bytes] = []
        turned: Any = backend.to_device(rows[::-1])
        view = store.view(0)
        rows_of_ring = int(view.settings[place.TAIL_ROWS])
        for slot, sink, n in ((0, True, 8), (rows_of_ring - 3, False, 16), (5, False, 1)):
            backend.append(view, x[:n], turned[:n], slot, sink)
            for is_value in (False, True):
                out = backend.empty((n, 2, 8))
                backend.recall(view, is_value, slot, out, sink)
                back.append(out.tobytes())
        results.append([rounded.tobytes(), *back])
    assert results[0] == results[1]


def test_the_formats_fit() -> None:
    for spec in (*INTQ, *NORM, *OTHERS, *NUQ, *VQ, *ON_GPU):
        assert fits(spec, Geometry(2, 2, 64)), spec
