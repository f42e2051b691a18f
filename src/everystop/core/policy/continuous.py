"""Continuous batching (Orca, OSDI 2022): whoever waits boards at the next step with room, first come, first served."""

from __future__ import annotations

from everystop.core.policy.base import Policy, View
from everystop.core.policy.waiting import WaitingLine
from everystop.core.request import Request


class Continuous(Policy):
    """Iteration-level scheduling in order of arrival; the oldest running request is the last to lose its blocks."""

    def __init__(self) -> None:
        self._line = WaitingLine()

    def on_add(self, request: Request, view: View) -> None:
        self._line.push(request)

    def on_admit(self, request: Request, view: View) -> None:
        self._line.discard(request)

    def on_remove(self, request: Request, view: View) -> None:
        self._line.discard(request)

    def pick(self, view: View) -> Request | None:
        return self._line.head()

    def line(self, num: int, view: View) -> list[Request]:
        return self._line.first(num)
