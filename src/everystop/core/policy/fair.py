"""Fair shares for tenants: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024, arXiv 2401.00588), with weights and a limit on what each may run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from everystop.core.events import WaitReason
from everystop.core.policy.accounts import Accounts, Share
from everystop.core.policy.base import Policy, View
from everystop.core.request import Request, RequestState

INPUT_COST = 1
OUTPUT_COST = 2


class Fair(Policy):
    """The tenant that has been served least boards next, its requests in order of arrival; work-conserving.

    A request costs its tenant 1 for each prompt token that it has to compute, charged when it first boards, and 2 for
    each output token. A tenant that comes back from idle, or falls below its limit, starts from the least counter of
    those who wait, so idleness saves nothing up. Between two tenants that wait all the time, the difference of service
    over weight stays within 2 · max(1 · longest prompt, 2 · tokens in the KV cache) / the lesser weight.

    Prompts are computed, and blocks kept, in the order of the counters at which requests first boarded. Deciding takes
    time in proportion to the number of tenants that wait, not of requests.
    """

    barrier_reason = WaitReason.TENANT_LIMIT

    def __init__(self, shares: Mapping[str, Share] | None = None) -> None:
        self._accounts = Accounts(shares or {})
        self._boarded: dict[int, tuple[int, int]] = {}  # request: (counter at first boarding, prompt tokens charged)

    def on_add(self, request: Request, view: View) -> None:
        account = self._accounts.open(request.tenant)
        account.running.discard(request.request_id)
        account.line.push(request)
        self._accounts.settle(request.tenant)

    def on_admit(self, request: Request, view: View) -> None:
        account = self._accounts[request.tenant]
        account.line.discard(request)
        if request.state is RequestState.RUNNING:  # not one that is parked behind a sibling
            account.running.add(request.request_id)
            if request.request_id not in self._boarded:
                num_tokens = request.num_prompt_tokens - request.num_computed_tokens
                self._boarded[request.request_id] = (account.counter, num_tokens)
                account.charge(INPUT_COST * num_tokens)
        self._accounts.settle(request.tenant)

    def on_remove(self, request: Request, view: View) -> None:
        account = self._accounts[request.tenant]
        account.line.discard(request)
        account.running.discard(request.request_id)
        self._boarded.pop(request.request_id, None)
        self._accounts.settle(request.tenant)

    def pick(self, view: View) -> Request | None:
        heads = [(account.counter, head) for account in self._accounts.competing() if (head := account.line.head())]
        return min(heads, key=lambda pair: (pair[0], pair[1].request_id))[1] if heads else None

    def may_return(self, request: Request, view: View) -> bool:
        return not self._accounts[request.tenant].is_full

    def passed_over(self, head: Request) -> Iterator[tuple[Request, WaitReason]]:
        for account in self._accounts:
            first = account.line.head()
            if first is not None and account.is_full:
                yield first, WaitReason.TENANT_LIMIT
            elif first is not None and first.request_id < head.request_id:
                yield first, WaitReason.OVER_SHARE

    def keep_key(self, request: Request, view: View) -> tuple[int, ...]:
        return (self._boarded[request.request_id][0], request.request_id)

    def charge(self, request: Request, num_prefill: int, num_decode: int) -> None:
        account = self._accounts[request.tenant]
        account.charge(OUTPUT_COST * num_decode)
        if num_prefill:  # what the cache had after all is given back
            counter, num_charged = self._boarded[request.request_id]
            num_due = min(num_charged, request.num_prompt_tokens - request.num_cached_tokens)
            if num_due < num_charged:
                self._boarded[request.request_id] = (counter, num_due)
                account.charge(-INPUT_COST * (num_charged - num_due))
