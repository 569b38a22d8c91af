"""What all tests of the `kvrt bench` command run on."""

import pytest

from kvrt.backends import get_ops
from tests.helpers.fake_clock import BANDWIDTH, FakeClock, time_by_bytes
from tests.helpers.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, head_dim=64, max_context=1024)
    get_ops("cpu")  # compiles the kernels where that was not done yet, and says so on stderr
    return str(folder)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Every run takes the same time, which is that of its bytes."""
    return time_by_bytes(monkeypatch, BANDWIDTH)
