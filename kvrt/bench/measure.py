"""Runs the cases of a benchmark and times them.

Tokens are random, so nothing is tokenised or sampled; loading is over before. What is timed is the
decoder's own calls, and what is recorded is what was really there: the store says its format and
its bytes, the device its peak.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from ..kvstore.stats import StoreStats, estimate, read_bytes
from .case import Case, Settings
from .fill import Synthetic, Told, prefill, random_ids

if TYPE_CHECKING:
    from ..generate import Model
    from ..kvstore import KVSpec, KVStore

WARM_STEPS = 8
"""Decoded tokens of a warm-up."""

SLOW_FIRST = 1.25
"""A first repetition that takes so much longer than any other was not warmed up."""

UNSTEADY = 0.1
"""Deviations beyond this share of the mean are remarked upon."""


@dataclass(frozen=True)
class Measured:
    """One case in one format.

    `seconds` of each repetition; `stats` is what the store held at the end; `peak_bytes` the most
    memory held since the cache began to be filled, or since the process began where `peak_is_own`
    is false. `expected_bytes` is what the format that was asked for must hold at the end,
    `read_bytes` what a decoded token reads on average of weights and cache, None where a prompt is
    part of the case.
    """

    case: Case
    asked: KVSpec
    effective: KVSpec
    seconds: tuple[float, ...]
    warmed_up: bool
    stats: StoreStats
    expected_bytes: int
    peak_bytes: int
    peak_is_own: bool
    read_bytes: float | None

    @property
    def tokens_per_s(self) -> list[float]:
        return [self.case.tokens / seconds for seconds in self.seconds]

    @property
    def read_bandwidth(self) -> float | None:
        """Bytes a second that decoding reads."""
        if self.read_bytes is None:
            return None
        return self.read_bytes * self.case.n_gen / statistics.median(self.seconds)

    @property
    def remarks(self) -> list[str]:
        """What a reader must know before trusting the numbers."""
        found = []
        if self.effective != self.asked:
            found.append(f"asked for {self.asked}, ran {self.effective}")
        if self.stats.bytes != self.expected_bytes:
            found.append(
                f"cache holds {self.stats.bytes:,} bytes, its format {self.expected_bytes:,}"
            )
        if not self.warmed_up:
            found.append("no warm-up")
        first, *others = self.seconds
        if len(others) > 1 and first > SLOW_FIRST * max(others):
            times = first / statistics.median(others)
            found.append(f"first repetition took {times:.1f} times as long: not warmed up")
        elif others and (share := deviation(self.seconds)) > UNSTEADY:
            found.append(f"unsteady: deviation {share:.0%}")
        return found


def deviation(samples: Sequence[float]) -> float:
    """The standard deviation of samples beside their mean; 0 for a single one."""
    return statistics.stdev(samples) / statistics.fmean(samples) if len(samples) > 1 else 0.0


def planned_tokens(cases: Sequence[Case], settings: Settings) -> int:
    """Tokens that `Bench.run` will tell of, for one format."""
    total = before = 0
    for depth, group in groupby(cases, key=lambda case: case.depth):
        total += depth - before * (settings.fill == "synthetic")
        before = depth
        for case in group:
            warm = _warming(case).tokens if settings.warmup else 0
            total += warm + settings.repetitions * case.tokens
    return total


def _warming(case: Case) -> Case:
    return Case(case.n_prompt, min(case.n_gen, WARM_STEPS), case.depth)


class Bench:
    """Measures a loaded model. `clock` gives seconds; `told` hears of every token computed."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        clock: Callable[[], float] | None = None,
        told: Told = lambda count: None,
    ) -> None:
        self._model = model
        self._settings = settings
        self._clock = clock or perf_counter
        self._told = told
        self._synthetic = Synthetic(model, settings.seed) if settings.fill == "synthetic" else None

    def run(self, spec: KVSpec, cases: Sequence[Case]) -> Iterator[Measured]:
        """Measure cases, whose depths must not decrease, one after the other."""
        store: KVStore | None = None
        for depth, group in groupby(cases, key=lambda case: case.depth):
            own = self._model.ops.reset_peak()
            store = self._filled(spec, depth, store)
            peak = self._model.ops.peak_bytes()
            for case in group:
                own = self._model.ops.reset_peak() and own
                yield self._measure(spec, case, store, peak, own)

    def _filled(self, spec: KVSpec, depth: int, store: KVStore | None) -> KVStore:
        """A store of so many tokens; a synthetic one goes on where it was."""
        if self._synthetic is not None:
            store = self._model.new_store(spec) if store is None else store
            self._synthetic.grow(store, depth, self._told)
            return store
        store = self._model.new_store(spec)
        prefill(self._model, store, self._ids(depth), self._settings.batch)
        self._told(depth)
        return store

    def _ids(self, count: int) -> np.ndarray:
        return random_ids(self._model, count, self._settings.seed)

    def _measure(
        self, spec: KVSpec, case: Case, store: KVStore, filled_peak: int, own: bool
    ) -> Measured:
        if self._settings.warmup:
            self._once(store, _warming(case))
        samples = []
        for _ in range(self._settings.repetitions):
            seconds, stats = self._once(store, case)
            samples.append(seconds)
        return Measured(
            case=case,
            asked=spec,
            effective=store.spec,
            seconds=tuple(samples),
            warmed_up=self._settings.warmup,
            stats=stats,
            expected_bytes=estimate(store.geometry, spec, case.context),
            peak_bytes=max(filled_peak, self._model.ops.peak_bytes()),
            peak_is_own=own,
            read_bytes=None if case.n_prompt else self._read_bytes(store, case),
        )

    def _once(self, store: KVStore, case: Case) -> tuple[float, StoreStats]:
        """Seconds of one repetition, and what the store held at its end. Leaves it as it was."""
        prompt, tokens = self._ids(case.n_prompt), self._ids(case.n_gen).tolist()
        decode, batch = self._model.decoder.decode, self._settings.batch
        started = self._clock()
        prefill(self._model, store, prompt, batch)
        for token_id in tokens:
            decode(token_id, store)
        seconds = self._clock() - started
        stats = store.stats()
        store.truncate(case.depth)
        self._told(case.tokens)
        return seconds, stats

    def _read_bytes(self, store: KVStore, case: Case) -> float:
        """Mean bytes that a decode step reads: weights, and the cache of what really is there."""
        lengths = range(case.depth + 1, case.context + 1)
        cache = read_bytes(store.geometry, store.spec, lengths, self._model.config.windows)
        return self._model.decoder.step_bytes + statistics.fmean(cache)
