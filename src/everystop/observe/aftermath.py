"""Finds out where the time of answered requests went, for those who count or export it, within a share of a thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from everystop.core.durations import NS_PER_S
from everystop.observe.history import Client, History, Trail
from everystop.observe.life import Life, life_of
from everystop.observe.thread_share import ThreadShare

logger = logging.getLogger(__name__)

MAX_PENDING = 1000
PATIENCE_NS = NS_PER_S  # so long the engine's word that it has ended is waited for
COST_SHARE = 0.005
TRACED_COST_SHARE = 0.05  # where somebody has asked for a trace of each
MAX_SAVED_NS = NS_PER_S // 20

Tell = Callable[[Client, Life | None], None]


class Aftermath:
    """Cuts the lives of requests whose answer is done, a few times a second, off the path of any token.

    `note` hears of each and costs an append. `tick` waits until the engine has said how each ended, cuts, in the order
    of their ends, as many as there is time for in the thread's `share`, and tells `on_life` of each request once: the
    life of the sequence that ended last, which covers the whole answer; None where there was no time for it, it is
    forgotten, or cutting it has failed.
    """

    def __init__(self, history: History, share: ThreadShare | None = None) -> None:
        self.on_life: list[Tell] = []
        self._history = history
        self._share = share or ThreadShare(COST_SHARE, MAX_SAVED_NS)
        self._pending: deque[Client] = deque()

    def note(self, client: Client) -> None:
        """It has been answered."""
        self._pending.append(client)

    def tick(self, now_ns: int, *, is_last: bool = False) -> None:
        """Cut what is due; the history must have caught up. The `is_last` call leaves nobody behind."""
        self._share.refill(now_ns)
        for _ in range(len(self._pending)):
            client = self._pending.popleft()
            trails = self._trails(client)
            is_due = all(trail.is_over for trail in trails) or now_ns - (client.delivered_ns or now_ns) > PATIENCE_NS
            if is_due or is_last or len(self._pending) >= MAX_PENDING:
                self._tell(client, self._cut(trails, now_ns) if self._share.has_time else None)
            else:
                self._pending.append(client)

    def _trails(self, client: Client) -> list[Trail]:
        trails = self._history.trails
        return [trail for i in client.request_ids if (trail := trails.get(i)) is not None]

    def _cut(self, trails: list[Trail], now_ns: int) -> Life | None:
        if not trails:
            return None
        with self._share.paid():
            last = max(trails, key=lambda trail: (_end_ns(trail, now_ns), trail.request_id))
            try:
                return life_of(self._history, last, now_ns)
            except Exception:
                logger.exception("where the time of a request went could not be worked out; serving goes on")
                return None

    def _tell(self, client: Client, life: Life | None) -> None:
        for tell in self.on_life:
            try:
                tell(client, life)
            except Exception:
                logger.exception("where the time of a request went could not be noted; serving goes on")


def _end_ns(trail: Trail, now_ns: int) -> int:
    end = trail.finish or trail.refusal
    return now_ns if end is None else end.now_ns
