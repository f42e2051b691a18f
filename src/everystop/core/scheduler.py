"""The scheduler: a deterministic state machine that turns waiting and running requests into step plans.

It owns requests, slots and the KV cache's bookkeeping. It must not know what time it is (callers say), what a token
means, or who executes its plans.

There are no phases. Each request only lets `num_computed_tokens` catch up with `num_tokens`: a decode has one token to
catch up, a prefill chunk many.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from everystop.core.errors import NeverFits, PolicyError, PromptTooLong, RequestError
from everystop.core.events import (
    AdmitEvent,
    ArrivalEvent,
    Event,
    FinishEvent,
    PreemptEvent,
    RefuseEvent,
    StepEvent,
    WaitEvent,
    WaitReason,
)
from everystop.core.kv_cache import KVCache
from everystop.core.plan import Admitted, NewBlocks, Row, StepPlan, StepResult
from everystop.core.policy.base import Policy, SlotUse, View, Wait
from everystop.core.request import FinishReason, Request, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step and a sequence may use; see the flags of the same names."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_num_prefill_tokens: int | None = None
    max_model_len: int = 8192
    max_preemptions: int = 8


@dataclass(slots=True)
class _Outstanding:
    """A plan on its way: the request and its epoch behind each row, and block tables to release when it is back."""

    plan: StepPlan
    scheduled_ns: int
    riders: list[tuple[Request, int]]
    deferred: list[list[int]]


@dataclass(slots=True)
class _Dealt:
    """Tokens dealt to one request in the step being planned; `start` may move on when blocks become matchable."""

    request: Request
    start: int
    num_tokens: int


class Scheduler:
    """add and abort requests, schedule a step, update with its result. Same calls, same plans, byte for byte.

    One plan may be outstanding when the next is scheduled; results come back in the order of their plans.
    """

    def __init__(self, limits: Limits, kv: KVCache, policy: Policy) -> None:
        self.limits = limits
        self.kv = kv
        self.policy = policy
        self.requests: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.held: dict[int, Request] = {}
        self.view = View(max_num_seqs=limits.max_num_seqs)
        self.limit_tokens = min(limits.max_model_len, kv.num_token_slots)
        self.num_preemptions = 0
        self._free_slots = list(range(limits.max_num_seqs))  # a heap: the lowest free slot is taken first
        self._groups: dict[int, list[Request]] = {}
        self._parked: dict[int, list[Request]] = {}
        self._outstanding: deque[_Outstanding] = deque()
        self._released: list[int] = []
        self._events: list[Event] = []
        self._next_step_id = 0
        self._last_wait: tuple[int, WaitReason | None] = (-1, None)
        self._charges = type(policy).charge is not Policy.charge

    # ---------------------------------------------------------------- queries

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and are computed."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and do not run: new, parked behind a sibling, or preempted."""
        return len(self.requests) - len(self.running)

    @property
    def has_work(self) -> bool:
        """Some request is not finished, or the runner has not been told of all that ended."""
        return bool(self.requests or self._released or self.held)

    def take_events(self) -> list[Event]:
        """Events since the last call of this or of `update`."""
        events, self._events = self._events, []
        return events

    def _look(self, now_ns: int) -> View:
        view = self.view
        view.now_ns = now_ns
        view.num_running = len(self.running)
        view.num_waiting = len(self.requests) - len(self.running)
        view.num_held = len(self.held)
        return view

    # ------------------------------------------------------------ add, abort

    def add(self, request: Request, now_ns: int) -> None:
        """Take a request; raises RequestError, and records it, if an empty system could not serve the request."""
        assert request.request_id not in self.requests
        try:
            self._check_fits(request)
        except RequestError as error:
            self._events.append(RefuseEvent(now_ns, request.request_id, type(error).__name__))
            raise
        self.requests[request.request_id] = request
        self._groups.setdefault(request.group_id, []).append(request)
        self._events.append(
            ArrivalEvent(
                now_ns,
                request.request_id,
                request.group_id,
                request.choice_index,
                request.num_prompt_tokens,
                request.max_tokens,
                request.tenant,
                request.priority,
            )
        )
        self.policy.on_add(request, self._look(now_ns))

    def _check_fits(self, request: Request) -> None:
        num_prompt, limit = request.num_prompt_tokens, self.limit_tokens
        if num_prompt == 0:
            raise RequestError("the prompt has no tokens; send at least one", param="prompt")
        if num_prompt >= limit:
            raise PromptTooLong(num_prompt, limit)
        wanted = request.params.max_tokens
        if wanted is not None and num_prompt + wanted > limit:
            raise NeverFits(num_prompt, wanted, limit)
        request.max_tokens = limit - num_prompt if wanted is None else wanted

    def abort(self, request_id: int, now_ns: int) -> bool:
        """End a request in whatever state it is; False if it is unknown or already finished."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT, "", now_ns)
        return True

    # -------------------------------------------------------------- schedule

    def schedule(self, now_ns: int) -> StepPlan:
        """Plan one step: deal tokens, then take blocks, then admit. Touches no tensor; an empty plan means nothing to
        compute.
        """
        assert len(self._outstanding) <= 1, "at most one plan may be outstanding"
        plan = StepPlan(step_id=self._next_step_id)
        self._next_step_id += 1
        self._end_batch(self._look(now_ns))
        plan.released, self._released = self._released, []
        riders: list[tuple[Request, int]] = []
        num_padded = sum(1 for r in self.held.values() if r.block_table)
        decoders, prefilling = self._catching_up(self.limits.max_num_batched_tokens, now_ns)
        budget = self.limits.max_num_batched_tokens - len(decoders)
        budget = max(min(budget, 1), budget - num_padded)
        chunks = self._deal_chunks(prefilling, budget, plan)
        self._take_blocks(decoders, chunks, plan, now_ns)
        if plan.preempted:
            self._note_wait(-1, WaitReason.AFTER_PREEMPT, now_ns)
        else:
            self._admit(plan, chunks, budget, now_ns)
        self._fill_rows(plan, riders, decoders, chunks)
        self._pad_rows(plan, riders)
        if not plan.is_noop:
            self._outstanding.append(_Outstanding(plan, now_ns, riders, []))
        return plan

    def _catching_up(self, budget: int, now_ns: int) -> tuple[list[Request], list[Request]]:
        """Running requests with one token to compute, at most `budget` of them, and those with more."""
        decoders, prefilling = [], []
        for request in self.running.values():
            remaining = (
                len(request.token_ids)
                + request.num_pending_samples
                - request.num_computed_tokens
                - request.num_in_flight
            )
            if remaining > 1:
                prefilling.append(request)
            elif remaining == 1 and request.num_output_tokens + request.num_pending_samples < request.max_tokens:
                decoders.append(request)
        if len(decoders) > budget:
            view = self._look(now_ns)
            decoders.sort(key=lambda r: (r.last_served_step, self._keep_key(r, view)))
            del decoders[budget:]
        if len(prefilling) > 1:
            view = self._look(now_ns)
            prefilling.sort(key=lambda r: self._keep_key(r, view))
        return decoders, prefilling

    def _keep_key(self, request: Request, view: View) -> tuple[int, ...]:
        front = 0 if request.num_preemptions >= self.limits.max_preemptions else 1
        return (front, *self.policy.keep_key(request, view))

    def _prefill_budget(self, budget: int) -> int:
        cap = self.limits.max_num_prefill_tokens
        return budget if cap is None else min(budget, cap)

    def _deal_chunks(self, prefilling: list[Request], budget: int, plan: StepPlan) -> list[_Dealt]:
        """Deal prefill tokens in keep order; blocks filled here are matchable at once: those behind can skip them."""
        chunks: list[_Dealt] = []
        left = total = self._prefill_budget(budget)
        may_board = self.num_waiting > 0 and bool(self._free_slots)
        for i, request in enumerate(prefilling):
            if left <= 0:
                break
            start = self._skip_matchable(request, plan)
            shared = may_board or i + 1 < len(prefilling)
            num_tokens = self._chunk_size(start, request.num_tokens - start, left, total, shared)
            if num_tokens > 0:
                chunks.append(_Dealt(request, start, num_tokens))
                self.kv.publish(request, start + num_tokens)
                left -= num_tokens
        return chunks

    def _skip_matchable(self, request: Request, plan: StepPlan) -> int:
        """Move a prefilling request past whole blocks that others have computed meanwhile; returns where its next row
        starts.
        """
        start = request.num_scheduled_through
        block_size = self.kv.block_size
        if not self.kv.enable_prefix_caching or (request.num_in_flight and start % block_size):
            return start
        new_start = self.kv.rematch(request, start)
        if new_start > start:
            request.last_matched_step = plan.step_id
            if request.num_preemptions == 0:
                request.num_cached_tokens += new_start - start
            request.num_computed_tokens += new_start - start
            first, end = start // block_size, new_start // block_size
            plan.new_blocks.append(NewBlocks(request.request_id, first, tuple(request.block_table[first:end])))
        return new_start

    def _chunk_size(self, start: int, remaining: int, left: int, total: int, shared: bool) -> int:
        """At most half of what is left while others want some; then ending on a block border, so that others can match
        it.

        Example, block_size 32, `total` 200 tokens for prefill in this step, 500 remaining: alone 200; shared, from
        position 0: half is 100, cut to 96; the next one finds 104 left and gets 32; a fragment under a block goes to
        nobody yet.
        """
        if remaining <= 1 or not shared:
            return min(remaining, left)
        half, block_size = (left + 1) // 2, self.kv.block_size
        if remaining <= half:
            return remaining
        to_border = (start + half) // block_size * block_size - start
        if to_border > 0:
            return to_border
        if left >= block_size:
            return min(remaining, block_size - start % block_size)
        return half if total < 2 * block_size else 0

    # ------------------------------------------------- blocks and preemption

    def _take_blocks(self, decoders: list[Request], chunks: list[_Dealt], plan: StepPlan, now_ns: int) -> None:
        """Give decoders that cross a block border their next block; without room, preempt from the tail of the keep
        order.

        Prefilling requests own their whole table since admission. `decoders` and `chunks` lose those who get no row.
        """
        block_size = self.kv.block_size
        growing = [r for r in decoders if r.num_computed_tokens + r.num_in_flight >= len(r.block_table) * block_size]
        if not growing:
            return
        if len(growing) <= self.kv.pool.num_free:
            for request in growing:
                self._grow(request, plan)
            return
        self._drop_padding()
        view = self._look(now_ns)
        order = sorted(self.running.values(), key=lambda r: self._keep_key(r, view))
        wants = {r.request_id for r in growing}
        promised = sum(len(table) for out in self._outstanding for table in out.deferred)
        stalled: list[int] = []
        while order:
            request = order.pop(0)
            if request.request_id not in wants:
                continue
            while not self._grow(request, plan):
                if promised > 0:
                    promised -= 1
                    stalled.append(request.request_id)
                    break
                victim = order.pop() if order else request
                promised += self._preempt(victim, plan, chunks, now_ns)
                if victim is request:
                    break
        gone = {*plan.preempted, *stalled}
        decoders[:] = [r for r in decoders if r.request_id not in gone]
        chunks[:] = [c for c in chunks if c.request.request_id not in gone]

    def _grow(self, request: Request, plan: StepPlan) -> bool:
        index = len(request.block_table)
        new = self.kv.grow(request, request.num_scheduled_through + 1)
        if new is None:
            return False
        if new:
            plan.new_blocks.append(NewBlocks(request.request_id, index, tuple(new)))
        return True

    def _preempt(self, victim: Request, plan: StepPlan, chunks: list[_Dealt], now_ns: int) -> int:
        """Take slot and blocks away; returns how many of the blocks come back only when an outstanding plan does."""
        for chunk in chunks:
            if chunk.request is victim:
                self.kv.withdraw(victim, chunk.start)
        num_lost = victim.num_computed_tokens + victim.num_in_flight
        slot = victim.slot
        num_deferred = self._give_back(victim)
        victim.epoch += 1
        victim.num_computed_tokens = victim.num_in_flight = victim.num_published_blocks = 0
        victim.num_preemptions += 1
        victim.state = RequestState.PREEMPTED
        self.num_preemptions += 1
        plan.preempted.append(victim.request_id)
        plan.new_blocks[:] = [new for new in plan.new_blocks if new.request_id != victim.request_id]
        self._events.append(PreemptEvent(now_ns, plan.step_id, victim.request_id, slot, num_lost))
        self._unpark(victim, now_ns)
        self.policy.on_add(victim, self._look(now_ns))
        return num_deferred

    def _give_back(self, request: Request) -> int:
        """Free slot and blocks of a running request; blocks that a plan on its way names return at its update."""
        if self.running.pop(request.request_id, None) is not None:
            heappush(self._free_slots, request.slot)
            request.slot = -1
        table, request.block_table = request.block_table, []
        for outstanding in reversed(self._outstanding):
            if request.last_served_step == outstanding.plan.step_id:
                self._withdraw_in_flight(request, table)
                outstanding.deferred.append(table)
                return len(table)
        self.kv.release(table)
        return 0

    def _withdraw_in_flight(self, request: Request, table: list[int]) -> None:
        """Blocks that a plan on its way fills for a request that leaves now may never be right: unmatchable."""
        starts = [
            row.start for out in self._outstanding for row in out.plan.rows if row.request_id == request.request_id
        ]
        first = min(starts) // self.kv.block_size
        for block in table[first : request.num_published_blocks]:
            self.kv.pool.withdraw(block)

    # ------------------------------------------------------------- admission

    def _admit(self, plan: StepPlan, chunks: list[_Dealt], budget: int, now_ns: int) -> None:
        """Let waiting requests board while slots, tokens and blocks last; the first that does not fit ends it."""
        num_dealt = sum(chunk.num_tokens for chunk in chunks)
        total = self._prefill_budget(budget)
        budget, left = budget - num_dealt, total - num_dealt
        while True:
            picked = self._pick(plan, now_ns)
            if picked is None:
                break
            if not self._free_slots:
                self._refuse_boarding(picked, WaitReason.NO_SLOT, plan, chunks, now_ns)
                break
            source, parked = self._fork_source(picked, plan.step_id)
            if parked:
                continue
            shared = self.kv.match(picked)
            start = len(shared) * self.kv.block_size
            if source is not None and start < picked.num_prompt_tokens - 1:
                start = picked.num_prompt_tokens - 1
                shared = source.block_table[: start // self.kv.block_size]
            else:
                source = None
            remaining = picked.num_tokens - start
            more = self.num_waiting > 1 and len(self._free_slots) > 1
            num_tokens = self._chunk_size(start, remaining, budget if remaining == 1 else left, total, more)
            if num_tokens <= 0:
                self._note_wait(picked.request_id, WaitReason.TOKEN_BUDGET, now_ns)
                break
            if not self.kv.admit(picked, shared):
                if self._drop_padding():
                    continue
                need, have = self.kv.shortfall(picked, shared)
                self._refuse_boarding(picked, WaitReason.NO_BLOCKS, plan, chunks, now_ns, need, have)
                break
            self._board(picked, start, source, plan, now_ns)
            chunks.append(_Dealt(picked, start, num_tokens))
            self.kv.publish(picked, start + num_tokens)
            budget -= num_tokens
            left -= 0 if remaining == 1 else num_tokens
            left = min(left, budget)
        self._deal_leftover(chunks, left)

    def _deal_leftover(self, chunks: list[_Dealt], left: int) -> None:
        """What nobody could board with goes to the last chunk, which was held to a share for their sake."""
        if left <= 0 or not chunks:
            return
        last = chunks[-1]
        extra = min(left, last.request.num_tokens - last.start - last.num_tokens)
        if extra > 0:
            last.num_tokens += extra
            self.kv.publish(last.request, last.start + last.num_tokens)

    def _pick(self, plan: StepPlan, now_ns: int) -> Request | None:
        view = self._look(now_ns)
        picked = self.policy.pick(view)
        if isinstance(picked, Wait):
            plan.wake_at_ns = picked.until_ns
            self._note_wait(-1, WaitReason.BATCH_FILL, now_ns)
            return None
        if picked is None:
            if view.num_waiting and not self.running and not self._outstanding and not plan.rows:
                raise PolicyError(
                    f"{type(self.policy).__name__} lets nobody board though nothing runs and {view.num_waiting} wait"
                )
            if view.num_waiting > sum(map(len, self._parked.values())):
                self._note_wait(-1, self.policy.barrier_reason, now_ns)
            else:
                self._last_wait = (-1, None)
            return None
        if self.requests.get(picked.request_id) is not picked or picked.request_id in self.running:
            raise PolicyError(f"{type(self.policy).__name__} picked request {picked.request_id}, which does not wait")
        return picked

    def _refuse_boarding(
        self,
        picked: Request,
        reason: WaitReason,
        plan: StepPlan,
        chunks: list[_Dealt],
        now_ns: int,
        need: int = 0,
        have: int = 0,
    ) -> None:
        """Note why the picked request stays behind; a policy that displaces costs the tail its place, for the next
        step. Not in a step that has admitted someone, who may have matched the blocks that the tail was to fill in it.
        """
        self._note_wait(picked.request_id, reason, now_ns, need, have)
        if not self.policy.may_displace or not self.running or plan.admitted:
            return
        view = self._look(now_ns)
        tail = max(self.running.values(), key=lambda r: self._keep_key(r, view))
        if self._keep_key(picked, view) < self._keep_key(tail, view):
            self._preempt(tail, plan, chunks, now_ns)
            chunks[:] = [c for c in chunks if c.request is not tail]

    def _fork_source(self, request: Request, step_id: int) -> tuple[Request | None, bool]:
        """A running sibling whose prompt is computed; or (None, True) after parking the request behind one that is at
        it. One that has matched blocks in this very step still is: copies come before the rows that fill those blocks.
        """
        siblings = self._groups[request.group_id]
        if len(siblings) == 1:
            return None, False
        num_needed = request.num_prompt_tokens - 1
        busy = None
        for sibling in siblings:
            if sibling.request_id in self.running:
                if sibling.num_computed_tokens >= num_needed and sibling.last_matched_step < step_id:
                    return sibling, False
                busy = busy or sibling
        if busy is None:
            return None, False
        request.state = RequestState.FORKING
        self._parked.setdefault(busy.request_id, []).append(request)
        self.policy.on_admit(request, self.view)
        self._events.append(WaitEvent(self.view.now_ns, request.request_id, WaitReason.FORK, 0, 0, busy.request_id))
        return None, True

    def _unpark(self, leader: Request, now_ns: int) -> None:
        """Those parked behind `leader` wait to board again: its prompt is computed, or it has left."""
        for request in self._parked.pop(leader.request_id, ()):
            request.state = RequestState.PREEMPTED if request.num_preemptions else RequestState.WAITING
            self.policy.on_add(request, self._look(now_ns))

    def _board(self, request: Request, start: int, source: Request | None, plan: StepPlan, now_ns: int) -> None:
        resumed = request.num_preemptions > 0
        block_size = self.kv.block_size
        if source is not None and start % block_size:
            index = start // block_size
            plan.copies.append((source.block_table[index], request.block_table[index]))
        request.num_computed_tokens = start
        request.last_matched_step = plan.step_id
        if not resumed and source is None:
            request.num_cached_tokens = start
        request.slot = heappop(self._free_slots)
        request.state = RequestState.RUNNING
        self.running[request.request_id] = request
        self.policy.on_admit(request, self._look(now_ns))
        plan.admitted.append(
            Admitted(
                request.request_id,
                tuple(request.token_ids),
                request.num_prompt_tokens,
                request.params,
                request.choice_index,
                tuple(sorted(request.stop_ids)),
                tuple(request.block_table),
                request.slot,
                request.adapter,
            )
        )
        forked_from = -1 if source is None else source.request_id
        num_cached = 0 if source is not None else start
        self._events.append(
            AdmitEvent(
                now_ns,
                plan.step_id,
                request.request_id,
                request.slot,
                request.num_tokens,
                num_cached,
                resumed,
                forked_from,
            )
        )
        if self._last_wait[0] == request.request_id:
            self._last_wait = (-1, None)

    def _note_wait(self, head_id: int, reason: WaitReason, now_ns: int, need: int = 0, have: int = 0) -> None:
        """Record why the head waits, when that has changed, and once for all behind it."""
        if self._last_wait == (head_id, reason):
            return
        if head_id >= 0 and head_id != self._last_wait[0] and self.num_waiting > 1:
            self._events.append(WaitEvent(now_ns, -1, WaitReason.BEHIND, 0, 0, head_id))
        self._last_wait = (head_id, reason)
        self._events.append(WaitEvent(now_ns, head_id, reason, need, have, -1))

    # ------------------------------------------------------------------ rows

    def _fill_rows(
        self, plan: StepPlan, riders: list[tuple[Request, int]], decoders: list[Request], chunks: list[_Dealt]
    ) -> None:
        rows, step_id = plan.rows, plan.step_id
        for request in decoders:
            if request.state is not RequestState.RUNNING:
                continue
            start = request.num_computed_tokens + request.num_in_flight
            rows.append(tuple.__new__(Row, (request.request_id, start, 1, 0, 0)))  # in half the time of Row(...)
            riders.append((request, request.epoch))
            request.num_in_flight += 1
            request.num_pending_samples += 1
            request.last_served_step = step_id
        for chunk in chunks:
            request, num_tokens = chunk.request, chunk.num_tokens
            samples = chunk.start + num_tokens == request.num_tokens + request.num_pending_samples
            rows.append(Row(request.request_id, chunk.start, num_tokens, 0, num_tokens - samples))
            riders.append((request, request.epoch))
            request.num_in_flight += num_tokens
            request.num_pending_samples += samples
            request.last_served_step = step_id

    def _pad_rows(self, plan: StepPlan, riders: list[tuple[Request, int]]) -> None:
        """static-padded computes the last position of every finished row again; its last token may have no block."""
        if not plan.rows:
            return
        room = self.limits.max_num_batched_tokens - plan.num_tokens
        for request in list(self.held.values())[:room]:
            if request.block_table:
                plan.rows.append(Row(request.request_id, request.num_computed_tokens - 1, 1, 0, 0))
                riders.append((request, -1))
                request.last_served_step = plan.step_id
                plan.num_padded_rows += 1

    def _end_batch(self, view: View) -> None:
        """Give held slots back once the policy says that their batch has ended."""
        if self.held and self.policy.batch_ended(view):
            for slot, request in list(self.held.items()):
                self._unhold(slot, request)

    def _unhold(self, slot: int, request: Request) -> None:
        del self.held[slot]
        heappush(self._free_slots, slot)
        if request.block_table:
            self._give_back(request)
            self._released.append(request.request_id)

    def _drop_padding(self) -> bool:
        """Blocks of finished rows go before any living request loses or lacks its own; their slots stay held."""
        padded = [request for request in self.held.values() if request.block_table]
        for request in padded:
            self._give_back(request)
            self._released.append(request.request_id)
        return bool(padded)

    # ---------------------------------------------------------------- update

    def update(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[Event]:
        """Take a step's result back: append tokens, finish, free. Returns all events since the last call."""
        outstanding = self._outstanding.popleft()
        assert outstanding.plan is plan
        assert len(result.rows) == len(plan.rows)
        num_wasted = 0
        accepted: list[tuple[int, ...]] = []
        for row, (request, epoch), out in zip(plan.rows, outstanding.riders, result.rows, strict=True):
            if epoch < 0 or request.state is RequestState.FINISHED:
                num_wasted += 1
                accepted.append(())
                continue
            if request.epoch == epoch:
                request.num_computed_tokens += row.num_tokens
                request.num_in_flight -= row.num_tokens
            if row.logits_from < row.num_tokens:
                request.num_pending_samples -= 1
            if isinstance(out, str):
                self.kv.withdraw(request, 0)  # earlier chunks may be as wrong as this one, unseen without logits
                self._finish(request, FinishReason.ERROR, out, now_ns)
                accepted.append(())
            else:
                accepted.append(self._accept(request, out, row, result, now_ns))
        for table in outstanding.deferred:
            self.kv.release(table)
        pool = self.kv.pool
        self._events.append(
            StepEvent(
                now_ns,
                outstanding.scheduled_ns,
                result.execute_ns,
                plan,
                tuple(accepted),
                len(self.running),
                self.num_waiting,
                len(self.held),
                pool.num_free,
                pool.num_cached,
                pool.num_evicted,
                num_wasted,
            )
        )
        return self.take_events()

    def _accept(
        self, request: Request, tokens: tuple[int, ...], row: Row, result: StepResult, now_ns: int
    ) -> tuple[int, ...]:
        """Append a row's tokens up to the one that ends the request; returns those accepted."""
        reason: FinishReason | None = None
        detail: str | int = ""
        num_accepted = 0
        token_ids = request.token_ids
        for token in tokens:
            num_accepted += 1
            token_ids.append(token)
            num_output = len(token_ids) - request.num_prompt_tokens
            if token in request.stop_ids and num_output > request.params.min_tokens:
                reason, detail = FinishReason.STOP, token
            elif result.stopped and request.request_id in result.stopped:
                reason, detail = FinishReason.STOP, result.stopped[request.request_id]
            elif num_output >= request.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        if self._charges:
            num_prefill = row.num_tokens if row.num_tokens > 1 or not tokens else 0
            self.policy.charge(request, num_prefill, num_accepted)
        if request.num_computed_tokens >= (request.num_published_blocks + 1) * self.kv.block_size:
            self.kv.publish(request, request.num_computed_tokens)
        if self._parked and request.num_computed_tokens >= request.num_prompt_tokens - 1:
            self._unpark(request, now_ns)
        if reason is not None:
            self._finish(request, reason, detail, now_ns)
        return tokens[:num_accepted]

    def _finish(self, request: Request, reason: FinishReason, detail: str | int, now_ns: int) -> None:
        """The only way out: exactly one terminal event; slot, blocks, group and policy forget the request."""
        slot = request.slot
        was_running = request.request_id in self.running
        held = (
            was_running
            and self.policy.slot_use is not SlotUse.FREE
            and reason in (FinishReason.STOP, FinishReason.LENGTH)
        )
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
        if held:
            del self.running[request.request_id]
            self.held[slot] = request
        if was_running and not (held and self.policy.slot_use is SlotUse.PADDED):
            self._give_back(request)
            self._released.append(request.request_id)
        siblings = self._groups[request.group_id]
        siblings.remove(request)
        if not siblings:
            del self._groups[request.group_id]
        self._unpark(request, now_ns)
        for parked in self._parked.values():
            if request in parked:
                parked.remove(request)
        self.policy.on_remove(request, self._look(now_ns))
        if self._last_wait[0] == request.request_id:
            self._last_wait = (-1, None)
        self._events.append(
            FinishEvent(
                now_ns,
                self._next_step_id - 1,
                request.request_id,
                slot,
                reason,
                detail,
                request.num_prompt_tokens,
                request.num_output_tokens,
                request.num_cached_tokens,
                request.num_preemptions,
            )
        )

    # ------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Assert every invariant; called after each step in tests and in the simulator, never on the hot path."""
        references: dict[int, int] = {}
        tables = [r.block_table for r in self.requests.values()] + [r.block_table for r in self.held.values()]
        tables += [table for out in self._outstanding for table in out.deferred]
        for table in tables:
            for block in table:
                references[block] = references.get(block, 0) + 1
        self.kv.pool.check_integrity(references)
        slots = [r.slot for r in self.running.values()] + list(self.held) + self._free_slots
        assert sorted(slots) == list(range(self.limits.max_num_seqs)), "a slot is lost or taken twice"
        parked = [r.request_id for group in self._parked.values() for r in group]
        assert len(set(parked)) == len(parked)
        assert all(leader in self.running for leader in self._parked)
        for request in self.requests.values():
            running = request.request_id in self.running
            assert running == (request.state is RequestState.RUNNING)
            assert (request.state is RequestState.FORKING) == (request.request_id in parked)
            assert running or not request.block_table
            assert (
                request.num_computed_tokens + request.num_in_flight <= request.num_tokens + request.num_pending_samples
            )
            if running:
                covered = len(request.block_table) * self.kv.block_size
                assert request.num_computed_tokens + request.num_in_flight <= covered
                assert request.num_remaining >= 0
        assert sorted(r.request_id for g in self._groups.values() for r in g) == sorted(self.requests)
        for outstanding in self._outstanding:
            self._check_plan(outstanding.plan)

    def _check_plan(self, plan: StepPlan) -> None:
        ids = [row.request_id for row in plan.rows]
        assert len(set(ids)) == len(ids), "a request is scheduled twice in a step"
        assert not set(ids) & set(plan.preempted), "a request is both preempted and scheduled"
        assert all(row.num_tokens > 0 for row in plan.rows)
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        cap = self.limits.max_num_prefill_tokens
        assert cap is None or sum(row.num_tokens for row in plan.rows if row.num_tokens > 1) <= cap
