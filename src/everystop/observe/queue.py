"""Who waits, and why, at one moment of a run: folds the acts of the scheduler as they come, and knows no policy.

The scheduler says only what changes: who is next and why that one waits, and the reasons of those whom it passes over.
All others wait for the reason of the one who is next, also those who have come since.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import islice

from everystop.core.events import (
    AdmitEvent,
    ArrivalEvent,
    FinishEvent,
    LineEvent,
    PreemptEvent,
    RefuseEvent,
    WaitEvent,
    WaitReason,
)

RATE_NS = 60_000_000_000
NOBODY = -1


class Queue:
    """The waiting requests in order of arrival, the reason why each waits, and how quickly they have boarded.

    `line` is who would board in which order, the last time that somebody asked. `head` says why the one who is next
    waits, or everybody (request_id -1); None where nobody has been asked yet, since a step is running. `ids` ascend;
    `parked` are those that wait for a sibling's prompt. `boarded_ns` are the boardings of the last 60 s that did not
    follow a preemption, `on_board` those who run, by id, with their last boarding.
    """

    def __init__(self, head: WaitEvent | None = None) -> None:
        self.head = head
        self.ids: list[int] = []
        self.on_board: dict[int, AdmitEvent] = {}
        self.parked: dict[int, WaitEvent] = {}
        self.boarded_ns: deque[int] = deque()
        self.first_ns: int | None = None
        self.line: LineEvent | None = None
        self._places: dict[int, int] = {}  # in the line, as it was told last; in order
        self._places_left: list[int] = []  # by those who wait no longer, ascending
        self._own: dict[int, WaitEvent] = {}
        self._num_prompt_tokens: dict[int, int] = {}

    def observe(self, act: ArrivalEvent | RefuseEvent | AdmitEvent | PreemptEvent | WaitEvent | FinishEvent) -> None:
        """Take in one act, in order."""
        if self.first_ns is None:
            self.first_ns = act.now_ns
        match act:
            case WaitEvent():
                self._wait(act)
            case ArrivalEvent():
                self._num_prompt_tokens[act.request_id] = act.num_prompt_tokens
                insort(self.ids, act.request_id)
            case AdmitEvent():
                self._leave(act.request_id)
                self.on_board[act.request_id] = act
                if not act.resumed:
                    self._note_boarding(act.now_ns)
            case PreemptEvent():
                self.on_board.pop(act.request_id, None)
                insort(self.ids, act.request_id)
                self._unpark_behind(act.request_id)
            case FinishEvent():
                self.on_board.pop(act.request_id, None)
                self._num_prompt_tokens.pop(act.request_id, None)
                self._leave(act.request_id)
                self._unpark_behind(act.request_id)

    def land(self, request_ids: Sequence[int], starts: Sequence[int], nums: Sequence[int]) -> None:
        """A step with these rows is back: who waited for a prompt that it completed need wait no longer.

        All but the last token of the prompt suffice; the sibling computes that one itself.
        """
        for request_id, event in list(self.parked.items()):
            num_prompt_tokens = self._num_prompt_tokens.get(request_id)  # siblings have one prompt
            if num_prompt_tokens is not None and event.behind in request_ids:
                row = request_ids.index(event.behind)
                if starts[row] + nums[row] >= num_prompt_tokens - 1:
                    del self.parked[request_id]

    def reason_of(self, request_id: int) -> WaitEvent | None:
        """Why this one waits: its own reason, or that of the one who is next; None where only a step is running."""
        own = self._own.get(request_id)
        if own is not None and self.head is not None and own.behind != self.head.request_id:
            own = None  # it was passed over for the sake of somebody who is not next any more
        return self.parked.get(request_id) or own or self.head

    def holds(self, request_id: int) -> bool:
        """It waits."""
        place = bisect_left(self.ids, request_id)
        return place < len(self.ids) and self.ids[place] == request_id

    def line_up(self, line: LineEvent) -> None:
        """In this order those who wait would board."""
        self.line = line
        self._places = {request_id: i for i, request_id in enumerate(line.request_ids) if self.holds(request_id)}
        self._places_left = [i for i, request_id in enumerate(line.request_ids) if request_id not in self._places]

    def position_of(self, request_id: int) -> int:
        """Its place in the order in which they would board, from 1, as far as the line has been told; who has come
        since stands behind those, in order of arrival.
        """
        place = self._places.get(request_id)
        if place is not None:
            return place + 1 - bisect_left(self._places_left, place)
        return max(len(self._places), bisect_left(self.ids, request_id)) + 1

    def in_order(self, most: int) -> list[int]:
        """The first of them, in that order; who is next by the scheduler's last word is the first."""
        ids = list(islice(self._places, most))
        others = (request_id for request_id in self.ids if request_id not in self._places)
        ids += islice(others, most - len(ids))
        if self.head is not None and self.holds(self.head.request_id):
            first = self.head.request_id
            ids = [first, *(request_id for request_id in ids if request_id != first)][:most]
        return ids

    def boardings_per_s(self, now_ns: int) -> float | None:
        """How many boarded a second, over the last 60 s or as long as there has been traffic; None if nobody has."""
        self._forget_boardings(now_ns)
        if not self.boarded_ns or self.first_ns is None:
            return None
        return len(self.boarded_ns) * 1e9 / max(1, min(RATE_NS, now_ns - self.first_ns))

    def _wait(self, event: WaitEvent) -> None:
        if event.reason is WaitReason.FORK:
            self.parked[event.request_id] = event
            return
        if (parked := self.parked.get(event.request_id)) is not None:
            self._unpark_behind(parked.behind)  # who is asked to board no longer waits for a sibling, nor do the others
        if event.request_id == NOBODY:
            self._own.clear()  # either nobody is next, or those passed over are about to be named anew
            self.head = None if event.reason is WaitReason.BEHIND else event
        elif event.behind == NOBODY:
            self.head = event
        else:
            self._own[event.request_id] = event

    def _leave(self, request_id: int) -> None:
        """It boards, or ends: if it was next, nobody is until the scheduler names the next one."""
        if self.holds(request_id):
            del self.ids[bisect_left(self.ids, request_id)]
        place = self._places.pop(request_id, None)
        if place is not None:
            insort(self._places_left, place)
        self._own.pop(request_id, None)
        self.parked.pop(request_id, None)
        if self.head is not None and self.head.request_id == request_id:
            self.head = None

    def _unpark_behind(self, leader_id: int) -> None:
        if self.parked:
            self.parked = {i: event for i, event in self.parked.items() if event.behind != leader_id}

    def _note_boarding(self, now_ns: int) -> None:
        self.boarded_ns.append(now_ns)
        self._forget_boardings(now_ns)

    def _forget_boardings(self, now_ns: int) -> None:
        while self.boarded_ns and self.boarded_ns[0] < now_ns - RATE_NS:
            self.boarded_ns.popleft()
