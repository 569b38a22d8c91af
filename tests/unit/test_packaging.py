"""The wheel: what is in it, and that it works where there is no checkout."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kvrt

ROOT = Path(__file__).resolve().parents[2]
# Folder of the checkout -> package in the wheel.
PACKAGES = {"kvrt": "kvrt", "models": "kvrt/models", "cli": "kvrt/cli", "cuda_src": "kvrt/cuda_src"}
SHIPPED = {".py", ".cu", ".cuh", ".typed", ".safetensors"}
HEAVY = {
    "cupy", "gguf", "huggingface_hub", "jinja2", "llvmlite", "matplotlib", "numba",
    "prompt_toolkit", "rich", "torch", "transformers",
}  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built offline, from a copy, so that no build folder is left in the checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in PACKAGES:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    command = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", command, str(target)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_python(unpacked: Path, *arguments: str, cwd: Path) -> str:
    """Output of Python with the unpacked wheel before everything else on its path."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "KVRT_HOME": str(cwd / "home")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_a_pure_wheel_of_this_version(wheel: Path) -> None:
    assert wheel.name == f"kvrt-{kvrt.__version__}-py3-none-any.whl"


def test_it_holds_exactly_the_sources(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = f"kvrt-{kvrt.__version__}.dist-info/"
    assert all(name.startswith(("kvrt/", information)) for name in names), names
    sources = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED
    }
    assert {name for name in names if name.startswith("kvrt/")} == sources
    assert "kvrt/py.typed" in sources and "kvrt/cli/main.py" in sources


def test_no_other_top_level_name_is_importable(unpacked: Path, tmp_path: Path) -> None:
    """Without site-packages, so that an editable install cannot help."""
    script = """
import importlib.util, json
names = ["kvrt", "models", "cli", "cuda_src", "tests", "tools", "kvrt.models.decoder"]
print(json.dumps([n for n in names[:-1] if importlib.util.find_spec(n)]))
"""
    found = json.loads(run_python(unpacked, "-S", "-c", script, cwd=tmp_path))
    assert found == ["kvrt"]


def test_it_works_without_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    script = """
import json, kvrt, kvrt.models.decoder, kvrt.cli.main
print(json.dumps([kvrt.__file__, kvrt.models.decoder.__file__, kvrt.cli.main.__file__,
                  list(kvrt.__path__)]))
"""
    *files, folders = json.loads(run_python(unpacked, "-c", script, cwd=tmp_path))
    assert all(Path(file).is_relative_to(unpacked) for file in files)
    assert folders == [str(unpacked / "kvrt")]
    version = run_python(unpacked, "-m", "kvrt", "--version", cwd=tmp_path)
    assert version.split()[-1] == kvrt.__version__ and version.startswith("kvrt")


def test_every_public_name_is_there(unpacked: Path, tmp_path: Path) -> None:
    script = "import kvrt; print([getattr(kvrt, name) for name in kvrt.__all__] and 'all')"
    assert run_python(unpacked, "-c", script, cwd=tmp_path) == "all\n"


@pytest.mark.parametrize(
    "module", ["kvrt", "kvrt.generate", "kvrt.models.decoder", "kvrt.backends.cpu", "kvrt.kvstore"]
)
def test_importing_is_light(unpacked: Path, tmp_path: Path, module: str) -> None:
    """These packages cost a start-up second or a hundred megabytes; who needs them imports them."""
    script = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(run_python(unpacked, "-c", script, cwd=tmp_path))
    assert not HEAVY & {name.partition(".")[0] for name in loaded}
    if module == "kvrt":
        assert "numpy" not in loaded
