"""The emulator of CUDA kernels: threads meet, warps exchange, and missing waits show."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrt.errors import KernelError
from tests.emulator import COMPILER, EmulatedModule

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

ROOT = Path(__file__).resolve().parents[2]

SOURCE = r"""
#include "common.cuh"

// Each turn, every thread adds what its left neighbour had: threads of all warps need each other.
extern "C" __global__ void turn(int* out, int turns) {
  __shared__ int values[256];
  const int i = threadIdx.x, n = blockDim.x;
  values[i] = i;
  for (int t = 0; t < turns; ++t) {
    __syncthreads();
    const int left = values[(i + n - 1) % n];
    __syncthreads();
    values[i] += left;
  }
  out[blockIdx.x * n + i] = values[i];
}

// What each kind of exchange gives the lanes of each warp: out (5, threads).
extern "C" __global__ void exchange(int* out, int n) {
  const int i = threadIdx.x, lane = i % WARP;
  const int value = 100 * (i / WARP) + lane;
  out[i] = __shfl_xor_sync(ALL_LANES, value, 5);
  out[n + i] = __shfl_down_sync(ALL_LANES, value, 3);
  out[2 * n + i] = __shfl_sync(ALL_LANES, value, 7);
  out[3 * n + i] = int(__ballot_sync(ALL_LANES, lane % 3 == 0));
  out[4 * n + i] = __any_sync(ALL_LANES, value == 131) + 2 * __all_sync(ALL_LANES, value < 100);
}

// c (16, 8) = a (16, 16) b (16, 8), b column by column, f16 or bf16.
extern "C" __global__ void multiply(const u16* a, const u16* b, float* c, int brain) {
  const int row = threadIdx.x / 4, col = threadIdx.x % 4 * 2;
  auto pair = [](const u16* place) { return u32(place[0]) | u32(place[1]) << 16; };
  float sums[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  const u32 a0 = pair(a + row * 16 + col), a1 = pair(a + (row + 8) * 16 + col);
  const u32 a2 = pair(a + row * 16 + col + 8), a3 = pair(a + (row + 8) * 16 + col + 8);
  const u32 b0 = pair(b + row * 16 + col), b1 = pair(b + row * 16 + col + 8);
  if (brain)
    ptx::mma_bfloat(sums, a0, a1, a2, a3, b0, b1);
  else
    ptx::mma_half(sums, a0, a1, a2, a3, b0, b1);
  for (int i = 0; i < 4; ++i) c[(row + i / 2 * 8) * 8 + col + i % 2] = sums[i];
}

// Through ldmatrix and movmatrix: out (6, 32), the four matrices, the first turned twice.
extern "C" __global__ void matrices(const u16* in, u32* out) {
  KVRT_DYNAMIC_SHARED(memory);
  u16* tile = reinterpret_cast<u16*>(memory);
  for (int i = threadIdx.x; i < 4 * 64; i += WARP) tile[i] = in[i];
  __syncwarp();
  u32 plain[4], turned[4];
  ptx::load_matrix4(plain, tile + 8 * threadIdx.x);
  ptx::load_matrix4_transposed(turned, tile + 8 * threadIdx.x);
  for (int i = 0; i < 4; ++i) out[i * WARP + threadIdx.x] = plain[i];
  out[4 * WARP + threadIdx.x] = turned[0];
  out[5 * WARP + threadIdx.x] = ptx::transpose8x8(plain[0]);
}

// Copies a group of 16 bytes a thread, and another; reads after waiting until `left` are under way.
extern "C" __global__ void copy(const float* in, float* out, int left, int wanted) {
  KVRT_DYNAMIC_SHARED(memory);
  float* mine = reinterpret_cast<float*>(memory) + 8 * threadIdx.x;
  for (int i = 0; i < 2; ++i) {
    ptx::copy_async16(mine + 4 * i, in + 8 * threadIdx.x + 4 * i, wanted);
    ptx::commit_copies();
  }
  if (left == 0) ptx::wait_copies<0>();
  if (left == 1) ptx::wait_copies<1>();
  for (int i = 0; i < 8; ++i) out[8 * threadIdx.x + i] = mine[i];
}

// Numbers of each type, and where the thread is.
extern "C" __global__ void numbers(i64* out, int a, i64 b, u32 c, u64 d, float e) {
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int size = blockDim.x * blockDim.y * blockDim.z;
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * size + thread] = a + b + i64(c) + i64(d) + i64(e) + thread;
  atomicAdd(out + gridDim.x * gridDim.y * gridDim.z * size, i64(1));
}

// A thread waits for others that are gone.
extern "C" __global__ void stuck(int* out) {
  if (threadIdx.x == 0) __syncthreads();
  out[0] = 1;
}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The emulator takes equal names for equal sources.
    digest = hashlib.sha256(SOURCE.encode()).hexdigest()[:12]
    path = tmp_path_factory.mktemp("emulated") / f"samples-{digest}.cu"
    path.write_text("using u64 = unsigned long long;\n" + SOURCE)
    return path


@pytest.fixture(scope="module")
def module(path: Path) -> EmulatedModule:
    return EmulatedModule(str(path))


@pytest.mark.parametrize("threads", [1, 31, 32, 33, 256])
def test_barriers(module: EmulatedModule, threads: int) -> None:
    turns, blocks = 6, 3
    out = np.zeros((blocks, threads), np.int32)
    module.launch("turn", (blocks,), (threads,), out, turns)
    expected = np.arange(threads)
    for _ in range(turns):
        expected = expected + np.roll(expected, 1)
    assert np.array_equal(out, np.tile(expected, (blocks, 1)))


def test_exchanges_within_a_warp(module: EmulatedModule) -> None:
    n = 64
    out = np.zeros((5, n), np.int32)
    module.launch("exchange", (1,), (n,), out, n)
    warp, lane = np.arange(n) // 32, np.arange(n) % 32
    bits = sum(1 << i for i in range(0, 32, 3))
    expected = [
        100 * warp + (lane ^ 5),
        100 * warp + np.where(lane + 3 < 32, lane + 3, lane),
        100 * warp + 7,
        np.full(n, np.uint32(bits).astype(np.int32)),
        np.where(warp == 0, 2, 1),
    ]
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("brain", [0, 1])
def test_tensor_core_products(module: EmulatedModule, brain: int) -> None:
    import ml_dtypes

    kind: Any = ml_dtypes.bfloat16 if brain else np.float16
    rng = np.random.default_rng(brain)
    a = rng.normal(size=(16, 16)).astype(kind)
    b = rng.normal(size=(8, 16)).astype(kind)  # (column, row)
    c = np.full((16, 8), np.nan, np.float32)
    module.launch("multiply", (1,), (32,), a.view(np.uint16), b.view(np.uint16), c, brain)
    np.testing.assert_allclose(c, 1 + a.astype(float) @ b.astype(float).T, rtol=1e-6, atol=1e-6)


def test_matrices_from_shared_memory(module: EmulatedModule) -> None:
    tile = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    out = np.zeros((6, 32), np.uint32)
    module.launch("matrices", (1,), (32,), tile, out, shared=tile.nbytes)
    got = out.view(np.uint16).reshape(6, 8, 8)
    assert np.array_equal(got[:4], tile)
    assert np.array_equal(got[4], tile[0].T) and np.array_equal(got[5], tile[0].T)


def test_a_copy_that_is_not_waited_for_shows(module: EmulatedModule) -> None:
    source = np.arange(64, dtype=np.float32).reshape(8, 2, 4)  # (thread, group, number)
    out = np.zeros_like(source)

    def copy(left: int, wanted: int = 16) -> np.ndarray:
        module.launch("copy", (1,), (8,), source, out, left, wanted, shared=source.nbytes)
        return out

    assert np.array_equal(copy(0), source)
    early = copy(1)
    assert np.array_equal(early[:, 0], source[:, 0]) and np.isnan(early[:, 1]).all()
    assert np.isnan(copy(2)).all()
    part = copy(0, wanted=8)
    assert np.array_equal(part[..., :2], source[..., :2]) and not part[..., 2:].any()


def test_numbers_and_places(module: EmulatedModule) -> None:
    grid, block = (2, 3, 4), (4, 3, 5)
    out = np.zeros(24 * 60 + 1, np.int64)
    numbers = (-5, -(1 << 40), (1 << 32) - 1, 1 << 50, 2.5)
    module.launch("numbers", grid, block, out, *numbers)
    expected = sum(int(number) for number in numbers) + np.arange(60)
    assert np.array_equal(out[:-1].reshape(24, 60), np.tile(expected, (24, 1)))
    assert out[-1] == 24 * 60


def test_arguments_are_checked(module: EmulatedModule) -> None:
    with pytest.raises(KernelError, match="turns must be int32"):
        module.launch("turn", (1,), (1,), np.zeros(1, np.int32), 1.5)


def test_an_error_of_the_compiler_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "wrong.cu"
    path.write_text('#include "common.cuh"\nextern "C" __global__ void wrong(int n) { m = n; }\n')
    with pytest.raises(RuntimeError, match=r"m.? was not declared"):
        EmulatedModule(str(path))


def test_threads_that_never_meet_end_the_run(path: Path, module: EmulatedModule) -> None:
    program = (
        "import sys, numpy as np; from tests.emulator import EmulatedModule; "
        "EmulatedModule(sys.argv[1]).launch('stuck', (1,), (2,), np.zeros(1, np.int32))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode < 0 and "wait for each other for ever" in done.stderr
