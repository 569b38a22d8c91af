"""A thread pool that survives Ctrl-C and fork.

`concurrent.futures` takes Python locks while it hands out work: a KeyboardInterrupt there leaves
them taken, and every later call hangs. Here all waiting is done in `SimpleQueue`, whose calls are
atomic to signals.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any


class Pool:
    """A fixed number of threads, started at first use."""

    def __init__(self, threads: int):
        self._threads = threads
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._process = 0

    def _start(self) -> None:
        """Start the threads, again where this process was forked from one that had them."""
        jobs = self._jobs = SimpleQueue()
        for index in range(self._threads):
            threading.Thread(target=_work, args=(jobs,), name=f"kvrt-{index}", daemon=True).start()
        weakref.finalize(self, _stop, jobs, self._threads)
        self._process = os.getpid()

    def run(self, function: Callable[[Any], None], jobs: Sequence[Any]) -> None:
        """Call function(job) for all jobs; raise the first error of one.

        Interrupted, it first waits for the calls that have begun and drops the others.
        """
        if self._process != os.getpid():
            self._start()
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        dropped: list[bool] = []
        waiting = 0
        try:
            for job in jobs:
                waiting += 1
                self._jobs.put((function, job, done, dropped))
            while waiting:
                error = done.get()
                waiting -= 1
                if error is not None:
                    raise error
        except BaseException:
            dropped.append(True)
            # The interrupt may have come between counting and handing out: do not wait for ever.
            # A call lasts milliseconds.
            with suppress(Empty):
                for _ in range(waiting):
                    done.get(timeout=1.0)
            raise


def _work(jobs: "SimpleQueue[Any]") -> None:
    while (item := jobs.get()) is not None:
        function, job, done, dropped = item
        error = None
        try:
            if not dropped:
                function(job)
        except BaseException as raised:
            error = raised
        done.put(error)
        del item, function, job, done, dropped, error


def _stop(jobs: "SimpleQueue[Any]", threads: int) -> None:
    for _ in range(threads):
        jobs.put(None)
