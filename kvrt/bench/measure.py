"""Runs the cases of a benchmark and times them.

Tokens are random, so nothing is tokenised or sampled; loading is over before. What is timed is the
decoder's own calls, which end with logits on the host, and whatever a device still does behind
them. What is recorded is what was really there: the store says its format and its bytes, the device
its peak.

There are two passes. The first runs each case once, one format after the other, with no other cache
in memory: that is the peak, and the warm-up. The second has the caches of all formats side by side
and times their cases in turn, round by round. So whatever slows the machine for a while meets all
of them alike, and shows in their deviations instead of in their differences.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from ..kvstore.stats import StoreStats
from ..trizone.store import ZoneStore
from .budget import expected_bytes
from .case import Case, Settings
from .fill import Synthetic, Told, prefill, random_ids
from .gpu import device_of, settle, used_memory
from .result import Measured

if TYPE_CHECKING:
    from ..generate import Model
    from ..kvstore import KVSpec
    from ..stores import Store


@dataclass(frozen=True)
class Job:
    """The cases of one format; their depths must not decrease."""

    spec: KVSpec
    cases: tuple[Case, ...]

    def at(self, depth: int) -> list[Case]:
        """Its cases at a depth."""
        return [case for case in self.cases if case.depth == depth]


def planned_tokens(jobs: Sequence[Job], settings: Settings) -> int:
    """Tokens that `Bench.run` will tell of."""
    total = 0
    for job in jobs:
        before = 0
        for depth, group in groupby(job.cases, key=lambda case: case.depth):
            goes_on = settings.fill == "synthetic" and job.spec.compression is None
            total += depth + depth - before * goes_on  # in each pass
            total += (settings.repetitions + 1) * sum(case.tokens for case in group)
            before = depth
    return total


@dataclass(frozen=True)
class Peak:
    """Bytes; whether they are the case's own or the whole process's; those of the whole GPU."""

    nbytes: int
    own: bool
    used: int | None


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

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Measured]]:
        """Measure jobs, whose caches must fit into memory together, depth by depth.

        Without a warm-up a job is timed before its peak is measured, and alone.
        """
        if self._settings.warmup:
            peaks = [self._peaks(job) for job in jobs]
            yield from self._timed(jobs, peaks)
            return
        for job in jobs:
            none = Peak(0, False, None)
            cold = list(self._timed([job], [{case: none for case in job.cases}]))
            peaks_of = self._peaks(job)
            for _, found in cold:
                peak = peaks_of[found.case]
                yield (
                    job,
                    replace(
                        found, peak_bytes=peak.nbytes, peak_is_own=peak.own, used_bytes=peak.used
                    ),
                )

    def _peaks(self, job: Job) -> dict[Case, Peak]:
        """The first pass: each case once, and the most memory held since its cache was begun."""
        ops, found = self._model.ops, {}
        for depth, group in groupby(job.cases, key=lambda case: case.depth):
            store = None  # no other cache in this one's peak
            filled_alone = ops.reset_peak()
            store = self._filled(job.spec, depth, None)
            filled = ops.peak_bytes()
            for case in group:
                own = ops.reset_peak() and filled_alone
                self._once(store, case)
                found[case] = Peak(max(filled, ops.peak_bytes()), own, used_memory(ops))
        return found

    def _timed(
        self, jobs: Sequence[Job], peaks: Sequence[dict[Case, Peak]]
    ) -> Iterator[tuple[Job, Measured]]:
        """The second pass: rounds of all cases at a depth."""
        stores: dict[Job, Store] = {}
        for depth in sorted({case.depth for job in jobs for case in job.cases}):
            yield from self._rounds(jobs, peaks, depth, stores)

    def _rounds(
        self,
        jobs: Sequence[Job],
        peaks: Sequence[dict[Case, Peak]],
        depth: int,
        stores: dict[Job, Store],
    ) -> list[tuple[Job, Measured]]:
        """Time all cases at a depth; `stores` are those of the depth before, to go on with."""
        if self._synthetic is None:
            stores.clear()
        runs: list[_Timing] = []
        for job, peaks_of in zip(jobs, peaks):
            if job.at(depth):
                store = self._filled(job.spec, depth, stores.get(job))
                stores[job] = store
                self._prepare(job, store, depth)
                runs += [_Timing(job, case, store, peaks_of[case]) for case in job.at(depth)]
        for number in range(self._settings.repetitions):
            for run in runs:
                case = run.repeated(self._settings.repetitions - 1 - number)
                seconds, run.stats = self._once(run.store, case)
                run.seconds.append(seconds)
                run.lengths += range(case.depth + 1, case.context + 1)
        for run in runs:
            run.store.truncate(depth)
        return [(run.job, self._measured(run)) for run in runs]

    def _prepare(self, job: Job, store: Store, depth: int) -> None:
        """Decode where a GPU keeps its steps as a graph for each store, made before the clock runs.

        The first step runs as it is, the second is recorded. Nothing without a warm-up.
        """
        decodes = any(case.n_gen for case in job.at(depth))
        if self._settings.warmup and decodes and device_of(self._model.ops) is not None:
            for _ in range(2):
                take_back = _taking_back(store)
                self._model.decoder.decode(0, store)
                take_back()
                store.truncate(depth)

    def _filled(self, spec: KVSpec, depth: int, store: Store | None) -> Store:
        """A store of so many tokens; a synthetic one goes on where it was.

        Where prompts are compressed they are one prompt, at any depth.
        """
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

    def _measured(self, run: _Timing) -> Measured:
        spec, case, store = run.job.spec, run.case, run.store
        return Measured(
            case=case,
            asked=spec,
            effective=store.spec,
            seconds=tuple(run.seconds),
            warmed_up=self._settings.warmup,
            stats=run.stats,
            expected_bytes=expected_bytes(self._model.config, store.geometry, spec, case),
            peak_bytes=run.peak.nbytes,
            peak_is_own=run.peak.own,
            used_bytes=run.peak.used,
            read_bytes=None if case.n_prompt else self._read_bytes(run),
        )

    def _once(self, store: Store, case: Case) -> tuple[float, StoreStats]:
        """Seconds of one repetition behind the case's depth, and what the store held at its end."""
        prompt, tokens = self._ids(case.n_prompt), self._ids(case.n_gen).tolist()
        decode, batch = self._model.decoder.decode, self._settings.batch
        store.truncate(case.depth)
        take_back = _taking_back(store)
        settle(self._model.ops)
        started = self._clock()
        prefill(self._model, store, prompt, batch)
        for token_id in tokens:
            decode(token_id, store)
        settle(self._model.ops)
        seconds = self._clock() - started
        stats = store.stats()
        take_back()
        self._told(case.tokens)
        return seconds, stats

    def _read_bytes(self, run: _Timing) -> float:
        """Mean bytes that a decode step reads: weights, and the cache of what really is there."""
        cache = run.store.read_bytes(run.lengths, self._model.config.windows)
        return self._model.decoder.step_bytes + statistics.fmean(cache)


class _Timing:
    """A case in a format while it is timed."""

    def __init__(self, job: Job, case: Case, store: Store, peak: Peak) -> None:
        self.job = job
        self.case = case
        self.store = store
        self.peak = peak
        self.seconds: list[float] = []
        self.lengths: list[int] = []  # of the cache, for each token that was decoded
        self.stats: StoreStats = store.stats()

    def repeated(self, left: int) -> Case:
        """The case of a repetition, where so many are left.

        They stay in one place where prompts are compressed: what is behind one is sealed nowhere.
        """
        return self.case if isinstance(self.store, ZoneStore) else self.case.repeated(left)


def _taking_back(store: Store) -> Callable[[], None]:
    """What makes a store that compresses hold again what it holds now: it cannot be truncated."""
    if not isinstance(store, ZoneStore):
        return lambda: None
    before = store.parts()
    return lambda: store.adopt(before)
