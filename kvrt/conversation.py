"""The messages of a chat, and how they are written to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import StorageError, UsageError

FILE_FORMAT = "kvrt-chat"
FILE_VERSION = 1

Message = dict[str, str]


def new_message(role: str, content: str) -> Message:
    """A message. Raises UsageError for a text that is not valid Unicode."""
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the {role} message is not valid Unicode at character {error.start}"
        ) from None
    return {"role": role, "content": content}


def is_text(path: Path) -> bool:
    """Whether a conversation is saved there as text, without its cache."""
    return path.suffix.lower() == ".json"


def as_text(name: str) -> str:
    """A name as it can be written: a folder's may hold bytes that are no text."""
    return name.encode("utf-8", "replace").decode("utf-8")


def to_json(messages: list[Message], model: str) -> str:
    """A conversation as text; `model` is a name for people."""
    data = {
        "format": FILE_FORMAT,
        "version": FILE_VERSION,
        "model": model,
        "messages": messages,
    }
    return json.dumps(data, ensure_ascii=False, indent=1) + "\n"


def from_json(text: str | bytes, path: Path) -> list[Message]:
    """The messages that `to_json` wrote. Raises StorageError naming the path."""
    try:
        data = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
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
        messages.append(new_message(str(role), content))
    if messages and messages[-1]["role"] == "user":
        raise StorageError(f"{path}: the last message has no answer")
    return messages
