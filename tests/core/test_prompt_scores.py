"""Prompts that are scored, and requests that generate nothing: each score once and in order, and nothing left over."""

from __future__ import annotations

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.errors import PromptTooLong, RequestError
from everystop.core.events import AdmitEvent, FinishEvent
from everystop.core.plan import PromptLogits, StepPlan
from everystop.core.policy import POLICIES
from everystop.core.request import FinishReason, SamplingParams


def wanted_of(harness: Harness, request_id: int) -> list[tuple[int, int]]:
    """Start and number of the positions that each plan scored for a request."""
    return [each[1:] for plan in harness.plans for each in plan.prompt_logits if each.request_id == request_id]


def num_hits(harness: Harness, request_id: int) -> int:
    """Tokens that a request found in the prefix cache whenever it boarded."""
    boardings = [e for e in harness.events if isinstance(e, AdmitEvent) and e.request_id == request_id]
    return sum(event.num_cached_tokens for event in boardings)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 9, 16, 17])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_every_position_but_the_last_is_scored_once(length: int, max_tokens: int, depth: int) -> None:
    """Chunks of 4 over prompts that end at, before and behind their borders."""
    harness = Harness(make_scheduler(block_size=4, max_num_batched_tokens=4), depth=depth)
    harness.add(make_request(0, length, max_tokens=max_tokens, prompt_logprobs=0))
    harness.run()
    positions = [start + i for start, num in wanted_of(harness, 0) for i in range(num)]
    assert positions == list(range(length - 1))
    assert len(harness.scores[0]) == length - 1
    assert len(harness.output(0)) == max_tokens


def test_nobody_else_pays_for_it() -> None:
    harness = Harness(make_scheduler(block_size=4, max_num_batched_tokens=16))
    harness.add(make_request(0, 30, max_tokens=4))
    harness.add(make_request(1, 10, max_tokens=4, prompt_logprobs=2))
    harness.run()
    assert {each.request_id for plan in harness.plans for each in plan.prompt_logits} == {1}


def test_scored_prompt_hits_nothing_and_is_hit() -> None:
    """What is in the cache has no logits; what a scored prompt leaves there is as good as any."""
    prompt = list(range(17))
    harness = Harness(make_scheduler(block_size=4))
    for request_id, wish in enumerate((None, 0, None)):
        harness.add(make_request(request_id, prompt, max_tokens=2, prompt_logprobs=wish))
        harness.run()
    assert [num_hits(harness, i) for i in range(3)] == [0, 0, 16]
    assert len(harness.scores[1]) == 16


def test_burst_with_one_prompt_scores_it_each_time() -> None:
    """Blocks that another fills in the same step would be matched, but have no logits for this one either."""
    prompt = list(range(40))
    harness = Harness(make_scheduler(block_size=4, max_num_batched_tokens=24))
    for request_id in range(3):
        harness.add(make_request(request_id, prompt, max_tokens=1, prompt_logprobs=0))
    harness.run()
    assert harness.scores[0] == harness.scores[1] == harness.scores[2]
    assert [num_hits(harness, i) for i in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_turns", [1, 2, 3, 4])
def test_preempted_while_scoring_goes_on_where_it_was(num_turns: int, prefix_caching: bool, depth: int) -> None:
    """An urgent request takes the only slot after some chunks; nothing is scored twice, and hits are what is scored."""
    scheduler = make_scheduler(
        policy="priority", block_size=4, max_num_seqs=1, max_num_batched_tokens=5, prefix_caching=prefix_caching
    )
    harness = Harness(scheduler, depth=depth)
    harness.add(make_request(0, 26, max_tokens=2, prompt_logprobs=0, priority=5))
    for _ in range(num_turns):
        harness.turn()
    harness.add(make_request(1, 3, max_tokens=2, priority=0))
    harness.run()
    assert harness.counts["preempted while scoring"] == 1
    wanted = wanted_of(harness, 0)
    assert [start for start, _ in wanted] == [sum(num for _, num in wanted[:i]) for i in range(len(wanted))]
    assert len(harness.scores[0]) == 25
    assert num_hits(harness, 0) <= 5 * num_turns
    assert (num_hits(harness, 0) > 0) == (prefix_caching and num_turns > depth)  # a chunk in flight is not matched


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_first_of_n_choices_scores_the_prompt_for_all(prefix_caching: bool) -> None:
    harness = Harness(make_scheduler(block_size=4, max_num_batched_tokens=8, prefix_caching=prefix_caching))
    harness.add_group(0, 23, 3, max_tokens=5, prompt_logprobs=1, temperature=1.0, seed=3)
    harness.run()
    assert [len(harness.scores[i]) for i in range(3)] == [22, 0, 0]
    assert harness.counts["forks"] == 2
    assert harness.num_computed_tokens() == 23 + 4 + 2 * (1 + 4)


def test_choice_that_scores_does_not_wait_for_a_sibling_that_does_not() -> None:
    """The first is preempted, a sibling computes the prompt meanwhile; the first still scores its own."""
    scheduler = make_scheduler(policy="priority", block_size=4, max_num_seqs=2, max_num_batched_tokens=6)
    harness = Harness(scheduler)
    harness.add_group(0, 30, 2, max_tokens=4, prompt_logprobs=0, priority=5)
    harness.turn()
    for request_id in (2, 3):
        harness.add(make_request(request_id, 2, max_tokens=3, priority=0))
    harness.run()
    assert harness.counts["preemptions"]
    assert len(harness.scores[0]) == 29


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [0, 1])
def test_generating_nothing_ends_with_the_prompt(policy: str, depth: int) -> None:
    """Beside requests that go on, in full batches, under every policy; held slots of such a request cost nothing."""
    scheduler = make_scheduler(policy=policy, block_size=4, num_blocks=40, max_num_seqs=4, max_num_batched_tokens=9)
    harness = Harness(scheduler, depth=depth)
    for request_id, max_tokens in enumerate((6, 0, 0, 3, 0, 1, 0)):
        wish = 0 if request_id % 2 else None
        harness.add(make_request(request_id, 3 + 2 * request_id, max_tokens=max_tokens, prompt_logprobs=wish))
    harness.run()
    ends = [event for event in harness.events if isinstance(event, FinishEvent)]
    assert sorted(event.request_id for event in ends) == list(range(7))
    assert {event.reason for event in ends} == {FinishReason.LENGTH}
    assert {event.request_id: event.num_output_tokens for event in ends} == dict(enumerate((6, 0, 0, 3, 0, 1, 0)))
    padded = {row.request_id for p in harness.plans if p.num_padded_rows for row in p.rows[-p.num_padded_rows :]}
    assert padded.isdisjoint((1, 2, 4, 6))


def test_nothing_to_generate_hits_the_cache_and_fills_it() -> None:
    prompt = list(range(20))
    harness = Harness(make_scheduler(block_size=4))
    for request_id in range(2):
        harness.add(make_request(request_id, prompt, max_tokens=0))
        harness.run()
    assert num_hits(harness, 1) == 16
    assert harness.num_computed_tokens(1) == 4


def test_choices_that_generate_nothing_all_end() -> None:
    for prefix_caching in (False, True):
        harness = Harness(make_scheduler(block_size=4, max_num_batched_tokens=8, prefix_caching=prefix_caching))
        harness.add_group(0, 13, 3, max_tokens=0, prompt_logprobs=0)
        harness.run()
        assert len(harness.finished) == 3


def test_prompt_without_room_for_a_token_is_too_long_even_so() -> None:
    scheduler = make_scheduler(max_model_len=32)
    with pytest.raises(PromptTooLong):
        scheduler.add(make_request(0, 32, max_tokens=0, prompt_logprobs=0), 0)
    scheduler.add(make_request(1, 31, max_tokens=0, prompt_logprobs=0), 0)


def test_aborted_and_failed_requests_get_no_scores_any_more() -> None:
    """The row of one is on its way when its client leaves, that of another fails."""
    harness = Harness(make_scheduler(block_size=4, max_num_batched_tokens=24), depth=1)
    for request_id in range(3):
        harness.add(make_request(request_id, 8, max_tokens=3, prompt_logprobs=0))
    harness.turn()
    harness.abort(0)
    harness.runner.fail[1] = "nan_logits"
    harness.run()
    assert harness.scores[0] == []
    assert len(harness.scores[2]) == 7
    assert harness.finished[1].reason is FinishReason.ERROR


def test_fingerprint_tells_scores_and_is_the_old_one_without() -> None:
    plain, scoring = StepPlan(3), StepPlan(3, prompt_logits=[PromptLogits(1, 0, 4)])
    assert plain.fingerprint() == "98c4c7dae36f921f", "records of before would not replay"
    assert plain.fingerprint() != scoring.fingerprint()
    assert '"prompt_logits":[[1,0,4]]' in scoring.to_json()


def test_params_say_what_is_out_of_range() -> None:
    SamplingParams(max_tokens=0, prompt_logprobs=20)
    for wrong in ({"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"max_tokens": -1}, {"bad_word_ids": ((1,), ())}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            SamplingParams(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("most", "longest"), [(16, 16), (None, 127)])
def test_few_positions_are_scored_in_a_step_that_is_planned_by_time(most: int | None, longest: int) -> None:
    """As long as somebody decodes beside them; two prompts share them, and the second has one in each step at least."""
    limits = {"target_itl_ns": 10**9, "max_num_scored_tokens": most, "max_model_len": 1024, "num_blocks": 200}
    harness = Harness(make_scheduler(max_num_batched_tokens=256, **limits))
    harness.add(make_request(0, 4, max_tokens=10))
    harness.turn()
    for request_id in (1, 2):
        harness.add(make_request(request_id, 200, max_tokens=1, prompt_logprobs=0))
    harness.run()
    decoding = [plan for plan in harness.plans if 0 in plan.rows.request_ids and plan.prompt_logits]
    assert max(plan.prompt_logits[0].num_tokens for plan in decoding) == longest
    if most is not None:
        assert {each.num_tokens for plan in decoding for each in plan.prompt_logits[1:]} == {1}
        assert len(decoding) == 9
    for request_id in (1, 2):
        assert [start + i for start, num in wanted_of(harness, request_id) for i in range(num)] == list(range(199))
