"""The main cause of the time of requests that are over, as far as there is time to work it out."""

from __future__ import annotations

from everystop.core.durations import NS_PER_S
from everystop.observe.history import History
from everystop.observe.live_request import LiveRequest
from everystop.observe.main_cause import main_cause
from everystop.observe.thread_share import ThreadShare

MAX_PENDING = 30  # as many as a page lists
PATIENCE_NS = NS_PER_S  # the end of the answer is waited for so long
COST_SHARE = 0.003
MAX_SAVED_NS = NS_PER_S // 50


class Blame:
    """Sets `blame` of requests within a `share` of the thread's time, 0.3 % of it unless said: of the last 30 to end
    the slowest first, so that what a page lists does not wait for what it lists no more.

    Where more requests end than there is time for, the fastest stay without.
    """

    def __init__(self, history: History, share: ThreadShare | None = None) -> None:
        self._history = history
        self._share = share or ThreadShare(COST_SHARE, MAX_SAVED_NS)
        self._pending: list[LiveRequest] = []

    def note(self, request: LiveRequest) -> None:
        """It is over."""
        self._pending.append(request)
        if len(self._pending) > MAX_PENDING:
            del self._pending[0]

    def tick(self, now_ns: int) -> list[LiveRequest]:
        """Those whose blame has been found since the last time."""
        self._share.refill(now_ns)
        found = []
        for request in sorted(filter(lambda request: _is_ready(request, now_ns), self._pending), key=_took_ns)[::-1]:
            if not self._share.has_time:
                break
            with self._share.paid():
                self._pending.remove(request)
                if self._find(request, now_ns):
                    found.append(request)
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
