"""When a request must be finished: its own timeout and the server's, whichever comes first."""

from __future__ import annotations

import time
from typing import NamedTuple

from everystop.core.durations import NS_PER_S
from everystop.server.errors import TimedOut


class Deadline(NamedTuple):
    """A moment of the monotonic clock, and the time that a request was given by it: its own, or the server's."""

    at_ns: int
    limit_s: float
    is_own: bool

    @classmethod
    def of(cls, received_ns: int, own_s: float | None, max_s: float | None) -> Deadline | None:
        """For a request whose last byte came at that time; None where nobody set one."""
        if own_s is not None and (max_s is None or own_s <= max_s):
            return cls(received_ns + round(own_s * NS_PER_S), own_s, is_own=True)
        if max_s is None:
            return None
        return cls(received_ns + round(max_s * NS_PER_S), max_s, is_own=False)

    def left_s(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, (self.at_ns - time.monotonic_ns()) / NS_PER_S)

    def check(self) -> None:
        """Raise TimedOut if it is over."""
        if time.monotonic_ns() >= self.at_ns:
            raise TimedOut(self.limit_s, is_own=self.is_own)
