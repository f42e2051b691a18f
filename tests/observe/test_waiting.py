"""Where waiting requests stand, by the scheduler's own books."""

from __future__ import annotations

import pytest
from tests.core.fuzz import ABORT_RATES
from tests.core.harness import Harness, make_request, make_scheduler
from tests.observe.schedules import Watched

from everystop.core.policy import POLICIES
from everystop.core.request import RequestState
from everystop.observe.history import Client, History
from everystop.observe.waiting import waiting_state

NS_PER_S = 1_000_000_000


@pytest.mark.parametrize("policy", POLICIES)
def test_all_that_wait_and_nobody_else_has_a_place_in_order_of_arrival(policy: str) -> None:
    num_seen = 0
    for number in range(4):
        episode = Watched(f"waiting:{number}", policy, number % 2, ABORT_RATES[number % 3])
        for _ in range(30):
            episode.turn()
            scheduler = episode.harness.scheduler
            waiting = sorted(r.request_id for r in scheduler.requests.values() if r.state is not RequestState.RUNNING)
            now_ns = episode.harness.now_ns
            states = {i: waiting_state(episode.history, i, now_ns) for i in episode.history.trails}
            assert [i for i, state in sorted(states.items()) if state is not None] == waiting
            for place, request_id in enumerate(waiting, start=1):
                state = states[request_id]
                assert state is not None
                assert (state.position, state.num_waiting) == (place, len(waiting))
                is_forking = scheduler.requests[request_id].state is RequestState.FORKING
                assert (state.reason == "fork") == is_forking or number % 2
                num_seen += 1
    assert num_seen > 100


def test_a_waiting_request_is_told_why_and_how_long_in_words() -> None:
    history, harness = History(), Harness(make_scheduler(max_num_seqs=1))
    history.add_client(Client("cmpl-9", "", 9, 1, 0, 0))
    assert waiting_state(history, 0, 0) is None
    early = waiting_state(history, 9, 0)
    assert early is not None
    assert (early.reason, early.estimated_ns) == ("step_running", None)
    for i in range(4):
        harness.add(make_request(i, 8, max_tokens=10))
    harness.turn()
    history.receive(harness.events)
    history.catch_up()
    assert waiting_state(history, 0, harness.now_ns) is None
    state = waiting_state(history, 2, 2 * NS_PER_S, lambda i: f"r{i}")
    assert state is not None
    assert state == (2, 3, "no_slot", state.sentence, 4 * NS_PER_S)
    assert state.sentence == (
        "position 2 of 3: behind r1, for which no slot is free; about 4.0 s, at the rate of the last minute"
    )
    hidden = waiting_state(history, 2, 2 * NS_PER_S)
    assert hidden is not None
    assert "behind another request" in hidden.sentence
    late = waiting_state(history, 2, 100 * NS_PER_S)
    assert late is not None
    assert late.estimated_ns is None


def test_those_whom_the_engine_has_not_taken_yet_stand_behind_all_others_in_order() -> None:
    history, harness = History(), Harness(make_scheduler(max_num_seqs=1))
    for i in range(6):
        history.add_client(Client(f"cmpl-{i}", "", i, 1, 0, 0))
    for i in range(3):
        harness.add(make_request(i, 8, max_tokens=10))
    harness.turn()
    history.receive(harness.events)
    history.catch_up()
    states = [waiting_state(history, i, harness.now_ns) for i in range(6)]
    places = [None if state is None else (state.position, state.num_waiting) for state in states]
    assert places == [None, (1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
