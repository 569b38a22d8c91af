"""A conversation: the messages, and a session whose cache is kept from turn to turn."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .backends.memory import peak_resident_bytes
from .errors import ContextFullError, StorageError, UnsupportedError, UsageError
from .paths import atomic_write
from .sampler import SamplingParams
from .session import Cancel, FinishReason, PrefillProgress, Step, Timings

if TYPE_CHECKING:
    from .generate import Model

FILE_FORMAT = "kvrt-chat"
FILE_VERSION = 1

Message = dict[str, str]


@dataclass(frozen=True)
class ChatStats:
    """Figures of a conversation: `timings` are the last answer's, bytes are of the KV cache."""

    messages: int
    cached_tokens: int
    max_context: int
    cache_bytes: int
    bits_per_element: float
    peak_bytes: int
    timings: Timings


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
        self.messages = [_message("system", text), *rest] if text else list(rest)

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
        return self._answer([*self.messages, _message("user", text)], cancel, progress)

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
        """Write the conversation as JSON, whole or not at all. Raises StorageError."""
        data = {
            "format": FILE_FORMAT,
            "version": FILE_VERSION,
            "model": self.model.name,
            "messages": self.messages,
        }
        text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
        atomic_write(Path(path), text.encode("utf-8"))

    def load(self, path: str | Path) -> None:
        """Replace the conversation by a saved one.

        The cache follows at the next answer, keeping what both have in common. Raises StorageError
        if the file cannot be read or holds no conversation; the chat is then as it was.
        """
        self.messages = _read_conversation(Path(path))
        self.finish_reason = None

    def stats(self) -> ChatStats:
        """Figures of the conversation and its last answer."""
        store = self.session.store.stats()
        return ChatStats(
            messages=len(self.messages),
            cached_tokens=len(self.session.store),
            max_context=self.session.store.max_tokens,
            cache_bytes=store.bytes,
            bits_per_element=store.bits_per_element,
            peak_bytes=peak_resident_bytes(),
            timings=self.session.timings,
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
                self.messages = [*messages, _message("assistant", answer)]


def _message(role: str, content: str) -> Message:
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the {role} message is not valid Unicode at character {error.start}"
        ) from None
    return {"role": role, "content": content}


def _read_conversation(path: Path) -> list[Message]:
    try:
        data = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not a saved conversation: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FILE_FORMAT:
        raise StorageError(f"{path} is not a saved conversation: no format {FILE_FORMAT!r} in it")
    if data.get("version") != FILE_VERSION:
        raise StorageError(
            f"{path} has conversation format version {data.get('version')!r}, "
            f"expected {FILE_VERSION}"
        )
    return _checked_messages(data.get("messages"), path)


def _checked_messages(value: Any, path: Path) -> list[Message]:
    """An optional system message, then user and assistant in turn, ending with the assistant."""
    if not isinstance(value, list):
        raise StorageError(f"{path} holds no list of messages")
    messages: list[Message] = []
    for number, item in enumerate(value):
        role = item.get("role") if isinstance(item, dict) else None
        content = item.get("content") if isinstance(item, dict) else None
        turns = number - (messages[0]["role"] == "system" if messages else 0)
        expected = ("user", "assistant")[turns % 2]
        if not isinstance(content, str) or not (
            role == expected or (role == "system" and number == 0)
        ):
            raise StorageError(
                f"{path}: message {number + 1} should be text by the {expected}, got {role!r}"
            )
        messages.append(_message(str(role), content))
    if messages and messages[-1]["role"] == "user":
        raise StorageError(f"{path}: the last message has no answer")
    return messages
