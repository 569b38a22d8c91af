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
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\b__global__\b")

_NUMBERS: dict[str, type[np.generic]] = {
    "int": np.int32,
    "i64": np.int64,
    "u32": np.uint32,
    "u64": np.uint64,
    "float": np.float32,
}

_ALIGNMENTS = {"u16": 2, "int": 4, "u32": 4, "float": 4, "i64": 8, "u64": 8, "uint2": 8} | {
    "float2": 8,
    "uint4": 16,
    "int4": 16,
    "float4": 16,
}
"""Bytes that an address must be a multiple of, by what it points to; 1 for what is not here."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel. `number` is its type, or None for a pointer."""

    name: str
    number: type[np.generic] | None
    alignment: int = 1

    def convert(self, kernel: str, value: Any) -> np.generic:
        """A value as the kernel takes it; pointers are addresses. Raises KernelError."""
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if self.number is None:
            if not whole or not 0 <= value < 1 << 64:
                raise KernelError(f"{kernel}: {self.name} must be an address, got {_shown(value)}")
            if value % self.alignment:
                raise KernelError(
                    f"{kernel}: {self.name} must be aligned to {self.alignment} bytes, "
                    f"got address {value:#x}"
                )
            return np.uint64(value)
        if self.number is np.float32:
            if whole or isinstance(value, float | np.floating):
                return np.float32(value)
        elif whole:
            limits = np.iinfo(self.number)  # type: ignore[type-var]
            if limits.min <= value <= limits.max:
                return self.number(value)
        raise KernelError(
            f"{kernel}: {self.name} must be {self.number.__name__}, got {_shown(value)}"
        )


def _shown(value: Any) -> str:
    """A value in one short line."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and value.shape:
        return f"an array {value.dtype} of {value.shape}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


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


def _parameter(kernel: str, text: str) -> Parameter:
    words = [w for w in text.replace("*", " * ").split() if w not in ("const", "__restrict__")]
    match words:
        case [kind, "*", name]:
            return Parameter(name, None, _ALIGNMENTS.get(kind, 1))
        case [kind, name] if kind in _NUMBERS:
            return Parameter(name, _NUMBERS[kind])
    raise KernelError(
        f"{kernel}: parameter `{' '.join(text.split())}` is not a pointer or one of "
        f"{', '.join(_NUMBERS)}"
    )


def signatures(source: str) -> Mapping[str, Signature]:
    """The kernels of a source text, by name.

    Raises KernelError where one is not written as all others are.
    """
    text = _COMMENT.sub("", source)
    found = {}
    for name, parameters in _KERNEL.findall(text):
        parts = [part for part in parameters.split(",") if part.strip()]
        found[name] = Signature(name, tuple(_parameter(name, part) for part in parts))
    if len(found) != len(_ENTRY.findall(text)):
        raise KernelError(
            'a kernel is not written as `extern "C" __global__ void name(...) {`, or a name is '
            f"used twice; what was read: {', '.join(found) or 'nothing'}"
        )
    return found


def read_signatures(path: Path) -> Mapping[str, Signature]:
    """The kernels of a .cu file, by name."""
    return signatures(path.read_text(encoding="utf-8"))


def view_defines() -> dict[str, int]:
    """The names of `view` for a CUDA compiler's -D options: VIEW_HEADS, VIEW_DIM, ..."""
    names = (  # noqa: SIM905, a list of them is longer
        "LAYER_SETTINGS HEADS DIM KEY_KIND VALUE_KIND SINK_ROWS TAIL_ROWS SINK_KEYS SINK_VALUES "
        "TAIL_KEYS TAIL_VALUES LAYER_OFFSET RUN_BYTES SHARED_OFFSET FORM KEY_HADAMARD "
        "VALUE_HADAMARD KEY_BIAS TURNS KEY_NORM ZONE_UNITS ZONE_BLOCKS ZONE_LARGEST KEY_SIDE "
        "VALUE_SIDE CODEC CODES META SHARED OWN STATE TABLE POST PAGE PRE LENGTHS TOKEN_ID "
        "TOKEN_SLOT TOKEN_IS_SINK FORWARDS BACKWARDS BASE OFFSET QUERIES QUERY_ROWS"
    ).split()
    return {f"VIEW_{name}": int(getattr(view, name)) for name in names}
