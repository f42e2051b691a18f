"""Ends that nothing misses: Ctrl-C that is not lost where it comes in a callback of the garbage collector, whose
exceptions Python drops, and leaves no event loop in pieces; and other signals that end a process in order.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ENDS = (signal.SIGTERM, signal.SIGHUP)


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


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit, so that what has been started is ended; a signal that is ignored, or
    somebody else's, stays so. Changes nothing outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in ENDS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
