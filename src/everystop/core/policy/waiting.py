"""A waiting line ordered by request id, with removal from anywhere."""

from __future__ import annotations

from heapq import heappop, heappush

from everystop.core.request import Request

_MAX_STALE = 64


class WaitingLine:
    """First come, first served by `request_id`; a preempted request, being older, comes back before new arrivals.

    Removal is lazy: the heap may hold ids that `_members` no longer has; they are dropped when they reach the head, or
    all at once when they outnumber the members.
    """

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._members: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        """Join the line; a request joins once."""
        assert request.request_id not in self._members
        self._members[request.request_id] = request
        heappush(self._heap, request.request_id)

    def discard(self, request: Request) -> None:
        """Leave the line, if in it."""
        self._members.pop(request.request_id, None)
        if len(self._heap) > 2 * len(self._members) + _MAX_STALE:
            self._heap = sorted(self._members)

    def head(self) -> Request | None:
        """The first in line, who stays in it."""
        while self._heap:
            request = self._members.get(self._heap[0])
            if request is not None:
                return request
            heappop(self._heap)
        return None
