"""Who boards in a step, where tokens, slots and blocks are left; and why the first who does not, does not."""

from __future__ import annotations

from everystop.core.admission import Admission
from everystop.core.batch import Batch
from everystop.core.dealer import Dealer
from everystop.core.displacement import Displacement
from everystop.core.draft import Draft
from everystop.core.events import AdmitEvent, WaitReason
from everystop.core.keep_order import KeepOrder
from everystop.core.plan import Admitted
from everystop.core.policy.base import Policy, Wait
from everystop.core.request import Request, RequestState
from everystop.core.roster import Roster


class Boarding:
    """Gives slots and blocks to those whom the policy names; whoever it must displace for that boards a step later.

    Nobody is skipped: the first who does not fit ends the boarding of this step.
    """

    def __init__(
        self,
        roster: Roster,
        batch: Batch,
        policy: Policy,
        *,
        keep_order: KeepOrder,
        displacement: Displacement,
        dealer: Dealer,
        admission: Admission | None,
    ) -> None:
        self._roster = roster
        self._batch = batch
        self._kv = batch.kv
        self._policy = policy
        self._keep_order = keep_order
        self._displacement = displacement
        self._dealer = dealer
        self._admission = admission

    def admit(self, draft: Draft) -> None:
        """Let waiting requests board while slots, tokens and blocks last; the first that does not fit ends it."""
        roster, batch, now_ns = self._roster, self._batch, draft.now_ns
        while (picked := self._pick(draft)) is not None:
            if not batch.free_slots:
                roster.note_wait(picked, WaitReason.NO_SLOT, now_ns)
                break
            source, busy = roster.siblings.source_for(picked, draft.plan.step_id)
            if busy is not None:
                roster.park(picked, busy, now_ns)
                continue
            shared, start, source = self._match(picked, source)
            contended = roster.num_waiting > 1 and len(batch.free_slots) > 1
            num_tokens = self._dealer.share(draft, picked, start, contended=contended)
            if num_tokens <= 0:
                roster.note_wait(picked, WaitReason.TOKEN_BUDGET, now_ns)
                break
            lacking = self._expected_shortfall(picked, shared, draft)
            if lacking is not None:  # nobody's place would help: those whom it might take did not count
                roster.note_wait(picked, WaitReason.NO_BLOCKS, now_ns, *lacking)
                break
            if not self._kv.admit(picked, shared):
                if batch.drop_padding():
                    continue
                self._refuse(picked, draft, *self._kv.shortfall(picked, shared))
                break
            self._board(picked, start, source, draft)
            self._dealer.deal(draft, picked, start, num_tokens)
        self._dealer.deal_leftover(draft)

    def _pick(self, draft: Draft) -> Request | None:
        """Whom the policy lets board next; None if nobody. Who lost his place in this step does not come back in it."""
        if draft.guest is not None and draft.guest.state in (RequestState.WAITING, RequestState.PREEMPTED):
            return draft.guest
        picked = self._roster.next(draft.now_ns)
        if isinstance(picked, Wait):
            draft.plan.wake_at_ns = picked.until_ns
            return None
        if picked is not None and picked.request_id in draft.plan.preempted:
            self._roster.note_wait(None, WaitReason.AFTER_PREEMPT, draft.now_ns)
            return None
        return picked

    def _match(self, picked: Request, source: Request | None) -> tuple[list[int], int, Request | None]:
        """Blocks that the request shares, where its first row starts, and the sibling that they are from, if it has
        more of the prompt than the prefix cache.
        """
        block_size = self._kv.block_size
        shared = self._kv.match(picked)
        start, num_needed = len(shared) * block_size, picked.num_prompt_tokens - 1
        if source is None or start >= num_needed:
            return shared, start, None
        return source.block_table[: num_needed // block_size], num_needed, source

    def _expected_shortfall(self, picked: Request, shared: list[int], draft: Draft) -> tuple[int, int] | None:
        """(need, have) in blocks if the picked request should wait although there are blocks for what it is now.

        Never for one before whom all others make way, nor for a guest, for whom somebody has; where the policy
        displaces, those who would make way do not count.
        """
        if self._admission is None or self._keep_order.is_front(picked) or picked is draft.guest:
            return None
        others = list(self._batch.running.values())
        if self._policy.may_displace:
            others = [r for r in others if not self._displacement.makes_way(r, picked, draft.now_ns)]
        return self._admission.shortfall(picked, shared, others, self._batch)

    def _refuse(self, picked: Request, draft: Draft, need: int, have: int) -> None:
        """There are too few blocks for the picked request; a policy that displaces costs the tail its place, so that it
        boards a step later. Not where enough are promised, nor in a step that has admitted someone, who may have
        matched the blocks that the tail was to fill in it.
        """
        plan = draft.plan
        self._roster.note_wait(picked, WaitReason.NO_BLOCKS, draft.now_ns, need, have)
        if not self._policy.may_displace or not self._batch.running or plan.admitted:
            return
        if need - have <= self._batch.num_promised_blocks:
            return
        num_before = len(plan.preempted)
        if self._displacement.displace_tail(picked, plan, draft.now_ns, draft):
            draft.strike(set(plan.preempted[num_before:]))

    def _board(self, request: Request, start: int, source: Request | None, draft: Draft) -> None:
        """Give a slot to a request that has its blocks; the first `start` tokens come from the cache or a sibling."""
        plan, now_ns = draft.plan, draft.now_ns
        resumed = request.num_preemptions > 0
        if source is not None and start % self._kv.block_size:
            index = start // self._kv.block_size
            plan.copies.append((source.block_table[index], request.block_table[index]))
        request.num_computed_tokens = start
        request.last_matched_step = plan.step_id
        if not resumed and source is None:
            request.num_cached_tokens = start
        self._batch.board(request)
        self._roster.stop_waiting(request, now_ns)
        plan.admitted.append(Admitted.of(request))
        forked_from = -1 if source is None else source.request_id
        num_cached = 0 if source is not None else start
        where = (plan.step_id, request.request_id, request.slot)
        self._roster.events.append(AdmitEvent(now_ns, *where, request.num_tokens, num_cached, resumed, forked_from))
        self._roster.forget_wait(request)
