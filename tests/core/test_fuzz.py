"""Fuzzing of scheduler, cache and loop against the oracle; its coverage is asserted, so it cannot become vacuous."""

from __future__ import annotations

import pytest
from tests.core.fuzz import ABORT_WEIGHTS, fuzz

from everystop.core.policy import POLICIES


def required(num_steps: int) -> dict[str, int]:
    """What that many steps are asked to cover, in proportion to 100,000; `check_fuzz` gives twice the steps for it."""
    per_100k = {"steps": 100_000, "preemptions": 1000, "prefix hits": 1000, "forks": 500, "evictions": 500}
    per_100k |= {"failed rows": 100, "wasted rows": 1000}
    per_100k |= {f"aborts while {state}": 1000 for state in ABORT_WEIGHTS}
    per_100k |= {f"steps under {policy}": 75_000 // len(POLICIES) for policy in POLICIES}
    per_100k |= {"scored tokens": 10_000, "prompts scored in pieces": 500, "preempted while scoring": 20}
    per_100k |= {"refused by TenantQueueFull": 50, "waits of tenants": 50}
    per_100k |= {f"steps at depth {depth}": 30_000 for depth in (0, 1)} | {"steps executed late": 15_000}
    return {name: number * num_steps // 100_000 for name, number in per_100k.items()}


def check_fuzz(num_steps: int, *, seed: int) -> None:
    """Fuzz for twice that many steps, print the coverage and assert what once as many must reach, so that the rarest
    kinds are met with any seed; a divergence from the oracle fails inside.
    """
    coverage = fuzz(2 * num_steps, seed=seed)
    print(*(f"{name}: {number:,}" for name, number in sorted(coverage.items())), sep="\n")
    missed = {name: (coverage[name], least) for name, least in required(num_steps).items() if coverage[name] < least}
    assert not missed


def test_ten_thousand_fuzzed_steps_never_diverge_from_the_oracle() -> None:
    """It takes 20,000: see `check_fuzz`."""
    check_fuzz(10_000, seed=2)


@pytest.mark.slow
def test_hundred_thousand_fuzzed_steps_never_diverge_from_the_oracle() -> None:
    """It takes 200,000: see `check_fuzz`."""
    check_fuzz(100_000, seed=3)
