"""Launches that are the same each time, as one CUDA graph."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import KernelError


def wanted() -> bool:
    """Whether graphs are to be used: not with KVRT_GRAPH=0, nor with KVRT_SYNC=1."""
    return os.environ.get("KVRT_GRAPH") != "0" and os.environ.get("KVRT_SYNC") != "1"


class Program:
    """Run as it is at first, which compiles kernels and allocates what they need; then captured.

    A graph holds addresses, so what `keep` gives when it is captured is kept as long as it.
    """

    def __init__(self, xp: Any, run: Callable[[], None], keep: Callable[[], list[Any]]):
        self._cuda = xp.cuda
        self._run = run
        self._keep = keep
        self._warm = False
        self._graph: Any = None
        self._kept: list[Any] = []

    def __call__(self) -> None:
        """Start the work on CuPy's current stream. Raises KernelError."""
        if not self._warm:
            self._run()
            self._warm = True
            return
        if self._graph is None:
            self._graph = self._capture()
            self._kept = self._keep()
        try:
            self._graph.launch()
        except Exception as error:
            raise KernelError(f"the decode step cannot be launched: {error}") from error

    def _capture(self) -> Any:
        stream = self._cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                self._run()
            except BaseException:
                self._abandon(stream)
                raise
            try:
                return stream.end_capture()
            except Exception as error:
                raise KernelError(
                    f"the decode step cannot be captured: {error}; KVRT_GRAPH=0 runs it without"
                ) from error

    @staticmethod
    def _abandon(stream: Any) -> None:
        """End a capture that failed, so that its stream can go."""
        with suppress(Exception):  # what failed before is what counts
            stream.end_capture()
