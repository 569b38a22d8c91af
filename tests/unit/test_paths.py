"""Where files go, and that no failure leaves half of one."""

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvrt import paths
from kvrt.errors import StorageError


def full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def stale(path: Path, kind: str, pid: int, host: str | None = None) -> Path:
    return path.with_name(f".{path.name}.{kind}-{host or paths._host()}-{pid}-00ff00")


def test_home_is_the_chosen_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("KVRT_HOME", str(tmp_path))
    assert paths.home() == tmp_path
    assert paths.models_dir() == tmp_path / "models"
    assert paths.kernels_dir() == tmp_path / "kernels"


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "/h/.cache/kvrt"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/kvrt"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/h/Library/Caches/kvrt"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/kvrt"),
        ("linux", {"KVRT_HOME": "~/k"}, "/h/k"),
        ("linux", {"KVRT_HOME": ""}, "/h/.cache/kvrt"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX paths")
def test_home_of_each_platform(monkeypatch, platform, variables, expected):
    for name in ("KVRT_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/h")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert paths.home() == Path(expected)


def test_home_is_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVRT_HOME", "here")
    assert paths.home() == tmp_path / "here"


@pytest.mark.parametrize("data", [b"new text", [b"new ", b"text"]])
def test_atomic_write_replaces_a_file(tmp_path, data):
    path = tmp_path / "deep" / "file"
    paths.atomic_write(path, b"old")
    paths.atomic_write(path, data)
    assert path.read_bytes() == b"new text"
    assert os.listdir(path.parent) == ["file"]


def test_atomic_write_keeps_the_old_file_when_the_disk_is_full(monkeypatch, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(StorageError, match=r"file: no space left on the device\Z"):
        paths.atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are POSIX's")
def test_atomic_write_leaves_nothing_where_closing_fails_too(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from kvrt import paths; from kvrt.errors import StorageError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))\n"
        "try: paths.atomic_write(Path(sys.argv[1]), b'n' * 100)\n"
        "except StorageError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert done.stdout == f"{path}: File too large\n", done.stderr
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_atomic_write_keeps_the_old_file_when_interrupted(tmp_path):
    def chunks():
        yield b"new"
        raise KeyboardInterrupt

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        paths.atomic_write(path, chunks())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_no_file_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(StorageError, match="no regular file, expected the name of a file"):
            paths.atomic_write(path, b"new")
    assert stat.S_ISFIFO(pipe.lstat().st_mode) and link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_of_a_link_the_file_it_leads_to_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("old", "new"):
        link = tmp_path / name
        link.symlink_to(tmp_path / "there" / name)
        paths.atomic_write(link, b"first")
        paths.atomic_write(link, b"second")
        assert link.is_symlink() and (tmp_path / "there" / name).read_bytes() == b"second"
    assert sorted(os.listdir(tmp_path / "there")) == ["new", "old"]


def test_a_folder_under_a_file_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file"):
        paths.atomic_write(tmp_path / "file" / "below", b"x")
    with pytest.raises(StorageError, match="file"):
        with paths.atomic_folder(tmp_path / "file" / "below"):
            pass


def test_atomic_folder_appears_whole_and_replaces(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "old").write_text("1")
    with paths.atomic_folder(path) as folder:
        (folder / "new").write_text("2")
        assert os.listdir(path) == ["old"]
    assert os.listdir(path) == ["new"]
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError, SystemExit])
def test_atomic_folder_keeps_the_old_one_on_any_exception(tmp_path, failure):
    path = tmp_path / "model"
    path.mkdir()
    (path / "old").write_text("1")
    with pytest.raises(failure):
        with paths.atomic_folder(path) as folder:
            (folder / "new").write_text("2")
            raise failure
    assert os.listdir(path) == ["old"]
    assert os.listdir(tmp_path) == ["model"]


def test_atomic_folder_on_a_full_disk(monkeypatch, tmp_path):
    with pytest.raises(StorageError, match=r"model: no space left on the device\Z"):
        with paths.atomic_folder(tmp_path / "model"):
            full_disk()
    assert os.listdir(tmp_path) == []


def test_a_failed_last_rename_puts_the_old_folder_back(monkeypatch, tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "old").write_text("1")
    rename = os.rename

    def fail_into_place(source, target):
        if Path(target) == path and ".tmp-" in str(source):
            raise PermissionError(errno.EACCES, "no", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_into_place)
    with pytest.raises(StorageError, match="permission denied"):
        with paths.atomic_folder(path):
            pass
    assert os.listdir(path) == ["old"]
    assert os.listdir(tmp_path) == ["model"]


def test_leftovers_of_dead_processes_are_cleaned(tmp_path):
    path = tmp_path / "model"
    dead = stale(path, "tmp", dead_pid())
    alive = stale(path, "tmp", os.getpid())
    elsewhere = stale(path, "tmp", dead_pid(), host="0" * 6)
    other = tmp_path / ".other.tmp-file"
    for folder in (dead, alive, elsewhere, other):
        folder.mkdir()
    with paths.atomic_folder(path):
        pass
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"model", alive.name, elsewhere.name, other.name}


def test_another_hosts_leftovers_go_after_a_day(tmp_path):
    path = tmp_path / "file"
    elsewhere = stale(path, "tmp", dead_pid(), host="0" * 6)
    elsewhere.write_bytes(b"")
    os.utime(elsewhere, (0, 0))
    paths.atomic_write(path, b"x")
    assert os.listdir(tmp_path) == ["file"]


def test_a_swap_cut_off_in_the_middle_is_undone(tmp_path):
    path = tmp_path / "model"
    old = stale(path, "old", dead_pid())
    old.mkdir()
    (old / "kept").write_text("1")
    paths.clean_stale(path)
    assert os.listdir(path) == ["kept"]
    assert os.listdir(tmp_path) == ["model"]


def test_unwritable_parent_is_one_line_with_its_path(monkeypatch, tmp_path):
    # Root may write everywhere, so the refusal is simulated.
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError) as caught:
        paths.atomic_write(tmp_path / "cache" / "file", b"x")
    assert str(caught.value) == f"{tmp_path / 'cache'}: permission denied"


def test_exclusive_waits_for_its_holder_and_says_so(tmp_path):
    path, order = tmp_path / "deep" / "lock", []
    waiting, entered = threading.Event(), threading.Event()

    def second():
        with paths.exclusive(path, on_wait=waiting.set):
            order.append("second")
        entered.set()

    with paths.exclusive(path, on_wait=lambda: order.append("unexpected")):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert entered.is_set()
    assert order == ["first", "second"]
