"""What tests on a GPU share."""

from pathlib import Path

import pytest

from kvrt.backends.cuda import CudaOps

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("gpu")


@pytest.fixture(scope="session")
def cuda() -> CudaOps:
    """The first GPU."""
    from kvrt.backends.cuda_device import CudaDevice

    return CudaOps(CudaDevice())
