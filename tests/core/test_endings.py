"""How requests end: the first token, the last one, stops and failures, each counted once."""

from __future__ import annotations

import pytest
from tests.core.harness import Harness, eos, make_request, make_scheduler
from tests.core.hash_model import EOS, ends_stop_string, solo

from everystop.core.events import FinishEvent, StepEvent
from everystop.core.policy import POLICIES


def prompt_whose_token(position: int, wanted: object) -> list[int]:
    """A prompt whose greedy answer has its first wanted token (a predicate) at this output position."""
    for start in range(10_000):
        prompt = [start, 2, 3]
        tokens = solo(prompt, make_request(0, prompt, max_tokens=position + 1).params, limit_tokens=100).token_ids
        if [bool(wanted(token)) for token in tokens] == [False] * position + [True]:  # type: ignore[operator]
            return prompt
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("depth", [0, 1])
def test_one_token_after_the_last_chunk_and_not_before(depth: int) -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=8), depth=depth)
    harness.add(make_request(0, 24, max_tokens=1))
    harness.run()
    assert harness.steps_of(0) == [2]
    (end,) = [e for e in harness.events if isinstance(e, FinishEvent)]
    assert (end.num_output_tokens, end.reason) == (1, "length")


@pytest.mark.parametrize("depth", [0, 1])
def test_an_end_names_the_step_that_brought_it(depth: int) -> None:
    """Not the one that had been planned meanwhile."""
    harness = Harness(make_scheduler(), depth=depth)
    for i, max_tokens in enumerate((2, 4, 5)):
        harness.add(make_request(i, 5, max_tokens=max_tokens))
    harness.run()
    ends = {e.request_id: e.step_id for e in harness.events if isinstance(e, FinishEvent)}
    assert ends == {i: harness.steps_of(i)[-1] for i in range(3)}


def test_computed_tokens_count_the_prompt_once() -> None:
    harness = Harness(make_scheduler())
    request = harness.add(make_request(0, 5, max_tokens=3))
    harness.turn()
    assert (request.num_computed_tokens, request.num_tokens) == (5, 6)
    harness.turn()
    assert (request.num_computed_tokens, request.num_tokens) == (6, 7)
    harness.run()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("position", [0, 1, 5])
def test_end_of_sequence_ends_it_wherever_it_comes(position: int, depth: int, policy: str) -> None:
    prompt = prompt_whose_token(position, lambda token: token == EOS)
    harness = Harness(make_scheduler(policy=policy), depth=depth)
    harness.add(make_request(0, prompt, max_tokens=20, eos_token_ids=eos()))
    harness.add(make_request(1, 5, max_tokens=9))
    harness.run()
    assert len(harness.output(0)) == position + 1
    assert harness.finished[0].reason == "stop"
    assert harness.finished[0].detail == EOS
    assert len(harness.output(1)) == 9


def test_late_stop_costs_one_row_at_depth_one_and_none_at_depth_zero() -> None:
    prompt = prompt_whose_token(3, lambda token: token == EOS)
    for depth in (0, 1):
        harness = Harness(make_scheduler(), depth=depth)
        harness.add(make_request(0, prompt, max_tokens=20, eos_token_ids=eos()))
        harness.run()
        assert harness.counts["wasted rows"] == depth


def test_length_is_foreseen_and_costs_no_row() -> None:
    harness = Harness(make_scheduler(), depth=1)
    harness.add(make_request(0, 5, max_tokens=6))
    harness.run()
    assert harness.counts["wasted rows"] == 0
    assert harness.num_computed_tokens() == 5 + 5


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_string_ends_the_request_in_its_step(depth: int) -> None:
    prompt = prompt_whose_token(4, ends_stop_string)
    harness = Harness(make_scheduler(), depth=depth)
    harness.add(make_request(0, prompt, max_tokens=20, stop=("stop",)))
    harness.run()
    end = harness.finished[0]
    assert (end.reason, end.detail, end.num_output_tokens) == ("stop", "stop", 5)


def test_end_of_sequence_is_ignored_on_request_and_before_min_tokens() -> None:
    prompt = prompt_whose_token(2, lambda token: token == EOS)
    harness = Harness(make_scheduler())
    harness.add(make_request(0, prompt, max_tokens=9, eos_token_ids=eos(), ignore_eos=True))
    harness.add(make_request(1, prompt, max_tokens=9, eos_token_ids=eos(), min_tokens=8))
    harness.run()
    assert len(harness.output(0)) == 9
    assert len(harness.output(1)) >= 8


def test_failing_row_fails_its_request_alone() -> None:
    harness = Harness(make_scheduler())
    for i in range(3):
        harness.add(make_request(i, 5, max_tokens=10))
    harness.turn()
    harness.runner.fail[1] = "nan_logits"
    harness.run()
    assert [(harness.finished[i].reason, harness.finished[i].detail) for i in range(3)] == [
        ("length", ""),
        ("error", "nan_logits"),
        ("length", ""),
    ]


def test_parameters_follow_their_request_not_its_row() -> None:
    """A and B are plain, C has a bias; A ends and D joins in its row: only C is affected, and always."""
    harness = Harness(make_scheduler(max_num_seqs=3))
    prompt = [1, 2, 3]
    bias = ((3, 1.0),)
    harness.add(make_request(0, prompt, max_tokens=3))
    harness.add(make_request(1, prompt, max_tokens=12))
    harness.add(make_request(2, prompt, max_tokens=12, logit_bias=bias))
    harness.add(make_request(3, prompt, max_tokens=12))
    harness.run()
    assert harness.output(0) == harness.output(1)[:3]
    assert harness.output(1) == harness.output(3)
    assert harness.output(2) != harness.output(1)


@pytest.mark.parametrize("seed_company", [None, 7])
def test_seeded_stream_does_not_depend_on_its_company(seed_company: int | None) -> None:
    """Alone, as the second row, and as the first of three choices: the same stream; choices differ."""
    prompt, seeded = [4, 5, 6], {"temperature": 1.0, "seed": 42, "max_tokens": 15}
    harness = Harness(make_scheduler(num_blocks=6, block_size=4, max_num_seqs=4))
    harness.add(make_request(0, 4, temperature=1.0, seed=seed_company, max_tokens=15))
    harness.add(make_request(1, prompt, **seeded))
    harness.add_group(2, prompt, 3, **seeded)
    harness.run()
    assert harness.counts["preemptions"] >= 1
    assert harness.output(1) == harness.output(2)
    assert len({tuple(harness.output(i)) for i in (2, 3, 4)}) == 3


def test_every_step_states_the_tokens_that_it_accepted() -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=16, max_num_seqs=4), depth=1)
    for i in range(6):
        harness.add(make_request(i, 20, max_tokens=5, temperature=1.0, seed=i, eos_token_ids=eos()))
    harness.run()
    steps = [e for e in harness.events if isinstance(e, StepEvent)]
    ends = [e for e in harness.events if isinstance(e, FinishEvent)]
    assert sum(len(tokens) for e in steps for tokens in e.tokens) == sum(e.num_output_tokens for e in ends)
