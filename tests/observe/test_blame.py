"""Blame is worked out for the slowest, and only as long as it costs next to nothing."""

from __future__ import annotations

from itertools import count

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.observe.blame import MAX_PENDING, PATIENCE_NS, Blame
from everystop.observe.history import Client, History, Trail
from everystop.observe.live_request import LiveRequest
from everystop.observe.thread_share import ThreadShare, free

NS_PER_MS = 1_000_000


def finished(num: int, history: History) -> list[LiveRequest]:
    """That many requests, one after the other in one slot, so each is slower than the one before."""
    harness = Harness(make_scheduler(max_num_seqs=1))
    for request_id in range(num):
        harness.add(make_request(request_id, 4, max_tokens=3))
    harness.run()
    history.receive(harness.events)
    history.catch_up()
    requests = []
    for trail in history.trails.values():
        assert trail.finish is not None
        request = LiveRequest.of(trail)
        request.finish(trail.finish)
        requests.append(request)
    return requests


def test_with_time_enough_all_are_told() -> None:
    history = History()
    blame, requests = Blame(history, free()), finished(5, history)
    for request in requests:
        blame.note(request)
    assert blame.tick(history.last_ns) == requests[::-1]
    assert [request.blame for request in requests][1:] == ["queued: no free slot"] * 4
    assert blame.tick(history.last_ns) == []


def test_with_little_time_the_slowest_come_first_and_the_others_wait() -> None:
    history, clock = History(), count(0, 15 * NS_PER_MS)  # each takes 15 ms
    blame, requests = Blame(history, ThreadShare(0.003, 20 * NS_PER_MS, lambda: next(clock))), finished(5, history)
    for request in requests:
        blame.note(request)
    now_ns = history.last_ns
    assert blame.tick(now_ns) == [requests[4], requests[3]]
    assert blame.tick(now_ns + 100 * NS_PER_MS) == []
    assert blame.tick(now_ns + 5_100 * NS_PER_MS) == [requests[2]]


def test_of_too_many_the_first_to_end_are_dropped_however_slow() -> None:
    history = History()
    blame, requests = Blame(history, free()), finished(MAX_PENDING + 3, history)
    for request in requests[::-1]:
        blame.note(request)
    assert blame.tick(history.last_ns) == requests[-4::-1]
    assert [request.blame for request in requests[-3:]] == [None] * 3


def test_the_end_of_the_answer_is_waited_for_but_not_for_ever() -> None:
    history = History()
    history.add_client(Client("cmpl-0", "", 0, 1, 0, 0))
    blame, [request] = Blame(history, free()), finished(1, history)
    blame.note(request)
    assert request.finish_ns is not None
    assert blame.tick(request.finish_ns) == []
    assert blame.tick(request.finish_ns + PATIENCE_NS + 1) == [request]


def test_one_that_is_forgotten_stays_without() -> None:
    history = History()
    blame, [request] = Blame(history, free()), finished(1, history)
    history.trails.clear()
    blame.note(request)
    assert blame.tick(history.last_ns) == []
    assert request.blame is None


@pytest.mark.parametrize(
    ("admit_ns", "first_token_ns", "finish_ns", "guess"),
    [
        (60, 70, 90, "≈ queued"),
        (20, 70, 90, "≈ prefill"),
        (20, 30, 90, "≈ decode"),
        (None, None, 90, "≈ queued"),
        (20, None, 90, "≈ prefill"),
        (20, 30, None, None),
        (None, None, 0, None),
    ],
)
def test_what_took_longest_is_guessed_by_the_times_of_one_that_is_over(
    admit_ns: int | None, first_token_ns: int | None, finish_ns: int | None, guess: str | None
) -> None:
    request = LiveRequest(Trail(1), admit_ns=admit_ns, first_token_ns=first_token_ns, finish_ns=finish_ns)
    assert request.received_ns == 0
    assert request.guessed_blame == guess
