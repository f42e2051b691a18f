"""Policies answer narrow questions about order; the scheduler keeps correctness, blocks and budgets to itself."""

from __future__ import annotations

from everystop.core.policy.base import Policy, View, Wait
from everystop.core.policy.continuous import Continuous
from everystop.core.policy.static import Static, StaticPadded

__all__ = ["Continuous", "Policy", "Static", "StaticPadded", "View", "Wait", "make_policy"]


def make_policy(name: str, *, batch_wait_ns: int = 0) -> Policy:
    """The policy of that name; `batch_wait_ns` concerns the static ones only."""
    if name == "continuous":
        return Continuous()
    if name == "static":
        return Static(batch_wait_ns)
    if name == "static-padded":
        return StaticPadded(batch_wait_ns)
    raise ValueError(f"unknown policy {name!r}")
