"""The scheduler: a deterministic state machine that turns waiting and running requests into step plans.

It owns requests, slots and the KV cache's bookkeeping. It must not know what time it is (callers say), what a token
means, or who executes its plans.

There are no phases. Each request only lets `num_computed_tokens` catch up with `num_tokens`: a decode has one token to
catch up, a prefill chunk many.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everystop.core.admission import Admission
from everystop.core.batch import Batch, Outstanding
from everystop.core.budget import StepBudget, TimeBudget
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
from everystop.core.integrity import check_scheduler
from everystop.core.keep_order import KeepOrder
from everystop.core.kv_cache import KVCache
from everystop.core.pace import Pace
from everystop.core.plan import Admitted, NewBlocks, Row, StepPlan, StepResult
from everystop.core.policy.base import Policy, SlotUse, View, Wait
from everystop.core.policy.waiting import WaitingLine
from everystop.core.request import FinishReason, Request, RequestState
from everystop.core.siblings import Siblings
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepTimeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step and a sequence may use, and who boards; see the flags of the same names.

    `admission` is one of `ADMISSIONS`: `greedy` lets whoever is next board as soon as there are blocks for what it is
    now, `expected` when there are for what it and the running ones are expected to become.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_num_prefill_tokens: int | None = None
    max_model_len: int = 8192
    max_preemptions: int = 8
    admission: str = "greedy"
    target_itl_ns: int | None = None


@dataclass(slots=True)
class _Chunk:
    """Tokens dealt to a prefilling request: `num_tokens` from position `start` on."""

    request: Request
    start: int
    num_tokens: int


def _num_recomputed(chunk: _Chunk) -> int:
    """How many of its tokens had been there before a preemption."""
    return max(0, min(chunk.request.num_lost_tokens - chunk.start, chunk.num_tokens))


@dataclass(slots=True)
class _Draft:
    """A step being planned: who gets a row, before the rows are written; `guest` boards first, in somebody's place.

    `skipped_from` says where those stood who have skipped blocks in this step.
    """

    plan: StepPlan
    now_ns: int
    budget: StepBudget
    decoders: list[Request]
    guest: Request | None
    chunks: list[_Chunk] = field(default_factory=list)
    skipped_from: dict[int, int] = field(default_factory=dict)

    def strike(self, request_ids: set[int]) -> None:
        """These requests get no row after all."""
        self.decoders = [request for request in self.decoders if request.request_id not in request_ids]
        self.chunks = [chunk for chunk in self.chunks if chunk.request.request_id not in request_ids]


class Scheduler:
    """add and abort requests, schedule a step, update with its result. Same calls, same plans, byte for byte.

    One plan may be outstanding when the next is scheduled; results come back in the order of their plans. Where steps
    are planned by time (`target_itl_ns`, or a policy with a target of its own), `step_times` is what is known of step
    times at the start; the rest is learned from the steps.
    """

    def __init__(
        self,
        limits: Limits,
        kv: KVCache,
        policy: Policy,
        step_times: StepTimeModel = UNKNOWN_STEP_TIMES,
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.policy = policy
        self.batch = Batch(limits.max_num_seqs, kv)
        self.siblings = Siblings()
        self.requests: dict[int, Request] = {}
        self.view = View(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_prefill_tokens=limits.max_num_prefill_tokens,
            target_itl_ns=limits.target_itl_ns,
            step_times=step_times,
            num_blocks=kv.pool.num_blocks,
            block_size=kv.block_size,
            num_matched_tokens=kv.num_matched_tokens,
            num_private_tokens=kv.num_private_tokens,
        )
        self.limit_tokens = min(limits.max_model_len, kv.num_token_slots)
        self.admission = Admission(kv, self.limit_tokens) if limits.admission == "expected" else None
        self.num_preemptions = 0
        self._keep_order = KeepOrder(policy, limits.max_preemptions)
        self._front = WaitingLine()  # those preempted too often, while they wait
        self._released: list[int] = []
        self._events: list[Event] = []
        self._next_step_id = 0
        self._last_wait: tuple[int, WaitReason | None] = (-1, None)
        has_targets = type(policy).step_target_ns is not Policy.step_target_ns
        self._pace = Pace(step_times) if has_targets or limits.target_itl_ns is not None else None
        self._charges = type(policy).charge is not Policy.charge  # most do not, and a call a row costs

    @property
    def running(self) -> dict[int, Request]:
        """Requests on board, by id."""
        return self.batch.running

    @property
    def held(self) -> dict[int, Request]:
        """Finished requests that keep their slot until their batch has ended, by slot."""
        return self.batch.held

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and are computed."""
        return len(self.batch.running)

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and do not run: new, parked behind a sibling, or preempted."""
        return len(self.requests) - len(self.batch.running)

    @property
    def has_work(self) -> bool:
        """Some request is not finished, or the runner has not been told of all that ended."""
        return bool(self.requests or self._released or self.batch.held)

    def take_events(self) -> list[Event]:
        """Events since the last call of this or of `update`."""
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """Assert every invariant; called after each step in tests and in the simulator, never on the hot path."""
        check_scheduler(self)

    def _look(self, now_ns: int) -> View:
        view, num_running = self.view, len(self.batch.running)
        view.now_ns = now_ns
        view.num_running = num_running
        view.num_waiting = len(self.requests) - num_running
        view.num_held = len(self.batch.held)
        return view

    def add(self, request: Request, now_ns: int) -> None:
        """Take a request; raises RequestError, and records it, if an empty system could not serve the request, or if
        the policy refuses it.
        """
        assert request.request_id not in self.requests
        try:
            self._check_fits(request)
            if not self.siblings.has(request.group_id):
                self.policy.check_add(request, self._look(now_ns))
        except RequestError as error:
            self._events.append(RefuseEvent(now_ns, request.request_id, type(error).__name__, request.tenant))
            raise
        self.requests[request.request_id] = request
        self.siblings.join(request)
        self._events.append(ArrivalEvent.of(request, now_ns))
        self._start_waiting(request, now_ns)

    def _start_waiting(self, request: Request, now_ns: int) -> None:
        if self._keep_order.is_front(request):
            self._front.push(request)
        self.policy.on_add(request, self._look(now_ns))

    def _stop_waiting(self, request: Request, now_ns: int) -> None:
        self._front.discard(request)
        self.policy.on_admit(request, self._look(now_ns))

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

    def schedule(self, now_ns: int) -> StepPlan:
        """Plan one step: deal tokens, then take blocks, then admit. Touches no tensor; an empty plan means nothing to
        compute.
        """
        assert len(self.batch.outstanding) <= 1, "at most one plan may be outstanding"
        self._end_batch(now_ns)
        self._keep_order.begin_step()
        plan = StepPlan(step_id=self._next_step_id)
        self._next_step_id += 1
        plan.released, self._released = self._released, []
        guest = self._make_room(plan, now_ns)
        draft, prefilling = self._deal_decodes(plan, guest, now_ns)
        self._deal_chunks(draft, prefilling)
        self._take_blocks(draft)
        if len(plan.preempted) > (guest is not None):
            self._note_wait(-1, WaitReason.AFTER_PREEMPT, now_ns)
        else:
            self._admit(draft)
        riders = self._write_rows(draft)
        if not plan.is_noop:
            num_recomputed = sum(map(_num_recomputed, draft.chunks))
            time = draft.budget.time
            promise = (0, 0) if time is None else (time.target_ns, round(time.predicted_ns))
            self.batch.outstanding.append(Outstanding(plan, now_ns, riders, [], *promise, num_recomputed))
        return plan

    def _make_room(self, plan: StepPlan, now_ns: int) -> Request | None:
        """Where all slots are taken, a policy that displaces may give the tail's to a guest, who boards in this very
        step and is returned.
        """
        if not self.policy.may_displace or self.batch.free_slots or not self.num_waiting or not self.batch.running:
            return None
        guest = self.policy.claimant(self._look(now_ns))
        return guest if guest is not None and self._displace_tail(guest, plan, now_ns) else None

    def _displace_tail(self, picked: Request, plan: StepPlan, now_ns: int, draft: _Draft | None = None) -> bool:
        """The last in keep order loses its place, if the policy would rather have `picked` on board. Who has lost his
        too often already keeps it, but takes nobody else's for that.
        """
        view, keep_order = self._look(now_ns), self._keep_order
        tail = keep_order.tail(self.batch.running.values(), view)
        # A guest boards at once; who is short of blocks boards a step later, after one that is at the front by then.
        is_protected = tail.num_preemptions + bool(self.batch.free_slots) >= self.limits.max_preemptions
        if is_protected or not keep_order.key_of_other(picked, view) < keep_order.key(tail, view):
            return False
        if not self.policy.displaces(picked, tail, view):
            return False
        self._preempt(tail, plan, now_ns, draft)
        return True

    def _deal_decodes(self, plan: StepPlan, guest: Request | None, now_ns: int) -> tuple[_Draft, list[Request]]:
        """One token to each running request with one to compute; those with more follow, in keep order."""
        limits, batch = self.limits, self.batch
        decoders, prefilling = self._catching_up()
        if len(decoders) > limits.max_num_batched_tokens:
            view = self._look(now_ns)
            decoders.sort(key=lambda r: (r.last_served_step, self._keep_order.key(r, view)))
            del decoders[limits.max_num_batched_tokens :]
        if len(prefilling) > 1:
            view = self._look(now_ns)
            prefilling.sort(key=lambda r: self._keep_order.key(r, view))
        num_left = limits.max_num_batched_tokens - len(decoders)
        num_left = max(min(num_left, 1), num_left - batch.num_padded)
        time = self._time_budget(decoders, now_ns)
        budget = StepBudget(num_left, limits.max_num_prefill_tokens, self.kv.block_size, time)
        return _Draft(plan, now_ns, budget, decoders, guest), prefilling

    def _time_budget(self, decoders: list[Request], now_ns: int) -> TimeBudget | None:
        """What the targets on a step's time leave to prompts; None where there is none: a gap between tokens concerns
        decoders only.
        """
        if self._pace is None:
            return None
        target_itl_ns = self.limits.target_itl_ns if decoders else None
        targets = (target_itl_ns, self.policy.step_target_ns(self._look(now_ns)))
        return self._pace.budget(targets, decoders, self.batch.num_padded)

    def _catching_up(self) -> tuple[list[Request], list[Request]]:
        """Running requests with one token to compute, and those with more."""
        decoders, prefilling = [], []
        for request in self.batch.running.values():
            num_expected = len(request.token_ids) + request.num_pending_samples
            remaining = num_expected - request.num_computed_tokens - request.num_in_flight
            if remaining > 1:
                prefilling.append(request)
            elif remaining == 1 and num_expected - request.num_prompt_tokens < request.max_tokens:
                decoders.append(request)
        return decoders, prefilling

    def _deal_chunks(self, draft: _Draft, prefilling: list[Request]) -> None:
        """Deal prefill tokens in keep order; blocks filled here are matchable at once: those behind can skip them."""
        may_board = self.num_waiting > 0 and bool(self.batch.free_slots)
        for i, request in enumerate(prefilling):
            if draft.budget.prefill_tokens <= 0:
                break
            start = self._skip_matchable(request, draft)
            contended = may_board or i + 1 < len(prefilling)
            num_tokens = draft.budget.share(start, request.num_tokens - start, contended=contended)
            if num_tokens > 0:
                self._deal(draft, request, start, num_tokens)

    def _deal(self, draft: _Draft, request: Request, start: int, num_tokens: int) -> None:
        draft.chunks.append(_Chunk(request, start, num_tokens))
        draft.budget.spend(start, num_tokens, is_prefill=request.num_tokens - start > 1)
        self.kv.publish(request, start + num_tokens)

    def _skip_matchable(self, request: Request, draft: _Draft) -> int:
        """Move a prefilling request past whole blocks that others have computed meanwhile; returns where its next row
        starts.
        """
        start = request.num_scheduled_through
        block_size = self.kv.block_size
        if not self.kv.enable_prefix_caching or (request.num_in_flight and start % block_size):
            return start
        new_start = self.kv.rematch(request, start)
        if new_start > start:
            draft.skipped_from[request.request_id] = start
            request.last_matched_step = draft.plan.step_id
            if request.num_preemptions == 0:
                request.num_cached_tokens += new_start - start
            request.num_computed_tokens += new_start - start
            first, end = start // block_size, new_start // block_size
            draft.plan.new_blocks.append(NewBlocks(request.request_id, first, tuple(request.block_table[first:end])))
        return new_start

    def _take_blocks(self, draft: _Draft) -> None:
        """Give decoders that cross a block border their next block; without room, preempt from the tail of the keep
        order. Prefilling requests own their whole table since admission.
        """
        block_size = self.kv.block_size
        growing = [
            request
            for request in draft.decoders
            if request.num_computed_tokens + request.num_in_flight >= len(request.block_table) * block_size
        ]
        if len(growing) > self.kv.pool.num_free:
            self._take_scarce_blocks(draft, {request.request_id for request in growing})
            return
        for request in growing:
            self._grow(request, draft.plan)

    def _take_scarce_blocks(self, draft: _Draft, wants: set[int]) -> None:
        """In keep order, each takes its block or makes the last in order give up its own.

        The first in order thus never loses its blocks. Blocks that come back with a plan on its way are promised: who
        needs them skips this step, rather than costing another victim.
        """
        self._drop_padding()
        view = self._look(draft.now_ns)
        order = sorted(self.batch.running.values(), key=lambda r: self._keep_order.key(r, view))
        promised = self.batch.num_promised_blocks
        stalled: list[int] = []
        while order:
            request = order.pop(0)
            if request.request_id not in wants:
                continue
            while not self._grow(request, draft.plan):
                if promised > 0:
                    promised -= 1
                    stalled.append(request.request_id)
                    break
                victim = order.pop() if order else request
                promised += self._preempt(victim, draft.plan, draft.now_ns, draft)
                if victim is request:
                    break
        draft.strike({*draft.plan.preempted, *stalled})

    def _grow(self, request: Request, plan: StepPlan) -> bool:
        index = len(request.block_table)
        new = self.kv.grow(request, request.num_scheduled_through + 1)
        if new is None:
            return False
        if new:
            plan.new_blocks.append(NewBlocks(request.request_id, index, tuple(new)))
        return True

    def _preempt(self, victim: Request, plan: StepPlan, now_ns: int, draft: _Draft | None = None) -> int:
        """Take slot and blocks away; `draft` is what has been dealt so far. Returns how many of the blocks come back
        only when an outstanding plan does.
        """
        num_lost, slot = victim.num_scheduled_through, victim.slot
        if draft is not None:
            num_lost = draft.skipped_from.get(victim.request_id, num_lost)
            for chunk in draft.chunks:
                if chunk.request is victim:
                    self.kv.withdraw(victim, chunk.start)
        num_deferred = self.batch.leave(victim)
        victim.epoch += 1
        victim.num_computed_tokens = victim.num_in_flight = victim.num_published_blocks = 0
        victim.num_preemptions += 1
        victim.num_lost_tokens = max(victim.num_lost_tokens, num_lost)
        victim.state = RequestState.PREEMPTED
        self.num_preemptions += 1
        plan.preempted.append(victim.request_id)
        plan.new_blocks[:] = [new for new in plan.new_blocks if new.request_id != victim.request_id]
        self._events.append(PreemptEvent(now_ns, plan.step_id, victim.request_id, slot, num_lost))
        self._unpark(victim, now_ns)
        self._start_waiting(victim, now_ns)
        return num_deferred

    def _drop_padding(self) -> bool:
        """Blocks of finished rows go before any living request loses or lacks its own; their slots stay held."""
        dropped = self.batch.drop_padding()
        self._released += dropped
        return bool(dropped)

    def _end_batch(self, now_ns: int) -> None:
        """Give held slots back once the policy says that their batch has ended."""
        if self.batch.held and self.policy.batch_ended(self._look(now_ns)):
            self._released += self.batch.free_held()

    def _admit(self, draft: _Draft) -> None:
        """Let waiting requests board while slots, tokens and blocks last; the first that does not fit ends it."""
        while (picked := self._pick(draft)) is not None:
            if not self.batch.free_slots:
                self._refuse_boarding(picked, WaitReason.NO_SLOT, draft)
                break
            source, is_parked = self._fork_source(picked, draft)
            if is_parked:
                continue
            shared = self.kv.match(picked)
            start = len(shared) * self.kv.block_size
            if source is not None and start < picked.num_prompt_tokens - 1:
                start = picked.num_prompt_tokens - 1
                shared = source.block_table[: start // self.kv.block_size]
            else:
                source = None
            contended = self.num_waiting > 1 and len(self.batch.free_slots) > 1
            num_tokens = draft.budget.share(start, picked.num_tokens - start, contended=contended)
            if num_tokens <= 0:
                self._note_wait(picked.request_id, WaitReason.TOKEN_BUDGET, draft.now_ns)
                break
            lacking = self._expected_shortfall(picked, shared, draft)
            if lacking is not None:  # nobody's place would help: those whom it might take did not count
                self._note_wait(picked.request_id, WaitReason.NO_BLOCKS, draft.now_ns, *lacking)
                break
            if not self.kv.admit(picked, shared):
                if self._drop_padding():
                    continue
                need, have = self.kv.shortfall(picked, shared)
                self._refuse_boarding(picked, WaitReason.NO_BLOCKS, draft, need, have)
                break
            self._board(picked, start, source, draft)
            self._deal(draft, picked, start, num_tokens)
        self._deal_leftover(draft)

    def _expected_shortfall(self, picked: Request, shared: list[int], draft: _Draft) -> tuple[int, int] | None:
        """(need, have) in blocks if the picked request should wait although there are blocks for what it is now.

        Never for one before whom all others make way, nor for a guest, for whom somebody has; where the policy
        displaces, those who would make way do not count.
        """
        is_guest = bool(draft.plan.preempted) and not draft.plan.admitted
        if self.admission is None or self._keep_order.is_front(picked) or is_guest:
            return None
        others = list(self.batch.running.values())
        if self.policy.may_displace and others:
            view = self._look(draft.now_ns)
            key, policy = self._keep_order.key(picked, view), self.policy
            others = [r for r in others if self._keep_order.key(r, view) < key or not policy.displaces(picked, r, view)]
        return self.admission.shortfall(picked, shared, others, self.batch)

    def _deal_leftover(self, draft: _Draft) -> None:
        """What was held back for others, and nobody could use, goes to those who have got some, in their order."""
        for chunk in draft.chunks:
            end = chunk.start + chunk.num_tokens
            extra = min(draft.budget.left_at(end), chunk.request.num_tokens - end)
            if extra > 0 and chunk.num_tokens > 1:
                chunk.num_tokens += extra
                draft.budget.spend(end, extra, is_prefill=True)
                self.kv.publish(chunk.request, end + extra)

    def _pick(self, draft: _Draft) -> Request | None:
        """Whom the policy lets board next; None, and a note of why, if nobody. Who lost his place in this step does not
        come back in it.
        """
        if draft.guest is not None:
            guest, draft.guest = draft.guest, None
            return guest
        view = self._look(draft.now_ns)
        front = self._front.head()
        picked = front if front is not None and self.policy.may_return(front, view) else self.policy.pick(view)
        if isinstance(picked, Wait):
            draft.plan.wake_at_ns = picked.until_ns
            self._note_wait(-1, picked.reason, draft.now_ns)
            return None
        if picked is None:
            if view.num_waiting and not view.num_running and not self.batch.outstanding:
                raise PolicyError(
                    f"{type(self.policy).__name__} lets nobody board though nothing runs and {view.num_waiting} wait"
                )
            if view.num_waiting > self.siblings.num_parked:
                self._note_wait(-1, self.policy.barrier_reason, draft.now_ns)
            else:
                self._last_wait = (-1, None)
            return None
        if self.requests.get(picked.request_id) is not picked or picked.request_id in self.batch.running:
            raise PolicyError(f"{type(self.policy).__name__} picked request {picked.request_id}, which does not wait")
        if picked.request_id in draft.plan.preempted:
            self._note_wait(-1, WaitReason.AFTER_PREEMPT, draft.now_ns)
            return None
        return picked

    def _refuse_boarding(
        self, picked: Request, reason: WaitReason, draft: _Draft, need: int = 0, have: int = 0
    ) -> None:
        """Note why the picked request stays behind; a policy that displaces costs the tail its place, for the next
        step. Not in a step that has admitted someone, who may have matched the blocks that the tail was to fill in it.
        """
        self._note_wait(picked.request_id, reason, draft.now_ns, need, have)
        if not self.policy.may_displace or not self.batch.running or draft.plan.admitted:
            return
        num_before = len(draft.plan.preempted)
        if reason is WaitReason.NO_BLOCKS and self._displace_tail(picked, draft.plan, draft.now_ns, draft):
            draft.strike(set(draft.plan.preempted[num_before:]))

    def _fork_source(self, request: Request, draft: _Draft) -> tuple[Request | None, bool]:
        """A running sibling whose prompt is computed; or (None, True) after parking the request behind one that is at
        it. One that has matched blocks in this very step still is: copies come before the rows that fill those blocks.
        """
        siblings = self.siblings.of(request)
        if len(siblings) == 1:
            return None, False
        num_needed = request.num_prompt_tokens - 1
        busy = None
        for sibling in siblings:
            if sibling.request_id in self.batch.running:
                if sibling.num_computed_tokens >= num_needed and sibling.last_matched_step < draft.plan.step_id:
                    return sibling, False
                busy = busy or sibling
        if busy is None:
            return None, False
        request.state = RequestState.FORKING
        self.siblings.park(request, busy)
        self._stop_waiting(request, draft.now_ns)
        self._events.append(WaitEvent(draft.now_ns, request.request_id, WaitReason.FORK, 0, 0, busy.request_id))
        return None, True

    def _unpark(self, leader: Request, now_ns: int) -> None:
        """Those parked behind `leader` wait to board again: its prompt is computed, or it has left."""
        for request in self.siblings.unpark(leader):
            request.state = RequestState.PREEMPTED if request.num_preemptions else RequestState.WAITING
            self._start_waiting(request, now_ns)

    def _board(self, request: Request, start: int, source: Request | None, draft: _Draft) -> None:
        """Give a slot to a request that has its blocks; the first `start` tokens come from the cache or a sibling."""
        plan, now_ns = draft.plan, draft.now_ns
        resumed = request.num_preemptions > 0
        if source is not None and start % self.kv.block_size:
            index = start // self.kv.block_size
            plan.copies.append((source.block_table[index], request.block_table[index]))
        request.num_computed_tokens = start
        request.last_matched_step = plan.step_id
        if not resumed and source is None:
            request.num_cached_tokens = start
        self.batch.board(request)
        self._stop_waiting(request, now_ns)
        plan.admitted.append(Admitted.of(request))
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
        """Record why the head waits, when that has changed, once for all behind it, and for those passed over."""
        if self._last_wait == (head_id, reason):
            return
        if head_id >= 0 and head_id != self._last_wait[0] and self.num_waiting > 1:
            self._events.append(WaitEvent(now_ns, -1, WaitReason.BEHIND, 0, 0, head_id))
            for request, own_reason in self.policy.passed_over(self.requests[head_id]):
                self._events.append(WaitEvent(now_ns, request.request_id, own_reason, 0, 0, head_id))
        self._last_wait = (head_id, reason)
        self._events.append(WaitEvent(now_ns, head_id, reason, need, have, -1))

    def _write_rows(self, draft: _Draft) -> list[tuple[Request, int]]:
        """Write the plan's rows, and note what is in flight; returns the request and its epoch behind each row."""
        rows, step_id = draft.plan.rows, draft.plan.step_id
        riders: list[tuple[Request, int]] = []
        for request in draft.decoders:
            start = request.num_computed_tokens + request.num_in_flight
            rows.append(tuple.__new__(Row, (request.request_id, start, 1, 0, 0)))  # in half the time of Row(...)
            riders.append((request, request.epoch))
            request.num_in_flight += 1
            request.num_pending_samples += 1
            request.last_served_step = step_id
        for chunk in draft.chunks:
            request, num_tokens = chunk.request, chunk.num_tokens
            samples = chunk.start + num_tokens == request.num_tokens + request.num_pending_samples
            rows.append(Row(request.request_id, chunk.start, num_tokens, 0, num_tokens - samples))
            riders.append((request, request.epoch))
            request.num_in_flight += num_tokens
            request.num_pending_samples += samples
            request.last_served_step = step_id
        if rows and self.batch.held:
            self._write_padded_rows(draft.plan, riders)
        return riders

    def _write_padded_rows(self, plan: StepPlan, riders: list[tuple[Request, int]]) -> None:
        """Under static-padded, finished rows go on decoding until the whole batch is done, as in a padded `generate()`.
        Without a free block, or at the longest length, a row computes its last position again.
        """
        room = self.limits.max_num_batched_tokens - plan.num_tokens
        for request in list(self.batch.held.values())[:room]:
            if request.block_table:
                if request.num_computed_tokens < self.limit_tokens and self._grow(request, plan):
                    request.num_computed_tokens += 1
                plan.rows.append(Row(request.request_id, request.num_computed_tokens - 1, 1, 0, 0))
                riders.append((request, -1))
                request.last_served_step = plan.step_id
                plan.num_padded_rows += 1

    def update(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[Event]:
        """Take a step's result back: append tokens, finish, free. Returns all events since the last call."""
        outstanding = self.batch.outstanding.popleft()
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
        self.batch.release_deferred(outstanding)
        if self._pace is not None:
            is_overlapped = bool(self.batch.outstanding)
            self._pace.learn(outstanding, result.execute_ns, now_ns, is_overlapped=is_overlapped)
            self.view.step_times = self._pace.model
        self._events.append(self._step_event(outstanding, result, accepted, num_wasted, now_ns))
        return self.take_events()

    def _step_event(
        self,
        landed: Outstanding,
        result: StepResult,
        accepted: list[tuple[int, ...]],
        num_wasted: int,
        now_ns: int,
    ) -> StepEvent:
        pool = self.kv.pool
        return StepEvent(
            now_ns,
            landed.scheduled_ns,
            result.execute_ns,
            landed.plan,
            tuple(accepted),
            len(self.batch.running),
            self.num_waiting,
            len(self.batch.held),
            pool.num_free,
            pool.num_cached,
            pool.num_evicted,
            num_wasted,
            landed.target_ns,
            landed.predicted_ns,
            landed.num_recomputed_tokens,
        )

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
            self.policy.charge(request, num_prefill, num_accepted, now_ns)
        if request.num_computed_tokens >= (request.num_published_blocks + 1) * self.kv.block_size:
            self.kv.publish(request, request.num_computed_tokens)
        if self.siblings.has_parked(request) and request.num_computed_tokens >= request.num_prompt_tokens - 1:
            self._unpark(request, now_ns)
        if reason is not None:
            self._finish(request, reason, detail, now_ns)
        return tokens[:num_accepted]

    def _finish(self, request: Request, reason: FinishReason, detail: str | int, now_ns: int) -> None:
        """The only way out: exactly one terminal event; slot, blocks, group and policy forget the request."""
        slot = request.slot
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
        if request.request_id in self.batch.running:
            self._alight(request)
        self._unpark(request, now_ns)
        self.siblings.leave(request)
        self._front.discard(request)
        self.policy.on_remove(request, self._look(now_ns))
        if self.admission is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.admission.lengths.add(request.num_output_tokens)
        if self._last_wait[0] == request.request_id:
            self._last_wait = (-1, None)
        self._events.append(FinishEvent.of(request, now_ns, self._next_step_id - 1, slot, reason, detail))

    def _alight(self, request: Request) -> None:
        """A running request that has ended leaves, or, under request-level batching, holds its slot."""
        slot_use = self.policy.slot_use
        completed = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if completed and slot_use is not SlotUse.FREE:
            self.batch.hold(request, padded=slot_use is SlotUse.PADDED)
        else:
            self.batch.leave(request)
        if not request.block_table:
            self._released.append(request.request_id)
