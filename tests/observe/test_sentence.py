"""What explanations say in words, for each cause that can be the main one, and what they advise."""

from __future__ import annotations

import pytest
from tests.observe.runs import MS, Run, ms

from everystop.core.events import (
    AdmitEvent,
    ArrivalEvent,
    Event,
    FinishEvent,
    RefuseEvent,
    StepEvent,
    WaitEvent,
    WaitReason,
)
from everystop.core.plan import StepPlan
from everystop.core.request import FinishReason
from everystop.core.rows import Row, Rows
from everystop.observe.causes import LABELS, ORDER, Cause
from everystop.observe.explain import Explanation, explain, tell
from everystop.observe.history import Client, History
from everystop.observe.sentence import PHRASES
from everystop.observe.wording import number_name
from everystop.words import duration


def test_a_full_batch_names_who_held_the_slot() -> None:
    run = Run(max_num_seqs=2)
    run.add(0, max_tokens=20)
    run.add(1, max_tokens=90)
    run.add(2, max_tokens=4)
    run.finish()
    explanation = run.explain(2)
    assert explanation.sentence == (
        "48 ms to first token: 45 ms queued because all 2 slots were taken until r0 (20 tokens) ended; 55 ms in all, "
        "4 output tokens."
    )
    assert [advice.flag for advice in explanation.advice] == ["--max-num-seqs"]
    hidden = run.explain(2, name_of=lambda i: None).sentence
    assert "until another request ended" in hidden
    assert "20 tokens" not in hidden


def test_a_static_batch_names_its_straggler_while_it_runs_and_afterwards() -> None:
    run = Run(policy="static", max_num_seqs=2)
    run.add(0, max_tokens=512)
    run.add(1, max_tokens=10)
    run.turn(20)
    run.add(2, max_tokens=4)
    run.turn(100)
    assert run.explain(2).sentence == (
        "So far 210 ms of waiting: 210 ms queued because 2 slots were held by a static batch waiting for r0 "
        "(120 tokens)."
    )
    run.finish()
    explanation = run.explain(2)
    assert explanation.sentence == (
        "1.0 s to first token: 1.0 s queued because 2 slots were held by a static batch waiting for r0 "
        "(512 tokens); 1.0 s in all, 4 output tokens."
    )
    assert [advice.flag for advice in explanation.advice] == ["--policy continuous"]


def test_of_several_static_batches_the_longest_ones_straggler_is_named() -> None:
    run = Run(policy="static", max_num_seqs=1)
    for i, max_tokens in enumerate([10, 100, 20, 1]):
        run.add(i, max_tokens=max_tokens)
    run.finish()
    assert "because the slot was held by a static batch waiting for r1 (100 tokens)" in run.explain(3).sentence


def test_a_static_batch_that_fills_says_so() -> None:
    run = Run(policy="static", batch_wait_ns=50 * MS, max_num_seqs=2)
    run.add(0)
    run.finish()
    assert run.explain(0).sentence == (
        "53 ms to first token: 50 ms queued while a static batch waited for more requests; 72 ms in all, "
        "10 output tokens."
    )
    assert ms(run.explain(0))["queue.batch_fill"] == 50


def test_a_full_cache_gives_the_numbers_of_blocks_and_whose_need_it_was() -> None:
    run = Run(num_blocks=20, admission="greedy")
    run.add(0, 200, 60)
    run.add(1, 150, 5)
    run.add(2, 10, 5)
    run.finish()
    assert "queued because it needed 10 KV blocks and 7 were free" in run.explain(1).sentence
    assert "queued because r1 ahead of it needed 10 KV blocks and 7 were free" in run.explain(2).sentence
    hidden = run.explain(2, name_of=lambda i: None)
    assert "queued because another request ahead of it did not fit the KV cache" in hidden.sentence
    told, details = ([segment.detail or "" for segment in each.segments] for each in (run.explain(2), hidden))
    assert [detail for detail in told if detail.startswith("behind r1, 10 blocks needed, ")]
    assert "behind another request" in details
    assert not [detail for detail in details if "needed" in detail]
    assert run.explain(1).advice[0].flag == "--kv-cache-memory"


def test_steps_without_tokens_name_whose_prompt_took_them() -> None:
    run = Run(max_num_batched_tokens=34, num_blocks=200)
    for i in range(4):
        run.add(i, 300, 5)
    run.finish()
    third, last = run.explain(2), run.explain(3)
    assert "on board but left out of 11 steps whose tokens went to others" in third.sentence
    assert ms(third)["skipped"] > 0
    assert (
        "queued because no step had tokens left for r2 ahead of it while r0 (128 tokens) got most of them"
        in last.sentence
    )
    assert [advice.flag for advice in last.advice] == ["--max-num-batched-tokens", "--target-itl-ms"]  # each once


def test_choices_wait_for_their_sibling() -> None:
    run = Run(max_num_batched_tokens=16)
    run.add(0, 300, 2, n=2)
    run.finish()
    assert run.explain(1).sentence == (
        "70 ms to first token: 68 ms queued while its sibling computed their prompt; 72 ms in all, 2 output tokens."
    )


def test_a_long_prompt_beside_it_is_named_with_its_size_and_at_each_late_token() -> None:
    run = Run(max_num_batched_tokens=64, num_blocks=400)
    run.add(0, 8, 30)
    run.turn(5)
    run.add(1, 600, 10)
    run.finish()
    explanation = run.explain(0)
    assert explanation.sentence == (
        "125 ms for 30 output tokens: 62 ms decoding 29 tokens (2.1 ms each, beside 1 other) and 60 ms in others' "
        "prefill (modelled; most of it r1's 600 tokens)."
    )
    assert "most of it another request's)" in run.explain(0, name_of=lambda i: None).sentence
    late = [token for token in explanation.tokens if token.is_outlier]
    assert [token.step_id for token in late] == list(range(5, 15))
    assert late[0].why == "prefill of 63 tokens of r1's prompt in step 5 (6.3 ms, modelled)"
    assert explanation.advice[0].flag == "--target-itl-ms"
    prompt = run.explain(1)
    assert prompt.sentence.startswith("81 ms to first token: 81 ms computing its prompt of 600 tokens in 10 steps;")


def test_the_part_of_a_prompt_that_was_cached_is_mentioned() -> None:
    run = Run(num_blocks=400)
    run.add(0, 600, 1)
    run.finish()
    run.add(1, 600, 1, topic=0)
    run.finish()
    explanation = run.explain(1)
    assert explanation.num_cached_tokens == 592
    assert "computing its prompt of 600 tokens (592 of them cached) in 1 step" in explanation.sentence


def test_a_preemption_says_how_much_is_computed_again_and_makes_a_token_late() -> None:
    run = Run(num_blocks=12, admission="greedy", prefix_caching=False)
    run.add(0, 60, 100)
    run.add(1, 60, 100)
    run.finish()
    explanation = run.explain(1)
    assert explanation.num_preemptions == 1
    again = explanation.num_recomputed_tokens
    assert again > 60
    expected = f"preempted once (waiting for another place, then computing {again} tokens again)"
    assert expected in explanation.sentence
    assert [token.why for token in explanation.tokens if token.is_outlier] == [
        f"preempted, until it had caught up ({duration(explanation.ns_by_cause[Cause.PREEMPTED])})"
    ]
    assert explanation.advice[0].flag == "--kv-cache-memory"


def test_time_between_steps_and_sampling_are_told_apart_from_decoding() -> None:
    run = Run(host_ns=5 * MS)
    run.add(0)
    run.finish()
    assert run.explain(0).sentence == (
        "67 ms for 10 output tokens: 45 ms in scheduling and hand-over and 19 ms decoding 9 tokens (2.1 ms each)."
    )
    assert ms(run.explain(0)) == {"prefill": 2.8, "decode": 18.9, "host": 45.0}
    run = Run(sample_ns=9 * MS)
    run.add(0)
    run.finish()
    assert run.explain(0).sentence == (
        "112 ms for 10 output tokens: 90 ms sampling and 19 ms decoding 9 tokens (2.1 ms each)."
    )


def test_a_pause_between_steps_and_a_slow_step_make_a_token_late() -> None:
    run = Run()
    run.add(0, 8, 10)
    run.turn(4)
    run.now_ns += 30 * MS
    run.turn(2)
    run.sample_ns = 40 * MS
    run.turn()
    run.sample_ns = 0
    run.finish()
    assert [token.why for token in run.explain(0).tokens if token.is_outlier] == [
        "30 ms between steps",
        "40 ms of sampling",
    ]


def test_a_refusal_an_abort_and_a_failure_say_so() -> None:
    history = History()
    history.receive([RefuseEvent(5, 0, "NeverFits")])
    history.catch_up()
    assert explain(history, [0], now_ns=9, name_of=number_name).sentence == "Refused after 0 µs: NeverFits."
    run = Run()
    run.add(0)
    run.turn(3)
    run.scheduler.abort(0, run.now_ns)
    run.turn()
    explanation = run.explain(0)
    assert (explanation.state, explanation.finish_reason, explanation.is_live) == ("aborted", "abort", False)
    assert explanation.sentence.startswith("Its client left; 7.0 ms for 3 output tokens: ")


def lived(reason: WaitReason, behind: int = -1, *, is_passed_over: bool = False) -> Explanation:
    """A request that waited 90 ms for one reason, its own, everybody's, or that of the one ahead, and ran for 10."""
    wait = WaitEvent(1, 7 if is_passed_over or behind < 0 else behind, reason, 3, 2, behind if is_passed_over else -1)
    plan = StepPlan(0, rows=Rows([Row(7, 0, 4, 0, 3)]))
    events: list[Event] = [
        ArrivalEvent(0, 7, 7, 0, 4, 1, "", 0),
        wait,
        AdmitEvent(90 * MS, 0, 7, 0, 4, 0, False, -1),
        FinishEvent(100 * MS, 0, 7, 0, FinishReason.LENGTH, "", 4, 1, 0, 0),
        StepEvent(100 * MS, 90 * MS, 10 * MS, plan, ((1,),), 0, 0, 0, 9, 0, 0, 0),
    ]
    history = History()
    history.receive(events)
    history.catch_up()
    return explain(history, [7], now_ns=100 * MS, name_of=number_name)


@pytest.mark.parametrize("reason", [reason for reason in WaitReason if reason is not WaitReason.BEHIND])
def test_each_reason_to_wait_is_a_cause_with_words_of_its_own(reason: WaitReason) -> None:
    explanation = lived(reason)
    assert ms(explanation)[f"queue.{reason.value}"] == 90 - 1e-6
    assert explanation.sentence.startswith("100 ms to first token: 90 ms queued ")
    assert (
        len({lived(each).sentence for each in (reason, WaitReason.NO_SLOT)}) == (reason is not WaitReason.NO_SLOT) + 1
    )


def test_the_reason_of_the_one_ahead_is_told_with_its_name_and_ones_own_without() -> None:
    assert "because r3 ahead of it needed 3 KV blocks and 2 were free" in lived(WaitReason.NO_BLOCKS, 3).sentence
    assert "the tenant of r3 ahead of it was at one of its limits" in lived(WaitReason.TENANT_LIMIT, 3).sentence
    passed_over = lived(WaitReason.OVER_SHARE, 3, is_passed_over=True)
    assert "because its tenant had had more than its share" in passed_over.sentence
    assert next(segment.detail for segment in passed_over.segments if segment.cause is Cause.OVER_SHARE) == (
        "behind r3, 3 blocks needed, 2 free"
    )


def test_every_cause_has_a_label_a_place_and_a_phrase() -> None:
    assert set(LABELS) == set(ORDER) == set(PHRASES) == set(Cause)


def test_reception_and_delivery_count_for_a_client() -> None:
    run = Run()
    run.now_ns = 40 * MS
    run.history.add_client(Client("cmpl-a", "", 0, 1, 10 * MS, 30 * MS))
    run.add(0)
    run.turn(10)
    assert run.explain(0).is_live
    run.history.clients["cmpl-a"].delivered_ns = run.now_ns + 70 * MS
    explanation = run.explain(0)
    assert (explanation.id, explanation.is_live) == ("cmpl-a", False)
    assert ms(explanation) == {
        "receive": 20,
        "host": 10,
        "prefill": 2.8,
        "decode": 18.9,
        "delivery": 70,
    }
    assert explanation.sentence == (
        "122 ms for 10 output tokens: 70 ms turning tokens into text and delivering it, 20 ms receiving and tokenising "
        "its prompt of 8 tokens and 19 ms decoding 9 tokens (2.1 ms each)."
    )


def test_a_sequence_of_the_same_answer_is_its_sibling_not_itself() -> None:
    run = Run(max_num_seqs=1, max_num_batched_tokens=16)
    run.history.add_client(Client("cmpl-a", "", 0, 2, 0, 0))
    run.add(0, 8, 20)
    run.add(1, 8, 2)
    run.finish()
    names = {0: "cmpl-a", 1: "cmpl-a"}
    last = run.explain(0, 1, name_of=names.get)
    assert "queued because the slot was taken until its sibling (20 tokens) ended" in last.sentence
    assert tell(run.history, [0, 1], now_ns=run.now_ns, name_of=names.get) == last.sentence


def test_a_short_wait_counts_the_slots_of_those_who_ended_with_its_step() -> None:
    run = Run(max_num_seqs=3, host_ns=MS)
    for i in range(3):
        run.add(i, max_tokens=10 + i % 2)
    run.turn(9)
    run.add(3, max_tokens=2)
    run.finish()
    assert "all 3 slots were taken until r0" in run.explain(3).sentence


def test_a_prompt_computed_in_one_step_gets_no_advice_on_larger_steps() -> None:
    run = Run()
    run.add(0, 60, 1)
    run.finish()
    explanation = run.explain(0)
    assert "computing its prompt of 60 tokens in 1 step" in explanation.sentence
    assert not explanation.advice
