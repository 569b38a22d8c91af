"""Peak resident memory of this process."""

import sys


def peak_resident_bytes() -> int:
    """The most bytes of physical memory this process has held at once; 0 where unknown."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
