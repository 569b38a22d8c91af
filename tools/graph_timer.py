"""Times calls that launch kernels, by replays of a CUDA graph that holds them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Timed = Callable[[Sequence[Callable[[], None]]], list[float]]
"""Microseconds of a call, from each repetition."""

LEAST_CALLS = 64
"""Of a graph, so that what its launch takes is little beside them."""


def graph_timer(cupy: Any, repetitions: int) -> Timed:
    """Times by events around replays of a graph of all calls, over and over."""

    def timed(calls: Sequence[Callable[[], None]]) -> list[float]:
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        rounds = -(-LEAST_CALLS // len(calls))
        with stream:
            for call in calls:  # compiles, allocates, uploads: none of it can be captured
                call()
            stream.synchronize()
            stream.begin_capture()
            for _ in range(rounds):
                for call in calls:
                    call()
            graph = stream.end_capture()
            samples = []
            for number in range(repetitions + 2):
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                begin.record(stream)
                graph.launch(stream)
                end.record(stream)
                end.synchronize()
                if number >= 2:  # the first ones warm up
                    milliseconds = cupy.cuda.get_elapsed_time(begin, end)
                    samples.append(1e3 * milliseconds / (rounds * len(calls)))
        return samples

    return timed
