"""A waiting line in order of rank, then of request id, with removal from anywhere."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from everystop.core.request import Request

_MAX_STALE = 64


class WaitingLine:
    """Lowest rank first, and first come, first served by `request_id` among equals; a rank stands while one waits.

    Where all ranks are 0, a preempted request, being older, comes back before new arrivals. Removal is lazy: the heap
    may hold entries that `_members` no longer has; they are dropped when they reach the head, or all at once when they
    outnumber the members.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._members: dict[int, tuple[int, Request]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._members

    def push(self, request: Request, rank: int = 0) -> None:
        """Join the line; a request joins once."""
        assert request.request_id not in self._members
        self._members[request.request_id] = (rank, request)
        heappush(self._heap, (rank, request.request_id))

    def discard(self, request: Request) -> None:
        """Leave the line, if in it."""
        self._members.pop(request.request_id, None)
        if len(self._heap) > 2 * len(self._members) + _MAX_STALE:
            self._heap = [(rank, request_id) for request_id, (rank, _) in self._members.items()]
            heapify(self._heap)

    def head(self) -> Request | None:
        """The first in line, who stays in it."""
        while self._heap:
            rank, request_id = self._heap[0]
            member = self._members.get(request_id)
            if member is not None and member[0] == rank:
                return member[1]
            heappop(self._heap)
        return None

    def first(self, num: int) -> list[Request]:
        """The first `num` in line, in order, who stay in it; takes time in proportion to them and to those who have
        left from among them.
        """
        found: list[Request] = []
        frontier = [(self._heap[0], 0)] if self._heap else []
        while frontier and len(found) < num:
            (rank, request_id), i = heappop(frontier)
            member = self._members.get(request_id)
            is_again = bool(found) and found[-1].request_id == request_id  # left and joined anew: two equal entries
            if member is not None and member[0] == rank and not is_again:
                found.append(member[1])
            for child in (2 * i + 1, 2 * i + 2):
                if child < len(self._heap):
                    heappush(frontier, (self._heap[child], child))
        return found
