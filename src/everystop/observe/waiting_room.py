"""Who waits now, and why: the waiting requests as the acts of the scheduler tell of them, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import NamedTuple

from everystop.core.events import WaitEvent, WaitReason

NOBODY = -1


class Waiter(NamedTuple):
    """A waiting request: since when (its arrival, or the preemption that cost it its place), and why.

    `reason` is None where nobody has asked yet whether it may board. `need` and `have` are blocks, both 0 where it
    does not wait for any; `behind` is the request ahead, NOBODY where the reason is its own.
    """

    request_id: int
    since_ns: int
    reason: WaitReason | None
    need: int = 0
    have: int = 0
    behind: int = NOBODY


class WaitingRoom:
    """The waiting requests in the order in which they may board, as far as the events tell: the one that the policy has
    named last, then the preempted, then the others as they have come.
    """

    def __init__(self) -> None:
        self._new: dict[int, int] = {}
        self._preempted: dict[int, int] = {}
        self._note: WaitEvent | None = None  # of the one that is next, or of all
        self._passed_over: dict[int, WaitEvent] = {}
        self._parked: dict[int, WaitEvent] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._preempted)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._new or request_id in self._preempted

    @property
    def oldest_ns(self) -> int | None:
        """Since when the first that has come is waiting; None if nobody is."""
        firsts = [next(iter(line.values())) for line in (self._new, self._preempted) if line]
        return min(firsts, default=None)

    def arrive(self, request_id: int, now_ns: int) -> None:
        """It is new."""
        self._new[request_id] = now_ns

    def come_back(self, request_id: int, now_ns: int) -> None:
        """It has been preempted."""
        self._preempted[request_id] = now_ns

    def leave(self, request_id: int) -> None:
        """It has boarded, or has ended."""
        self._new.pop(request_id, None)
        self._preempted.pop(request_id, None)
        self._passed_over.pop(request_id, None)
        self._parked.pop(request_id, None)

    def unpark(self, leader_id: int) -> None:
        """The request for whose prompt others waited has computed it, or has left."""
        if self._parked:
            self._parked = {i: event for i, event in self._parked.items() if event.behind != leader_id}

    def note(self, event: WaitEvent) -> None:
        """A reason has changed; those behind the next one are told of before it."""
        if event.reason is WaitReason.FORK or (event.request_id != NOBODY and event.behind != NOBODY):
            if event.request_id in self:
                (self._parked if event.reason is WaitReason.FORK else self._passed_over)[event.request_id] = event
        elif event.reason is WaitReason.BEHIND:
            self._passed_over.clear()
        else:
            self._note = event

    def first(self, num: int) -> list[Waiter]:
        """The first so many."""
        return list(islice(self._waiters(), num))

    def of(self, request_id: int) -> Waiter | None:
        """One of them; None if it does not wait."""
        since_ns = self._preempted.get(request_id, self._new.get(request_id))
        return None if since_ns is None else self._waiter(request_id, since_ns)

    def _waiters(self) -> Iterator[Waiter]:
        head = None if self._note is None else self.of(self._note.request_id)
        if head is not None:
            yield head
        for request_id, since_ns in chain(self._preempted.items(), self._new.items()):
            if head is None or request_id != head.request_id:
                yield self._waiter(request_id, since_ns)

    def _waiter(self, request_id: int, since_ns: int) -> Waiter:
        note = self._note
        own = self._parked.get(request_id) or self._passed_over.get(request_id)
        if own is None and note is not None and note.request_id in (request_id, NOBODY):
            own = note
        if own is not None:
            return Waiter(request_id, since_ns, own.reason, own.need, own.have, own.behind)
        if note is not None and note.request_id in self:
            return Waiter(request_id, since_ns, WaitReason.BEHIND, behind=note.request_id)
        return Waiter(request_id, since_ns, None)


def why_it_waits(waiter: Waiter, num_slots: int, name_of: Callable[[int], str]) -> str:
    """The reason as the end of a sentence that begins with "waits: "; `name_of` names other requests."""
    match waiter.reason:
        case None:
            return "the next step has not been planned yet"
        case WaitReason.NO_SLOT:
            return "the slot is taken" if num_slots == 1 else f"all {num_slots} slots are taken"
        case WaitReason.NO_BLOCKS if waiter.need > waiter.have:
            num = waiter.need - waiter.have
            return f"needs {num:,} more KV block{'s' * (num > 1)} ({waiter.need:,} wanted, {waiter.have:,} free)"
        case WaitReason.FORK:
            return f"{name_of(waiter.behind)} is computing the prompt that both share"
        case WaitReason.BEHIND:
            return f"behind {name_of(waiter.behind)}"
        case reason:
            return _WORDS[reason]


_WORDS = {
    WaitReason.NO_BLOCKS: "needs more KV blocks",
    WaitReason.TOKEN_BUDGET: "the step has no tokens left for it",
    WaitReason.BATCH_BARRIER: "the batch on board must end first",
    WaitReason.BATCH_FILL: "the batch may still fill",
    WaitReason.AFTER_PREEMPT: "this step had to take somebody's place away",
    WaitReason.TENANT_LIMIT: "its tenant is at its limit",
    WaitReason.OVER_SHARE: "its tenant has had more than its share, so others go first",
    WaitReason.LATE: "it is too late for its target, so those who can keep theirs go first",
}
