"""Fair shares for tenants: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024, arXiv 2401.00588), with weights and a limit on what each may run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from everystop.core.events import WaitReason
from everystop.core.policy.base import Policy, View
from everystop.core.policy.waiting import WaitingLine
from everystop.core.request import Request, RequestState

INPUT_COST = 1
OUTPUT_COST = 2
_ONE = 1 << 20  # counters are whole numbers, so that sums do not depend on their order
_MAX_IDLE = 64


class Share(NamedTuple):
    """What a tenant may use: service in proportion to `weight`, and at most `max_running` requests at a time."""

    weight: float = 1.0
    max_running: int | None = None


@dataclass(slots=True)
class _Account:
    """One tenant: its service so far, divided by its weight, and who of its requests wait and run."""

    unit: int
    max_running: int | None
    counter: int = 0
    line: WaitingLine = field(default_factory=WaitingLine)
    running: set[int] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        return self.max_running is not None and len(self.running) >= self.max_running

    @property
    def is_backlogged(self) -> bool:
        return len(self.line) > 0 and not self.is_full


class Fair(Policy):
    """The tenant that has been served least boards next, its requests in order of arrival; work-conserving.

    A request costs its tenant 1 for each prompt token that it has to compute, charged when it first boards, and 2 for
    each output token. A tenant that comes back from idle, or falls below its limit, starts from the least counter of
    those who wait, so idleness saves nothing up. Between two tenants that wait all the time, the difference of service
    over weight stays within 2 · max(1 · longest prompt, 2 · tokens in the KV cache) / the lesser weight.

    Blocks are kept in the order of the counters at which requests first boarded. Deciding takes time in proportion to
    the number of tenants that wait, not of requests.
    """

    barrier_reason = WaitReason.TENANT_LIMIT

    def __init__(self, shares: Mapping[str, Share] | None = None) -> None:
        self._shares = dict(shares or {})
        self._accounts: dict[str, _Account] = {}
        self._backlogged: dict[str, _Account] = {}
        self._last_backlogged = _Account(_ONE, None)
        self._max_accounts = _MAX_IDLE
        self._boarded: dict[int, tuple[int, int]] = {}  # request: (counter at first boarding, prompt tokens charged)

    def on_add(self, request: Request, view: View) -> None:
        account = self._accounts.get(request.tenant) or self._open(request.tenant)
        account.running.discard(request.request_id)
        account.line.push(request)
        self._settle(request.tenant, account)

    def on_admit(self, request: Request, view: View) -> None:
        account = self._accounts[request.tenant]
        account.line.discard(request)
        if request.state is RequestState.RUNNING:  # not one that is parked behind a sibling
            account.running.add(request.request_id)
            if request.request_id not in self._boarded:
                num_tokens = request.num_prompt_tokens - request.num_computed_tokens
                self._boarded[request.request_id] = (account.counter, num_tokens)
                account.counter += INPUT_COST * num_tokens * account.unit
        self._settle(request.tenant, account)

    def on_remove(self, request: Request, view: View) -> None:
        account = self._accounts[request.tenant]
        account.line.discard(request)
        account.running.discard(request.request_id)
        self._boarded.pop(request.request_id, None)
        self._settle(request.tenant, account)

    def pick(self, view: View) -> Request | None:
        heads = [(account.counter, head) for account in self._backlogged.values() if (head := account.line.head())]
        return min(heads, key=lambda pair: (pair[0], pair[1].request_id))[1] if heads else None

    def passed_over(self, head: Request) -> Iterator[tuple[Request, WaitReason]]:
        for account in self._accounts.values():
            first = account.line.head()
            if first is not None and account.is_full:
                yield first, WaitReason.TENANT_LIMIT
            elif first is not None and first.request_id < head.request_id:
                yield first, WaitReason.OVER_SHARE

    def keep_key(self, request: Request, view: View) -> tuple[int, ...]:
        return (self._boarded[request.request_id][0], request.request_id)

    def charge(self, request: Request, num_prefill: int, num_decode: int) -> None:
        account = self._accounts[request.tenant]
        account.counter += OUTPUT_COST * num_decode * account.unit
        if num_prefill:  # what the cache had after all is given back
            counter, num_charged = self._boarded[request.request_id]
            num_due = min(num_charged, request.num_prompt_tokens - request.num_cached_tokens)
            if num_due < num_charged:
                self._boarded[request.request_id] = (counter, num_due)
                account.counter -= INPUT_COST * (num_charged - num_due) * account.unit

    # ------------------------------------------------------------- accounts

    def _settle(self, tenant: str, account: _Account) -> None:
        """Lift the counter of a tenant that competes from now on; note one that no longer does."""
        if account.is_backlogged == (tenant in self._backlogged):
            return
        if account.is_backlogged:
            account.counter = max(account.counter, self._floor())
            self._backlogged[tenant] = account
        else:
            del self._backlogged[tenant]
            self._last_backlogged = account

    def _floor(self) -> int:
        """Where newcomers start: the least counter of those who compete, else that of the last who did."""
        competing = [account.counter for account in self._backlogged.values()]
        return min(competing, default=self._last_backlogged.counter)

    def _open(self, tenant: str) -> _Account:
        """A new account; those that are idle and below the floor are as good as new, so they go when there are many."""
        if len(self._accounts) >= self._max_accounts:
            floor = self._floor()
            self._accounts = {
                name: account
                for name, account in self._accounts.items()
                if len(account.line) or account.running or account.counter > floor
            }
            self._max_accounts = 2 * len(self._accounts) + _MAX_IDLE
        share = self._shares.get(tenant, Share())
        account = self._accounts[tenant] = _Account(max(1, round(_ONE / share.weight)), share.max_running)
        return account
