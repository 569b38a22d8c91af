"""What a prompt's compression is told: the queries of its layer, as attention sees them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvrt
from kvrt.trizone.store import ZoneStore
from tests.helpers.tiny_model import write_tiny_model


@pytest.mark.parametrize(
    ("kv", "asked"), [("rdkv:64", 32), ("h2o:64", 150), ("rdkv:64,recompress=100", 32)]
)
def test_policies_see_the_queries_of_their_own_layer(
    kv: str, asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of what the layer has made of its rows."""
    write_tiny_model(tmp_path / "m", "qwen3", tokenizer=True, head_dim=64, num_layers=3)
    model = kvrt.load(str(tmp_path / "m"), kv=kv, threads=1)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 150)
    wanted: list[np.ndarray] = []
    model.decoder.trace(ids, lambda layer, q, k, v: wanted.append(np.array(q)))
    got: list[np.ndarray] = []
    compress = ZoneStore.compress

    def noted(self: ZoneStore, layer: int, k: Any, v: Any, queries: Any) -> None:
        got.append(np.array(queries(slice(150 - asked, 150))))
        assert np.allclose(queries(slice(140, 150)), got[-1][-10:], rtol=0, atol=1e-5)
        compress(self, layer, k, v, queries)

    monkeypatch.setattr(ZoneStore, "compress", noted)
    model.decoder.prefill(ids, model.new_store())
    assert len(got) == 3
    for right, seen in zip(wanted, got):
        assert np.allclose(right[-asked:], seen, rtol=0, atol=1e-5)
        assert np.ptp(right[-asked:]) > 1
