"""Copies of a history what one explanation looks at, so that it can be worked out on another thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from everystop.core.durations import NS_PER_S
from everystop.observe.history import History, Trail
from everystop.observe.queue import Queue

FAR_NS = NS_PER_S << 32


def excerpt_of(history: History, trails: Iterable[Trail]) -> History:
    """A history of these sequences alone, in which nothing happens any more: `explain` says of it what it would say of
    the whole, on any thread. Events are shared, which never change; lists and trails are copied.

    It costs a copy of one pointer for each step of the lives, and nothing else that grows with them.
    """
    own = [_copied(trail) for trail in trails]
    on_board = {i: trail for i in history.queue.on_board if (trail := history.trails.get(i)) is not None}
    since_ns = min(_since_ns(trail, on_board.values()) for trail in own)
    until_ns = max(_until_ns(trail) for trail in own)
    copy = History()
    copy.steps = history.steps.excerpt(history.position_at(since_ns) - 2, history.position_at(until_ns + 1) + 2)
    copy.acts = history.acts.excerpt(history.act_position(since_ns) - 1, history.act_position(until_ns + 1))
    copy.trails = on_board | {trail.request_id: trail for trail in own}
    copy.queue = Queue()
    copy.queue.on_board = dict(history.queue.on_board)
    copy.last_ns = history.last_ns
    return copy


def _copied(trail: Trail) -> Trail:
    client = None if trail.client is None else replace(trail.client)
    return replace(trail, admits=[*trail.admits], preemptions=[*trail.preemptions], client=client)


def _since_ns(trail: Trail, on_board: Iterable[Trail]) -> int:
    """From when on steps may matter: while it has not boarded, those on board may be told of, and their outputs."""
    first_ns = FAR_NS if trail.arrival is None and trail.refusal is None else trail.since_ns
    if trail.client is not None:
        first_ns = min(first_ns, trail.client.submitted_ns)
    if trail.admits or trail.is_over:
        return first_ns
    return min([first_ns, *(other.since_ns for other in on_board)])


def _until_ns(trail: Trail) -> int:
    """Until when; a step that was running when it ended comes back later."""
    end = trail.finish or trail.refusal
    return FAR_NS if end is None else end.now_ns
