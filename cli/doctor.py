"""`kvrt doctor`: what is installed, which devices there are, what works. No network."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import click

from .. import __version__
from .console import emit, emit_json
from .device_options import common_options

PACKAGES = (
    "numpy",
    "numba",
    "safetensors",
    "tokenizers",
    "click",
    "jinja2",
    "rich",
    "prompt_toolkit",
    "ml-dtypes",
    "gguf",
    "huggingface_hub",
    "threadpoolctl",
)


@dataclass(frozen=True)
class Check:
    """One finding. Only a failed `needed` check makes kvrt unusable here."""

    name: str
    ok: bool
    detail: str
    needed: bool = True


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
@click.pass_context
def command(
    context: click.Context,
    as_json: bool,
    device: str | None,
    threads: int | None,
    verbose: bool,
) -> None:
    """Show what is installed, which devices there are and what works.

    Ends with 1 if something that kvrt needs is missing or broken. The network is not tried.
    """
    checks = list(all_checks())
    sound = all(check.ok for check in checks if check.needed)
    if as_json:
        emit_json({"ok": sound, "checks": [asdict(check) for check in checks]})
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            mark = "ok" if check.ok else ("FAIL" if check.needed else "--")
            emit(f"{mark:<5} {check.name:<{width}}  {check.detail}\n")
    if not sound:
        context.exit(1)


def all_checks() -> Iterator[Check]:
    """Every finding, from the interpreter to the devices."""
    from ..backends import default_device, doctor, doctor_cuda

    yield Check("kvrt", True, __version__)
    yield Check("python", True, f"{platform.python_version()} on {platform.platform()}")
    for package in PACKAGES:
        yield _package(package)
    yield Check("cores", True, f"{_usable_cores()} usable of {os.cpu_count()}")
    yield from _blas()
    for name, ok, detail in doctor():
        yield Check(name, ok, detail)
    for name, ok, detail in doctor_cuda():
        yield Check(name, ok, detail, needed=False)  # the CPU is enough
    yield Check("default device", True, default_device())
    yield _cache_folder()


def _package(name: str) -> Check:
    try:
        return Check(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, False, f"not installed: python -m pip install {name}")


def _usable_cores() -> int:
    """Cores this process may run on, where the platform tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _blas() -> Iterator[Check]:
    import numpy  # noqa: F401  (loads the BLAS library that is asked about)
    from threadpoolctl import threadpool_info

    found = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    for pool in found:
        detail = f"{pool['internal_api']} {pool['version']}, {pool['num_threads']} threads"
        yield Check("blas", True, detail)
    if not found:
        yield Check("blas", True, "not recognised; numpy's own is used", needed=False)


def _cache_folder() -> Check:
    """Whether models and kernels can be stored; tried by writing, without a trace."""
    from ..paths import home

    folder = home()
    existing = _nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Check("cache folder", False, f"{folder}: {error.strerror or error}")
    return Check("cache folder", True, f"{folder} is writable")


def _nearest_existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
