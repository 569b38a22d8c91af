"""A conversation: the messages, and a session whose cache is kept from turn to turn."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .conversation import Message, as_text, from_json, is_text, new_message, to_json
from .errors import ContextFullError, StorageError, TemplateError, UnsupportedError, UsageError
from .paths import atomic_write
from .sampler import SamplingParams
from .saved_conversation import CONVERSATION
from .session import Cancel, FinishReason, PrefillProgress, Session, Step, Timings, common_prefix
from .tensor_file import is_tensor_file
from .trizone.store import ZoneStore

if TYPE_CHECKING:
    from .generate import Model
    from .stores import Store
    from .trizone.segment import Widths


@dataclass(frozen=True)
class ChatStats:
    """Figures of a conversation: `timings` are the last answer's, cache bytes the KV cache's.

    `widths`: of each layer of a cache that was compressed, in how many bits its tokens and channels
    are kept; nothing for any other cache.
    `peak_bytes` is the most memory held at once so far: the process's, on a GPU the allocator's.
    """

    messages: int
    cached_tokens: int
    max_context: int
    cache_bytes: int
    bits_per_element: float
    peak_bytes: int
    timings: Timings
    widths: tuple[Widths, ...] = ()


class Chat:
    """Messages and their cache. `messages` is a list of {"role", "content"}, the system's first.

    An answer joins the history once it has any text or has ended by itself, also when it is
    interrupted or the context is full; otherwise the history is as if nothing had been asked.
    """

    def __init__(
        self,
        model: Model,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """`sampling` None is the model's own. Raises UnsupportedError without a chat template."""
        if model.tokenizer.template is None:
            raise UnsupportedError(
                f"{model.name} has no chat template, so it cannot chat; "
                "`kvrt generate` continues plain text with it"
            )
        self.model = model
        self.session = model.new_session()
        self.messages: list[Message] = []
        self.max_tokens = max_tokens
        self.finish_reason: FinishReason | None = None
        self.set_sampling(sampling or model.sampling)
        self.set_system(system)

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are drawn; change it by `set_sampling`."""
        return self._sampling

    def set_sampling(self, sampling: SamplingParams) -> None:
        """Use other sampling parameters from the next answer on; a seed starts afresh."""
        self._sampler = self.model.new_sampler(sampling)
        self._sampling = sampling

    @property
    def system(self) -> str | None:
        """The system message, if there is one."""
        if self.messages and self.messages[0]["role"] == "system":
            return self.messages[0]["content"]
        return None

    def set_system(self, text: str | None) -> None:
        """Set, or with None or "" remove, the system message; the rest of the history stays."""
        rest = self.messages if self.system is None else self.messages[1:]
        self.messages = [new_message("system", text), *rest] if text else list(rest)

    def send(
        self,
        text: str,
        *,
        cancel: Cancel | None = None,
        progress: PrefillProgress | None = None,
    ) -> Generator[str, None, None]:
        """Say `text` and stream the answer in pieces of whole characters.

        Raises UsageError for an empty text, ContextFullError if the conversation with it does not
        fit, TemplateError if the template refuses it; the history is then unchanged.
        """
        if not text.strip():
            raise UsageError("the message is empty")
        return self._answer([*self.messages, new_message("user", text)], cancel, progress)

    def regen(
        self, *, cancel: Cancel | None = None, progress: PrefillProgress | None = None
    ) -> Generator[str, None, None]:
        """Answer the last message once more, in place of the last answer.

        The old answer stays if the new one does not begin. Raises UsageError if there is none.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UsageError("there is no answer to repeat yet")
        return self._answer(self.messages[:-1], cancel, progress)

    def clear(self) -> None:
        """Forget the conversation, but not the system message."""
        system = self.system
        self.messages = []
        self.set_system(system)
        self.session.clear()
        self.finish_reason = None

    def save(self, path: str | Path) -> None:
        """Write the conversation and its cache to a file, whole or not at all.

        A path that ends in .json gets the conversation alone, as text. Raises StorageError.
        """
        path, name = Path(path), as_text(self.model.name)
        text = to_json(self.messages, name)
        if not Path(os.path.realpath(path)).parent.is_dir():
            raise StorageError(f"{path}: its folder does not exist")
        if is_text(path):
            atomic_write(path, text.encode("utf-8"))
        else:
            self._own_session().save(path, {CONVERSATION: text, "model_name": name})

    def load(self, path: str | Path) -> None:
        """Replace the conversation by a saved one, of either kind.

        It goes on from the cache in the file; without one the cache follows at the next answer,
        keeping what both have in common. Raises StorageError for a file that cannot be read, is
        damaged or holds no conversation, UnsupportedError for a cache of another model, format or
        calibration, ContextFullError for one that is too long; the chat is then as it was.
        """
        path = Path(path)
        try:
            with_cache = is_tensor_file(path)
            text = "" if with_cache else path.read_bytes()
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
        if not with_cache:
            messages, session = from_json(text, path), self.session
        else:
            messages, session = self._load_cache(path)
        # A session that is ahead of the messages is one whose next answer keeps less of it.
        self.session = session
        self.messages = messages
        self.finish_reason = None

    def _load_cache(self, path: Path) -> tuple[list[Message], Session]:
        try:
            session, metadata = self.session.load(path)
        except (UnsupportedError, ContextFullError) as error:
            raise type(error)(
                f"{error} (saved as .json, a conversation goes on anywhere, without its cache)"
            ) from None
        text = metadata.get(CONVERSATION)
        if text is None:
            raise StorageError(f"{path} holds a cache without a conversation")
        size = self.model.config.vocab_size
        if not all(0 <= token_id < size for token_id in session.tokens):
            raise StorageError(f"{path}: damaged: token ids beyond the vocabulary of {size}")
        return from_json(text, path), session

    def _own_session(self) -> Session:
        """The session, without what its cache still has of an earlier conversation."""
        try:
            ids = self.model.tokenizer.encode_chat(self.messages, add_generation_prompt=False)
        except TemplateError:  # nothing of the cache can be of use to it as it is
            ids = []
        kept = common_prefix(self.session.tokens, ids)
        if kept == len(self.session.tokens):
            return self.session
        session = self.session.fork()
        session.truncate(kept)
        return session

    def stats(self) -> ChatStats:
        """Figures of the conversation and its last answer."""
        store = self.session.store.stats()
        return ChatStats(
            messages=len(self.messages),
            cached_tokens=len(self.session.store),
            max_context=self.session.store.max_tokens,
            cache_bytes=store.bytes,
            bits_per_element=store.bits_per_element,
            peak_bytes=self.model.ops.peak_bytes(),
            timings=self.session.timings,
            widths=_widths(self.session.store),
        )

    def _answer(
        self, messages: Sequence[Message], cancel: Cancel | None, progress: PrefillProgress | None
    ) -> Generator[str, None, None]:
        """Check that `messages` fit, now; the iterator then computes the answer."""
        ids = self.model.tokenizer.encode_chat(messages, add_generation_prompt=True)
        limit = self.session.store.max_tokens
        if len(ids) > limit:
            raise ContextFullError(
                f"the conversation with this message has {len(ids):,} tokens, more than the "
                f"context limit of {limit:,}; the message was not added"
            )
        steps = self.session.run(
            ids, self.max_tokens, self._sampler, cancel=cancel, progress=progress
        )
        return self._follow(list(messages), steps)

    def _follow(self, messages: list[Message], steps: Iterator[Step]) -> Generator[str, None, None]:
        self.finish_reason = None
        pieces: list[str] = []
        try:
            for step in steps:
                pieces.append(step.text)
                if step.finish_reason is not None:
                    self.finish_reason = step.finish_reason
                if step.text:
                    yield step.text
        finally:
            # Also after a KeyboardInterrupt, an error, or a reader who stopped listening.
            answer = "".join(pieces)
            if self.finish_reason is None:
                self.finish_reason = "interrupted"
            if answer or self.finish_reason != "interrupted":
                self.messages = [*messages, new_message("assistant", answer)]


def _widths(store: Store) -> tuple[Widths, ...]:
    """Those of each layer of a store that has compressed something."""
    if not isinstance(store, ZoneStore) or not store.stats().sealed_tokens:
        return ()
    return tuple(store.widths(layer) for layer in range(store.geometry.num_layers))
