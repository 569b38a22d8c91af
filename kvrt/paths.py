"""Where kvrt keeps its files, and how they are written so that no reader ever sees half of one."""

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import StorageError

_REASONS = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "disk quota exceeded",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "read-only file system",
}
_OTHER_HOST_AGE = 86_400.0  # seconds after which a temporary of another machine counts as dead


def home() -> Path:
    """The folder of everything kvrt stores: $KVRT_HOME, or `kvrt` in the platform's user cache."""
    chosen = os.environ.get("KVRT_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "kvrt"


def models_dir() -> Path:
    """The folder of pulled models."""
    return home() / "models"


def kernels_dir() -> Path:
    """The folder of compiled kernels."""
    return home() / "kernels"


def downloads_dir() -> Path:
    """The folder of fetched but not yet converted files: a killed pull resumes from here."""
    return home() / "downloads"


def storage_error(path: Path | str, error: OSError) -> StorageError:
    """An OSError as the one-line StorageError that names the path and the reason."""
    reason = _REASONS.get(error.errno or 0) or error.strerror or str(error) or type(error).__name__
    return StorageError(f"{error.filename or path}: {reason}")


def is_storage_failure(error: OSError) -> bool:
    """Whether an OSError is about the disk (space, permission), not a network or a missing file."""
    return error.errno in _REASONS


@contextmanager
def storage_errors(path: Path | str) -> Iterator[None]:
    """Turn every OSError of the block into a StorageError about `path`."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def atomic_write(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file under a temporary name, then rename it: readers see the old file or the new.

    Raises StorageError. Nothing is left behind on failure; an old file stays as it was, and so does
    what is no file: a rename would replace a device. Of a link the file it leads to is written.
    """
    if not is_replaceable(path):
        raise StorageError(f"{path}: {NOT_REPLACEABLE}")
    path = Path(os.path.realpath(path))
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        clean_stale(path)
        temporary = _temporary(path, "tmp")
        file = None
        try:
            # Not `with`: an interrupt between its last line and its end would leave the file open.
            file = open(temporary, "wb")  # noqa: SIM115
            for chunk in (data,) if isinstance(data, bytes) else data:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):  # on a full disk it fails again, and is closed all the same
                if file is not None:
                    file.close()
            _remove(temporary)
            raise
        _sync_folder(path.parent)


NOT_REPLACEABLE = "no regular file, expected the name of a file to write"


def is_replaceable(path: Path) -> bool:
    """Whether a file can be renamed to `path`, unless it is a folder: not to /dev/null."""
    return path.is_file() or path.is_dir() or not path.exists()


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty sibling folder that becomes `path` when the block ends without an exception.

    An older folder at `path` is replaced only at the very end, and is kept on any failure
    (KeyboardInterrupt too). OSErrors of the block are raised as StorageError.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        clean_stale(path)
        temporary = _temporary(path, "tmp")
        temporary.mkdir()
        try:
            yield temporary
            replace_folder(temporary, path)
        except BaseException:
            _remove(temporary)
            raise


def replace_folder(source: Path, path: Path) -> None:
    """Rename a finished folder to `path`; what was at `path` is removed after the rename.

    The contents are on the disk before the name is. Raises OSError.
    """
    _sync_tree(source)
    if not os.path.lexists(path):
        os.rename(source, path)
    else:
        old = _temporary(path, "old")
        os.rename(path, old)
        try:
            os.rename(source, path)
        except BaseException:
            os.rename(old, path)
            raise
        _remove(old)
    _sync_folder(path.parent)


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file `path`, waiting for another process that holds it.

    `on_wait` is called once if there is someone to wait for. The system frees the lock when its
    holder dies, however it dies. Raises StorageError.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with storage_errors(path):
            if not _lock(handle, wait=False):
                if on_wait is not None:
                    on_wait()
                while not _lock(handle, wait=True):
                    pass
        yield
    finally:
        os.close(handle)


def clean_stale(path: Path) -> None:
    """Remove temporaries of `path` whose process is gone; put back an old folder cut off mid-swap.

    Best effort: a temporary that cannot be removed is left for the next run.
    """
    pattern = re.compile(
        re.escape(f".{path.name}.") + r"(tmp|old)-([0-9a-f]{6})-(\d+)-[0-9a-f]{6}\Z"
    )
    with suppress(OSError):
        for entry in list(os.scandir(path.parent)):
            match = pattern.match(entry.name)
            if match is None or not _abandoned(entry, match[2], int(match[3])):
                continue
            if match[1] == "old" and not os.path.lexists(path):
                os.rename(entry.path, path)
            else:
                _remove(Path(entry.path))


def _abandoned(entry: "os.DirEntry[str]", host: str, pid: int) -> bool:
    if host == _host():
        return not _alive(pid)
    # A cache shared between machines or containers: their process ids say nothing here.
    return time.time() - entry.stat(follow_symlinks=False).st_mtime > _OTHER_HOST_AGE


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def _temporary(path: Path, kind: str) -> Path:
    name = f".{path.name}.{kind}-{_host()}-{os.getpid()}-{secrets.token_hex(3)}"
    return path.with_name(name)


def _remove(path: Path) -> None:
    """Remove a file, link or folder tree as far as possible, without raising OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            handle = os.open(os.path.join(parent, name), os.O_RDWR)  # Windows syncs writable only
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        _sync_folder(Path(parent))


if sys.platform == "win32":

    def _alive(pid: int) -> bool:
        import ctypes

        query_limited_information = 0x1000
        kernel32 = ctypes.windll.kernel32
        handle = kernel32.OpenProcess(query_limited_information, False, pid)
        if not handle:
            return bool(kernel32.GetLastError() == 5)  # access denied: it exists
        kernel32.CloseHandle(handle)
        return True

    def _lock(handle: int, wait: bool) -> bool:
        import msvcrt

        try:
            # Waiting gives up after ten tries, a second each.
            msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno not in (errno.EDEADLK, errno.EACCES):
                raise
            return False
        return True

    def _sync_folder(folder: Path) -> None:
        """Windows has no way to sync a folder entry."""

else:

    def _alive(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except (PermissionError, OverflowError):
            return True
        return True

    def _lock(handle: int, wait: bool) -> bool:
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def _sync_folder(folder: Path) -> None:
        with suppress(OSError):  # some network file systems refuse to open or sync a folder
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
