"""Shortest job first, with ageing: what little work remains goes first, for bounds on the mean waiting time."""

from __future__ import annotations

from collections.abc import Callable

from everystop.core.policy.base import AGEING_NS, Policy, View
from everystop.core.policy.waiting import WaitingLine
from everystop.core.request import Request

Work = Callable[[Request], int]


def remaining_prompt(request: Request) -> int:
    """Prompt tokens that are neither computed nor on their way: all that a server can know."""
    return max(0, request.num_prompt_tokens - request.num_scheduled_through)


class Shortest(Policy):
    """Least remaining `work` first, in tokens (by default the prompt's); a simulation may pass an oracle.

    A thousand tokens count as much as `ageing_ns` of waiting: the order is that of `arrival + work · ageing / 1000`.
    So a request with a work of w is overtaken only by those that arrive within w · ageing / 1000 after it. Nobody is
    displaced: among the running, the one with the least left computes first and keeps its blocks longest.

    Example, ageing 10 s: a prompt of 3,000 tokens that arrives at 0 s boards before one of 10 that arrives at 30 s.
    """

    honours = ("ageing_ns",)

    def __init__(self, ageing_ns: int = AGEING_NS, work: Work = remaining_prompt) -> None:
        self._ageing_ns = ageing_ns
        self._work = work
        self._line = WaitingLine()

    def _rank(self, request: Request) -> int:
        return request.arrival_ns + self._work(request) * self._ageing_ns // 1000

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
