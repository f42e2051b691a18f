"""Hears those who were just turned away again all at once, once a beat; knows nothing of HTTP."""

from __future__ import annotations

import asyncio
from typing import Protocol

BEAT_S = 0.02


class Listened(Protocol):
    """Something whose sender can be left waiting."""

    def pause_reading(self) -> None:
        """Read no more; what comes waits."""

    def resume_reading(self) -> None:
        """Read what has come."""


class Beat:
    """Who sends again on a connection on which a request was just turned away waits for the end of the beat, `BEAT_S`
    at most.

    Under overload the event loop works while a step is computed, and whenever it wakes, little of what it needs is in
    the caches any more: to wake for each request that is refused costs about three times as much as to refuse several
    in a turn. A client that takes the advice of `Retry-After` never notices. Asyncio thread only.
    """

    def __init__(self) -> None:
        self._waiting: list[Listened] = []

    def leave(self, one: Listened) -> None:
        """Read from it again when the beat is over."""
        one.pause_reading()
        if not self._waiting:
            asyncio.get_running_loop().call_later(BEAT_S, self._end)
        self._waiting.append(one)

    def _end(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.resume_reading()
