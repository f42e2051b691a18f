"""Who loses slot and blocks, and to whom: to a guest whom the policy ranks before him, or to those who must grow."""

from __future__ import annotations

from everystop.core.batch import Batch
from everystop.core.draft import Draft
from everystop.core.events import PreemptEvent
from everystop.core.keep_order import KeepOrder
from everystop.core.plan import StepPlan
from everystop.core.policy.base import Policy
from everystop.core.request import Request, RequestState
from everystop.core.roster import Roster


class Displacement:
    """Preempts, always from the tail of the keep order, and lets nobody board in the place that has become free."""

    def __init__(self, roster: Roster, batch: Batch, policy: Policy, keep_order: KeepOrder) -> None:
        self.num_preemptions = 0
        self._roster = roster
        self._batch = batch
        self._kv = batch.kv
        self._policy = policy
        self._keep_order = keep_order

    def make_room(self, plan: StepPlan, now_ns: int) -> Request | None:
        """Where all slots are taken, a policy that displaces may give the tail's to a guest, who is returned and boards
        before all others, in this step if there are tokens and blocks for it. If not, the slot is kept for whoever is
        the claimant then.
        """
        batch, is_vacated = self._batch, self._batch.is_vacated
        batch.is_vacated = False
        if not self._policy.may_displace or not self._roster.num_waiting or not batch.running:
            return None
        if batch.free_slots and not is_vacated:
            return None
        guest = self._roster.claimant(now_ns)
        if guest is None:
            return None
        if self._roster.siblings.source_for(guest, plan.step_id)[1] is not None:
            return None  # it would be parked, and need no slot
        if not batch.free_slots and not self.displace_tail(guest, plan, now_ns):
            return None
        batch.is_vacated = True
        return guest

    def displace_tail(self, picked: Request, plan: StepPlan, now_ns: int, draft: Draft | None = None) -> bool:
        """The last in keep order loses its place, if the policy would rather have `picked` on board. Who has lost his
        too often already keeps it, but takes nobody else's for that.
        """
        view, keep_order = self._roster.look(now_ns), self._keep_order
        tail = keep_order.tail(self._batch.running.values(), view)
        is_protected = keep_order.is_protected(tail, boards_later=bool(self._batch.free_slots))
        if is_protected or not keep_order.key_of_other(picked, view) < keep_order.key(tail, view):
            return False
        if not self._policy.displaces(picked, tail, view):
            return False
        self.preempt(tail, plan, now_ns, draft)
        return True

    def makes_way(self, request: Request, picked: Request, now_ns: int) -> bool:
        """A running request would lose its place to the picked one, for which there is a slot, but too few blocks."""
        view, keep_order = self._roster.look(now_ns), self._keep_order
        if keep_order.is_protected(request, boards_later=True):
            return False
        if keep_order.key(request, view) < keep_order.key(picked, view):
            return False
        return self._policy.displaces(picked, request, view)

    def take_blocks(self, draft: Draft) -> None:
        """Give decoders that cross a block border their next block; without room, preempt from the tail of the keep
        order. Prefilling requests own their whole table since admission.
        """
        block_size = self._kv.block_size
        growing = [
            request
            for request in draft.decoders
            if request.num_computed_tokens + request.num_in_flight >= len(request.block_table) * block_size
        ]
        if len(growing) > self._kv.pool.num_free:
            self._take_scarce_blocks(draft, {request.request_id for request in growing})
            return
        for request in growing:
            self._batch.grow(request, draft.plan)

    def _take_scarce_blocks(self, draft: Draft, wants: set[int]) -> None:
        """In keep order, each takes its block or makes the last in order give up its own.

        The first in order thus never loses its blocks. Blocks that come back with a plan on its way are promised: who
        needs them skips this step, rather than costing another victim.
        """
        self._batch.drop_padding()
        view = self._roster.look(draft.now_ns)
        order = sorted(self._batch.running.values(), key=lambda r: self._keep_order.key(r, view))
        promised = self._batch.num_promised_blocks
        stalled: list[int] = []
        while order:
            request = order.pop(0)
            if request.request_id not in wants:
                continue
            while not self._batch.grow(request, draft.plan):
                if promised > 0:
                    promised -= 1
                    stalled.append(request.request_id)
                    break
                victim = order.pop() if order else request
                promised += self.preempt(victim, draft.plan, draft.now_ns, draft)
                if victim is request:
                    break
        draft.strike({*draft.plan.preempted, *stalled})

    def preempt(self, victim: Request, plan: StepPlan, now_ns: int, draft: Draft | None = None) -> int:
        """Take slot and blocks away; `draft` is what has been dealt so far. Returns how many of the blocks come back
        only when an outstanding plan does.
        """
        num_lost, slot = victim.num_scheduled_through, victim.slot
        if draft is not None:
            num_lost = draft.skipped_from.get(victim.request_id, num_lost)
            for chunk in draft.chunks:
                if chunk.request is victim:
                    self._kv.withdraw(victim, chunk.start)
        num_deferred = self._batch.leave(victim)
        victim.epoch += 1
        victim.num_computed_tokens = victim.num_in_flight = victim.num_published_blocks = 0
        victim.num_preemptions += 1
        victim.num_lost_tokens = max(victim.num_lost_tokens, num_lost)
        victim.state = RequestState.PREEMPTED
        self.num_preemptions += 1
        plan.preempted.append(victim.request_id)
        plan.new_blocks[:] = [new for new in plan.new_blocks if new.request_id != victim.request_id]
        self._roster.events.append(PreemptEvent(now_ns, plan.step_id, victim.request_id, slot, num_lost))
        self._roster.unpark(victim, now_ns)
        self._roster.start_waiting(victim, now_ns)
        return num_deferred
