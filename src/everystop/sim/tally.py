"""Sums up a simulated run from its events, in memory that depends on what runs at once, not on what has run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.core.events import AdmitEvent, ArrivalEvent, Event, FinishEvent, RefuseEvent, StepEvent
from everystop.core.policy.fair import INPUT_COST, OUTPUT_COST
from everystop.core.request import FinishReason

EXACT_BITS = 9
PERCENTILES = (50, 90, 95, 99)
NEVER_NS = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must have to count as good: its first token within `ttft_ns` of its arrival, and each later one
    within `itl_ns` of the one before. None is no demand.
    """

    ttft_ns: int | None = None
    itl_ns: int | None = None

    @property
    def is_given(self) -> bool:
        """There is something to meet."""
        return self.ttft_ns is not None or self.itl_ns is not None


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

    def take(self, other: Histogram) -> None:
        """Count all that another one has counted."""
        for bucket, num in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + num
        self.num += other.num
        self.total_ns += other.total_ns
        self.max_ns = max(self.max_ns, other.max_ns)

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
    """Counts and durations of a group of requests. `service` is what policy `fair` charges for: 1 for a prompt token
    that was computed, when its request boards, and 2 for an output token, when it comes.
    """

    num_requests: int = 0
    num_finished: int = 0
    num_good: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    service: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)
    gaps: dict[int, int] = field(default_factory=dict)  # of the step being noted: number of tokens by time of the last

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
            "itl_ms": self.itl.in_ms(),
            "tpot_ms": self.tpot.in_ms(),
            "e2e_ms": self.e2e.in_ms(),
        }

    def take(self, other: Totals) -> None:
        """Add another group."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in DURATIONS:
            getattr(self, name).take(getattr(other, name))

    def good_share(self) -> float:
        """Share of the requests that were taken which met what was demanded."""
        return round(self.num_good / max(1, self.num_requests), 6)


DURATIONS = ("ttft", "itl", "tpot", "e2e")
COUNTS = tuple(each.name for each in fields(Totals) if each.type == "int")


@dataclass(slots=True)
class _Ride:
    """A request under way: when it arrived, when its first and its latest token came (-1: none yet), and whether a
    token came later than demanded.
    """

    arrival_ns: int
    tenant: Totals
    first_ns: int = -1
    last_ns: int = -1
    is_late: bool = False


class Tally:
    """Totals of a run, of all requests and by tenant, over all replicas; request ids are unique across them.

    `request_ns` is spent on every request outside the scheduler, so it is a part of its TTFT and E2E.
    """

    def __init__(self, slo: Slo | None = None, *, request_ns: int = 0) -> None:
        self._request_ns = request_ns
        self.slo = slo or Slo()
        self.tenants: dict[str, Totals] = {}
        self.num_refused = 0
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_recomputed_tokens = 0
        self.end_ns = 0
        self._itl_limit_ns = NEVER_NS if self.slo.itl_ns is None else self.slo.itl_ns
        self._held: dict[int, int] = {}  # requests that a router kept: when they arrived at it
        self._rides: dict[int, _Ride] = {}

    def everyone(self) -> Totals:
        """All tenants together."""
        totals = Totals()
        for tenant in self.tenants.values():
            totals.take(tenant)
        return totals

    def hold(self, request_id: int, arrival_ns: int) -> None:
        """The request, which will reach a replica later, arrived then."""
        self._held[request_id] = arrival_ns

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
            elif isinstance(event, AdmitEvent):
                self._board(event)
            elif isinstance(event, RefuseEvent):
                self.num_refused += 1
                self._held.pop(event.request_id, None)
        for finish in ended:
            self._finish(finish)
        return len(ended)

    def _arrive(self, event: ArrivalEvent) -> None:
        tenant = self.tenants.get(event.tenant)
        if tenant is None:
            tenant = self.tenants[event.tenant] = Totals()
        arrival_ns = self._held.pop(event.request_id, event.now_ns)
        self._rides[event.request_id] = _Ride(arrival_ns, tenant)
        tenant.num_requests += 1

    def _board(self, event: AdmitEvent) -> None:
        if not event.resumed:
            self._rides[event.request_id].tenant.service += INPUT_COST * (event.num_tokens - event.num_cached_tokens)

    def _step(self, event: StepEvent) -> None:
        """Count a step's tokens, and the gap that each leaves behind the one before it."""
        now_ns, plan, rides = event.now_ns, event.plan, self._rides
        if not plan.rows:
            return
        self.num_steps += 1
        self.num_computed_tokens += plan.num_tokens
        self.num_recomputed_tokens += event.num_recomputed_tokens
        served: list[Totals] = []
        on_time_ns = now_ns - self._itl_limit_ns
        for request_id, tokens in zip(plan.rows.request_ids, event.tokens, strict=True):
            if tokens:
                ride = rides[request_id]
                last_ns = ride.last_ns
                if last_ns < 0:
                    self._first_token(ride, now_ns)
                else:
                    gaps = ride.tenant.gaps
                    if not gaps:
                        served.append(ride.tenant)
                    gaps[last_ns] = gaps.get(last_ns, 0) + 1
                    if last_ns < on_time_ns:
                        ride.is_late = True
                ride.last_ns = now_ns
        for tenant in served:
            self._count_gaps(tenant, now_ns)

    def _first_token(self, ride: _Ride, now_ns: int) -> None:
        ride.first_ns = now_ns
        ttft_ns = now_ns - ride.arrival_ns + self._request_ns
        ride.tenant.ttft.add(ttft_ns)
        ride.tenant.service += OUTPUT_COST
        if self.slo.ttft_ns is not None and ttft_ns > self.slo.ttft_ns:
            ride.is_late = True

    def _count_gaps(self, tenant: Totals, now_ns: int) -> None:
        """Take what a step has gathered for a tenant into the histograms."""
        for last_ns, num in tenant.gaps.items():
            tenant.itl.add(now_ns - last_ns, num)
            tenant.service += OUTPUT_COST * num
        tenant.gaps.clear()

    def _finish(self, event: FinishEvent) -> None:
        ride = self._rides.pop(event.request_id)
        self.end_ns = max(self.end_ns, event.now_ns)
        totals, num_gaps = ride.tenant, event.num_output_tokens - 1
        is_complete = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
        totals.num_finished += is_complete
        totals.num_good += is_complete and not ride.is_late
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
        everyone = self.everyone()
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
            "goodput": self._goodput(everyone, seconds),
            "tenants": {
                name: totals.figures() | ({"good_share": totals.good_share()} if self.slo.is_given else {})
                for name, totals in sorted(self.tenants.items())
            },
        }

    def _goodput(self, everyone: Totals, seconds: float) -> dict[str, float] | None:
        """Share and rate of the requests, refused ones included, that met what was demanded; None without a demand."""
        if not self.slo.is_given:
            return None
        num_good = everyone.num_good
        return {
            "share": round(num_good / max(1, everyone.num_requests + self.num_refused), 6),
            "requests_per_s": round(num_good / seconds, 3) if seconds else 0.0,
        }
