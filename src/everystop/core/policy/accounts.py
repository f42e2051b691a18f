"""What each tenant has been served, who of its requests wait and run, and which tenants compete for the next place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from everystop.core.policy.base import View
from everystop.core.policy.competition import ONE, Competition, unit_of
from everystop.core.policy.rate import RateLimit
from everystop.core.policy.waiting import WaitingLine
from everystop.core.request import Request

_WEIGHT_UNIT = 1000
_MAX_IDLE = 64


class Share(NamedTuple):
    """What a tenant may use, and what it is promised.

    Service in proportion to `weight`; at most `max_running` requests at a time and `max_queued` waiting; `token_rate`
    weighted tokens a second; `kv_share` of the KV cache's blocks, from 0 to 1; first tokens within `ttft_ns` of their
    arrival and later ones within `itl_ns` of the one before. None is no limit, or no promise.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_queued: int | None = None
    token_rate: float | None = None
    kv_share: float | None = None
    ttft_ns: int | None = None
    itl_ns: int | None = None


@dataclass(slots=True)
class Account:
    """One tenant: its service so far, divided by its weight, and who of its requests wait and run.

    `running` holds the blocks in the table of each request on board, `num_blocks` their sum (a block that two share
    counts twice), `parked` those that wait for a sibling's prompt.
    """

    unit: int = ONE
    weight: int = _WEIGHT_UNIT
    max_running: int | None = None
    max_blocks: int | None = None
    block_size: int = 1
    rate: RateLimit | None = None
    counter: int = 0
    line: WaitingLine = field(default_factory=WaitingLine)
    parked: set[int] = field(default_factory=set)
    running: dict[int, int] = field(default_factory=dict)
    num_blocks: int = 0
    _boarding_gap_ns: int = 0
    _first_since_ns: int = 0
    _left_a_queue: bool = False

    @classmethod
    def under(cls, share: Share, view: View) -> Account:
        """A new account with this share of the server in view."""
        return cls(
            unit=unit_of(share.weight),
            weight=max(1, round(_WEIGHT_UNIT * share.weight)),
            max_running=share.max_running,
            max_blocks=None if share.kv_share is None else int(share.kv_share * view.num_blocks),
            block_size=view.block_size,
            rate=None if share.token_rate is None else RateLimit(share.token_rate),
        )

    @property
    def num_waiting(self) -> int:
        """Its requests that have arrived and do not run."""
        return len(self.line) + len(self.parked)

    @property
    def is_idle(self) -> bool:
        """It has no request here."""
        return not (self.num_waiting or self.running)

    @property
    def is_limited(self) -> bool:
        """What its running requests do can end its right to board."""
        return self.rate is not None or self.max_blocks is not None

    def paid_ns(self) -> int:
        """Until when it has to wait because of its rate; 0 without one."""
        return 0 if self.rate is None else self.rate.paid_ns

    def charge(self, cost: int, now_ns: int) -> None:
        """Count service; a negative cost gives some back."""
        self.counter += cost * self.unit
        if self.rate is not None:
            self.rate.spend(cost, now_ns)

    def wait(self, request: Request, now_ns: int) -> None:
        """A request waits to board: one that was preempted before those that have not been on board."""
        if not len(self.line):
            self._first_since_ns = now_ns
        self.line.push(request, -1 if request.num_preemptions else 0)

    def board(self, request: Request, now_ns: int) -> None:
        """A request is on board, with its blocks."""
        self.running[request.request_id] = len(request.block_table)
        self.num_blocks += len(request.block_table)
        if self._left_a_queue:
            gap_ns = now_ns - self._first_since_ns
            self._boarding_gap_ns = (3 * self._boarding_gap_ns + gap_ns) // 4 if self._boarding_gap_ns else gap_ns
        self._left_a_queue = len(self.line) > 0
        self._first_since_ns = now_ns

    def boarding_gap_ns(self, now_ns: int) -> int:
        """The mean time between its boardings while others of its requests waited, or how long the first in line has
        been the first, if that is longer.
        """
        return max(self._boarding_gap_ns, now_ns - self._first_since_ns if len(self.line) else 0)

    def grow(self, request: Request) -> None:
        """Note the blocks of a request, if it is on board."""
        num_before = self.running.get(request.request_id)
        if num_before is not None and num_before != len(request.block_table):
            self.running[request.request_id] = len(request.block_table)
            self.num_blocks += len(request.block_table) - num_before

    def leave(self, request: Request) -> None:
        """A request is no longer on board, or was not."""
        self.num_blocks -= self.running.pop(request.request_id, 0)

    def is_full_for(self, request: Request) -> bool:
        """A request would pass what the tenant may run or hold; never where it runs nothing."""
        if self.max_running is not None and len(self.running) >= self.max_running:
            return True
        if self.max_blocks is None or not self.running:
            return False
        return self.num_blocks + request.num_tokens // self.block_size + 1 > self.max_blocks


class Accounts:
    """The accounts of all tenants that are there, by name.

    A tenant competes while it has a request that may board: within its limits, and with all paid for that its rate
    made it owe. It pays while only the rate keeps it. It is present while it has any request.
    """

    def __init__(self, shares: Mapping[str, Share]) -> None:
        self._shares = dict(shares)
        self._accounts: dict[str, Account] = {}
        self._competing: Competition[Account] = Competition()
        self._paying: dict[str, Account] = {}
        self._present: dict[str, Account] = {}
        self._weight_present = 0
        self._max_accounts = _MAX_IDLE

    def __len__(self) -> int:
        return len(self._accounts)

    def __getitem__(self, tenant: str) -> Account:
        return self._accounts[tenant]

    def items(self) -> Iterator[tuple[str, Account]]:
        """All accounts with their tenants' names."""
        return iter(self._accounts.items())

    def share(self, tenant: str) -> Share:
        """What the tenant may use."""
        return self._shares.get(tenant, Share())

    def peek(self, tenant: str, view: View) -> Account:
        """The tenant's account, or one like that which it would have; nothing is opened."""
        return self._accounts.get(tenant) or Account.under(self.share(tenant), view)

    def competes(self, tenant: str) -> bool:
        """It is one of those of whom one boards next."""
        return tenant in self._competing

    def competing(self) -> Iterator[Account]:
        """Those of whom one boards next."""
        return iter(self._competing)

    def open(self, tenant: str, view: View) -> Account:
        """The tenant's account, a new one if need be."""
        account = self._accounts.get(tenant)
        if account is None:
            self._close_idle(view.now_ns)
            account = self._accounts[tenant] = Account.under(self.share(tenant), view)
        return account

    def settle(self, tenant: str, now_ns: int) -> None:
        """See whether the tenant competes now. The counter of one that did not is lifted to the floor."""
        account = self._accounts[tenant]
        head = account.line.head()
        may_board = head is not None and not account.is_full_for(head)
        has_paid = account.paid_ns() <= now_ns
        self._competing.settle(tenant, account, competes=may_board and has_paid)
        self._note_presence(tenant, account)
        if may_board and not has_paid:
            self._paying[tenant] = account
        else:
            self._paying.pop(tenant, None)

    def _note_presence(self, tenant: str, account: Account) -> None:
        if account.is_idle:
            if self._present.pop(tenant, None) is not None:
                self._weight_present -= account.weight
        elif tenant not in self._present:
            self._present[tenant] = account
            self._weight_present += account.weight

    def exceeds_slot_share(self, account: Account, num_requests: int, max_num_seqs: int) -> bool:
        """So many requests of a tenant are more than its share, by weight, of the slots among those present."""
        return num_requests * self._weight_present > max_num_seqs * account.weight

    def settle_paid(self, now_ns: int) -> int | None:
        """Let those compete who have paid meanwhile; returns when the next of the others will have, None for nobody."""
        if not self._paying:
            return None
        for tenant in [name for name, account in self._paying.items() if account.paid_ns() <= now_ns]:
            self.settle(tenant, now_ns)
        return min((account.paid_ns() for account in self._paying.values()), default=None)

    def _close_idle(self, now_ns: int) -> None:
        """Idle accounts that would be lifted to the floor anyway, and owe nothing, are as good as new, so they go when
        there are many.
        """
        if len(self._accounts) < self._max_accounts:
            return
        floor = self._competing.floor()
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if not account.is_idle or account.counter > floor or account.paid_ns() > now_ns
        }
        self._max_accounts = 2 * len(self._accounts) + _MAX_IDLE
