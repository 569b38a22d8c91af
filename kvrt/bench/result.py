"""What was measured of one case in one format, and what is to be remarked upon."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..kvstore.stats import StoreStats
from .case import Case

if TYPE_CHECKING:
    from ..kvstore import KVSpec

SLOW_FIRST = 1.25
"""A first repetition that takes so much longer than any other was not warmed up."""

UNSTEADY = 0.1
"""Deviations beyond this share of the mean are remarked upon."""


@dataclass(frozen=True)
class Measured:
    """One case in one format.

    `seconds` of each repetition; `stats` is what the store held at the end; `peak_bytes` the most
    memory held while the cache was filled and the case ran, no other cache beside it, or since the
    process began where `peak_is_own` is false; `used_bytes` is what was taken of the whole GPU
    then, None on a CPU. `expected_bytes` is what the format that was asked for must hold at the
    end, or may hold at most if it compresses prompts; `read_bytes` what a decoded token reads on
    average of weights and cache, None where a prompt is part of the case.
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
    used_bytes: int | None
    read_bytes: float | None

    @property
    def tokens_per_s(self) -> list[float]:
        return [self.case.tokens / seconds for seconds in self.seconds]

    @property
    def read_bandwidth(self) -> float | None:
        """Bytes a second that decoding reads."""
        if self.read_bytes is None:
            return None
        return self.read_bytes * self.case.n_gen / statistics.fmean(self.seconds)

    @property
    def remarks(self) -> list[str]:
        """What a reader must know before trusting the numbers."""
        found = []
        if self.effective != self.asked:
            found.append(f"asked for {self.asked}, ran {self.effective}")
        held, expected = self.stats.bytes, self.expected_bytes
        compresses = self.asked.compression is not None
        if held > expected or (held < expected and not compresses):
            most = "at most " * compresses
            found.append(f"cache holds {held:,} bytes, its format {most}{expected:,}")
        if not self.stats.sealed_tokens and (compresses or self.stats.bits_per_element < 16):
            found.append("nothing packed in so few tokens")
        if not self.warmed_up:
            found.append("no warm-up")
        first, *others = self.seconds
        if len(others) > 1 and first > SLOW_FIRST * max(others):
            times = first / statistics.median(others)
            found.append(
                f"first repetition took {times:.1f} times as long: not warmed up, or disturbed"
            )
        if others and (share := deviation(self.seconds)) > UNSTEADY:
            found.append(f"unsteady: deviation {share:.0%}")
        return found


def deviation(samples: Sequence[float]) -> float:
    """The standard deviation of samples beside their mean; 0 for a single one."""
    return statistics.stdev(samples) / statistics.fmean(samples) if len(samples) > 1 else 0.0
