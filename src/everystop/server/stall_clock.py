"""Decides whether the engine, or the event loop, gets on: the one place that knows how long is too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from everystop.core.durations import NS_PER_S

LATE_S = 4.0  # so long without a step, a replica should get no new requests
MAX_BEAT_S = 1.0
BEAT_SLACK_S = 0.5


class Working(Protocol):
    """The engine, as far as is looked at here."""

    def stalled_ns(self, now_ns: int) -> int:
        """How long there has been work and no step has come back."""


class StallClock:
    """How long the engine has had work and finished no step, and how long the event loop has not turned; beyond
    `timeout_s` they have stalled, and only a new process is expected to help. Any thread may ask.

    Only time in which this process ran counts. Its threads `beat`, each at least every `beat_s`; what lies between two
    beats that are further apart was taken by somebody else, such as by SIGSTOP, and nobody could get on in it.

    Example, a step that began at 0 s and does not come back, and beats at 0, 1, 2, 60 and 61 s: at 59 s the engine has
    been silent for 3.5 s, as far as anybody can tell, and at 61 s for 1 s.
    """

    def __init__(self, timeout_s: float, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.timeout_s = timeout_s
        self.engine: Working | None = None
        self._clock_ns = clock_ns
        self._beat_ns: int | None = None
        self._resumed_ns = 0
        self._turned_ns: int | None = None

    @property
    def beat_s(self) -> float:
        """How often to beat."""
        return min(MAX_BEAT_S, self.timeout_s / 4)

    def beat(self) -> None:
        """This process runs."""
        now_ns = self._clock_ns()
        if self._beat_ns is not None and now_ns - self._beat_ns > self._slack_ns:
            self._resumed_ns = now_ns
        self._beat_ns = max(now_ns, self._beat_ns or 0)

    def turn(self) -> None:
        """The event loop turns."""
        self.beat()
        self._turned_ns = self._clock_ns()

    @property
    def engine_silent_s(self) -> float:
        """How long there has been work and no step has come back; 0 without work."""
        now_ns = self._seen_ns()
        stalled_ns = 0 if self.engine is None else self.engine.stalled_ns(now_ns)
        return self._witnessed_s(now_ns - stalled_ns, now_ns)

    @property
    def loop_silent_s(self) -> float:
        """How long the event loop has not turned."""
        now_ns = self._seen_ns()
        return 0.0 if self._turned_ns is None else self._witnessed_s(self._turned_ns, now_ns)

    @property
    def is_engine_late(self) -> bool:
        """Who waits may still be served, but others should go elsewhere."""
        return self.engine_silent_s > min(LATE_S, self.timeout_s)

    @property
    def is_engine_stalled(self) -> bool:
        """Nobody should wait any longer."""
        return self.engine_silent_s > self.timeout_s

    @property
    def is_loop_stalled(self) -> bool:
        """No request can be taken or answered."""
        return self.loop_silent_s > self.timeout_s

    @property
    def _slack_ns(self) -> int:
        return round((self.beat_s + BEAT_SLACK_S) * NS_PER_S)

    def _seen_ns(self) -> int:
        """Now, or how far the last beat reaches where that is past."""
        now_ns = self._clock_ns()
        return now_ns if self._beat_ns is None else min(now_ns, self._beat_ns + self._slack_ns)

    def _witnessed_s(self, since_ns: int, now_ns: int) -> float:
        return max(0, now_ns - max(since_ns, self._resumed_ns)) / NS_PER_S
