"""Says in one line each why requests were slow; at most so many a second that saying so costs next to nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.observe.explain import tell
from everystop.observe.history import Client, History
from everystop.server.visibility import Viewer

logger = logging.getLogger(__name__)

MAX_LINES = 5
COST_SHARE = 0.01  # of the time of one thread
MAX_SAVED_NS = NS_PER_S // 10


class SlowLog:
    """Requests that took longer than `threshold_ms` from the last byte received to the last byte sent.

    `note` hears of every request that is over and costs a comparison. `tick`, called a few times a second, says why,
    for at most 5 requests a call, the slowest, and only as long as that has not cost more than 1 % of the time since
    the start, of which at most 100 ms are saved up; the others are counted. There is no text of a prompt or an answer
    in it.
    """

    def __init__(self, history: History, threshold_ms: float, say: Callable[[str], None]) -> None:
        self._history = history
        self._threshold_ns = round(threshold_ms * NS_PER_MS)
        self._say = say
        self._slow: list[tuple[int, Client]] = []
        self._num_more = 0
        self._saved_ns = MAX_SAVED_NS
        self._ticked_ns = time.monotonic_ns()

    def note(self, client: Client) -> None:
        """A request is over."""
        assert client.delivered_ns is not None
        took_ns = client.delivered_ns - client.received_ns
        if took_ns <= self._threshold_ns:
            return
        self._slow.append((took_ns, client))
        if len(self._slow) > MAX_LINES:
            self._slow.remove(min(self._slow, key=lambda slow: slow[0]))
            self._num_more += 1

    def tick(self) -> None:
        """Say what has been noted since the last time; the history must have caught up."""
        now_ns = time.monotonic_ns()
        self._saved_ns = min(MAX_SAVED_NS, self._saved_ns + round((now_ns - self._ticked_ns) * COST_SHARE))
        self._ticked_ns = now_ns
        slow, self._slow = sorted(self._slow, key=lambda slow: -slow[0]), []
        num_more, self._num_more = self._num_more, 0
        for took_ns, client in slow:
            if self._saved_ns > 0:
                self._explain(took_ns, client)
            else:
                num_more += 1
        if num_more:
            self._say(f"slow requests beside these: {num_more}, each above {self._threshold_ns / NS_PER_MS:g} ms")

    def _explain(self, took_ns: int, client: Client) -> None:
        began_ns = time.thread_time_ns()
        name = client.name if not client.given_name else f"{client.name} ({client.given_name})"
        self._say(f"slow request {name}, {took_ns / NS_PER_S:.2f} s: {self._sentence(client)}")
        self._saved_ns -= time.thread_time_ns() - began_ns

    def _sentence(self, client: Client) -> str:
        if any(request_id not in self._history.trails for request_id in client.request_ids):
            return "it is already forgotten; raise --explain-history"
        try:
            name_of = Viewer(self._history).name_of
            told = tell(self._history, client.request_ids, now_ns=time.monotonic_ns(), name_of=name_of)
        except Exception:
            logger.exception("a slow request could not be explained; serving goes on")
            return "it could not be explained"
        return " ".join(told.split())
