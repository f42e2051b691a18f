"""Tenants' traffic in virtual time over the simulated runner, and who was served how much and when."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from everystop.core.events import AdmitEvent, Event, FinishEvent, PreemptEvent, StepEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import StepPlan
from everystop.core.policy import Policy
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop
from everystop.runner.simulated import SimulatedRunner

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


class Arrival(NamedTuple):
    """A request to come."""

    now_ns: int
    tenant: str
    num_prompt: int
    num_output: int
    prefix: int = 0  # prompts with the same number have all tokens but the last 8 in common, as far as both reach


class Service(NamedTuple):
    """What a tenant got: 1 for each prompt token that the cache has not, when its request boards first (less those that
    turned up later, when it ends), and 2 for each output token.
    """

    now_ns: int
    tenant: str
    cost: int


def poisson(
    rng: random.Random, tenant: str, per_s: float, seconds: float, num_prompt: range, num_output: range
) -> Iterator[Arrival]:
    """Independent arrivals at a mean rate, with lengths drawn evenly from the ranges."""
    now_s = rng.expovariate(per_s)
    while now_s < seconds:
        yield Arrival(round(now_s * NS_PER_S), tenant, rng.choice(num_prompt), rng.choice(num_output))
        now_s += rng.expovariate(per_s)


def step_ns(plan: StepPlan) -> int:
    """A machine on which a step takes 5 ms and 0.2 ms for each token."""
    return 5 * NS_PER_MS + plan.num_tokens * NS_PER_MS // 5


class Simulation:
    """One scheduler under a policy, fed with arrivals until `until_ns`, or until all are done."""

    def __init__(
        self,
        policy: Policy,
        *,
        num_blocks: int = 4_000,
        depth: int = 0,
        notes_waiting: bool = False,
        prefix_caching: bool = False,
        **limits: int,
    ) -> None:
        self.now_ns = 0
        self.scheduler = Scheduler(
            Limits(**limits),  # type: ignore[arg-type]
            KVCache(num_blocks=num_blocks, block_size=16, enable_prefix_caching=prefix_caching),
            policy,
        )
        self.requests: dict[int, Request] = {}
        self.services: list[Service] = []
        self.first_token_ns: dict[int, int] = {}
        self.finish_ns: dict[int, int] = {}
        self.num_preemptions = 0
        self.num_cached: dict[int, int] = {}
        self.waiting_after: list[tuple[int, frozenset[str]]] = []  # services so far, and tenants that wait, by turn
        self._notes_waiting = notes_waiting
        self._loop = StepLoop(self.scheduler, SimulatedRunner(step_ns, self._advance), lambda: self.now_ns, depth=depth)

    def run(self, arrivals: Iterable[Arrival], until_ns: int | None = None) -> Simulation:
        """Serve the arrivals in the order of their times."""
        coming = sorted(arrivals, reverse=True)
        while (coming or self.scheduler.has_work) and (until_ns is None or self.now_ns < until_ns):
            while coming and coming[-1].now_ns <= self.now_ns:
                self._add(coming.pop())
            turn = self._loop.turn()
            self._note(turn.events)
            if self._notes_waiting:
                running = self.scheduler.running
                waiting = (r.tenant for i, r in self.scheduler.requests.items() if i not in running)
                self.waiting_after.append((len(self.services), frozenset(waiting)))
            wakes = [coming[-1].now_ns] if coming else []
            wakes += [turn.wake_at_ns] if turn.wake_at_ns is not None else []
            if turn.is_idle and wakes:
                self.now_ns = max(self.now_ns, min(wakes))
        return self

    def _advance(self, ns: int) -> None:
        self.now_ns += ns

    def _add(self, arrival: Arrival) -> None:
        request_id = len(self.requests)
        request = Request(
            request_id,
            [arrival.prefix] * (arrival.num_prompt - 8) + [-request_id] * min(8, arrival.num_prompt),
            SamplingParams(max_tokens=arrival.num_output),
            arrival_ns=arrival.now_ns,
            tenant=arrival.tenant,
        )
        self.requests[request_id] = request
        self.scheduler.add(request, arrival.now_ns)

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StepEvent):
                for row, tokens in zip(event.plan.rows, event.tokens, strict=True):
                    if tokens:
                        self.first_token_ns.setdefault(row.request_id, event.now_ns)
                        self._serve(event.now_ns, row.request_id, 2 * len(tokens))
            elif isinstance(event, AdmitEvent) and event.request_id not in self.num_cached:
                self.num_cached[event.request_id] = event.num_cached_tokens
                num_prompt = self.requests[event.request_id].num_prompt_tokens
                self._serve(event.now_ns, event.request_id, num_prompt - event.num_cached_tokens)
            elif isinstance(event, FinishEvent):
                self.finish_ns[event.request_id] = event.now_ns
                num_later = event.num_cached_tokens - self.num_cached[event.request_id]
                if num_later:
                    self.num_cached[event.request_id] = event.num_cached_tokens
                    self._serve(event.now_ns, event.request_id, -num_later)
            elif isinstance(event, PreemptEvent):
                self.num_preemptions += 1

    def _serve(self, now_ns: int, request_id: int, cost: int) -> None:
        self.services.append(Service(now_ns, self.requests[request_id].tenant, cost))

    # ---------------------------------------------------------------- queries

    def served(self, from_ns: int = 0) -> dict[str, int]:
        """Cost of what each tenant got from a time on."""
        total: dict[str, int] = defaultdict(int)
        for service in self.services:
            if service.now_ns >= from_ns:
                total[service.tenant] += service.cost
        return total

    def ttft_ns(self, tenant: str) -> list[int]:
        """Arrival to first token of each of a tenant's requests, in order."""
        return sorted(
            when - self.requests[request_id].arrival_ns
            for request_id, when in self.first_token_ns.items()
            if self.requests[request_id].tenant == tenant
        )


def percentile(ordered: list[int], q: float) -> int:
    """The value that a share `q` of an ordered list does not exceed."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
