"""Vector-quantised caches on a GPU: the codes are the CPU's, and attention agrees with its own."""

from typing import Any

import numpy as np
import pytest

from kvrt.backends import books_variant
from kvrt.backends.cpu import CpuOps
from kvrt.backends.cuda import CudaOps
from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry, KVStore
from tests.helpers.stores import append, attend, fill, new_store, page_bytes, random_tokens

TOLERANCE = {"pq": 1e-3, "rvq": 2e-3}
"""What entries bring to a score, and weights, are halves, as in the tests of the emulated GPU."""

CASES = [
    ("vq2", 64, 3, 1411, None), ("vq2", 128, 4, 5000, None), ("vq2", 128, 5, 2000, 300),
    ("vq2", 64, 2, 100, None), ("vq1.5", 128, 4, 9000, None), ("vq1.5", 64, 8, 700, 64),
    ("vq1", 128, 1, 3000, None), ("vq1", 192, 2, 900, None), ("vq1", 256, 4, 500, 100),
    ("k=pq8x256:r3:had,v=pq8x256:r1:had,sink=4", 64, 9, 300, None),
    ("k=pq8x256:r1,v=pq8x256:r3,sink=70,window=1", 64, 5, 1300, None),
    ("vqkv", 128, 4, 3000, None), ("vqkv", 64, 3, 9000, None), ("vqkv", 128, 8, 2500, 700),
    ("k=rvq28x1024,v=rvq8x512,sink=4,window=128", 64, 3, 2411, None),
    ("k=rvq14x1024,v=rvq8x512,sink=4,window=128", 64, 3, 4096, None),
    ("k=rvq5x256:had,v=rvq17x256,sink=4", 64, 2, 777, None),
    ("k=rvq18x512,v=rvq12x512:had,sink=1,window=5", 128, 6, 1500, None),
]  # fmt: skip


def stores(spec: str, dim: int, tokens: int, *backends: Ops) -> list[KVStore]:
    """A layer of two KV heads on each backend, filled by prompts and by single tokens."""
    geometry = Geometry(1, 2, dim)
    rows, later = random_tokens(tokens, geometry), random_tokens(70, geometry, seed=1)
    made = [new_store(ops, spec, geometry) for ops in backends]
    for store in made:
        fill(store, rows, [tokens // 3, tokens - tokens // 3])
        append(store, later)
    return made


@pytest.mark.parametrize(("spec", "dim", "group", "tokens", "window"), CASES)
def test_codes_and_attention(
    ops: CpuOps, cuda: CudaOps, spec: str, dim: int, group: int, tokens: int, window: int | None
) -> None:
    other, mine = stores(spec, dim, tokens, ops, cuda)
    assert page_bytes(mine) == page_bytes(other)
    q = np.random.default_rng(2).normal(0, 1, (2 * group, dim)).astype(np.float32)
    expected, found = (
        attend(store, q, scale=dim**-0.5, window=window).astype(np.float64)
        for store in (other, mine)
    )
    tolerance = TOLERANCE["rvq" if "rvq" in str(other.spec.k) else "pq"]
    assert np.linalg.norm(found - expected) < tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("dim", [64, 128])
def test_whole_heads_are_encoded_where_tensor_cores_find_no_room(
    cuda: CudaOps, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_tensor_cores, again = stores("k=rvq4x512,v=rvq2x1024", dim, 600, cuda, cuda)
    launched, launch = set(), cuda._store

    def watched(name: str, *more: Any, **options: Any) -> None:
        launched.add(name)
        launch(name, *more, **options)

    monkeypatch.setattr(cuda, "_store", watched)
    monkeypatch.setattr(books_variant, "encode_shared", lambda dim: cuda.device.max_shared)
    (alone,) = stores("k=rvq4x512,v=rvq2x1024", dim, 600, cuda)
    assert "seal" in launched
    assert page_bytes(alone) == page_bytes(by_tensor_cores) == page_bytes(again)
