"""One point of a plan: a trace at one arrival rate on some replicas, measured without its beginning and its end.

It knows what a point is and when to give one up; which points are worth a look, and what follows from them, the planner
says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.core.errors import ConfigError
from everystop.core.events import Event, FinishEvent, PreemptEvent, RefuseEvent, StepEvent
from everystop.sim.simulator import Setup, Simulation
from everystop.sim.tally import Histogram
from everystop.sim.traces import TraceRequest

WARM_UP_SHARE = 0.2
QUEUE_SHARE = 0.25
SLOTS_WAITING = 2
LEAST_REQUESTS = 20
OVERLOAD = 1.25
OVERLOAD_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What must not be exceeded, in milliseconds: the 95th percentiles of TTFT and ITL."""

    ttft_p95_ms: float
    itl_p95_ms: float

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft_p95_ms), ("itl", self.itl_p95_ms)):
            if not value > 0:
                raise ConfigError(f"--slo-{name}-p95-ms is {value:g}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a rate on some replicas comes to. `missed` names what exceeds its target ("ttft", "itl"), or "overload";
    then `reason` says why the queue grows without bound, and there are no durations.

    `busy_share` is the part of the window in which a replica computes, `output_tokens_per_s` what all bring together.
    """

    rate: float
    num_replicas: int
    missed: tuple[str, ...] = ()
    reason: str = ""
    ttft_ms: dict[str, float] = field(default_factory=dict)
    itl_ms: dict[str, float] = field(default_factory=dict)
    busy_share: float = 1.0
    output_tokens_per_s: float = 0.0
    num_requests: int = 0
    num_refused: int = 0
    num_preemptions: int = 0

    @property
    def is_stable(self) -> bool:
        """The queue does not grow without bound."""
        return not self.reason


class Traffic:
    """The requests of a trace, to be sent at any rate, as many as are wanted.

    The times between arrivals are all multiplied by one number, so bursts stay bursts. Where more requests are wanted
    than the trace has, it starts again, a mean gap after its last one and with other prefix ids: a second lap shares no
    prompt with the first. Raises ConfigError for a trace that has no rate.
    """

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._requests = list(requests)
        if len(self._requests) < 2 or self._requests[-1].arrival_ns == self._requests[0].arrival_ns:
            raise ConfigError(
                f"the trace's {len(self._requests)} requests arrive at one time, so it has no rate that could be "
                "changed; take a trace with times between arrivals"
            )
        ids = [prefix_id for request in self._requests for prefix_id in request.prefix_ids]
        self._num_ids = max(ids) - min(ids) + 1 if ids else 0

    @property
    def num_requests(self) -> int:
        """Requests in one lap of the whole trace."""
        return len(self._requests)

    @property
    def rate(self) -> float:
        """Requests a second, as the trace has them."""
        return self._rate_of(len(self._requests))

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request."""
        return max(request.num_prompt_tokens + request.num_output_tokens for request in self._requests)

    @property
    def longest_output(self) -> int:
        """Tokens of the longest output."""
        return max(request.num_output_tokens for request in self._requests)

    def whole_laps(self, num: int) -> int:
        """At least `num`; beyond the trace's own requests as many as whole laps have."""
        return num if num <= len(self._requests) else len(self._requests) * -(-num // len(self._requests))

    def at(self, rate: float, num: int, *, lap: int | None = None) -> list[TraceRequest]:
        """The first `num` requests at `rate` a second on average; at an infinite rate they all arrive at time 0. A lap
        has as many as the trace, or `lap`.
        """
        in_lap = min(lap or num, len(self._requests))
        own_rate = self._rate_of(in_lap)
        lap_ns = NS_PER_S * in_lap / own_rate
        requests = []
        for i in range(num):
            number, place = divmod(i, in_lap)
            one = self._requests[place]
            arrival_ns = round((number * lap_ns + one.arrival_ns) * own_rate / rate)
            ids = tuple(prefix_id + number * self._num_ids for prefix_id in one.prefix_ids)
            requests.append(replace(one, arrival_ns=arrival_ns, prefix_ids=ids))
        return requests

    def _rate_of(self, num: int) -> float:
        """The rate of the first `num` requests; of those that arrive at one time, the whole trace's."""
        span_ns = self._requests[num - 1].arrival_ns - self._requests[0].arrival_ns
        if span_ns == 0:
            num, span_ns = len(self._requests), self._requests[-1].arrival_ns - self._requests[0].arrival_ns
        return NS_PER_S * (num - 1) / span_ns


class _GivenUp(Exception):
    """The rest of the run cannot change the answer."""


class Window:
    """Measures a run between the arrival of its first measured request and that of its last one; gives it up where the
    queue, or with `is_hasty` the number of late first tokens, settles the answer.
    """

    def __init__(self, trace: Sequence[TraceRequest], setup: Setup, target: Target, *, is_hasty: bool) -> None:
        self.first_id = int(len(trace) * WARM_UP_SHARE)
        self.start_ns, self.end_ns = trace[self.first_id].arrival_ns, trace[-1].arrival_ns
        self.ttft, self.itl = Histogram(), Histogram()
        self.busy_ns = self.num_tokens = self.num_refused = self.num_preemptions = self.num_late = 0
        self._num_arrived = self._num_started = 0
        self._arrival_ns = [request.arrival_ns for request in trace]
        self._last_ns: dict[int, int] = {}
        self._request_ns = round(setup.cost.request_ns)
        slots = setup.limits.max_num_seqs * setup.num_replicas
        self.most_waiting = max(int(len(trace) * QUEUE_SHARE), SLOTS_WAITING * slots)
        measured = len(trace) - self.first_id
        self._late_ns = target.ttft_p95_ms * NS_PER_MS * 1.004  # above what a histogram may take for the target
        self._most_late = measured // 20 if is_hasty else measured

    def note(self, events: Iterable[Event]) -> int:
        """Take in a turn; returns how many requests ended in it, which is told before its step."""
        ended = []
        for event in events:
            if isinstance(event, StepEvent):
                self._step(event)
            elif isinstance(event, FinishEvent):
                ended.append(event.request_id)
            elif isinstance(event, PreemptEvent):
                self.num_preemptions += event.request_id >= self.first_id
            elif isinstance(event, RefuseEvent):
                self.num_refused += 1
        for request_id in ended:
            self._num_started += self._last_ns.pop(request_id, None) is None
        return len(ended)

    def hold(self, request_id: int, arrival_ns: int) -> None:
        """Arrivals are known from the trace."""

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived, wherever they are, and have no token yet."""
        return self._num_arrived - self._num_started - self.num_refused

    def _step(self, event: StepEvent) -> None:
        now_ns = event.now_ns
        while self._num_arrived < len(self._arrival_ns) and self._arrival_ns[self._num_arrived] <= now_ns:
            self._num_arrived += 1
        if self.num_waiting > self.most_waiting:
            raise _GivenUp
        self.busy_ns += max(0, min(now_ns, self.end_ns) - max(now_ns - event.execute_ns, self.start_ns))
        is_inside = self.start_ns < now_ns <= self.end_ns
        gaps: dict[int, int] = {}
        for request_id, tokens in zip(event.plan.rows.request_ids, event.tokens, strict=True):
            if tokens:
                last_ns = self._last_ns.get(request_id)
                if last_ns is None:
                    self._first_token(request_id, now_ns)
                else:
                    gaps[last_ns] = gaps.get(last_ns, 0) + 1
                self._last_ns[request_id] = now_ns
                self.num_tokens += len(tokens) if is_inside else 0
        if is_inside:
            for last_ns, num in gaps.items():
                self.itl.add(now_ns - last_ns, num)

    def _first_token(self, request_id: int, now_ns: int) -> None:
        self._num_started += 1
        if request_id >= self.first_id:
            ttft_ns = now_ns - self._arrival_ns[request_id] + self._request_ns
            self.ttft.add(ttft_ns)
            self.num_late += ttft_ns > self._late_ns
            if self.num_late > self._most_late:
                raise _GivenUp


def measure(
    setup: Setup, workload: Traffic, *, rate: float, num_requests: int, target: Target, is_hasty: bool = False
) -> Point:
    """The point of this rate on the set-up's replicas, from `num_requests` requests of which the first fifth only warms
    up. A hasty one is given up as soon as its TTFT is certain to miss its target, and then has no durations.
    """
    trace = workload.at(rate, num_requests)
    window = Window(trace, setup, target, is_hasty=is_hasty)
    named: dict[str, Any] = {"rate": rate, "num_replicas": setup.num_replicas}
    try:
        Simulation(setup, window).run(trace)
    except _GivenUp:
        if window.num_waiting <= window.most_waiting:
            return Point(missed=("ttft",), **named)
        reason = f"more than {window.most_waiting:,} of {num_requests:,} requests waited at once"
        return Point(missed=("overload",), reason=reason, **named)
    seconds = max(1, window.end_ns - window.start_ns) / NS_PER_S
    ttft_ms, itl_ms = window.ttft.in_ms(), window.itl.in_ms()
    late = {"ttft": ttft_ms["p95"] > target.ttft_p95_ms, "itl": itl_ms["p95"] > target.itl_p95_ms}
    return Point(
        missed=tuple(name for name, is_late in late.items() if is_late),
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        busy_share=round(window.busy_ns / NS_PER_S / seconds / setup.num_replicas, 6),
        output_tokens_per_s=round(window.num_tokens / seconds, 3),
        num_requests=window.ttft.num,
        num_refused=window.num_refused,
        num_preemptions=window.num_preemptions,
        **named,
    )


def saturation(setup: Setup, workload: Traffic, num_requests: int) -> float:
    """Requests a second that the replicas serve when they never run out of them: the rate from which on a queue grows
    without bound.

    The same requests are sent once and twice, all at time 0: the second helping takes longer by as much as its requests
    need, for beginning and end are the same. A router that looks into caches must see them fill, so for that one the
    requests then arrive a little faster than they are served. Raises ConfigError if every request is refused.
    """
    lap = min(num_requests, workload.num_requests)
    helping = lap * -(-max(num_requests, SLOTS_WAITING * setup.limits.max_num_seqs * setup.num_replicas) // lap)
    served = _rate_served(setup, workload, float("inf"), helping, lap)
    if setup.num_replicas == 1 or setup.router != "prefix-affinity":
        return served
    for _ in range(OVERLOAD_ROUNDS):
        offered = OVERLOAD * served
        found = _rate_served(setup, workload, offered, helping, lap)
        served = max(served, found)
        if found < 0.95 * offered:
            break
    return served


def _rate_served(setup: Setup, workload: Traffic, offered: float, helping: int, lap: int) -> float:
    ends = []
    for num in (helping, 2 * helping):
        simulation = Simulation(setup)
        simulation.run(workload.at(offered, num, lap=lap))
        ends.append(simulation.tally.end_ns)
    if ends[1] <= ends[0]:
        raise ConfigError(
            f"no request of the trace is served: the longest has {workload.longest_tokens:,} tokens, and a sequence "
            f"may have {setup.limits.max_model_len:,}; raise --num-blocks or --max-model-len, or lower --scale-lengths"
        )
    return helping * NS_PER_S / (ends[1] - ends[0])
