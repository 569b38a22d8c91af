"""What one row of a benchmark runs, in llama-bench's words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..backends.ops import PAGE_TOKENS
from ..errors import UsageError

if TYPE_CHECKING:
    from ..kvstore import KVSpec

Fill = Literal["prefill", "synthetic"]
"""What is cached before a test begins: a real prefill of random token ids, or random keys and
values sealed by the real encoder."""


@dataclass(frozen=True)
class Case:
    """`n_prompt` tokens at once, then `n_gen` one by one, behind `depth` cached ones.

    Repetitions take turns in `places` places, each by its own length earlier than the one before.
    """

    n_prompt: int
    n_gen: int
    depth: int = 0
    places: int = 1

    @property
    def name(self) -> str:
        """`pp512`, `tg128 @ d4096`, `pp512+tg128`."""
        parts = [f"{kind}{count}" for kind, count in self._parts if count]
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def _parts(self) -> tuple[tuple[str, int], ...]:
        return ("pp", self.n_prompt), ("tg", self.n_gen)

    @property
    def tokens(self) -> int:
        """Tokens that are computed, and counted in tokens/s."""
        return self.n_prompt + self.n_gen

    @property
    def context(self) -> int:
        """Tokens cached at the end."""
        return self.depth + self.tokens

    def repeated(self, left: int) -> Case:
        """What runs where so many repetitions are left: the last one is the case itself."""
        return replace(self, depth=self.depth - left % self.places * self.tokens)


@dataclass(frozen=True)
class Settings:
    """How cases are run. `batch`: tokens of one prefill call, None for all at once."""

    repetitions: int = 5
    warmup: bool = True
    fill: Fill = "prefill"
    batch: int | None = None
    seed: int = 0


def cases(
    prompts: list[int], generated: list[int], pairs: list[tuple[int, int]], depths: list[int]
) -> list[Case]:
    """All tests at each depth: prompts, generations, then pairs of both; zeros are left out."""
    found = []
    for depth in sorted(depths):
        found += [Case(count, 0, depth) for count in prompts if count]
        found += [Case(0, count, depth) for count in generated if count]
        found += [Case(*pair, depth) for pair in pairs if any(pair)]
    return found


def scan_case(context: int, steps: int) -> Case:
    """Decoding the last tokens of a context.

    One token in 64 seals a page. Repetitions of fewer tokens at one place would meet that always or
    never, and formats with other sinks elsewhere; so they go through the places of a whole page.
    """
    count = min(steps, context)
    return Case(0, count, context - count, max(min(PAGE_TOKENS, context) // count, 1))


def check_batches(
    name: str, spec: KVSpec, tests: Iterable[Case], fill: Fill, batches: Sequence[int | None]
) -> None:
    """Raise UsageError where batches would cut a prompt that a format compresses as a whole."""
    if spec.compression is None:
        return
    longest = max(max(case.n_prompt, case.depth * (fill == "prefill")) for case in tests)
    for batch in batches:
        if batch is not None and batch < longest:
            raise UsageError(
                f"-b: {name} compresses a prompt as a whole, so its {longest:,} tokens cannot go "
                f"through {batch:,} at a time; without -b, or with -b {longest}, they can"
            )
