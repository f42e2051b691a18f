"""Says in one line each why requests were slow; at most so many a second that saying so costs next to nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.observe.explain import tell, tell_life
from everystop.observe.history import Client, History
from everystop.observe.life import Life
from everystop.observe.thread_share import ThreadShare
from everystop.server.visibility import Viewer

logger = logging.getLogger(__name__)

MAX_LINES = 5
COST_SHARE = 0.01
MAX_SAVED_NS = NS_PER_S // 10


class Slow(NamedTuple):
    """A slow request; `life` where its time has been cut into pieces anyway."""

    took_ns: int
    client: Client
    life: Life | None


class SlowLog:
    """Requests that took longer than `threshold_ms` from the last byte received to the last byte sent.

    `note` hears of every request that is over, and costs a comparison. `tick`, called a few times a second, says why,
    for at most 5 requests a call, the slowest, and only within a `share` of the thread's time, 1 % of it unless said;
    the others are counted. There is no text of a prompt or an answer in it.
    """

    def __init__(
        self, history: History, threshold_ms: float, say: Callable[[str], None], share: ThreadShare | None = None
    ) -> None:
        self._history = history
        self._threshold_ns = round(threshold_ms * NS_PER_MS)
        self._say = say
        self._share = share or ThreadShare(COST_SHARE, MAX_SAVED_NS)
        self._slow: list[Slow] = []
        self._num_more = 0

    def note(self, client: Client, life: Life | None = None) -> None:
        """A request is over."""
        assert client.delivered_ns is not None
        took_ns = client.delivered_ns - client.received_ns
        if took_ns <= self._threshold_ns:
            return
        self._slow.append(Slow(took_ns, client, life))
        if len(self._slow) > MAX_LINES:
            self._slow.remove(min(self._slow, key=lambda slow: slow.took_ns))
            self._num_more += 1

    def tick(self, now_ns: int) -> None:
        """Say what has been noted since the last time; the history must have caught up."""
        self._share.refill(now_ns)
        noted, self._slow = sorted(self._slow, key=lambda slow: -slow.took_ns), []
        num_more, self._num_more = self._num_more, 0
        for slow in noted:
            if self._share.has_time:
                with self._share.paid():
                    self._explain(slow, now_ns)
            else:
                num_more += 1
        if num_more:
            self._say(f"slow requests beside these: {num_more}, each above {self._threshold_ns / NS_PER_MS:g} ms")

    def _explain(self, slow: Slow, now_ns: int) -> None:
        client = slow.client
        name = client.name if not client.given_name else f"{client.name} ({client.given_name})"
        self._say(f"slow request {name}, {slow.took_ns / NS_PER_S:.2f} s: {self._sentence(slow, now_ns)}")

    def _sentence(self, slow: Slow, now_ns: int) -> str:
        history, request_ids = self._history, slow.client.request_ids
        if any(request_id not in history.trails for request_id in request_ids):
            return "it is already forgotten; raise --explain-history"
        try:
            name_of = Viewer(history).name_of
            if slow.life is not None:
                told = tell_life(history, slow.life, name_of=name_of)
            else:
                told = tell(history, request_ids, now_ns=now_ns, name_of=name_of)
        except Exception:
            logger.exception("a slow request could not be explained; serving goes on")
            return "it could not be explained"
        return " ".join(told.split())
