"""JSON objects read key by key: each value is checked where read; errors name file and key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError, KvrtError, StorageError

MAX_JSON_BYTES = 64 << 20  # an index of a very large model is a few MiB; more is not a config file
_REQUIRED: Any = object()


def shown(value: object, limit: int = 60) -> str:
    """A value as JSON on one line, cut to `limit` characters, for an error message."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):  # no JSON, or an int of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def read_object(path: Path, error: type[KvrtError] = ConfigError) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises `error` when it is not one, StorageError when the file cannot be read, and lets
    FileNotFoundError pass: only the caller knows whether the file may be absent.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise StorageError(f"{path}: cannot be read: {problem.strerror or problem}") from None
    if len(raw) > MAX_JSON_BYTES:
        raise error(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB, expected a small JSON file")
    return parse_object(raw, str(path), error)


def parse_object(
    raw: bytes, where: str, error: type[KvrtError] = ConfigError, **options: Any
) -> dict[str, Any]:
    """Parse UTF-8 JSON that must be an object; `options` go to json.loads. Raises `error`."""
    try:
        data = json.loads(raw.decode("utf-8"), **options)
    except UnicodeDecodeError as problem:
        raise error(f"{where}: not UTF-8 (byte {problem.start}), expected a JSON object") from None
    except RecursionError:
        raise error(f"{where}: nested too deeply, expected a JSON object") from None
    except ValueError as problem:  # also numbers of more digits than Python converts
        raise error(f"{where}: not JSON ({problem}), expected a JSON object") from None
    if not isinstance(data, dict):
        raise error(f"{where}: got {shown(data)}, expected a JSON object")
    return data


class Fields:
    """A JSON object and the name of its file. `null` counts as absent.

    Each getter takes the key, a default (without one the key is required) and bounds, and
    raises ConfigError naming file and key. `aliases` maps a key to other spellings of it.
    """

    def __init__(
        self, data: object, where: str, aliases: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where}: got {shown(data)}, expected a JSON object")
        self.data: Mapping[str, Any] = data
        self.where = where
        self.aliases = aliases or {}

    def __contains__(self, key: str) -> bool:
        return self.raw(key) is not None

    def raw(self, key: str) -> Any:
        """The value as JSON gave it, or None."""
        for name in (key, *self.aliases.get(key, ())):
            if self.data.get(name) is not None:
                return self.data[name]
        return None

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"{self.where}: required key {key!r} is missing")
        return default

    def fail(self, key: str, expected: str) -> ConfigError:
        """The error of a key whose value is not what was expected."""
        value = shown(self.raw(key))
        return ConfigError(f"{self.where}: key {key!r}: got {value}, expected {expected}")

    def integer(self, key: str, default: Any = _REQUIRED, *, low: int = 1, high: int) -> Any:
        """An int of low..high; `default` as given when the key is absent."""
        value = self._get(key, default)
        if key not in self:
            return value
        # bool is an int to Python, not to the writer of a config.
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"an integer of {low}..{high}")
        return value

    def number(self, key: str, default: Any = _REQUIRED, *, low: float, high: float) -> Any:
        """A float of low..high (both finite, both included); `default` when the key is absent."""
        value = self._get(key, default)
        if key not in self:
            return value
        # NaN and the infinities are between no two finite bounds.
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (fits and low <= value <= high):
            raise self.fail(key, f"a finite number of {low:g}..{high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A bool."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """No, one or several token ids: null, an int or a list of ints."""
        value = self.raw(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**31:
                raise self.fail(key, "a token id, a list of token ids or null")
        return tuple(ids)
