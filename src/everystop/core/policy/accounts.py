"""What each tenant has been served, who of its requests wait and run, and which tenants compete for the next place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from everystop.core.policy.waiting import WaitingLine

_ONE = 1 << 20  # counters are whole numbers, so that sums do not depend on their order
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
    """One tenant: its service so far, divided by its weight, and who of its requests wait and run."""

    unit: int
    max_running: int | None
    counter: int = 0
    line: WaitingLine = field(default_factory=WaitingLine)
    running: set[int] = field(default_factory=set)

    def charge(self, cost: int) -> None:
        """Count service; a negative cost gives some back."""
        self.counter += cost * self.unit

    @property
    def is_full(self) -> bool:
        """It runs as many requests as it may."""
        return self.max_running is not None and len(self.running) >= self.max_running


class Accounts:
    """The accounts of all tenants that are there, by name; a tenant competes while it waits and is not full."""

    def __init__(self, shares: Mapping[str, Share]) -> None:
        self._shares = dict(shares)
        self._accounts: dict[str, Account] = {}
        self._competing: dict[str, Account] = {}
        self._last = Account(_ONE, None)
        self._max_accounts = _MAX_IDLE

    def __len__(self) -> int:
        return len(self._accounts)

    def __getitem__(self, tenant: str) -> Account:
        return self._accounts[tenant]

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def competing(self) -> Iterator[Account]:
        """Those of whom one boards next."""
        return iter(self._competing.values())

    def open(self, tenant: str) -> Account:
        """The tenant's account, a new one if need be."""
        account = self._accounts.get(tenant)
        if account is None:
            self._close_idle()
            share = self._shares.get(tenant, Share())
            account = self._accounts[tenant] = Account(max(1, round(_ONE / share.weight)), share.max_running)
        return account

    def settle(self, tenant: str) -> None:
        """Lift the counter of a tenant that competes from now on to the floor; note one that no longer does."""
        account = self._accounts[tenant]
        competes = len(account.line) > 0 and not account.is_full
        if competes and tenant not in self._competing:
            account.counter = max(account.counter, self._floor())
            self._competing[tenant] = account
        elif not competes and tenant in self._competing:
            self._last = self._competing.pop(tenant)

    def _floor(self) -> int:
        """The least counter of those who compete, else that of the last who did."""
        return min((account.counter for account in self._competing.values()), default=self._last.counter)

    def _close_idle(self) -> None:
        """Idle accounts that would be lifted to the floor anyway are as good as new, so they go when there are many."""
        if len(self._accounts) < self._max_accounts:
            return
        floor = self._floor()
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if len(account.line) or account.running or account.counter > floor
        }
        self._max_accounts = 2 * len(self._accounts) + _MAX_IDLE
