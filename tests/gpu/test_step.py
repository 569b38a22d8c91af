"""The decode step on a GPU: the tests of the emulated one, and its graph."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.backends.cuda import CudaOps
from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry, KVSpec, KVStore
from kvrt.models.decoder import Decoder
from kvrt.models.families import expected_tensors, ignored_tensor
from kvrt.weights import Weights
from tests.helpers.codecs import FittedTables
from tests.helpers.tiny_model import write_tiny_model
from tests.unit.test_step import (  # noqa: F401  collected here, with this file's `backend`
    test_an_interrupted_step_leaves_the_store,
    test_best,
    test_norms_come_before_the_rotation,
    test_refused,
)

PROMPT, STEPS = 100, 150


@pytest.fixture
def backend(cuda: CudaOps) -> Ops:
    return cuda


class Run:
    """A decoder, an empty store, and what comes of them."""

    def __init__(self, ops: Ops, folder: Path, config: Any, spec: str) -> None:
        weights = Weights.open(folder, expected_tensors(config), ignored_tensor)
        self.decoder = Decoder(config, weights, ops)
        geometry = Geometry(config.num_layers, config.num_kv_heads, config.head_dim)
        self.store = KVStore(
            geometry, KVSpec.parse(spec), ops, 512, rotary=self.decoder.rotary,
            calibration=FittedTables(geometry),
        )  # fmt: skip

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """After a prompt, and after each token behind it: (1 + STEPS, vocab_size) f32."""
        rows = [self.decoder.prefill(ids[:PROMPT], self.store)]
        rows += [self.decoder.decode(int(token), self.store) for token in ids[PROMPT:]]
        return np.stack(rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, np.ndarray]:
    folder = tmp_path_factory.mktemp("model")
    config = write_tiny_model(
        folder, "qwen3", dtype="float16", num_heads=8, num_kv_heads=2, head_dim=64
    )
    ids = np.random.default_rng(0).integers(0, config.vocab_size, PROMPT + STEPS)
    return folder, config, ids


@pytest.mark.parametrize(
    "spec",
    [
        "f16",
        "kvrt4",
        "k=int4:channel:g64:page,v=int4:token:g32:had",
        "vq2",
        "k=rvq5x256,v=rvq2x512",
    ],
)  # fmt: skip
def test_the_graph_gives_what_eager_launches_give(
    cuda: CudaOps, model: Any, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through sealed pages: the graph is captured once and reads lengths from the device."""
    folder, config, ids = model
    by_graph = Run(cuda, folder, config, spec).logits(ids)
    monkeypatch.setenv("KVRT_GRAPH", "0")
    eager = Run(cuda, folder, config, spec).logits(ids)
    np.testing.assert_array_equal(by_graph, eager)


def test_two_stores_take_turns(cuda: CudaOps, model: Any) -> None:
    """Each has a graph of its own; the second makes scratch memory grow that the first holds."""
    folder, config, ids = model
    run = Run(cuda, folder, config, "f16")
    alone = run.logits(ids)
    other = Run(cuda, folder, config, "kvrt4")
    again = Run(cuda, folder, config, "f16")
    rows = [again.decoder.prefill(ids[:PROMPT], again.store)]
    other.decoder.prefill(ids[:PROMPT], other.store)
    for token in ids[PROMPT:]:
        rows.append(again.decoder.decode(int(token), again.store))
        other.decoder.decode(int(token), other.store)
    np.testing.assert_array_equal(np.stack(rows), alone)


def test_logits_are_those_of_the_cpu(ops: CpuOps, cuda: CudaOps, model: Any) -> None:
    """Prefill multiplies 16-bit activations, which is what the tolerance is for."""
    folder, config, ids = model
    found, wanted = (Run(backend, folder, config, "f16").logits(ids) for backend in (cuda, ops))
    errors = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert errors.max() < 6e-3
