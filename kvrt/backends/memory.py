"""Resident memory of this process."""

import ctypes
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
