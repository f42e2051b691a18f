"""The main cause of the time of requests that are over, as far as there is time to work it out."""

from __future__ import annotations

import time
from collections.abc import Callable

from everystop.core.durations import NS_PER_S
from everystop.observe.history import History
from everystop.observe.live_request import LiveRequest
from everystop.observe.main_cause import main_cause

MAX_PENDING = 50
PATIENCE_NS = NS_PER_S  # the end of the answer is waited for so long
COST_SHARE = 0.003  # of the time of one thread
MAX_SAVED_NS = NS_PER_S // 50


class Blame:
    """Sets `blame` of requests, the slowest first, as long as that takes no more than 0.3 % of a thread's time; where
    more requests end than there is time for, the fastest stay without. `cpu_ns` is the clock of the thread's time.
    """

    def __init__(self, history: History, cpu_ns: Callable[[], int] = time.thread_time_ns) -> None:
        self._history = history
        self._cpu_ns = cpu_ns
        self._pending: list[LiveRequest] = []
        self._saved_ns = MAX_SAVED_NS
        self._ticked_ns: int | None = None

    def note(self, request: LiveRequest) -> None:
        """It is over."""
        self._pending.append(request)
        if len(self._pending) > MAX_PENDING:
            self._pending.sort(key=_took_ns)
            del self._pending[0]

    def tick(self, now_ns: int) -> list[LiveRequest]:
        """Those whose blame has been found since the last time."""
        if self._ticked_ns is not None:
            self._saved_ns = min(MAX_SAVED_NS, self._saved_ns + round((now_ns - self._ticked_ns) * COST_SHARE))
        self._ticked_ns = now_ns
        found = []
        for request in sorted(filter(lambda request: _is_ready(request, now_ns), self._pending), key=_took_ns)[::-1]:
            if self._saved_ns <= 0:
                break
            began_ns = self._cpu_ns()
            self._pending.remove(request)
            if self._find(request, now_ns):
                found.append(request)
            self._saved_ns -= self._cpu_ns() - began_ns
        return found

    def _find(self, request: LiveRequest, now_ns: int) -> bool:
        """False where nothing is known any more, or no time has passed."""
        if request.request_id not in self._history.trails:
            return False
        cause = main_cause(self._history, request.trail, now_ns)
        request.blame = None if cause is None else cause.label
        return cause is not None


def _took_ns(request: LiveRequest) -> int:
    return (request.finish_ns or 0) - request.received_ns


def _is_ready(request: LiveRequest, now_ns: int) -> bool:
    client = request.trail.client
    is_answered = client is None or client.delivered_ns is not None
    return is_answered or now_ns - (request.finish_ns or now_ns) > PATIENCE_NS
