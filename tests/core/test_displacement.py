"""Policies that may displace: the urgent one takes the place of the tail, within bounds."""

from __future__ import annotations

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.events import FinishEvent, PreemptEvent
from everystop.core.policy import POLICIES


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
