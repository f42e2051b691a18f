"""Who waited, when, and why: a slice for each wait with the reasons in it, and the one at the head of the queue."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import merge
from typing import NamedTuple

from everystop.core.events import (
    AdmitEvent,
    ArrivalEvent,
    FinishEvent,
    PreemptEvent,
    RefuseEvent,
    WaitEvent,
    WaitReason,
)
from everystop.observe.history import Act, History, StepRecord
from everystop.observe.queue import Queue
from everystop.observe.trace.slots import leaving
from everystop.observe.trace.tracks import Arguments, Canvas, Lanes, Pen
from everystop.observe.wording import number_name

EVERYBODY = -1
MAX_TOLD = 64  # who wait: a reason for everybody stands in each of their slices; of more it would fill the trace


class Reason(NamedTuple):
    """Why somebody waits from a time on."""

    now_ns: int
    name: str
    arguments: Arguments = ()


@dataclass(slots=True)
class Wait:
    """From arrival, or a preemption, to boarding, or the end."""

    request_id: int
    start_ns: int
    end_ns: int
    arguments: Arguments
    reasons: list[Reason] = field(default_factory=list)
    exit: FinishEvent | None = None
    boards: bool = False


class Waits:
    """Follows the acts of a run; knows at each time who waits and why.

    The head of the queue has a reason of its own, and so have those whom the policy passes over for its sake; all
    others are `behind`, or, unless they are many, share a reason that holds for everybody.
    """

    def __init__(self, history: History) -> None:
        self.waits: list[Wait] = []
        self.heads: list[tuple[Reason, int]] = []  # with its end
        self.refusals: list[RefuseEvent] = []
        self._waiting: dict[int, Wait] = {}
        self._own: set[int] = set()
        self._shared: Reason | None = None  # holds for everybody
        self._are_behind = True  # whoever has no reason of his own is said to be behind, or new
        self._head: Reason | None = None
        self._head_id = EVERYBODY
        self._prompts: dict[int, int] = {}
        self._line = Queue()
        self._parked: set[int] = set()
        for item in merge(history.acts.since(0), history.steps.since(0), key=_order):
            if isinstance(item, StepRecord):
                self._line.land(item.request_ids, item.starts, item.nums)
            else:
                self._line.observe(item)
                self._take(item)
            self._unpark(item.now_ns)
        for wait in self._waiting.values():
            wait.end_ns = history.last_ns
        self._end_head(history.last_ns)

    def _take(self, act: Act) -> None:
        match act:
            case ArrivalEvent():
                name = WaitReason.BEHIND.value if self._waiting else "step_running"
                name = name if self._shared is None else self._shared.name
                self._start(act.request_id, Reason(act.now_ns, name), (("prompt_tokens", act.num_prompt_tokens),))
            case PreemptEvent():
                reason = Reason(act.now_ns, "preempted")
                self._start(act.request_id, reason, (("lost_tokens", act.num_lost_tokens),))
            case AdmitEvent():
                self._stop(act.request_id, act.now_ns).boards = True
                self._end_head(act.now_ns)
                self._shared = None
            case FinishEvent():
                if act.request_id in self._waiting:
                    self._stop(act.request_id, act.now_ns).exit = act
            case RefuseEvent():
                self.refusals.append(act)
            case WaitEvent():
                self._note(act)

    def _start(self, request_id: int, reason: Reason, arguments: Arguments) -> None:
        wait = Wait(request_id, reason.now_ns, reason.now_ns, arguments, [reason])
        self._waiting[request_id] = wait
        self.waits.append(wait)

    def _stop(self, request_id: int, now_ns: int) -> Wait:
        wait = self._waiting.pop(request_id)
        wait.end_ns = now_ns
        self._own.discard(request_id)
        if request_id == self._head_id or not self._waiting:
            self._end_head(now_ns)
        return wait

    def _note(self, event: WaitEvent) -> None:
        blocks = (("need_blocks", event.need), ("have_blocks", event.have)) if event.need else ()
        behind = (("behind", number_name(event.behind)),) if event.behind >= 0 else ()
        reason = Reason(event.now_ns, event.reason.value, (*blocks, *behind))
        if event.behind < 0:
            self._end_head(event.now_ns)
            self._head, self._head_id = reason, event.request_id
            self._shared = None
        if event.request_id == EVERYBODY:
            self._share(reason)
        else:
            self._say(event.request_id, reason)
            self._own.add(event.request_id)

    def _share(self, reason: Reason) -> None:
        """A reason for all who have none of their own; those who had one lose it, but for choices that wait to fork."""
        is_told = len(self._waiting) <= MAX_TOLD
        name = reason.name if is_told else WaitReason.BEHIND.value
        is_behind = name == WaitReason.BEHIND.value
        for request_id in sorted(self._own) if is_behind and self._are_behind else [*self._waiting]:
            if request_id not in self._line.parked:
                self._say(request_id, Reason(reason.now_ns, name))
        self._own.clear()
        self._shared, self._are_behind = (None if is_behind else reason), is_behind

    def _unpark(self, now_ns: int) -> None:
        """Those who need no longer wait for a sibling's prompt are in the line with the others."""
        for request_id in sorted(self._parked - self._line.parked.keys()):
            wait = self._waiting.get(request_id)
            if wait is not None and wait.reasons[-1].name == WaitReason.FORK.value:
                self._say(request_id, Reason(now_ns, WaitReason.BEHIND.value))
        self._parked = set(self._line.parked)

    def _say(self, request_id: int, reason: Reason) -> None:
        wait = self._waiting.get(request_id)
        if wait is None or wait.reasons[-1][1:] == reason[1:]:
            return
        if wait.reasons[-1].now_ns == reason.now_ns:
            wait.reasons.pop()
        wait.reasons.append(reason)

    def _end_head(self, now_ns: int) -> None:
        if self._head is not None and now_ns > self._head.now_ns:
            who = "everybody" if self._head_id == EVERYBODY else number_name(self._head_id)
            self.heads.append((Reason(self._head.now_ns, f"{who}: {self._head.name}", self._head.arguments), now_ns))
        self._head, self._head_id = None, EVERYBODY

    def draw(self, canvas: Canvas, parent: int) -> None:
        """The head of the queue with those who were refused, and a slice for each wait."""
        pen = canvas.pen("head of the queue", parent)
        for reason, end_ns in self.heads:
            pen.slice(reason.now_ns, end_ns, reason.name, reason.arguments)
        refused = canvas.pen("refused", parent) if self.refusals else None
        for event in self.refusals:
            assert refused is not None
            refused.instant(event.now_ns, number_name(event.request_id), (("code", event.code),))
        lanes = Lanes(canvas, "waiting", parent)
        for wait in self.waits:
            _draw_wait(lanes.pen(wait.start_ns, wait.end_ns), wait)


def _order(item: Act | StepRecord) -> tuple[int, bool]:
    """Acts of the time at which a step came back are before it, as in the events."""
    return item.now_ns, isinstance(item, StepRecord)


def _draw_wait(pen: Pen, wait: Wait) -> None:
    flow = wait.request_id + 1 if wait.boards else 0
    pen.begin(wait.start_ns, number_name(wait.request_id), wait.arguments, flow)
    ends_ns = [reason.now_ns for reason in wait.reasons[1:]] + [wait.end_ns]
    for reason, end_ns in zip(wait.reasons, ends_ns, strict=True):
        pen.slice(reason.now_ns, end_ns, reason.name, reason.arguments)
    pen.end(wait.end_ns, leaving(wait.exit))
