"""The chat template of a model folder: where it is found, and how it is rendered safely.

Templates come from the outside. They run in `MeteredEnvironment`, which bounds their work and
memory, and whatever goes wrong in one ends in a `TemplateError` of one line.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import TemplateError

if TYPE_CHECKING:
    from jinja2 import Template

    from .template_sandbox import MeteredEnvironment

MAX_SOURCE = 200_000  # characters; the largest that model makers publish are about 20,000


class ChatTemplate:
    """One jinja2 template that turns messages into the text a model was trained on.

    `special_tokens` are the variables it may use besides the messages: `bos_token`, `eos_token`...
    It is compiled at the first rendering, so that a broken template harms only chats.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = {"bos_token": "", "eos_token": "", **(special_tokens or {})}
        self._compiled: tuple[MeteredEnvironment, Template] | None = None
        self._lock = threading.Lock()  # the environment's meter counts one rendering at a time

    @classmethod
    def from_dir(
        cls,
        folder: Path | None,
        tokenizer_config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
    ) -> ChatTemplate | None:
        """Find it in chat_template.jinja, tokenizer_config.json or chat_template.json, in this
        order (without a folder, in the second); None if there is none.

        TemplateError if what is there is no template.
        """
        source = _find_source(folder, tokenizer_config)
        return None if source is None else cls(source, special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation. TemplateError if the template fails, loops or refuses it."""
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **variables,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._render(messages, variables)
        except _Refused as refused:
            others = [message for message in messages if message.get("role") != "system"]
            if len(others) == len(messages) or not self._accepts(others, variables):
                raise TemplateError(
                    f"the chat template refuses this conversation: {refused}"
                ) from None
            raise TemplateError(
                f"the chat template refuses the system role: {refused}; "
                f"this model works without a system message"
            ) from None

    def _accepts(self, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]) -> bool:
        try:
            self._render(messages, variables)
        except TemplateError:
            return False
        return True

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]) -> str:
        # jinja2 costs 30 ms and 5 MiB, which a command without a chat need not pay.
        from jinja2.exceptions import TemplateSyntaxError

        from .template_meter import Meter, TemplateRefusal
        from .template_sandbox import MeteredEnvironment

        if len(self.source) > MAX_SOURCE:
            raise TemplateError(
                f"the chat template has {len(self.source)} characters, at most {MAX_SOURCE} work"
            )
        plain = [dict(message) for message in messages]
        with self._lock:
            try:
                if self._compiled is None:
                    environment = MeteredEnvironment()
                    self._compiled = environment, environment.from_string(self.source)
                environment, template = self._compiled
                environment.meter = Meter(sum(_characters(message) for message in plain))
                return template.render(messages=plain, **variables)
            except TemplateRefusal as error:
                raise _Refused(_one_line(str(error))) from None
            except TemplateSyntaxError as error:
                raise TemplateError(
                    f"the chat template is malformed, line {error.lineno}: {_one_line(str(error))}"
                ) from None
            except RecursionError:
                raise TemplateError("the chat template fails: it calls itself too deeply") from None
            except Exception as error:  # a template can raise anything that Python can
                reason = _one_line(str(error)) or type(error).__name__
                raise TemplateError(f"the chat template fails: {reason}") from None


class _Refused(TemplateError):
    """The template called `raise_exception`; the message is the template's own."""


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of message content (text, or lists and dicts of it) with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_text(item, change) for item in value]
    return value


def _characters(value: Any) -> int:
    total = 0

    def count(text: str) -> str:
        nonlocal total
        total += len(text)
        return text

    map_text(value, count)
    return total


def _find_source(folder: Path | None, tokenizer_config: Mapping[str, Any]) -> str | None:
    if folder is not None and (alone := folder / "chat_template.jinja").is_file():
        return _read(alone)
    name, found = "tokenizer_config.json", tokenizer_config.get("chat_template")
    if found is None and folder is not None:
        packed = folder / "chat_template.json"
        name, found = packed.name, _read_packed(packed) if packed.is_file() else None
    if found is None:
        return None
    if isinstance(found, list):
        found = _default_of(name, found)
    if not isinstance(found, str):
        raise TemplateError(f"{name}: chat_template is {type(found).__name__}, expected text")
    return found


def _read_packed(path: Path) -> Any:
    try:
        data = json.loads(_read(path))
    except ValueError as error:
        raise TemplateError(f"{path} is not JSON: {_one_line(str(error))}") from None
    return data.get("chat_template") if isinstance(data, dict) else data


def _default_of(name: str, entries: list[Any]) -> Any:
    named = {
        entry["name"]: entry.get("template")
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str)
    }
    if len(named) == 1 and len(entries) == 1:
        return next(iter(named.values()))
    if "default" not in named:
        raise TemplateError(f"{name}: chat_template names {sorted(named)}, but no 'default'")
    return named["default"]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path} cannot be read: {_one_line(str(error))}") from None


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
