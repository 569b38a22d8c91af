"""What CUDA kernels take, read from their sources: arguments are checked before each launch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import KernelError
from . import view

_KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?'
    r"(\w+)\(([^)]*)\)\s*{"
)
_COMMENT = re.compile(r"//[^\n]*")

_NUMBERS: dict[str, type[np.generic]] = {
    "int": np.int32,
    "i64": np.int64,
    "u32": np.uint32,
    "u64": np.uint64,
    "float": np.float32,
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel. `number` is its type, or None for a pointer."""

    name: str
    number: type[np.generic] | None

    def convert(self, kernel: str, value: Any) -> np.generic:
        """A value as the kernel takes it; pointers are addresses. Raises KernelError."""
        if self.number is None:
            if isinstance(value, int | np.integer) and value >= 0:
                return np.uint64(value)
            raise KernelError(f"{kernel}: {self.name} must be an address, got {value!r}")
        if self.number is np.float32:
            if isinstance(value, int | float | np.number):
                return np.float32(value)
        elif isinstance(value, int | np.integer) and not isinstance(value, bool):
            limits = np.iinfo(self.number)  # type: ignore[type-var]
            if limits.min <= value <= limits.max:
                return self.number(value)
        raise KernelError(f"{kernel}: {self.name} must be {self.number.__name__}, got {value!r}")


@dataclass(frozen=True)
class Signature:
    """Name and parameters of a kernel."""

    name: str
    parameters: tuple[Parameter, ...]

    def convert(self, values: Sequence[Any]) -> list[np.generic]:
        """Arguments as the kernel takes them. Raises KernelError for what does not fit."""
        if len(values) != len(self.parameters):
            raise KernelError(
                f"{self.name} takes {len(self.parameters)} arguments, got {len(values)}"
            )
        return [p.convert(self.name, v) for p, v in zip(self.parameters, values, strict=True)]


def _parameter(text: str) -> Parameter:
    words = text.replace("__restrict__", " ").replace("*", " * ").split()
    if "*" in words:
        return Parameter(words[-1], None)
    kind, name = [word for word in words if word != "const"]
    return Parameter(name, _NUMBERS[kind])


def signatures(source: str) -> Mapping[str, Signature]:
    """The kernels of a source text, by name."""
    found = {}
    for name, parameters in _KERNEL.findall(_COMMENT.sub("", source)):
        parts = [part for part in parameters.split(",") if part.strip()]
        found[name] = Signature(name, tuple(_parameter(part) for part in parts))
    return found


def read_signatures(path: Path) -> Mapping[str, Signature]:
    """The kernels of a .cu file, by name."""
    return signatures(path.read_text(encoding="utf-8"))


def view_defines() -> dict[str, int]:
    """The names of `view` for a CUDA compiler's -D options: VIEW_HEADS, VIEW_DIM, ..."""
    names = (
        "LAYER_SETTINGS HEADS DIM KEY_KIND VALUE_KIND SINK_ROWS TAIL_ROWS SINK_KEYS SINK_VALUES "
        "TAIL_KEYS TAIL_VALUES LAYER_OFFSET RUN_BYTES SHARED_OFFSET FORM KEY_HADAMARD "
        "VALUE_HADAMARD KEY_BIAS TURNS KEY_NORM KEY_SIDE VALUE_SIDE CODEC CODES META SHARED OWN "
        "STATE TABLE POST PAGE PRE"
    ).split()
    return {f"VIEW_{name}": int(getattr(view, name)) for name in names}
