"""Answers what a client asks about requests: where one stands, what it waits for, and why it was slow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from everystop.core.durations import NS_PER_S
from everystop.observe.excerpt import excerpt_of
from everystop.observe.explain import LIVE, MAX_CHOICES, Explanation, explain, last_to_end, state_of
from everystop.observe.history import Client, History
from everystop.observe.waiting import WaitingState, waiting_state
from everystop.server.errors import RequestUnknown
from everystop.server.fields import echo
from everystop.server.visibility import Caller, Viewer

logger = logging.getLogger(__name__)

ENDS = ("failed", "refused", "aborted", "finished")  # the first that there is says how a request of several ended


class Inquiry:
    """One caller's questions; those about others' requests are answered as if there were no such request.

    The history must have caught up.
    """

    def __init__(self, history: History, caller: Caller) -> None:
        self._history = history
        self._viewer = Viewer(history, caller)
        self._now_ns = time.monotonic_ns()

    def client(self, name: str) -> Client:
        """The HTTP request of that name, by the id of its answer or the client's own; raises RequestUnknown."""
        client = self._viewer.find(name)
        if client is not None:
            return client
        num = self._history.num_finished
        over = f"the last {num:,} that are over" if num else "none that is over"
        raise RequestUnknown(
            f"no request {echo(name)} is known here; remembered are those that wait or run, and {over} "
            "(--explain-history), by the id of the answer, the x-request-id that was sent, or the number in the engine"
        )

    def explain(self, name: str) -> Callable[[], Explanation]:
        """The work of explaining a request as it stands now, which any thread may do; raises RequestUnknown."""
        request_ids, now_ns = self.client(name).request_ids, self._now_ns
        excerpt = excerpt_of(self._history, last_to_end(self._history, request_ids, now_ns, MAX_CHOICES))
        return partial(explain, excerpt, request_ids, now_ns=now_ns, name_of=self._viewer.name_of)

    def look(self, name: str) -> dict[str, Any]:
        """Where a request stands; raises RequestUnknown."""
        client, history = self.client(name), self._history
        trails = [trail for i in client.request_ids if (trail := history.trails.get(i)) is not None]
        states = [state_of(trail) for trail in trails]
        waiting = None if client.delivered_ns is not None else _first_wait(history, self._viewer, client, self._now_ns)
        return {
            "id": client.name,
            "object": "request",
            "x_request_id": client.given_name or None,
            "state": _summary(states),
            "num_sequences": client.num,
            "num_waiting_sequences": states.count("waiting"),
            "elapsed_ns": (client.delivered_ns or self._now_ns) - client.received_ns,
            "waiting": None if waiting is None else waiting._asdict(),
        }


def _summary(states: list[str]) -> str:
    return next(state for state in (*LIVE, *ENDS) if state in states)


def _first_wait(history: History, viewer: Viewer, client: Client, now_ns: int) -> WaitingState | None:
    """Of the sequences of one request that wait, the first to board."""
    queue = history.queue
    in_line = sorted(filter(queue.holds, client.request_ids), key=queue.position_of)
    waits = (waiting_state(history, i, now_ns, name_of=viewer.name_of) for i in in_line or client.request_ids)
    return next((wait for wait in waits if wait is not None), None)


def progress_line(history: History, client: Client) -> str | None:
    """How a request waits, for a comment in its own stream; it names nobody. None while nothing of it waits."""
    try:
        history.catch_up()
        wait = _first_wait(history, Viewer(history), client, time.monotonic_ns())
    except Exception:
        logger.exception("the wait of a request could not be told; serving goes on")
        return None
    if wait is None:
        return "running" if client.first_sent_ns is None else None
    line = f"waiting, position {wait.position} of {wait.num_waiting}, {wait.reason}"
    return line if wait.estimated_ns is None else f"{line}, about {wait.estimated_ns / NS_PER_S:.1f} s"
