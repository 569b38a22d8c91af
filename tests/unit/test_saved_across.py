"""A cache saved on one device goes on on the other."""

from pathlib import Path

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry, load_store, save_store
from tests.emulator import COMPILER
from tests.helpers import zone_stores
from tests.helpers.emulated_device import emulated_ops
from tests.helpers.stores import append, contents, extend, new_store, random_tokens, read

GEOMETRY = Geometry(2, 2, 32)
TOKENS = random_tokens(220, GEOMETRY)

SPECS = ("f16", "bf16", "f8", "k=int4:channel:g64:page,v=int4:token:g32,sink=4,window=30", "q8_0")


@pytest.fixture
def gpu() -> Ops:
    if COMPILER is None:
        pytest.skip("the emulator needs g++")
    return emulated_ops()


@pytest.mark.parametrize("way", ["to the GPU", "to the CPU"])
@pytest.mark.parametrize("spec", SPECS)
def test_saved_here_loaded_there(
    ops: CpuOps, gpu: Ops, tmp_path: Path, spec: str, way: str
) -> None:
    first, second = (ops, gpu) if way == "to the GPU" else (gpu, ops)
    store, path = new_store(first, spec, GEOMETRY), tmp_path / "cache"
    extend(store, TOKENS.part(0, 150))
    save_store(store, path, model="m", token_ids=list(range(150)))
    loaded = load_store(path, new_store(second, spec, GEOMETRY), model="m").store
    assert len(loaded) == 150
    assert contents(loaded) == contents(store)
    append(loaded, TOKENS.part(150, 220))
    append(store, TOKENS.part(150, 220))
    for mine, other in zip(read(loaded), read(store), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("bulk", [False, True])
def test_loaded_zones_are_attended_as_before(gpu: Ops, tmp_path: Path, bulk: bool) -> None:
    """A block of threads has several blocks of zones beside each other in its memory."""
    gpu = emulated_ops(bulk)
    store = zone_stores.filled(gpu, "rdkv:128")
    save_store(store, tmp_path / "cache")
    loaded = load_store(tmp_path / "cache", zone_stores.new_store(gpu, "rdkv:128")).store
    q = np.random.default_rng(0).normal(0, 1, (4, 16)).astype(np.float32)
    for layer in range(2):
        found = []
        for held in (store, loaded, store.fork()):
            out = np.zeros_like(q)
            gpu.attend(q, held.view(layer), 0.25, None, out)
            found.append(out.tobytes())
        assert len(set(found)) == 1
