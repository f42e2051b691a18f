"""Ctrl-C that is not lost, and does no harm: in a callback of the garbage collector Python drops the exception, and out
of a callback of the event loop it leaves that in pieces.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


class Interrupt:
    """Whether Ctrl-C has been pressed, and what is to be done at once when it is."""

    def __init__(self) -> None:
        self.is_pressed = False
        self._act: Callable[[], object] = lambda: None

    def then(self, act: Callable[[], object]) -> None:
        """Call this at each press, or now if there has been one; a RuntimeError of a loop that is closed is no harm."""
        self._act = act
        if self.is_pressed:
            self._do()

    def press(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        self.is_pressed = True
        self._do()

    def _do(self) -> None:
        with suppress(RuntimeError):
            self._act()


@contextmanager
def delayed_interrupts() -> Iterator[Interrupt]:
    """Inside, Ctrl-C raises nothing; behind the block it does what it would have done before it.

    Changes nothing outside the main thread, or where Ctrl-C is ignored.
    """
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupt.is_pressed:
        before(signal.SIGINT, None)
