"""Why one request waited, from its arrival until it boarded: the scheduler's words, and when they changed."""

from __future__ import annotations

from collections.abc import Iterator

from everystop.core.events import AdmitEvent, WaitEvent
from everystop.observe.history import History, Trail
from everystop.observe.queue import Queue


def reasons(history: History, trail: Trail, until_ns: int) -> Iterator[tuple[int, WaitEvent | None]]:
    """Why a request waited, from its arrival to that time: (until when, the scheduler's reason).

    None is a step that was running when it came: nobody had been asked whether it could board.
    """
    arrival, request_id = trail.arrival, trail.request_id
    assert arrival is not None
    queue = Queue(trail.ahead)
    queue.observe(arrival)
    wait, at_ns = queue.reason_of(request_id), arrival.now_ns
    acts = history.acts_between_ns(arrival.now_ns, until_ns)
    first = next((i + 1 for i, act in enumerate(acts) if act is arrival), 0)
    for act in acts[first:]:
        if isinstance(act, AdmitEvent) and act.request_id == request_id:
            break
        ready_ns = _prompt_ready_ns(history, queue, request_id, at_ns, act.now_ns)
        if ready_ns is not None:
            yield ready_ns, wait
            wait = queue.reason_of(request_id)
        queue.observe(act)
        at_ns = act.now_ns
        if queue.reason_of(request_id) is not wait:
            yield at_ns, wait
            wait = queue.reason_of(request_id)
    ready_ns = _prompt_ready_ns(history, queue, request_id, at_ns, until_ns)
    if ready_ns is not None:
        yield ready_ns, wait
        wait = queue.reason_of(request_id)
    yield until_ns, wait


def _prompt_ready_ns(history: History, queue: Queue, request_id: int, after_ns: int, until_ns: int) -> int | None:
    """When a sibling's prompt was computed for which the request waits, between the two times; tells the queue so."""
    if request_id not in queue.parked:
        return None
    for record in history.steps_between_ns(after_ns, until_ns):
        queue.land(record.request_ids, record.starts, record.nums)
        if request_id not in queue.parked:
            return record.now_ns
    return None
