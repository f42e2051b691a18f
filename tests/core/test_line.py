"""Who boards next, and then: what a policy says of its line, beside who does board when nobody else comes."""

from __future__ import annotations

import random

import pytest
from tests.core.harness import Harness, make_policy, make_scheduler

from everystop.core.events import AdmitEvent

EXACT = ["continuous", "static", "static-padded", "priority", "shortest"]
POLICIES = [*EXACT, "thrifty", "deadline", "fair", "fair-prefix"]
MANY = 1000


def crowd(policy: str, seed: int, *, num: int = 24, num_blocks: int = 60) -> Harness:
    """A few run and many wait."""
    dice = random.Random(f"{policy} {seed}")
    harness = Harness(
        make_scheduler(policy=make_policy(policy), num_blocks=num_blocks, max_num_seqs=3, max_model_len=128)
    )
    for i in range(num):
        tenant = dice.choice(["a", "a", "b", "c"]) if policy.startswith("fair") or policy == "deadline" else ""
        size, answer = dice.randrange(1, 60), dice.randrange(1, 12)
        priority = dice.randrange(3) if policy == "priority" else 0
        if policy.startswith("fair") and tenant == "b" and i > 6:
            tenant = "a"  # no more of b than may wait
        harness.add_group(i, size, 1, max_tokens=answer, tenant=tenant, priority=priority)
        if dice.random() < 0.2:
            harness.turn()
    harness.turn()
    return harness


def line_of(harness: Harness, num: int = MANY) -> list[int]:
    event = harness.scheduler.line_event(num, harness.now_ns)
    assert event.now_ns == harness.now_ns
    return list(event.request_ids)


def boardings_from(harness: Harness, num_seen: int) -> list[int]:
    """First boardings, in order, until all is done."""
    while harness.scheduler.requests:
        harness.turn()
    admits = [event.request_id for event in harness.events[num_seen:] if isinstance(event, AdmitEvent)]
    return list(dict.fromkeys(admits))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", EXACT)
def test_they_board_in_the_order_of_the_line(policy: str, seed: int) -> None:
    harness = crowd(policy, seed)
    line, num_seen = line_of(harness), len(harness.events)
    assert len(line) > 5
    boarded = boardings_from(harness, num_seen)
    assert [request_id for request_id in boarded if request_id in line] == line


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", POLICIES)
def test_the_line_holds_each_who_waits_once_and_its_beginning_is_the_same(policy: str, seed: int) -> None:
    harness = crowd(policy, seed)
    line = line_of(harness)
    waiting = [i for i in harness.scheduler.requests if i not in harness.scheduler.running]
    assert sorted(line) == sorted(waiting)
    for num in (0, 1, 5):
        assert line_of(harness, num) == line[:num]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", [*EXACT, "thrifty", "fair", "deadline"])
def test_the_first_in_line_is_who_boards_next(policy: str, seed: int) -> None:
    harness = crowd(policy, seed)
    line, num_seen = line_of(harness), len(harness.events)
    assert boardings_from(harness, num_seen)[0] == line[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_to_ask_changes_nothing(policy: str) -> None:
    asked, quiet = crowd(policy, 7), crowd(policy, 7)
    while quiet.scheduler.requests:
        line_of(asked, 3)
        asked.turn()
        quiet.turn()
    assert asked.events == quiet.events


def test_tenants_take_turns_in_the_line() -> None:
    """A has sent eight before B sends two: B's boards as soon as A has had as much."""
    harness = Harness(make_scheduler(policy=make_policy("fair"), max_num_seqs=1, num_blocks=60))
    for i in range(8):
        harness.add_group(i, 10, 1, max_tokens=40, tenant="a")
    harness.turn()
    for i in (8, 9):
        harness.add_group(i, 10, 1, max_tokens=40, tenant="d")
    line = line_of(harness)
    assert line.index(8) <= 1
    assert line.index(9) < line.index(7)
    assert [i for i in line if i < 8] == list(range(1, 8))


def test_who_was_preempted_too_often_stands_before_all() -> None:
    harness = crowd("shortest", 3)
    last = line_of(harness)[-1]
    request = harness.scheduler.requests[last]
    request.num_preemptions = 100
    harness.scheduler.roster._front.push(request)
    assert line_of(harness)[0] == last
