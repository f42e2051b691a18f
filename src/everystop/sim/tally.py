"""Sums up a simulated run from its events, in memory that depends on what runs at once, not on what has run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from everystop.core.events import ArrivalEvent, Event, FinishEvent, RefuseEvent, StepEvent
from everystop.core.request import FinishReason

NS_PER_S, NS_PER_MS = 10**9, 10**6
EXACT_BITS = 9
PERCENTILES = (50, 90, 95, 99)


class Histogram:
    """Counts of durations in buckets 1/256 to 1/512 of their value wide; a percentile is a bucket's middle, so it is
    within 0.2 %.

    A value keeps its 9 highest bits: 1,000 (0b1111101000) is counted as 1,000 to 1,001.
    """

    def __init__(self) -> None:
        self.num = 0
        self.total_ns = 0
        self.max_ns = 0
        self._buckets: dict[tuple[int, int], int] = {}

    def add(self, ns: int, num: int = 1) -> None:
        """Count a duration `num` times."""
        shift = max(0, ns.bit_length() - EXACT_BITS)
        bucket = (shift, ns >> shift)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + num
        self.num += num
        self.total_ns += ns * num
        self.max_ns = max(self.max_ns, ns)

    def percentiles_ns(self, shares: Iterable[int]) -> list[int]:
        """The values that these percentages (ascending) of all do not exceed; 0 of nothing."""
        found, seen = [], 0
        buckets = iter(sorted(self._buckets.items()))
        middle = 0
        for share in shares:
            rank = max(1, -(-self.num * share // 100))
            while seen < rank and (item := next(buckets, None)) is not None:
                (shift, high), num = item
                seen += num
                middle = (high << shift) + ((1 << shift) >> 1)
            found.append(min(middle, self.max_ns))
        return found

    def in_ms(self) -> dict[str, float]:
        """Mean, percentiles and maximum in milliseconds."""
        percentiles = self.percentiles_ns(PERCENTILES)
        figures = {f"p{share}": ns / NS_PER_MS for share, ns in zip(PERCENTILES, percentiles, strict=True)}
        mean = self.total_ns / self.num / NS_PER_MS if self.num else 0.0
        return {name: round(ms, 3) for name, ms in {"mean": mean, **figures, "max": self.max_ns / NS_PER_MS}.items()}


@dataclass(slots=True)
class Totals:
    """Counts and durations of a group of requests."""

    num_requests: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)

    def figures(self) -> dict[str, Any]:
        """As plain data; the hit rate is the share of prompt tokens, of requests that finished, found in the cache."""
        return {
            "num_requests": self.num_requests,
            "num_finished": self.num_finished,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_preemptions": self.num_preemptions,
            "prefix_hit_rate": round(self.num_cached_tokens / max(1, self.num_prompt_tokens), 6),
            "ttft_ms": self.ttft.in_ms(),
            "tpot_ms": self.tpot.in_ms(),
            "e2e_ms": self.e2e.in_ms(),
        }


@dataclass(slots=True)
class _Ride:
    """A request under way: when it arrived, and when its first and its latest token came (-1: none yet)."""

    arrival_ns: int
    tenant: Totals
    first_ns: int = -1
    last_ns: int = -1


class Tally:
    """Totals of a run, of all requests and by tenant, over all replicas; request ids are unique across them.

    `request_ns` is spent on every request outside the scheduler, so it is a part of its TTFT and E2E.
    """

    def __init__(self, request_ns: int = 0) -> None:
        self._request_ns = request_ns
        self.everyone = Totals()
        self.tenants: dict[str, Totals] = {}
        self.itl = Histogram()
        self.num_refused = 0
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_recomputed_tokens = 0
        self.end_ns = 0
        self._rides: dict[int, _Ride] = {}

    def note(self, events: Iterable[Event]) -> int:
        """Take in the events of one turn; returns how many requests ended in it, which is told before its step."""
        ended: list[FinishEvent] = []
        for event in events:
            if isinstance(event, StepEvent):
                self._step(event)
            elif isinstance(event, FinishEvent):
                ended.append(event)
            elif isinstance(event, ArrivalEvent):
                self._arrive(event)
            elif isinstance(event, RefuseEvent):
                self.num_refused += 1
        for finish in ended:
            self._finish(finish)
        return len(ended)

    def _arrive(self, event: ArrivalEvent) -> None:
        tenant = self.tenants.get(event.tenant)
        if tenant is None:
            tenant = self.tenants[event.tenant] = Totals()
        self._rides[event.request_id] = _Ride(event.now_ns, tenant)
        self.everyone.num_requests += 1
        tenant.num_requests += 1

    def _step(self, event: StepEvent) -> None:
        """Count a step's tokens, and the gap that each leaves behind the one before it."""
        now_ns, plan, rides = event.now_ns, event.plan, self._rides
        if not plan.rows:
            return
        self.num_steps += 1
        self.num_computed_tokens += plan.num_tokens
        self.num_recomputed_tokens += event.num_recomputed_tokens
        gaps: dict[int, int] = {}
        for row, tokens in zip(plan.rows, event.tokens, strict=True):
            if tokens:
                ride = rides[row[0]]
                last_ns = ride.last_ns
                if last_ns < 0:
                    self._first_token(ride, now_ns)
                else:
                    gaps[last_ns] = gaps.get(last_ns, 0) + 1
                ride.last_ns = now_ns
        for last_ns, num in gaps.items():
            self.itl.add(now_ns - last_ns, num)

    def _first_token(self, ride: _Ride, now_ns: int) -> None:
        ride.first_ns = now_ns
        ttft_ns = now_ns - ride.arrival_ns + self._request_ns
        self.everyone.ttft.add(ttft_ns)
        ride.tenant.ttft.add(ttft_ns)

    def _finish(self, event: FinishEvent) -> None:
        ride = self._rides.pop(event.request_id)
        self.end_ns = max(self.end_ns, event.now_ns)
        num_gaps = event.num_output_tokens - 1
        for totals in (self.everyone, ride.tenant):
            totals.num_finished += event.reason in (FinishReason.STOP, FinishReason.LENGTH)
            totals.num_prompt_tokens += event.num_prompt_tokens
            totals.num_output_tokens += event.num_output_tokens
            totals.num_cached_tokens += event.num_cached_tokens
            totals.num_preemptions += event.num_preemptions
            totals.e2e.add(event.now_ns - ride.arrival_ns + self._request_ns)
            if num_gaps > 0:
                totals.tpot.add((ride.last_ns - ride.first_ns) // num_gaps)

    def figures(self) -> dict[str, Any]:
        """The results as plain data, the same bytes for the same run. Durations in milliseconds."""
        seconds = self.end_ns / NS_PER_S
        everyone = self.everyone
        return {
            "num_refused": self.num_refused,
            "num_steps": self.num_steps,
            "duration_s": round(seconds, 6),
            "requests_per_s": round(everyone.num_finished / seconds, 3) if seconds else 0.0,
            "output_tokens_per_s": round(everyone.num_output_tokens / seconds, 3) if seconds else 0.0,
            "num_computed_tokens": self.num_computed_tokens,
            "num_recomputed_tokens": self.num_recomputed_tokens,
            "recomputed_share": round(self.num_recomputed_tokens / max(1, self.num_computed_tokens), 6),
            **everyone.figures(),
            "itl_ms": self.itl.in_ms(),
            "tenants": {name: totals.figures() for name, totals in sorted(self.tenants.items())},
        }
