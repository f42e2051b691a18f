"""Counters, gauges and histograms as a view of `core.events`; knows nothing of who reads them.

The engine's thread only hands event lists over; they are counted where and when somebody looks, so that no arithmetic
here can slow or stop a step.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence

from everystop.core.events import (
    AdmitEvent,
    ArrivalEvent,
    Event,
    FinishEvent,
    PreemptEvent,
    RefuseEvent,
    StepEvent,
)
from everystop.core.request import FinishReason

LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 640,
)  # fmt: skip
ITL_BUCKETS_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1,
    2.5, 5,
)  # fmt: skip
STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
OTHERS = "other"  # the tenants whom nobody has named
STEP_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Histogram:
    """Counts of values by bucket; `bounds` are inclusive upper ends, a last bucket without end follows."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper end, values up to it), as Prometheus wants them."""
        rows, count = [], 0
        for bound, num in zip((*map(str, self._bounds), "+Inf"), self.counts, strict=True):
            count += num
            rows.append((bound, float(count)))
        return rows


class TenantCounts:
    """What is counted apart for one tenant, or for all whom nobody has named."""

    __slots__ = ("num_generation_tokens", "num_prompt_tokens", "num_refused", "ttft")

    def __init__(self) -> None:
        self.num_prompt_tokens = 0  # of requests that have brought a token
        self.num_generation_tokens = 0
        self.num_refused = 0
        self.ttft = Histogram(LATENCY_BUCKETS_S)


class _Life:
    """What is known of a request that has arrived and not ended."""

    __slots__ = ("arrival_ns", "is_first_choice", "is_running", "last_token_ns", "num_cached", "num_prompt", "tenant")

    def __init__(self, event: ArrivalEvent, tenant: str) -> None:
        self.arrival_ns = event.now_ns
        self.is_first_choice = event.choice_index == 0
        self.tenant = tenant
        self.num_prompt = event.num_prompt_tokens
        self.is_running = False
        self.last_token_ns = 0
        self.num_cached = -1  # not admitted yet


class Metrics:
    """All that is counted; `receive` may be called from any thread, everything else from one.

    `tenants` are told apart, and all others counted under `OTHERS`, so that clients who name themselves cannot make
    the counts grow. Without tenants nobody is told apart.
    """

    def __init__(self, num_blocks: int, tenants: Sequence[str] = ()) -> None:
        self.num_blocks = num_blocks
        self.tenants = {name: TenantCounts() for name in (*tenants, OTHERS)} if tenants else {}
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_computed_prompt_tokens = 0
        self.num_preemptions = 0
        self.num_preempted_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_restored_tokens = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_steps = 0
        self.num_evicted_blocks = 0
        self.num_steps_over_target = 0
        self.step_target_s = 0.0
        self.finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self.refused: Counter[str] = Counter()
        self.ttft = Histogram(LATENCY_BUCKETS_S)
        self.itl = Histogram(ITL_BUCKETS_S)
        self.e2e = Histogram(LATENCY_BUCKETS_S)
        self.queue_time = Histogram(LATENCY_BUCKETS_S)
        self.step_time = Histogram(STEP_BUCKETS_S)
        self.step_tokens = Histogram(STEP_TOKEN_BUCKETS)
        self._num_free_blocks = num_blocks
        self._lives: dict[int, _Life] = {}
        self._inbox: deque[list[Event]] = deque()

    def receive(self, events: list[Event]) -> None:
        """Keep events until someone looks; one append."""
        self._inbox.append(events)

    def catch_up(self) -> None:
        """Count all that has been received."""
        while True:
            try:
                events = self._inbox.popleft()
            except IndexError:
                return
            for event in events:
                if not isinstance(event, FinishEvent):
                    self._count(event)
            for event in events:  # ends stand before the step that brought the last token
                if isinstance(event, FinishEvent):
                    self._count_finish(event)

    def forget_running(self) -> None:
        """The engine has died: nothing runs or waits any more."""
        self.catch_up()
        self._lives.clear()

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return sum(1 for life in self._lives.values() if life.is_running)

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and do not run."""
        return len(self._lives) - self.num_running

    def num_by_tenant(self, *, is_running: bool) -> Counter[str]:
        """Requests that hold a slot, or those that wait, by the label of their tenant."""
        counts = Counter(dict.fromkeys(self.tenants, 0))
        counts.update(life.tenant for life in self._lives.values() if life.is_running == is_running)
        return counts

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that requests hold; cached blocks that nobody holds count as free."""
        return 1 - self._num_free_blocks / self.num_blocks if self._lives else 0.0

    def _count(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self._count_step(event)
        elif isinstance(event, ArrivalEvent):
            self._lives[event.request_id] = _Life(event, self._label(event.tenant))
            if event.choice_index == 0:
                self.num_prompt_tokens += event.num_prompt_tokens
        elif isinstance(event, AdmitEvent):
            self._count_admission(event)
        elif isinstance(event, PreemptEvent):
            self.num_preemptions += 1
            self.num_preempted_tokens += event.num_lost_tokens
            with contextlib.suppress(KeyError):
                self._lives[event.request_id].is_running = False
        elif isinstance(event, RefuseEvent):
            self.refused[event.code] += 1
            if self.tenants:
                self.tenants[self._label(event.tenant)].num_refused += 1

    def _label(self, tenant: str) -> str:
        return tenant if tenant in self.tenants else OTHERS

    def _count_step(self, event: StepEvent) -> None:
        self.num_steps += 1
        self._num_free_blocks = event.num_free_blocks
        self.num_recomputed_tokens += event.num_recomputed_tokens
        self.num_evicted_blocks = max(self.num_evicted_blocks, event.num_evicted_blocks)
        self.step_time.add(event.execute_ns / 1e9)
        self.step_target_s = event.target_ns / 1e9 or self.step_target_s
        self.num_steps_over_target += event.predicted_ns > event.target_ns
        now_ns, rows = event.now_ns, event.plan.rows
        for request_id, start, num_tokens, tokens in zip(
            rows.request_ids, rows.starts, rows.nums_tokens, event.tokens, strict=True
        ):
            life = self._lives.get(request_id)
            if life is None:
                continue
            if start < life.num_prompt:
                self.num_computed_prompt_tokens += min(num_tokens, life.num_prompt - start)
            if tokens:
                self._count_tokens(life, now_ns, len(tokens))
        self.step_tokens.add(event.plan.num_tokens)

    def _count_tokens(self, life: _Life, now_ns: int, num: int) -> None:
        self.num_generation_tokens += num
        if self.tenants:
            self._count_for_tenant(self.tenants[life.tenant], life, now_ns, num)
        if life.last_token_ns:
            gap_s = (now_ns - life.last_token_ns) / 1e9 / num
            for _ in range(num):
                self.itl.add(gap_s)
        else:
            self.ttft.add((now_ns - life.arrival_ns) / 1e9)
        life.last_token_ns = now_ns

    def _count_for_tenant(self, counts: TenantCounts, life: _Life, now_ns: int, num: int) -> None:
        counts.num_generation_tokens += num
        if not life.last_token_ns:
            counts.ttft.add((now_ns - life.arrival_ns) / 1e9)
            counts.num_prompt_tokens += life.num_prompt * life.is_first_choice

    def _count_admission(self, event: AdmitEvent) -> None:
        life = self._lives.get(event.request_id)
        if life is None:
            return
        life.is_running = True
        if event.resumed:
            self.num_restored_tokens += event.num_cached_tokens
        if event.resumed or life.num_cached >= 0:
            return
        life.num_cached = event.num_cached_tokens
        self.queue_time.add((event.now_ns - life.arrival_ns) / 1e9)
        if event.forked_from < 0:
            self.num_prefix_queries += event.num_tokens
            self.num_prefix_hits += event.num_cached_tokens

    def _count_finish(self, event: FinishEvent) -> None:
        life = self._lives.pop(event.request_id, None)
        self.finished[event.reason] += 1
        if life is None:
            return
        if life.num_cached >= 0:  # blocks that became matchable after admission
            self.num_prefix_hits += max(0, event.num_cached_tokens - life.num_cached)
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.e2e.add((event.now_ns - life.arrival_ns) / 1e9)
