"""Explanations of fuzzed schedules: sums are exact at every look, and causes are what a slow oracle says."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from tests.core.fuzz import ABORT_RATES
from tests.observe.schedules import Oracle, Watched

from everystop.core.policy import POLICIES
from everystop.observe.causes import Cause
from everystop.observe.explain import Explanation, explain
from everystop.observe.wording import number_name

NUM_EPISODES = 23  # a policy, and there are nine
STEPS = 25
KINDS = {Cause.PREEMPTED: "preempted", Cause.SKIPPED: "skipped"}


def look(episode: Watched, request_id: int) -> Explanation:
    """The explanation of a request now."""
    return explain(episode.history, [request_id], now_ns=episode.harness.now_ns, name_of=number_name)


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
    for _ in range(STEPS):
        episode.turn()
        known = [i for i, trail in episode.history.trails.items() if trail.since_ns]
        if known:
            explanation = look(episode, episode.clock.choice(known))
            check_sums(explanation)
            seen |= {explanation.state, *explanation.ns_by_cause}
    episode.drain()
    oracle = Oracle(episode.harness.events)
    for request_id, trail in episode.history.trails.items():
        explanation = look(episode, request_id)
        seen |= {explanation.state, *explanation.ns_by_cause}
        check_sums(explanation)
        if trail.refusal is None:
            assert len(explanation.tokens) == len(episode.harness.received[request_id])
            check_tokens(oracle, explanation, request_id)
            check_causes(oracle, explanation, request_id)
            check_reasons(episode, explanation, request_id)
