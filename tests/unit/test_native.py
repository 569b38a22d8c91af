"""The compiled kernels: checked arguments, every kind of threads, and how a library is provided."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from kvrt import paths
from kvrt.backends import native
from kvrt.backends.cpu import CpuOps
from kvrt.backends.native import Kernels, Team
from kvrt.errors import KernelError, StorageError

ROOT = Path(__file__).resolve().parents[2]


# Arguments


@pytest.mark.parametrize(
    "change",
    [
        lambda arguments: arguments[:-1],
        lambda arguments: (*arguments, 0),
        lambda arguments: (*arguments[:-1], 1.5),
        lambda arguments: (*arguments[:-1], None),
        lambda arguments: (*arguments[:-1], 1 << 63),
        lambda arguments: (*arguments[:3], "eps", arguments[4]),
    ],
    ids=["one missing", "one more", "real for an address", "none", "too large", "word for a real"],
)
def test_arguments_are_checked(ops: CpuOps, change: Callable[[tuple], tuple]) -> None:
    x = ops.empty((1, 4))
    right = (x.address, x.address, 4, 1e-5, x.address)
    ops.kernels.rmsnorm(1, 1, *right)
    with pytest.raises(KernelError, match=r"kernel rmsnorm: got .* expected") as caught:
        ops.kernels.rmsnorm(1, 1, *change(right))
    assert "\n" not in str(caught.value)


def test_an_unknown_kernel_is_an_attribute_error(ops: CpuOps) -> None:
    with pytest.raises(AttributeError, match="no CPU kernel named fly"):
        _ = ops.kernels.fly


def test_every_registered_kernel_is_in_the_library(ops: CpuOps) -> None:
    from kvrt.backends import jit

    for module in native.KERNEL_MODULES:
        import_module(module)
    listing = json.loads(ops.kernels.library.with_suffix(".json").read_text())["kernels"]
    assert set(listing) == set(jit.KERNELS)
    assert {"attend", "survey", "seal", "gather", "change_basis", "linear"} <= set(listing)


# Threads


def without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_openmp", lambda: None)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("openmp", [True, False])
def test_every_item_is_done_once(
    monkeypatch: pytest.MonkeyPatch, threads: int, openmp: bool
) -> None:
    """`linear_add` with ones adds exactly 1 to each row that is done."""
    if not openmp:
        without_openmp(monkeypatch)
    elif threads > 1 and Team(2).kind != "openmp":
        pytest.skip("no OpenMP run-time library on this machine")
    kernels = Kernels(threads)
    assert kernels.team.kind == ("single" if threads == 1 else "openmp" if openmp else "python")
    one = np.ones((1, 1), np.float32)
    for rows in (1, 2, 7, 1000):
        weight, out = np.ones((rows, 1), np.float32), np.zeros((1, rows), np.float32)
        for grain in (1, 3, 2000):
            out.fill(0)
            kernels.linear(
                rows, grain, one.ctypes.data, 1, 1, 0, 1,
                weight.ctypes.data, rows, 0, out.ctypes.data, *[0] * 8,
            )  # fmt: skip
            assert np.array_equal(out, np.ones((1, rows)))


def workload(ops: CpuOps) -> list[np.ndarray]:
    """Results of decode and prefill operations that are large enough to be shared by threads."""
    from kvrt.backends.ops import Linear
    from tests.helpers.stores import Geometry, extend, new_store, random_tokens, read

    rng = np.random.default_rng(0)
    geometry = Geometry(2, 2, 16)
    q = ops.to_device(rng.standard_normal((4, 16), dtype=np.float32))
    out = ops.empty((4, 16))
    results = []
    for spec in ("k=f16,v=bf16", "k=int4:channel:g32:norm:page:had,v=e4m3"):
        store = new_store(ops, f"{spec},sink=4,window=9", geometry)
        extend(store, random_tokens(300, geometry))
        ops.attend(q, store.view(1), 0.25, 250, out)
        results += [np.array(out), *read(store)]
    layer = Linear(ops.matrix(rng.standard_normal((501, 33)).astype(np.float16)))
    for n in (1, 5, 40):
        x = ops.to_device(rng.standard_normal((n, 33), dtype=np.float32))
        y, z = ops.empty((n, 501)), ops.empty((n, 501))
        ops.linear(x, (layer,), (y,))
        ops.swiglu(x, layer, layer, z)
        results += [np.array(y), np.array(z)]
    keys = ops.to_device(random_tokens(90, geometry).keys[0])
    many = ops.to_device(rng.standard_normal((90, 4, 16), dtype=np.float32))
    ops.attend_causal(many, keys, keys, 0.25, 20)
    return [*results, np.array(many)]


def test_kinds_of_threads_agree_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    two = CpuOps(2)
    without_openmp(monkeypatch)
    python = CpuOps(2)
    assert python.kernels.team.kind == "python"
    for got, want in zip(workload(python), workload(two), strict=True):
        assert np.array_equal(got, want) and np.isfinite(want).all()


def test_each_runs_every_job_and_passes_errors_on() -> None:
    for threads in (1, 3):
        done: list[int] = []
        Team(threads).each(done.append, range(20))
        assert sorted(done) == list(range(20))

        def fail(job: int) -> None:
            if job == 3:
                raise ValueError("job 3")

        with pytest.raises(ValueError, match="job 3"):
            Team(threads).each(fail, range(5))


def test_loading_openmp_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    before = dict(os.environ)
    native._openmp()
    assert dict(os.environ) == before


# Providing a library. Where compiling is not the point, a build copies the session's library.


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ops: CpuOps) -> Path:
    """An empty cache."""
    monkeypatch.setenv("KVRT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, ops: CpuOps) -> list[Path]:
    """The folders that were built into, quickly."""
    folders: list[Path] = []
    files = [ops.kernels.library, ops.kernels.library.with_suffix(".json")]
    assert all(path.stem == native.library_name() for path in files)

    def build(folder: Path) -> tuple[Path, native.Manifest]:
        folders.append(folder)
        for path in files:
            shutil.copy(path, folder / "new")
            os.replace(folder / "new", folder / path.name)  # never into a file that is loaded
        found = native._find(folder)
        assert found is not None
        return found

    monkeypatch.setattr(native, "_build", build)
    return folders


def test_a_library_is_built_once(cache_home: Path, builds: list[Path]) -> None:
    for _ in range(3):
        Kernels(1)
    assert builds == [paths.kernels_dir()]


def damaged(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    ("ending", "damage"),
    [
        (".lib", damaged),
        (".lib", lambda content: b""),
        (".lib", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        (".json", damaged),
        (".json", lambda content: b""),
        (".json", lambda content: b"[]"),
        (".json", lambda content: b'{"sha256": 5, "kernels": {}}'),
        (".json", lambda content: b"\xff\xfe"),
    ],
)
def test_a_damaged_library_is_built_again(
    cache_home: Path, builds: list[Path], ending: str, damage: Callable[[bytes], bytes]
) -> None:
    """Loading half a library would kill the process."""
    path = Kernels(1).library
    path = path if ending == ".lib" else path.with_suffix(".json")
    whole = path.read_bytes()
    path.unlink()  # it is loaded: a new file, not new bytes in the mapped one
    path.write_bytes(damage(whole))
    Kernels(1)
    assert len(builds) == 2 and path.read_bytes() == whole


@pytest.mark.parametrize("missing", [".lib", ".json"])
def test_half_a_library_is_built_again(cache_home: Path, builds: list[Path], missing: str) -> None:
    path = Kernels(1).library
    (path if missing == ".lib" else path.with_suffix(".json")).unlink()
    Kernels(1)
    assert len(builds) == 2


def test_where_nothing_can_be_kept_kernels_are_compiled_for_the_run(
    cache_home: Path, builds: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A file in the folder's place; permissions would not stop a root user."""
    cache_home.mkdir()
    (cache_home / "kernels").write_text("")
    with caplog.at_level(logging.WARNING, "kvrt"):
        kernels = Kernels(2)
    (record,) = caplog.records
    message = record.getMessage()
    assert "for this run only" in message and str(cache_home / "kernels") in message
    assert "\n" not in message
    (folder,) = builds
    assert not folder.exists()
    x, out = np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)
    kernels.rmsnorm(1, 1, x.ctypes.data, x.ctypes.data, 4, 0.0, out.ctypes.data)
    assert np.array_equal(out, x)


def test_a_disk_that_fills_up_is_a_storage_error(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], native.UNWRITABLE, "", "k: no space left\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(StorageError, match=r"^k: no space left$"):
        native._build(cache_home)


@pytest.mark.parametrize(
    ("stderr", "reason"), [("Traceback\n  ...\nSomeError: no\n", "SomeError: no"), ("", "code 9")]
)
def test_a_failed_compilation_is_one_line(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, reason: str
) -> None:
    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 9, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KernelError, match=f"compiling the CPU kernels failed: .*{reason}$"):
        Kernels(1)


PROBE = """
import logging, sys
import numpy as np
logging.basicConfig(format="%(message)s")
from kvrt.backends.cpu import CpuOps
from tests.unit.test_native import workload
ops = CpuOps(2)
np.savez(sys.argv[1], *workload(ops))
print(ops.kernels.library.suffix)
"""


def test_two_processes_without_a_compiler_build_one_library(tmp_path: Path) -> None:
    """No C compiler: LLVM loads the object code. Started at once, one waits for the other."""
    environment = {
        **os.environ,
        "KVRT_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
        "PATH": str(tmp_path),
        "CC": "",
    }
    outputs = [tmp_path / f"{index}.npz" for index in range(2)]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROBE, str(output)],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for output in outputs
    ]
    ended = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], ended
    assert [out for out, _ in ended] == [".o\n", ".o\n"]
    notes = sorted(err for _, err in ended)
    assert [note.split()[0] for note in notes] == ["compiling", "waiting"]
    assert all(note.count("\n") == 1 for note in notes)  # who waited did not compile again
    kept = {path.suffix for path in (tmp_path / "home" / "kernels").iterdir()}
    assert kept == {".o", ".json", ".lock"}  # and nothing half-made
    expected = workload(CpuOps(2))
    for output in outputs:
        with np.load(output) as results:
            for name, want in zip(results.files, expected, strict=True):
                assert np.array_equal(results[name], want)


@pytest.mark.parametrize("kernels", [{}, [], None, {"nosuch": ["int"]}])
def test_a_changed_list_of_kernels_is_not_believed(
    tmp_path: Path, ops: CpuOps, kernels: object
) -> None:
    listing = ops.kernels.library.with_suffix(".json")
    built = json.loads(listing.read_text())
    assert native._find(listing.parent) is not None
    copy = tmp_path / ops.kernels.library.name
    copy.write_bytes(ops.kernels.library.read_bytes())
    copy.with_suffix(".json").write_text(json.dumps({**built, "kernels": kernels}))
    assert native._find(tmp_path) is None
    copy.with_suffix(".json").write_text(json.dumps(built))
    assert native._find(tmp_path) is not None


def test_a_linker_that_does_not_work_leaves_the_object_code(tmp_path: Path) -> None:
    from kvrt.backends import build

    (tmp_path / "a.o").write_bytes(b"")
    for command in ("true", "false"):
        assert not build._link([command], tmp_path / "a.o", tmp_path / "a.so")
