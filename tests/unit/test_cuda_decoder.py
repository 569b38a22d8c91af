"""A whole decoder on the CUDA backend, emulated, against the CPU's."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvrt.backends import cuda
from kvrt.backends.cpu import CpuOps
from kvrt.backends.cuda import CudaOps
from kvrt.backends.ops import Linear, Ops
from kvrt.kvstore import Geometry, KVSpec, KVStore
from kvrt.models.decoder import Decoder
from kvrt.models.families import expected_tensors, ignored_tensor
from kvrt.weights import Weights
from tests.emulator import COMPILER
from tests.helpers.emulated_device import emulated_ops
from tests.helpers.tiny_model import write_tiny_model

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

PROMPT, STEPS = 90, 3

# Activations of prefill and what attention multiplies are 16-bit floats.
TOLERANCES = {"float16": 6e-3, "bfloat16": 4e-2, "mixed": 4e-2}


@pytest.mark.parametrize(
    ("dtype", "spec", "options"),
    [
        ("float16", "f16", {}),
        ("float16", "kvrt4", {"attention_bias": False, "mlp_bias": True}),
        ("mixed", "f16", {}),
        ("bfloat16", "k=int8:channel:g64,v=int8:token:g32,window=1", {"tie": True}),
    ],
)
def test_logits(
    ops: CpuOps, tmp_path: Path, dtype: str, spec: str, options: dict[str, Any]
) -> None:
    config = write_tiny_model(
        tmp_path, dtype=dtype, num_heads=2, num_kv_heads=1, head_dim=64, **options
    )
    ids = np.random.default_rng(0).integers(0, config.vocab_size, PROMPT + STEPS)
    found = [run(backend, tmp_path, config, spec, ids) for backend in (emulated_ops(), ops)]
    for mine, other in zip(*found, strict=True):
        assert np.linalg.norm(mine - other) < TOLERANCES[dtype] * np.linalg.norm(other)


def run(ops: Ops, folder: Path, config: Any, spec: str, ids: np.ndarray) -> list[np.ndarray]:
    """Logits after a prompt in two turns, and after each decoded token."""
    decoder = Decoder(config, Weights.open(folder, expected_tensors(config), ignored_tensor), ops)
    geometry = Geometry(config.num_layers, config.num_kv_heads, config.head_dim)
    store = KVStore(geometry, KVSpec.parse(spec), ops, 256)
    found = [decoder.prefill(part, store) for part in (ids[:70], ids[70:PROMPT])]
    found += [decoder.decode(int(token), store) for token in ids[PROMPT:]]
    return [np.array(logits, np.float64) for logits in found]


@pytest.mark.parametrize(("count", "tolerance"), [(5, 2e-5), (128, 2e-5), (129, 4e-3)])
def test_weights_of_two_types_at_once(count: int, tolerance: float) -> None:
    """Few rows are multiplied as two 16-bit floats each."""
    ops, rng = emulated_ops(), np.random.default_rng(0)
    x = rng.normal(0, 1, (count, 64)).astype(np.float32)
    weights = [
        rng.normal(0, 1, (32, 64)).astype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16)
    ]
    layers = [Linear(ops.matrix(weight)) for weight in weights]
    outs = [ops.empty((count, 32)) for _ in weights]
    ops.linear(x, layers, outs)
    expected = [x @ weight.astype(np.float32).T for weight in weights]  # (count, 32)
    for out, right, layer in zip(outs, expected, layers, strict=True):
        assert np.linalg.norm(out - right) < tolerance * np.linalg.norm(right)
        ops.linear_add(x, layer, out)
        assert np.linalg.norm(out - 2 * right) < 2 * tolerance * np.linalg.norm(right)


def test_large_scratch_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_KEPT_BYTES", 20_000)
    ops = emulated_ops()
    config = write_tiny_model(tmp_path, num_heads=2, num_kv_heads=1, head_dim=64)
    decoder = Decoder(config, Weights.open(tmp_path, expected_tensors(config), ignored_tensor), ops)
    store = KVStore(Geometry(config.num_layers, 1, 64), KVSpec.parse("f16"), ops, 256)
    sizes: list[int] = []
    attend_causal = CudaOps.attend_causal

    def spy(self: CudaOps, *arguments: Any) -> None:
        attend_causal(self, *arguments)
        sizes.append(max(held.nbytes for held in self._buffers.values()))

    monkeypatch.setattr(CudaOps, "attend_causal", spy)
    decoder.prefill(list(range(200)), store)
    assert max(sizes) > 20_000
    assert all(held.nbytes <= 20_000 for held in ops._buffers.values())


def test_scratch_that_grows_is_given_back_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator keeps what it freed: too small for the next, which is larger each time."""
    ops = emulated_ops()
    held: list[int] = []

    def release() -> None:
        held.append(sum(array.nbytes for array in ops._buffers.values()))

    monkeypatch.setattr(ops.device, "release", release, raising=False)
    small = ops._scratch("rows", (1000,), np.float32)
    assert ops._scratch("rows", (2000,), np.float32).size == 2000 and small.size == 1000
    sizes = []
    for step in range(1, 17):
        ops._scratch("rows", (step << 20,), np.float32)
        sizes.append(sum(array.nbytes for array in ops._buffers.values()))
    assert held and not any(held)  # nothing was held whenever something was given back
    assert len(held) < 12 and 1 << 26 <= sizes[-1] <= 1.25 * (1 << 26)
