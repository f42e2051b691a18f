"""Who is taken, who is refused with which numbers, and who boards when."""

from __future__ import annotations

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.errors import NeverFits, PromptTooLong, RequestError
from everystop.core.events import AdmitEvent, RefuseEvent, WaitEvent, WaitReason


def test_request_larger_than_the_pool_is_refused_and_the_next_is_served() -> None:
    harness = Harness(make_scheduler(num_blocks=4, max_model_len=512))
    with pytest.raises(PromptTooLong, match="200 tokens, but at most 63 fit"):
        harness.add(make_request(0, 200, max_tokens=1))
    harness.add(make_request(1, 5, max_tokens=4))
    harness.run()
    assert len(harness.output(1)) == 4
    assert [e.code for e in harness.events if isinstance(e, RefuseEvent)] == ["PromptTooLong"]


@pytest.mark.parametrize("num_prompt_tokens", [62, 63, 64, 65])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_limits_hold_to_the_token(num_prompt_tokens: int, max_tokens: int) -> None:
    harness = Harness(make_scheduler(max_model_len=64))
    request = make_request(0, num_prompt_tokens, max_tokens=max_tokens)
    if num_prompt_tokens >= 64:
        with pytest.raises(PromptTooLong, match=f"{num_prompt_tokens} tokens, but at most 63 fit"):
            harness.add(request)
    elif num_prompt_tokens + max_tokens > 64:
        numbers = rf"{num_prompt_tokens} prompt tokens \+ max_tokens {max_tokens} = {num_prompt_tokens + max_tokens}"
        with pytest.raises(NeverFits, match=rf"{numbers}\b.* 64 fit.* to {64 - num_prompt_tokens}\b"):
            harness.add(request)
    else:
        harness.add(request)
        harness.run()
        assert len(harness.output(0)) == max_tokens
        assert harness.finished[0].reason == "length"


def test_missing_max_tokens_means_as_many_as_fit() -> None:
    """A lone sequence cannot outgrow the pool, and its neighbour does not notice."""
    harness = Harness(make_scheduler(num_blocks=4, block_size=16, max_model_len=512))
    with pytest.raises(NeverFits):
        harness.add(make_request(0, 10, max_tokens=200))
    harness.add(make_request(1, 10))
    harness.add(make_request(2, 5, max_tokens=30))
    harness.run()
    assert (len(harness.output(1)), harness.finished[1].reason) == (54, "length")
    assert len(harness.output(2)) == 30


@pytest.mark.parametrize("max_tokens", [None, 54])
def test_at_least_so_many_tokens_must_fit_beside_the_prompt(max_tokens: int | None) -> None:
    harness = Harness(make_scheduler(num_blocks=4, block_size=16, max_model_len=512))
    if max_tokens is None:
        with pytest.raises(
            NeverFits, match=r"10 prompt tokens \+ min_tokens 55 = 65\b.* 64 fit; lower min_tokens to 54"
        ):
            harness.add(make_request(0, 10, min_tokens=55))
    harness.add(make_request(1, 10, max_tokens=max_tokens, min_tokens=54))
    harness.run()
    assert len(harness.output(1)) == 54
    assert [e.code for e in harness.events if isinstance(e, RefuseEvent)] == ["NeverFits"] * (max_tokens is None)


def test_prompt_without_tokens_is_refused() -> None:
    harness = Harness(make_scheduler())
    with pytest.raises(RequestError, match="no tokens"):
        harness.add(make_request(0, 0, max_tokens=1))
    harness.run()


def test_max_tokens_below_zero_is_refused() -> None:
    harness = Harness(make_scheduler())
    with pytest.raises(RequestError, match="max_tokens is -1"):
        harness.add(make_request(0, 5, max_tokens=-1))


@pytest.mark.parametrize("depth", [0, 1])
def test_admission_by_whole_need_computes_nothing_over_and_over(depth: int) -> None:
    """Two requests of 15 blocks in a pool of 20: the second boards when all of it fits, not its first chunk."""
    harness = Harness(make_scheduler(num_blocks=20, prefix_caching=False, max_num_batched_tokens=16), depth=depth)
    need = 15 * 16
    for i in range(2):
        harness.add(make_request(i, need - 40, max_tokens=40))
    harness.run()
    assert harness.num_computed_tokens() <= 2 * need
    assert harness.counts["preemptions"] == 0


def test_prompt_longer_than_the_step_budget_is_chunked() -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=4))
    harness.add(make_request(0, 10, max_tokens=2))
    harness.run()
    assert [row.num_tokens for plan in harness.plans for row in plan.rows] == [4, 4, 2, 1]


def test_more_slots_than_blocks_preempts_instead_of_hanging() -> None:
    harness = Harness(make_scheduler(num_blocks=4, max_num_seqs=8))
    for i in range(8):
        harness.add(make_request(i, 14, max_tokens=10))
    harness.run()
    assert all(len(harness.output(i)) == 10 for i in range(8))
    assert harness.counts["preemptions"] >= 1


def test_resumed_request_needs_room_for_what_it_has_generated() -> None:
    """Its prompt alone would fit; prompt and generated tokens do not, so it waits for them."""
    harness = Harness(
        make_scheduler(policy="priority", num_blocks=10, block_size=16, max_num_seqs=2, prefix_caching=False)
    )
    harness.add(make_request(0, 16, max_tokens=120, priority=5))
    while len(harness.output(0)) < 100:
        harness.turn()
    harness.add(make_request(1, 60, max_tokens=60, priority=0))
    harness.run()
    resumed = [e for e in harness.events if isinstance(e, AdmitEvent) and e.resumed]
    assert [(e.request_id, e.num_tokens >= 116) for e in resumed] == [(0, True)]
    assert harness.num_computed_tokens() <= (16 + 120) + (60 + 60) + (16 + 110)


def test_refused_hit_leaves_no_reference_behind() -> None:
    harness = Harness(make_scheduler(num_blocks=10, block_size=4, max_num_seqs=4))
    prefix = list(range(13))
    harness.add(make_request(0, prefix, max_tokens=1))
    harness.run()
    harness.add(make_request(1, 15, max_tokens=20))
    harness.turn()
    before = harness.scheduler.kv.pool.ref_count.copy()
    harness.add(make_request(2, [*prefix, *range(100, 115)], max_tokens=8))
    for _ in range(3):
        harness.turn()
        assert harness.scheduler.kv.pool.ref_count.count(0) == 10 - len(harness.requests[1].block_table)
    assert before.count(1) == 4
    reasons = [e.reason for e in harness.events if isinstance(e, WaitEvent) and e.request_id == 2]
    assert reasons == [WaitReason.NO_BLOCKS]
    harness.run()


def test_head_that_does_not_fit_is_not_overtaken() -> None:
    harness = Harness(make_scheduler(num_blocks=10, max_num_seqs=4))
    harness.add(make_request(0, 90, max_tokens=20))
    harness.turn()
    harness.add(make_request(1, 80, max_tokens=5))
    harness.add(make_request(2, 5, max_tokens=5))
    harness.run()
    admitted = [e.request_id for e in harness.events if isinstance(e, AdmitEvent)]
    assert admitted == [0, 1, 2]


def test_waiting_reasons_are_recorded_as_changes_only() -> None:
    harness = Harness(make_scheduler(max_num_seqs=1))
    for i in range(3):
        harness.add(make_request(i, 5, max_tokens=10))
    harness.run()
    waits = [(e.request_id, e.reason, e.behind) for e in harness.events if isinstance(e, WaitEvent)]
    assert waits == [
        (-1, WaitReason.BEHIND, 1),
        (1, WaitReason.NO_SLOT, -1),
        (2, WaitReason.NO_SLOT, -1),
    ]


def test_parked_choices_wait_for_their_sibling_and_for_no_barrier() -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=8))
    harness.add_group(0, 30, 3, max_tokens=2)
    harness.run()
    waits = [(e.request_id, e.reason, e.behind) for e in harness.events if isinstance(e, WaitEvent)]
    assert waits == [(1, WaitReason.FORK, 0), (2, WaitReason.FORK, 0)]
