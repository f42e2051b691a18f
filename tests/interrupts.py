"""Ctrl-C in the tests' own process."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGINT raises KeyboardInterrupt: also in jobs of the background, which begin with it ignored, and never
    in a callback of the garbage collector, where Python drops it (tools that tests import have such callbacks).
    """
    before, is_collecting = signal.signal(signal.SIGINT, signal.default_int_handler), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()
        signal.signal(signal.SIGINT, before)
