"""Preemption by recomputing: no answer changes, the first in keep order never pays, no more is lost than must be."""

from __future__ import annotations

import random

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.events import AdmitEvent, PreemptEvent
from everystop.core.policy import POLICIES


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("max_num_batched_tokens", [8, 64])
@pytest.mark.parametrize("num_generated", [1, 15, 16, 17])
def test_answer_survives_a_preemption_after_k_tokens(
    num_generated: int, max_num_batched_tokens: int, prefix_caching: bool, depth: int
) -> None:
    scheduler = make_scheduler(
        policy="priority",
        prefix_caching=prefix_caching,
        max_num_seqs=1,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    harness = Harness(scheduler, depth=depth)
    harness.add(make_request(0, 16, max_tokens=40, temperature=1.0, seed=7, priority=5))
    while len(harness.output(0)) < num_generated:
        harness.turn()
    harness.add(make_request(1, 20, max_tokens=3, priority=0))
    harness.run()
    (preempted,) = [e for e in harness.events if isinstance(e, PreemptEvent)]
    assert preempted.request_id == 0
    (resumed,) = [e for e in harness.events if isinstance(e, AdmitEvent) and e.resumed]
    assert resumed.num_tokens == 16 + num_generated + depth  # at depth 1 one more token was on its way
    assert (len(harness.output(0)), len(harness.output(1))) == (40, 3)


@pytest.mark.parametrize("seed", range(20))
def test_chunked_recomputation_in_a_tight_pool_leaves_every_answer_alone(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=29, block_size=16, max_num_seqs=16, max_num_batched_tokens=16)
    harness = Harness(scheduler, depth=seed % 2)
    for i in range(16):
        harness.add(make_request(i, rng.randint(4, 40), max_tokens=60, temperature=1.0, seed=i))
    harness.run(max_turns=2_000)
    assert harness.counts["preemptions"] >= 1


@pytest.mark.parametrize("depth", [0, 1])
def test_victim_is_not_in_the_plan_that_preempts_it(depth: int) -> None:
    """Two rows at a block border, one free block; the one visited first ranks lower."""
    harness = Harness(make_scheduler(policy="priority", num_blocks=5, max_num_seqs=2), depth=depth)
    harness.add(make_request(0, 20, max_tokens=20, priority=1))
    harness.add(make_request(1, 20, max_tokens=20, priority=0))
    harness.run()
    (plan,) = [plan for plan in harness.plans if plan.preempted]
    assert plan.preempted == [0]
    assert [row.request_id for row in plan.rows] in ([1], [])
    assert not any(new.request_id == 0 for new in plan.new_blocks)
    assert len(harness.output(0)) == len(harness.output(1)) == 20


@pytest.mark.parametrize("depth", [0, 1])
def test_one_missing_block_costs_one_victim(depth: int) -> None:
    harness = Harness(make_scheduler(num_blocks=11, max_num_seqs=4, prefix_caching=False), depth=depth)
    for i in range(4):
        harness.add(make_request(i, 20, max_tokens=16))
    harness.run()
    assert [e.request_id for e in harness.events if isinstance(e, PreemptEvent)] == [3]


@pytest.mark.parametrize("policy", ["continuous", "static", "static-padded", "priority"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_badly_undersized_pool_makes_progress(policy: str, prefix_caching: bool) -> None:
    """Requests of 60 % of the pool each: the oldest is never preempted, and the storm is bounded."""
    scheduler = make_scheduler(policy=policy, num_blocks=10, block_size=16, prefix_caching=prefix_caching)
    harness = Harness(scheduler)
    for i in range(3):
        harness.add(make_request(i, 20, max_tokens=76))
    harness.run(max_turns=1_000)
    victims = [e.request_id for e in harness.events if isinstance(e, PreemptEvent)]
    assert 0 not in victims
    assert 1 <= len(victims) <= 6


def test_preempted_request_returns_before_new_arrivals() -> None:
    harness = Harness(make_scheduler(num_blocks=8, max_num_seqs=3))
    for i in range(3):
        harness.add(make_request(i, 20, max_tokens=40))
    while not harness.counts["preemptions"]:
        harness.turn()
    harness.add(make_request(3, 4, max_tokens=4))
    harness.run()
    boarded = [e.request_id for e in harness.events if isinstance(e, AdmitEvent)]
    assert boarded.index(3) > max(i for i, e in enumerate(boarded) if e == 2)


def test_step_that_preempted_admits_nobody() -> None:
    harness = Harness(make_scheduler(num_blocks=12, block_size=4, max_num_seqs=8))
    for i in range(12):
        harness.add(make_request(i, 6, max_tokens=20))
    harness.run()
    assert any(plan.preempted for plan in harness.plans)
    assert not any(plan.preempted and plan.admitted for plan in harness.plans)


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_request_that_ends_by_the_token_on_its_way_does_not_come_back(depth: int) -> None:
    """At depth 1 the last token of a victim may arrive after it lost its place."""
    for max_tokens in range(2, 12):
        harness = Harness(make_scheduler(policy="priority", max_num_seqs=1), depth=depth)
        harness.add(make_request(0, 5, max_tokens=max_tokens, priority=5))
        harness.turn()
        harness.turn()
        harness.add(make_request(1, 5, max_tokens=2, priority=0))
        harness.run()
        assert len(harness.output(0)) == max_tokens


def test_request_preempted_too_often_moves_to_the_front() -> None:
    harness = Harness(make_scheduler(policy="priority", max_num_seqs=1, max_preemptions=2))
    victim = harness.add(make_request(0, 5, max_tokens=30, priority=5))
    for i in range(1, 4):
        while victim.request_id not in harness.scheduler.running:
            harness.turn()
        harness.turn()
        harness.add(make_request(i, 5, max_tokens=3, priority=0))
        harness.turn()
    harness.run()
    assert victim.num_preemptions == 2
    assert list(harness.finished) == [1, 2, 0, 3]


def test_request_preempted_too_often_boards_before_all_who_wait() -> None:
    """It gave up its blocks once; the urgent ones behind it do not fit beside the others, and now wait for it."""
    harness = Harness(make_scheduler(policy="priority", num_blocks=9, block_size=4, max_num_seqs=3, max_preemptions=1))
    harness.add(make_request(0, 8, max_tokens=20, priority=0))
    harness.add(make_request(1, 8, max_tokens=20, priority=5))
    while not harness.counts["preemptions"]:
        harness.turn()
    harness.add(make_request(2, 8, max_tokens=2, priority=0))
    harness.run()
    boarded = [event.request_id for event in harness.events if isinstance(event, AdmitEvent)]
    assert boarded == [0, 1, 1, 2]


def test_request_at_the_front_is_first_in_both_orders_under_every_policy() -> None:
    for policy in POLICIES:
        scheduler = make_scheduler(policy=policy, num_blocks=12, block_size=4, max_num_seqs=4, max_preemptions=2)
        harness = Harness(scheduler)
        for request_id in range(30):
            harness.add(make_request(request_id, 5 + request_id % 7, max_tokens=24, priority=request_id % 3))
        seen = 0
        for _ in range(2_000):
            running = list(scheduler.running)
            waiting = [r for r in scheduler.requests.values() if r.request_id not in running and r.num_preemptions >= 2]
            kept = [r.request_id for r in scheduler.running.values() if r.num_preemptions >= 2]
            turn = harness.turn()
            admitted = [a.request_id for a in turn.plan.admitted] if turn.plan is not None else []
            if waiting and admitted:
                seen += 1
                assert admitted[0] == min(r.request_id for r in waiting), policy
            if kept and turn.plan is not None:
                assert min(kept) not in turn.plan.preempted, policy
            if not scheduler.has_work:
                break
        assert not scheduler.has_work
        assert seen or policy == "static", policy


def test_resumed_request_finds_its_own_blocks_without_a_prefix_hit() -> None:
    """It boards again with blocks that are still cached; they count neither as its hits nor as computed again."""
    harness = Harness(make_scheduler(policy="priority", num_blocks=40, block_size=4, max_num_seqs=1))
    harness.add(make_request(0, 22, max_tokens=20, priority=5))
    for _ in range(4):
        harness.turn()
    harness.add(make_request(1, 5, max_tokens=2, priority=0))
    harness.run()
    (resumed,) = [e for e in harness.events if isinstance(e, AdmitEvent) and e.resumed]
    assert resumed.num_cached_tokens == 24
    assert harness.finished[0].num_cached_tokens == 0
    (preempted,) = [e for e in harness.events if isinstance(e, PreemptEvent)]
    assert harness.counts["recomputed tokens"] == preempted.num_lost_tokens - 24 > 0
