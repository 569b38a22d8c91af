"""What a benchmark row says of the machine and the software that it ran on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__

_PACKAGES = ("numpy", "numba", "cupy-cuda12x", "cupy-cuda13x")


def software() -> dict[str, Any]:
    """kvrt's version and commit, the libraries that compute, and the time (UTC)."""
    return {
        "version": __version__,
        "commit": commit(Path(__file__).resolve().parents[1]),
        "versions": _versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def commit(package: Path) -> str | None:
    """The commit of the sources in a folder, with a `+` where they were changed since.

    None where the folder is in no repository, or in one that does not hold it. A copy that left its
    repository behind is told by the environment variable KVRT_COMMIT.
    """
    told = os.environ.get("KVRT_COMMIT", "").strip()
    if told:
        return told
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        found = _git(package, "rev-parse", "--short", "HEAD").strip()
        return found + "+" * bool(_git(package, "status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *words: str) -> str:
    command: Sequence[str] = ("git", "-C", str(folder), *words)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
