"""Divides the time of one step among what a request in it waited for: hand-over, own row, others' prefill, sampling.

That others' prompts stretched a step cannot be measured, only modelled: by what the step would have taken without them.
"""

from __future__ import annotations

from typing import NamedTuple

from everystop.core.step_time import StepFeatures, num_pairs
from everystop.observe.history import StepRecord


class StepShare(NamedTuple):
    """Nanoseconds of one step, from its planning, or from the return of the one before, to its own return."""

    host_ns: int
    own_ns: int
    others_ns: int
    sample_ns: int


def share_of(record: StepRecord, row: int, begin_ns: int) -> StepShare:
    """The step as the request of that row lived through it, from `begin_ns` on; the parts sum to all of it exactly.

    Steps that overlap (the next one is planned while this one runs) count from the return of the one before. A runner
    that does not say how long a step executed has spent all the time with it.
    """
    whole_ns = record.now_ns - begin_ns
    execute_ns = min(record.execute_ns or whole_ns, whole_ns)
    sample_ns = min(record.sample_ns, execute_ns)
    forward_ns = execute_ns - sample_ns
    own_ns = forward_ns
    if has_others_prefill(record, row):
        own_ns = min(forward_ns, own_forward_ns(record, row, forward_ns))
    return StepShare(whole_ns - execute_ns, own_ns, forward_ns - own_ns, sample_ns)


def has_others_prefill(record: StepRecord, row: int) -> bool:
    """Some other row has more than one token; a row of one token costs what a decode costs, whatever it is."""
    num_rows = len(record.nums)
    return sum(record.nums) - record.nums[row] > num_rows - 1


def own_forward_ns(record: StepRecord, row: int, forward_ns: int) -> int:
    """What the step's forward pass, which took `forward_ns`, would have taken without other requests' prefill rows.

    That is as much of it as the prediction without them is of the whole prediction, and at least the prediction without
    them: a step that was slow for all its rows is not all blamed on the prompts, nor is one on a few prompt tokens
    because a model that has seen few of them, beside many steps of decoding, takes them for slow. Where nothing is
    known of step times yet, tokens count instead.

    Example, 1 ms a step and 0.1 ms a token: in a step of 8 decodes and a chunk of 42 tokens a decoding request's own
    share is (1 + 0.8) / (1 + 5) = 0.3: of 9 ms, 2.7; of 4 ms, the 1.8 that it takes without the chunk.
    """
    tokens = context = all_pairs = own_pairs = others_tokens = others_rows = 0
    for i, (start, n) in enumerate(zip(record.starts, record.nums, strict=True)):
        tokens += n
        if n == 1:
            context += start + 1
            continue
        pairs = num_pairs(start, n)
        all_pairs += pairs
        if i == row:
            own_pairs = pairs
        else:
            others_tokens += n
            others_rows += 1
    num_rows = len(record.nums)
    model = record.step_times
    whole_ns = model.execute_ns(StepFeatures(tokens, context, all_pairs, num_rows))
    if whole_ns <= 0:
        return forward_ns * (tokens - others_tokens) // tokens
    own_ns = model.execute_ns(StepFeatures(tokens - others_tokens, context, own_pairs, num_rows - others_rows))
    return max(int(own_ns), int(forward_ns * (own_ns / whole_ns)))
