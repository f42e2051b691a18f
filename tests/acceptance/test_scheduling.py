"""Acceptance cases of the scheduler, on the hash model: who boards, who gives way, and that nobody is forgotten."""

from __future__ import annotations

import random
import time
from itertools import count, pairwise
from typing import Any

import pytest
from tests.core import hash_model
from tests.core.harness import Harness, make_request, make_scheduler
from tests.core.hash_model import HashModelRunner, solo
from tests.core.test_aborts import in_state, random_run_with_aborts
from tests.measuring import least
from tests.server.parrot import EOS, ParrotServer, parrot

from everystop.core.boarding import Boarding
from everystop.core.budget import StepBudget
from everystop.core.dealer import Dealer
from everystop.core.displacement import Displacement
from everystop.core.draft import Draft
from everystop.core.errors import NeverFits, PolicyError, PromptTooLong, RequestError
from everystop.core.events import AdmitEvent, PreemptEvent
from everystop.core.kv_cache import KVCache
from everystop.core.plan import NewBlocks
from everystop.core.request import Request, RequestState, SamplingParams, extend_block_keys
from everystop.core.roster import Roster
from everystop.core.rows import Row
from everystop.core.scheduler import Scheduler


def refusal(harness: Harness, request: Request) -> RequestError | None:
    """What keeps the request out; None if it was let in."""
    try:
        harness.add(request)
    except RequestError as error:
        return error
    return None


# --------------------------------------------------------------------- 01: a request that can never fit


def check_ac_01() -> None:
    harness = Harness(make_scheduler(num_blocks=4, max_model_len=512))
    error = refusal(harness, make_request(0, 200))
    harness.add(make_request(1, 5, max_tokens=4))
    harness.run(max_turns=100)
    assert len(harness.output(1)) == 4
    assert isinstance(error, PromptTooLong), "a request larger than the whole cache was let in"
    assert all(number in str(error) for number in ("200", "64")), error


def test_ac_01_request_larger_than_the_cache_is_refused_and_the_next_is_served() -> None:
    check_ac_01()
    with parrot(num_blocks=4, max_model_len=512) as server:

        def refuse() -> float:
            began_s = time.monotonic()
            status, body = server.complete("a" * 200)
            took_s = time.monotonic() - began_s
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            return took_s

        assert least(refuse, enough=0.1, tries=50) < 0.1
        assert server.complete("abcde", max_tokens=3)[1]["choices"][0]["text"] == "abc"


def test_mutant_ac_01_need_compared_with_the_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "num_token_slots", property(lambda kv: 10**9))
    with pytest.raises(AssertionError, match="nothing was done though requests are left"):
        check_ac_01()


# --------------------------------------------------------------------- 02: admission by whole need


def check_ac_02() -> None:
    scheduler = make_scheduler(num_blocks=20, prefix_caching=False, max_num_batched_tokens=16)
    harness = Harness(scheduler)
    for i in range(2):
        harness.add(make_request(i, 200, max_tokens=40))  # 15 blocks each
    harness.run(max_turns=600)
    assert len(harness.output(0)) == len(harness.output(1)) == 40
    assert harness.num_computed_tokens() <= 3 * 2 * 240


def test_ac_02_two_requests_for_three_quarters_of_the_cache_each_both_finish() -> None:
    check_ac_02()


def test_mutant_ac_02_admitted_by_the_next_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are taken chunk by chunk, and whoever lacks one takes the place of whoever has most."""

    def chunk_shortfall(kv: KVCache, request: Request, shared: list[int]) -> tuple[int, int]:
        return kv.num_blocks_for(min(request.num_tokens + 1, 16)), kv.pool.num_free

    def take_blocks(displacement: Displacement, draft: Draft) -> None:
        wanted = [(chunk.request, chunk.start + chunk.num_tokens) for chunk in draft.chunks]
        wanted += [(request, request.num_scheduled_through + 1) for request in draft.decoders]
        for request, num_tokens in wanted:
            while request.state is RequestState.RUNNING:
                index, new = len(request.block_table), displacement._kv.grow(request, num_tokens)
                if new is not None:
                    if new:
                        draft.plan.new_blocks.append(NewBlocks(request.request_id, index, tuple(new)))
                    break
                others = [other for other in displacement._batch.running.values() if other is not request]
                victim = max(others, key=lambda other: len(other.block_table), default=request)
                displacement.preempt(victim, draft.plan, draft.now_ns, draft)
        draft.strike(set(draft.plan.preempted))

    monkeypatch.setattr(KVCache, "shortfall", chunk_shortfall)
    monkeypatch.setattr(Displacement, "take_blocks", take_blocks)
    monkeypatch.setattr(Dealer, "deal_leftover", lambda dealer, draft: None)
    with pytest.raises(AssertionError, match="still at work after 600 turns"):
        check_ac_02()


# --------------------------------------------------------------------- 03, 04: preemption changes no answer


def check_ac_03(num_generated: int, depth: int) -> None:
    """The harness compares every token that arrives with the undisturbed run, in order and once each."""
    harness = Harness(make_scheduler(policy="priority", max_num_seqs=1, max_num_batched_tokens=8), depth=depth)
    harness.add(make_request(0, 16, max_tokens=40, temperature=1.0, seed=7, priority=5))
    while len(harness.output(0)) < num_generated:
        harness.turn()
    harness.add(make_request(1, 20, max_tokens=3, priority=0))
    harness.run()
    assert [e.request_id for e in harness.events if isinstance(e, PreemptEvent)] == [0]
    (resumed,) = [e for e in harness.events if isinstance(e, AdmitEvent) and e.resumed]
    assert resumed.num_tokens == 16 + num_generated + depth  # at depth 1 one more was on its way
    assert (len(harness.output(0)), len(harness.output(1))) == (40, 3)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_generated", [1, 15, 16, 17])
def test_ac_03_preempted_stream_equals_the_undisturbed_one(num_generated: int, depth: int) -> None:
    check_ac_03(num_generated, depth)


def test_mutant_ac_03_recomputed_from_the_prompt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was generated is forgotten by the preemption, and so sent to the client once more."""
    preempt = Displacement.preempt

    def forgetful(displacement: Displacement, victim: Request, *args: Any) -> int:
        del victim.token_ids[victim.num_prompt_tokens :]
        return preempt(displacement, victim, *args)

    monkeypatch.setattr(Displacement, "preempt", forgetful)
    with pytest.raises(AssertionError, match="request 0 diverged from what it yields alone"):
        check_ac_03(15, depth=0)


def check_ac_04(seed: int, num_steps: int) -> None:
    """Sixteen at a time for so many steps, in blocks for 30 % of them; each answer is compared as it comes."""
    rng = random.Random(seed)
    lengths = [(rng.randint(4, 40), rng.randint(20, 60)) for _ in range(16)]
    demand = sum(-(-(prompt + output) // 16) for prompt, output in lengths)
    scheduler = make_scheduler(num_blocks=demand * 3 // 10, max_num_seqs=16, max_num_batched_tokens=8)
    harness = Harness(scheduler, depth=seed % 2)
    num_sent = 0
    for _ in range(num_steps):
        while len(scheduler.requests) < 16:
            prompt, output = lengths[num_sent % 16]
            harness.add(make_request(num_sent, prompt, max_tokens=output, temperature=1.0, seed=num_sent))
            num_sent += 1
        harness.turn()
    harness.run(max_turns=20_000)
    assert harness.counts["preemptions"] >= 1
    assert len(harness.finished) == num_sent


@pytest.mark.parametrize("seed", range(20))
def test_ac_04_recomputation_in_chunks_in_a_tight_pool_changes_no_answer(seed: int) -> None:
    check_ac_04(seed, num_steps=2_000)


def test_mutant_ac_04_resumed_behind_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes back believes that one block more is computed than is, and so reads somebody else's."""
    match = Boarding._match

    def hopeful(boarding: Boarding, picked: Request, source: Request | None) -> tuple[list[int], int, Request | None]:
        shared, start, source = match(boarding, picked, source)
        return shared, start + 16 if picked.num_preemptions and start + 16 < picked.num_tokens else start, source

    monkeypatch.setattr(Boarding, "_match", hopeful)
    with pytest.raises(AssertionError, match="diverged from what it yields alone"):
        check_ac_04(0, num_steps=2_000)


# --------------------------------------------------------------------- 05: a victim is not in the plan


def check_ac_05(depth: int) -> None:
    """Two rows at a block border, one free block; the one that is visited first ranks lower."""
    harness = Harness(make_scheduler(policy="priority", num_blocks=5, max_num_seqs=2), depth=depth)
    for i in range(2):
        harness.add(make_request(i, 20, max_tokens=20, priority=1 - i))
    harness.run(max_turns=200)
    (plan,) = [plan for plan in harness.plans if plan.preempted]
    assert plan.preempted == [0]
    assert 0 not in plan.rows.request_ids
    assert not any(new.request_id == 0 for new in plan.new_blocks)
    assert len(harness.output(0)) == len(harness.output(1)) == 20


@pytest.mark.parametrize("depth", [0, 1])
def test_ac_05_victim_is_not_in_the_plan_that_preempts_it(depth: int) -> None:
    check_ac_05(depth)


def test_mutant_ac_05_victim_keeps_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner is asked for a row of a request whose blocks are gone, and knows it no more."""
    monkeypatch.setattr(Draft, "strike", lambda draft, request_ids: None)
    with pytest.raises((KeyError, AssertionError)):
        check_ac_05(depth=0)


# --------------------------------------------------------------------- 06: no inversion of priorities


def check_ac_06() -> None:
    harness = Harness(make_scheduler(policy="priority", num_blocks=40, max_num_seqs=1))
    harness.add(make_request(0, 4, max_tokens=500, priority=5))
    for _ in range(3):
        harness.turn()
    harness.add(make_request(1, 4, max_tokens=2, priority=0))
    harness.add(make_request(2, 4, max_tokens=2, priority=5))
    harness.run(max_turns=2_000)
    assert next(iter(harness.finished)) == 1, "the urgent request did not finish first"
    assert len(harness.output(0)) == 500


def test_ac_06_urgent_request_takes_the_only_slot() -> None:
    check_ac_06()


def test_mutant_ac_06_full_slots_end_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Displacement, "make_room", lambda displacement, plan, now_ns: None)
    with pytest.raises(AssertionError, match="the urgent request did not finish first"):
        check_ac_06()


# --------------------------------------------------------------------- 07, 08: neither decode nor prefill starves


def check_ac_07() -> None:
    scheduler = make_scheduler(num_blocks=600, max_num_seqs=4, max_num_batched_tokens=128)
    harness = Harness(scheduler, is_checking=False)
    harness.add(make_request(0, 2, max_tokens=100))
    num_sent = 1
    while 0 not in harness.finished and len(harness.plans) < 400:
        while len(scheduler.requests) < 4:
            harness.add(make_request(num_sent, 2_000, max_tokens=2))
            num_sent += 1
        harness.turn()
    steps = harness.steps_of(0)
    assert len(steps) > 1, "the decoder got no second token"
    assert max(after - before for before, after in pairwise(steps)) == 1, "prompts kept the decoder waiting"
    assert num_sent > 5


def test_ac_07_decoder_has_a_token_in_every_step_beside_endless_prompts() -> None:
    check_ac_07()


def test_mutant_ac_07_prompts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    catching_up = Dealer._catching_up

    def prompts_first(dealer: Dealer) -> tuple[list[Request], list[Request]]:
        decoders, prefilling = catching_up(dealer)
        return ([] if prefilling else decoders), prefilling

    monkeypatch.setattr(Dealer, "_catching_up", prompts_first)
    with pytest.raises(AssertionError, match=r"the decoder got no second token|prompts kept the decoder waiting"):
        check_ac_07()


def check_ac_08() -> None:
    harness = Harness(make_scheduler(num_blocks=300, max_num_batched_tokens=128))
    harness.add(make_request(0, 4_000, max_tokens=1))
    for _ in range(5):
        harness.turn()
    harness.add(make_request(1, 5, max_tokens=1))
    harness.run()
    waited = harness.steps_of(1)[0] - 4
    assert waited <= 3, f"the first token of the short prompt came {waited} steps after its arrival"


def test_ac_08_short_prompt_behind_a_long_one_has_its_token_within_three_steps() -> None:
    check_ac_08()


def test_mutant_ac_08_the_first_takes_the_whole_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        StepBudget, "share", lambda budget, start, remaining, **_: min(remaining, budget.left_at(start))
    )
    with pytest.raises(AssertionError, match="steps after its arrival"):
        check_ac_08()


# --------------------------------------------------------------------- 10, 11: nothing to compute, one token to say


def check_ac_10() -> None:
    harness = Harness(make_scheduler())
    error = refusal(harness, make_request(0, []))
    for i in (1, 2):
        harness.add(make_request(i, range(32), max_tokens=3))
        harness.run(max_turns=50)
    assert harness.finished[2].num_cached_tokens == 16, "all but the last block, never the last token"
    assert error is not None, "a prompt without tokens was let in"


def test_ac_10_nothing_to_compute_is_refused_or_served() -> None:
    check_ac_10()
    greedy = SamplingParams(temperature=0.0)
    ends_at_once = next(i for i in count() if solo([i], greedy, limit_tokens=2).token_ids[0] == hash_model.EOS)
    harness = Harness(make_scheduler())
    harness.add(make_request(0, [ends_at_once], max_tokens=5, eos_token_ids=(hash_model.EOS,)))
    harness.run(max_turns=20)
    assert (harness.finished[0].reason, len(harness.output(0))) == ("stop", 1)
    with parrot() as server:
        for prompt in ("", [], [[]], [""], ["a", ""]):
            status, body = server.complete(prompt)
            assert (status, body["error"]["type"]) == (400, "invalid_request_error"), prompt
        for _ in range(2):  # the second finds all of its prompt in the cache
            assert server.complete("x" * 64, max_tokens=2)[1]["choices"][0]["text"] == "xx"
        ended = server.complete([EOS])[1]
        assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("", "stop")
        assert ended["usage"]["completion_tokens"] == 1
        assert server.get("/health")[0] == 200


def test_mutant_ac_10_a_whole_prompt_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "match", match_everything)
    with pytest.raises(AssertionError, match="nothing was done though requests are left"):
        check_ac_10()


def match_everything(kv: KVCache, request: Request) -> list[int]:
    """As `KVCache.match`, up to and including the last token."""
    extend_block_keys(request, kv.block_size)
    found = [kv.pool.find(key) for key in request.block_keys[: request.num_tokens // kv.block_size]]
    return found[: found.index(None)] if None in found else found  # type: ignore[return-value]


def test_mutant_ac_10_empty_prompts_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_fits(scheduler: Scheduler, request: Request) -> None:
        request.max_tokens = request.params.max_tokens or scheduler.limit_tokens - request.num_prompt_tokens

    monkeypatch.setattr(Scheduler, "_check_fits", check_fits)
    with pytest.raises(AssertionError, match=r"a prompt without tokens was let in|nothing was done though"):
        check_ac_10()


def check_ac_11() -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=16))
    harness.add(make_request(0, 40, max_tokens=1))
    num_steps = harness.run(max_turns=20)
    assert num_steps == 3, "the prompt has three chunks"
    assert len(harness.output(0)) == 1
    assert harness.finished[0].reason == "length"
    assert harness.finished[0].num_output_tokens == 1


def test_ac_11_three_chunks_and_one_token(server: ParrotServer) -> None:
    check_ac_11()
    body = server.complete("x" * 150, max_tokens=1)[1]  # the server's steps have 64 tokens
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("x", "length")
    assert body["usage"]["completion_tokens"] == 1


def test_mutant_ac_11_a_token_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    following = HashModelRunner._next

    def hasty(runner: HashModelRunner, row: Row, *, is_padded: bool) -> tuple[int, ...] | str:
        return following(runner, row, is_padded=is_padded) or (1,)

    monkeypatch.setattr(HashModelRunner, "_next", hasty)
    with pytest.raises(AssertionError, match="request 0 diverged from what it yields alone"):
        check_ac_11()


# --------------------------------------------------------------------- 13: aborts

STATES = ("unknown", "just added", "waiting", "forking", "preempted", "prefilling", "decoding", "finished")


def check_ac_13(num_runs: int) -> None:
    """Each abort is done twice, and all invariants are asserted after it: see `Harness.abort`."""
    for depth in (0, 1):
        for state in STATES:
            harness, request_id = in_state(state, depth)
            assert harness.abort(request_id) == (state not in ("unknown", "finished"))
            harness.run(max_turns=300)
        harness = Harness(make_scheduler(max_num_batched_tokens=8), depth=depth)
        harness.add(make_request(0, 20, max_tokens=9))
        harness.abort_before_execution.append(0)  # the ninth state: planned, and not yet executed
        harness.run(max_turns=300)
    for seed in range(num_runs):
        random_run_with_aborts(seed)


def test_ac_13_abort_is_a_clean_end_in_every_state() -> None:
    check_ac_13(num_runs=1_000)


def test_mutant_ac_13_stays_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is not told that a request has left, and lets it board."""

    def leave(roster: Roster, request: Request, now_ns: int) -> None:
        del roster.requests[request.request_id]
        roster.unpark(request, now_ns)
        roster.siblings.leave(request)

    monkeypatch.setattr(Roster, "leave", leave)
    with pytest.raises(PolicyError, match="which does not wait"):
        check_ac_13(num_runs=20)


# --------------------------------------------------------------------- 14: limits to the token


def check_ac_14() -> None:
    for num_prompt in (62, 63, 64, 65):
        for max_tokens in (1, 2, 3):
            harness = Harness(make_scheduler(max_model_len=64))
            error = refusal(harness, make_request(0, num_prompt, max_tokens=max_tokens))
            told = f"prompt of {num_prompt}, max_tokens {max_tokens}: {error}"
            if num_prompt + max_tokens <= 64:
                assert error is None, told
                harness.run()
                assert len(harness.output(0)) == max_tokens, told
                assert harness.finished[0].reason == "length"
            elif num_prompt < 64:
                assert isinstance(error, NeverFits), told
                assert all(str(number) in str(error) for number in (num_prompt, max_tokens, 64)), told
            else:
                assert isinstance(error, PromptTooLong), told
                assert all(str(number) in str(error) for number in (num_prompt, 64)), told


def test_ac_14_limits_hold_to_the_token_and_say_the_numbers() -> None:
    check_ac_14()
    with parrot(max_model_len=64) as server:
        assert server.complete("a" * 62, max_tokens=2)[1]["usage"]["completion_tokens"] == 2
        for num_prompt, max_tokens in ((63, 2), (64, 1), (65, 3)):
            status, body = server.complete("a" * num_prompt, max_tokens=max_tokens)
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            assert str(num_prompt) in body["error"]["message"]
        assert server.complete("a" * 62)[1]["usage"]["completion_tokens"] == 2, "all that fits"


@pytest.mark.parametrize("error", [-1, 1])
def test_mutant_ac_14_off_by_one(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    check_fits = Scheduler._check_fits

    def off_by_one(scheduler: Scheduler, request: Request) -> None:
        scheduler.limit_tokens += error
        try:
            check_fits(scheduler, request)
        finally:
            scheduler.limit_tokens -= error

    monkeypatch.setattr(Scheduler, "_check_fits", off_by_one)
    with pytest.raises(AssertionError, match="prompt of 6"):
        check_ac_14()
