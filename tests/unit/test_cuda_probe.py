"""The measured bandwidth of a GPU, with a stand-in that says how long reads take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvrt.backends.cuda_probe import read_bandwidth
from kvrt.errors import OutOfMemoryError


class FakeGpu:
    """Reads 1 or 2 GB a millisecond; what is launched after an idle time starts late."""

    multiprocessors = 7

    def __init__(self, free: int, largest: int):
        self.free, self.largest = free, largest
        self.now, self.idle, self.reads = 0.0, True, 0
        self.sizes: list[int] = []
        device = self

        class Event:
            at = 0.0

            def record(self) -> None:
                self.at = device.now

            def synchronize(self) -> None:
                device.idle = True

        def elapsed(begin: Event, end: Event) -> float:
            return end.at - begin.at

        self.xp = SimpleNamespace(cuda=SimpleNamespace(Event=Event, get_elapsed_time=elapsed))

    def available_bytes(self) -> int:
        return self.free

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        size = 4 * shape[0]
        if size > self.largest:
            raise OutOfMemoryError("full")
        self.sizes.append(size)
        return SimpleNamespace(size=shape[0])

    def module(self, name: str) -> Any:
        assert name == "layers.cu"
        return self

    def launch(self, kernel: str, grid: Any, block: Any, buffer: Any, *rest: Any) -> None:
        if self.idle:
            self.now += 5
        self.idle = False
        if kernel == "random_rows":
            assert rest[1] == buffer.size
            return
        count, sums = rest
        assert count * 4 == buffer.size and sums.size == grid[0] * block[0]
        self.reads += 1
        self.now += count * 16 / (2e9 if 5 <= self.reads <= 8 else 1e9)


@pytest.mark.parametrize(
    ("free", "largest", "wanted"),
    [(64 << 30, 64 << 30, 4 << 30), (3 << 30, 3 << 30, 1 << 30), (64 << 30, 600 << 20, 512 << 20)],
)
def test_the_best_of_several_rounds_counts(free: int, largest: int, wanted: int) -> None:
    device = FakeGpu(free, largest)
    assert read_bandwidth(device) == pytest.approx(2e12, rel=1e-6)
    assert device.sizes[0] == wanted


def test_no_room_is_an_error() -> None:
    with pytest.raises(OutOfMemoryError):
        read_bandwidth(FakeGpu(1 << 20, 1 << 20))
