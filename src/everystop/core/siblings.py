"""The n choices of one client request: who is alive, and who waits for whose prompt."""

from __future__ import annotations

from collections.abc import Iterator

from everystop.core.request import Request, RequestState


class Siblings:
    """Groups of requests with one prompt. The first to run computes it, the others are parked behind that one.

    `num_parked` counts those who are.
    """

    def __init__(self) -> None:
        self.num_parked = 0
        self._groups: dict[int, list[Request]] = {}
        self._parked: dict[int, list[Request]] = {}

    def join(self, request: Request) -> None:
        """A request has arrived."""
        self._groups.setdefault(request.group_id, []).append(request)

    def leave(self, request: Request) -> None:
        """A request has ended; those parked behind it are to be unparked first."""
        group = self._groups[request.group_id]
        group.remove(request)
        if not group:
            del self._groups[request.group_id]
        for sibling in group:
            parked = self._parked.get(sibling.request_id, [])
            if request in parked:
                parked.remove(request)
                self.num_parked -= 1

    def has(self, group_id: int) -> bool:
        """A choice of that client request lives."""
        return group_id in self._groups

    def source_for(self, request: Request, step_id: int) -> tuple[Request | None, Request | None]:
        """(a running sibling whose prompt is computed, None), else (None, one that is at it, or None). One that has
        matched blocks in this very step still is: copies come before the rows that fill those blocks. A request that
        scores its prompt computes it itself.
        """
        siblings = self._groups[request.group_id]
        if len(siblings) == 1 or request.is_scoring:
            return None, None
        num_needed = request.num_prompt_tokens - 1
        busy = None
        for sibling in siblings:
            if sibling.state is RequestState.RUNNING:
                if sibling.num_computed_tokens >= num_needed and sibling.last_matched_step < step_id:
                    return sibling, None
                busy = busy or sibling
        return None, busy

    def park(self, request: Request, leader: Request) -> None:
        """`request` waits until `leader` has computed the prompt, or has left."""
        self._parked.setdefault(leader.request_id, []).append(request)
        self.num_parked += 1

    def has_parked(self, leader: Request) -> bool:
        """Somebody waits for this request's prompt."""
        return leader.request_id in self._parked

    def unpark(self, leader: Request) -> list[Request]:
        """Those who waited for `leader`; they do no longer."""
        parked = self._parked.pop(leader.request_id, [])
        self.num_parked -= len(parked)
        return parked

    def members(self) -> Iterator[Request]:
        """Every living request."""
        for group in self._groups.values():
            yield from group

    def parked(self) -> Iterator[tuple[int, Request]]:
        """(leader's id, parked request), for all who are parked."""
        for leader_id, requests in self._parked.items():
            for request in requests:
                yield leader_id, request

    def leader_ids(self) -> list[int]:
        """Ids of those behind whom others are, or were, parked."""
        return list(self._parked)
