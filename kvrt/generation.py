"""A continuation: while it runs, and what it was when it is finished."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .session import FinishReason, Session, Step

if TYPE_CHECKING:
    from .backends import Ops
    from .kvstore import KVSpec


@dataclass(frozen=True)
class Generation:
    """A finished continuation.

    `token_ids` are the generated tokens without the stop token that ended them; seconds are of
    compute only (no loading); `tokens_per_s` is generated tokens / `decode_s`, 0.0 for fewer than
    two tokens; `device` is where they were computed, in words; `cache_bytes` is the KV cache at the
    end, `peak_bytes` the most memory held at once so far: the process's, on a GPU the allocator's.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    finish_reason: FinishReason
    kv: str
    device: str
    cache_bytes: int
    peak_bytes: int


class Run:
    """A continuation in progress: iterate over its steps, then ask for the `generation`.

    `session` is the cache that it fills.
    """

    def __init__(self, session: Session, steps: Iterator[Step], spec: KVSpec, ops: Ops) -> None:
        self.session = session
        self._steps = steps
        self._spec = spec
        self._ops = ops
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._reason: FinishReason = "interrupted"

    def __iter__(self) -> Iterator[Step]:
        for step in self._steps:
            self._text.append(step.text)
            if step.token_id is not None:
                self._token_ids.append(step.token_id)
            if step.finish_reason is not None:
                self._reason = step.finish_reason
            yield step

    def generation(self) -> Generation:
        """Everything generated so far, with the timings."""
        timings = self.session.timings
        return Generation(
            text="".join(self._text),
            token_ids=list(self._token_ids),
            prompt_tokens=timings.prompt_tokens,
            prefill_s=timings.prefill_s,
            decode_s=timings.decode_s,
            tokens_per_s=timings.tokens_per_s,
            finish_reason=self._reason,
            kv=str(self._spec),
            device=self._ops.device_name,
            cache_bytes=self.session.store.stats().bytes,
            peak_bytes=self._ops.peak_bytes(),
        )
