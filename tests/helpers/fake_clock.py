"""A clock that work moves, so that what a benchmark says of its speed can be tested exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.bench import measure
from kvrt.models.decoder import Decoder

BANDWIDTH = 1e9
"""Bytes a second at which the command's tests read."""


class FakeClock:
    """Seconds that only `wait` lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def time_by_bytes(
    monkeypatch: pytest.MonkeyPatch,
    bandwidth: float,
    slowness: Callable[[str], float] = lambda spec: 1.0,
) -> FakeClock:
    """Have decoding take as long as its bytes at a bandwidth (bytes/s), and prefill 1 ms a token.

    `slowness` of a format multiplies the time of its cache's bytes: 1 is a perfect kernel.
    """
    clock = FakeClock()
    decode, prefill = Decoder.decode, Decoder.prefill

    def timed_decode(self: Decoder, token_id: int, store: Any) -> Any:
        out = decode(self, token_id, store)
        (cache,) = store.read_bytes([len(store)], self.config.windows)
        clock.wait((self.step_bytes + cache * slowness(str(store.spec))) / bandwidth)
        return out

    def timed_prefill(self: Decoder, token_ids: Any, store: Any, **rest: Any) -> Any:
        out = prefill(self, token_ids, store, **rest)
        clock.wait(1e-3 * len(token_ids))
        return out

    monkeypatch.setattr(Decoder, "decode", timed_decode)
    monkeypatch.setattr(Decoder, "prefill", timed_prefill)
    monkeypatch.setattr(measure, "perf_counter", clock)
    monkeypatch.setattr(CpuOps, "read_bandwidth", lambda self: bandwidth)
    return clock
