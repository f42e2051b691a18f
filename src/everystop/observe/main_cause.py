"""The main cause of the time of a request that is over, without cutting its whole life where that is plain to see.

Times spread evenly over its stay on board are looked at, and at each what the step did that was running. Each stands
for an equal part of the stay, so the shares are right in the mean. Where the largest does not lead clearly, or the
request lost its place in between, the whole life is cut, as for an explanation.
"""

from __future__ import annotations

from everystop.observe.causes import Cause
from everystop.observe.history import History, Trail
from everystop.observe.life import Life, life_of
from everystop.observe.reasons import reasons
from everystop.observe.step_share import share_of

NUM_LOOKS = 24
CLEAR_LEAD = 0.25  # of the whole time: more than two standard deviations of a share that so many looks give
WORTH_NUM_TOKENS = 3 * NUM_LOOKS  # of output: below, cutting the life costs no more


def main_cause(history: History, trail: Trail, now_ns: int) -> Cause | None:
    """The cause of the largest part of its time; None if none has passed."""
    found = _glimpse(history, trail)
    if found is not None:
        return found
    return largest_cause(life_of(history, trail, now_ns))


def largest_cause(life: Life) -> Cause | None:
    """The cause of the largest part of a life that has been cut; None if no time has passed."""
    causes = life.ns_by_cause()
    return max(causes, key=causes.__getitem__) if causes else None


def _glimpse(history: History, trail: Trail) -> Cause | None:
    """The main cause if it leads clearly, else None."""
    finish, arrival, client = trail.finish, trail.arrival, trail.client
    if finish is None or arrival is None or len(trail.admits) != 1 or finish.num_output_tokens < WORTH_NUM_TOKENS:
        return None
    begin_ns, end_ns = trail.admits[0].now_ns, finish.now_ns
    if begin_ns < history.acts_known_ns or history.step_position(trail.admits[0].step_id) <= history.steps.start:
        return None  # a part is forgotten
    origin_ns = arrival.now_ns if client is None else client.received_ns
    over_ns = end_ns if client is None or client.delivered_ns is None else client.delivered_ns
    sums = {
        Cause.RECEIVE: 0.0 if client is None else client.submitted_ns - origin_ns,
        Cause.STEP_RUNNING: begin_ns - (origin_ns if client is None else client.submitted_ns),
        Cause.DELIVERY: over_ns - end_ns,
    }
    for i in range(NUM_LOOKS):
        at_ns = begin_ns + (2 * i + 1) * (end_ns - begin_ns) // (2 * NUM_LOOKS)
        for cause, share in _doing(history, trail, at_ns).items():
            sums[cause] = sums.get(cause, 0.0) + share * (end_ns - begin_ns) / NUM_LOOKS
    largest, second = sorted(sums, key=sums.__getitem__)[:-3:-1]
    if sums[largest] - sums[second] < CLEAR_LEAD * (over_ns - origin_ns):
        return None
    return _reason(history, trail) if largest is Cause.STEP_RUNNING else largest


def _doing(history: History, trail: Trail, at_ns: int) -> dict[Cause, float]:
    """What the step that was running then did for the request, by share of its time."""
    position = history.position_at(at_ns)
    if position >= history.steps.end:
        return {Cause.HOST: 1.0}
    record, before = history.steps[position], history.steps[position - 1]
    begin_ns = max(record.scheduled_ns, before.now_ns)
    row = record.row_of(trail.request_id)
    if row < 0:
        return {Cause.SKIPPED: 1.0}
    if at_ns < begin_ns or record.now_ns == begin_ns:
        return {Cause.HOST: 1.0}
    assert trail.arrival is not None
    share, whole_ns = share_of(record, row, begin_ns), record.now_ns - begin_ns
    is_prefill = record.starts[row] < trail.arrival.num_prompt_tokens
    return {
        Cause.HOST: share.host_ns / whole_ns,
        Cause.PREFILL if is_prefill else Cause.DECODE: share.own_ns / whole_ns,
        Cause.OTHERS_PREFILL: share.others_ns / whole_ns,
        Cause.SAMPLING: share.sample_ns / whole_ns,
    }


def _reason(history: History, trail: Trail) -> Cause | None:
    """What it mainly waited for in the queue, if one reason leads clearly."""
    assert trail.arrival is not None
    sums: dict[Cause, int] = {}
    at_ns = trail.arrival.now_ns
    for until_ns, wait in reasons(history, trail, trail.admits[0].now_ns):
        cause = Cause.STEP_RUNNING if wait is None else Cause.of_wait(wait.reason)
        sums[cause] = sums.get(cause, 0) + until_ns - at_ns
        at_ns = until_ns
    largest, *others = sorted(sums, key=sums.__getitem__)[::-1]
    is_clear = not others or sums[largest] > 2 * sums[others[0]]
    return largest if is_clear else None
