"""Builders, and a harness that drives the step loop and checks every invariant after each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.core.hash_model import EOS, STEP_NS, HashModelRunner, LateRunner, Solo, ends_stop_string, solo

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
from everystop.core.limits import Limits
from everystop.core.plan import StepPlan, StepResult, TokenLogprobs
from everystop.core.policy import AGEING_NS, Policy, PolicySettings, Share, Targets
from everystop.core.policy import make_policy as make_core_policy
from everystop.core.request import FinishReason, Request, RequestState, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepTimeModel
from everystop.engine.loop import StepLoop, Turn

SHARES = {
    "b": Share(2.0, 2, max_queued=4, ttft_ns=30 * STEP_NS),
    "c": Share(0.5, token_rate=400.0, kv_share=0.4),
}
QUANTUM = 50
TARGETS = Targets(ttft_ns=12 * STEP_NS)


def make_policy(name: str, batch_wait_ns: int = 0, ageing_ns: int = AGEING_NS) -> Policy:
    """A policy by name; tenants b and c have limits of every kind under the fair ones, and b has more time under
    `deadline`.
    """
    return make_core_policy(
        name,
        PolicySettings(
            batch_wait_ns=batch_wait_ns, ageing_ns=ageing_ns, shares=SHARES, quantum=QUANTUM, targets=TARGETS
        ),
    )


def make_request(request_id: int, prompt: int | Sequence[int] = 8, **fields: Any) -> Request:
    """A request; `prompt` is a length (its tokens are its own then) or tokens; `fields` are its own or its params'."""
    own = range(1000 * request_id, 1000 * request_id + prompt) if isinstance(prompt, int) else prompt
    of_request = {name: fields.pop(name) for name in tuple(fields) if name in _REQUEST_FIELDS}
    fields.setdefault("temperature", 0.0)
    return Request(request_id, list(own), SamplingParams(**fields), **of_request)


_REQUEST_FIELDS = {
    "arrival_ns",
    "eos_token_ids",
    "group_id",
    "choice_index",
    "tenant",
    "priority",
    "ttft_target_ns",
    "itl_target_ns",
    "cache_salt",
    "adapter",
    "block_keys",
}


def make_scheduler(
    *,
    policy: str | Policy = "continuous",
    num_blocks: int = 64,
    block_size: int = 16,
    prefix_caching: bool = True,
    batch_wait_ns: int = 0,
    ageing_ns: int = AGEING_NS,
    step_times: StepTimeModel = UNKNOWN_STEP_TIMES,
    **limits: Any,
) -> Scheduler:
    """A scheduler over a small pool; `limits` are fields of `Limits`."""
    kv = KVCache(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=prefix_caching)
    if isinstance(policy, str):
        policy = make_policy(policy, batch_wait_ns, ageing_ns)
    return Scheduler(Limits(**limits), kv, policy, step_times)


def state_of(request: Request | None) -> str:
    """The state of a request as the coverage counts it; "in flight" is a row on its way whatever else holds."""
    if request is None or request.state is RequestState.FINISHED:
        return "finished or unknown"
    if request.state is not RequestState.RUNNING:
        return str(request.state)
    if request.num_in_flight:
        return "in flight"
    return "running-prefill" if request.num_remaining > 1 else "running-decode"


class Harness:
    """A scheduler, the hash model and the step loop in virtual time: a step takes 1 ms and is checked.

    It keeps what a client would have received, and compares it with the oracle when the request ends. `is_late`
    executes each step only when its result is waited for, as a GPU may.
    """

    def __init__(
        self, scheduler: Scheduler, *, depth: int = 0, is_late: bool = False, is_checking: bool = True
    ) -> None:
        self.scheduler = scheduler
        self.now_ns = 0
        self.runner = HashModelRunner(
            num_blocks=scheduler.kv.pool.num_blocks,
            block_size=scheduler.kv.block_size,
            before_execute=self._before_execute,
        )
        runner = LateRunner(self.runner) if is_late else self.runner
        self.loop = StepLoop(scheduler, runner, lambda: self.now_ns, depth=depth, inspect=self._find_stops)
        self.requests: dict[int, Request] = {}
        self.received: dict[int, list[int]] = {}
        self.scores: dict[int, list[TokenLogprobs]] = {}
        self.finished: dict[int, FinishEvent] = {}
        self.refused: set[int] = set()
        self.plans: list[StepPlan] = []
        self.events: list[Event] = []
        self.counts: Counter[str] = Counter()
        self.abort_before_execution: list[int] = []
        self._solo: dict[int, Solo] = {}
        self._is_checking = is_checking
        self._counters = (0, 0)
        self._waiting_since: dict[int, int] = {}
        self._computed_to: dict[int, int] = {}  # the furthest position that a row of a request has reached

    # ------------------------------------------------------------------ drive

    def add(self, request: Request) -> Request:
        """Add one request; a refusal propagates after its event has been taken."""
        self.requests[request.request_id] = request
        request.arrival_ns = self.now_ns
        self.received[request.request_id] = []
        self.scores[request.request_id] = []
        prompt = list(request.token_ids)
        try:
            self.scheduler.add(request, self.now_ns)
        except Exception:
            self._take(self.scheduler.take_events())
            raise
        self._solo[request.request_id] = solo(
            prompt,
            request.params,
            limit_tokens=self.scheduler.limit_tokens,
            choice_index=request.choice_index,
            eos_token_ids=request.eos_token_ids,
        )
        return request

    def add_group(self, first_id: int, prompt: int | Sequence[int], n: int, **fields: Any) -> list[Request]:
        """Add the n choices of one client request."""
        tokens = list(range(1000 * first_id, 1000 * first_id + prompt)) if isinstance(prompt, int) else prompt
        return [
            self.add(make_request(first_id + k, tokens, n=n, group_id=first_id, choice_index=k, **fields))
            for k in range(n)
        ]

    def abort(self, request_id: int) -> bool:
        """Abort now, once more for good measure, and check that nothing broke."""
        request = self.scheduler.requests.get(request_id)
        self.counts[f"aborts while {state_of(request)}"] += 1
        known = self.scheduler.abort(request_id, self.now_ns)
        assert known == (request is not None)
        assert not self.scheduler.abort(request_id, self.now_ns), "a second abort changed something"
        self._take(self.scheduler.take_events())
        if self._is_checking:
            self.scheduler.check_integrity()
        return known

    def turn(self) -> Turn:
        """One turn of the loop, and all checks."""
        turn = self.loop.turn()
        if turn.is_idle:
            self.now_ns = max(self.now_ns + STEP_NS, turn.wake_at_ns or 0)
        if turn.result is not None:
            self._take_scores(turn.result)
        self._take(turn.events)
        if self._is_checking:
            self._check(turn)
        return turn

    def run(self, max_turns: int = 10_000) -> int:
        """Turn until no work is left; returns the number of plans with rows. Fails if `max_turns` do not suffice."""
        before = sum(1 for plan in self.plans if plan.rows)
        for _ in range(max_turns):
            if not self.scheduler.has_work:
                break
            self.turn()
        assert not self.scheduler.has_work, f"still at work after {max_turns} turns"
        self.turn()  # takes back what is on its way at depth 1
        self.check_drained()
        return sum(1 for plan in self.plans if plan.rows) - before

    def _before_execute(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.now_ns += STEP_NS
        for request_id in self.abort_before_execution:
            self.abort(request_id)
        self.abort_before_execution.clear()

    def _find_stops(self, plan: StepPlan, result: StepResult) -> None:
        for row, tokens in zip(plan.rows, result.rows, strict=True):
            if isinstance(tokens, str) or not self.requests[row.request_id].params.stop:
                continue
            if any(map(ends_stop_string, tokens)):
                result.stopped[row.request_id] = "stop"

    # ------------------------------------------------------------------ check

    def _take(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, StepEvent):
                self._take_step(event)
            elif isinstance(event, FinishEvent):
                self._take_finish(event)
            elif isinstance(event, AdmitEvent):
                self.counts["prefix hits"] += event.num_cached_tokens > 0
                self.counts["forks"] += event.forked_from >= 0
                self.counts["resumes"] += event.resumed
            elif isinstance(event, PreemptEvent):
                self.counts["preemptions"] += 1
                request = self.requests[event.request_id]
                self.counts["preempted while scoring"] += 0 < request.num_planned_scores < request.num_scored_tokens
            elif isinstance(event, WaitEvent):
                self.counts["waits of tenants"] += event.reason is WaitReason.TENANT_LIMIT
            elif isinstance(event, RefuseEvent):
                self.refused.add(event.request_id)
                self.counts[f"refused by {event.code}"] += 1
            elif isinstance(event, ArrivalEvent):
                assert event.request_id not in self.finished

    def _take_step(self, event: StepEvent) -> None:
        self.counts["steps"] += 1
        self.counts["wasted rows"] += event.num_wasted_rows
        assert event.num_recomputed_tokens == self._count_recomputed(event.plan)
        self.counts["recomputed tokens"] += event.num_recomputed_tokens
        for row, tokens in zip(event.plan.rows, event.tokens, strict=True):
            received = self.received[row.request_id]
            received += tokens
            expected = self._solo[row.request_id].token_ids
            assert received == expected[: len(received)], f"request {row.request_id} diverged from what it yields alone"

    def _take_scores(self, result: StepResult) -> None:
        """Each comes once, in order, before any token, and to nobody who has ended."""
        for request_id, scores in result.prompt_logprobs.items():
            assert request_id not in self.finished
            assert not self.received[request_id]
            received = self.scores[request_id]
            received += scores
            expected = self._solo[request_id].scores
            assert received == expected[: len(received)], f"request {request_id} scores its prompt otherwise alone"
            self.counts["scored tokens"] += len(scores)
            self.counts["prompts scored in pieces"] += len(received) not in (len(scores), len(expected))

    def _count_recomputed(self, plan: StepPlan) -> int:
        num_recomputed = 0
        for row in plan.rows[: len(plan.rows) - plan.num_padded_rows]:
            before, end = self._computed_to.get(row.request_id, 0), row.start + row.num_tokens
            num_recomputed += max(0, min(before, end) - row.start)
            self._computed_to[row.request_id] = max(before, end)
        return num_recomputed

    def _take_finish(self, event: FinishEvent) -> None:
        request_id = event.request_id
        assert request_id not in self.finished, "a second terminal event"
        self.finished[request_id] = event
        self.counts[f"finished by {event.reason}"] += 1
        request = self.requests[request_id]
        assert event.reason is request.finish_reason
        assert event.num_output_tokens == request.num_output_tokens

    def _check(self, turn: Turn) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        if turn.plan is None and scheduler.requests:  # I5: an idle turn with work left must say when to come back
            assert turn.wake_at_ns is not None, "nothing was done though requests are left"
        counters = (scheduler.kv.pool.num_evicted, scheduler.num_preemptions)
        assert counters >= self._counters
        self._counters = counters
        for event in turn.events:
            if isinstance(event, StepEvent):
                self._check_gauges(event)

    def _check_gauges(self, event: StepEvent) -> None:
        scheduler = self.scheduler
        pool = scheduler.kv.pool
        assert event.num_running == sum(r.state == "running" for r in scheduler.requests.values())
        assert event.num_waiting == sum(r.state != "running" for r in scheduler.requests.values())
        assert event.num_free_blocks == sum(count == 0 for count in pool.ref_count)
        assert event.num_cached_blocks == sum(
            count == 0 and pool.is_published(block) for block, count in enumerate(pool.ref_count)
        )

    def check_drained(self) -> None:
        """After the last request: every block free, every slot free, one end each, every answer the oracle's."""
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not scheduler.running
        assert not scheduler.held
        assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
        assert not self.runner.known_requests
        assert self.finished.keys() | self.refused == self.requests.keys()
        for request_id, event in self.finished.items():
            expected = self._solo[request_id]
            if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert self.received[request_id] == expected.token_ids
                assert event.reason is expected.reason
                assert self.scores[request_id] == expected.scores
            assert len(self.received[request_id]) == event.num_output_tokens

    # ---------------------------------------------------------------- queries

    def output(self, request_id: int) -> list[int]:
        """Tokens that the client has received."""
        return self.received[request_id]

    def steps_of(self, request_id: int) -> list[int]:
        """Indices of the executed plans that brought the request a token."""
        steps = [e for e in self.events if isinstance(e, StepEvent)]
        return [
            i
            for i, event in enumerate(steps)
            for row, tokens in zip(event.plan.rows, event.tokens, strict=True)
            if row.request_id == request_id and tokens
        ]

    def num_computed_tokens(self, request_id: int | None = None) -> int:
        """Tokens computed in all executed plans, of one request or of all."""
        return sum(
            row.num_tokens
            for plan in self.plans
            for row in plan.rows
            if request_id is None or row.request_id == request_id
        )


def eos() -> tuple[int, ...]:
    """The end-of-sequence ids of the hash model."""
    return (EOS,)
