"""Deals the tokens of a step to those on board: one to each decoder, then chunks to prompts in keep order."""

from __future__ import annotations

from everystop.core.batch import Batch
from everystop.core.budget import StepBudget, TimeBudget, prefill_beside
from everystop.core.draft import Chunk, Draft
from everystop.core.keep_order import KeepOrder
from everystop.core.limits import Limits
from everystop.core.pace import Pace
from everystop.core.plan import NewBlocks, StepPlan
from everystop.core.policy.base import Policy, View
from everystop.core.request import Request


class Dealer:
    """Writes who computes how much into the draft of a step; lets nobody board, and takes nobody's place or blocks."""

    def __init__(self, limits: Limits, batch: Batch, policy: Policy, keep_order: KeepOrder, pace: Pace | None) -> None:
        self.limits = limits
        self._batch = batch
        self._kv = batch.kv
        self._policy = policy
        self._keep_order = keep_order
        self._pace = pace

    def deal_decodes(self, plan: StepPlan, guest: Request | None, view: View) -> tuple[Draft, list[Request]]:
        """One token to each running request with one to compute; those with more follow, in keep order."""
        limits, batch = self.limits, self._batch
        decoders, prefilling = self._catching_up()
        if len(decoders) > limits.max_num_batched_tokens:
            decoders.sort(key=lambda r: (r.last_served_step, self._keep_order.key(r, view)))
            del decoders[limits.max_num_batched_tokens :]
        if len(prefilling) > 1:
            prefilling.sort(key=lambda r: self._keep_order.key(r, view))
        num_left = limits.max_num_batched_tokens - len(decoders)
        num_left = max(min(num_left, 1), num_left - batch.num_padded)
        time = self._time_budget(decoders, view)
        caps = [limits.max_num_prefill_tokens]
        if time is None:
            num_others = len(prefilling) + min(view.num_waiting, len(batch.free_slots))
            caps.append(prefill_beside(len(decoders), num_others, limits.max_prefill_per_decode))
        most = min((cap for cap in caps if cap is not None), default=None)
        budget = StepBudget(num_left, most, self._kv.block_size, time, limits.max_num_scored_tokens)
        return Draft(plan, view.now_ns, budget, decoders, guest), prefilling

    def _time_budget(self, decoders: list[Request], view: View) -> TimeBudget | None:
        """What the targets on a step's time leave to prompts; None where there is none: a gap between tokens concerns
        decoders only.
        """
        if self._pace is None:
            return None
        target_itl_ns = self.limits.target_itl_ns if decoders else None
        targets = (target_itl_ns, self._policy.step_target_ns(view))
        return self._pace.budget(targets, decoders, self._batch.num_padded)

    def _catching_up(self) -> tuple[list[Request], list[Request]]:
        """Running requests with one token to compute, and those with more."""
        decoders, prefilling = [], []
        for request in self._batch.running.values():
            num_expected = len(request.token_ids) + request.num_pending_samples
            remaining = num_expected - request.num_computed_tokens - request.num_in_flight
            if remaining > 1:
                prefilling.append(request)
            elif remaining == 1 and num_expected - request.num_prompt_tokens < request.max_tokens:
                decoders.append(request)
        return decoders, prefilling

    def deal_chunks(self, draft: Draft, prefilling: list[Request], *, may_board: bool) -> None:
        """Deal prefill tokens in keep order; blocks filled here are matchable at once: those behind can skip them."""
        for i, request in enumerate(prefilling):
            if draft.budget.prefill_tokens <= 0:
                break
            start = self._skip_matchable(request, draft)
            contended = may_board or i + 1 < len(prefilling)
            num_tokens = self.share(draft, request, start, contended=contended)
            if num_tokens > 0:
                self.deal(draft, request, start, num_tokens)

    def share(self, draft: Draft, request: Request, start: int, *, contended: bool) -> int:
        """Tokens for the request from position `start` on; 0 if it should wait."""
        remaining = request.num_tokens - start
        return draft.budget.share(start, remaining, contended=contended, is_scored=request.is_scoring)

    def deal(self, draft: Draft, request: Request, start: int, num_tokens: int) -> None:
        """The request computes so many tokens from position `start` on; blocks that they fill are matchable at once."""
        draft.chunks.append(Chunk(request, start, num_tokens))
        is_prefill = request.num_tokens - start > 1
        draft.budget.spend(start, num_tokens, is_prefill=is_prefill, is_scored=request.is_scoring)
        self._kv.publish(request, start + num_tokens)

    def _skip_matchable(self, request: Request, draft: Draft) -> int:
        """Move a prefilling request past whole blocks that others have computed meanwhile; returns where its next row
        starts.
        """
        start = request.num_scheduled_through
        block_size = self._kv.block_size
        if not self._kv.enable_prefix_caching or (request.num_in_flight and start % block_size):
            return start
        new_start = self._kv.rematch(request, start)
        if new_start > start:
            draft.skipped_from[request.request_id] = start
            request.last_matched_step = draft.plan.step_id
            if request.num_preemptions == 0:
                request.num_cached_tokens += new_start - start
            request.num_computed_tokens += new_start - start
            first, end = start // block_size, new_start // block_size
            draft.plan.new_blocks.append(NewBlocks(request.request_id, first, tuple(request.block_table[first:end])))
        return new_start

    def deal_leftover(self, draft: Draft) -> None:
        """What was held back for others, and nobody could use, goes to those who have got some, in their order."""
        for chunk in draft.chunks:
            end = chunk.start + chunk.num_tokens
            extra, is_scored = min(draft.budget.left_at(end), chunk.request.num_tokens - end), chunk.request.is_scoring
            if is_scored:
                extra = min(extra, draft.budget.scored_tokens)
            if extra > 0 and chunk.num_tokens > 1:
                chunk.num_tokens += extra
                draft.budget.spend(end, extra, is_prefill=True, is_scored=is_scored)
                self._kv.publish(chunk.request, end + extra)
