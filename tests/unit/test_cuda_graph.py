"""A decode step as a graph: when it runs, when it is captured, what it holds."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvrt.backends.cuda_graph import Program, wanted
from kvrt.errors import KernelError


class FakeStream:
    """Records what is done in a capture; `broken` fails its end."""

    log: ClassVar[list[str]] = []
    broken = False

    def __init__(self, non_blocking: bool) -> None:
        assert non_blocking

    def __enter__(self) -> "FakeStream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def begin_capture(self) -> None:
        self.log.append("begin")

    def end_capture(self) -> Any:
        self.log.append("end")
        if self.broken:
            raise RuntimeError("capture invalidated")
        return SimpleNamespace(launch=lambda: self.log.append("launch"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: ClassVar[list[str]] = []
    monkeypatch.setattr(FakeStream, "log", log)
    return log


XP = SimpleNamespace(cuda=SimpleNamespace(Stream=FakeStream))


def test_eager_then_captured_then_replayed(log: list[str]) -> None:
    """Scratch that grew in the first call is kept with the graph."""
    scratch: list[object] = []

    def run() -> None:
        log.append("run")
        scratch[:] = scratch or [object()]

    program = Program(XP, run, lambda: list(scratch))
    for _ in range(4):
        program()
    assert log == ["run", "begin", "run", "end", "launch", "launch", "launch"]
    assert program._kept == scratch


def test_a_failure_ends_the_capture_and_the_next_call_tries_again(log: list[str]) -> None:
    fails = [False, True, False]

    def run() -> None:
        log.append("run")
        if fails.pop(0):
            raise KeyboardInterrupt

    program = Program(XP, run, list)
    program()
    with pytest.raises(KeyboardInterrupt):
        program()
    program()
    assert log == ["run", "begin", "run", "end", "begin", "run", "end", "launch"]


def test_what_cannot_be_captured_is_said(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(XP, lambda: None, list)
    program()
    monkeypatch.setattr(FakeStream, "broken", True)
    with pytest.raises(KernelError, match="cannot be captured: capture invalidated; KVRT_GRAPH=0"):
        program()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("KVRT_GRAPH", "0", False), ("KVRT_GRAPH", "1", True), ("KVRT_SYNC", "1", False),
        ("KVRT_SYNC", "0", True),
    ],
)  # fmt: skip
def test_graphs_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: bool
) -> None:
    for known in ("KVRT_GRAPH", "KVRT_SYNC"):
        monkeypatch.delenv(known, raising=False)
    assert wanted()
    monkeypatch.setenv(name, value)
    assert wanted() == expected
