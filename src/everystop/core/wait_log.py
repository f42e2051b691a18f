"""Says why nobody boards, when that changes: not at every step, nor for each of ten thousand who wait."""

from __future__ import annotations

from everystop.core.events import WaitEvent, WaitReason
from everystop.core.policy.base import Policy
from everystop.core.request import Request


class WaitLog:
    """Remembers whom it has last named as the next to board, and why that one waits."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._last: tuple[int, WaitReason | None] = (-1, None)

    def note(
        self, head: Request | None, reason: WaitReason, now_ns: int, need: int, have: int, num_behind: int
    ) -> list[WaitEvent]:
        """Why the head waits, or everybody where there is none, if that has changed; before it, if the head has, once
        for all behind it, and for those passed over.
        """
        head_id = -1 if head is None else head.request_id
        if self._last == (head_id, reason):
            return []
        events = []
        if head is not None and head_id != self._last[0] and num_behind > 0:
            events.append(WaitEvent(now_ns, -1, WaitReason.BEHIND, 0, 0, head_id))
            for request, own_reason in self._policy.passed_over(head):
                events.append(WaitEvent(now_ns, request.request_id, own_reason, 0, 0, head_id))
        self._last = (head_id, reason)
        events.append(WaitEvent(now_ns, head_id, reason, need, have, -1))
        return events

    def forget(self, request: Request | None = None) -> None:
        """The request no longer waits; or, without one, nobody does."""
        if request is None or self._last[0] == request.request_id:
            self._last = (-1, None)
