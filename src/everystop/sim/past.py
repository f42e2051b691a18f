"""What a live server would have remembered of a recorded run: its events, as they are made again, become a history."""

from __future__ import annotations

import sys

from everystop.core.events import ArrivalEvent, Event, FinishEvent, RefuseEvent
from everystop.observe.history import Client, History
from everystop.sim.record import Record

EVENTS_A_FOLD = 10_000


class Past:
    """Feeds a `history` that forgets nothing with the events of a record, and with each of its clients just before the
    arrival of its first request. Tenants are numbered as in the record, and no end says which token it was.
    """

    def __init__(self, record: Record) -> None:
        num_requests = sum(call[0] in ("add", "refuse", "decline") for call in record.calls)
        self.history = History(num_finished=num_requests, max_bytes=sys.maxsize, step_times=record.step_times)
        self._clients = {request_id: client for client in record.clients for request_id in client.request_ids}
        self._num_new = 0

    def hear(self, events: list[Event]) -> None:
        """Take the events of one step."""
        for event in events:
            if isinstance(event, ArrivalEvent | RefuseEvent):
                self._introduce(self._clients.get(event.request_id))
        self.history.receive([_without_filler(event) for event in events])
        self._num_new += len(events)
        if self._num_new >= EVENTS_A_FOLD:
            self.fold()

    def _introduce(self, client: Client | None) -> None:
        if client is not None and client.name not in self.history.clients:
            self.history.add_client(client)

    def fold(self) -> None:
        """Let the history count what it has received."""
        self.history.catch_up()
        self._num_new = 0


def _without_filler(event: Event) -> Event:
    """The token at which a replayed request stops only stands for one."""
    return event._replace(detail="") if isinstance(event, FinishEvent) and type(event.detail) is int else event
