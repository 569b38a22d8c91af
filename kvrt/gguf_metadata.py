"""The metadata of a GGUF, read by key with the expected type."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ConfigError, UnsupportedError
from .fields import shown


@dataclass(frozen=True)
class Metadata:
    """The metadata of one GGUF, read by key with the expected type."""

    source: str
    values: Mapping[str, Any]

    @property
    def arch(self) -> str:
        """The value of general.architecture."""
        return str(self.text("general.architecture"))

    def key(self, suffix: str) -> str:
        """The full key of an architecture's own value."""
        return f"{self.arch}.{suffix}"

    def text(self, key: str, default: str | None = None) -> str:
        """A string value; ConfigError when it is missing without a default, or no string."""
        return str(self._get(key, str, default, "a string"))

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive or zero integer; a per-layer array counts when all its values are equal."""
        value = self.values.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        elif isinstance(value, list):
            raise UnsupportedError(
                f"{self.source}: {key} differs between layers; only one value for all works"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{self.source}: {key} is {_got(value)}, expected an integer")
        return value

    def token_id(self, name: str) -> int | None:
        """The id of a named token such as `eos`; None when absent, or -1 as some files write."""
        key = f"tokenizer.ggml.{name}_token_id"
        if self.values.get(key) in (None, -1, 0xFFFFFFFF):
            return None
        return self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A float written back as the shortest decimal of its float32."""
        value = self._get(key, (int, float), default, "a number")
        with np.errstate(over="ignore"):
            number = float(str(np.float32(value)))
        if not math.isfinite(number):
            raise ConfigError(f"{self.source}: {key} is {number}, expected a finite number")
        return number

    def flag(self, key: str, default: bool) -> bool:
        """A boolean value."""
        return bool(self._get(key, bool, default, "true or false"))

    def strings(self, key: str) -> list[str]:
        """An array of strings; ConfigError when missing or anything else."""
        return list(self._array(key, str))

    def array(self, key: str, kind: type | tuple[type, ...], length: int) -> list[Any]:
        """An array of `length` values of a kind."""
        values = self._array(key, kind)
        if len(values) != length:
            raise ConfigError(
                f"{self.source}: {key} has {len(values)} values, expected {length}, one a token"
            )
        return list(values)

    def _array(self, key: str, kind: type | tuple[type, ...]) -> Sequence[Any]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise ConfigError(f"{self.source}: {key} is {_got(value)}, expected an array")
        return value

    def _get(self, key: str, kind: type | tuple[type, ...], default: Any, want: str) -> Any:
        value = self.values.get(key, default)
        if not isinstance(value, kind):
            raise ConfigError(f"{self.source}: {key} is {_got(value)}, expected {want}")
        return value


def _got(value: object) -> str:
    return "missing" if value is None else shown(value)
