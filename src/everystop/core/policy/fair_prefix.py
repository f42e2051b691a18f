"""Fair shares that keep prefix locality: deficit longest prefix match of Cao et al., "Locality-aware Fair Scheduling in
LLM Serving" (arXiv 2501.14312), over the accounts and limits of `fair`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import nsmallest

from everystop.core.policy.accounts import Account, Share
from everystop.core.policy.base import View, Wait
from everystop.core.policy.competition import ONE
from everystop.core.policy.fair import Fair
from everystop.core.request import Request, RequestState

QUANTUM = 4096
MAX_LOOKUPS = 32
MAX_OVERTAKINGS = 8


class FairPrefix(Fair):
    """Among the tenants with credit, the request with the longest cached prefix boards next; limits are as in `fair`.

    Credit is what has been granted to each tenant, in weighted tokens over its weight, less what it has used. When
    nobody who competes has any left, everybody is granted as many times `quantum` as it takes until somebody has. A
    tenant that comes back is given no more credit than the one of those who wait that has most, so it holds at most
    one quantum. Between two tenants that wait all the time the difference of service over weight thus stays within
    2 · (quantum + max(1 · longest prompt, 2 · tokens in the KV cache) / the lesser weight).

    One decision looks up at most `MAX_LOOKUPS` requests: they are divided among the tenants with credit, those with
    most first, and each offers the first of its line. The first of all is overtaken by at most `MAX_OVERTAKINGS`
    others of its tenant, then it is all that the tenant offers; one that comes back from a preemption is so at once.
    Without a free slot nothing is looked up. Equal matches board in order of credit, then of arrival.
    """

    honours = ("shares", "quantum")

    def __init__(self, shares: Mapping[str, Share] | None = None, quantum: int = QUANTUM) -> None:
        super().__init__(shares)
        self._quantum = quantum * ONE
        self._granted = 0
        self._num_overtakings: dict[int, int] = {}  # of requests that are or were first in line, until they board

    def on_admit(self, request: Request, view: View) -> None:
        first = self._accounts[request.tenant].line.head()
        self._num_overtakings.pop(request.request_id, None)
        if first is not None and first is not request and request.state is RequestState.RUNNING:
            self._num_overtakings[first.request_id] = self._num_overtakings.get(first.request_id, 0) + 1
        super().on_admit(request, view)

    def on_remove(self, request: Request, view: View) -> None:
        self._num_overtakings.pop(request.request_id, None)
        super().on_remove(request, view)

    def pick(self, view: View) -> Request | Wait | None:
        first_come = super().pick(view)
        if not isinstance(first_come, Request):
            return first_come
        self._grant()
        if view.num_running + view.num_held >= view.max_num_seqs:
            return first_come  # of the tenant with the most credit
        offers = [
            (-view.num_matched_tokens(request), counter, request.request_id, request)
            for counter, request in self._offers(view)
        ]
        return min(offers)[3]

    def _grant(self) -> None:
        """See that somebody who competes has credit."""
        least = min(account.counter for account in self._accounts.competing())
        if least >= self._granted:
            self._granted += ((least - self._granted) // self._quantum + 1) * self._quantum

    def _offers(self, view: View) -> Iterator[tuple[int, Request]]:
        """What tenants with credit would let board, each with the tenant's counter."""
        creditors = [account for account in self._accounts.competing() if account.counter < self._granted]
        if len(creditors) > MAX_LOOKUPS:
            creditors = nsmallest(MAX_LOOKUPS, creditors, key=lambda account: account.counter)
        num_each = MAX_LOOKUPS // len(creditors)
        for account in creditors:
            for request in self._offers_of(account, num_each):
                if not account.is_full_for(request):
                    yield account.counter, request

    def _offers_of(self, account: Account, num: int) -> list[Request]:
        first = account.line.head()
        if first is None:
            return []
        is_due = first.num_preemptions > 0 or self._num_overtakings.get(first.request_id, 0) >= MAX_OVERTAKINGS
        return [first] if is_due else account.line.first(num)

    def _has_had_its_share(self, account: Account) -> bool:
        return account.counter >= self._granted
