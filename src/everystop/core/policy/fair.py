"""Fair shares for tenants: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024, arXiv 2401.00588), with weights and limits on what each may run, queue, use in a second and hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush

from everystop.core.durations import NS_PER_S
from everystop.core.errors import TenantQueueFull, TooManyChoices
from everystop.core.events import WaitReason
from everystop.core.policy.accounts import Account, Accounts, Share
from everystop.core.policy.base import Policy, View, Wait
from everystop.core.request import Request, RequestState

INPUT_COST = 1
OUTPUT_COST = 2
_MAX_RETRY_AFTER_S = 600


class Fair(Policy):
    """The tenant that has been served least boards next, its requests in order of arrival; work-conserving.

    A request costs its tenant 1 for each prompt token that it has to compute, charged when it first boards, and 2 for
    each output token. A tenant that comes back from idle, or falls below its limit, starts from the least counter of
    those who wait, so idleness saves nothing up. Between two tenants that wait all the time, the difference of service
    over weight stays within 2 · max(1 · longest prompt, 2 · tokens in the KV cache) / the lesser weight.

    A tenant does not compete while it runs `max_running` requests, while its next one would make it hold more than
    `kv_share` of the blocks (a tenant that runs nothing always may; what runs may grow past the share), or while it has
    yet to pay for what it used beyond `token_rate`. Others fill in; only when nobody else waits is a slot left free. A
    request that would be the `max_queued` + 1st without a place to run is refused.

    A tenant has a share of the slots too, by weight among those present. Where none is free, one whose requests, those
    that wait included, are within its share (or a single one) takes the place of a request of one that exceeds its own,
    the last of them to board: who asks for little does not wait until somebody else's answer is done. It must run at
    least two less, so that no place goes back and forth.

    Prompts are computed, and blocks kept, first for tenants within their shares of the slots, then in the order of the
    counters at which requests first boarded. Deciding takes time in proportion to the number of tenants that wait, not
    of requests.
    """

    honours: tuple[str, ...] = ("shares",)
    has_shares = True
    may_displace = True
    barrier_reason = WaitReason.TENANT_LIMIT

    def __init__(self, shares: Mapping[str, Share] | None = None) -> None:
        self._accounts = Accounts(shares or {})
        self._boarded: dict[int, tuple[int, int]] = {}  # request: (counter at first boarding, prompt tokens charged)

    def check_add(self, request: Request, view: View) -> None:
        """Raises TenantQueueFull, or TooManyChoices where even an idle server would be too small."""
        share, n = self._accounts.share(request.tenant), request.params.n
        if share.max_queued is None:
            return
        num_places = view.max_num_seqs if share.max_running is None else min(view.max_num_seqs, share.max_running)
        if n > num_places + share.max_queued:
            raise TooManyChoices(n, num_places + share.max_queued)
        self._accounts.settle_paid(view.now_ns)
        account = self._accounts.peek(request.tenant, view)
        num_free = min(self._num_free_slots(account, view), num_places - len(account.running))
        if not self._may_board_next(request, account, view):
            num_free = 0
        excess = account.num_waiting + n - max(0, num_free) - share.max_queued
        if excess > 0:
            retry_ns = max(excess * account.boarding_gap_ns(view.now_ns), account.paid_ns() - view.now_ns)
            retry_after_s = min(max(1, -(-retry_ns // NS_PER_S)), _MAX_RETRY_AFTER_S)
            raise TenantQueueFull(account.num_waiting, n, share.max_queued, retry_after_s)

    def _num_free_slots(self, account: Account, view: View) -> int:
        """Slots that neither run or hold a request nor will be taken by other tenants' waiting ones."""
        num_others = sum(len(other.line) for other in self._accounts.competing() if other is not account)
        return view.max_num_seqs - view.num_running - view.num_held - num_others

    def _may_board_next(self, request: Request, account: Account, view: View) -> bool:
        """The tenant's next request, which is this one if none waits, is within its limits."""
        if len(account.line):
            return self._accounts.competes(request.tenant)
        return account.paid_ns() <= view.now_ns and not account.is_full_for(request)

    def on_add(self, request: Request, view: View) -> None:
        account = self._accounts.open(request.tenant, view)
        account.leave(request)
        account.parked.discard(request.request_id)
        account.wait(request, view.now_ns)
        self._accounts.settle(request.tenant, view.now_ns)

    def on_admit(self, request: Request, view: View) -> None:
        account = self._accounts[request.tenant]
        account.line.discard(request)
        if request.state is not RequestState.RUNNING:
            account.parked.add(request.request_id)
        else:
            account.board(request, view.now_ns)
            if request.request_id not in self._boarded:
                num_tokens = request.num_prompt_tokens - request.num_computed_tokens
                self._boarded[request.request_id] = (account.counter, num_tokens)
                account.charge(INPUT_COST * num_tokens, view.now_ns)
        self._accounts.settle(request.tenant, view.now_ns)

    def on_remove(self, request: Request, view: View) -> None:
        account = self._accounts[request.tenant]
        account.line.discard(request)
        account.parked.discard(request.request_id)
        account.leave(request)
        self._boarded.pop(request.request_id, None)
        self._accounts.settle(request.tenant, view.now_ns)

    def pick(self, view: View) -> Request | Wait | None:
        until_ns = self._accounts.settle_paid(view.now_ns)
        first = self._first_of(self._accounts.competing())
        if first is not None:
            return first
        return None if until_ns is None else Wait(until_ns, WaitReason.TENANT_LIMIT)

    def line(self, num: int, view: View) -> list[Request]:
        """As if each boarded with nothing of its prompt in the cache; tenants at one of their limits come last."""
        lines = [(tenant, account, deque(account.line.first(num))) for tenant, account in self._accounts.items()]
        turns = [
            (not self._accounts.competes(tenant), account.counter, len(account.running), line[0].request_id, i)
            for i, (tenant, account, line) in enumerate(lines)
            if line
        ]
        heapify(turns)
        found = list[Request]()
        while turns and len(found) < num:
            is_limited, counter, num_running, _, i = heappop(turns)
            _, account, line = lines[i]
            request = line.popleft()
            found.append(request)
            if line:
                counter += INPUT_COST * (request.num_prompt_tokens - request.num_computed_tokens) * account.unit
                heappush(turns, (is_limited, counter, num_running + 1, line[0].request_id, i))
        return found

    def may_return(self, request: Request, view: View) -> bool:
        account = self._accounts[request.tenant]
        return account.paid_ns() <= view.now_ns and not account.is_full_for(request)

    def _first_of(self, accounts: Iterable[Account]) -> Request | None:
        """The first in line of the account that has been served least, of several the one that runs least."""
        heads = [
            (account.counter, len(account.running), head.request_id, head)
            for account in accounts
            if (head := account.line.head()) is not None
        ]
        return min(heads)[3] if heads else None

    def passed_over(self, head: Request) -> Iterator[tuple[Request, WaitReason]]:
        for tenant, account in self._accounts.items():
            first = account.line.head()
            if first is not None and not self._accounts.competes(tenant):
                yield first, WaitReason.TENANT_LIMIT
            elif first is not None and first.request_id < head.request_id and self._has_had_its_share(account):
                yield first, WaitReason.OVER_SHARE

    def _has_had_its_share(self, account: Account) -> bool:
        """Whether a tenant that competes, and whose request came before the one who is next, has been served more."""
        return True

    def claimant(self, view: View) -> Request | None:
        """The next of the tenants that ask for little, in the order of their counters."""
        self._accounts.settle_paid(view.now_ns)
        return self._first_of([a for a in self._accounts.competing() if self._asks_for_little(a, view)])

    def displaces(self, picked: Request, tail: Request, view: View) -> bool:
        guest, host = self._accounts[picked.tenant], self._accounts[tail.tenant]
        num_guest, num_host = len(guest.running), len(host.running)
        exceeds = self._accounts.exceeds_slot_share(host, num_host, view.max_num_seqs)
        return exceeds and num_host >= num_guest + 2 and self._asks_for_little(guest, view)

    def _asks_for_little(self, account: Account, view: View) -> bool:
        """All its requests, or a single one, are within its share of the slots."""
        num_wanted = len(account.running) + account.num_waiting
        return num_wanted <= 1 or not self._accounts.exceeds_slot_share(account, num_wanted, view.max_num_seqs)

    def keep_key(self, request: Request, view: View) -> tuple[int, ...]:
        account = self._accounts[request.tenant]
        num_running = len(account.running) + (request.request_id not in account.running)
        exceeds = self._accounts.exceeds_slot_share(account, num_running, view.max_num_seqs)
        counter = self._boarded[request.request_id][0] if request.request_id in self._boarded else account.counter
        return (int(exceeds), counter, request.request_id)

    def charge(self, request: Request, num_prefill: int, num_decode: int, now_ns: int) -> None:
        account = self._accounts[request.tenant]
        account.charge(OUTPUT_COST * num_decode, now_ns)
        counter, num_charged = self._boarded[request.request_id]
        num_due = request.num_prompt_tokens - request.num_cached_tokens
        if num_due < num_charged:  # what the cache had after all is given back
            self._boarded[request.request_id] = (counter, num_due)
            account.charge(-INPUT_COST * (num_charged - num_due), now_ns)
        if account.is_limited:
            account.grow(request)
            self._accounts.settle(request.tenant, now_ns)
