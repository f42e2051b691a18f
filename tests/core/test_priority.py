"""Priorities: the urgent first, whatever runs, and everyone at last, within the stated bounds."""

from __future__ import annotations

import random

import pytest
from tests.core.harness import STEP_NS, Harness, make_request, make_scheduler

from everystop.core.events import AdmitEvent, FinishEvent, PreemptEvent
from everystop.core.request import RequestState


def finished(harness: Harness) -> list[int]:
    return [event.request_id for event in harness.events if isinstance(event, FinishEvent)]


def boarded(harness: Harness) -> list[int]:
    return [event.request_id for event in harness.events if isinstance(event, AdmitEvent)]


def test_lower_value_boards_first_and_equals_in_order_of_arrival() -> None:
    harness = Harness(make_scheduler(policy="priority", max_num_seqs=1))
    for request_id, priority in enumerate([3, 0, 2, 0, -1, 3]):
        harness.add(make_request(request_id, 4, max_tokens=2, priority=priority))
    harness.run()
    assert boarded(harness) == [4, 1, 3, 2, 0, 5]


@pytest.mark.parametrize("depth", [0, 1])
def test_urgent_request_never_waits_for_a_full_house(depth: int) -> None:
    """Every slot is taken by less urgent requests with 500 tokens to come: one of them makes room at once."""
    harness = Harness(make_scheduler(policy="priority", max_num_seqs=4, num_blocks=200), depth=depth)
    for request_id in range(4):
        harness.add(make_request(request_id, 5, max_tokens=500, priority=5))
    for _ in range(3):
        harness.turn()
    harness.add(make_request(4, 5, max_tokens=2, priority=0))
    harness.add(make_request(5, 5, max_tokens=2, priority=5))
    before = len(harness.plans)
    while 4 not in harness.finished:
        harness.turn()
    assert harness.steps_of(4)[0] <= before + 2 + depth
    harness.run()
    assert finished(harness)[0] == 4
    assert [event.request_id for event in harness.events if isinstance(event, PreemptEvent)] == [3]


def test_choices_of_equal_priority_have_a_well_defined_order() -> None:
    """Two requests of three choices each, with equal and with different priorities, where only four fit."""
    for priorities in [(1, 1), (2, 1), (1, 2)]:
        harness = Harness(make_scheduler(policy="priority", max_num_seqs=4, num_blocks=8, block_size=4))
        for k, priority in enumerate(priorities):
            harness.add_group(3 * k, 5, 3, max_tokens=9, priority=priority)
            harness.turn()
        harness.run()
        assert sorted(finished(harness)) == list(range(6))


def test_aged_request_is_overtaken_only_by_those_who_arrive_within_the_bound() -> None:
    """Urgent requests arrive faster than one slot serves them, for ever; priority 3 with 20 steps a level waits 60."""
    harness = Harness(make_scheduler(policy="priority", max_num_seqs=1, ageing_ns=20 * STEP_NS))
    patient = harness.add(make_request(0, 4, max_tokens=5, priority=3))
    for request_id in range(1, 400):
        harness.add(make_request(request_id, 4, max_tokens=4, priority=0))
        for _ in range(3):
            harness.turn()
        if patient.state is RequestState.FINISHED:
            break
    earlier = [harness.requests[i].arrival_ns for i in finished(harness) if i != 0]
    assert patient.state is RequestState.FINISHED
    assert max(earlier) < patient.arrival_ns + 3 * 20 * STEP_NS
    assert len(earlier) >= 15, "they do go first as long as they may"
    harness.run()


@pytest.mark.parametrize("seed", range(4))
def test_nobody_boards_before_a_waiting_request_of_lower_rank(seed: int) -> None:
    rng = random.Random(seed)
    ageing_ns = rng.choice([5, 50]) * STEP_NS
    harness = Harness(make_scheduler(policy="priority", max_num_seqs=3, num_blocks=40, ageing_ns=ageing_ns))
    for request_id in range(150):
        prompt = rng.randint(1, 30)
        harness.add(make_request(request_id, prompt, max_tokens=rng.randint(1, 20), priority=rng.randrange(6)))
        waiting = {i: r for i, r in harness.scheduler.requests.items() if i not in harness.scheduler.running}
        turn = harness.turn()
        ranks = {i: request.arrival_ns + request.priority * ageing_ns for i, request in waiting.items()}
        taken = [a.request_id for a in turn.plan.admitted] if turn.plan is not None else []
        left = [rank for i, rank in ranks.items() if i not in taken]
        assert all(ranks[i] <= min(left, default=ranks[i]) for i in taken if i in ranks)
    harness.run()
