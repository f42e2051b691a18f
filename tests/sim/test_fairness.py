"""Jain's index: by hand, and of runs that are known to be fair or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.sim.test_simulator import make_setup, traced

from everystop.core.policy import PolicySettings, Share
from everystop.sim.fairness import WINDOW_NS, FairnessIndex, jain
from everystop.sim.simulator import Simulation
from everystop.sim.traces import TraceRequest


@pytest.mark.parametrize(
    ("shares", "index"),
    [([5, 5, 5], 1.0), ([1, 0, 0, 0], 0.25), ([1, 2, 3], 36 / 42), ([0, 0], 1.0), ([], 1.0)],
)
def test_index_of_a_few_numbers(shares: list[float], index: float) -> None:
    assert jain(shares) == pytest.approx(index)


def test_window_counts_tenants_that_wait_at_both_ends_over_their_weights() -> None:
    index = FairnessIndex({"b": 3.0})
    index.border(["a", "b", "c"], {"a": 10, "b": 10, "c": 10})
    index.border(["a", "b"], {"a": 20, "b": 40, "c": 10})
    assert index.figures() == {"mean": 1.0, "least": 1.0, "num_windows": 1, "window_s": 10.0}
    index.border(["a", "b", "c"], {"a": 21, "b": 40, "c": 99})
    assert index.figures() == {"mean": 0.75, "least": 0.5, "num_windows": 2, "window_s": 10.0}


def test_window_without_two_who_wait_does_not_count() -> None:
    index = FairnessIndex({})
    for waiting in (["a"], ["a", "b"], ["a"], [], ["a", "b"]):
        index.border(waiting, {"a": 1})
    assert index.figures() is None
    index.pause()
    index.border(["a", "b"], {"a": 1})
    assert index.figures() is None


def floods(rates: dict[str, int], seconds: int) -> Iterator[TraceRequest]:
    """Requests of 20 and 20 tokens, evenly spaced; each tenant with that many a second."""
    for at in range(seconds * 1_000):
        for tenant, rate in rates.items():
            if at * rate % 1_000 < rate:
                yield traced(at, 20, 20, tenant=tenant)


def run(rates: dict[str, int], **changes: Any) -> dict[str, Any]:
    """2 slots and 20 steps of 1 ms: at most 100 requests a second."""
    results = Simulation(make_setup(max_num_seqs=2, check=False, **changes)).run(floods(rates, 3))
    index: dict[str, Any] = results["fairness_index"]
    return index


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everystop.sim.simulator.WINDOW_NS", WINDOW_NS // 50)


@pytest.mark.parametrize("changes", [{}, {"num_replicas": 2, "router": "fair"}])
def test_fair_policy_scores_and_first_come_first_served_does_not(changes: dict[str, Any]) -> None:
    """The second sends three times as much as the first, which is already more than half of what can be served."""
    rates = {"a": 75 * changes.get("num_replicas", 1), "b": 225 * changes.get("num_replicas", 1)}
    fair = run(rates, policy="fair", **changes)
    assert fair["mean"] > 0.99
    assert fair["num_windows"] > 10
    assert run(rates, policy="continuous")["mean"] < 0.85


def test_weights_are_part_of_what_is_fair() -> None:
    rates = {"a": 150, "b": 150}
    settings = PolicySettings(shares={"b": Share(3.0)})
    assert run(rates, policy="fair", policy_settings=settings)["mean"] > 0.97
    assert run(rates, policy="continuous", policy_settings=settings)["mean"] == pytest.approx(0.8, abs=0.02)
