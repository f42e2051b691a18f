"""Finds who or what was behind a stretch of a request's life: who held its slot, whose prompt filled its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from everystop.core.events import AdmitEvent, FinishEvent, WaitEvent
from everystop.observe.causes import Cause
from everystop.observe.history import History, StepRecord
from everystop.observe.life import Life, Piece, Served


class Culprit(NamedTuple):
    """A request and its number of tokens: of output for one that held a slot, computed for one whose prompt it was."""

    request_id: int
    num_tokens: int


def longest(pieces: Iterable[Piece], cause: Cause) -> Piece:
    """The longest piece of that cause; there must be one."""
    return max((piece for piece in pieces if piece.cause is cause), key=lambda piece: piece.ns)


def num_slots_taken(history: History, pieces: Iterable[Piece]) -> int:
    """Most slots that were in use, or held, in or after a step in that time; 0 if no step ended then.

    Who ended with a step is not counted after it, but had a row in it.
    """
    counts = [
        max(record.num_running + record.num_held, record.num_rows)
        for piece in pieces
        for record in history.steps_between_ns(piece.start_ns - 1, piece.end_ns)
    ]
    return max(counts, default=0)


def slot_holder(history: History, life: Life) -> Culprit | None:
    """Who ended in the slot that the request got, if that is what it had waited for."""
    trail = life.trail
    if trail.arrival is None or not trail.admits:
        return None
    admit = trail.admits[0]
    for act in reversed(history.acts_between_ns(trail.arrival.now_ns, admit.now_ns)):
        if isinstance(act, FinishEvent) and act.slot == admit.slot:
            return Culprit(act.request_id, act.num_output_tokens)
    return None


def straggler(history: History, life: Life) -> Culprit | None:
    """For whom a batch was held while the request waited: of several batches, in the one that was held longest.

    Where it waits still, it is the running member that may get the longest output.
    """
    if not life.trail.admits and not life.trail.is_over:
        return _running_straggler(history)
    best, best_ns = None, -1
    for piece in life.pieces:
        if piece.cause is Cause.BATCH_BARRIER:
            for ended, held_ns in _batches(history, piece):
                if held_ns > best_ns:
                    best, best_ns = Culprit(ended.request_id, ended.num_output_tokens), held_ns
    return best


def _batches(history: History, piece: Piece) -> Iterator[tuple[FinishEvent, int]]:
    """The batches that others waited for in this time: who ended last, and for how long they were waited for.

    A batch begins where somebody boards after somebody has ended; what came last before that ended the one before.
    """
    began_ns, last = piece.start_ns, None
    for act in history.acts_between_ns(piece.start_ns, piece.end_ns):
        if isinstance(act, FinishEvent) and act.slot >= 0:
            last = act
        elif isinstance(act, AdmitEvent) and not act.resumed and last is not None:
            yield last, last.now_ns - began_ns
            began_ns, last = last.now_ns, None


def _running_straggler(history: History) -> Culprit | None:
    """Whoever on board may get the longest output, and how long it is so far."""
    on_board = history.queue.on_board
    arrivals = [trail.arrival for i in on_board if (trail := history.trails.get(i)) is not None]
    longest_yet = max((arrival for arrival in arrivals if arrival), key=lambda each: each.max_tokens, default=None)
    if longest_yet is None:
        return None
    request_id = longest_yet.request_id
    records = history.steps_between_ns(longest_yet.now_ns, history.last_ns)
    rows = ((record, record.row_of(request_id)) for record in records)
    return Culprit(request_id, sum(record.num_outputs[row] for record, row in rows if row >= 0))


def largest_prefill(rows_of: Iterable[tuple[StepRecord, int]]) -> tuple[Culprit, int] | None:
    """Of all rows of several tokens in these steps, but the request's own (by index, -1 for none), whose are the most
    together: who, and in which step the largest was.
    """
    sums: dict[int, int] = {}
    largest: dict[int, tuple[int, int]] = {}
    for record, own_row in rows_of:
        for i, (request_id, n) in enumerate(zip(record.request_ids, record.nums, strict=True)):
            if n > 1 and i != own_row:
                sums[request_id] = sums.get(request_id, 0) + n
                largest[request_id] = max(largest.get(request_id, (0, 0)), (n, record.step_id))
    if not sums:
        return None
    request_id = max(sums, key=lambda i: (sums[i], -i))
    return Culprit(request_id, sums[request_id]), largest[request_id][1]


def prefill_in_steps(served: Iterable[Served]) -> tuple[Culprit, int] | None:
    """Whose prompt took most of the request's own steps."""
    return largest_prefill((one.record, one.row) for one in served)


def prefill_while_queued(history: History, life: Life, cause: Cause) -> Culprit | None:
    """Whose prompt took the tokens of the steps while the request waited for that cause."""
    records = [
        (record, -1)
        for piece in life.pieces
        if piece.cause is cause
        for record in history.steps_between_ns(piece.start_ns, piece.end_ns)
    ]
    found = largest_prefill(records)
    return None if found is None else found[0]


def wait_of(life: Life, cause: Cause) -> WaitEvent | None:
    """The scheduler's words for the longest wait of that cause."""
    return longest(life.pieces, cause).wait


def num_steps_missed(history: History, pieces: Iterable[Piece]) -> int:
    """Steps that came back while the request was on board and left out."""
    return sum(
        len(history.steps_between_ns(piece.start_ns, piece.end_ns)) for piece in pieces if piece.cause is Cause.SKIPPED
    )
