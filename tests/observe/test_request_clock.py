"""The times of one request, read off the history: at every step, at the end, and when the history has forgotten it."""

from __future__ import annotations

from tests.observe.runs import Run

from everystop.observe.history import Client, History
from everystop.observe.request_clock import RequestClock, RequestTimes


def followed(run: Run, request_id: int) -> RequestClock:
    """The clock of a request that is to come."""
    client = Client(f"cmpl-{request_id}", "", request_id, 1, run.now_ns, run.now_ns)
    run.history.add_client(client)
    return RequestClock(run.history, client)


def token_times(run: Run, request_id: int) -> list[int]:
    """When each of its tokens came out, from all steps."""
    return [
        record.now_ns
        for record in run.history.steps.since(0)
        if (row := record.row_of(request_id)) >= 0
        for _ in range(record.num_outputs[row])
    ]


def test_times_are_those_of_events_and_steps_whenever_they_are_read() -> None:
    run = Run(max_num_seqs=2, max_num_batched_tokens=16)
    run.add(0, prompt=40, max_tokens=12)
    run.add(1, prompt=40, max_tokens=12)
    run.turn()
    clock = followed(run, 2)
    run.add(2, prompt=40, max_tokens=5)
    assert clock.read() == RequestTimes(run.now_ns, run.now_ns)
    num_readings = 0
    while run.scheduler.has_work:
        run.turn()
        times = clock.read()
        assert times is not None
        tokens = token_times(run, 2)
        assert times.num_output_tokens == len(tokens)
        assert times.first_token_ns == (tokens[0] if tokens else None)
        assert times.last_token_ns == (tokens[-1] if tokens else None)
        num_readings += 1
    assert num_readings > 10
    late = RequestClock(run.history, run.history.clients["cmpl-2"]).read()
    assert late == clock.read()
    trail = run.history.trails[2]
    assert late is not None
    assert (late.boarded_ns, late.num_prompt_tokens, late.num_output_tokens) == (trail.admits[0].now_ns, 40, 5)
    assert late.first_token_ns is not None
    assert late.first_token_ns - late.received_ns == run.explain(2).ttft_ns


def test_cached_tokens_are_those_of_the_usage_also_where_they_were_found_after_boarding() -> None:
    """Two prompts that begin alike are computed in turns, and each skips what the other has computed."""
    run = Run(max_num_seqs=2, max_num_batched_tokens=32)
    clock = followed(run, 0)
    run.add(0, prompt=128, max_tokens=2)
    run.add(1, prompt=128, max_tokens=2, topic=0)
    run.finish()
    trail, times = run.history.trails[0], clock.read()
    assert trail.finish is not None
    assert times is not None
    assert times.num_cached_tokens == trail.finish.num_cached_tokens > trail.admits[0].num_cached_tokens


def test_a_forgotten_request_keeps_its_times() -> None:
    run = Run(history=History(num_finished=0))
    clock = followed(run, 0)
    run.add(0, max_tokens=3)
    run.finish()
    assert 0 not in run.history.trails
    times = clock.read()
    assert times is not None
    assert times.num_output_tokens == 3
    assert times.first_token_ns is not None
    assert times.last_token_ns is not None
    assert times.last_token_ns > times.first_token_ns


def test_a_request_whose_first_steps_are_forgotten_has_no_first_token() -> None:
    run = Run()
    clock = followed(run, 0)
    run.add(0, max_tokens=10)
    for _ in range(5):
        run.turn()
    run.history.steps.forget_before(run.history.steps.end - 1)
    times = clock.read()
    assert times is not None
    assert times.first_token_ns is None
    run.finish()
    times = clock.read()
    assert times is not None
    assert times.first_token_ns is None
    assert times.num_output_tokens == 10


def test_a_history_that_knows_nothing_tells_nothing() -> None:
    assert RequestClock(History(), Client("cmpl-0", "", 0, 1, 0, 0)).read() is None
