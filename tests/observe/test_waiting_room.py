"""Who waits and why, against the scheduler's own account in fuzzed schedules, and in cases written out."""

from __future__ import annotations

import pytest
from tests.core.fuzz import ROTATION, Episode
from tests.core.harness import Harness, make_request, make_scheduler
from tests.observe.turns import after_each_turn

from everystop.core.events import AdmitEvent, ArrivalEvent, Event, FinishEvent, PreemptEvent, WaitEvent, WaitReason
from everystop.core.request import RequestState
from everystop.core.scheduler import Scheduler
from everystop.observe.waiting_room import WaitingRoom, why_it_waits


def take(room: WaitingRoom, events: list[Event]) -> None:
    for event in events:
        match event:
            case ArrivalEvent():
                room.arrive(event.request_id, event.now_ns)
            case PreemptEvent():
                room.come_back(event.request_id, event.now_ns)
                room.unpark(event.request_id)
            case AdmitEvent():
                room.leave(event.request_id)
            case FinishEvent():
                room.leave(event.request_id)
                room.unpark(event.request_id)
            case WaitEvent():
                room.note(event)


def check(room: WaitingRoom, scheduler: Scheduler) -> None:
    waiting = {r.request_id for r in scheduler.requests.values() if r.state is not RequestState.RUNNING}
    waiters = room.first(10**6)
    assert {waiter.request_id for waiter in waiters} == waiting
    assert len(waiters) == len(room) == len(waiting)
    assert room.first(2) == waiters[:2]
    assert room.oldest_ns == min((waiter.since_ns for waiter in waiters), default=None)
    for waiter in waiters:
        assert room.of(waiter.request_id) == waiter
        assert why_it_waits(waiter, 4, str)
        if scheduler.requests[waiter.request_id].state is RequestState.FORKING:
            assert waiter.reason is WaitReason.FORK
            assert waiter.behind in scheduler.running


@pytest.mark.parametrize("depth", [0, 1])
def test_the_room_holds_those_who_wait_after_every_turn_of_fuzzed_schedules(depth: int) -> None:
    for index, policy in enumerate(ROTATION):
        room, num_told = WaitingRoom(), 0

        def look(harness: Harness, room: WaitingRoom = room) -> None:
            nonlocal num_told
            take(room, harness.events[num_told:])
            num_told = len(harness.events)
            check(room, harness.scheduler)

        episode = Episode(f"room:{index}:{depth}", policy, depth, abort_rate=0.1)
        after_each_turn(episode.harness, look)
        episode.run(50)
        assert len(room) == 0


def test_the_next_one_has_its_reason_and_the_others_are_behind_it() -> None:
    harness = Harness(make_scheduler(max_num_seqs=1))
    for request_id in range(3):
        harness.add(make_request(request_id, 8, max_tokens=5))
    harness.turn()
    room = WaitingRoom()
    take(room, harness.events)
    assert [(w.request_id, w.reason, w.behind) for w in room.first(9)] == [
        (1, WaitReason.NO_SLOT, -1),
        (2, WaitReason.BEHIND, 1),
    ]
    assert why_it_waits(room.first(1)[0], 1, str) == "the slot is taken"
    assert why_it_waits(room.first(2)[1], 1, lambda i: f"r{i}") == "behind r1"


def test_a_static_batch_is_everybodys_reason() -> None:
    harness = Harness(make_scheduler(policy="static", max_num_seqs=2))
    for request_id in range(4):
        harness.add(make_request(request_id, 8, max_tokens=2 + 5 * request_id))
    for _ in range(4):
        harness.turn()
    room = WaitingRoom()
    take(room, harness.events)
    assert {(w.request_id, w.reason) for w in room.first(9)} == {
        (2, WaitReason.BATCH_BARRIER),
        (3, WaitReason.BATCH_BARRIER),
    }


def test_one_that_has_just_come_is_told_so() -> None:
    room = WaitingRoom()
    room.arrive(7, 100)
    assert why_it_waits(room.first(1)[0], 4, str) == "the next step has not been planned yet"


def test_missing_blocks_are_counted() -> None:
    room = WaitingRoom()
    room.arrive(7, 100)
    room.note(WaitEvent(120, 7, WaitReason.NO_BLOCKS, 5, 2, -1))
    assert why_it_waits(room.first(1)[0], 4, str) == "needs 3 more KV blocks (5 wanted, 2 free)"
    room.note(WaitEvent(130, 7, WaitReason.NO_BLOCKS, 3, 2, -1))
    assert why_it_waits(room.first(1)[0], 4, str) == "needs 1 more KV block (3 wanted, 2 free)"
