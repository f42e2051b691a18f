"""What can be set about policies, in one place: from the command line, in a record and in a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from everystop.core.policy.accounts import Share
from everystop.core.policy.base import AGEING_NS
from everystop.core.policy.deadline import DEFAULT_TARGETS, Targets
from everystop.core.policy.fair_prefix import QUANTUM


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The settings of all policies; each uses those that it names in `honours`.

    `shares` are by tenant and `quantum` is in weighted tokens.
    """

    batch_wait_ns: int = 0
    ageing_ns: int = AGEING_NS
    shares: Mapping[str, Share] = field(default_factory=dict)
    quantum: int = QUANTUM
    targets: Targets = DEFAULT_TARGETS

    def numbered(self) -> PolicySettings:
        """The same with the tenants' places in `shares` for their names."""
        return replace(self, shares={str(number): share for number, share in enumerate(self.shares.values())})

    def as_data(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        shares = {name: share._asdict() for name, share in self.shares.items()}
        return asdict(self) | {"shares": shares, "targets": self.targets._asdict()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> PolicySettings:
        """From what `as_data` made, or from the header of an older record: it lists the fields of shares and targets
        without names, lacks what did not exist yet, and has a 0 or nothing for what its server left at the default.
        """
        shares, targets = data.get("shares", {}), data.get("targets", {})
        by_name = shares if isinstance(shares, Mapping) else {str(number): each for number, each in enumerate(shares)}
        return cls(
            batch_wait_ns=data.get("batch_wait_ns", 0),
            ageing_ns=data.get("ageing_ns") or AGEING_NS,
            shares={
                name: Share(**share) if isinstance(share, Mapping) else Share(*share) for name, share in by_name.items()
            },
            quantum=data.get("quantum") or QUANTUM,
            targets=Targets(**targets) if isinstance(targets, Mapping) else Targets(*targets),
        )
