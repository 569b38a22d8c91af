"""What is in a saved conversation, read from its file alone, without the model it was made with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .conversation import from_json
from .errors import StorageError, UsageError
from .kvstore.serialize import describe
from .kvstore.spec import KVSpec
from .tensor_file import TensorFile, is_tensor_file
from .trizone.saving import saved_widths
from .trizone.segment import Widths

CONVERSATION = "conversation"
"""Its name among the texts of a saved cache."""

_GGUF = b"GGUF"


@dataclass(frozen=True)
class SavedConversation:
    """`kv`: the cache format; `model`: a name for people; `messages`: how many, None in a cache
    without a conversation; `widths`: of each layer, none where nothing was compressed."""

    kv: str
    tokens: int
    model: str
    file_bytes: int
    messages: int | None
    num_layers: int
    num_kv_heads: int
    head_dim: int
    widths: list[Widths]


def is_saved(path: Path) -> bool:
    """Whether a path is a file that `read_saved` is to read: safetensors by itself."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            if file.read(len(_GGUF)) == _GGUF:
                return False
        return is_tensor_file(path)
    except (OSError, ValueError):
        return False


def read_saved(path: Path) -> SavedConversation:
    """What a file of `Chat.save` or `Session.save` holds; of its numbers only counts are read.

    Raises StorageError for a file that cannot be read, is damaged or is another one,
    UnsupportedError for one of another version.
    """
    with TensorFile(path) as file:
        found = describe(file)
        text = file.metadata.get(CONVERSATION)
        widths: list[Widths] = []
        if "zones" in file.metadata:
            try:
                spec = KVSpec.parse(found.spec)
            except UsageError as error:
                raise file.damaged(str(error)) from None
            widths = saved_widths(file, found.tokens, spec, found.num_layers, found.head_dim)
            if not any(sum(layer.tokens.values()) for layer in widths):
                widths = []
        return SavedConversation(
            kv=found.spec,
            tokens=found.tokens,
            model=file.metadata.get("model_name", ""),
            file_bytes=_size(path),
            messages=None if text is None else len(from_json(text, path)),
            num_layers=found.num_layers,
            num_kv_heads=found.num_kv_heads,
            head_dim=found.head_dim,
            widths=widths,
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
