"""The compiled CPU kernels: load them, or have them built; launch them on all threads.

A launch fills one block of 64-bit slots (a header, then the kernel's arguments) and runs the
kernel's entry point on every thread; the threads take chunks of work items from a shared counter
in that block. The threads come from the OpenMP run-time library (`GOMP_parallel`, about 2 us a
launch) where there is one, otherwise from Python's.
"""

import ctypes
import hashlib
import json
import logging
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from .. import paths
from ..errors import KernelError, StorageError
from .pool import Pool

log = logging.getLogger(__name__)

HEADER_SLOTS = 4
"""Slots before the arguments: next item, next thread number, number of items, chunk size."""

KERNEL_MODULES = (
    "kvrt.backends.cpu_kernels",
    "kvrt.backends.cpu_attn",
    "kvrt.backends.cpu_probe",
    "kvrt.backends.cpu_zone_store",
    "kvrt.backends.cpu_zone_attn",
    "kvrt.kvstore.codecs.dispatch",
)
"""Modules whose import registers kernels. The last brings those of every codec."""

_SOURCES = (
    *(f"backends/{name}.py" for name in ("build", "cpu_*", "intrinsics", "jit", "native", "view")),
    "kvstore/fragment.py",
    "kvstore/codecs/*.py",
)
"""What the compiled code follows from, within the package."""

Manifest = dict[str, list[str]]

UNWRITABLE = 3
"""Exit code of the compiler where the folder cannot be written."""


def linker() -> list[str] | None:
    """The command that links a shared library, or None."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    return None


def processor_name() -> str:
    """The processor's own name."""
    named = (line for line in _cpuinfo() if line.startswith("model name"))
    name = next(named, "").partition(":")[2].strip()
    return name or platform.processor() or platform.machine()


def _cpuinfo() -> list[str]:
    """What Linux says of the processors; nothing elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _processor() -> str:
    """What identifies this processor's instruction set."""
    wanted = ("model name", "flags", "Features", "CPU part")
    found = "\n".join(dict.fromkeys(line for line in _cpuinfo() if line.startswith(wanted)))
    return found or f"{platform.machine()} {platform.processor()}"


def library_name() -> str:
    """The file name, without ending, of the library of these sources on this processor."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(_processor().encode())
    for pattern in _SOURCES:
        for source in sorted(package.glob(pattern)):
            digest.update(source.read_bytes())
    return f"cpu-{digest.hexdigest()[:16]}"


def built_digest(library: bytes, manifest: Manifest) -> str:
    """What says that a library and its list of kernels are whole and belong together."""
    return hashlib.sha256(library + json.dumps(manifest).encode()).hexdigest()


def _find(folder: Path) -> tuple[Path, Manifest] | None:
    """The built library in a folder and its manifest, if both are there and whole."""
    listing = folder / f"{library_name()}.json"
    try:
        built = json.loads(listing.read_text())
        digest, manifest = built["sha256"], built["kernels"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    for ending in (".so", ".o"):
        library = listing.with_suffix(ending)
        # Loading a damaged library would end the process without a word.
        with suppress(OSError):
            if built_digest(library.read_bytes(), manifest) == digest:
                return library, manifest
    return None


def _provide(folder: Path) -> tuple[Path, Manifest]:
    """The library of a folder, built there if need be. Raises StorageError, KernelError."""
    found = _find(folder)
    if found is not None:
        return found

    def waiting() -> None:
        log.warning("waiting for another process that compiles the CPU kernels")

    with paths.exclusive(folder / "compiling.lock", waiting):
        found = _find(folder)
        if found is None:
            log.warning("compiling the CPU kernels, once for this version (under a minute)")
            found = _build(folder)
    return found


def _build(folder: Path) -> tuple[Path, Manifest]:
    """Compile in a process of its own, so that the compiler's memory goes with it.

    Raises StorageError where the folder cannot be written, KernelError for other failures.
    """
    command = [sys.executable, "-m", "kvrt.backends.build", str(folder / library_name())]
    root = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Numba need not optimise what is optimised as a whole afterwards.
    environment = {**os.environ, "PYTHONPATH": search, "NUMBA_OPT": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = _find(folder)
    if done.returncode == UNWRITABLE:
        raise StorageError(done.stderr.strip())
    if done.returncode or found is None:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise KernelError(f"compiling the CPU kernels failed: {reason}")
    return found


def _load(library: Path, manifest: Manifest) -> tuple[dict[str, int], Any]:
    """Entry addresses by kernel name, and the object that keeps them valid."""
    if library.suffix == ".so":
        try:
            shared = ctypes.CDLL(str(library))
        except OSError as error:
            raise KernelError(f"the kernel library cannot be loaded: {error}") from None
        return {
            name: ctypes.cast(getattr(shared, f"kvrt_{name}"), ctypes.c_void_p).value or 0
            for name in manifest
        }, shared
    # No C compiler on this machine: LLVM links the object code, at the price of its memory.
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(library.read_bytes()))
    engine.finalize_object()
    return {name: engine.get_function_address(f"kvrt_{name}") for name in manifest}, engine


class Kernel:
    """One compiled kernel, called with (items, grain, *arguments), from any thread."""

    def __init__(self, name: str, entry: int, kinds: list[str], run: "Team"):
        self.name = name
        self._entry = entry
        self._kinds = kinds
        self._run = run
        codes = "".join("d" if kind == "real" else "q" for kind in kinds)
        self._pack = struct.Struct(f"=4q{codes}").pack_into
        self._local = threading.local()

    def __call__(self, items: int, grain: int, *arguments: Any) -> None:
        """Do `items` work items in chunks of `grain`; arrays are passed by their address.

        Raises KernelError where the arguments do not fit the kernel's parameters.
        """
        try:
            buffer, address = self._local.slots
        except AttributeError:
            slots = np.zeros(HEADER_SLOTS + len(self._kinds), np.int64)
            buffer, address = memoryview(slots.data).cast("B"), slots.ctypes.data
            self._local.slots = buffer, address
        try:
            self._pack(buffer, 0, 0, 0, items, grain, *arguments)
        except struct.error as error:
            raise KernelError(
                f"kernel {self.name}: got {arguments}, expected {self._kinds}: {error}"
            ) from None
        self._run(self._entry, address, items > grain)


class Team:
    """A number of threads: `team(entry, ...)` runs a kernel on all, `each` runs Python calls."""

    def __init__(self, threads: int):
        self.threads = threads
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64)
        self._entries: dict[int, Any] = {}
        self._parallel = _openmp() if threads > 1 else None
        self._pool = Pool(threads) if threads > 1 else None
        self._process = os.getpid()

    @property
    def kind(self) -> str:
        """Where the threads come from: "openmp", "python" or "single"."""
        if self.threads == 1:
            return "single"
        return "openmp" if self._parallel is not None else "python"

    def __call__(self, entry: int, slots: int, parallel: bool) -> None:
        """Run the entry point on the slots; on the calling thread alone if not `parallel`."""
        if parallel and self._parallel is not None and self._process == os.getpid():
            self._parallel(entry, slots, self.threads, 0)
            return
        # In a forked child the OpenMP threads do not exist, and their library does not notice.
        function = self._entries.get(entry)
        if function is None:
            function = self._entries[entry] = self._call(entry)
        if parallel and self._pool is not None:
            self._pool.run(function, [slots] * self.threads)
        else:
            function(slots)

    def each(self, function: Callable[[Any], None], jobs: Sequence[Any]) -> None:
        """Call function(job) for all jobs, on all threads; for calls that release the GIL."""
        if self._pool is None or len(jobs) == 1:
            for job in jobs:
                function(job)
        else:
            self._pool.run(function, jobs)


_SPIN = "3000"
"""Turns for which an idle OpenMP thread spins, about 30 us: long enough to bridge the gap between
two kernels of a decode step, short enough not to stall whoever needs the core (the default, some
milliseconds, made a step 40 times slower where two threads shared one core)."""


def _openmp() -> Any:
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP run-time library, or None."""
    chosen = "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ
    if not chosen:  # Read by the library once, when it is loaded.
        os.environ["GOMP_SPINCOUNT"] = _SPIN
    try:
        return _gomp_parallel()
    finally:
        if not chosen:
            del os.environ["GOMP_SPINCOUNT"]


def _gomp_parallel() -> Any:
    for name in ("libgomp.so.1", "libomp.so", "libomp.dylib"):
        try:
            function = ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


def describe() -> list[tuple[str, bool, str]]:
    """What `kvrt doctor` says of the CPU backend: (name, whether it is well, in words)."""
    found = _find(paths.kernels_dir())
    compiler = linker()
    openmp = _openmp() is not None
    return [
        (
            "CPU kernels",
            True,
            f"compiled: {found[0]}"
            if found
            else "not compiled yet; done at first use, under a minute",
        ),
        (
            "C compiler",
            compiler is not None,
            f"{compiler[0]}, links the kernels" if compiler else "none: LLVM stays loaded, +45 MB",
        ),
        (
            "OpenMP threads",
            openmp,
            "found" if openmp else "no libgomp or libomp: slower Python threads",
        ),
    ]


class Kernels:
    """All CPU kernels, as attributes. Each instance has its own argument slots."""

    def __init__(self, threads: int):
        """Load the kernels, compiling them if need be; where they cannot be kept, for this run.

        Raises KernelError where compiling fails.
        """
        try:
            library, manifest = _provide(paths.kernels_dir())
            entries, self._keep = _load(library, manifest)
        except StorageError as error:
            log.warning("compiling the CPU kernels for this run only (under a minute): %s", error)
            with tempfile.TemporaryDirectory(prefix="kvrt-", ignore_cleanup_errors=True) as folder:
                library, manifest = _build(Path(folder))
                entries, self._keep = _load(library, manifest)
        self.library = library
        self.team = Team(threads)
        self._kernels = {
            name: Kernel(name, entries[name], kinds, self.team) for name, kinds in manifest.items()
        }

    def __getattr__(self, name: str) -> Kernel:
        try:
            kernel = self._kernels[name]
        except KeyError:
            raise AttributeError(f"no CPU kernel named {name}") from None
        setattr(self, name, kernel)
        return kernel
