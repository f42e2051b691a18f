"""Strict priorities that age: the lower the value, the sooner; who has waited long enough is urgent too."""

from __future__ import annotations

from everystop.core.policy.base import AGEING_NS, Policy, View
from everystop.core.policy.waiting import WaitingLine
from everystop.core.request import Request


class Priority(Policy):
    """Lower `priority` first (vLLM's meaning of the field), and an urgent request takes the place of the tail.

    A level counts as much as `ageing_ns` of waiting: the order is that of `arrival + priority · ageing`, which never
    changes while a request lives. So a request of priority p is overtaken only by those of a priority q below p that
    arrive within (p - q) · ageing after it; once (p - lowest) · ageing have passed, nobody who arrives goes before it.

    Example, ageing 10 s: priority 2 arriving at 0 s ranks at 20 s, before a priority 0 that arrives at 21 s.
    """

    honours = ("ageing_ns",)
    has_priorities = True
    may_displace = True

    def __init__(self, ageing_ns: int = AGEING_NS) -> None:
        self._ageing_ns = ageing_ns
        self._line = WaitingLine()

    def _rank(self, request: Request) -> int:
        return request.arrival_ns + request.priority * self._ageing_ns

    def on_add(self, request: Request, view: View) -> None:
        self._line.push(request, self._rank(request))

    def on_admit(self, request: Request, view: View) -> None:
        self._line.discard(request)

    def on_remove(self, request: Request, view: View) -> None:
        self._line.discard(request)

    def pick(self, view: View) -> Request | None:
        return self._line.head()

    def line(self, num: int, view: View) -> list[Request]:
        return self._line.first(num)

    def keep_key(self, request: Request, view: View) -> tuple[int, ...]:
        return (self._rank(request), request.request_id)
