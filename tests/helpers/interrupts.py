"""A KeyboardInterrupt at a chosen line, as Ctrl-C might bring it."""

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def interrupt_at(
    line: int, action: Callable[[], object], where: Callable[[CodeType], bool]
) -> bool:
    """Run the action with a KeyboardInterrupt at its n-th line in some code; whether it came."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not where(frame.f_code):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False
