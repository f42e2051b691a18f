"""Finds out where the time of answered requests went, for those who count or export it, within a share of a thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from everystop.core.durations import NS_PER_S
from everystop.observe.history import Client, History, Trail
from everystop.observe.life import Life, life_of

logger = logging.getLogger(__name__)

MAX_PENDING = 1000
PATIENCE_NS = NS_PER_S  # so long the engine's word that it has ended is waited for
COST_SHARE = 0.005  # of the time of one thread
TRACED_COST_SHARE = 0.05  # where somebody has asked for a trace of each
MAX_SAVED_NS = NS_PER_S // 20

Tell = Callable[[Client, Life | None], None]


class Aftermath:
    """Cuts the lives of requests whose answer is done, a few times a second, off the path of any token.

    `note` hears of each and costs an append. `tick` cuts, in the order of their ends, as many as fit into the share of
    a thread's time that is allowed, and tells `on_life` of each request once: the life of the sequence that ended last,
    which covers the whole answer; None where there was no time for it, or it is forgotten. `cpu_ns` is the clock of the
    thread's time, of which `cost_share` may be used.
    """

    def __init__(
        self, history: History, cpu_ns: Callable[[], int] = time.thread_time_ns, *, cost_share: float = COST_SHARE
    ) -> None:
        self.on_life: list[Tell] = []
        self._history = history
        self._cpu_ns = cpu_ns
        self._cost_share = cost_share
        self._pending: deque[Client] = deque()
        self._saved_ns = MAX_SAVED_NS
        self._ticked_ns: int | None = None

    def note(self, client: Client) -> None:
        """It has been answered."""
        self._pending.append(client)

    def tick(self, now_ns: int, *, is_last: bool = False) -> None:
        """Cut what is due; the history must have caught up. The `is_last` call leaves nobody behind."""
        if self._ticked_ns is not None:
            self._saved_ns = min(MAX_SAVED_NS, self._saved_ns + round((now_ns - self._ticked_ns) * self._cost_share))
        self._ticked_ns = now_ns
        for _ in range(len(self._pending)):
            client = self._pending.popleft()
            trails = self._trails(client)
            is_due = all(trail.is_over for trail in trails) or now_ns - (client.delivered_ns or now_ns) > PATIENCE_NS
            if is_due or is_last or len(self._pending) >= MAX_PENDING:
                self._tell(client, self._cut(trails, now_ns) if self._saved_ns > 0 else None)
            else:
                self._pending.append(client)

    def _trails(self, client: Client) -> list[Trail]:
        trails = self._history.trails
        return [trail for i in client.request_ids if (trail := trails.get(i)) is not None]

    def _cut(self, trails: list[Trail], now_ns: int) -> Life | None:
        if not trails:
            return None
        began_ns = self._cpu_ns()
        last = max(trails, key=lambda trail: (_end_ns(trail, now_ns), trail.request_id))
        life = life_of(self._history, last, now_ns)
        self._saved_ns -= self._cpu_ns() - began_ns
        return life

    def _tell(self, client: Client, life: Life | None) -> None:
        for tell in self.on_life:
            try:
                tell(client, life)
            except Exception:
                logger.exception("where the time of a request went could not be noted; serving goes on")


def _end_ns(trail: Trail, now_ns: int) -> int:
    end = trail.finish or trail.refusal
    return now_ns if end is None else end.now_ns
