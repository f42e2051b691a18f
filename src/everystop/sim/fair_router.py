"""The router that is fair across replicas: one virtual token counter a tenant for all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from everystop.core.errors import ConfigError
from everystop.core.events import Event, FinishEvent, StepEvent
from everystop.core.limits import Limits
from everystop.core.policy import Share
from everystop.core.policy.competition import Competition, unit_of
from everystop.core.policy.fair import INPUT_COST, OUTPUT_COST
from everystop.core.request import Request
from everystop.sim.routing import Sending, Station, nearest

STEPS_AHEAD = 2
NOT_HONOURED = ("max_queued", "token_rate", "kv_share")


@dataclass(slots=True)
class _Account:
    """A tenant: its service so far over its weight, who waits at the router, and how many are at the replicas."""

    unit: int
    max_running: int | None
    counter: int = 0
    line: deque[Request] = field(default_factory=deque)
    num_sent: int = 0

    def charge(self, cost: int) -> None:
        """Count service; a negative cost gives some back."""
        self.counter += cost * self.unit

    @property
    def competes(self) -> bool:
        """It waits, and may have one more at the replicas."""
        return bool(self.line) and (self.max_running is None or self.num_sent < self.max_running)


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
    output token, charged when it comes; over the tenant's weight. A tenant that comes back from idle starts at the
    least counter of those who wait. `max_running` counts over all replicas. Keeping requests back is what makes it
    fair: one that has been sent stands in a replica's own line, whoever comes next.

    A replica has a place while it has fewer than `max_num_seqs` requests and, of those without a first token, fewer
    prompt tokens than two steps can compute, so it never runs dry, and little stands in line there, also when its KV
    cache is full. Of the replicas with a place, the one with the longest cached prefix is taken, as by
    `prefix-affinity`: fair between tenants first, local second (as in D2LPM of Cao et al., arXiv 2501.14312, which
    sends at once and keeps counters for every pair of tenant and replica).

    It sees no more than a proxy would: arrivals, tokens as they come, `cached_tokens` at the end of an answer.
    """

    is_late = True

    def __init__(self, *, limits: Limits, block_size: int, shares: Mapping[str, Share]) -> None:
        """Raises ConfigError for limits on a tenant that only a replica could keep, where they would stop others."""
        for name, share in shares.items():
            for limit in NOT_HONOURED:
                if getattr(share, limit) is not None:
                    raise ConfigError(
                        f"--router fair keeps weights and max_running over all replicas, but not {limit}, which the "
                        f"tenant {name!r} has; take it out, or choose another router"
                    )
        self._max_present = limits.max_num_seqs
        self._max_unstarted = STEPS_AHEAD * limits.max_num_batched_tokens
        self._block_size = block_size
        self._shares = shares
        self._accounts: dict[str, _Account] = {}
        self._competing: Competition[_Account] = Competition()
        self._trips: dict[int, _Trip] = {}
        self._num_present: list[int] = []
        self._num_unstarted: list[int] = []

    def waiting_tenants(self) -> Iterable[str]:
        """Whose requests it keeps."""
        return [name for name, account in self._accounts.items() if account.line]

    def take(self, request: Request, stations: Sequence[Station], now_ns: int) -> Iterator[Sending]:
        """The request joins its tenant's line; yields those who go now."""
        if not self._num_present:
            self._num_present, self._num_unstarted = [0] * len(stations), [0] * len(stations)
        self._account(request.tenant).line.append(request)
        self._settle(request.tenant)
        return self._sendings(stations)

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            share = self._shares.get(tenant, Share())
            account = self._accounts[tenant] = _Account(unit_of(share.weight), share.max_running)
        return account

    def _settle(self, tenant: str) -> None:
        account = self._accounts[tenant]
        self._competing.settle(tenant, account, competes=account.competes)

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
        while self._competing:
            loads = {
                i: num
                for i, num in enumerate(self._num_present)
                if num < self._max_present and self._num_unstarted[i] < self._max_unstarted
            }
            if not loads:
                return
            account = min(self._competing, key=lambda a: (a.counter, a.line[0].request_id))
            request = account.line.popleft()
            index, num_matched = nearest(stations, request.block_keys, loads)
            self._depart(index, request, num_matched * self._block_size)
            yield index, request

    def _depart(self, index: int, request: Request, num_matched_tokens: int) -> None:
        tenant, request_id = request.tenant, request.request_id
        num_due = request.num_prompt_tokens - min(num_matched_tokens, request.num_prompt_tokens - 1)
        self._trips[request_id] = _Trip(tenant, request.num_prompt_tokens, num_due, num_due)
        self._num_present[index] += 1
        self._num_unstarted[index] += num_due
        account = self._accounts[tenant]
        account.num_sent += 1
        account.charge(INPUT_COST * num_due)
        self._settle(tenant)

    def _charge_step(self, index: int, event: StepEvent) -> None:
        for request_id, tokens in zip(event.plan.rows.request_ids, event.tokens, strict=True):
            if tokens:
                trip = self._trips[request_id]
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
        self._accounts[trip.tenant].num_sent -= 1
        self._settle(trip.tenant)
