"""Ctrl-C that is not lost: where it comes in a callback of the garbage collector, Python drops the exception."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_interrupts() -> Iterator[Callable[[], None]]:
    """Inside, Ctrl-C raises KeyboardInterrupt as usual; the function raises it once more if there has been one.

    Changes nothing outside the main thread, or where Ctrl-C is ignored or somebody else's.
    """
    is_pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        raise KeyboardInterrupt

    def check() -> None:
        if is_pressed:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
