"""The tokens of a request in time, and why some came late."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from everystop.observe.causes import Cause
from everystop.observe.culprits import num_steps_missed, prefill_in_steps
from everystop.observe.history import History
from everystop.observe.life import Life
from everystop.observe.wording import NameOf, counted, whose
from everystop.words import duration

OUTLIER = 2  # times the median gap


class Token(NamedTuple):
    """When a token came out, from the beginning of the life; `gap_ns` is the time since the one before, None for the
    first; an outlier's gap is more than twice the request's median gap.
    """

    at_ns: int
    gap_ns: int | None
    step_id: int
    is_outlier: bool
    why: str | None


def tokens_of(history: History, life: Life, name_of: NameOf) -> list[Token]:
    """All tokens, in order; those of one step have gaps of 0."""
    times = [(one.record.now_ns, one.record.step_id) for one in life.served for _ in range(one.num_outputs)]
    gaps = [now_ns - before_ns for (before_ns, _), (now_ns, _) in pairwise(times)]
    usual_ns = median(gaps) if gaps else 0
    tokens: list[Token] = []
    for i, (now_ns, step_id) in enumerate(times):
        gap_ns = gaps[i - 1] if i else None
        is_outlier = gap_ns is not None and gap_ns > OUTLIER * usual_ns
        why = _why(history, life, now_ns - (gap_ns or 0), now_ns, usual_ns, name_of) if is_outlier else None
        tokens.append(Token(now_ns - life.origin_ns, gap_ns, step_id, is_outlier, why))
    return tokens


def _why(history: History, life: Life, after_ns: int, until_ns: int, usual_ns: float, name_of: NameOf) -> str:
    """The one thing that explains at least half of what a gap was longer than usual; else, that the step was slow."""
    sums = life.ns_by_cause(after_ns, until_ns)
    sums.pop(Cause.DECODE, None)
    sums.pop(Cause.PREFILL, None)
    cause = max(sums, key=lambda each: sums[each], default=None)
    first = bisect_right(life.served, after_ns, key=lambda one: one.record.now_ns)
    last = bisect_right(life.served, until_ns, key=lambda one: one.record.now_ns)
    served = life.served[first:last]
    if cause is None or 2 * sums[cause] < until_ns - after_ns - usual_ns:
        record = served[-1].record
        return f"step {record.step_id} was slow: {duration(record.execute_ns)} for {counted(record.num_rows, 'row')}"
    took = duration(sums[cause])
    if cause is Cause.OTHERS_PREFILL and (found := prefill_in_steps(served)) is not None:
        culprit, step_id = found
        whose_prompt = f"{whose(culprit.request_id, name_of)} prompt"
        return (
            f"prefill of {counted(culprit.num_tokens, 'token')} of {whose_prompt} in step {step_id} ({took}, modelled)"
        )
    if cause is Cause.PREEMPTED:
        return f"preempted, until it had caught up ({took})"
    if cause is Cause.SKIPPED:
        missed = num_steps_missed(history, life.between(after_ns, until_ns))
        return f"left out of {counted(missed, 'step')} ({took})"
    if cause is Cause.HOST:
        return f"{took} between steps"
    return f"{took} of {cause.label}"
