"""Compiled CUDA kernels, kept on disk: each variant is compiled once for a version of kvrt."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from .. import paths
from ..cuda_src import SOURCE_DIR
from ..errors import StorageError
from .nvrtc import Compiler, Cubin, Resources, options

log = logging.getLogger(__name__)

_MONTH = 30 * 24 * 3600.0


def sources_digest(folder: Path = SOURCE_DIR) -> str:
    """What identifies all CUDA sources: a change of any, also of an included one, changes it."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.cu"), *folder.glob("*.cuh")]):
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)} ".encode() + text)
    return digest.hexdigest()


def cache_name(
    compiler: Compiler, name: str, defines: Mapping[str, Any], arch: str, folder: Path = SOURCE_DIR
) -> str:
    """The file name of a variant: of these sources, options, architecture and compiler."""
    variant = repr((name, options(name, defines, arch), compiler.version)).encode()
    sources = sources_digest(folder)[:12]
    return f"cuda-{sources}-{hashlib.sha256(variant).hexdigest()[:16]}.bin"


def get_cubin(
    compiler: Compiler, name: str, defines: Mapping[str, Any], arch: str, folder: Path = SOURCE_DIR
) -> Cubin:
    """A variant from the disk, or compiled and kept there; where it cannot be kept, for this run.

    Raises KernelError where compiling fails.
    """
    target = paths.kernels_dir() / cache_name(compiler, name, defines, arch, folder)
    found = _read(target)
    if found is not None:
        return found
    try:
        # Of the variants of one digit, one is compiled at a time; the number of locks has a bound.
        lock = target.parent / f"cuda-compiling-{target.stem[-1]}.lock"
        with paths.exclusive(lock, _say_waiting):
            found = _read(target)
            if found is None:
                _say_compiling()
                found = compiler.compile(name, defines, arch, folder)
                paths.atomic_write(target, _pack(found))
                _forget_old(target)
    except StorageError as error:
        _say_not_kept(str(error))
        # Compiled already if only writing it failed.
        found = found or compiler.compile(name, defines, arch, folder)
    return found


@cache
def _say_compiling() -> None:
    log.warning("compiling CUDA kernels, once for this version (under a minute)")


@cache
def _say_waiting() -> None:
    log.warning("waiting for another process that compiles CUDA kernels")


@cache
def _say_not_kept(reason: str) -> None:
    log.warning("compiling CUDA kernels for this run only (under a minute): %s", reason)


def _pack(cubin: Cubin) -> bytes:
    """A digest, a line of what the kernels take, the code."""
    kernels = {name: asdict(resources) for name, resources in cubin.kernels.items()}
    body = json.dumps(kernels).encode() + b"\n" + cubin.code
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _read(path: Path) -> Cubin | None:
    """A kept variant, if it is there and whole."""
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    listing, _, code = body.partition(b"\n")
    kernels = {name: Resources(**numbers) for name, numbers in json.loads(listing).items()}
    return Cubin(code, kernels)


def _forget_old(target: Path) -> None:
    """Remove variants of other sources that are a month old."""
    sources = target.name.rpartition("-")[0]
    with suppress(OSError):
        for path in list(target.parent.glob("cuda-*-*.bin")):
            with suppress(OSError):
                old = path.stat().st_mtime < time.time() - _MONTH
                if old and not path.name.startswith(sources):
                    path.unlink()
