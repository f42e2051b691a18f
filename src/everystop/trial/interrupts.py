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
    """Which signal came first of Ctrl-C and those that end a process, None so far, and what is to be done at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._act: Callable[[], object] = lambda: None

    def then(self, act: Callable[[], object]) -> None:
        """Call this at each signal, or now if there has been one; a RuntimeError of a closed loop is no harm."""
        self._act = act
        if self.number is not None:
            self._do()

    def press(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        self.number = self.number or number
        self._do()

    def _do(self) -> None:
        with suppress(RuntimeError):
            self._act()


@contextmanager
def delayed_interrupts() -> Iterator[Interrupt]:
    """Inside, neither Ctrl-C raises anything nor a signal of `ended_in_order`; behind the block the first one that came
    does what it would have done before it.

    Changes nothing outside the main thread, or where no function handles the signal.
    """
    interrupt = Interrupt()
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDS) if is_main}
    delayed = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in delayed:
        signal.signal(number, interrupt.press)
    try:
        yield interrupt
    finally:
        for number, handler in delayed.items():
            signal.signal(number, handler)
    if interrupt.number is not None:
        delayed[signal.Signals(interrupt.number)](interrupt.number, None)


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
