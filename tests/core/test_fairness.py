"""Bounds: what a running request may lose to others in a step, and how long one may wait."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.events import AdmitEvent, StepEvent
from everystop.core.policy import make_policy
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop
from everystop.runner.simulated import SimulatedRunner


def gaps(harness: Harness, request_id: int) -> list[int]:
    steps = harness.steps_of(request_id)
    return [after - before for before, after in pairwise(steps)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_num_batched_tokens", [2, 16, 128])
def test_decoder_emits_at_every_step_while_prompts_stream_in(max_num_batched_tokens: int, depth: int) -> None:
    scheduler = make_scheduler(num_blocks=1_000, max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens)
    harness = Harness(scheduler, depth=depth, is_checking=False)
    harness.add(make_request(0, 2, max_tokens=200))
    for i in range(1, 8):
        harness.add(make_request(i, 2_000, max_tokens=2))
    while 0 not in harness.finished:
        harness.turn()
    assert max(gaps(harness, 0)) == 1
    assert harness.steps_of(0)[0] <= 1


@pytest.mark.parametrize("num_long_prompts", [1, 2])
def test_short_prompt_beside_long_ones_has_its_first_token_within_three_steps(num_long_prompts: int) -> None:
    harness = Harness(make_scheduler(num_blocks=1_000, max_num_batched_tokens=128))
    for i in range(num_long_prompts):
        harness.add(make_request(i, 4_000, max_tokens=1))
    for _ in range(5):
        harness.turn()
    harness.add(make_request(9, 5, max_tokens=1))
    harness.run()
    assert harness.steps_of(9)[0] <= 5 + 2
    assert all(plan.num_tokens <= 128 for plan in harness.plans)


def test_long_prompt_alone_takes_the_whole_budget() -> None:
    harness = Harness(make_scheduler(num_blocks=100, max_num_batched_tokens=128))
    harness.add(make_request(0, 500, max_tokens=1))
    assert harness.run() == math.ceil(500 / 128)
    assert [row.num_tokens for plan in harness.plans for row in plan.rows] == [128, 128, 128, 116]


@pytest.mark.parametrize("max_num_batched_tokens", [4, 5, 64])
def test_prompt_boards_at_once_though_decoders_run_for_ever(max_num_batched_tokens: int) -> None:
    """As long as there is a slot: four decoders of five slots leave one token of the budget at least."""
    harness = Harness(make_scheduler(max_num_seqs=5, max_num_batched_tokens=max_num_batched_tokens))
    for i in range(4):
        harness.add(make_request(i, 1, max_tokens=150))
    for _ in range(10):
        harness.turn()
    harness.add(make_request(4, 20, max_tokens=2))
    before = len(harness.plans)
    while 4 not in harness.finished:
        harness.turn()
    if max_num_batched_tokens >= 5:
        assert harness.steps_of(4)[0] - before <= 20
    else:  # a budget that the decoders use up: it waits until one of them ends
        assert any(i in harness.finished for i in range(4))
    harness.run()


@pytest.mark.parametrize("num_decoders", [2, 5, 8, 12])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 3, 7])
@pytest.mark.parametrize("depth", [0, 1])
def test_budget_smaller_than_the_decoders_makes_them_take_turns(
    max_num_batched_tokens: int, num_decoders: int, depth: int
) -> None:
    """Least recently served first: nobody's gap exceeds the number of turns that all of them need."""
    scheduler = make_scheduler(max_num_seqs=12, max_num_batched_tokens=64)
    harness = Harness(scheduler, depth=depth)
    for i in range(num_decoders):
        harness.add(make_request(i, 2, max_tokens=40))
    harness.turn()
    harness.turn()
    limits = type(scheduler.limits)(max_num_seqs=12, max_num_batched_tokens=max_num_batched_tokens)
    scheduler.limits = scheduler._dealer.limits = limits
    start = len(harness.plans)
    harness.run()
    assert max(len(plan.rows) for plan in harness.plans[start:]) == min(num_decoders, max_num_batched_tokens)
    bound = math.ceil(num_decoders / max_num_batched_tokens)
    assert max(max(gaps(harness, i)) for i in range(num_decoders)) <= bound + depth


@pytest.mark.parametrize("policy", ["continuous", "priority", "fair", "fair-prefix", "static", "static-padded"])
def test_first_in_keep_order_always_finishes_in_the_time_it_would_take_alone(policy: str) -> None:
    """With a pool that holds it and little else, whatever else arrives."""
    harness = Harness(make_scheduler(policy=policy, num_blocks=8, max_num_seqs=6, max_num_batched_tokens=32))
    harness.add(make_request(0, 60, max_tokens=50, priority=0))
    for i in range(1, 30):
        harness.add(make_request(i, 10, max_tokens=60, priority=1))
    while 0 not in harness.finished:
        harness.turn()
    assert harness.finished[0].num_preemptions == 0
    assert harness.steps_of(0)[-1] <= 60 // 16 + 50 + 2  # at least half the budget while others want some
    harness.run()


def test_nobody_waits_longer_than_those_before_need() -> None:
    """First come, first served over two slots: a request boards no later than when all before it could have ended."""
    harness = Harness(make_scheduler(max_num_seqs=2))
    lengths = [3, 30, 5, 8, 1, 20, 9, 2]
    for i, max_tokens in enumerate(lengths):
        harness.add(make_request(i, 4, max_tokens=max_tokens))
    harness.run()
    boarded = {e.request_id: e.step_id for e in harness.events if isinstance(e, AdmitEvent)}
    assert list(boarded) == sorted(boarded)
    assert all(boarded[i] <= sum(lengths[:i]) for i in boarded)


def straggler_steps(policy: str, num_slots: int = 16) -> int:
    """Steps with rows for 64 requests of 20 tokens, every 16th of 1,000, all there from the start."""
    now_ns = 0
    scheduler: Scheduler = make_scheduler(
        policy=make_policy(policy), num_blocks=2_000, max_num_seqs=num_slots, max_model_len=2_048
    )
    for i in range(64):
        scheduler.add(make_request(i, 12, max_tokens=1_000 if i % 16 == 15 else 20), now_ns)
    loop = StepLoop(scheduler, SimulatedRunner(lambda plan: 1, lambda ns: None), lambda: now_ns)
    num_steps = 0
    while scheduler.has_work:
        num_steps += sum(isinstance(e, StepEvent) and bool(e.plan.rows) for e in loop.turn().events)
    return num_steps


def test_stragglers_cost_static_batching_four_thousand_steps_and_continuous_a_quarter() -> None:
    assert abs(straggler_steps("static") - 4_000) <= 15
    assert straggler_steps("static") == straggler_steps("static-padded")
    assert straggler_steps("continuous") <= 1_090
