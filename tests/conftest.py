"""Fixtures shared by all tests, hypothesis profiles, and the rule of the `gpu` marker."""

import ctypes
import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from kvrt import backends, hub
from kvrt.backends import get_ops
from kvrt.backends.cpu import CpuOps

# Shared machines have no deadlines. CI repeats the same examples in every run.
settings.register_profile("dev", deadline=None, max_examples=30)
settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail tests marked gpu where there is no CUDA device, instead of skipping them",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or cuda_devices() > 0:
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail("no CUDA device, and --require-gpu was given", pytrace=False)
    pytest.skip("no CUDA device")


@cache
def cuda_devices() -> int:
    """CUDA devices that the driver offers; 0 without a driver."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


@pytest.fixture(autouse=True)
def cpu_by_default(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What names no device is computed on the CPU, also where there is a GPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(backends, "default_device", lambda: "cpu")


@pytest.fixture(scope="session")
def ops() -> CpuOps:
    """The CPU backend on all cores; its kernels are compiled if they are not cached."""
    result = get_ops("cpu")
    assert isinstance(result, CpuOps)
    return result


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    """The folder of SmolLM2-135M-Instruct, pulled into the normal cache at first use.

    A failed download fails the test: it must not pass unseen.
    """
    return hub.pull("smollm2")
