"""Where a waiting request stands: its place, why it waits, and for about how long."""

from __future__ import annotations

from typing import NamedTuple

from everystop.core.durations import NS_PER_S
from everystop.core.events import WaitEvent, WaitReason
from everystop.observe.history import History
from everystop.observe.wording import NameOf, counted, who
from everystop.words import duration

STEP_RUNNING = "step_running"
"""The reason of one that came while a step was running: nobody has been asked about it yet."""


class WaitingState(NamedTuple):
    """`position` is the place among all that wait, from 1, in the order in which they would board if nothing happened
    but places coming free; in order of arrival where the scheduler has not been asked for that.

    `reason` is a `WaitReason`'s word or `step_running`; `estimated_ns` is a guess, None where nothing is known.
    """

    position: int
    num_waiting: int
    reason: str
    sentence: str
    estimated_ns: int | None


def waiting_state(
    history: History, request_id: int, now_ns: int, name_of: NameOf = lambda request_id: None
) -> WaitingState | None:
    """How a request waits now, or None if it does not: it is on board, over, or not known.

    The estimate takes it that those before it board first, as quickly as others did in the last 60 s. One that has been
    submitted and not yet taken by the engine, which is at a step, stands behind all that have.
    """
    trail, queue = history.trails.get(request_id), history.queue
    if trail is None or trail.is_over or (trail.arrival is not None and not trail.is_waiting):
        return None
    wait = queue.reason_of(request_id)
    num_before, num_untaken = _untaken(history, request_id)
    position = queue.position_of(request_id) + (num_before if trail.arrival is None else 0)
    num_waiting = len(queue.ids) + num_untaken
    rate = queue.boardings_per_s(now_ns)
    estimated_ns = None if rate is None else round(position / rate * NS_PER_S)
    reason = STEP_RUNNING if wait is None else wait.reason.value
    text = f"position {position:,} of {num_waiting:,}: {because(wait, request_id, name_of)}"
    if estimated_ns is not None:
        text += f"; about {duration(estimated_ns)}, at the rate of the last minute"
    return WaitingState(position, num_waiting, reason, text, estimated_ns)


def _untaken(history: History, request_id: int) -> tuple[int, int]:
    """How many have been submitted and not yet taken by the engine: before this one, and in all. They are the last to
    have come, since the engine takes them in order.
    """
    num_before = num = 0
    for other_id, trail in reversed(history.trails.items()):
        if trail.arrival is not None or trail.is_over:
            break
        num += 1
        num_before += other_id < request_id
    return num_before, num


def because(wait: WaitEvent | None, request_id: int, name_of: NameOf) -> str:
    """The reason in plain words, and whose it is where it is not the request's own; how much another request needs is
    told only to those who may know its name.
    """
    if wait is None:
        return "a step is running"
    text = reason_text(wait, name_of)
    if wait.request_id not in (-1, request_id):
        if wait.reason is WaitReason.NO_BLOCKS and name_of(wait.request_id) is None:
            text = "too few KV blocks are free"
        return f"behind {who(wait.request_id, name_of)}, for which {text}"
    return text


def reason_text(wait: WaitEvent, name_of: NameOf) -> str:
    """What a reason means for the one whose it is."""
    if wait.reason is WaitReason.NO_BLOCKS:
        return f"{counted(wait.need, 'KV block')} {'is' if wait.need == 1 else 'are'} needed and {wait.have:,} free"
    if wait.reason is WaitReason.FORK:
        return f"{who(wait.behind, name_of)} computes the prompt that both have"
    return TEXTS[wait.reason]


TEXTS = {
    WaitReason.NO_SLOT: "no slot is free",
    WaitReason.TOKEN_BUDGET: "the step has no tokens left",
    WaitReason.BATCH_BARRIER: "the batch on board has not ended",
    WaitReason.BATCH_FILL: "a batch is filling",
    WaitReason.AFTER_PREEMPT: "somebody has just lost a place",
    WaitReason.TENANT_LIMIT: "the tenant is at one of its limits",
    WaitReason.OVER_SHARE: "the tenant has had more than its share",
    WaitReason.LATE: "it is late already, and others can still be on time",
    WaitReason.BEHIND: "others are ahead",
}
