"""A share of one thread's time, for work that nobody waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ThreadShare:
    """At most `share` of the time of the thread that works, of which up to `max_saved_ns` are saved up while idle.

    Work may begin as long as anything is saved and is paid when it is done, so a long piece delays those that follow.
    `cpu_ns` is the thread's clock.

    Example, a share of 1 % with 100 ms saved: two pieces of 60 ms are done at once; 4 s later 20 ms are there again.
    """

    def __init__(self, share: float, max_saved_ns: int, cpu_ns: Callable[[], int] = time.thread_time_ns) -> None:
        self._share = share
        self._max_saved_ns = self._saved_ns = max_saved_ns
        self._cpu_ns = cpu_ns
        self._refilled_ns: int | None = None

    def refill(self, now_ns: int) -> None:
        """Time has passed until `now_ns`."""
        if self._refilled_ns is not None:
            earned_ns = round((now_ns - self._refilled_ns) * self._share)
            self._saved_ns = min(self._max_saved_ns, self._saved_ns + earned_ns)
        self._refilled_ns = now_ns

    @property
    def has_time(self) -> bool:
        """Another piece of work may begin."""
        return self._saved_ns > 0

    @contextmanager
    def paid(self) -> Iterator[None]:
        """What is done inside is paid for."""
        began_ns = self._cpu_ns()
        try:
            yield
        finally:
            self._saved_ns -= self._cpu_ns() - began_ns


def free() -> ThreadShare:
    """One that is never used up: for records, where nobody is served at the same time."""
    return ThreadShare(1.0, 1, lambda: 0)
