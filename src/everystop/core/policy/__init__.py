"""Policies answer narrow questions about order; the scheduler keeps correctness, blocks and budgets to itself."""

from __future__ import annotations

from collections.abc import Callable

from everystop.core.errors import ConfigError
from everystop.core.policy.accounts import Share
from everystop.core.policy.base import AGEING_NS, Policy, View, Wait
from everystop.core.policy.continuous import Continuous
from everystop.core.policy.deadline import DEFAULT_TARGETS, Deadline, Targets
from everystop.core.policy.fair import Fair
from everystop.core.policy.fair_prefix import QUANTUM, FairPrefix
from everystop.core.policy.priority import Priority
from everystop.core.policy.settings import PolicySettings
from everystop.core.policy.shortest import Shortest, Work
from everystop.core.policy.static import Static, StaticPadded
from everystop.core.policy.thrifty import Thrifty

__all__ = [
    "AGEING_NS",
    "DEFAULT_TARGETS",
    "POLICIES",
    "QUANTUM",
    "Continuous",
    "Deadline",
    "Fair",
    "FairPrefix",
    "Policy",
    "PolicySettings",
    "Priority",
    "Share",
    "Shortest",
    "Static",
    "StaticPadded",
    "Targets",
    "Thrifty",
    "View",
    "Wait",
    "Work",
    "honouring",
    "make_policy",
]

_MAKE: dict[str, Callable[[PolicySettings], Policy]] = {
    "continuous": lambda settings: Continuous(),
    "static": lambda settings: Static(settings.batch_wait_ns),
    "static-padded": lambda settings: StaticPadded(settings.batch_wait_ns),
    "priority": lambda settings: Priority(settings.ageing_ns),
    "shortest": lambda settings: Shortest(settings.ageing_ns),
    "fair": lambda settings: Fair(settings.shares),
    "fair-prefix": lambda settings: FairPrefix(settings.shares, settings.quantum),
    "deadline": lambda settings: Deadline(settings.targets, settings.shares),
    "thrifty": lambda settings: Thrifty(),
}
POLICIES = tuple(_MAKE)
_DEFAULTS = PolicySettings()


def make_policy(name: str, settings: PolicySettings = _DEFAULTS, *, work: Work | None = None) -> Policy:
    """The policy of that name, one of `POLICIES`, with those settings that it honours.

    `work` tells `shortest` what remains of a request, in tokens (default: of its prompt). Raises ConfigError.
    """
    if name not in _MAKE:
        raise ConfigError(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}")
    if work is None:
        return _MAKE[name](settings)
    if name != "shortest":
        raise ConfigError(f"an oracle needs --policy shortest; the policy {name} does not order by length")
    return Shortest(settings.ageing_ns, work)


def honouring(setting: str) -> tuple[str, ...]:
    """The names of the policies that honour this field of `PolicySettings`."""
    return tuple(name for name in POLICIES if setting in make_policy(name).honours)
