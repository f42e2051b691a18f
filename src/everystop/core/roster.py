"""Who is in the system: requests that have arrived and have not ended, and what is said of those who wait."""

from __future__ import annotations

from everystop.core.batch import Batch
from everystop.core.errors import PolicyError
from everystop.core.events import Event, WaitEvent, WaitReason
from everystop.core.keep_order import KeepOrder
from everystop.core.policy.base import Policy, View, Wait
from everystop.core.policy.waiting import WaitingLine
from everystop.core.request import Request, RequestState
from everystop.core.siblings import Siblings
from everystop.core.wait_log import WaitLog


class Roster:
    """Keeps the policy informed of who waits and who has gone, and asks it who is next; gives nobody slot or blocks.

    `events` are those that nobody has taken yet. Who has been preempted too often waits in a line of its own, before
    all others.
    """

    def __init__(self, batch: Batch, policy: Policy, keep_order: KeepOrder, view: View) -> None:
        self.requests: dict[int, Request] = {}
        self.siblings = Siblings()
        self.view = view
        self.events: list[Event] = []
        self._batch = batch
        self._policy = policy
        self._keep_order = keep_order
        self._front = WaitingLine()
        self._wait_log = WaitLog(policy)

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and do not run: new, parked behind a sibling, or preempted."""
        return len(self.requests) - len(self._batch.running)

    def take_events(self) -> list[Event]:
        """The events; they are nobody's then."""
        events, self.events = self.events, []
        return events

    def look(self, now_ns: int) -> View:
        """What the policy may see now: always the same object, brought up to date."""
        view, num_running = self.view, len(self._batch.running)
        view.now_ns = now_ns
        view.num_running = num_running
        view.num_waiting = len(self.requests) - num_running
        view.num_held = len(self._batch.held)
        return view

    def enter(self, request: Request, now_ns: int) -> None:
        """A request has arrived, and waits."""
        self.requests[request.request_id] = request
        self.siblings.join(request)
        self.start_waiting(request, now_ns)

    def leave(self, request: Request, now_ns: int) -> None:
        """A request has ended, in whatever state it was, and is not on board any more."""
        del self.requests[request.request_id]
        self.unpark(request, now_ns)
        self.siblings.leave(request)
        self._front.discard(request)
        self._policy.on_remove(request, self.look(now_ns))
        self._wait_log.forget(request)

    def start_waiting(self, request: Request, now_ns: int) -> None:
        """It waits to board, for the first time or again."""
        if self._keep_order.is_front(request):
            self._front.push(request)
        self._policy.on_add(request, self.look(now_ns))

    def stop_waiting(self, request: Request, now_ns: int) -> None:
        """It has boarded, or is parked."""
        self._front.discard(request)
        self._policy.on_admit(request, self.look(now_ns))

    def park(self, request: Request, leader: Request, now_ns: int) -> None:
        """It waits until `leader` has computed their prompt, and cannot be picked until then."""
        request.state = RequestState.FORKING
        self.siblings.park(request, leader)
        self.stop_waiting(request, now_ns)
        self.events.append(WaitEvent(now_ns, request.request_id, WaitReason.FORK, 0, 0, leader.request_id))

    def unpark(self, leader: Request, now_ns: int) -> None:
        """Those parked behind `leader` wait to board again: its prompt is computed, or it has left."""
        for request in self.siblings.unpark(leader):
            request.state = RequestState.PREEMPTED if request.num_preemptions else RequestState.WAITING
            self.start_waiting(request, now_ns)

    def claimant(self, now_ns: int) -> Request | None:
        """Who may take a running request's place, as the policy says."""
        claimant = self._policy.claimant(self.look(now_ns))
        if claimant is not None:
            self._check_waits(claimant)
        return claimant

    def next(self, now_ns: int) -> Request | Wait | None:
        """Who boards next; None, and a note of why, if nobody does for now, or a `Wait`, also noted."""
        view = self.look(now_ns)
        front = self._front.head()
        picked = front if front is not None and self._policy.may_return(front, view) else self._policy.pick(view)
        if isinstance(picked, Wait):
            self.note_wait(None, picked.reason, now_ns)
        elif picked is None:
            self._note_barrier(view)
        else:
            self._check_waits(picked)
        return picked

    def line(self, num: int, now_ns: int) -> list[Request]:
        """The first `num` of those who wait, in the order in which they would board as things are; those who are parked
        behind a sibling stand in no line.
        """
        front = self._front.first(num)
        others = self._policy.line(num, self.look(now_ns))
        return (front + [request for request in others if request not in self._front])[:num]

    def _check_waits(self, picked: Request) -> None:
        if self.requests.get(picked.request_id) is not picked or picked.request_id in self._batch.running:
            raise PolicyError(f"{type(self._policy).__name__} picked request {picked.request_id}, which does not wait")

    def _note_barrier(self, view: View) -> None:
        if view.num_waiting and not view.num_running and not self._batch.outstanding:
            raise PolicyError(
                f"{type(self._policy).__name__} lets nobody board though nothing runs and {view.num_waiting} wait"
            )
        if view.num_waiting > self.siblings.num_parked:
            self.note_wait(None, self._policy.barrier_reason, view.now_ns)
        else:
            self._wait_log.forget()

    def note_wait(self, head: Request | None, reason: WaitReason, now_ns: int, need: int = 0, have: int = 0) -> None:
        """Why the head waits, or everybody where there is none; an event only if that has changed."""
        num_behind = 0 if head is None else self.num_waiting - 1
        self.events += self._wait_log.note(head, reason, now_ns, need, have, num_behind)

    def forget_wait(self, request: Request) -> None:
        """It waits no longer: the next reason is a change, whatever the last one was."""
        self._wait_log.forget(request)
