"""Which tenants have as many requests waiting as they may, as the edge knows it: before a prompt is rendered or
encoded. Asyncio thread only, but for `check`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from everystop.core.durations import NS_PER_S
from everystop.core.errors import TenantQueueFull, TooManyChoices
from everystop.server.errors import Overloaded
from everystop.server.service_rate import ServiceRate

SAID_FULL_NS = (
    NS_PER_S // 4
)  # for so long what the policy has said holds, unless something of the tenant boards or ends


class TenantLimits(NamedTuple):
    """Requests of a tenant that may wait without a place to run, and that may run; None is no limit."""

    max_queued: int
    max_running: int | None = None


class _Tenant:
    """What the edge knows of one."""

    __slots__ = ("full_until_ns", "limits", "rate", "retry_after_s", "running", "seen_ns", "waiting")

    def __init__(self, limits: TenantLimits) -> None:
        self.limits = limits
        self.waiting: set[int] = set()
        self.running: set[int] = set()
        self.rate = ServiceRate()
        self.seen_ns = 0
        self.full_until_ns = self.retry_after_s = 0

    def pass_time(self, now_ns: int) -> None:
        """Time passes for those who wait; it may seem to go back."""
        if now_ns > self.seen_ns:
            if self.waiting:
                self.rate.wait(now_ns - self.seen_ns)
            self.seen_ns = now_ns


class TenantQueues:
    """Refuses what the policy would refuse because of `max_queued`, as far as that can be told here; what can not, such
    as whether another tenant will take a free place, is left to the policy, whose answer is remembered for a moment.

    `num_refused` counts by tenant the sequences that were refused here.
    """

    def __init__(self, limits: Mapping[str, TenantLimits], num_places: int) -> None:
        self._tenants = {name: _Tenant(each) for name, each in limits.items()}
        self._num_places = num_places
        self._tenant_of: dict[int, _Tenant] = {}
        self.num_refused: Counter[str] = Counter()

    def enter(self, tenant: str, request_ids: Iterable[int], now_ns: int) -> None:
        """These are handed to the engine."""
        known = self._tenants.get(tenant)
        if known is not None:
            known.pass_time(now_ns)
            for request_id in request_ids:
                self._tenant_of[request_id] = known
                known.waiting.add(request_id)

    def board(self, request_id: int, now_ns: int) -> None:
        """One has got a place."""
        known = self._tenant_of.get(request_id)
        if known is not None and request_id in known.waiting:
            known.pass_time(now_ns)
            known.waiting.discard(request_id)
            known.running.add(request_id)
            known.rate.board(1)
            known.full_until_ns = 0

    def wait_again(self, request_id: int, now_ns: int) -> None:
        """One has lost its place."""
        known = self._tenant_of.get(request_id)
        if known is not None:
            known.pass_time(now_ns)
            known.running.discard(request_id)
            known.waiting.add(request_id)

    def leave(self, request_id: int) -> None:
        """One has ended."""
        known = self._tenant_of.pop(request_id, None)
        if known is not None:
            known.waiting.discard(request_id)
            known.running.discard(request_id)
            known.full_until_ns = 0

    def refused(self, request_id: int, retry_after_s: int, now_ns: int) -> None:
        """The policy has refused one because its tenant has enough of them waiting, with that advice."""
        known = self._tenant_of.pop(request_id, None)
        if known is not None:
            known.waiting.discard(request_id)
            known.full_until_ns, known.retry_after_s = now_ns + SAID_FULL_NS, retry_after_s

    def check(self, tenant: str, n: int, num_prompts: int, num_on_board: int, now_ns: int) -> None:
        """Raise TooManyChoices for n choices that even an idle server would refuse, and Overloaded where so many more
        may not wait beside those that do; any thread. `num_on_board` have a place, of all tenants.
        """
        known = self._tenants.get(tenant)
        if known is None:
            return
        limits = known.limits
        num_places = self._num_places if limits.max_running is None else min(self._num_places, limits.max_running)
        if n > num_places + limits.max_queued:
            raise TooManyChoices(n, num_places + limits.max_queued)
        num, num_waiting = n * num_prompts, len(known.waiting)
        is_full = now_ns < known.full_until_ns
        num_free = 0 if is_full else min(self._num_places - num_on_board, num_places - len(known.running))
        excess = num_waiting + num - max(0, num_free) - limits.max_queued
        if excess <= 0:
            return
        self.num_refused[tenant] += num
        seconds = max(known.rate.seconds_for(excess), known.retry_after_s if is_full else 1)
        error = TenantQueueFull(num_waiting, num, limits.max_queued, seconds)
        raise Overloaded(str(error), seconds, error.code)
