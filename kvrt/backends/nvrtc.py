"""Compile CUDA sources for an architecture with NVRTC. Needs no GPU and no CuPy."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..cuda_src import SOURCE_DIR
from ..errors import KernelError
from .signatures import view_defines

INSTALL = "pip install 'kvrt[cuda13]' (or kvrt[cuda12] for older drivers)"
"""What to do where there is no compiler."""

# A wheel of the package index has it below nvidia/, a toolkit in a folder of its own.
_WHEEL_FOLDERS = ("cu[0-9]*/lib", "cuda_nvrtc/lib", "cu[0-9]*/bin/x86_64", "cuda_nvrtc/bin")
_TOOLKIT_FOLDERS = ("lib64", "lib", "targets/*/lib", "bin")
_FILES = ("libnvrtc.so.[0-9]*", "nvrtc64_*_0.dll")
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")

# Bytes of the cache are compared with the CPU's, which rounds products before sums.
_OWN_OPTIONS: Mapping[str, tuple[str, ...]] = {
    name: ("-fmad=false",) for name in ("store.cu", "zones.cu")
}


@dataclass(frozen=True)
class Resources:
    """What one thread or block of a kernel takes, as the assembler says."""

    registers: int
    shared: int  # bytes of a block, without dynamic shared memory
    stack: int  # bytes of a thread
    spills: int  # bytes written and read because registers ran out


@dataclass(frozen=True)
class Cubin:
    """Machine code of one variant of a source, and what each of its kernels takes."""

    code: bytes
    kernels: Mapping[str, Resources]


class Compiler:
    """One NVRTC library. Can be used by several threads at once; calls release the GIL."""

    def __init__(self, library: Any, where: str):
        self.where = where
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(
        self, name: str, defines: Mapping[str, Any], arch: str, folder: Path = SOURCE_DIR
    ) -> Cubin:
        """Compile a file of the folder for an architecture such as "sm_90".

        Raises KernelError with the compiler's log.
        """
        try:
            source = (folder / name).read_bytes()
        except OSError as error:
            raise KernelError(f"CUDA source {name} cannot be read: {error.strerror}") from error
        words = [word.encode() for word in (*options(name, defines, arch), f"-I{folder}")]
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source, name.encode(), 0, None, None
            )
        )
        try:
            status = self._library.nvrtcCompileProgram(
                program, len(words), (ctypes.c_char_p * len(words))(*words)
            )
            log = self._output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                variant = " ".join([name, *(f"-D{k}={v}" for k, v in defines.items())])
                raise KernelError(
                    f"compiling {variant} for {arch} failed: {log.strip() or self._words(status)}"
                )
            return Cubin(self._output(program, "CUBIN"), parse_resources(log))
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw[: size.value]

    def _check(self, status: int) -> None:
        if status:
            raise KernelError(f"NVRTC ({self.where}): {self._words(status)}")

    def _words(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status).decode())


def options(name: str, defines: Mapping[str, Any], arch: str) -> list[str]:
    """The compiler's options for a variant, without the folder of the sources."""
    named = {**view_defines(), **defines}
    return [
        f"-arch={arch}",
        "-std=c++17",
        "--ptxas-options=-O3",
        "--ptxas-options=-v",
        *_OWN_OPTIONS.get(name, ()),
        *(f"-D{key}={value}" for key, value in sorted(named.items())),
    ]


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_resources(log: str) -> dict[str, Resources]:
    """What each kernel takes, from the assembler's verbose log.

    Functions that were not inlined follow their kernel and count as its own.
    """
    found: dict[str, Resources] = {}
    name = ""
    registers = shared = stack = spills = 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
            registers = shared = stack = spills = 0
        if frame := _FRAME.search(line):
            stack += int(frame[1])
            spills += int(frame[2]) + int(frame[3])
        if used := _USED.search(line):
            registers = int(used[1])
        if fixed := _SHARED.search(line):
            shared = int(fixed[1])
        if name:
            found[name] = Resources(registers, shared, stack, spills)
    return found


def _files(root: Path, folders: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        for name in _FILES:
            # The newest first; libnvrtc.so.12.9.1 and libnvrtc.alt.so.12 are left out.
            found = (p for p in root.glob(f"{folder}/{name}") if _major(p.name) is not None)
            yield from sorted(found, key=lambda p: _major(p.name) or 0, reverse=True)


def _major(name: str) -> int | None:
    """The CUDA version in a library's file name, or None for other files."""
    match = re.fullmatch(r"libnvrtc\.so\.(\d+)|nvrtc64_(\d+)\d_0\.dll", name)
    return int(match[1] or match[2]) if match else None


def candidates() -> Iterator[str]:
    """Where an NVRTC library may be, the likeliest first: paths, then names for the loader."""
    for entry in sys.path:
        yield from map(str, _files(Path(entry or ".") / "nvidia", _WHEEL_FOLDERS))
    for root in (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if root:
            yield from map(str, _files(Path(root), _TOOLKIT_FOLDERS))
    yield from _NAMES


_loading = threading.Lock()


def find_compiler(newest: int | None = None) -> Compiler:
    """The first NVRTC library that can be loaded, of a CUDA version up to `newest`.

    A driver does not load what a compiler of a later major version made. Raises KernelError.
    """
    with _loading:
        return _find_compiler(newest)


@cache
def _find_compiler(newest: int | None) -> Compiler:
    too_new = set()
    for where in dict.fromkeys(candidates()):
        try:
            compiler = Compiler(ctypes.CDLL(where), where)
        except (OSError, AttributeError):
            continue
        if newest is None or compiler.version[0] <= newest:
            return compiler
        too_new.add(compiler.version[0])
    if too_new:
        raise KernelError(
            f"the CUDA compiler (NVRTC) found is of CUDA {min(too_new)}, but the driver takes "
            f"code of CUDA {newest} and older: pip install 'kvrt[cuda{newest}]', or update the "
            "driver"
        )
    raise KernelError(f"no CUDA compiler (NVRTC) was found: {INSTALL}")
