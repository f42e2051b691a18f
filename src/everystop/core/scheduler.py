"""The scheduler: a deterministic state machine that turns waiting and running requests into step plans.

It owns requests, slots and the KV cache's bookkeeping. It must not know what time it is (callers say), what a token
means, or who executes its plans.

There are no phases. Each request only lets `num_computed_tokens` catch up with `num_tokens`: a decode has one token to
catch up, a prefill chunk many.
"""

from __future__ import annotations

from everystop.core.admission import Admission
from everystop.core.batch import Batch, Outstanding, Riders
from everystop.core.dealer import Dealer
from everystop.core.draft import Draft
from everystop.core.errors import NeverFits, PolicyError, PromptTooLong, RequestError
from everystop.core.events import (
    AdmitEvent,
    ArrivalEvent,
    BlockEvent,
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
from everystop.core.limits import Limits
from everystop.core.pace import Pace
from everystop.core.plan import Admitted, NewBlocks, StepPlan, StepResult
from everystop.core.policy.base import Policy, SlotUse, View, Wait
from everystop.core.policy.waiting import WaitingLine
from everystop.core.request import FinishReason, Request, RequestState
from everystop.core.rows import Row
from everystop.core.siblings import Siblings
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepTimeModel
from everystop.core.wait_log import WaitLog


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
        self._is_vacated = False  # somebody has lost his slot to a guest who has not boarded yet
        self._released: list[int] = []
        self._events: list[Event] = []
        self._next_step_id = 0
        self._wait_log = WaitLog(policy)
        has_targets = type(policy).step_target_ns is not Policy.step_target_ns
        self._pace = Pace(step_times) if has_targets or limits.target_itl_ns is not None else None
        self._dealer = Dealer(limits, self.batch, policy, self._keep_order, self._pace)
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

    def block_event(self, now_ns: int) -> BlockEvent:
        """Who holds which blocks; changes nothing, and is not one of the events that `take_events` returns."""
        pool = self.kv.pool
        return BlockEvent(now_ns, self._next_step_id - 1, tuple(pool.ref_count), pool.cached, self.batch.tables)

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
            self._refuse(request, error, now_ns)
            raise
        self.requests[request.request_id] = request
        self.siblings.join(request)
        self._events.append(ArrivalEvent.of(request, now_ns))
        self._start_waiting(request, now_ns)

    def note_refusal(self, request: Request, error: RequestError, now_ns: int) -> None:
        """Record that whoever asks has refused a request before it came here."""
        self._refuse(request, error, now_ns)

    def _refuse(self, request: Request, error: RequestError, now_ns: int) -> None:
        self._events.append(RefuseEvent(now_ns, request.request_id, type(error).__name__, request.tenant))

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
        num_displaced = len(plan.preempted)
        draft, prefilling = self._dealer.deal_decodes(plan, guest, self._look(now_ns))
        may_board = self.num_waiting > 0 and bool(self.batch.free_slots)
        self._dealer.deal_chunks(draft, prefilling, may_board=may_board)
        self._take_blocks(draft)
        if len(plan.preempted) > num_displaced:
            self._note_wait(None, WaitReason.AFTER_PREEMPT, now_ns)
        else:
            self._admit(draft)
        riders = draft.write_rows()
        if plan.rows and self.batch.held:
            self._write_padded_rows(plan, riders)
        if not plan.is_noop:
            time = draft.budget.time
            promise = (0, 0) if time is None else (time.target_ns, round(time.predicted_ns))
            self.batch.outstanding.append(Outstanding(plan, now_ns, riders, [], *promise, draft.num_recomputed_tokens))
        return plan

    def _make_room(self, plan: StepPlan, now_ns: int) -> Request | None:
        """Where all slots are taken, a policy that displaces may give the tail's to a guest, who is returned and boards
        before all others, in this step if there are tokens and blocks for it. If not, the slot is kept for whoever is
        the claimant then.
        """
        batch, is_vacated = self.batch, self._is_vacated
        self._is_vacated = False
        if not self.policy.may_displace or not self.num_waiting or not batch.running:
            return None
        if batch.free_slots and not is_vacated:
            return None
        guest = self.policy.claimant(self._look(now_ns))
        if guest is None:
            return None
        self._check_waits(guest)
        if self._find_sibling(guest, plan.step_id)[1] is not None:
            return None  # it would be parked, and need no slot
        if not batch.free_slots and not self._displace_tail(guest, plan, now_ns):
            return None
        self._is_vacated = True
        return guest

    def _displace_tail(self, picked: Request, plan: StepPlan, now_ns: int, draft: Draft | None = None) -> bool:
        """The last in keep order loses its place, if the policy would rather have `picked` on board. Who has lost his
        too often already keeps it, but takes nobody else's for that.
        """
        view, keep_order = self._look(now_ns), self._keep_order
        tail = keep_order.tail(self.batch.running.values(), view)
        is_protected = keep_order.is_protected(tail, boards_later=bool(self.batch.free_slots))
        if is_protected or not keep_order.key_of_other(picked, view) < keep_order.key(tail, view):
            return False
        if not self.policy.displaces(picked, tail, view):
            return False
        self._preempt(tail, plan, now_ns, draft)
        return True

    def _take_blocks(self, draft: Draft) -> None:
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

    def _take_scarce_blocks(self, draft: Draft, wants: set[int]) -> None:
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

    def _preempt(self, victim: Request, plan: StepPlan, now_ns: int, draft: Draft | None = None) -> int:
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

    def _admit(self, draft: Draft) -> None:
        """Let waiting requests board while slots, tokens and blocks last; the first that does not fit ends it."""
        while (picked := self._pick(draft)) is not None:
            if not self.batch.free_slots:
                self._note_wait(picked, WaitReason.NO_SLOT, draft.now_ns)
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
                self._note_wait(picked, WaitReason.TOKEN_BUDGET, draft.now_ns)
                break
            lacking = self._expected_shortfall(picked, shared, draft)
            if lacking is not None:  # nobody's place would help: those whom it might take did not count
                self._note_wait(picked, WaitReason.NO_BLOCKS, draft.now_ns, *lacking)
                break
            if not self.kv.admit(picked, shared):
                if self._drop_padding():
                    continue
                need, have = self.kv.shortfall(picked, shared)
                self._refuse_boarding(picked, draft, need, have)
                break
            self._board(picked, start, source, draft)
            self._dealer.deal(draft, picked, start, num_tokens)
        self._dealer.deal_leftover(draft)

    def _expected_shortfall(self, picked: Request, shared: list[int], draft: Draft) -> tuple[int, int] | None:
        """(need, have) in blocks if the picked request should wait although there are blocks for what it is now.

        Never for one before whom all others make way, nor for a guest, for whom somebody has; where the policy
        displaces, those who would make way do not count.
        """
        if self.admission is None or self._keep_order.is_front(picked) or picked is draft.guest:
            return None
        others = list(self.batch.running.values())
        if self.policy.may_displace:
            others = [r for r in others if not self._makes_way(r, picked, draft.now_ns)]
        return self.admission.shortfall(picked, shared, others, self.batch)

    def _makes_way(self, request: Request, picked: Request, now_ns: int) -> bool:
        """A running request would lose its place to the picked one, for which there is a slot, but too few blocks."""
        view, keep_order = self._look(now_ns), self._keep_order
        if keep_order.is_protected(request, boards_later=True):
            return False
        if keep_order.key(request, view) < keep_order.key(picked, view):
            return False
        return self.policy.displaces(picked, request, view)

    def _pick(self, draft: Draft) -> Request | None:
        """Whom the policy lets board next; None, and a note of why, if nobody. Who lost his place in this step does not
        come back in it.
        """
        if draft.guest is not None and draft.guest.state in (RequestState.WAITING, RequestState.PREEMPTED):
            return draft.guest
        view = self._look(draft.now_ns)
        front = self._front.head()
        picked = front if front is not None and self.policy.may_return(front, view) else self.policy.pick(view)
        if isinstance(picked, Wait):
            draft.plan.wake_at_ns = picked.until_ns
            self._note_wait(None, picked.reason, draft.now_ns)
            return None
        if picked is None:
            if view.num_waiting and not view.num_running and not self.batch.outstanding:
                raise PolicyError(
                    f"{type(self.policy).__name__} lets nobody board though nothing runs and {view.num_waiting} wait"
                )
            if view.num_waiting > self.siblings.num_parked:
                self._note_wait(None, self.policy.barrier_reason, draft.now_ns)
            else:
                self._wait_log.forget()
            return None
        self._check_waits(picked)
        if picked.request_id in draft.plan.preempted:
            self._note_wait(None, WaitReason.AFTER_PREEMPT, draft.now_ns)
            return None
        return picked

    def _check_waits(self, picked: Request) -> None:
        if self.requests.get(picked.request_id) is not picked or picked.request_id in self.batch.running:
            raise PolicyError(f"{type(self.policy).__name__} picked request {picked.request_id}, which does not wait")

    def _refuse_boarding(self, picked: Request, draft: Draft, need: int, have: int) -> None:
        """There are too few blocks for the picked request; a policy that displaces costs the tail its place, so that it
        boards a step later. Not where enough are promised, nor in a step that has admitted someone, who may have
        matched the blocks that the tail was to fill in it.
        """
        self._note_wait(picked, WaitReason.NO_BLOCKS, draft.now_ns, need, have)
        if not self.policy.may_displace or not self.batch.running or draft.plan.admitted:
            return
        if need - have <= self.batch.num_promised_blocks:
            return
        num_before = len(draft.plan.preempted)
        if self._displace_tail(picked, draft.plan, draft.now_ns, draft):
            draft.strike(set(draft.plan.preempted[num_before:]))

    def _fork_source(self, request: Request, draft: Draft) -> tuple[Request | None, bool]:
        """A running sibling whose prompt is computed; or (None, True) after parking the request behind one that is at
        it.
        """
        source, busy = self._find_sibling(request, draft.plan.step_id)
        if busy is None:
            return source, False
        request.state = RequestState.FORKING
        self.siblings.park(request, busy)
        self._stop_waiting(request, draft.now_ns)
        self._events.append(WaitEvent(draft.now_ns, request.request_id, WaitReason.FORK, 0, 0, busy.request_id))
        return None, True

    def _find_sibling(self, request: Request, step_id: int) -> tuple[Request | None, Request | None]:
        """A running sibling whose prompt is computed, else one that is at it. One that has matched blocks in this very
        step still is: copies come before the rows that fill those blocks.
        """
        siblings = self.siblings.of(request)
        if len(siblings) == 1:
            return None, None
        num_needed = request.num_prompt_tokens - 1
        busy = None
        for sibling in siblings:
            if sibling.request_id in self.batch.running:
                if sibling.num_computed_tokens >= num_needed and sibling.last_matched_step < step_id:
                    return sibling, None
                busy = busy or sibling
        return None, busy

    def _unpark(self, leader: Request, now_ns: int) -> None:
        """Those parked behind `leader` wait to board again: its prompt is computed, or it has left."""
        for request in self.siblings.unpark(leader):
            request.state = RequestState.PREEMPTED if request.num_preemptions else RequestState.WAITING
            self._start_waiting(request, now_ns)

    def _board(self, request: Request, start: int, source: Request | None, draft: Draft) -> None:
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
        self._is_vacated = False
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
        self._wait_log.forget(request)

    def _note_wait(self, head: Request | None, reason: WaitReason, now_ns: int, need: int = 0, have: int = 0) -> None:
        num_behind = 0 if head is None else self.num_waiting - 1
        self._events += self._wait_log.note(head, reason, now_ns, need, have, num_behind)

    def _write_padded_rows(self, plan: StepPlan, riders: Riders) -> None:
        """Under static-padded, finished rows go on decoding until the whole batch is done, as in a padded `generate()`.
        Without a free block, or at the longest length, a row computes its last position again.
        """
        room = self.limits.max_num_batched_tokens - plan.num_tokens
        for request in list(self.batch.held.values())[:room]:
            if request.block_table:
                if request.num_computed_tokens < self.limit_tokens and self._grow(request, plan):
                    request.num_computed_tokens += 1
                plan.rows.append(Row(request.request_id, request.num_computed_tokens - 1, 1, 0, 0))
                riders.append(request, -1)
                request.last_served_step = plan.step_id
                plan.num_padded_rows += 1

    def update(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[Event]:
        """Take a step's result back: append tokens, finish, free. Returns all events since the last call."""
        outstanding = self.batch.outstanding.popleft()
        assert outstanding.plan is plan
        assert len(result.rows) == len(plan.rows)
        num_wasted = 0
        accepted: list[tuple[int, ...]] = []
        riders, rows = outstanding.riders, plan.rows
        for request, epoch, num_tokens, logits_from, out in zip(
            riders.requests, riders.epochs, rows.nums_tokens, rows.logits_from, result.rows, strict=True
        ):
            if epoch < 0 or request.state is RequestState.FINISHED:
                num_wasted += 1
                accepted.append(())
                continue
            if request.epoch == epoch:
                request.num_computed_tokens += num_tokens
                request.num_in_flight -= num_tokens
            if logits_from < num_tokens:
                request.num_pending_samples -= 1
            if isinstance(out, str):
                self.kv.withdraw(request, 0)  # earlier chunks may be as wrong as this one, unseen without logits
                self._finish(request, FinishReason.ERROR, out, now_ns)
                accepted.append(())
            else:
                accepted.append(self._accept(request, out, num_tokens, result, now_ns))
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
            result.sample_ns,
        )

    def _accept(
        self, request: Request, tokens: tuple[int, ...], num_tokens: int, result: StepResult, now_ns: int
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
            num_prefill = num_tokens if num_tokens > 1 or not tokens else 0
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
        self._wait_log.forget(request)
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
