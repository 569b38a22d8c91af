"""Memory of this process and of its machine."""

import ctypes
import os
import sys
from pathlib import Path


def peak_resident_bytes() -> int:
    """The most bytes of physical memory this process has held at once; 0 where unknown."""
    try:
        # Linux. getrusage would also count the process that started this one.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def release_freed() -> None:
    """Give freed memory back to the system; glibc keeps it otherwise (16 MB after a tokenizer)."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_peak() -> bool:
    """Have `peak_resident_bytes` count from now on; False where the system cannot (not Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def available_bytes() -> int:
    """Memory that this process can still take without swapping; 0 where unknown.

    What is free or can be freed, and no more than the control group leaves; 1 where there is none.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    except (OSError, StopIteration):
        return _physical_bytes()
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return free
    return max(min(free, limit - used + _freeable_bytes(group)), 1)


def _freeable_bytes(group: Path) -> int:
    """Bytes of a control group's cached files; the system drops them where memory is wanted."""
    try:
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        counts = {words[0]: int(words[1]) for words in lines}
    except (OSError, ValueError, IndexError):
        return 0
    return max(counts.get("file", 0) - counts.get("shmem", 0), 0)


def _physical_bytes() -> int:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
