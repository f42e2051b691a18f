"""Policies answer narrow questions about order; the scheduler keeps correctness, blocks and budgets to itself."""

from __future__ import annotations

from collections.abc import Mapping

from everystop.core.errors import ConfigError
from everystop.core.policy.accounts import Share
from everystop.core.policy.base import AGEING_NS, Policy, View, Wait
from everystop.core.policy.continuous import Continuous
from everystop.core.policy.deadline import DEFAULT_TARGETS, Deadline, Targets
from everystop.core.policy.fair import Fair
from everystop.core.policy.fair_prefix import QUANTUM, FairPrefix
from everystop.core.policy.priority import Priority
from everystop.core.policy.shortest import Shortest
from everystop.core.policy.static import Static, StaticPadded
from everystop.core.policy.thrifty import Thrifty

__all__ = [
    "AGEING_NS",
    "DEFAULT_TARGETS",
    "POLICIES",
    "QUANTUM",
    "TENANT_SETTINGS",
    "Continuous",
    "Deadline",
    "Fair",
    "FairPrefix",
    "Policy",
    "Priority",
    "Share",
    "Shortest",
    "Static",
    "StaticPadded",
    "Targets",
    "Thrifty",
    "View",
    "Wait",
    "make_policy",
]

POLICIES = (
    "continuous",
    "static",
    "static-padded",
    "priority",
    "shortest",
    "fair",
    "fair-prefix",
    "deadline",
    "thrifty",
)

_SHARES = ("weight", "max_running", "max_queued", "token_rate", "kv_share")
TENANT_SETTINGS: Mapping[str, tuple[str, ...]] = {  # what of a tenant in the file of --tenants each policy honours
    "fair": _SHARES,
    "fair-prefix": _SHARES,
    "deadline": ("ttft_ms", "itl_ms"),
}


def make_policy(
    name: str,
    *,
    batch_wait_ns: int = 0,
    ageing_ns: int = AGEING_NS,
    shares: Mapping[str, Share] | None = None,
    quantum: int = QUANTUM,
    targets: Targets = DEFAULT_TARGETS,
) -> Policy:
    """The policy of that name, one of `POLICIES`; `batch_wait_ns` concerns the static ones only, `ageing_ns` priority
    and shortest, `shares` (by tenant) the fair ones and deadline, `quantum` (weighted tokens) fair-prefix, and
    `targets` deadline.
    """
    if name == "continuous":
        return Continuous()
    if name == "static":
        return Static(batch_wait_ns)
    if name == "static-padded":
        return StaticPadded(batch_wait_ns)
    if name == "priority":
        return Priority(ageing_ns)
    if name == "shortest":
        return Shortest(ageing_ns)
    if name == "fair":
        return Fair(shares)
    if name == "fair-prefix":
        return FairPrefix(shares, quantum)
    if name == "deadline":
        return Deadline(targets, shares)
    if name == "thrifty":
        return Thrifty()
    raise ConfigError(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}")
