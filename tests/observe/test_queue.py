"""The reasons of those who wait, where the scheduler names only what changes."""

from __future__ import annotations

from everystop.core.events import AdmitEvent, ArrivalEvent, LineEvent, PreemptEvent, WaitEvent, WaitReason
from everystop.observe.queue import Queue


def arrival(request_id: int) -> ArrivalEvent:
    return ArrivalEvent(0, request_id, request_id, 0, 8, 8, "", 0)


def wait(request_id: int, reason: WaitReason, behind: int = -1) -> WaitEvent:
    return WaitEvent(0, request_id, reason, 0, 0, behind)


def board(request_id: int) -> AdmitEvent:
    return AdmitEvent(0, 0, request_id, 0, 8, 0, False, -1)


def reasons(queue: Queue) -> dict[int, WaitReason | None]:
    """Why each waits."""
    told = {request_id: queue.reason_of(request_id) for request_id in queue.ids}
    return {request_id: None if event is None else event.reason for request_id, event in told.items()}


def test_who_has_come_since_waits_for_the_reason_of_the_one_who_is_next() -> None:
    queue = Queue()
    for event in (arrival(1), arrival(2), wait(-1, WaitReason.BEHIND, 1), wait(1, WaitReason.NO_BLOCKS), arrival(3)):
        queue.observe(event)
    assert reasons(queue) == dict.fromkeys((1, 2, 3), WaitReason.NO_BLOCKS)
    queue.observe(board(1))
    assert reasons(queue) == {2: None, 3: None}
    queue.observe(wait(-1, WaitReason.AFTER_PREEMPT))
    assert reasons(queue) == dict.fromkeys((2, 3), WaitReason.AFTER_PREEMPT)


def test_who_was_passed_over_for_somebody_is_not_when_that_one_is_next_again() -> None:
    queue = Queue()
    head = (wait(-1, WaitReason.BEHIND, 1), wait(1, WaitReason.NO_SLOT))
    for event in (arrival(1), arrival(2), head[0], wait(2, WaitReason.OVER_SHARE, 1), head[1]):
        queue.observe(event)
    assert reasons(queue) == {1: WaitReason.NO_SLOT, 2: WaitReason.OVER_SHARE}
    for event in (board(1), PreemptEvent(0, 1, 1, 0, 8), *head):
        queue.observe(event)
    assert reasons(queue) == dict.fromkeys((1, 2), WaitReason.NO_SLOT)


def test_choices_wait_for_a_prompt_until_it_is_computed_but_for_its_last_token() -> None:
    queue = Queue()
    for event in (arrival(1), arrival(2), board(1), wait(2, WaitReason.FORK, 1)):
        queue.observe(event)
    queue.land([1], [0], [6])
    assert reasons(queue) == {2: WaitReason.FORK}
    queue.land([1], [6], [1])
    assert reasons(queue) == {2: None}


def positions(queue: Queue) -> dict[int, int]:
    return {request_id: queue.position_of(request_id) for request_id in queue.in_order(99)}


def test_those_who_wait_stand_in_the_order_in_which_they_would_board() -> None:
    queue = Queue()
    for request_id in range(1, 6):
        queue.observe(arrival(request_id))
    assert positions(queue) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    queue.line_up(LineEvent(0, 0, (4, 2, 9, 5, 1, 3)))
    assert queue.in_order(99) == [4, 2, 5, 1, 3]
    assert positions(queue) == {4: 1, 2: 2, 5: 3, 1: 4, 3: 5}
    queue.observe(board(4))
    queue.observe(board(5))
    assert positions(queue) == {2: 1, 1: 2, 3: 3}
    queue.observe(arrival(6))
    queue.observe(PreemptEvent(0, 1, 4, 0, 8))
    assert queue.in_order(99) == [2, 1, 3, 4, 6]
    assert [queue.position_of(i) for i in (2, 1, 3)] == [1, 2, 3]
    assert min(queue.position_of(4), queue.position_of(6)) > 3
    assert queue.in_order(2) == [2, 1]
    queue.observe(wait(6, WaitReason.NO_BLOCKS))
    assert queue.in_order(3) == [6, 2, 1], "the scheduler has named it since"
