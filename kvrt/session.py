"""One conversation with the cache: feed tokens (re-using what is already stored), then draw steps.

`Session` is the only place that pairs token ids with cached positions: `tokens[i]` is the id whose
keys and values lie at position i of the store. Everything else (Model, Chat) goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from traceback import clear_frames
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from .errors import ContextFullError, OutOfMemoryError, StorageError, UsageError

if TYPE_CHECKING:
    from .sampler import Sampler
    from .stores import Store

FinishReason = Literal["stop", "length", "context", "interrupted"]
PrefillProgress = Callable[[int, int], None]
Cancel = Callable[[], bool]


class TokenStream(Protocol):
    """Turns ids into text one by one and never gives half a character."""

    def push(self, token_id: int, /) -> str: ...

    def flush(self) -> str: ...


class SessionTokenizer(Protocol):
    """What a session needs of a tokenizer."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    def stream(self, *, continued: bool = False) -> TokenStream: ...


class SessionDecoder(Protocol):
    """What a session needs of a decoder: calls append to the store and give (vocab_size,) f32."""

    def prefill(
        self,
        token_ids: Sequence[int],
        store: Store,
        *,
        all_logits: bool = False,
        progress: PrefillProgress | None = None,
    ) -> np.ndarray: ...

    def decode(self, token_id: int, store: Store) -> np.ndarray: ...

    def decode_best(self, token_id: int, store: Store) -> tuple[int, float]:
        """The likeliest token (the first of equals) and its logit, in place of all logits."""
        ...


@dataclass(frozen=True)
class Step:
    """One drawn token: its id, the text it completes, and on the last step why the run ended.

    `token_id` is None on a last step that draws no token to keep: a stop id (which is never part of
    the answer), an interruption, or a run of 0 tokens.
    """

    token_id: int | None
    text: str
    finish_reason: FinishReason | None = None


@dataclass
class Timings:
    """Counts and compute seconds of one run; loading and the reader's own time are left out."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens really computed (not re-used from the cache) per second of prefill."""
        computed = self.prompt_tokens - self.reused_tokens
        return computed / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of decoding; 0.0 for fewer than two tokens."""
        if self.generated_tokens < 2 or self.decode_s <= 0:
            return 0.0
        return self.generated_tokens / self.decode_s


class StopStrings:
    """Passes text through up to the first stop string, holding back what may become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        """Raises UsageError for a bare string or an empty stop string."""
        if isinstance(stop, str):
            raise UsageError("stop must be a sequence of strings, got one string: write [text]")
        if any(not text for text in stop):
            raise UsageError("a stop string must not be empty")
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Give the text that is safe to show, and whether a stop string was met."""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = self._possible_start()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self, text: str) -> str:
        """Give the rest of the text at the end of a run, still cut at a stop string."""
        shown, _ = self.push(text)
        shown, self._held = shown + self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(stop.startswith(end) for stop in self._stop):
                return size
        return 0


class Session:
    """A cache and the token ids in it.

    After any exception, KeyboardInterrupt included, the next call first makes ids and cache agree
    again, so a session can be used on after an interruption.
    """

    def __init__(
        self,
        decoder: SessionDecoder,
        tokenizer: SessionTokenizer,
        store: Store,
        fingerprint: Callable[[], str] = str,
    ) -> None:
        """`fingerprint` identifies the model in saved files; it is asked only there."""
        self._decoder = decoder
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer
        self.store = store
        self.tokens: list[int] = []
        self.timings = Timings()

    def clear(self) -> None:
        """Forget every token."""
        self.store.clear()
        self.tokens.clear()

    def truncate(self, count: int) -> None:
        """Keep the first `count` tokens, or fewer where the cache cannot be cut there."""
        del self.tokens[count:]
        self._agree()

    def fork(self) -> Session:
        """A session that holds the same tokens and goes its own way."""
        self._agree()
        return self._with(self.store.fork(), list(self.tokens))

    def save(self, path: Path, metadata: Mapping[str, str] | None = None) -> None:
        """Write cache and token ids to a file, whole or not at all, with further texts by name.

        Raises StorageError.
        """
        from .kvstore import save_store

        self._agree()
        save_store(
            self.store, path,
            model=self._fingerprint(), token_ids=self.tokens, metadata=metadata,
        )  # fmt: skip

    def load(self, path: Path) -> tuple[Session, dict[str, str]]:
        """A new session with what `save` wrote, and the texts; this one stays as it is.

        Raises StorageError for a file that cannot be read or is damaged, UnsupportedError for one
        of another model, cache format or calibration, ContextFullError where it does not fit.
        """
        from .kvstore import load_store

        loaded = load_store(path, self.store, model=self._fingerprint())
        tokens = loaded.token_ids or []
        if len(tokens) != len(loaded.store):
            raise StorageError(f"{path}: a cache without token ids, so it cannot be gone on with")
        return self._with(loaded.store, tokens), loaded.metadata

    def _with(self, store: Store, tokens: list[int]) -> Session:
        session = Session(self._decoder, self._tokenizer, store, self._fingerprint)
        session.tokens = tokens
        return session

    def check_fits(self, count: int) -> None:
        """Raise ContextFullError if `count` tokens are more than the cache may hold."""
        limit = self.store.max_tokens
        if count > limit:
            raise ContextFullError(
                f"the prompt has {count:,} tokens, more than the context limit of {limit:,}"
            )

    def feed(
        self, token_ids: Sequence[int], *, progress: PrefillProgress | None = None
    ) -> np.ndarray:
        """Make the cache hold exactly `token_ids` and give the last one's logits (vocab_size,) f32.

        The longest prefix already cached that the cache can be cut to is kept, up to all tokens but
        the last (whose logits are asked for); the rest is computed. Raises UsageError for no
        tokens and ContextFullError before anything is changed, OutOfMemoryError with that prefix
        cached where the device has no memory for the rest.
        """
        ids = list(token_ids)
        if not ids:
            raise UsageError("no tokens to feed: the prompt is empty")
        self.check_fits(len(ids))
        self._agree()
        kept = self.store.cut(min(common_prefix(self.tokens, ids), len(ids) - 1))
        if kept < len(self.tokens):
            del self.tokens[kept:]
            self.store.truncate(kept)
        started = perf_counter()
        rest = ids[kept:]
        with growing(self.store, len(rest)):
            if len(rest) == 1:
                logits = self._decoder.decode(rest[0], self.store)
            else:
                logits = self._decoder.prefill(rest, self.store, progress=progress)
        self.tokens.extend(rest)
        seconds = perf_counter() - started
        self.timings = Timings(prompt_tokens=len(ids), reused_tokens=kept, prefill_s=seconds)
        return logits

    def run(
        self,
        token_ids: Sequence[int],
        max_tokens: int | None,
        sampler: Sampler,
        stop: Sequence[str] = (),
        *,
        continued: bool = False,
        cancel: Cancel | None = None,
        progress: PrefillProgress | None = None,
    ) -> Iterator[Step]:
        """Feed `token_ids`, then draw up to `max_tokens` tokens (None: until a stop or the limit).

        `continued`: the text goes on from the prompt's, so its leading space is kept (SentencePiece
        models drop it where a text begins). `cancel` is asked between tokens and during the
        prefill; once it says True the run ends with the reason "interrupted". Wrong arguments and
        a prompt that does not fit raise here and now, before any step is asked for.
        """
        if max_tokens is not None and max_tokens < 0:
            raise UsageError(f"max_tokens must be at least 0, or None, got {max_tokens}")
        if not token_ids:
            raise UsageError("the prompt is empty")
        self.check_fits(len(token_ids))
        stream = self._tokenizer.stream(continued=continued)
        stops = StopStrings(stop)
        return self._steps(token_ids, max_tokens, sampler, stream, stops, cancel, progress)

    def _steps(
        self,
        token_ids: Sequence[int],
        max_tokens: int | None,
        sampler: Sampler,
        stream: TokenStream,
        stops: StopStrings,
        cancel: Cancel | None,
        progress: PrefillProgress | None,
    ) -> Iterator[Step]:
        try:
            logits = self.feed(token_ids, progress=_cancellable(progress, cancel))
        except _Cancelled:
            yield Step(None, "", "interrupted")
            return
        timings = self.timings
        reason: FinishReason | None = "length" if max_tokens == 0 else None
        last: int | None = None
        while reason is None:
            if cancel is not None and cancel():
                reason = "interrupted"
                break
            started = perf_counter()
            if last is not None:
                # The token is in the cache before its id is in the list: _agree() relies on it.
                with growing(self.store, 1):
                    draw = self._decoded(last, sampler)
                self.tokens.append(last)
                last = draw()
            else:
                last = sampler.sample(logits, self.tokens)
            timings.decode_s += perf_counter() - started
            if last in self._tokenizer.stop_ids:
                reason = "stop"
                break
            timings.generated_tokens += 1
            shown, met = stops.push(stream.push(last))
            if met:
                yield Step(last, shown, "stop")
                return
            if timings.generated_tokens == max_tokens:
                yield Step(last, shown + stops.finish(stream.flush()), "length")
                return
            if len(self.store) >= self.store.max_tokens:
                yield Step(last, shown + stops.finish(stream.flush()), "context")
                return
            yield Step(last, shown)
        yield Step(None, stops.finish(stream.flush()), reason)

    def _decoded(self, token_id: int, sampler: Sampler) -> Callable[[], int]:
        """Put a token into the cache; give what draws the next one, once its id is in the list."""
        if sampler.takes_best:
            best = self._decoder.decode_best(token_id, self.store)
            return lambda: sampler.take(*best)
        logits = self._decoder.decode(token_id, self.store)
        return lambda: sampler.sample(logits, self.tokens)

    def _agree(self) -> None:
        """Cut ids and cache to what both hold, after an interruption between the two."""
        common = self.store.cut(min(len(self.tokens), len(self.store)))
        del self.tokens[common:]
        if len(self.store) > common:
            self.store.truncate(common)


@contextmanager
def growing(store: Sized, tokens: int) -> Iterator[None]:
    """Turn an allocator's error, while a cache grows, into one that says what the device holds.

    Raises OutOfMemoryError.
    """
    try:
        yield
    except MemoryError as error:
        # Activations of the calls that failed would be held for as long as the error is.
        clear_frames(error.__traceback__)
        missing = f"{tokens:,} more" if tokens else "a cache"
        raise OutOfMemoryError(
            f"context limit on this device: {len(store):,} tokens are cached and there is no "
            f"memory for {missing} ({error})"
        ) from error


class _Cancelled(KeyboardInterrupt):
    """Raised inside a prefill by its progress callback; the decoder treats it as a Ctrl-C."""


def _cancellable(progress: PrefillProgress | None, cancel: Cancel | None) -> PrefillProgress | None:
    if cancel is None:
        return progress

    def check(done: int, total: int) -> None:
        if cancel():
            raise _Cancelled
        if progress is not None:
            progress(done, total)

    return check


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two lists have in common from the first on."""
    for at, (left, right) in enumerate(zip(a, b)):
        if left != right:
            return at
    return min(len(a), len(b))
