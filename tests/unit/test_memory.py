"""Memory of this process and of its machine: peaks that begin anew, and what is free."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from kvrt.backends import available_memory, memory
from kvrt.errors import UnsupportedError

BIG = 64 << 20  # bytes; what else the interpreter does in between is far less
MEMINFO, LIMIT, USED = "/proc/meminfo", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"
FREE = "MemTotal:  4000 kB\nMemFree:  100 kB\nMemAvailable:    2000 kB\nBuffers:  7 kB\n"


# --- the peak ---


@pytest.fixture
def anew() -> None:
    """Needs a system whose peak can begin anew."""
    if not memory.reset_peak():
        pytest.skip("this system does not measure a peak anew")


def touched(size: int) -> np.ndarray:
    """Memory that is really there: a page that was never written to is not."""
    return np.full(size, 1, np.uint8)


@pytest.mark.usefixtures("anew")
def test_a_peak_begins_anew() -> None:
    """What is held counts, what was freed before does not."""
    held = touched(BIG)
    del held
    before = memory.peak_resident_bytes()
    assert memory.reset_peak()
    after = memory.peak_resident_bytes()
    assert 0 < after < before - BIG // 2


@pytest.mark.usefixtures("anew")
def test_a_peak_sees_what_is_made_and_freed_since() -> None:
    memory.reset_peak()
    before = memory.peak_resident_bytes()
    held = touched(BIG)
    during = memory.peak_resident_bytes()
    del held
    assert before + BIG * 7 // 8 < during < before + BIG * 2
    # Linux sums up its counters of memory with an error of some pages for each processor.
    assert abs(memory.peak_resident_bytes() - during) < BIG // 8
    memory.release_freed()  # frees nothing that counts
    assert memory.peak_resident_bytes() > during - BIG // 8


def test_a_system_that_cannot_begin_anew_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, text: str) -> int:
        raise PermissionError(13, "denied", str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    assert memory.reset_peak() is False


def test_a_peak_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resource")
    files(monkeypatch, {})
    assert memory.peak_resident_bytes() > 10 << 20  # an interpreter with NumPy


# --- what is free ---


def files(monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str]) -> None:
    """Have these files and no others."""

    def read_text(self: Path, *_: object, **__: object) -> str:
        try:
            return texts[self.as_posix()]
        except KeyError:
            raise FileNotFoundError(2, "No such file", str(self)) from None

    monkeypatch.setattr(Path, "read_text", read_text)


@pytest.mark.parametrize(
    ("group", "available"),
    [
        ({}, 2_048_000),
        ({LIMIT: "max\n", USED: "5000\n"}, 2_048_000),
        ({LIMIT: "1000000\n", USED: "400000\n"}, 600_000),
        ({LIMIT: "9000000\n", USED: "400000\n"}, 2_048_000),
        ({LIMIT: "1000000\n"}, 2_048_000),
        ({LIMIT: "1000000\n", USED: "nonsense\n"}, 2_048_000),
    ],
    ids=["no group", "no limit", "limit below", "limit above", "half a group", "nonsense"],
)
def test_free_memory_and_a_groups_limit(
    monkeypatch: pytest.MonkeyPatch, group: Mapping[str, str], available: int
) -> None:
    files(monkeypatch, {MEMINFO: FREE, **group})
    assert memory.available_bytes() == available
    assert available_memory("cpu") == available


@pytest.mark.parametrize("used", [1_000_000, 1_300_000])
def test_a_full_group_is_not_an_unknown_one(monkeypatch: pytest.MonkeyPatch, used: int) -> None:
    """0 means unknown, so that everything would be allowed, and less than 0 means nothing."""
    files(monkeypatch, {MEMINFO: FREE, LIMIT: "1000000", USED: str(used)})
    assert 0 < memory.available_bytes() <= 4096


@pytest.mark.parametrize("texts", [{}, {MEMINFO: "MemTotal:  4000 kB\n"}])
def test_where_nothing_says_what_is_free_it_is_all_memory_or_unknown(
    monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str]
) -> None:
    files(monkeypatch, {**texts, LIMIT: "1000000", USED: "0"})
    sizes: Mapping[str, int] = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    asked: Callable[[str], int] = sizes.__getitem__
    monkeypatch.setattr(os, "sysconf", asked, raising=False)
    monkeypatch.setattr(os, "sysconf_names", sizes, raising=False)
    assert memory.available_bytes() == 4_096_000
    monkeypatch.setattr(os, "sysconf_names", {}, raising=False)
    assert memory.available_bytes() == 0
    monkeypatch.delattr(os, "sysconf")
    assert memory.available_bytes() == 0


def test_memory_of_an_unknown_device_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'tpu'"):
        available_memory("tpu")


def test_this_machine_has_some() -> None:
    if not Path(MEMINFO).exists():
        pytest.skip("this system does not say what is free")
    assert 1 << 20 < memory.available_bytes() < 1 << 50
