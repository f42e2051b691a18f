"""A process in which something is being timed: nothing is collected that was there before."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL_S = 0.0005  # as in a server: the engine's thread soon has the interpreter back


@contextmanager
def calm_interpreter() -> Iterator[None]:
    """What is alive now is no garbage, and a thread that returns from native code waits for nobody long."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval_s)
