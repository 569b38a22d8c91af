"""CUDA kernels compiled for the CPU and run thread by thread, where there is no GPU."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvrt.backends.signatures import read_signatures, view_defines
from kvrt.cuda_src import SOURCE_DIR

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("g++")
_FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-w", "-x", "c++")


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
    ]


class EmulatedModule:
    """The kernels of one .cu file with -D options, for NumPy arrays."""

    def __init__(self, name: str, defines: Mapping[str, Any] | None = None):
        """Compile `cuda_src/name`; equal sources and options are compiled once."""
        source = SOURCE_DIR / name
        self.signatures = read_signatures(source)
        options = [
            f"-D{key}={value}" for key, value in {**view_defines(), **(defines or {})}.items()
        ]
        lines = [f'#include "{name}"']
        for kernel in self.signatures:
            lines.append(
                f'extern "C" void launch_{kernel}(const emulated::Launch* where, void** arguments)'
                f" {{ emulated::launch(&{kernel}, *where, arguments); }}"
            )
        text = "\n".join(lines)
        digest = hashlib.sha256(repr((text, options, _FLAGS)).encode())
        for path in sorted([*SOURCE_DIR.glob("*.cu*"), *HERE.glob("*.hpp")]):
            digest.update(path.read_bytes())
        folder = Path(tempfile.gettempdir()) / "kvrt-emulator"
        folder.mkdir(exist_ok=True)
        library = folder / f"{digest.hexdigest()[:24]}.so"
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / "built.so"
                command = [
                    COMPILER or "g++", *_FLAGS, *options, "-DKVRT_EMULATED",
                    f"-I{HERE}", f"-I{SOURCE_DIR}", "-", "-o", str(built),
                ]  # fmt: skip
                done = subprocess.run(command, input=text, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(done.stderr)
                built.replace(library)
        self._library = ctypes.CDLL(str(library))

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        *arguments: Any,
        shared: int = 0,
        overlap: bool = False,
    ) -> None:
        """Run a kernel to its end; arrays stand for their addresses. `overlap` changes nothing."""
        values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
        held = [np.array(value) for value in self.signatures[kernel].convert(values)]
        pointers = (ctypes.c_void_p * max(len(held), 1))(*(value.ctypes.data for value in held))
        where = _Launch(_three(grid), _three(block), shared)
        getattr(self._library, f"launch_{kernel}")(ctypes.byref(where), pointers)


def _three(sizes: Sequence[int]) -> Any:
    return (ctypes.c_uint * 3)(*[*sizes, 1, 1][:3])
