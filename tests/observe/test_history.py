"""The history: what it remembers of a real schedule, and when it forgets."""

from __future__ import annotations

import weakref

from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.events import AdmitEvent, FinishEvent, StepEvent
from everystop.observe.history import Client, History
from everystop.observe.log import Log


def run(num_requests: int, history: History) -> Harness:
    """That many requests of 20 prompt tokens and 5 of output, four at a time, told to the history at every step."""
    harness = Harness(make_scheduler(max_num_seqs=4, max_num_batched_tokens=32))
    seen = 0
    for i in range(num_requests):
        harness.add(make_request(i, [i, *range(1, 20)], max_tokens=5))
        harness.turn()
        history.receive(harness.events[seen:])
        seen = len(harness.events)
        history.catch_up()
    harness.run()
    history.receive(harness.events[seen:])
    history.catch_up()
    return harness


def test_steps_and_trails_say_what_the_events_say() -> None:
    history = History()
    harness = run(6, history)
    steps = [event for event in harness.events if isinstance(event, StepEvent)]
    records = history.steps.since(0)
    assert [record.step_id for record in records] == [event.plan.step_id for event in steps]
    for record, event in zip(records, steps, strict=True):
        assert list(record.request_ids) == [row.request_id for row in event.plan.rows]
        assert list(record.starts) == [row.start for row in event.plan.rows]
        assert list(record.nums) == [row.num_tokens for row in event.plan.rows]
        assert list(record.num_outputs) == [len(tokens) for tokens in event.tokens]
    for request_id in range(6):
        trail = history.trails[request_id]
        ours = [event for event in harness.events if getattr(event, "request_id", None) == request_id]
        assert trail.admits == [event for event in ours if isinstance(event, AdmitEvent)]
        assert [trail.finish] == [event for event in ours if isinstance(event, FinishEvent)]
        assert trail.is_over
        assert not trail.is_waiting
    assert history.steps_since_ns(records[5].now_ns) == records[5:]


def test_the_oldest_finished_are_forgotten_with_their_clients() -> None:
    history = History(num_finished=3)
    for i in range(10):
        history.add_client(Client(f"cmpl-{i}", "", i, 1, 0, 0))
    run(10, history)
    assert sorted(history.trails) == [7, 8, 9]
    assert sorted(history.clients) == ["cmpl-7", "cmpl-8", "cmpl-9"]


def test_clients_are_found_by_the_names_that_they_gave_until_they_are_forgotten() -> None:
    history = History(num_finished=3)
    names = ["0", *("odd", "even") * 5]
    for i in range(10):
        history.add_client(Client(f"cmpl-{i}", "", i, 1, 0, 0, given_name=names[i]))
    assert [client.name for client in history.clients_called("0")] == ["cmpl-0", "cmpl-0"]
    run(10, history)
    assert [client.name for client in history.clients_called("odd")] == ["cmpl-9", "cmpl-7"]
    assert [client.name for client in history.clients_called("even")] == ["cmpl-8"]
    assert [client.name for client in history.clients_called("cmpl-8")] == ["cmpl-8"]
    for number in ("8", "r8"):
        assert [client.name for client in history.clients_called(number)] == ["cmpl-8"]
    assert not [*history.clients_called("rr8"), *history.clients_called("r"), *history.clients_called("r-8")]
    assert not [*history.clients_called("0"), *history.clients_called("cmpl-0"), *history.clients_called("1")]
    for i in range(10, 12):
        history.add_client(Client(f"cmpl-{i}", "", i, 1, 0, 0, given_name="even"))
    assert [client.name for client in history.clients_called("even")] == ["cmpl-11", "cmpl-10", "cmpl-8"]
    assert sum(map(len, history._given.values())) == len(history.clients), "what is forgotten takes no memory"


def test_memory_is_bounded_by_forgetting_requests_and_then_steps() -> None:
    history = History(max_bytes=20_000)
    run(200, history)
    assert history.num_bytes <= 20_000
    assert 0 < len(history.steps) < 20
    record = history.steps[history.steps.start]
    assert all(act.now_ns >= record.scheduled_ns for act in history.acts.since(0))


def test_what_a_log_forgets_is_freed_at_once() -> None:
    """And not when the list is cut: until then twice as much was kept as was remembered."""

    class Item:
        pass

    log: Log[Item] = Log()
    living: weakref.WeakSet[Item] = weakref.WeakSet()
    for i in range(1000):
        log.append(item := Item())
        living.add(item)
        del item
        log.forget_before(i - 99)
        assert len(living) == len(log) == min(i + 1, 100)


def test_a_log_keeps_its_positions_when_it_forgets() -> None:
    log: Log[int] = Log()
    for i in range(100):
        log.append(i * 10)
        log.forget_before(i - 7)
    assert (log.start, log.end, len(log)) == (92, 100, 8)
    assert log.since(0) == [i * 10 for i in range(92, 100)]
    assert log.between(95, 97) == [950, 960]
    assert log.position_of(945, lambda item: item) == 95
