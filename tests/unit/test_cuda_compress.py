"""Compressing a layer with the CUDA kernels, emulated: the bytes that a CPU makes."""

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.backends.cuda import CudaOps
from kvrt.kvstore import KVSpec
from kvrt.trizone.compress import compress
from tests.emulator import COMPILER
from tests.helpers.emulated_device import EmulatedDevice
from tests.helpers.tiles import TILES

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

KV_HEADS, GROUP, DIM = 2, 2, 64


class SameScores(CudaOps):
    """Scores of a CPU: those of tensor cores are rounded otherwise."""

    def __init__(self, cpu: CpuOps):
        super().__init__(EmulatedDevice())
        self._cpu = cpu

    def attention_received(
        self, q: np.ndarray, keys: np.ndarray, scale: float, out: np.ndarray
    ) -> None:
        self._cpu.attention_received(q, keys, scale, out)


@pytest.fixture(scope="module")
def both() -> tuple[CpuOps, CudaOps]:
    cpu = CpuOps(1)
    return cpu, SameScores(cpu)


@pytest.mark.parametrize(
    "kv",
    ["rdkv:64", "rdkv:20%", "rdkv:64:shared", "rdkv:paper:64", "snapkv:64", "adakv:64", "h2o:64"],
)
@pytest.mark.parametrize("name", ["gaussian", "wild"])
def test_a_layer_becomes_the_same_bytes(both: tuple[CpuOps, CudaOps], kv: str, name: str) -> None:
    compression = KVSpec.parse(kv).compression
    assert compression is not None
    tokens = 320
    keys, values = (
        np.concatenate([TILES[name](KV_HEADS, DIM, seed + i) for i in range(tokens // 64)])
        for seed in (0, 50)
    )
    asked = np.random.default_rng(0).normal(0, 2, (tokens, GROUP * KV_HEADS, DIM))
    queries = asked.astype(np.float32).__getitem__
    budget = compression.budget_bytes(tokens, DIM)
    cpu, cuda = (
        compress(ops, compression, budget, keys, values, slice(4, tokens - 32), queries, tokens)
        for ops in both
    )
    assert len(cpu.units) >= 2
    np.testing.assert_array_equal(cuda.units, cpu.units)
    np.testing.assert_array_equal(cuda.heads, cpu.heads)
    np.testing.assert_array_equal(cuda.channels, cpu.channels)
    assert cuda.data.tobytes() == cpu.data.tobytes()
