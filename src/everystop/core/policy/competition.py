"""Virtual token counters (Sheng et al., OSDI 2024, arXiv 2401.00588): which tenants compete to be next, and from which
counter on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

ONE = 1 << 20  # counters are whole numbers, so that sums do not depend on their order


class Counted(Protocol):
    """An account with the service that its tenant has had so far, over its weight."""

    counter: int


def unit_of(weight: float) -> int:
    """What a tenant's counter rises by for one token."""
    return max(1, round(ONE / weight))


A = TypeVar("A", bound=Counted)


class Competition(Generic[A]):
    """The accounts of those who may be next, by tenant, and the last one who stopped."""

    def __init__(self) -> None:
        self._accounts: dict[str, A] = {}
        self._last: A | None = None

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._accounts

    def __len__(self) -> int:
        return len(self._accounts)

    def __iter__(self) -> Iterator[A]:
        return iter(self._accounts.values())

    def settle(self, tenant: str, account: A, *, competes: bool) -> None:
        """Note whether the tenant competes now. The counter of one that did not is lifted to the floor."""
        if competes and tenant not in self._accounts:
            account.counter = max(account.counter, self.floor())
            self._accounts[tenant] = account
        elif not competes and tenant in self._accounts:
            self._last = self._accounts.pop(tenant)

    def floor(self) -> int:
        """The least counter of those who compete, else that of the last who did."""
        last = 0 if self._last is None else self._last.counter
        return min((account.counter for account in self._accounts.values()), default=last)
