"""A comparison: it can be written and read back, and says which outputs differ."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.observe.comparison import Comparison, Equality, RequestLine, Run, from_json, to_json
from everystop.observe.history import History
from everystop.observe.history_data import pack, unpack


def line(index: int, **fields: Any) -> RequestLine:
    values: dict[str, Any] = {
        "index": index,
        "group": "all",
        "num_prompt_tokens": 4,
        "num_output_tokens": 3,
        "scheduled_s": None,
        "sent_s": 0.5,
        "token_s": (1.0, 1.25, 2.0),
        "end_s": 2.0,
        "error": None,
        "digest": f"d{index}",
        "request_id": index,
    }
    return RequestLine(**values | fields)


def run(policy: str, repeat: int = 0, *lines: RequestLine, history: History | None = None, seconds: float = 3.0) -> Run:
    return Run(
        policy=policy,
        repeat=repeat,
        duration_s=seconds,
        requests=lines or (line(0), line(1)),
        start_ns=0,
        max_num_seqs=4,
        history=history,
    )


def compare(*runs: Run, asked: int = 1) -> Comparison:
    policies = tuple(dict.fromkeys(each.policy for each in runs))
    return Comparison(workload="w", policies=policies, runs=runs, settings={"seed": 7}, num_repeats_asked=asked)


def real_history() -> History:
    """A run with preemptions, waits and prefix hits."""
    harness = Harness(make_scheduler(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=32))
    for i in range(8):
        harness.add(make_request(i, [1, 2, 3, 4, i], max_tokens=12))
    harness.run()
    history = History()
    history.receive(harness.events)
    history.catch_up()
    return history


def test_columns_can_be_packed_and_unpacked() -> None:
    for values in ([], [0], [5, 4, -7, 2**60, 2**60 + 1]):
        assert unpack(pack(values)) == values


def test_a_comparison_can_be_read_back_with_its_histories() -> None:
    history = real_history()
    assert history.steps.end > 10
    assert any(trail.preemptions for trail in history.trails.values())
    written = compare(run("static", 0, history=history), run("continuous", history=None))
    data = json.loads(json.dumps(to_json(written)))
    read = from_json(data)
    assert replace(read, runs=()) == replace(written, runs=())
    assert [replace(each, history=None) for each in read.runs] == [replace(each, history=None) for each in written.runs]
    again = read.runs[0].history
    assert again is not None
    assert read.runs[1].history is None
    steps = [record._replace(step_times=history.step_times) for record in history.steps.since(0)]
    assert again.steps.since(0) == steps
    assert again.acts.since(0) == history.acts.since(0)
    assert again.trails == history.trails
    assert again.last_ns == history.last_ns
    assert again.step_times == history.step_times
    assert json.loads(json.dumps(to_json(read))) == data


def test_another_version_is_refused() -> None:
    data = to_json(compare(run("static")))
    with pytest.raises(ValueError, match="version 9"):
        from_json(data | {"version": 9})


def test_outputs_are_compared_over_all_policies_and_repeats() -> None:
    one = (line(0), line(1), line(2))
    other = (line(0), line(1, digest="x"), line(2, error="refused"))
    assert compare(run("a", 0, *one), run("b", 0, *one)).equality() == Equality(
        num_equal=3, different=(), num_uncompared=0
    )
    seen = compare(run("a", 0, *one), run("b", 0, *one), run("a", 1, *other), run("b", 1, *one)).equality()
    assert seen == Equality(num_equal=1, different=(1,), num_uncompared=1)
    assert not seen.holds
    assert compare(run("a", 0, *one)).equality() == Equality(num_equal=0, different=(), num_uncompared=3)


def test_only_repeats_that_have_both_policies_are_pairs() -> None:
    interrupted = compare(run("a", 0), run("b", 0), run("a", 1), asked=2)
    assert [(x.repeat, y.repeat) for x, y in interrupted.pairs("a", "b")] == [(0, 0)]
    assert not interrupted.is_complete
    assert compare(run("a", 0), run("b", 0)).is_complete


def test_durations_of_a_request_are_those_of_vllm() -> None:
    request = line(0)
    assert (request.ttft_s, request.e2e_s, request.decode_s, request.tpot_s) == (0.5, 1.5, 1.0, 0.5)
    assert request.itl_s == [0.25, 0.75]
    silent = line(0, token_s=(), num_output_tokens=0, error="refused")
    assert (silent.ttft_s, silent.decode_s, silent.tpot_s, silent.itl_s) == (None, None, None, [])
