"""Policies answer narrow questions about order; the scheduler keeps correctness, blocks and budgets to itself."""

from __future__ import annotations

from everystop.core.errors import ConfigError
from everystop.core.policy.base import Policy, View, Wait
from everystop.core.policy.continuous import Continuous
from everystop.core.policy.static import Static, StaticPadded

__all__ = ["POLICIES", "Continuous", "Policy", "Static", "StaticPadded", "View", "Wait", "make_policy"]

POLICIES = ("continuous", "static", "static-padded")


def make_policy(name: str, *, batch_wait_ns: int = 0) -> Policy:
    """The policy of that name, one of `POLICIES`; `batch_wait_ns` concerns the static ones only."""
    if name == "continuous":
        return Continuous()
    if name == "static":
        return Static(batch_wait_ns)
    if name == "static-padded":
        return StaticPadded(batch_wait_ns)
    raise ConfigError(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}")
