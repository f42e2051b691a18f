"""Counters, gauges and histograms as a view of `core.events`; knows nothing of who reads them.

The engine's thread only hands event lists over; they are counted where and when somebody looks, so that no arithmetic
here can slow or stop a step.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence

from everystop.core.durations import NS_PER_S
from everystop.core.events import (
    AdmitEvent,
    ArrivalEvent,
    Event,
    FinishEvent,
    LedgerEvent,
    PreemptEvent,
    RefuseEvent,
    StepEvent,
    WaitEvent,
    WaitReason,
)
from everystop.core.request import FinishReason
from everystop.observe.buckets import TTFT_S
from everystop.observe.causes import Cause
from everystop.observe.histogram import Histogram
from everystop.observe.history import Client
from everystop.observe.ledger import LedgerCounts
from everystop.observe.life import Life
from everystop.observe.request_counts import COMPLETE, OpenRequest, RequestCounts
from everystop.observe.step_counts import StepCounts, StepRows

logger = logging.getLogger(__name__)

OTHERS = "other"  # the tenants whom nobody has named


class TenantCounts:
    """What is counted apart for one tenant, or for all whom nobody has named."""

    __slots__ = ("num_generation_tokens", "num_prompt_tokens", "num_refused", "ttft")

    def __init__(self) -> None:
        self.num_prompt_tokens = 0  # of requests that have brought a token
        self.num_generation_tokens = 0
        self.num_refused = 0
        self.ttft = Histogram(TTFT_S, NS_PER_S)


class Metrics:
    """All that is counted; `receive` may be called from any thread, everything else from one.

    `tenants` are told apart, and all others counted under `OTHERS`, so that clients who name themselves cannot make
    the counts grow. Without tenants nobody is told apart. Counters never fall. What cannot be counted is a fault of
    ours: it is logged once, and the rest goes on (`num_failures`).
    """

    def __init__(
        self,
        num_blocks: int,
        tenants: Sequence[str] = (),
        *,
        block_size: int = 32,
        num_slots: int = 64,
        max_model_len: int = 8192,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tenants = {name: TenantCounts() for name in (*tenants, OTHERS)} if tenants else {}
        self.requests = RequestCounts(max_model_len)
        self.steps = StepCounts(num_slots)
        self.ledger = LedgerCounts()
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_computed_prompt_tokens = 0
        self.num_preemptions = 0
        self.num_preempted_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_restored_tokens = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_evicted_blocks = 0
        self.num_failures = 0
        self.finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self.refused: Counter[str] = Counter()
        self.blocked: Counter[str] = Counter({each.value: 0 for each in WaitReason if each is not WaitReason.BEHIND})
        self.blame_ns: Counter[Cause] = Counter(dict.fromkeys(Cause, 0))
        self.num_explained = 0
        self.num_unexplained = 0
        self._num_free_blocks = num_blocks
        self._num_cached_blocks = 0
        self._open: dict[int, OpenRequest] = {}
        self._clients: dict[int, Client] = {}  # of requests that the engine has not taken yet
        self._inbox: deque[list[Event]] = deque()

    def receive(self, events: list[Event]) -> None:
        """Keep events until someone looks; one append."""
        self._inbox.append(events)

    def came(self, client: Client) -> None:
        """An HTTP request has been submitted; to be called before `catch_up` can meet its arrival."""
        self._clients.update(dict.fromkeys(client.request_ids, client))

    def explained(self, life: Life | None) -> None:
        """A request was answered: where its time went, or None where nobody has found out."""
        if life is None:
            self.num_unexplained += 1
            return
        self.num_explained += 1
        self.blame_ns.update(life.ns_by_cause())

    def catch_up(self) -> None:
        """Count all that has been received."""
        while True:
            try:
                events = self._inbox.popleft()
            except IndexError:
                return
            try:
                self._count_all(events)
            except Exception:
                self.num_failures += 1
                if self.num_failures == 1:
                    logger.exception("events could not be counted, so metrics are wrong from now on; serving goes on")

    def forget_running(self) -> None:
        """The engine has died: nothing runs or waits any more, and nothing is kept."""
        self.catch_up()
        self._open.clear()
        self._clients.clear()
        self.requests.forget_open()
        self._num_free_blocks, self._num_cached_blocks = self.num_blocks, 0

    @property
    def num_steps(self) -> int:
        """Steps that computed something."""
        return self.steps.num_steps

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return sum(1 for request in self._open.values() if request.is_running)

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and do not run."""
        return len(self._open) - self.num_running

    def num_by_tenant(self, *, is_running: bool) -> Counter[str]:
        """Requests that hold a slot, or those that wait, by the label of their tenant."""
        counts = Counter(dict.fromkeys(self.tenants, 0))
        counts.update(request.tenant for request in self._open.values() if request.is_running == is_running)
        return counts

    @property
    def oldest_ns(self) -> int | None:
        """Since when the oldest of those has been waiting that have not boarded yet; None if there is none."""
        return min((each.submitted_ns for each in self._open.values() if each.num_cached < 0), default=None)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that requests hold; cached blocks that nobody holds count as free."""
        return self.kv_blocks["used"] / self.num_blocks

    @property
    def kv_blocks(self) -> dict[str, int]:
        """Blocks that requests hold, that are kept for a prefix to match, and that hold nothing."""
        num_used = self.num_blocks - self._num_free_blocks if self._open else 0
        num_cached = self._num_cached_blocks
        return {"used": num_used, "cached": num_cached, "blank": self.num_blocks - num_used - num_cached}

    @property
    def occupancy(self) -> float:
        """Share of the slots that computed something in the last step; 0 when nobody is there."""
        return self.steps.occupancy if self._open else 0.0

    def _count_all(self, events: list[Event]) -> None:
        """An end that a step has brought stands before it, and is counted after it; a client leaves at any time."""
        ends: list[FinishEvent] = []
        for event in events:
            if isinstance(event, StepEvent):
                self._count_step(event, ends)
            elif isinstance(event, FinishEvent) and event.reason is not FinishReason.ABORT:
                ends.append(event)
            else:
                self._count(event)
        for end in ends:
            self._count_end(end)

    def _count(self, event: Event) -> None:
        match event:
            case ArrivalEvent():
                self._count_arrival(event)
            case AdmitEvent():
                self._count_admission(event)
            case PreemptEvent():
                self._count_preemption(event)
            case RefuseEvent():
                self._count_refusal(event)
            case FinishEvent():
                self._count_end(event)
            case LedgerEvent():
                self.ledger.count(event)
            case WaitEvent():
                if event.reason is not WaitReason.BEHIND:
                    self.blocked[event.reason] += 1

    def _label(self, tenant: str) -> str:
        return tenant if tenant in self.tenants else OTHERS

    def _count_arrival(self, event: ArrivalEvent) -> None:
        client = self._clients.pop(event.request_id, None)
        request = self._open[event.request_id] = OpenRequest(event, self._label(event.tenant), client)
        self.requests.note_arrival(request)
        if request.is_first_choice:
            self.num_prompt_tokens += event.num_prompt_tokens

    def _count_admission(self, event: AdmitEvent) -> None:
        request = self._open.get(event.request_id)
        if request is None:
            return
        request.is_running = True
        if event.resumed:
            self.num_restored_tokens += event.num_cached_tokens
        if event.resumed or request.num_cached >= 0:
            return
        request.num_cached = event.num_cached_tokens
        self.requests.note_admission(request, event.now_ns)
        if event.forked_from < 0:
            self.num_prefix_queries += event.num_tokens
            self.num_prefix_hits += event.num_cached_tokens

    def _count_preemption(self, event: PreemptEvent) -> None:
        self.num_preemptions += 1
        self.num_preempted_tokens += event.num_lost_tokens
        request = self._open.get(event.request_id)
        if request is not None:
            request.is_running = False

    def _count_refusal(self, event: RefuseEvent) -> None:
        self._clients.pop(event.request_id, None)
        self.refused[event.code] += 1
        if self.tenants:
            self.tenants[self._label(event.tenant)].num_refused += 1

    def _count_step(self, event: StepEvent, ends: list[FinishEvent]) -> None:
        self._num_free_blocks = event.num_free_blocks
        self._num_cached_blocks = event.num_cached_blocks
        self.num_recomputed_tokens += event.num_recomputed_tokens
        self.num_evicted_blocks = max(self.num_evicted_blocks, event.num_evicted_blocks)
        num_held = event.num_held
        if num_held:  # those whom this step ended hold their slots only from now on
            num_held -= sum(end.slot >= 0 and end.reason in COMPLETE for end in ends)
        self.steps.count(event, self._count_rows(event), max(0, num_held))

    def _count_rows(self, event: StepEvent) -> StepRows:
        """The rows that are still somebody's; those of requests that have ended were computed for nothing."""
        now_ns, rows, open_requests = event.now_ns, event.plan.rows, self._open
        num_prefills = num_prefill_tokens = num_decodes = num_single = 0
        gaps: dict[int, int] = {}
        for request_id, start, num, tokens in zip(
            rows.request_ids, rows.starts, rows.nums_tokens, event.tokens, strict=True
        ):
            request = open_requests.get(request_id)
            if request is None:
                continue
            if num == 1 and start >= request.num_prompt:
                num_decodes += 1
            else:
                num_prefills += 1
                num_prefill_tokens += num
                self.num_computed_prompt_tokens += max(0, min(num, request.num_prompt - start))
            if not tokens:
                continue
            last_ns = request.last_token_ns
            if last_ns and len(tokens) == 1 and not self.tenants:  # as `_count_tokens`, without a call for each row
                gaps[now_ns - last_ns] = gaps.get(now_ns - last_ns, 0) + 1
                request.last_token_ns = now_ns
                num_single += 1
            else:
                self._count_tokens(request, now_ns, len(tokens), gaps)
        self.num_generation_tokens += num_single
        for gap_ns, num in gaps.items():
            self.requests.itl.add(gap_ns, num)
        return StepRows(num_prefills, num_prefill_tokens, num_decodes)

    def _count_tokens(self, request: OpenRequest, now_ns: int, num: int, gaps: dict[int, int]) -> None:
        """Tokens of one request; the gap before several that come at once is divided among them."""
        self.num_generation_tokens += num
        last_ns = request.last_token_ns
        if last_ns:
            gap_ns, rest_ns = divmod(now_ns - last_ns, num)
            gaps[gap_ns + rest_ns] = gaps.get(gap_ns + rest_ns, 0) + 1
            if num > 1:
                gaps[gap_ns] = gaps.get(gap_ns, 0) + num - 1
        else:
            self.requests.note_first_token(request, now_ns)
        request.last_token_ns = now_ns
        if self.tenants:
            self._count_for_tenant(self.tenants[request.tenant], request, is_first=not last_ns, num=num)

    def _count_for_tenant(self, counts: TenantCounts, request: OpenRequest, *, is_first: bool, num: int) -> None:
        counts.num_generation_tokens += num
        if is_first:
            counts.ttft.add(request.first_token_ns - request.origin_ns)
            counts.num_prompt_tokens += request.num_prompt * request.is_first_choice

    def _count_end(self, event: FinishEvent) -> None:
        request = self._open.pop(event.request_id, None)
        self.finished[event.reason] += 1
        if request is None:
            return
        if request.num_cached >= 0:  # blocks that became matchable after admission
            self.num_prefix_hits += max(0, event.num_cached_tokens - request.num_cached)
        self.requests.note_end(request, event)
