"""The scheduler: a deterministic state machine that turns waiting and running requests into step plans.

It says in which order a step is planned and what becomes of its result; who boards, who is displaced, and the books of
both are in modules of their own. It must not know what time it is (callers say), what a token means, or who executes
its plans.

There are no phases. Each request only lets `num_computed_tokens` catch up with `num_tokens`: a decode has one token to
catch up, a prefill chunk many.
"""

from __future__ import annotations

from everystop.core.admission import Admission
from everystop.core.batch import Batch, Outstanding, Riders
from everystop.core.boarding import Boarding
from everystop.core.dealer import Dealer
from everystop.core.displacement import Displacement
from everystop.core.errors import RequestError
from everystop.core.events import (
    ArrivalEvent,
    BlockEvent,
    Event,
    FinishEvent,
    LineEvent,
    RefuseEvent,
    StepEvent,
    WaitReason,
)
from everystop.core.fitting import check_fits
from everystop.core.integrity import check_scheduler
from everystop.core.keep_order import KeepOrder
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.pace import Pace
from everystop.core.plan import NO_TOKEN_LEFT, StepPlan, StepResult
from everystop.core.policy.base import Policy, SlotUse, View
from everystop.core.request import FinishReason, Request, RequestState
from everystop.core.roster import Roster
from everystop.core.rows import Row
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepTimeModel


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
        view = View(
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
        self._keep_order = KeepOrder(policy, limits.max_preemptions)
        self.roster = Roster(self.batch, policy, self._keep_order, view)
        self._siblings = self.roster.siblings
        self.displacement = Displacement(self.roster, self.batch, policy, self._keep_order)
        has_targets = type(policy).step_target_ns is not Policy.step_target_ns
        self._pace = Pace(step_times) if has_targets or limits.target_itl_ns is not None else None
        self._dealer = Dealer(limits, self.batch, policy, self._keep_order, self._pace)
        self._boarding = Boarding(
            self.roster,
            self.batch,
            policy,
            keep_order=self._keep_order,
            displacement=self.displacement,
            dealer=self._dealer,
            admission=self.admission,
        )
        self._next_step_id = 0
        self._charges = type(policy).charge is not Policy.charge  # most do not, and a call a row costs

    @property
    def requests(self) -> dict[int, Request]:
        """Requests that have arrived and have not ended, by id."""
        return self.roster.requests

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
        return self.roster.num_waiting

    @property
    def num_preemptions(self) -> int:
        """How often a request has lost its place, in all."""
        return self.displacement.num_preemptions

    @property
    def has_work(self) -> bool:
        """Some request is not finished, or the runner has not been told of all that ended."""
        return bool(self.roster.requests or self.batch.has_released or self.batch.held)

    def take_events(self) -> list[Event]:
        """Events since the last call of this or of `update`."""
        return self.roster.take_events()

    def block_event(self, now_ns: int) -> BlockEvent:
        """Who holds which blocks; changes nothing, and is not one of the events that `take_events` returns."""
        pool = self.kv.pool
        return BlockEvent(now_ns, self._next_step_id - 1, tuple(pool.ref_count), pool.cached, self.batch.tables)

    def line_event(self, num: int, now_ns: int) -> LineEvent:
        """Who of the first `num` boards in which order; changes nothing, as `block_event`."""
        ids = tuple(request.request_id for request in self.roster.line(num, now_ns))
        return LineEvent(now_ns, self._next_step_id - 1, ids)

    def check_integrity(self) -> None:
        """Assert every invariant; called after each step in tests and in the simulator, never on the hot path."""
        check_scheduler(self)

    def add(self, request: Request, now_ns: int) -> None:
        """Take a request; raises RequestError, and records it, if an empty system could not serve the request, or if
        the policy refuses it.
        """
        assert request.request_id not in self.requests
        try:
            self._check_fits(request)
            if not self._siblings.has(request.group_id):
                self.policy.check_add(request, self.roster.look(now_ns))
        except RequestError as error:
            self._refuse(request, error, now_ns)
            raise
        self.roster.events.append(ArrivalEvent.of(request, now_ns))
        self.roster.enter(request, now_ns)

    def note_refusal(self, request: Request, error: RequestError, now_ns: int) -> None:
        """Record that whoever asks has refused a request before it came here."""
        self._refuse(request, error, now_ns)

    def _refuse(self, request: Request, error: RequestError, now_ns: int) -> None:
        self.roster.events.append(RefuseEvent(now_ns, request.request_id, type(error).__name__, request.tenant))

    def _check_fits(self, request: Request) -> None:
        params = request.params
        request.max_tokens = check_fits(
            request.num_prompt_tokens, params.max_tokens, self.limit_tokens, min_tokens=params.min_tokens
        )

    def abort(self, request_id: int, now_ns: int) -> bool:
        """End a request in whatever state it is; False if it is unknown or already finished."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT, "", now_ns, self._next_step_id - 1)
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
        plan.released = self.batch.take_released()
        guest = self.displacement.make_room(plan, now_ns)
        num_displaced = len(plan.preempted)
        draft, prefilling = self._dealer.deal_decodes(plan, guest, self.roster.look(now_ns))
        may_board = self.roster.num_waiting > 0 and bool(self.batch.free_slots)
        self._dealer.deal_chunks(draft, prefilling, may_board=may_board)
        self.displacement.take_blocks(draft)
        if len(plan.preempted) > num_displaced:
            self.roster.note_wait(None, WaitReason.AFTER_PREEMPT, now_ns)
        else:
            self._boarding.admit(draft)
        riders = draft.write_rows()
        if plan.rows and self.batch.held:
            self._write_padded_rows(plan, riders)
        if not plan.is_noop:
            time = draft.budget.time
            promise = (0, 0) if time is None else (time.target_ns, round(time.predicted_ns))
            self.batch.outstanding.append(Outstanding(plan, now_ns, riders, [], *promise, draft.num_recomputed_tokens))
        return plan

    def _end_batch(self, now_ns: int) -> None:
        """Give held slots back once the policy says that their batch has ended."""
        if self.batch.held and self.policy.batch_ended(self.roster.look(now_ns)):
            self.batch.free_held()

    def _write_padded_rows(self, plan: StepPlan, riders: Riders) -> None:
        """Under static-padded, finished rows go on decoding until the whole batch is done, as in a padded `generate()`.
        Without a free block, or at the longest length, a row computes its last position again.
        """
        room = self.limits.max_num_batched_tokens - plan.num_tokens
        for request in list(self.batch.held.values())[:room]:
            if request.block_table:
                if request.num_computed_tokens < self.limit_tokens and self.batch.grow(request, plan):
                    request.num_computed_tokens += 1
                plan.rows.append(Row(request.request_id, request.num_computed_tokens - 1, 1, 0, 0))
                riders.append(request, -1)
                request.last_served_step = plan.step_id
                plan.num_padded_rows += 1

    def update(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[Event]:
        """Take a step's result back: append tokens, finish, free. Returns all events since the last call.

        Whatever came for those who have ended since the plan was made is dropped, from `result.prompt_logprobs` too.
        """
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
                if epoch >= 0 and isinstance(out, str) and out != NO_TOKEN_LEFT:
                    self.batch.withdraw(request, outstanding)
                num_wasted += 1
                accepted.append(())
                result.prompt_logprobs.pop(request.request_id, None)
                continue
            if request.epoch == epoch:
                request.num_computed_tokens += num_tokens
                request.num_in_flight -= num_tokens
            if logits_from < num_tokens:
                request.num_pending_samples -= 1
            if out == NO_TOKEN_LEFT:
                self._finish(request, FinishReason.STOP, NO_TOKEN_LEFT, now_ns, plan.step_id)
                accepted.append(())
            elif isinstance(out, str):
                self.batch.withdraw(request, outstanding)
                self._finish(request, FinishReason.ERROR, out, now_ns, plan.step_id)
                accepted.append(())
            else:
                accepted.append(self._accept(request, out, num_tokens, plan.step_id, result, now_ns))
        self.batch.release_deferred(outstanding)
        if self._pace is not None:
            is_overlapped = bool(self.batch.outstanding)
            self._pace.learn(outstanding, result.execute_ns, now_ns, is_overlapped=is_overlapped)
            self.roster.view.step_times = self._pace.model
        self.roster.events.append(self._step_event(outstanding, result, accepted, num_wasted, now_ns))
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
            self.roster.num_waiting,
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
        self,
        request: Request,
        tokens: tuple[int, ...],
        num_tokens: int,
        step_id: int,
        result: StepResult,
        now_ns: int,
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
        if self._siblings.has_parked(request) and request.num_computed_tokens >= request.num_prompt_tokens - 1:
            self.roster.unpark(request, now_ns)
        if not tokens and request.is_prefilled:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(request, reason, detail, now_ns, step_id)
        return tokens[:num_accepted]

    def _finish(self, request: Request, reason: FinishReason, detail: str | int, now_ns: int, step_id: int) -> None:
        """The only way out: exactly one terminal event, with the step that brought it, or the last one planned where
        none did; slot, blocks, group and policy forget the request.
        """
        slot = request.slot
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        if request.request_id in self.batch.running:
            self._alight(request)
        self.roster.leave(request, now_ns)
        if self.admission is not None and reason in (FinishReason.STOP, FinishReason.LENGTH) and request.max_tokens:
            self.admission.lengths.add(request.num_output_tokens)
        self.roster.events.append(FinishEvent.of(request, now_ns, step_id, slot, reason, detail))

    def _alight(self, request: Request) -> None:
        """A running request that has ended leaves, or, under request-level batching, holds its slot."""
        slot_use = self.policy.slot_use
        completed = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if completed and slot_use is not SlotUse.FREE:
            self.batch.hold(request, padded=slot_use is SlotUse.PADDED and request.num_output_tokens > 0)
        else:
            self.batch.end(request)
