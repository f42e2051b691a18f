"""n choices of one request: the prompt is computed once, its blocks are shared, the partial block is copied."""

from __future__ import annotations

import pytest
from tests.core.harness import Harness, make_request, make_scheduler
from tests.core.hash_model import solo

from everystop.core.events import AdmitEvent
from everystop.core.request import RequestState


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 15, 16, 17, 18, 40])
def test_choices_compute_the_prompt_once_and_differ_only_by_their_index(
    num_prompt_tokens: int, prefix_caching: bool, depth: int
) -> None:
    harness = Harness(make_scheduler(prefix_caching=prefix_caching), depth=depth)
    harness.add_group(0, num_prompt_tokens, 4, max_tokens=12, temperature=1.0, seed=42)
    harness.run()
    assert len({tuple(harness.output(k)) for k in range(4)}) == 4
    # Each child computes at most the last prompt token again, and the tokens that it generates.
    assert harness.num_computed_tokens() <= num_prompt_tokens + 11 + 3 * 12


@pytest.mark.parametrize("policy", ["continuous", "static", "static-padded", "priority"])
def test_greedy_choices_all_equal_the_single_one(policy: str) -> None:
    harness = Harness(make_scheduler(policy=policy, block_size=4))
    harness.add_group(0, 10, 4, max_tokens=20)
    harness.run()
    alone = solo(range(10), harness.requests[0].params, limit_tokens=1000)
    assert [harness.output(k) for k in range(4)] == [alone.token_ids] * 4


def test_children_wait_until_the_prompt_is_computed_and_copy_only_the_partial_block() -> None:
    harness = Harness(make_scheduler(block_size=4, prefix_caching=False, max_num_batched_tokens=6))
    leader, child = harness.add_group(0, 11, 2, max_tokens=3)
    harness.turn()
    assert child.state is RequestState.FORKING
    harness.run()
    admitted = [e for e in harness.events if isinstance(e, AdmitEvent)]
    assert [(e.request_id, e.forked_from) for e in admitted] == [(0, -1), (1, 0)]
    assert child.num_cached_tokens == leader.num_cached_tokens == 0
    (copies,) = [plan.copies for plan in harness.plans if plan.copies]
    assert len(copies) == 1
    (tables,) = [plan.admitted[0].block_table for plan in harness.plans if plan.copies]
    first = next(plan.admitted[0].block_table for plan in harness.plans if plan.admitted)
    assert tables[:2] == first[:2]
    assert copies[0] == (first[2], tables[2])


@pytest.mark.parametrize("victim_tokens", range(1, 8))
def test_child_preempted_mid_block_yields_the_same(victim_tokens: int) -> None:
    harness = Harness(make_scheduler(policy="priority", block_size=4, num_blocks=12, max_num_seqs=3))
    harness.add_group(0, 6, 3, max_tokens=20, temperature=1.0, seed=3, priority=5)
    while len(harness.output(2)) < victim_tokens:
        harness.turn()
    harness.add(make_request(9, 5, max_tokens=4, priority=0))
    harness.run()
    assert harness.counts["preemptions"] >= 1


def test_leader_that_leaves_hands_the_prompt_to_the_next() -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=8))
    harness.add_group(0, 40, 3, max_tokens=5)
    harness.turn()
    harness.abort(0)
    harness.run()
    assert len(harness.output(1)) == len(harness.output(2)) == 5


def test_leader_whose_row_fails_takes_no_child_with_it() -> None:
    harness = Harness(make_scheduler())
    harness.add_group(0, 40, 3, max_tokens=5)
    harness.runner.fail[0] = "nan_logits"
    harness.run()
    assert [harness.finished[k].reason for k in range(3)] == ["error", "length", "length"]


@pytest.mark.parametrize("depth", [0, 1])
def test_fork_copies_no_block_that_is_filled_in_the_same_step(depth: int) -> None:
    """A stranger with the same tokens computes what a resumed sibling matches: not there yet when copies are done."""
    prompt = [1, 2, 3, 4, 5, 6]
    scheduler = make_scheduler(
        policy="priority", num_blocks=16, block_size=4, max_num_seqs=3, max_num_batched_tokens=100
    )
    harness = Harness(scheduler, depth=depth)
    harness.add(make_request(0, 3, max_tokens=4, priority=0))
    harness.add(make_request(1, prompt, max_tokens=30, priority=5))
    harness.add_group(2, prompt, 2, max_tokens=30, priority=5)
    while 0 not in harness.finished:
        harness.turn()
    harness.turn()
    harness.turn()
    harness.add(make_request(9, 50, max_tokens=10, priority=0))  # displaces all three and evicts their blocks
    harness.run()
    assert harness.counts["preemptions"] >= 3
    assert harness.output(1) == harness.output(2) == harness.output(3)
