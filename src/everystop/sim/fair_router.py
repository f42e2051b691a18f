"""The router that is fair across replicas: one virtual token counter a tenant for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from everystop.core.events import Event, FinishEvent, StepEvent
from everystop.core.policy import Share
from everystop.core.policy.accounts import Accounts
from everystop.core.policy.fair import INPUT_COST, OUTPUT_COST
from everystop.core.request import Request
from everystop.core.scheduler import Limits
from everystop.sim.routing import Sending, Station, nearest

STEPS_AHEAD = 2


@dataclass(slots=True)
class _Trip:
    """A request at a replica: prompt tokens that were charged, and those of them that stand before a first token."""

    tenant: str
    num_prompt_tokens: int
    num_due: int
    num_unstarted: int


class FairRouter:
    """Keeps requests until a replica has a place, and then sends one of the tenant that has been served least.

    The counters are those of policy `fair` (Sheng et al., OSDI 2024, arXiv 2401.00588), kept once for all replicas: 1
    for a prompt token that is not in the chosen replica's prefix cache, charged when the request is sent, 2 for an
    output token, charged when it comes; over the tenant's weight. `max_running` counts over all replicas. Keeping
    requests back is what makes it fair: one that has been sent stands in a replica's own line, whoever comes next.

    A replica has a place while it has fewer than `max_num_seqs` requests and, of those without a first token, fewer
    prompt tokens than two steps can compute, so it never runs dry, and little stands in line there, also when its KV
    cache is full. Of the replicas with a place, the one with the longest cached prefix is taken, as by
    `prefix-affinity`: fair between tenants first, local second (as in D2LPM of Cao et al., arXiv 2501.14312, which
    sends at once and keeps counters for every pair of tenant and replica).

    It sees no more than a proxy would: arrivals, tokens as they come, `cached_tokens` at the end of an answer.
    """

    is_late = True

    def __init__(self, *, limits: Limits, block_size: int, shares: Mapping[str, Share]) -> None:
        self._max_present = limits.max_num_seqs
        self._max_unstarted = STEPS_AHEAD * limits.max_num_batched_tokens
        self._block_size = block_size
        self._accounts = Accounts(shares)
        self._kept: dict[str, int] = {}  # number of requests by tenant, of those who have any
        self._trips: dict[int, _Trip] = {}
        self._num_present: list[int] = []
        self._num_unstarted: list[int] = []

    def waiting_tenants(self) -> Iterable[str]:
        """Whose requests it keeps."""
        return list(self._kept)

    def take(self, request: Request, stations: Sequence[Station], now_ns: int) -> Iterator[Sending]:
        """The request joins its tenant's line; yields those who go now."""
        if not self._num_present:
            self._num_present, self._num_unstarted = [0] * len(stations), [0] * len(stations)
        self._accounts.open(request.tenant).line.push(request)
        self._accounts.settle(request.tenant)
        self._kept[request.tenant] = self._kept.get(request.tenant, 0) + 1
        return self._sendings(stations)

    def hear(self, index: int, events: Sequence[Event], stations: Sequence[Station], now_ns: int) -> Iterator[Sending]:
        """Charge what a replica has brought, and yield those who go to the places that have come free."""
        for event in events:
            if isinstance(event, StepEvent):
                self._charge_step(index, event)
        for event in events:
            if isinstance(event, FinishEvent):
                self._end(index, event)
        return self._sendings(stations)

    def refused(self, index: int, request: Request) -> None:
        """The replica would not take the request: its place is free, and nothing is owed."""
        trip = self._trips[request.request_id]
        self._accounts[trip.tenant].charge(-INPUT_COST * trip.num_due)
        self._leave(index, request.request_id)

    def _sendings(self, stations: Sequence[Station]) -> Iterator[Sending]:
        while self._kept:
            loads = {
                i: num
                for i, num in enumerate(self._num_present)
                if num < self._max_present and self._num_unstarted[i] < self._max_unstarted
            }
            request = self._next() if loads else None
            if request is None:
                return
            index, num_matched = nearest(stations, request.block_keys, loads)
            self._depart(index, request, num_matched * self._block_size)
            yield index, request

    def _next(self) -> Request | None:
        """The first of the tenant that has been served least; None if all who wait run as many as they may."""
        heads = [(account.counter, head) for account in self._accounts.competing() if (head := account.line.head())]
        return min(heads, key=lambda pair: (pair[0], pair[1].request_id))[1] if heads else None

    def _depart(self, index: int, request: Request, num_matched_tokens: int) -> None:
        tenant, request_id = request.tenant, request.request_id
        num_due = request.num_prompt_tokens - min(num_matched_tokens, request.num_prompt_tokens - 1)
        self._trips[request_id] = _Trip(tenant, request.num_prompt_tokens, num_due, num_due)
        self._num_present[index] += 1
        self._num_unstarted[index] += num_due
        self._kept[tenant] -= 1
        if not self._kept[tenant]:
            del self._kept[tenant]
        account = self._accounts[tenant]
        account.line.discard(request)
        account.running.add(request_id)
        account.charge(INPUT_COST * num_due)
        self._accounts.settle(tenant)

    def _charge_step(self, index: int, event: StepEvent) -> None:
        for row, tokens in zip(event.plan.rows, event.tokens, strict=True):
            if tokens:
                trip = self._trips[row.request_id]
                self._accounts[trip.tenant].charge(OUTPUT_COST * len(tokens))
                self._num_unstarted[index] -= trip.num_unstarted
                trip.num_unstarted = 0

    def _end(self, index: int, event: FinishEvent) -> None:
        """What the prefix cache had, beyond or short of what the router saw there, is settled."""
        trip = self._trips[event.request_id]
        num_computed = trip.num_prompt_tokens - event.num_cached_tokens
        self._accounts[trip.tenant].charge(INPUT_COST * (num_computed - trip.num_due))
        self._leave(index, event.request_id)

    def _leave(self, index: int, request_id: int) -> None:
        trip = self._trips.pop(request_id)
        self._num_present[index] -= 1
        self._num_unstarted[index] -= trip.num_unstarted
        self._accounts[trip.tenant].running.discard(request_id)
        self._accounts.settle(trip.tenant)
