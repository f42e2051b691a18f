"""A minute of the soak, and that it sees what it is there to see."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.soak import Look, Result, faults_of, slope_per_minute, soak, warm_part
from benchmarks.soak_clients import ACTIONS
from benchmarks.soak_queries import canonical, put_together, queries

MIB = 1 << 20


def assert_well(result: Result) -> None:
    """No fault, and everything was done that is to be done."""
    assert not faults_of(result), "\n".join(faults_of(result))
    assert set(ACTIONS) <= set(result.counts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_minute_of_clients_of_all_kinds_without_a_model() -> None:
    assert_well(soak(minutes=1.0, is_parrot=True))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_minute_of_clients_of_all_kinds() -> None:
    assert_well(soak(minutes=1.0))


GOOD = Result(
    minutes=30.0,
    counts={"compared answers": 5_000},
    faults=[],
    num_preemptions=100,
    rss_mib=(300.0, 310.0, 311.0),
    rss_mib_per_minute=0.01,
    num_steps=(30_000, 80_000),
    num_threads=(9, 9),
    num_descriptors=(20, 20),
)


@pytest.mark.parametrize(
    "bad",
    [
        {"faults": ["whole, a query yields another"]},
        {"rss_mib_per_minute": 2.0},
        {"num_preemptions": 0},
        {"counts": {"compared answers": 3}},
    ],
)
def test_a_run_with_a_fault_is_none_to_rely_on(bad: dict[str, object]) -> None:
    assert not faults_of(GOOD)
    assert len(faults_of(replace(GOOD, **bad))) == 1  # type: ignore[arg-type]


def test_the_slope_is_that_of_the_memory() -> None:
    looks = [Look(float(i), (300 * MIB) + i * MIB // 60 + (i % 3) * 1000, 9, 20) for i in range(600)]
    assert slope_per_minute(looks) == pytest.approx(1.0, rel=0.01)
    assert slope_per_minute(looks[:1]) == 0.0


def test_memory_may_grow_while_the_server_keeps_more_steps() -> None:
    """25,000 steps of 1,200 bytes are 29 MiB."""
    grown = replace(GOOD, rss_mib_per_minute=1.4, num_steps=(5_000, 30_000))
    assert not faults_of(grown)
    assert len(faults_of(replace(grown, rss_mib_per_minute=1.6))) == 1
    assert len(faults_of(replace(grown, num_steps=(30_000, 60_000)))) == 1


def test_memory_is_watched_from_when_all_steps_are_kept() -> None:
    looks = [Look(float(i), 300 * MIB, 9, 20, num_steps=1_000 * i) for i in range(100)]
    assert warm_part(looks) == looks[30:]
    assert warm_part(looks[:20]) == looks[6:20]
    assert warm_part([replace(look, num_steps=600 * i) for i, look in enumerate(looks)])[0].num_steps == 30_000


def test_queries_are_the_same_each_time_and_of_all_kinds() -> None:
    made = queries(200, 3, max_prompt_words=40)
    assert made == queries(200, 3, max_prompt_words=40)
    assert made != queries(200, 4, max_prompt_words=40)
    for name in ("prompt", "messages", "seed", "stop", "logprobs", "ignore_eos", "frequency_penalty", "min_tokens"):
        assert 5 < sum(name in query.body for query in made) < 195, name
    assert all("seed" in query.body or query.body["temperature"] == 0 for query in made)


def test_a_stream_put_together_is_the_whole_answer() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    lists = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": None}
    whole = {"choices": [{"index": 0, "text": "ab", "finish_reason": "stop", "logprobs": lists}], "usage": usage}
    pieces = []
    for text, number in (("a", -1.0), ("b", -2.0)):
        logprobs = {"tokens": [text], "token_logprobs": [number], "top_logprobs": None}
        pieces.append({"index": 0, "text": text, "finish_reason": None, "logprobs": logprobs})
    end = {"index": 0, "text": "", "finish_reason": "stop", "logprobs": None}
    events = [{"choices": [piece]} for piece in (*pieces, end)] + [{"choices": [], "usage": usage}]
    assert put_together(iter(events)) == canonical(whole)
    with pytest.raises(ValueError, match="two reasons"):
        put_together(iter([{"choices": [end]}, {"choices": [end]}]))
    with pytest.raises(ValueError, match="an error within a stream"):
        put_together(iter([{"error": {"message": "x"}}]))
