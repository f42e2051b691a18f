"""Explanations of fuzzed schedules: sums are exact at every look, and causes are what a slow oracle says."""

from __future__ import annotations

import json
import re
from array import array
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from tests.core.fuzz import ABORT_RATES
from tests.observe.runs import MS, Run, ms
from tests.observe.schedules import Oracle, Watched

from everystop.core.policy import POLICIES
from everystop.core.step_time import StepTimeModel
from everystop.observe.causes import Cause
from everystop.observe.excerpt import excerpt_of
from everystop.observe.explain import Explanation, explain, tell
from everystop.observe.history import Client, History, StepRecord, Trail
from everystop.observe.step_share import own_forward_ns, share_of
from everystop.observe.wording import number_name

NUM_EPISODES = 23  # a policy, and there are nine
STEPS = 25
OUTSIDE = (Cause.RECEIVE, Cause.DELIVERY, Cause.STEP_RUNNING)
KINDS = {Cause.PREEMPTED: "preempted", Cause.SKIPPED: "skipped"}


def look(episode: Watched, request_id: int) -> Explanation:
    """The explanation of a request now, which is that of an excerpt too."""
    explanation = explain(episode.history, [request_id], now_ns=episode.harness.now_ns, name_of=number_name)
    excerpt = excerpt_of(episode.history, [episode.history.trails[request_id]])
    assert explain(excerpt, [request_id], now_ns=episode.harness.now_ns, name_of=number_name) == explanation
    return explanation


def check_sums(explanation: Explanation) -> None:
    """What must hold of every explanation at any time."""
    assert sum(explanation.ns_by_cause.values()) == explanation.e2e_ns
    assert all(ns > 0 for ns in explanation.ns_by_cause.values())
    at_ns = 0
    sums: dict[Cause, int] = {}
    for segment in explanation.segments:
        assert segment.start_ns == at_ns < segment.end_ns
        at_ns = segment.end_ns
        sums[segment.cause] = sums.get(segment.cause, 0) + segment.end_ns - segment.start_ns
    assert at_ns == explanation.e2e_ns
    assert sums == explanation.ns_by_cause
    assert Cause.UNATTRIBUTED not in explanation.ns_by_cause
    data = explanation.as_data()
    assert sum(cause["ns"] for cause in data["causes"]) == data["e2e_ns"]
    for step in explanation.steps:
        assert step.own_ns + step.others_ns + step.host_ns <= step.end_ns - step.start_ns
    assert explanation.sentence.endswith(".")


def check_client(episode: Watched, trail: Trail) -> None:
    """The same with an HTTP request around it, answered, abandoned or still open; what the engine did is the same."""
    draw, request_id = episode.clock.randrange, trail.request_id
    assert trail.is_over
    over_ns = episode.harness.finished[request_id].now_ns if trail.finish is not None else trail.since_ns
    received_ns = trail.since_ns - draw(3_000_000)
    client = Client("cmpl", "", request_id, 1, received_ns, draw(received_ns, trail.since_ns + 1))
    delivered = [None, over_ns + draw(1_000_000), draw(trail.since_ns, over_ns + 1)]
    client.delivered_ns = episode.clock.choice(delivered)
    alone = look(episode, request_id)
    trail.client = client
    explanation = look(episode, request_id)
    trail.client = None
    check_sums(explanation)
    end_ns = episode.harness.now_ns if client.delivered_ns is None else client.delivered_ns
    assert explanation.is_live == (client.delivered_ns is None)
    assert explanation.e2e_ns == end_ns - client.received_ns
    assert explanation.ns_by_cause.get(Cause.RECEIVE, 0) == client.submitted_ns - client.received_ns
    assert explanation.ns_by_cause.get(Cause.DELIVERY, 0) == max(0, end_ns - over_ns)
    if end_ns >= over_ns:
        steps = episode.history.steps.since(0)
        landed = [record.now_ns for record in steps if client.submitted_ns < record.now_ns <= trail.since_ns]
        took = {Cause.HOST: trail.since_ns - max([client.submitted_ns, *landed])}
        inside = {cause: ns for cause, ns in explanation.ns_by_cause.items() if cause not in OUTSIDE}
        assert {cause: ns - took.get(cause, 0) for cause, ns in inside.items() if ns > took.get(cause, 0)} == {
            cause: ns for cause, ns in alone.ns_by_cause.items() if cause not in OUTSIDE
        }


def check_tokens(oracle: Oracle, explanation: Explanation, request_id: int) -> None:
    """Tokens are the outputs of the steps, at their times; outliers are those beyond twice the median gap."""
    outputs = oracle.outputs[request_id]
    assert [(token.at_ns + explanation.received_ns, token.step_id) for token in explanation.tokens] == outputs
    assert explanation.num_output_tokens == len(outputs)
    assert explanation.ttft_ns == (outputs[0][0] - explanation.received_ns if outputs else None)
    gaps = [token.gap_ns for token in explanation.tokens if token.gap_ns is not None]
    for token in explanation.tokens:
        is_outlier = token.gap_ns is not None and token.gap_ns > 2 * median(gaps)
        assert token.is_outlier == is_outlier
        assert (token.why is not None) == is_outlier


def check_causes(oracle: Oracle, explanation: Explanation, request_id: int) -> None:
    """Queued, preempted, skipped and on board for as long as the oracle says; its life is from arrival to finish."""
    start, end = oracle.arrivals[request_id].now_ns, oracle.finishes[request_id].now_ns
    assert (explanation.received_ns, explanation.e2e_ns) == (start, end - start)
    found: dict[str, int] = {}
    for cause, ns in explanation.ns_by_cause.items():
        kind = "queue" if cause.is_queue else KINDS.get(cause, "on board")
        found[kind] = found.get(kind, 0) + ns
    assert found == oracle.ns_by_kind(request_id)
    assert explanation.queue_ns == found.get("queue", 0)


def check_reasons(episode: Watched, explanation: Explanation, request_id: int) -> None:
    """Right after each planning, the reason of one that has never boarded is what the scheduler said."""
    for now_ns, reasons in episode.reasons.items():
        if request_id not in reasons:
            continue
        at_ns = now_ns - explanation.received_ns
        segment = next((each for each in explanation.segments if each.start_ns <= at_ns < each.end_ns), None)
        if segment is not None:
            allowed = {f"queue.{reasons[request_id]}"}
            if reasons[request_id] is None:
                allowed = {cause for cause in Cause if cause.is_queue and cause is not Cause.STEP_RUNNING}
            assert segment.cause in allowed


@pytest.mark.parametrize("policy", POLICIES)
def test_causes_of_fuzzed_schedules_sum_exactly_and_are_the_oracles(policy: str) -> None:
    seen: set[Any] = set()
    for number in range(NUM_EPISODES):
        name = f"explain:{policy}:{number}"
        episode = Watched(name, policy, number % 2, ABORT_RATES[number % len(ABORT_RATES)])
        try:
            check_episode(episode, seen)
        except Exception as error:
            error.add_note(f"episode {name!r}")
            raise
    assert NUM_EPISODES * len(POLICIES) >= 200
    full = Cause.BATCH_BARRIER if policy.startswith("static") else Cause.NO_SLOT
    assert {
        full,
        Cause.PREFILL,
        Cause.DECODE,
        Cause.OTHERS_PREFILL,
        Cause.SAMPLING,
        Cause.HOST,
        Cause.PREEMPTED,
    } <= seen
    assert {Cause.STEP_RUNNING, "waiting", "running", "finished", "aborted", "refused"} <= seen


def check_episode(episode: Watched, seen: set[Any]) -> None:
    """Look at one request after each turn, and at each in the end."""
    kept: list[tuple[History, Explanation, int, int]] = []
    for _ in range(STEPS):
        episode.turn()
        known = [i for i, trail in episode.history.trails.items() if trail.since_ns]
        if known:
            request_id = episode.clock.choice(known)
            explanation = look(episode, request_id)
            excerpt = excerpt_of(episode.history, [episode.history.trails[request_id]])
            kept.append((excerpt, explanation, request_id, episode.harness.now_ns))
            check_sums(explanation)
            seen |= {explanation.state, *explanation.ns_by_cause}
    episode.drain()
    for excerpt, explanation, request_id, now_ns in kept:
        again = explain(excerpt, [request_id], now_ns=now_ns, name_of=number_name)
        assert again == explanation, "what has happened since has no part in it"
    oracle = Oracle(episode.harness.events)
    for request_id, trail in episode.history.trails.items():
        explanation = look(episode, request_id)
        seen |= {explanation.state, *explanation.ns_by_cause}
        check_sums(explanation)
        told = tell(episode.history, [request_id], now_ns=episode.harness.now_ns, name_of=number_name)
        assert told == explanation.sentence
        check_client(episode, trail)
        if trail.refusal is None:
            assert len(explanation.tokens) == len(episode.harness.received[request_id])
            check_tokens(oracle, explanation, request_id)
            check_causes(oracle, explanation, request_id)
            check_reasons(episode, explanation, request_id)


def test_choices_are_explained_each_and_the_headline_is_the_last_ones() -> None:
    run = Run(max_num_seqs=2)
    run.history.add_client(Client("chatcmpl-1", "", 0, 3, -5 * MS, -1 * MS))
    run.add(0, max_tokens=10, n=3)
    run.turn(15)
    half = run.explain(0, 1, 2)
    assert [choice.state for choice in half.choices] == ["finished", "finished", "running"]
    assert half.is_live
    run.finish()
    run.history.clients["chatcmpl-1"].delivered_ns = run.now_ns + 3 * MS
    whole = run.explain(0, 1, 2)
    assert (whole.id, len(whole.choices), whole.is_live) == ("chatcmpl-1", 3, False)
    assert whole.ns_by_cause == whole.choices[2].ns_by_cause
    assert whole.e2e_ns == run.now_ns + 8 * MS
    for choice in whole.choices:
        check_sums(choice)
        assert choice.num_output_tokens == 10
    assert whole.choices[0].e2e_ns < whole.e2e_ns
    assert Cause.DELIVERY not in whole.choices[0].ns_by_cause
    assert len(whole.as_data()["choices"]) == 3


def test_a_choice_of_the_same_request_is_no_stranger_and_not_itself() -> None:
    run = Run(max_num_seqs=2, max_num_batched_tokens=32)
    run.history.add_client(Client("cmpl-0", "", 0, 2, 0, 0))
    run.add(0, 20, 6, n=2)
    run.finish()
    names = {mate.id for step in run.explain(0).steps for mate in step.mates}
    assert names == {"its sibling"}


def test_one_who_may_not_see_others_learns_no_name() -> None:
    run = Run(max_num_seqs=2, max_num_batched_tokens=32)
    for i in range(70, 76):
        run.add(i, 100, 20)
    run.finish()
    for i in range(70, 76):
        text = json.dumps(run.explain(i, name_of=lambda other: None).as_data())
        assert "another request" in text
        assert set(re.findall(r"r7\d", text)) <= {f"r{i}"}
        assert all(step["mates"] == [] or step["mates"][0]["id"] is None for step in json.loads(text)["steps"])


def test_what_is_forgotten_is_said_to_be_unknown() -> None:
    run = Run(history=History(max_bytes=20_000), max_num_seqs=1)
    run.add(0, 8, 60)
    run.add(1, 8, 60)
    run.turn(110)
    explanation = run.explain(1)
    excerpt = excerpt_of(run.history, [run.history.trails[1]])
    assert explain(excerpt, [1], now_ns=run.now_ns, name_of=number_name) == explanation
    assert sum(explanation.ns_by_cause.values()) == explanation.e2e_ns
    assert ms(explanation)["unattributed"] > 100
    assert "of which nothing is remembered any more" in explanation.sentence
    run = Run(history=History(num_finished=1), max_num_seqs=1)
    run.add(0)
    run.add(1)
    run.finish()
    with pytest.raises(LookupError, match="request 0 is not remembered"):
        run.explain(0)


def test_long_lives_are_thinned_evenly_and_still_covered_exactly() -> None:
    run = Run(max_num_seqs=2, max_num_batched_tokens=4, num_blocks=500)
    run.add(0, 8, 5000)
    for i in range(1, 1200):
        run.turn(4)
        run.add(i, 8, 1)
    run.finish()
    explanation = run.explain(0)
    assert (explanation.num_steps, len(explanation.steps), explanation.steps_thinned) == (5001, 2000, True)
    assert {b.step_id - a.step_id for a, b in pairwise(explanation.steps)} == {2, 3}
    assert len(explanation.segments) < 4 * 600
    check_sums(explanation)
    assert len(explanation.tokens) == 5000


def test_a_share_is_the_time_of_the_step_without_others_prefill_over_that_with_it() -> None:
    record = StepRecord(
        0, 0, 8 * MS, 6 * MS, array("q", [5, 6, 7]), array("q", [9, 0, 3]), array("q", [1, 42, 1]), b"\1\0\1",
        0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, StepTimeModel(step_ns=1e6, token_ns=1e5), 1 * MS,
    )  # fmt: skip
    assert own_forward_ns(record, 0, 54 * MS) == pytest.approx(12 * MS)
    assert own_forward_ns(record, 0, 5 * MS) == pytest.approx(1.2 * MS)
    assert share_of(record, 0, 1 * MS) == (1 * MS, 1_200_000, 3_800_000, 1 * MS)
    assert share_of(record, 1, 0) == (2 * MS, 5 * MS, 0, 1 * MS)
    unknown = record._replace(step_times=StepTimeModel())
    assert own_forward_ns(unknown, 0, 44 * MS) == 2 * MS


def test_a_model_that_takes_prompts_for_slow_blames_them_for_no_more_than_the_step_was_longer() -> None:
    """It has seen many steps of decoding and few prompts: 1 ms a step and 8 ms for each pair."""
    record = StepRecord(
        0, 0, 3 * MS, 0, array("q", [5, 6]), array("q", [9, 0]), array("q", [1, 14]), b"\1\1",
        0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, StepTimeModel(step_ns=2e6, prefill_pair_ns=8e6), 0,
    )  # fmt: skip
    assert share_of(record, 0, 0) == (0, 2 * MS, 1 * MS, 0)
