"""Policies that may displace: the urgent one takes the place of the tail, within bounds."""

from __future__ import annotations

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.errors import PolicyError
from everystop.core.events import AdmitEvent, FinishEvent, PreemptEvent
from everystop.core.policy import POLICIES, Priority, View
from everystop.core.request import Request


@pytest.mark.parametrize("depth", [0, 1])
def test_urgent_request_finishes_first_though_all_slots_are_taken(depth: int) -> None:
    harness = Harness(make_scheduler(policy="priority", max_num_seqs=1), depth=depth)
    harness.add(make_request(0, 5, max_tokens=500, priority=5))
    harness.turn()
    harness.add(make_request(1, 5, max_tokens=2, priority=0))
    harness.run()
    assert [e.request_id for e in harness.events if isinstance(e, FinishEvent)] == [1, 0]


def test_urgent_request_displaces_for_blocks_as_it_does_for_slots() -> None:
    harness = Harness(make_scheduler(policy="priority", num_blocks=8, max_num_seqs=4))
    harness.add(make_request(0, 90, max_tokens=20, priority=5))
    harness.turn()
    harness.add(make_request(1, 60, max_tokens=2, priority=0))
    harness.run()
    assert [e.request_id for e in harness.events if isinstance(e, FinishEvent)] == [1, 0]


def test_equal_rank_displaces_nobody() -> None:
    harness = Harness(make_scheduler(policy="priority", max_num_seqs=1))
    harness.add(make_request(0, 5, max_tokens=20, priority=1))
    harness.turn()
    harness.add(make_request(1, 5, max_tokens=2, priority=1))
    harness.run()
    assert not [e for e in harness.events if isinstance(e, PreemptEvent)]


@pytest.mark.parametrize("order", [1, -1])
def test_groups_of_choices_have_a_well_defined_rank(order: int) -> None:
    harness = Harness(make_scheduler(policy="priority", max_num_seqs=4, num_blocks=16, block_size=4))
    for i in range(30)[::order]:
        harness.add_group(3 * i, 5, 3, max_tokens=8, priority=i % 3)
    harness.run()


def test_request_admitted_beside_a_displaced_one_does_not_rely_on_its_unwritten_blocks() -> None:
    """The tail was to fill blocks in this step that a new one has matched: it is displaced a step later."""
    prefix = list(range(8))
    scheduler = make_scheduler(
        policy="priority", num_blocks=8, block_size=8, max_num_batched_tokens=40, max_num_prefill_tokens=5
    )
    harness = Harness(scheduler)
    harness.add(make_request(1, 9, max_tokens=20, priority=1))
    harness.turn()
    harness.turn()
    harness.add(make_request(4, [*prefix, 60, 61], max_tokens=8, priority=2))
    harness.turn()
    harness.add(make_request(5, [*prefix, 70, 71], max_tokens=8, priority=0))
    harness.add(make_request(6, 40, max_tokens=8, priority=0))
    harness.run()
    assert harness.counts["preemptions"] >= 1
    assert not any(plan.preempted and plan.admitted for plan in harness.plans)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "num_before", "prompt", "num_turns", "num_common"),
    [(8, 8, 2, 2, 5, 20), (9, 4, 3, 3, 1, 11)],
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [0, 1])
def test_prompt_that_skips_a_block_of_this_step_does_not_outlive_the_one_that_fills_it(
    num_blocks: int,
    block_size: int,
    num_before: int,
    prompt: int,
    num_turns: int,
    num_common: int,
    policy: str,
    depth: int,
) -> None:
    """Blocks are short in the step in which X fills a block and Y skips it. By what is left to compute (`shortest`), or
    by what only its own blocks hold (`thrifty`), Y then goes before X; but X is who computes what Y attends to.
    """
    scheduler = make_scheduler(
        policy=policy,
        ageing_ns=10**12,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_num_prefill_tokens=5,
    )
    harness = Harness(scheduler, depth=depth)
    for request_id in range(num_before):
        harness.add(make_request(request_id, prompt, max_tokens=20))
    for _ in range(num_turns):
        harness.turn()
    for request_id in (7, 8):
        harness.add(make_request(request_id, list(range(500, 500 + num_common)), max_tokens=2))
    harness.run()


def admitted(harness: Harness) -> list[int]:
    return [event.request_id for event in harness.events if isinstance(event, AdmitEvent)]


@pytest.mark.parametrize("policy", ["fair", "fair-prefix"])
@pytest.mark.parametrize("depth", [0, 1])
def test_guest_without_blocks_keeps_its_claim_on_the_slot(policy: str, depth: int) -> None:
    """Z has all slots, X waits with many, Y with one that needs more blocks than one victim brings. X has been served
    as little as Y and came first, but the slots were vacated for Y.
    """
    harness = Harness(make_scheduler(policy=policy, num_blocks=20, block_size=4, max_num_seqs=4), depth=depth)
    for request_id in range(4):
        harness.add(make_request(request_id, 12, max_tokens=60, tenant="z"))
    harness.turn()
    harness.turn()
    for request_id in range(4, 10):
        harness.add(make_request(request_id, 4, max_tokens=20, tenant="x"))
    harness.add(make_request(10, 30, max_tokens=2, tenant="y"))
    harness.run()
    assert admitted(harness)[4] == 10


@pytest.mark.parametrize("depth", [0, 1])
def test_choices_do_not_displace_before_they_can_fork(depth: int) -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=3, max_num_batched_tokens=16)
    harness = Harness(scheduler, depth=depth)
    for request_id in range(3):
        harness.add(make_request(request_id, 5, max_tokens=60, priority=5))
    for _ in range(3):
        harness.turn()
    harness.add_group(3, 60, 2, max_tokens=4, priority=0)
    harness.run()
    assert harness.counts["forks"] == 1
    assert [event.request_id for event in harness.events if isinstance(event, PreemptEvent)] == [2, 1]


@pytest.mark.parametrize("depth", [0, 1])
def test_one_guest_costs_one_victim_where_its_blocks_suffice(depth: int) -> None:
    """At depth 1 they come back with the plan on its way, a step later."""
    harness = Harness(make_scheduler(policy="priority", num_blocks=12, block_size=4, max_num_seqs=3), depth=depth)
    for request_id in range(3):
        harness.add(make_request(request_id, 12, max_tokens=3, priority=5))
    harness.turn()
    harness.turn()
    harness.add(make_request(3, 12, max_tokens=2, priority=0))
    harness.run()
    assert harness.counts["preemptions"] == 1


def test_guest_may_overtake_one_preempted_too_often_but_not_for_a_slot_that_comes_free() -> None:
    """The front boards first wherever a slot is free; where none is, an urgent one may still take the tail's."""
    harness = Harness(make_scheduler(policy="priority", max_num_seqs=2, max_preemptions=1))
    harness.add(make_request(0, 5, max_tokens=60, priority=5))
    harness.add(make_request(1, 5, max_tokens=60, priority=5))
    harness.turn()
    harness.add(make_request(2, 5, max_tokens=30, priority=0))
    harness.turn()
    assert admitted(harness) == [0, 1, 2], "the second is preempted, and at the front from now on"
    harness.add(make_request(3, 5, max_tokens=10, priority=0))
    harness.turn()
    assert admitted(harness) == [0, 1, 2, 3], "and so is the first"
    harness.add(make_request(4, 5, max_tokens=10, priority=0))
    harness.run()
    assert admitted(harness) == [0, 1, 2, 3, 0, 1, 4]


class Confused(Priority):
    """Its claimant is on board already."""

    def claimant(self, view: View) -> Request | None:
        return self.boarded

    def on_admit(self, request: Request, view: View) -> None:
        self.boarded = request
        super().on_admit(request, view)


def test_claimant_that_does_not_wait_is_an_error() -> None:
    harness = Harness(make_scheduler(policy=Confused(), max_num_seqs=1))
    harness.add(make_request(0, 5, max_tokens=20))
    harness.turn()
    harness.add(make_request(1, 5, max_tokens=20))
    with pytest.raises(PolicyError, match="does not wait"):
        harness.turn()
