"""Static batching: the batch is fixed when it starts, and nobody else boards until its last member is done."""

from __future__ import annotations

import pytest
from tests.core.harness import Harness, make_request, make_scheduler
from tests.core.hash_model import STEP_NS

from everystop.core.events import StepEvent, WaitEvent, WaitReason


def steps(harness: Harness) -> list[StepEvent]:
    return [event for event in harness.events if isinstance(event, StepEvent) and event.plan.rows]


def ids_by_step(harness: Harness) -> list[list[int]]:
    return [[row.request_id for row in event.plan.rows] for event in steps(harness)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["static", "static-padded"])
def test_nobody_boards_until_the_batch_is_done(policy: str, depth: int) -> None:
    harness = Harness(make_scheduler(policy=policy, max_num_seqs=2), depth=depth)
    for i, max_tokens in enumerate([3, 9, 2, 2]):
        harness.add(make_request(i, 4, max_tokens=max_tokens))
    harness.run()
    first_of_second_batch = next(i for i, ids in enumerate(ids_by_step(harness)) if 2 in ids)
    assert not any({0, 1} & set(ids) for ids in ids_by_step(harness)[first_of_second_batch:])


def test_finished_rows_are_held_but_not_computed() -> None:
    harness = Harness(make_scheduler(policy="static", max_num_seqs=2))
    harness.add(make_request(0, 4, max_tokens=2))
    harness.add(make_request(1, 4, max_tokens=8))
    harness.run()
    assert ids_by_step(harness) == [[0, 1]] * 2 + [[1]] * 6
    assert [event.num_held for event in steps(harness)][:-1] == [0] + [1] * 6
    assert harness.num_computed_tokens() == 2 * 4 + 1 + 7


@pytest.mark.parametrize("max_tokens", [1, 2, 12, 13, 14, 28, 29])
@pytest.mark.parametrize("depth", [0, 1])
def test_padded_rows_are_computed_until_the_batch_is_done(max_tokens: int, depth: int) -> None:
    """Also where the last token of the finished one opens a block that it never got."""
    harness = Harness(make_scheduler(policy="static-padded", max_num_seqs=2), depth=depth)
    harness.add(make_request(0, 4, max_tokens=max_tokens))
    harness.add(make_request(1, 4, max_tokens=40))
    harness.run()
    unpadded = sum(len(ids) < 2 for ids in ids_by_step(harness))
    assert unpadded <= depth  # at depth 1 the step that is planned while the last token is on its way knows of no end
    assert sum(event.plan.num_padded_rows for event in steps(harness)) >= 40 - max_tokens - depth


@pytest.mark.parametrize("depth", [0, 1])
def test_padding_gives_its_blocks_to_members_that_need_them(depth: int) -> None:
    """A preempted member boards again although finished rows hold the blocks that it needs."""
    harness = Harness(
        make_scheduler(policy="static-padded", num_blocks=6, block_size=4, max_num_seqs=3, prefix_caching=False),
        depth=depth,
    )
    harness.add(make_request(0, 7, max_tokens=2))
    harness.add(make_request(1, 4, max_tokens=19))
    harness.add(make_request(2, 4, max_tokens=19))
    harness.run(max_turns=100)
    assert harness.counts["preemptions"] >= 1
    assert [len(harness.output(i)) for i in range(3)] == [2, 19, 19]


def test_batch_waits_for_company_and_says_until_when() -> None:
    harness = Harness(make_scheduler(policy="static", max_num_seqs=3, batch_wait_ns=50 * STEP_NS))
    harness.add(make_request(0, 4, max_tokens=2))
    assert harness.turn().wake_at_ns == 50 * STEP_NS
    waits = [e.reason for e in harness.events if isinstance(e, WaitEvent)]
    assert waits == [WaitReason.BATCH_FILL]
    harness.run()
    assert len(harness.output(0)) == 2


def test_full_batch_starts_at_once() -> None:
    harness = Harness(make_scheduler(policy="static", max_num_seqs=2, batch_wait_ns=50 * STEP_NS))
    harness.add(make_request(0, 4, max_tokens=1))
    harness.add(make_request(1, 4, max_tokens=1))
    assert harness.turn().plan is not None


def test_aborted_member_gives_its_slot_back_but_lets_nobody_in() -> None:
    harness = Harness(make_scheduler(policy="static", max_num_seqs=2))
    for i in range(3):
        harness.add(make_request(i, 4, max_tokens=6))
    harness.turn()
    harness.abort(0)
    harness.run()
    assert ids_by_step(harness) == [[0, 1]] + [[1]] * 5 + [[2]] * 6


def test_batch_whose_members_are_all_aborted_ends() -> None:
    harness = Harness(make_scheduler(policy="static", max_num_seqs=2))
    for i in range(3):
        harness.add(make_request(i, 4, max_tokens=6))
    harness.turn()
    harness.abort(0)
    harness.abort(1)
    harness.run()
    assert len(harness.output(2)) == 6
