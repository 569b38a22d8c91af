"""A cache saved on the CPU goes on on a GPU, and the reverse."""

import pytest

from kvrt.backends.cuda import CudaOps
from kvrt.backends.ops import Ops
from tests.unit.test_saved_across import (  # noqa: F401  collected here, with this file's `gpu`
    test_saved_here_loaded_there,
)


@pytest.fixture
def gpu(cuda: CudaOps) -> Ops:
    return cuda
