"""Deficit longest prefix match: who boards next, how far locality may go, and what a decision costs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.events import AdmitEvent, WaitEvent, WaitReason
from everystop.core.policy import FairPrefix, Share
from everystop.core.policy.base import View
from everystop.core.policy.fair_prefix import MAX_LOOKUPS, MAX_OVERTAKINGS
from everystop.core.policy.waiting import WaitingLine
from everystop.core.request import Request

RED, BLUE = list(range(100, 140)), list(range(200, 240))


def make_harness(
    shares: dict[str, Share] | None = None, *, quantum: int = 10_000, num_slots: int = 1, **settings: object
) -> Harness:
    settings = {"num_blocks": 400, "block_size": 4, **settings}
    policy = FairPrefix(shares, quantum)
    return Harness(make_scheduler(policy=policy, max_num_seqs=num_slots, **settings))  # type: ignore[arg-type]


def add(harness: Harness, prefix: list[int], tenant: str = "a", num_output: int = 2) -> int:
    request_id = len(harness.requests)
    harness.add(make_request(request_id, [*prefix, 1000 + request_id], max_tokens=num_output, tenant=tenant))
    return request_id


def boarded(harness: Harness) -> list[int]:
    return [e.request_id for e in harness.events if isinstance(e, AdmitEvent) and not e.resumed]


def warm(harness: Harness, *prefixes: list[int]) -> None:
    """Leave prefixes in the cache."""
    for prefix in prefixes:
        add(harness, prefix, "warm")
        harness.run()
    harness.events.clear()


def test_longest_cached_prefix_boards_first() -> None:
    harness = make_harness()
    warm(harness, RED)
    cold = add(harness, BLUE)
    short, long = add(harness, RED[:20]), add(harness, RED)
    harness.run()
    assert boarded(harness) == [long, short, cold]


def test_prefix_that_is_being_computed_gathers_those_who_share_it() -> None:
    """Nothing is cached at first; red and blue come in turns, and board by colour."""
    harness = make_harness()
    requests = [add(harness, prefix) for _ in range(4) for prefix in (RED, BLUE)]
    harness.run()
    assert boarded(harness) == requests[::2] + requests[1::2]


def test_without_matches_the_order_is_that_of_credit_and_arrival() -> None:
    harness = make_harness(prefix_caching=False)
    first = [add(harness, RED, "a") for _ in range(3)]
    second = [add(harness, RED, "b") for _ in range(3)]
    harness.run()
    assert boarded(harness) == [first[0], second[0], first[1], second[1], first[2], second[2]]


def test_locality_ends_where_credit_does() -> None:
    """a's requests all match, b's none. A request of a costs 5, so a quantum of 50 pays for ten of them in a row."""
    harness = make_harness(quantum=50)
    warm(harness, RED)
    hot = [add(harness, RED, "a") for _ in range(40)]
    cold = [add(harness, [5000 + i] * 40, "b") for i in range(3)]
    harness.run()
    order = boarded(harness)
    colds = [order.index(i) for i in cold]
    assert colds[0] <= 10
    assert all(7 <= after - before <= 13 for before, after in pairwise(colds))
    assert [i for i in order if i in hot] == hot


def test_quantum_without_end_is_longest_prefix_match() -> None:
    harness = make_harness(quantum=10**9)
    warm(harness, RED)
    cold = add(harness, BLUE, "b")
    hot = [add(harness, RED, "a") for _ in range(100)]
    harness.run()
    assert boarded(harness) == [*hot, cold]


def test_weights_divide_the_service_though_locality_orders_it() -> None:
    harness = make_harness({"b": Share(3.0)}, quantum=100)
    for _ in range(80):
        add(harness, RED, "a")
        add(harness, BLUE, "b")
    harness.run()
    tenants = [harness.requests[i].tenant for i in boarded(harness)[:80]]
    assert tenants.count("b") in range(52, 69)


@pytest.mark.parametrize("num_before", [0, 3])
def test_cold_request_is_overtaken_by_a_bounded_number_of_its_tenant(num_before: int) -> None:
    harness = make_harness(quantum=10**9)
    warm(harness, RED)
    cold = [add(harness, [5000 + i] * 40) for i in range(num_before + 1)]
    for _ in range(200):
        add(harness, RED)
    harness.run()
    assert boarded(harness).index(cold[0]) == MAX_OVERTAKINGS
    assert boarded(harness).index(cold[-1]) <= (num_before + 1) * (MAX_OVERTAKINGS + 1)


def test_preempted_request_is_not_overtaken_by_its_tenant() -> None:
    harness = make_harness(num_slots=3, num_blocks=24, block_size=4, quantum=10**9)
    for _ in range(12):
        add(harness, RED[:8], num_output=40)
    harness.run()
    assert harness.counts["preemptions"] > 0
    events = [e for e in harness.events if isinstance(e, AdmitEvent) or type(e).__name__ == "PreemptEvent"]
    away: set[int] = set()
    for event in events:
        if isinstance(event, AdmitEvent):
            assert event.request_id in away or not away
            away.discard(event.request_id)
        else:
            away.add(event.request_id)


def test_decision_looks_up_a_bounded_number_and_none_without_a_free_slot() -> None:
    harness = make_harness(num_slots=2, quantum=100)
    asked = 0
    match = harness.scheduler.roster.view.num_matched_tokens

    def counting(request: Request) -> int:
        nonlocal asked
        asked += 1
        return match(request)

    harness.scheduler.roster.view.num_matched_tokens = counting
    for i in range(3_000):
        harness.scheduler.add(make_request(i, RED[:8], max_tokens=4, tenant=f"tenant {i % 100}"), 0)
    policy, view = harness.scheduler.policy, harness.scheduler.roster.view
    policy.pick(view)
    assert 0 < asked <= MAX_LOOKUPS
    asked = 0
    harness.scheduler.schedule(0)
    assert harness.scheduler.num_running == 2
    assert asked <= 2 * MAX_LOOKUPS
    asked = 0
    policy.pick(View(max_num_seqs=2, num_running=2, num_matched_tokens=counting))
    assert asked == 0


def test_candidate_that_would_pass_the_share_of_the_cache_is_no_candidate() -> None:
    """The first fits the share and is cold; the second matches and does not fit."""
    harness = make_harness({"a": Share(kv_share=0.08)}, num_slots=4, num_blocks=200)
    warm(harness, RED)
    add(harness, [7] * 20, num_output=30)
    harness.turn()
    cold, hot = add(harness, [9] * 20), add(harness, RED)
    harness.turn()
    assert boarded(harness)[1:] == [cold]
    harness.run()
    assert boarded(harness)[-1] == hot


def test_only_those_without_credit_are_said_to_be_over_their_share() -> None:
    harness = make_harness(quantum=60, num_slots=2)
    warm(harness, RED)
    cold = add(harness, BLUE, "b", 30)
    other = add(harness, [8] * 40, "c", 30)
    hot = [add(harness, RED, "a", 30) for _ in range(3)]
    harness.turn()
    assert boarded(harness) == hot[:2]
    harness.run()
    reasons = {
        i: [e.reason for e in harness.events if isinstance(e, WaitEvent) and e.request_id == i] for i in (cold, other)
    }
    assert WaitReason.TENANT_LIMIT not in reasons[cold] + reasons[other]


def test_line_lists_its_first_in_order_whoever_has_left() -> None:
    line = WaitingLine()
    requests = [make_request(i, 1) for i in range(50)]
    for request in reversed(requests):
        line.push(request)
    for i in range(0, 50, 3):
        line.discard(requests[i])
    for i in (3, 9):
        line.push(requests[i])
    line.push(make_request(99, 1), -1)
    expected = [99, *(i for i in range(50) if i % 3 or i in (3, 9))]
    for num in (0, 1, 7, 100):
        assert [request.request_id for request in line.first(num)] == expected[:num]
    assert WaitingLine().first(5) == []
